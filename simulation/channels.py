"""The channels that the network is trained on, from physical fields.

Fields are float32; `density` is in units of the mean, [x, y, z]; `velocity` is peculiar, in km/s, [3, x, y, z], and
component i points along spatial axis i.
"""

import functools
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter

from simulation.fourier import in_order
from utils.config.channels import known_channels
from utils.volumes.attributes import DENSITY_FLOOR, FLOOR

FILL_LENGTH = 2.0  # cells, distance over which velocities are extended into empty cells
FILL_WEIGHT = 1e-3  # weight of the extended velocity, relative to the density of the cell in units of the mean

# The channels lie roughly in [-1, 1]. They are not clipped, so that the physical values can be recovered.
TRANSFORM = {
    "density_log_scale": 14.0,
    "velocity_scale_km_s": 1000.0,
    "temperature_log10_center": 5.0,
    "temperature_log10_scale": 2.5,
}

# Constants of the transforms as HDF5 attributes; the names contain the units.
ATTRIBUTES: dict[str, Any] = {
    "velocity_fill_length_cells": FILL_LENGTH,
    "velocity_fill_weight": FILL_WEIGHT,
    FLOOR: DENSITY_FLOOR,
}
CHANNELS = known_channels("inputs", 4, TRANSFORM), known_channels("targets", 5, TRANSFORM)


def mass_weighted_velocity(density: np.ndarray, momentum: np.ndarray, threads: int = 1) -> np.ndarray:
    """Momentum / density, continued smoothly from the neighborhood into empty cells.

    v = (p + w <p>) / (rho + w <rho>) with < > a Gaussian of FILL_LENGTH cells and w = FILL_WEIGHT: the velocity of a
    cell with matter changes by about w / rho, an empty cell gets that of its neighbors (normalized convolution,
    Knutsson & Westin 1993). Overwrites and returns `momentum`. The number of threads does not change the result.
    """
    # In real space, where the weights are positive; each field by one thread.
    smoothed = functools.partial(gaussian_filter, sigma=FILL_LENGTH, mode="wrap", output=np.float32)
    around = in_order(smoothed, (density, *momentum), threads)
    weight = np.float32(FILL_WEIGHT)
    # The lower bound matters only in voids wider than the Gaussian, where the velocity becomes zero.
    total = np.maximum(density + weight * next(around), np.float32(1e-12))
    for component, neighbors in zip(momentum, around, strict=True):
        component += weight * neighbors
        component /= total
    return momentum


def to_channels(fields: np.ndarray) -> np.ndarray:
    """Physical fields [4 or 5, x, y, z] (density, velocity, and for gas temperature) to channels, in place.

    Not `Channel.from_physical`, whose rounding differs: boxes of the same seed keep their bits.
    """
    density_scale, velocity_scale, center, temperature_scale = map(np.float32, TRANSFORM.values())
    fields[0] = np.log(np.maximum(fields[0], np.float32(DENSITY_FLOOR))) / density_scale
    fields[1:4] /= velocity_scale
    if len(fields) == 5:
        fields[4] = (np.log10(fields[4]) - center) / temperature_scale
    return fields
