"""Isotropic power and cross power of fields on a periodic grid of cubic cells, computed on the device they are on.

P(k) = V ⟨|δ_k|²⟩ over a shell's modes, where V is the volume and δ_k the discrete Fourier transform over the number of
cells: its unit is the field's squared times a length cubed. Nothing is divided out for the cells' window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.evaluation.results import Spectrum

MODES_AT_ONCE = 2**20  # a shell's number for every mode of a large grid would take as much memory as two fields


class _Modes(NamedTuple):
    """Some planes of a transform's half space, along its first axis."""

    planes: slice
    k: Tensor  # [planes, y, z / 2 + 1], wavenumber in fundamentals
    shell: Tensor  # [modes] of these planes in one row: 0 within half a fundamental, `number` + 1 beyond the last shell


class KShells:
    """Spherical shells, each as wide as the fundamental wave of the longest side.

    Shell m = 1 … `number` is centred on m fundamentals; the last one is the one around Nyquist's wavenumber π / cell,
    within which waves of every direction are on the grid (of an odd longest side, the one before). The constant, k = 0,
    is in none of them, nor are the waves beyond. No shell is empty: the longest side's own waves are in all of them.
    """

    def __init__(self, shape: tuple[int, int, int], cell: float, device: torch.device) -> None:
        """`shape` in cells, `cell` in the unit of length that k and power are to have."""
        longest = max(shape)
        self.number = longest // 2
        self._volume = math.prod(shape) * cell**3
        x, y, z = (torch.arange(cells, dtype=torch.float64, device=device) for cells in shape)
        x, y = torch.minimum(x, shape[0] - x), torch.minimum(y, shape[1] - y)  # both signs of k have the same size
        z = z[: shape[2] // 2 + 1]
        self._squares = [(waves * longest / cells) ** 2 for waves, cells in zip((x, y, z), shape, strict=True)]
        # A real field's transform is stored for half of the space: all but its borders stand for two modes.
        self._weight = torch.full_like(z, 2.0)
        self._weight[0] = 1.0
        if shape[2] % 2 == 0:
            self._weight[-1] = 1.0
        found = torch.zeros(2, self.number, dtype=torch.float64, device=device)
        for modes in self._some_modes():
            found[0] += self._summed(torch.ones_like(modes.k), modes)
            found[1] += self._summed(modes.k, modes)
        counted, k = found.cpu().numpy()
        self._modes: np.ndarray = counted
        self._k: np.ndarray = k / counted * (2 * math.pi / (longest * cell))

    @torch.no_grad()
    def sums(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Over the modes of each shell: Σ|p|², Σ|t|² and Σ Re(p t*) of real fields [X, Y, Z]: [3, number], float64."""
        first, second = (torch.fft.rfftn(field - field.mean(), norm="forward") for field in (predicted, target))
        sums = torch.zeros(3, self.number, dtype=torch.float64, device=predicted.device)
        for modes in self._some_modes():
            p, t = (torch.view_as_real(transform[modes.planes]).double() for transform in (first, second))
            for row, (one, other) in zip(sums, ((p, p), (t, t), (p, t)), strict=True):
                row += self._summed((one * other).sum(-1), modes)
        return sums

    def spectrum(self, sums: Tensor) -> Spectrum:
        """The spectrum of what `sums` returned, or of a sum of such, as for a vector's components."""
        predicted, target, cross = sums.cpu().numpy() * (self._volume / self._modes)
        return Spectrum(k=self._k, modes=self._modes, predicted=predicted, target=target, cross=cross)

    def _some_modes(self) -> Iterator[_Modes]:
        x, y, z = self._squares
        planes = max(1, MODES_AT_ONCE // (len(y) * len(z)))
        for start in range(0, len(x), planes):
            some = slice(start, start + planes)
            k = (x[some, None, None] + y[:, None] + z).sqrt()
            yield _Modes(some, k, (k + 0.5).clamp(max=self.number + 1).long().flatten())

    def _summed(self, values: Tensor, modes: _Modes) -> Tensor:
        """[number]. In double precision; on a GPU the order, and so the last digits, may differ from call to call."""
        return torch.bincount(modes.shell, (values * self._weight).flatten(), minlength=self.number + 2)[1:-1]
