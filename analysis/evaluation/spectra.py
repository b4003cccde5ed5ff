"""Isotropic power and cross power of fields on a periodic grid of cubic cells, computed on the fields' device.

P(k) = V ⟨|δ_k|²⟩ over a shell's modes, where V is the volume and δ_k the discrete Fourier transform divided by the
number of cells. Its unit is the field's squared times a length cubed. The cells' window function is not corrected.
"""

import math

import torch
from torch import Tensor

from analysis.evaluation.results import Spectrum
from analysis.modes import Columns, Modes
from analysis.slabs import Slabs


class KShells:
    """Spherical shells, each as wide as the fundamental wavenumber of the longest side.

    Shell m = 1 … `number` is centered on m fundamentals. The last one contains Nyquist's wavenumber π / cell, up to
    which the grid holds waves of every direction (for an odd longest side, the shell before it). The constant, k = 0,
    and waves beyond the last shell are in none. No shell is empty: each contains waves along the longest side.
    """

    def __init__(self, slabs: Slabs, cell: float) -> None:
        """`cell` in the unit of length of k and power. Every rank makes the same calls."""
        self._grid, longest = Modes(slabs), max(slabs.shape)
        self.number = longest // 2
        self._volume = math.prod(slabs.shape) * cell**3
        totals = torch.zeros(2, self.number, dtype=torch.float64, device=slabs.world.device)
        for columns in self._grid.batches():
            totals[0] += self._sum(torch.ones_like(columns.k), columns)
            totals[1] += self._sum(columns.k, columns)
        self._modes, k = slabs.world.sum(totals).cpu().numpy()
        self._k = k / self._modes * (2 * math.pi / (longest * cell))

    @torch.no_grad()
    def sums(self, fields: list[Tensor]) -> Tensor:
        """Sums over each shell's modes of |p|², |t|² and Re(p t*), [3, number], float64: this rank's part.

        `fields`: prediction and target, real, of each the own planes [n, Y, Z]. Takes them out of the list, so that
        their memory is free after their transform.
        """
        transformed = [self._grid.transform(fields.pop(0)) for _ in range(2)]
        sums = torch.zeros(3, self.number, dtype=torch.float64, device=transformed[0].device)
        for columns in self._grid.batches():
            p, t = (self._grid.amplitudes(field, columns) for field in transformed)
            for row, (left, right) in zip(sums, ((p, p), (t, t), (p, t)), strict=True):
                row += self._sum((left * right).sum(-1), columns)
        return sums

    def spectrum(self, sums: Tensor) -> Spectrum:
        """The spectrum for results of `sums`, added over ranks and, for a vector, over its components."""
        predicted, target, cross = sums.cpu().numpy() * (self._volume / self._modes)
        return Spectrum(k=self._k, modes=self._modes, predicted=predicted, target=target, cross=cross)

    def _sum(self, values: Tensor, columns: Columns) -> Tensor:
        """Sums per shell, [number]; bin 0 is within half a fundamental, `number` + 1 beyond the last shell."""
        shell = (columns.k + 0.5).clamp(max=self.number + 1).long()
        return self._grid.sum(values, shell, self.number + 2)[1:-1]
