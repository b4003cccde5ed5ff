"""Isotropic power and cross power of fields on a periodic grid of cubic cells, computed on the fields' device.

P(k) = V ⟨|δ_k|²⟩ over a shell's modes, where V is the volume and δ_k the discrete Fourier transform divided by the
number of cells. Its unit is the field's squared times a length cubed. The cells' window function is not corrected.
Ranks transform their own planes along y and z, exchange them, and transform their own columns along x.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.data.slabs import Slabs
from utils.evaluation.results import Spectrum

MODES_AT_ONCE = 2**20  # shell numbers of all modes of a large grid would take as much memory as two fields


class _Modes(NamedTuple):
    """Some columns of this rank in a transform's half space."""

    columns: slice
    k: Tensor  # [x, columns, z / 2 + 1], wavenumber in fundamentals
    shell: Tensor  # [modes], flattened: 0 within half a fundamental, `number` + 1 beyond the last shell


class KShells:
    """Spherical shells, each as wide as the fundamental wavenumber of the longest side.

    Shell m = 1 … `number` is centered on m fundamentals. The last one contains Nyquist's wavenumber π / cell, up to
    which the grid holds waves of every direction (for an odd longest side, the shell before it). The constant, k = 0,
    and waves beyond the last shell are in none. No shell is empty: each contains waves along the longest side.
    """

    def __init__(self, slabs: Slabs, cell: float) -> None:
        """`cell` in the unit of length of k and power. Every rank makes the same calls."""
        self._slabs, shape, device = slabs, slabs.shape, slabs.world.device
        longest = max(shape)
        self.number = longest // 2
        self._volume = math.prod(shape) * cell**3
        x, y, z = (torch.arange(cells, dtype=torch.float64, device=device) for cells in shape)
        x, y = torch.minimum(x, shape[0] - x), torch.minimum(y, shape[1] - y)  # k and −k have the same magnitude
        z = z[: shape[2] // 2 + 1]
        self._squares = [(waves * longest / cells) ** 2 for waves, cells in zip((x, y, z), shape, strict=True)]
        self._squares[1] = self._squares[1][slabs.divide(shape[1])[slabs.world.rank]]
        # A real field's transform is stored for half of k space: all but its boundary planes stand for two modes.
        self._weight = torch.full_like(z, 2.0)
        self._weight[0] = 1.0
        if shape[2] % 2 == 0:
            self._weight[-1] = 1.0
        totals = torch.zeros(2, self.number, dtype=torch.float64, device=device)
        for modes in self._batches():
            totals[0] += self._sum(torch.ones_like(modes.k), modes)
            totals[1] += self._sum(modes.k, modes)
        counts, k = slabs.world.sum(totals).cpu().numpy()
        self._modes: np.ndarray = counts
        self._k: np.ndarray = k / counts * (2 * math.pi / (longest * cell))

    @torch.no_grad()
    def sums(self, fields: list[Tensor]) -> Tensor:
        """Sums over each shell's modes of |p|², |t|² and Re(p t*), [3, number], float64: this rank's part.

        `fields`: prediction and target, real, of each the own planes [n, Y, Z]. Takes them out of the list, so that
        their memory is free after their transform.
        """
        first, second = (self._transform(fields.pop(0)) for _ in range(2))
        sums = torch.zeros(3, self.number, dtype=torch.float64, device=first.device)
        for modes in self._batches():
            p, t = (
                torch.view_as_real(torch.fft.fft(part[:, modes.columns], dim=0, norm="forward")).double()
                for part in (first, second)
            )
            for row, (left, right) in zip(sums, ((p, p), (t, t), (p, t)), strict=True):
                row += self._sum((left * right).sum(-1), modes)
        return sums

    def _transform(self, field: Tensor) -> Tensor:
        """The transform of the own planes along y and z, [X, own columns, Z / 2 + 1]; the field's mean is removed."""
        slabs, shape = self._slabs, self._slabs.shape
        mean = float(slabs.world.sum(field.sum(dtype=torch.float64))) / math.prod(shape)
        pieces = (torch.fft.rfft2(field[slabs.local(part)] - mean, norm="forward") for part in slabs.pieces())
        return slabs.to_columns(pieces, shape[1], shape[2] // 2 + 1, dtype=torch.complex64)

    def spectrum(self, sums: Tensor) -> Spectrum:
        """The spectrum for results of `sums`, added over ranks and, for a vector, over its components."""
        predicted, target, cross = sums.cpu().numpy() * (self._volume / self._modes)
        return Spectrum(k=self._k, modes=self._modes, predicted=predicted, target=target, cross=cross)

    def _batches(self) -> Iterator[_Modes]:
        x, y, z = self._squares
        count = max(1, MODES_AT_ONCE // (len(x) * len(z)))
        for start in range(0, len(y), count):
            some = slice(start, start + count)
            k = (x[:, None, None] + y[some, None] + z).sqrt()
            yield _Modes(some, k, (k + 0.5).clamp(max=self.number + 1).long().flatten())

    def _sum(self, values: Tensor, modes: _Modes) -> Tensor:
        """Sums per shell, [number], in float64. On a GPU the order of additions may differ from call to call.

        Unlike bincount with weights, scatter_add_ has a deterministic algorithm, which `deterministic` selects.
        """
        sums = values.new_zeros(self.number + 2)
        return sums.scatter_add_(0, modes.shell, (values * self._weight).flatten())[1:-1]
