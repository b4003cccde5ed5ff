"""Bispectra of a field: mean products of three waves that form a triangle, which is equilateral or squeezed.

B(k) = V² ⟨Re δ_1 δ_2 δ_3⟩ over the triangles k_1 + k_2 + k_3 = 0, with V and δ as in evaluation/spectra.py. The sides
of an equilateral triangle are in one shell of k; a squeezed one has two sides there and one in the first shell. The sum
over triangles is one over cells: of products of the fields of the shells' waves (Scoccimarro 2000, ApJ 544, 597). As
few waves are used, a small grid holds those fields, and every rank has them as a whole.
"""

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from analysis.modes import Modes, bin_edges
from analysis.slabs import Slabs

LARGEST_K = 32  # fundamentals: the grid has at most 98³ cells
RATIO = 1.7  # of the edges of a shell, so that there are at most seven
SHAPES = ("equilateral", "squeezed")


class Bispectra:
    """Measures bispectra in shells of k. Every rank makes the same calls."""

    def __init__(self, slabs: Slabs, cell: float) -> None:
        """`cell` in the unit of length of k and B."""
        self._grid, shape, longest = Modes(slabs), slabs.shape, max(slabs.shape)
        # Nyquist's waves are not used: k and −k are the same there.
        edges = bin_edges(min((longest - 2) // 2, LARGEST_K), RATIO)
        x, y, z = self._limits = [int(edges[-1] * cells / longest) for cells in shape]
        waves = [torch.tensor([*range(limit + 1), *range(-limit, 0)]) for limit in (x, y)] + [torch.arange(z + 1)]
        places = torch.meshgrid(*waves, indexing="ij")
        scaled = [place.double() * (longest / cells) for place, cells in zip(places, shape, strict=True)]
        k = torch.stack([part.square() for part in scaled]).sum(0).sqrt()
        self._sides = [3 * limit + 2 for limit in (x, y, z)]  # the sum of three waves is no wave of this grid but zero
        self._places = places[0] % self._sides[0], places[1] % self._sides[1], places[2]
        self._shells = [((k > low) & (k < high)).double() for low, high in itertools.pairwise(edges)]
        self._volume, triangles = math.prod(shape) * cell**3, self._sums(torch.ones_like(k, dtype=torch.complex128))
        self._triangles = np.where(triangles > 0.5, np.round(triangles), math.nan)  # ordered ones, [2, shells]
        means = np.array([float((k * inside).sum() / inside.sum()) for inside in self._shells])
        self.k = np.where(np.isnan(self._triangles[0]), math.nan, means * 2 * math.pi / (longest * cell))  # [shells]

    def measure(self, field: Tensor) -> np.ndarray:
        """B of the own planes [n, Y, Z] of a field by SHAPES, [2, shells]; NaN in a shell without a triangle.

        The sides of the volume differ if a shell has none.
        """
        modes = self._grid.lowest(self._grid.transform(field), self._limits)
        return self._sums(modes.cpu()) / self._triangles * self._volume**2

    def _sums(self, modes: Tensor) -> np.ndarray:
        """Sums over the triangles of the product of their modes, [2, shells]."""
        fields = [self._field(modes * inside) for inside in self._shells]
        equilateral = [float(field.pow(3).mean()) for field in fields]
        return np.array([equilateral, [float((fields[0] * field * field).mean()) for field in fields]])

    def _field(self, modes: Tensor) -> Tensor:
        x, y, z = self._sides
        padded = modes.new_zeros(x, y, z // 2 + 1).index_put_(self._places, modes)
        return torch.fft.irfftn(padded, s=self._sides, norm="forward")
