"""Gas computed from dark matter by a documented closure, and the channels that the network is trained on.

The closure is a deterministic, local (within twelve cells at 0.5 Mpc/h), translation- and rotation-equivariant function
of the dark-matter density and velocity. It replaces a hydrodynamic code: the physics is strongly simplified, but the
learning task is a real one. Fields are float32; `density` is in units of the mean, [x, y, z]; `velocity` is peculiar,
in km/s, [3, x, y, z], and component i points along spatial axis i; lengths are comoving Mpc/h.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter

from utils.simulation.fourier import in_order

# The closure. Lengths are standard deviations of Gaussians. Real filtering lengths at z = 2 are near 0.1 Mpc/h (Gnedin
# & Hui 1998); this one is deliberately larger, so that the default cell of 0.5 Mpc/h resolves the smoothing.
FILTER_LENGTH = 0.6  # Mpc/h, pressure smoothing of density and momentum
SHOCK_LENGTH = 1.0  # Mpc/h, distance over which converging flows stop
HEAT_LENGTH = 0.8  # Mpc/h, mixing length of shocked gas
MEAN_DENSITY_TEMPERATURE = 1.2e4  # K, T0 of the photoionized gas
ADIABATIC_INDEX = 1.5  # gamma of the temperature-density relation
MEAN_MOLECULAR_WEIGHT = 0.59  # ionized hydrogen and helium
FILL_LENGTH = 2.0  # cells, distance over which velocities are extended into empty cells
FILL_WEIGHT = 1e-3  # weight of the extended velocity, relative to the density of the cell in units of the mean

# The channels lie roughly in [-1, 1]. They are not clipped, so that the physical values can be recovered.
DENSITY_LOG_SCALE = 14.0  # x = ln(density / mean) / 14
DENSITY_FLOOR = 1e-3  # in units of the mean; the logarithm of an empty cell is undefined
VELOCITY_SCALE = 1000.0  # km/s, x = v / scale
TEMPERATURE_LOG10_CENTER = 5.0  # x = (log10(T / K) - center) / scale
TEMPERATURE_LOG10_SCALE = 2.5

# 3/16 m_p / k_B in K / (km/s)^2: the temperature behind a strong shock is 3/16 mu m_p dv^2 / k_B (Rankine-Hugoniot)
SHOCK_KELVIN = 3.0 / 16.0 * 1.67262e-27 / 1.380649e-23 * 1e6
TRUNCATE = 4.0  # standard deviations at which the Gaussians end


def attributes() -> dict[str, Any]:
    """Constants of the closure and of the transform as HDF5 attributes; the names contain the units."""
    return {
        "gas_filter_length_mpc_h": FILTER_LENGTH,
        "gas_shock_length_mpc_h": SHOCK_LENGTH,
        "gas_heat_length_mpc_h": HEAT_LENGTH,
        "gas_mean_density_temperature_k": MEAN_DENSITY_TEMPERATURE,
        "gas_adiabatic_index": ADIABATIC_INDEX,
        "gas_mean_molecular_weight": MEAN_MOLECULAR_WEIGHT,
        "velocity_fill_length_cells": FILL_LENGTH,
        "velocity_fill_weight": FILL_WEIGHT,
        "density_log_scale": DENSITY_LOG_SCALE,
        "density_floor_of_mean": DENSITY_FLOOR,
        "velocity_scale_km_s": VELOCITY_SCALE,
        "temperature_log10_center": TEMPERATURE_LOG10_CENTER,
        "temperature_log10_scale": TEMPERATURE_LOG10_SCALE,
        "nbody_channels": "rho_DM, v_x, v_y, v_z",
        "hydro_channels": "rho, v_x, v_y, v_z, T",
        "density_transform": "x = ln(max(rho / mean, density_floor_of_mean)) / density_log_scale",
        "velocity_transform": "x = v / velocity_scale_km_s; peculiar velocity; v_i is along array axis 1 + i",
        "temperature_transform": "x = (log10(T / K) - temperature_log10_center) / temperature_log10_scale",
    }


def smooth(fields: Iterable[np.ndarray], length: float, threads: int = 1) -> Iterator[np.ndarray]:
    """Yields each periodic [x, y, z] field, convolved with a Gaussian of standard deviation `length` in cells.

    The convolution is in real space, where the weights are positive. A Fourier-space Gaussian of about one cell rings,
    which makes the gas density near a dense clump negative. Each field is computed by one thread, so the number of
    threads does not change the result.
    """
    blur = functools.partial(gaussian_filter, sigma=length, mode="wrap", truncate=TRUNCATE, output=np.float32)
    return in_order(blur, fields, threads)


def mass_weighted_velocity(density: np.ndarray, momentum: np.ndarray, threads: int = 1) -> np.ndarray:
    """Momentum / density, continued smoothly from the neighborhood into empty cells.

    v = (p + w <p>) / (rho + w <rho>) with < > a Gaussian of FILL_LENGTH cells and w = FILL_WEIGHT: the velocity of a
    cell with matter changes by about w / rho, an empty cell gets that of its neighbors (normalized convolution,
    Knutsson & Westin 1993). Overwrites and returns `momentum`.
    """
    around = smooth((density, *momentum), FILL_LENGTH, threads)
    weight = np.float32(FILL_WEIGHT)
    # The lower bound matters only in voids wider than the Gaussian, where the velocity becomes zero.
    total = np.maximum(density + weight * next(around), np.float32(1e-12))
    for component, neighbors in zip(momentum, around, strict=True):
        component += weight * neighbors
        component /= total
    return momentum


def divergence(velocity: np.ndarray, cell: float) -> np.ndarray:
    """Divergence of a periodic [3, x, y, z] field by central differences; `cell` is the side of a cell."""
    result = np.zeros_like(velocity[0])
    for axis, component in enumerate(velocity):
        result += np.roll(component, -1, axis)
        result -= np.roll(component, 1, axis)
    result /= np.float32(2.0 * cell)
    return result


def shock_temperature(velocity: np.ndarray, cell: float, scale_factor: float, hubble: float) -> np.ndarray:
    """Temperature in K behind the shock of converging flows; zero where space expands.

    The approach velocity is the net contraction over SHOCK_LENGTH, which is the peculiar convergence minus the Hubble
    flow: dv = l max(0, -div v - 3 a H), with v peculiar in km/s, l comoving in Mpc/h and H in km/s/(Mpc/h).
    """
    approach = divergence(velocity, cell)
    np.negative(approach, out=approach)
    approach -= np.float32(3.0 * scale_factor * hubble)
    np.maximum(approach, 0.0, out=approach)
    approach *= np.float32(SHOCK_LENGTH)
    np.square(approach, out=approach)
    approach *= np.float32(SHOCK_KELVIN * MEAN_MOLECULAR_WEIGHT)
    return approach


def gas_fields(
    density: np.ndarray, velocity: np.ndarray, cell: float, scale_factor: float, hubble: float, threads: int = 1
) -> np.ndarray:
    """Gas density, velocity and temperature, [5, x, y, z], from dark-matter density and velocity.

    - density: pressure smooths the gas below a filtering scale (Gnedin & Hui 1998), here a Gaussian;
    - velocity: smoothed momentum over smoothed density, so that mass and momentum are conserved;
    - temperature: T0 Delta^(gamma - 1) of photoionized gas (Hui & Gnedin 1997), plus the shock heat averaged over the
      mass of the neighborhood.

    `cell` in Mpc/h, `hubble` = H(a) in km/s/(Mpc/h).
    """
    gas = np.empty((5, *density.shape), np.float32)
    momenta = (density * component for component in velocity)
    smoothed = smooth((field for fields in ((density,), momenta) for field in fields), FILTER_LENGTH / cell, threads)
    # A box with fewer particles than cells may have voids that remain empty after the smoothing.
    gas[0] = np.maximum(next(smoothed), np.float32(DENSITY_FLOOR))
    for axis, momentum in enumerate(smoothed):
        np.divide(momentum, gas[0], out=gas[1 + axis])
    # Dark-matter streams cross where the gas is stopped. Their convergence is that of the gas before the shock; the
    # convergence of the smoothed gas is not.
    heat = shock_temperature(velocity, cell, scale_factor, hubble)
    heat *= gas[0]
    mixed_heat, mixed_mass = smooth((heat, gas[0]), HEAT_LENGTH / cell, threads)
    np.divide(mixed_heat, mixed_mass, out=mixed_heat)
    np.power(gas[0], np.float32(ADIABATIC_INDEX - 1.0), out=gas[4])
    gas[4] *= np.float32(MEAN_DENSITY_TEMPERATURE)
    gas[4] += mixed_heat
    return gas


def to_channels(fields: np.ndarray) -> np.ndarray:
    """Physical fields [4 or 5, x, y, z] (density, velocity, and for gas temperature) to channels, in place."""
    fields[0] = np.log(np.maximum(fields[0], np.float32(DENSITY_FLOOR))) / np.float32(DENSITY_LOG_SCALE)
    fields[1:4] /= np.float32(VELOCITY_SCALE)
    if len(fields) == 5:
        logarithm = np.log10(fields[4])
        fields[4] = (logarithm - np.float32(TEMPERATURE_LOG10_CENTER)) / np.float32(TEMPERATURE_LOG10_SCALE)
    return fields
