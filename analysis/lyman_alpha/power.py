"""Three-dimensional power of the flux, P3D(k, mu), where mu is the cosine of the angle to the sight-line."""

import math

import numpy as np
import torch
from torch import Tensor

from analysis.modes import Columns, Modes, bin_edges
from analysis.slabs import Slabs

MU_BINS = 4  # of equal width in |mu|, as published measurements have
RATIO = 1.25  # of the edges of a bin of k


class AnisotropicPower:
    """P(k, mu) in bins of both, over volumes whose sight-lines are along x, y or z. Every rank makes the same calls.

    P = V ⟨|δ_k|²⟩ over a bin's modes, V the volume and δ_k the discrete Fourier transform divided by the number of
    cells. Bins of k consist of whole shells of one fundamental, and are NaN where they have no mode.
    """

    def __init__(self, slabs: Slabs, cell: float) -> None:
        """`cell` in the unit of length of k and power."""
        self._grid, self._world, longest = Modes(slabs), slabs.world, max(slabs.shape)
        self._volume = math.prod(slabs.shape) * cell**3
        self._edges = torch.tensor(bin_edges(longest // 2, RATIO), dtype=torch.float64, device=slabs.world.device)
        totals = torch.zeros(2, MU_BINS, len(self._edges) - 1, dtype=torch.float64, device=slabs.world.device)
        for columns in self._grid.batches():
            for axis in range(3):
                totals[0] += self._sum(torch.ones_like(columns.k), columns, axis)
                totals[1] += self._sum(columns.k, columns, axis)
        self.modes, k = self._world.sum(totals).cpu().numpy()  # number of modes of all axes, [MU_BINS, bins]
        with np.errstate(invalid="ignore"):
            self.k = k / self.modes * (2 * math.pi / (longest * cell))  # their mean

    def sums(self, field: Tensor, axis: int) -> Tensor:
        """Sums of |δ|² over the modes of each bin, [MU_BINS, bins], float64: this rank's part.

        `field`: the own planes [n, Y, Z], with sight-lines along `axis`.
        """
        transformed, sums = self._grid.transform(field), self._edges.new_zeros(self.modes.shape)
        for columns in self._grid.batches():
            sums += self._sum(self._grid.amplitudes(transformed, columns).square().sum(-1), columns, axis)
        return sums

    def power(self, sums: Tensor) -> np.ndarray:
        """P [MU_BINS, bins], from the results of `sums`, added over all axes."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self._world.sum(sums).cpu().numpy() / self.modes * self._volume)

    def _sum(self, values: Tensor, columns: Columns, axis: int) -> Tensor:
        mu = (columns.squares[axis] / columns.k.square()).sqrt().nan_to_num_(nan=0.0)  # k = 0 is in no bin
        bins = len(self._edges) + 1  # the first and the last one are outside of the edges
        k_bin = torch.bucketize(columns.k, self._edges, right=True)
        place = (MU_BINS * mu).long().clamp_(max=MU_BINS - 1) * bins + k_bin
        return self._grid.sum(values, place, MU_BINS * bins).view(MU_BINS, bins)[:, 1:-1]
