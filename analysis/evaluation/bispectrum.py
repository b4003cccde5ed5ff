"""Equilateral bispectrum of a field: the mean product of three waves of about equal length that form a triangle.

B(k) = V² ⟨Re δ_1 δ_2 δ_3⟩ over the triangles k_1 + k_2 + k_3 = 0 whose sides are in one shell of k, with V and δ as in
spectra.py. The sum over triangles is one over cells: of the cube of the field of the shell's waves (Scoccimarro 2000,
ApJ 544, 597). As few waves are used, a small grid holds that field, and every rank has it as a whole.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from analysis.evaluation.results import Bispectrum
from analysis.modes import Modes, bin_edges
from analysis.slabs import Slabs

LARGEST_K = 32  # fundamentals: the grid has at most 98³ cells
RATIO = 1.7  # of the edges of a shell, so that there are at most seven


@torch.no_grad()
def equilateral_bispectrum(fields: Sequence[Tensor], slabs: Slabs, cell: float) -> Bispectrum:
    """That of prediction and target, of which each rank has its own planes [n, Y, Z]; `cell` in the unit of length.

    Without a triangle in a shell, which happens if the sides of the volume differ, values are NaN there.
    """
    modes, longest = Modes(slabs), max(slabs.shape)
    # Nyquist's waves are not used: k and −k are the same there.
    edges = bin_edges(min((longest - 2) // 2, LARGEST_K), RATIO)
    x, y, z = (int(edges[-1] * cells / longest) for cells in slabs.shape)
    amplitudes = [modes.lowest(modes.transform(field), (x, y, z)) for field in fields]
    waves = [[*range(limit + 1), *range(-limit, 0)] for limit in (x, y)] + [[*range(z + 1)]]
    grids = np.meshgrid(
        *(np.array(some) * (longest / cells) for some, cells in zip(waves, slabs.shape, strict=True)), indexing="ij"
    )
    k = torch.from_numpy(np.sqrt(sum(grid**2 for grid in grids))).to(slabs.world.device)
    sides = [3 * limit + 2 for limit in (x, y, z)]  # the sum of three waves is no wave of this grid, except zero
    places = torch.meshgrid(*(torch.tensor(some, device=k.device) for some in waves), indexing="ij")
    places = (places[0] % sides[0], places[1] % sides[1], places[2])

    def product(values: Tensor) -> float:
        """The sum over ordered triangles of the product of three values."""
        padded = values.new_zeros(sides[0], sides[1], sides[2] // 2 + 1).index_put_(places, values)
        return float(torch.fft.irfftn(padded, s=sides, norm="forward").pow(3).mean())

    rows = np.full((3, len(edges) - 1), math.nan)  # wavenumber, and powers of prediction and target
    for shell, (low, high) in enumerate(itertools.pairwise(edges)):
        inside = ((k > low) & (k < high)).to(torch.complex128)
        triangles = round(product(inside))
        if triangles:
            sums = [product(field * inside) / triangles for field in amplitudes]
            rows[:, shell] = float((k * inside.real).sum() / inside.real.sum()), *sums
    wavenumber, *powers = rows
    volume = math.prod(slabs.shape) * cell**3
    return Bispectrum(2 * math.pi / (longest * cell) * wavenumber, *(volume**2 * power for power in powers))
