"""Fourier modes, power and bispectra of real fields on a periodic grid of cubic cells: each rank owns some planes.

Ranks transform their own planes along y and z, exchange them, and transform their own columns along x. Wavenumbers are
in fundamentals: units of the fundamental wavenumber of the longest side.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.slabs import Slabs

MODES_AT_ONCE = 2**20  # shell numbers of all modes of a large grid would take as much memory as two fields
LARGEST_TRIANGLE = 32  # fundamentals: the grid of triangles has at most 98³ cells
SHELL_RATIO = 1.7  # of the edges of a shell of triangles, so that there are at most seven


class Columns(NamedTuple):
    """Some columns of this rank in a transform's half space."""

    place: slice
    squares: tuple[Tensor, ...]  # squares of the wavenumbers along x, y and z, [x, 1, 1], [columns, 1] and [z / 2 + 1]
    k: Tensor  # [x, columns, z / 2 + 1]


class Modes:
    """The modes of a grid. Every rank makes the same calls."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs, shape, device = slabs, slabs.shape, slabs.world.device
        longest = max(shape)
        x, y, z = (torch.arange(cells, dtype=torch.float64, device=device) for cells in shape)
        x, y = torch.minimum(x, shape[0] - x), torch.minimum(y, shape[1] - y)  # k and −k have the same magnitude
        z = z[: shape[2] // 2 + 1]
        self._own = slabs.divide(shape[1])[slabs.world.rank]
        squares = [(waves * longest / cells) ** 2 for waves, cells in zip((x, y, z), shape, strict=True)]
        self._squares = squares[0][:, None, None], squares[1][self._own, None], squares[2]
        # A real field's transform is stored for half of k space: all but its boundary planes stand for two modes.
        self._weight = 1.0 + ((z > 0) & (2 * z < shape[2])).double()

    def transform(self, field: Tensor) -> Tensor:
        """The transform of the own planes along y and z, [X, own columns, Z / 2 + 1]; the field's mean is removed."""
        slabs, shape = self._slabs, self._slabs.shape
        mean = float(slabs.world.sum(field.sum(dtype=torch.float64))) / math.prod(shape)
        pieces = (torch.fft.rfft2(field[slabs.local(part)] - mean, norm="forward") for part in slabs.pieces())
        return slabs.to_columns(pieces, shape[1], shape[2] // 2 + 1, dtype=torch.complex64)

    def filtered(self, field: Tensor, factor: Callable[[Tensor], Tensor]) -> Tensor:
        """The own planes [n, Y, Z] of a field without its mean, each mode times factor(k), with k in fundamentals."""
        transformed, slabs = self.transform(field), self._slabs
        for columns in self.batches():
            modes = torch.fft.fft(transformed[:, columns.place], dim=0) * factor(columns.k).float()
            transformed[:, columns.place] = torch.fft.ifft(modes, dim=0)
        return torch.fft.irfft2(slabs.to_planes(transformed, slabs.shape[1]), s=slabs.shape[1:], norm="forward")

    def batches(self) -> Iterator[Columns]:
        """All own columns in parts of bounded size."""
        x, y, z = self._squares
        count = max(1, MODES_AT_ONCE // (len(x) * len(z)))
        for start in range(0, len(y), count):
            some = slice(start, start + count)
            self._slabs.world.pulse.advance()
            yield Columns(some, (x, y[some], z), (x + y[some] + z).sqrt())

    def amplitudes(self, transformed: Tensor, columns: Columns) -> Tensor:
        """Real and imaginary parts of the modes in some columns, [x, columns, z / 2 + 1, 2], float64."""
        return torch.view_as_real(torch.fft.fft(transformed[:, columns.place], dim=0, norm="forward")).double()

    def sum(self, values: Tensor, bins: Tensor, number: int) -> Tensor:
        """Sums of some columns' values per bin 0 … `number` − 1, both halves of k space counted, in float64.

        On a GPU the order of additions may differ from call to call. Unlike bincount with weights, scatter_add_ has a
        deterministic algorithm, which `deterministic` selects.
        """
        return values.new_zeros(number).scatter_add_(0, bins.flatten(), (values * self._weight).flatten())

    def lowest(self, transformed: Tensor, limits: Sequence[int]) -> Tensor:
        """All ranks' modes with up to `limits` waves along each axis, less than half of the cells; complex128.

        The shape is [2 limit + 1, 2 limit + 1, limit + 1], in the order 0, 1, …, limit, −limit, …, −1 along x and y.
        """
        shape = self._slabs.shape
        pairs = zip(limits[:2], shape[:2], strict=True)
        x, y = ([*range(limit + 1), *range(cells - limit, cells)] for limit, cells in pairs)
        modes = torch.zeros((len(x), len(y), limits[2] + 1, 2), dtype=torch.float64, device=transformed.device)
        for place, column in enumerate(y):
            if self._own.start <= column < self._own.stop:
                part = transformed[:, column - self._own.start, : limits[2] + 1]
                modes[:, place] = torch.view_as_real(torch.fft.fft(part, dim=0, norm="forward")[x])
        return torch.view_as_complex(self._slabs.world.sum(modes))


def bin_edges(number: int, ratio: float) -> list[float]:
    """Edges of bins of k in fundamentals, from 0.5 to `number` + 0.5: one wide at first, later at most `ratio`."""
    edges = [0.5]
    while edges[-1] < number:
        next_edge = max(edges[-1] + 1, math.floor(edges[-1] * ratio) + 0.5)
        edges.append(min(next_edge, number + 0.5))
    return edges


class PowerBins:
    """Power of fields in bins of k and of |mu|, the cosine of the angle to an axis. Every rank makes the same calls.

    P = V ⟨|δ_k|²⟩ over a bin's modes, where V is the volume and δ_k the discrete Fourier transform divided by the
    number of cells. Its unit is the field's squared times a length cubed. The cells' window function is not corrected.

    Bins of k consist of spherical shells, each as wide as the fundamental wavenumber of the longest side. Shell
    m = 1 … is centered on m fundamentals. The last one contains Nyquist's wavenumber π / cell, up to which the grid
    holds waves of every direction (for an odd longest side, the shell before it). The constant, k = 0, and waves beyond
    the last shell are in none. No shell is empty: each contains waves along the longest side.
    """

    def __init__(self, slabs: Slabs, cell: float, ratio: float = 1.0, mu_bins: int = 1) -> None:
        """`cell` in the unit of length of k and power; `ratio`: see bin_edges. Several `mu_bins`: to all three axes."""
        self._grid, self._mu_bins, longest = Modes(slabs), mu_bins, max(slabs.shape)
        self._edges = torch.tensor(bin_edges(longest // 2, ratio), dtype=torch.float64, device=slabs.world.device)
        self.volume = math.prod(slabs.shape) * cell**3
        totals = self._edges.new_zeros(3, mu_bins, len(self._edges) - 1)
        for columns in self._grid.batches():
            for axis in range(3 if mu_bins > 1 else 1):
                square = columns.squares[axis] / columns.k.square()  # of mu
                self._add(totals, (torch.ones_like(columns.k), columns.k, square), columns, axis)
        # [mu bins, bins of k]: the number of modes, both halves of the transform counted, and the means of k and mu²
        self.modes, k, square = slabs.world.sum(totals).cpu().numpy()
        with np.errstate(invalid="ignore"):  # NaN without a mode
            self.k, self.mu_square = k / self.modes * (2 * math.pi / (longest * cell)), square / self.modes

    @torch.no_grad()
    def sums(self, fields: list[Tensor], axis: int = 0) -> Tensor:
        """Sums of |p|² over each bin's modes, and of |t|² and Re(p t*) if there are two fields: this rank's part.

        With several bins of mu a last row has the sums of 5 (3 mu² − 1) / 2 |p|², which give the quadrupole.
        `fields`: p and t, real, of each the own planes [n, Y, Z]. Takes them out of the list, so that their memory is
        free after their transform. -> [1 to 4, mu bins, bins of k], float64
        """
        transformed = [self._grid.transform(fields.pop(0)) for _ in range(len(fields))]
        products = 2 * len(transformed) - 1
        sums = self._edges.new_zeros(products + (self._mu_bins > 1), *self.modes.shape)
        for columns in self._grid.batches():
            parts = [self._grid.amplitudes(field, columns) for field in transformed]
            pairs = [*zip(parts, parts, strict=True), (parts[0], parts[-1])][:products]
            values = [(left * right).sum(-1) for left, right in pairs]
            if self._mu_bins > 1:
                values.append((7.5 * columns.squares[axis] / columns.k.square() - 2.5) * values[0])
            self._add(sums, values, columns, axis)
        return sums

    def _add(self, sums: Tensor, values: Sequence[Tensor], columns: Columns, axis: int) -> None:
        """Adds values of some columns' modes to the sums over each bin."""
        bins = len(self._edges) + 1  # the first and the last one are outside of the edges
        place = torch.bucketize(columns.k, self._edges, right=True)
        if self._mu_bins > 1:
            mu = (columns.squares[axis] / columns.k.square()).sqrt().nan_to_num_(nan=0.0)  # k = 0 is in no bin
            place += (self._mu_bins * mu).long().clamp_(max=self._mu_bins - 1) * bins
        for row, part in zip(sums, values, strict=True):
            row += self._grid.sum(part, place, self._mu_bins * bins).view(self._mu_bins, bins)[:, 1:-1]


class Bispectra:
    """Measures bispectra in shells of k. Every rank makes the same calls.

    B(k) = V² ⟨Re δ_1 δ_2 δ_3⟩ over the triangles k_1 + k_2 + k_3 = 0, with V and δ as in PowerBins. The sides of an
    equilateral triangle are in one shell of k; a squeezed one has two sides there and one in the first shell. The sum
    over triangles is one over cells: of products of the fields of the shells' waves (Scoccimarro 2000, ApJ 544, 597).
    As few waves are used, a small grid holds those fields, and every rank has them as a whole.
    """

    def __init__(self, slabs: Slabs, cell: float) -> None:
        """`cell` in the unit of length of k and B."""
        self._grid, shape, longest = Modes(slabs), slabs.shape, max(slabs.shape)
        # Nyquist's waves are not used: k and −k are the same there.
        edges = bin_edges(min((longest - 2) // 2, LARGEST_TRIANGLE), SHELL_RATIO)
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
        """B of the own planes [n, Y, Z] of a field, equilateral and squeezed, [2, shells]; NaN without a triangle."""
        modes = self._grid.lowest(self._grid.transform(field), self._limits)
        return self._sums(modes.cpu()) / self._triangles * self._volume**2

    def _sums(self, modes: Tensor) -> np.ndarray:
        """Sums over the triangles of the product of their modes, [2, shells]."""
        x, y, z = self._sides
        padded = (modes.new_zeros(x, y, z // 2 + 1).index_put_(self._places, modes * inside) for inside in self._shells)
        fields = [torch.fft.irfftn(part, s=self._sides, norm="forward") for part in padded]
        equilateral = [float(field.pow(3).mean()) for field in fields]
        return np.array([equilateral, [float((fields[0] * field * field).mean()) for field in fields]])
