"""Heating and cooling of photo-ionized primordial gas, tabulated once per step of the simulation.

A step solves d ln(theta) / d ln(a) = f at constant comoving density, with theta = T / mu in K: the internal energy per
mass is 3/2 k theta / m_H. f is computed at nodes of temperature and interpolated linearly between them. That equation
has an exact solution, however fast the gas cools, so stability needs no substeps. They only follow the change of the
background and of the mean density with time. The second ionization of helium leaves the same heat per nucleus in all
gas. Hydrogen's reionization heats the gas at once. Densities are in units of the mean.
"""

import itertools
import math
from typing import Any

import numpy as np
import torch
from colossus.cosmology import cosmology as colossus
from torch import Tensor
from torch.nn import functional

from simulation import ionization
from simulation.fourier import one_thread
from simulation.ionization import ELECTRONVOLT, HELIUM, REIONIZATION, CollisionRates, Equilibrium, helium_ionized
from utils.constants import HYDROGEN_ATOM_KG, HYDROGEN_FRACTION, MEGAPARSEC_M

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
    "helium_reionization_redshifts": ionization.HELIUM_REDSHIFTS,
    "helium_reionization_heat_ev": HELIUM_HEAT,
}


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
    """y after `duration` for dy/ds = f(y), y(0) = `start`; f is linear between its values `rates` at `nodes`.

    Rows are independent; the solution is exact.
    """
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
