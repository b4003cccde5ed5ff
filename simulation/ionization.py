"""Ionization equilibrium of hydrogen and helium in a uniform ultraviolet background, and its heating and cooling.

Collision rates are those of Katz, Weinberg & Hernquist 1996, ApJS 105, 19. The background lights up at REIONIZATION.
It ionizes He II only in a fraction of the volume, which rises as the second reionization of helium proceeds. There are
no metals, no molecules, and no shielding of dense gas. Units are cgs; quantities are per hydrogen nucleus.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from utils.constants import BOLTZMANN_J_PER_K, HYDROGEN_FRACTION

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
