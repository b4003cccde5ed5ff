"""Fourier modes of real fields on a periodic grid of cubic cells, of which each rank owns some planes.

Ranks transform their own planes along y and z, exchange them, and transform their own columns along x. Wavenumbers are
in fundamentals: units of the fundamental wavenumber of the longest side.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from analysis.slabs import Slabs

MODES_AT_ONCE = 2**20  # shell numbers of all modes of a large grid would take as much memory as two fields


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
        self._weight = torch.full_like(z, 2.0)
        self._weight[0] = 1.0
        if shape[2] % 2 == 0:
            self._weight[-1] = 1.0

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
        modes = torch.fft.fft(transformed[:, columns.place], dim=0, norm="forward")
        return torch.view_as_real(modes).double()

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
        x, y = (
            [*range(limit + 1), *range(cells - limit, cells)]
            for limit, cells in zip(limits[:2], shape[:2], strict=True)
        )
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
