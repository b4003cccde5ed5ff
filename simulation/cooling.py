"""Heating and cooling of photo-ionized primordial gas, tabulated once per step of the simulation.

Hydrogen and helium are in ionization equilibrium with a uniform ultraviolet background. Collision rates are those of
Katz, Weinberg & Hernquist 1996, ApJS 105, 19. The background lights up at REIONIZATION. It ionizes He II only in a
fraction of the volume, which rises as the second reionization of helium proceeds. There are no metals, no molecules,
and no shielding of dense gas. Units of the equilibrium are cgs; quantities are per hydrogen nucleus.

A step solves d ln(theta) / d ln(a) = f at constant comoving density, with theta = T / mu in K: the internal energy per
mass is 3/2 k theta / m_H. f is computed at nodes of temperature and interpolated linearly between them. That equation
has an exact solution, however fast the gas cools, so stability needs no substeps. They only follow the change of the
background and of the mean density with time. The second ionization of helium leaves the same heat per nucleus in all
gas. Hydrogen's reionization heats the gas at once. Densities are in units of the mean.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from colossus.cosmology import cosmology as colossus
from torch import Tensor
from torch.nn import functional

from simulation.fourier import one_thread
from utils.constants import BOLTZMANN_J_PER_K, HYDROGEN_ATOM_KG, HYDROGEN_FRACTION, MEGAPARSEC_M

BOLTZMANN = BOLTZMANN_J_PER_K * 1e7
ELECTRONVOLT = 1.602176634e-12
HELIUM = (1 - HYDROGEN_FRACTION) / (4 * HYDROGEN_FRACTION)  # nuclei per hydrogen nucleus
REIONIZATION = 7.5  # redshift; before it collisions alone ionize
HELIUM_REDSHIFTS = 3.8, 2.8  # the fraction with He III rises from 0 to 1, linearly in redshift
IONIZATION_ENERGIES = 13.598, 24.587, 54.418  # eV of H I, He I, He II
BACKGROUND_TEMPERATURE = 2.7255  # K, of the microwave background today
TINY = 1e-60
ITERATIONS = 8

# Faucher-Giguère 2020, MNRAS 493, 1614, optically thin rates of H I, He I and He II: 1 + z; photo-ionization in 1/s;
# photo-heating in erg/s. Thinned; rates are interpolated linearly in their logarithm over ln(1 + z).
BACKGROUND = np.array((
    (1.00, 3.620e-14, 1.191e-14, 2.842e-16, 2.027e-25, 1.270e-25, 8.775e-27),
    (1.12, 6.276e-14, 2.348e-14, 4.825e-16, 3.643e-25, 2.422e-25, 1.428e-26),
    (1.26, 1.092e-13, 4.597e-14, 8.462e-16, 6.526e-25, 4.714e-25, 2.397e-26),
    (1.42, 1.880e-13, 8.622e-14, 1.496e-15, 1.145e-24, 9.004e-25, 4.058e-26),
    (1.58, 2.962e-13, 1.433e-13, 2.443e-15, 1.827e-24, 1.538e-24, 6.386e-26),
    (1.78, 4.687e-13, 2.360e-13, 4.023e-15, 2.913e-24, 2.610e-24, 1.012e-25),
    (2.00, 6.821e-13, 3.521e-13, 6.006e-15, 4.261e-24, 3.995e-24, 1.463e-25),
    (2.24, 8.942e-13, 4.702e-13, 7.921e-15, 5.621e-24, 5.443e-24, 1.873e-25),
    (2.38, 9.911e-13, 5.260e-13, 8.673e-15, 6.261e-24, 6.142e-24, 2.020e-25),
    (2.52, 1.063e-12, 5.704e-13, 9.032e-15, 6.736e-24, 6.693e-24, 2.078e-25),
    (2.82, 1.140e-12, 6.240e-13, 9.086e-15, 7.286e-24, 7.416e-24, 1.969e-25),
    (3.00, 1.136e-12, 6.306e-13, 8.589e-15, 7.319e-24, 7.520e-24, 1.797e-25),
    (3.16, 1.115e-12, 6.301e-13, 7.715e-15, 7.224e-24, 7.467e-24, 1.589e-25),
    (3.36, 1.076e-12, 6.141e-13, 6.484e-15, 7.004e-24, 7.248e-24, 1.306e-25),
    (3.56, 1.031e-12, 5.936e-13, 5.259e-15, 6.739e-24, 6.942e-24, 1.028e-25),
    (3.78, 9.724e-13, 5.670e-13, 4.012e-15, 6.387e-24, 6.549e-24, 7.553e-26),
    (4.00, 9.146e-13, 5.371e-13, 2.957e-15, 6.027e-24, 6.112e-24, 5.337e-26),
    (4.24, 8.465e-13, 5.028e-13, 2.027e-15, 5.606e-24, 5.636e-24, 3.484e-26),
    (4.50, 7.812e-13, 4.684e-13, 1.287e-15, 5.186e-24, 5.159e-24, 2.099e-26),
    (5.00, 6.701e-13, 4.094e-13, 5.143e-16, 4.464e-24, 4.392e-24, 7.507e-27),
    (5.60, 5.579e-13, 3.478e-13, 2.068e-16, 3.718e-24, 3.704e-24, 2.441e-27),
    (6.30, 4.503e-13, 2.942e-13, 1.133e-16, 3.033e-24, 3.165e-24, 9.502e-28),
    (7.06, 3.480e-13, 2.407e-13, 8.633e-17, 2.388e-24, 2.663e-24, 5.402e-28),
    (7.94, 2.428e-13, 1.808e-13, 7.531e-17, 1.708e-24, 2.078e-24, 4.063e-28),
    (8.24, 2.141e-13, 1.623e-13, 7.448e-17, 1.513e-24, 1.882e-24, 3.939e-28),
    (8.52, 1.827e-13, 1.374e-13, 7.849e-17, 1.285e-24, 1.612e-24, 4.146e-28),
))  # fmt: skip

MEGAPARSEC = MEGAPARSEC_M / 1e3  # km
SOLAR_DENSITY = 6.7679e-32  # g/cm³ of one solar mass per kpc³
NEUTRAL_WEIGHT = 4 / (1 + 3 * HYDROGEN_FRACTION)  # mu of neutral gas
REIONIZATION_TEMPERATURE = 2e4  # K, the least that hydrogen's reionization leaves
# eV per helium nucleus that is ionized for the second time. Like HELIUM_REDSHIFTS, chosen so that gas at the mean
# density has the temperatures of Gaikwad et al. 2021, MNRAS 506, 4389, within about their errors at 2 <= z <= 3.8.
HELIUM_HEAT = 32.0

# The table's axes, ln of density and of theta in K; and nodes in ln T, closer where the cooling rate is steep.
DENSITIES = torch.linspace(math.log(1e-3), math.log(1e5), 63, dtype=torch.float64)
THETAS = torch.linspace(math.log(1e-2), math.log(1e9), 255, dtype=torch.float64)
TEMPERATURES = torch.from_numpy(np.log(np.concatenate([
    np.geomspace(4e-3, 4e3, 95, endpoint=False),
    np.geomspace(4e3, 4e5, 115, endpoint=False),
    np.geomspace(4e5, 2e9, 60),
])))  # fmt: skip
LONGEST_SUBSTEP = 0.01  # in ln a
NEUTRAL_SUBSTEP = 0.04  # before reionization, when little gas is hot enough to cool
NEVER = 10.0  # in ln a, longer than any step
CELLS_AT_ONCE = 2**15  # fit the cache
# Constants of heating and cooling as HDF5 attributes; the names contain the units.
ATTRIBUTES: dict[str, Any] = {
    "uv_background": "Faucher-Giguere 2020, MNRAS 493, 1614",
    "cooling_rates": "Katz, Weinberg & Hernquist 1996, ApJS 105, 19; ionization equilibrium, no metals",
    "hydrogen_fraction": HYDROGEN_FRACTION,
    "hydrogen_reionization_redshift": REIONIZATION,
    "hydrogen_reionization_temperature_k": REIONIZATION_TEMPERATURE,
    "helium_reionization_redshifts": HELIUM_REDSHIFTS,
    "helium_reionization_heat_ev": HELIUM_HEAT,
}


def helium_ionized(redshift: float) -> float:
    """Fraction of the volume in which the background ionizes He II, prescribed."""
    return float(np.interp(redshift, HELIUM_REDSHIFTS[::-1], (1.0, 0.0)))


def background(redshift: float) -> np.ndarray:
    """Photo-ionization rates in 1/s and photo-heating rates in erg/s of H I, He I and He II, [2, 3]."""
    if redshift > REIONIZATION:
        return np.zeros((2, 3))
    times, rates = np.log(BACKGROUND[:, 0]), np.log(BACKGROUND[:, 1:])
    return np.exp([np.interp(math.log(1 + redshift), times, rate) for rate in rates.T]).reshape(2, 3)


@dataclass(frozen=True)
class CollisionRates:
    """Coefficients at temperatures in K, [temperatures]: reactions in cm³/s, cooling in erg cm³/s."""

    temperature: Tensor
    recombination: Tensor  # of H II, He II, He III, [3, temperatures]
    ionization: Tensor  # of H I, He I, He II, [3, temperatures]
    dielectronic: Tensor  # recombination of He II
    excitation: Tensor  # cooling by H I and He II, [2, temperatures]
    free_free: Tensor  # cooling per squared charge

    @classmethod
    def at(cls, temperature: Tensor) -> "CollisionRates":
        """Fits of tables 1 and 2 of Katz, Weinberg & Hernquist 1996."""
        t = temperature
        hot = 1 + (t / 1e5).sqrt()
        hydrogenic = t**-0.5 * (t / 1e3) ** -0.2 / (1 + (t / 1e6) ** 0.7)
        ionization = (5.85e-11, 157809.1), (2.38e-11, 285335.4), (5.68e-12, 631515.0)
        excitation = 7.5e-19 * torch.exp(-118348 / t), 5.54e-17 * t**-0.397 * torch.exp(-473638 / t)
        return cls(
            temperature=t,
            recombination=torch.stack([8.4e-11 * hydrogenic, 1.5e-10 * t**-0.6353, 3.36e-10 * hydrogenic]),
            ionization=torch.stack([rate * t.sqrt() * torch.exp(-kelvin / t) / hot for rate, kelvin in ionization]),
            dielectronic=1.9e-3 * t**-1.5 * torch.exp(-470000 / t) * (1 + 0.3 * torch.exp(-94000 / t)),
            excitation=torch.stack(excitation) / hot,
            free_free=1.42e-27 * (1.1 + 0.34 * torch.exp(-((5.5 - t.log10()) ** 2) / 3)) * t.sqrt(),
        )


@dataclass(frozen=True)
class Equilibrium:
    """Ions and electrons per hydrogen nucleus at given densities and temperatures, [densities, temperatures]."""

    hydrogen: Tensor  # nuclei per cm³, [densities, 1]
    redshift: float
    rates: CollisionRates
    ions: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # H I, H II, He I, He II, He III
    exposed: Tensor  # He II where the background ionizes it
    electrons: Tensor

    @classmethod
    def of(cls, hydrogen: Tensor, redshift: float, rates: CollisionRates) -> "Equilibrium":
        """Balances recombination and ionization; the electrons of helium are found by iteration."""
        photons, up, down = background(redshift)[0], rates.ionization, rates.recombination
        share, light = helium_ionized(redshift), photons[0] / hydrogen
        second = up[2] / down[2]  # He III / He II outside the volume in which the background ionizes He II
        helium = torch.zeros_like(light)  # electrons of helium
        for _ in range(ITERATIONS):
            # x down (x + helium) = (1 - x) (light + up (x + helium)) with x = H II, solved without cancellation
            a, c = up[0] + down[0], light + up[0] * helium
            b = c - up[0] + down[0] * helium
            root = (b * b + 4 * a * c).sqrt()
            ionized = torch.where(b > 0, 2 * c / (b + root).clamp(min=TINY), (root - b) / (2 * a))
            electrons = ionized + helium
            density = (hydrogen * electrons).clamp(min=TINY)
            first = (photons[1] / density + up[1]) / (down[1] + rates.dielectronic)  # He II / He I
            inner = second + photons[2] / (density * down[2])  # He III / He II inside that volume
            outside = HELIUM * (1 - share) / (1 + first * (1 + second))  # He I
            inside = HELIUM * share / (1 + first * (1 + inner))
            singly, doubly = first * (outside + inside), first * (outside * second + inside * inner)
            helium = singly + 2 * doubly
        ions = 1 - ionized, ionized, outside + inside, singly, doubly
        return cls(hydrogen, redshift, rates, ions, first * inside, ionized + helium)

    def theta_logarithms(self) -> Tensor:
        """ln of theta = T / mu in K."""
        particles = 1 + HELIUM + self.electrons
        return (HYDROGEN_FRACTION * particles * self.rates.temperature).log()

    def energy(self) -> Tensor:
        """Thermal energy in erg."""
        return 1.5 * BOLTZMANN * (1 + HELIUM + self.electrons) * self.rates.temperature

    def heating(self) -> Tensor:
        """Heating by the background minus cooling, in erg/s."""
        neutral, ionized, helium, singly, doubly = self.ions
        rates, t, heats = self.rates, self.rates.temperature, background(self.redshift)[1]
        up, down = rates.ionization, rates.recombination
        cooling = rates.excitation[0] * neutral + rates.excitation[1] * singly
        for ion, rate, energy in zip((neutral, helium, singly), up, IONIZATION_ENERGIES, strict=True):
            cooling = cooling + ELECTRONVOLT * energy * rate * ion
        for ion, rate in zip((ionized, singly, doubly), down, strict=True):
            cooling = cooling + 0.75 * BOLTZMANN * t * rate * ion
        cooling = cooling + 6.526e-11 * rates.dielectronic * singly
        cooling = cooling + rates.free_free * (ionized + singly + 4 * doubly)
        scale = 1 + self.redshift
        compton = 5.62e-36 * scale**4 * (t - BACKGROUND_TEMPERATURE * scale)
        heating = heats[0] * neutral + heats[1] * helium + heats[2] * self.exposed
        return heating - self.electrons * (self.hydrogen * cooling + compton)


@one_thread()
def tabulated(logarithms: Tensor, density: Tensor, theta: Tensor) -> Tensor:
    """The factor at `density` in units of the mean and `theta` in K, float32 of one shape.

    `logarithms` is a table on the grid of DENSITIES and THETAS, [densities, thetas]. The interpolation is bilinear in
    the logarithms. Outside the table the nearest edge is used.
    """
    table = logarithms.to(density.device, torch.float32)[None, None]
    result = torch.empty_like(theta, memory_format=torch.contiguous_format)
    cells = CELLS_AT_ONCE if density.device.type == "cpu" else max(1, density.numel())
    fields = (field.reshape(-1).split(cells) for field in (density, theta, result))
    for densities, thetas, out in zip(*fields, strict=True):
        grid = out.new_empty(1, 1, len(out), 2)
        for column, values, axis in ((0, thetas, THETAS), (1, densities, DENSITIES)):
            place = grid[0, 0, :, column]
            torch.log(values, out=place)
            middle, half = float(axis[0] + axis[-1]) / 2, float(axis[-1] - axis[0]) / 2
            place.sub_(middle).div_(half)
        sampled = functional.grid_sample(table, grid, padding_mode="border", align_corners=True)
        torch.exp(sampled.view(-1), out=out)
    return result


class PrimordialGas:
    """Temperature of photo-ionized hydrogen and helium in an expanding universe."""

    def __init__(self, cosmology: colossus.Cosmology) -> None:
        self._cosmology = cosmology
        baryons = cosmology.Ob0 * cosmology.rho_c(0.0) * cosmology.h**2 * SOLAR_DENSITY  # g/cm³ today
        nuclei = HYDROGEN_FRACTION * baryons / (HYDROGEN_ATOM_KG * 1e3)  # of hydrogen per cm³, today and on average
        self._hydrogen = nuclei * DENSITIES.exp()[:, None]
        self._rates = CollisionRates.at(TEMPERATURES.exp())

    @one_thread()
    def change(self, start_redshift: float, end_redshift: float, longest_substep: float = LONGEST_SUBSTEP) -> Tensor:
        """Table of ln of the factor of a² theta between two redshifts, at the density and theta of the first."""
        start = THETAS.expand(len(DENSITIES), -1).contiguous()
        end = start
        crossing = [REIONIZATION] if start_redshift > REIONIZATION > end_redshift else []
        for first, last in itertools.pairwise([start_redshift, *crossing, end_redshift]):
            duration = math.log((1 + first) / (1 + last))
            longest = NEUTRAL_SUBSTEP if first > REIONIZATION else longest_substep
            substeps = max(1, math.ceil(duration / longest))
            times = (1 + first) * np.exp(-duration * np.linspace(0, 1, substeps + 1)) - 1
            for before, after in itertools.pairwise(times):
                end = flow(*self._slopes(before, after), end, duration / substeps)
            if first > REIONIZATION >= last:
                least = torch.full((len(DENSITIES), 1), math.log(REIONIZATION_TEMPERATURE), dtype=torch.float64)
                nodes = self._equilibrium(REIONIZATION).theta_logarithms()
                end = torch.maximum(end, interpolate(TEMPERATURES.expand_as(nodes), nodes, least))
        return end - start + 2 * math.log((1 + start_redshift) / (1 + end_redshift))

    @one_thread()
    def temperature(self, density: Tensor, theta: Tensor, redshift: float) -> Tensor:
        """T in K at `density` in units of the mean and `theta` in K; mu is that of ionization equilibrium."""
        nodes = self._equilibrium(redshift).theta_logarithms()
        start = THETAS.expand(len(DENSITIES), -1).contiguous()
        weight = interpolate(nodes, TEMPERATURES.expand_as(nodes), start) - start  # ln mu
        return tabulated(weight, density, theta).mul_(theta)

    def _equilibrium(self, redshift: float) -> Equilibrium:
        return Equilibrium.of(self._hydrogen * (1 + redshift) ** 3, redshift, self._rates)

    def _slopes(self, before: float, after: float) -> tuple[Tensor, Tensor]:
        """ln theta at the nodes, and d ln(theta) / d ln(a) there, between two redshifts close to each other."""
        redshift = math.sqrt((1 + before) * (1 + after)) - 1
        state = self._equilibrium(redshift)
        hubble = float(self._cosmology.Hz(redshift)) / MEGAPARSEC  # 1/s
        ionized = (helium_ionized(after) - helium_ionized(before)) / math.log((1 + before) / (1 + after))
        heat = state.heating() / hubble + ionized * HELIUM * HELIUM_HEAT * ELECTRONVOLT
        return state.theta_logarithms(), heat / state.energy() - 2


def segments(nodes: Tensor, values: Tensor) -> Tensor:
    """Index of the last node of a row that is not above the value; 0 at least, the last but one at most."""
    return (torch.searchsorted(nodes.contiguous(), values.contiguous(), right=True) - 1).clamp(0, nodes.shape[1] - 2)


def interpolate(nodes: Tensor, heights: Tensor, values: Tensor) -> Tensor:
    """Linear interpolation in each row of increasing nodes, continued beyond them."""
    place = segments(nodes, values)
    low, below = nodes.gather(1, place), heights.gather(1, place)
    slope = (heights.gather(1, place + 1) - below) / (nodes.gather(1, place + 1) - low)
    return below + slope * (values - low)


def flow(nodes: Tensor, rates: Tensor, start: Tensor, duration: float) -> Tensor:
    """y after `duration` for dy/ds = f(y), y(0) = `start`, exactly; f is linear between `rates` at `nodes`, by row."""
    upward = _rise(nodes, rates, start, duration)
    downward = -_rise(-nodes.flip(1), -rates.flip(1), -start, duration)
    return upward + downward - start  # one of the two has not moved


def _rise(nodes: Tensor, rates: Tensor, start: Tensor, duration: float) -> Tensor:
    """`flow` where f > 0; the other values of `start` are returned."""
    times = _crossing(nodes.diff(), rates[:, :-1], rates[:, 1:])
    arrival = functional.pad(times.cumsum(1), (1, 0))
    place = segments(nodes, start)
    rate = interpolate(nodes, rates, start)
    # From the start to the next node, to the last node reached, and from there with the rest of the time.
    remaining = duration - _crossing(nodes.gather(1, place + 1) - start, rate, rates.gather(1, place + 1))
    goal = arrival.gather(1, place + 1) + remaining
    leaves = remaining > 0
    last = torch.where(leaves, segments(arrival, goal), place)
    base = torch.where(leaves, nodes.gather(1, last), start)
    speed = torch.where(leaves, rates.gather(1, last), rate)
    time = torch.where(leaves, goal - arrival.gather(1, last), duration)
    slope = ((rates.diff() / nodes.diff()).gather(1, last) * time).clamp(max=100.0)
    growth = torch.where(slope.abs() < 1e-6, 1 + slope / 2, torch.expm1(slope) / slope)
    return torch.where(rate > 0, base + speed * time * growth, start)


def _crossing(gap: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Time to cross a gap in which the rate changes linearly from `before` to `after`; NEVER if one is not positive."""
    change = after / before - 1
    slowness = torch.where(change.abs() < 1e-6, 1 - change / 2, torch.log1p(change) / change)
    return torch.where((before > 0) & (after > 0), gap / before * slowness, NEVER).clamp(max=NEVER)
