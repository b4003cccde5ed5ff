"""Volumes divided along x over the ranks, for what needs a whole volume, such as a Fourier transform.

A rank owns consecutive planes and, after an exchange with the others, consecutive columns: a part of [X, Y, Z] along y.
No rank holds a whole field.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.distributed.world import World
from utils.volumes.hdf5 import slab_planes

ReadPlanes = Callable[[slice, slice], Tensor]  # channels, own planes -> [C, n, Y, Z], float32, on the world's device


class SlabFields(NamedTuple):
    """Channel values of a rank's own planes."""

    inputs: ReadPlanes
    predicted: ReadPlanes
    target: ReadPlanes


class Slabs:
    """A volume [X, Y, Z] of which each rank owns n planes. Every rank makes the same calls, except of `reader`."""

    def __init__(self, shape: tuple[int, int, int], world: World) -> None:
        self.shape, self.world = shape, world
        self.shares = self.divide(shape[0])
        self.planes = self.shares[world.rank]
        self.count = _length(self.planes)  # n; 0 on some ranks if there are more ranks than planes

    def divide(self, count: int) -> list[slice]:
        """The part of each rank in `count` planes or columns."""
        ends = [count * rank // self.world.size for rank in range(self.world.size + 1)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def pieces(self) -> Iterator[slice]:
        """The own planes in slices of bounded size, each of which is progress."""
        start = self.planes.start
        for part in slab_planes((self.count, *self.shape[1:])):
            self.world.pulse.advance()
            yield slice(start + part.start, start + part.stop)

    def empty(self, *sizes: int) -> Tensor:
        """Memory for values of the own planes, [*sizes, n, Y, Z]."""
        return torch.empty((*sizes, self.count, *self.shape[1:]), device=self.world.device)

    def local(self, planes: slice) -> slice:
        """The place of some own planes in such a tensor."""
        return slice(planes.start - self.planes.start, planes.stop - self.planes.start)

    def reader(self, read: Callable[[slice, slice], np.ndarray]) -> ReadPlanes:
        """Planes of stored values."""
        return lambda channels, planes: torch.from_numpy(np.array(read(channels, planes))).to(self.world.device)

    def stored(self, values: Tensor) -> ReadPlanes:
        """Planes of values in memory, which `empty` has made."""
        return lambda channels, planes: values[channels, self.local(planes)]

    def to_columns(self, pieces: Iterable[Tensor], *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A field [n, *sizes], given in consecutive pieces, becomes [X, own part of sizes[0], *sizes[1:]].

        The pieces are copied into the message: nothing else of the field's size is needed. If one of them cannot be
        read, all ranks raise the error.
        """
        shares, rest = self.divide(sizes[0]), sizes[1:]
        shapes = [(self.count, _length(part), *rest) for part in shares]
        sent = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=self.world.device)
        parts = [part.view(shape) for part, shape in zip(sent.split([*map(math.prod, shapes)]), shapes, strict=True)]
        done = 0
        with self.world.raise_together():
            for piece in pieces:
                for columns, out in zip(shares, parts, strict=True):
                    out[done : done + len(piece)] = piece[:, columns]
                done += len(piece)
        columns_shape = (_length(shares[self.world.rank]), *rest)
        received = [_length(planes) * math.prod(columns_shape) for planes in self.shares]
        return self.world.exchange(sent, [*map(math.prod, shapes)], received).view(self.shape[0], *columns_shape)

    def to_planes(self, columns: Tensor, count: int) -> Tensor:
        """The opposite: [X, own part of `count`, …] becomes [n, count, …]."""
        rest = columns.shape[2:]
        sent = [_length(planes) * columns[0].numel() for planes in self.shares]
        shapes = [(self.count, _length(part), *rest) for part in self.divide(count)]
        received = self.world.exchange(columns.flatten(), sent, [*map(math.prod, shapes)])
        parts = received.split([*map(math.prod, shapes)])
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim=1)

    def neighbors(self, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """The planes before and behind the own ones in a periodic field, from each rank's first and last plane."""
        owners = [rank for rank, part in enumerate(self.shares) if _length(part)]
        place = owners.index(self.world.rank) if self.count else 0
        before, behind = owners[place - 1], owners[(place + 1) % len(owners)]
        size = first.numel() if self.count else 0  # a rank without planes gives and gets anything of this shape

        def pass_on(plane: Tensor, receiver: int, sender: int) -> Tensor:
            sent, received = ([size * (rank == peer) for rank in range(self.world.size)] for peer in (receiver, sender))
            result = self.world.exchange(plane.flatten()[:size], sent, received)
            return result.view(plane.shape) if size else plane

        return pass_on(last, behind, before), pass_on(first, before, behind)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
