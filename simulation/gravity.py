"""Gravity of dark matter and gas on a periodic mesh. Lengths are in cells. Source: Hockney & Eastwood 1988."""

import torch
from torch import Tensor

from simulation.fourier import backward, forward, in_slabs, inverse_square, multiplied

# A cloud-in-cell deposit, and an interpolation, weakens waves by prod sinc^2(k_i / 2) = 1 - k^2 / 12 + ... The first
# term is corrected; a full division would amplify the noise near Nyquist.
SHARPENING = 1 / 8
NEAR, FAR = 8 / 12, 1 / 12  # weights of the four-point difference


def accelerations(dark: Tensor, gas: Tensor, gas_fraction: float, threads: int = 1) -> tuple[Tensor, Tensor]:
    """g = -grad laplacian^-1 delta for particles, to be interpolated, and for the gas of the cells, [3, n, n, n] each.

    `dark` is the deposited density of the particles, and `gas` the mean density of the cells, in units of their means.
    The potential is computed in Fourier space, its gradient is a four-point difference. Both are antisymmetric under
    exchange of two cells, and what acts on the particles is corrected as what they deposit, so that the total momentum
    is conserved.
    """
    modes = multiplied(forward(dark, threads), lambda *k: sharpened(*k) * (1 - gas_fraction), threads)
    modes.add_(forward(gas, threads), alpha=gas_fraction)
    modes = multiplied(modes, lambda *k: -inverse_square(*k), threads)
    particles = downhill(backward(multiplied(modes, sharpened, threads), threads), threads)
    return particles, downhill(backward(modes, threads), threads)


def sharpened(kx: Tensor, ky: Tensor, kz: Tensor) -> Tensor:
    """The factor that corrects one cloud-in-cell window."""
    return 1 + SHARPENING * (kx * kx + ky * ky + kz * kz)


def downhill(potential: Tensor, threads: int) -> Tensor:
    """-grad of a potential by four-point differences, [3, n, n, n]."""
    n = len(potential)
    field = torch.empty(3, n, n, n, device=potential.device)
    padded = torch.cat((potential[-2:], potential, potential[:2]))

    def work(rows: slice) -> None:
        for axis in range(3):
            if axis == 0:
                steps = [padded[2 + rows.start + step : 2 + rows.stop + step] for step in (1, -1, 2, -2)]
            else:
                steps = [potential[rows].roll(-step, axis) for step in (1, -1, 2, -2)]
            torch.sub(steps[2], steps[3], out=field[axis, rows]).mul_(FAR)
            field[axis, rows].add_(steps[0], alpha=-NEAR).add_(steps[1], alpha=NEAR)

    in_slabs(work, potential, threads)
    return field
