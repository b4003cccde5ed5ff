"""Gravity of dark matter and gas on a periodic mesh. Lengths are in cells. Source: Hockney & Eastwood 1988."""

from __future__ import annotations

import numpy as np

from utils.simulation.fourier import backward, forward, in_slabs, inverse_square, multiplied

# A cloud-in-cell deposit, and an interpolation, weakens waves by prod sinc^2(k_i / 2) = 1 - k^2 / 12 + ... The first
# term is corrected; a full division would amplify the noise near Nyquist.
SHARPENING = np.float32(1 / 8)


def accelerations(
    dark: np.ndarray, gas: np.ndarray | None, gas_fraction: float, threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """g = -grad laplacian^-1 delta for particles, to be interpolated, and for the gas of the cells, [3, n, n, n] each.

    `dark` is the deposited density of the particles, and `gas` the mean density of the cells, in units of their means.
    The potential is computed in Fourier space, its gradient is a four-point difference. Both are antisymmetric under
    exchange of two cells, and what acts on the particles is corrected as what they deposit, so that the total momentum
    is conserved.
    """
    n = len(dark)
    modes = multiplied(forward(dark, threads), lambda *k: sharpened(*k) * np.float32(1 - gas_fraction), threads)
    if gas is not None:
        modes += np.float32(gas_fraction) * forward(gas, threads)
    modes = multiplied(modes, lambda *k: -inverse_square(*k), threads)
    for_particles = backward(multiplied(modes, sharpened, threads), n, threads)
    particles = downhill(for_particles, threads)
    del for_particles
    return particles, particles if gas is None else downhill(backward(modes, n, threads), threads)


def sharpened(kx: np.ndarray, ky: np.ndarray, kz: np.ndarray) -> np.ndarray:
    """The factor that corrects one cloud-in-cell window."""
    return 1 + SHARPENING * (kx * kx + ky * ky + kz * kz)


def downhill(potential: np.ndarray, threads: int) -> np.ndarray:
    """-grad of a potential by four-point differences, [3, n, n, n]."""
    n = len(potential)
    field = np.empty((3, n, n, n), np.float32)

    def work(rows: slice) -> None:
        around = potential.take(np.arange(rows.start - 2, rows.stop + 2), axis=0, mode="wrap")
        center = around[2:-2]
        near, far = np.float32(-8 / 12), np.float32(1 / 12)
        for axis in range(3):
            if axis == 0:
                steps = [around[2 + step : len(around) - 2 + step] for step in (1, -1, 2, -2)]
            else:
                steps = [np.roll(center, -step, axis) for step in (1, -1, 2, -2)]
            field[axis, rows] = near * (steps[0] - steps[1]) + far * (steps[2] - steps[3])

    in_slabs(work, n, threads)
    return field
