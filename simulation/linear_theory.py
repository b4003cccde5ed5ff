"""Linear theory of structure growth, from colossus: cosmologies, growth factor, and the clock based on it."""

import math
from typing import Any

import numpy as np
from colossus.cosmology import cosmology as colossus

# Names of colossus cosmologies that define all parameters and have baryons.
COSMOLOGIES = [name for name, values in colossus.cosmologies.items() if name != "powerlaw" and values["Ob0"] > 0]


def make_cosmology(name: str) -> colossus.Cosmology:
    """A colossus cosmology; colossus's disk cache and its global current cosmology are not used."""
    return colossus.Cosmology(name=name, **colossus.cosmologies[name], persistence="")


def growth_rate(cosmology: colossus.Cosmology, redshift: Any) -> Any:
    """f = dlnD / dlna."""
    return -(1 + redshift) / cosmology.growthFactor(redshift) * cosmology.growthFactor(redshift, derivative=1)


def velocity_unit(cosmology: colossus.Cosmology, redshift: float) -> float:
    """Factor from dx/dD, x in comoving Mpc/h, to peculiar velocity in km/s: a dD/dt = a H f D."""
    rate = growth_rate(cosmology, redshift) * cosmology.growthFactor(redshift)
    return float(100.0 * float(cosmology.Ez(redshift)) * rate) / (1 + redshift)  # H in km/s/(Mpc/h)


class GrowthClock:
    """Time as the growth factor D: equal steps in D from the start to the end of a simulation.

    With D as time the equation of motion is dv/dD = -3/2 Omega_m / (f^2 D) (v - g / D), where v = dx/dD and
    g = -grad laplacian^-1 delta. For linear modes v = g / D, so they grow exactly as D for any number of steps (as in
    FastPM: Feng et al. 2016; List & Hahn 2024).
    """

    def __init__(self, cosmology: colossus.Cosmology, start_redshift: float, end_redshift: float, n_steps: int) -> None:
        redshifts = 1 / np.geomspace(1 / (1 + start_redshift), 1 / (1 + end_redshift), 2000) - 1
        self._redshifts = redshifts.clip(end_redshift, start_redshift)
        self._growth = cosmology.growthFactor(self._redshifts)
        friction = 1.5 * cosmology.Om(self._redshifts) / growth_rate(cosmology, self._redshifts) ** 2
        pieces = 0.5 * (friction[1:] + friction[:-1]) * np.diff(np.log(self._growth))
        self._friction = np.concatenate([[0.0], np.cumsum(pieces)])
        self.times = np.linspace(self._growth[0], self._growth[-1], n_steps + 1)
        self._start_rate = velocity_unit(cosmology, start_redshift) / 100 / (1 + start_redshift)

    def redshift(self, time: float) -> float:
        """Redshift at growth factor `time`."""
        return float(np.interp(time, self._growth, self._redshifts))

    def rate(self, time: float) -> float:
        """dD/dtau, with dtau = H0 dt / a^2: super-comoving velocity per dx/dD, both with x in the same unit."""
        # A force-free particle keeps the former velocity, so this follows from the friction of the latter.
        return self._start_rate * math.exp(float(np.interp(time, self._growth, self._friction)))

    def velocity_kept(self, start: float, end: float) -> float:
        """Fraction of its velocity that a force-free particle retains from D = start to D = end."""
        before, after = np.interp([start, end], self._growth, self._friction)
        return math.exp(before - after)
