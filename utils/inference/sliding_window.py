"""A network applied to a whole volume, tile by tile, on all ranks; what comes out comes in slabs along x.

Memory holds a tile's thickness of the volume, whatever its length along x. Ranks share out the tiles of a layer, those
that begin at the same plane, and add up what they made of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from utils.distributed.world import World
from utils.inference.window_grid import Piece, WindowGrid, pieces

# Input planes [C, n, Y, Z], float32, from `start` on; they never go beyond the volume's end.
ReadPlanes = Callable[[int, int], np.ndarray]
Predict = Callable[[torch.Tensor], torch.Tensor]


class Slab(NamedTuple):
    """Planes that are done, on every rank: `inputs` [C_in, n, Y, Z] and `predicted` [C_out, n, Y, Z], on the device."""

    number: int
    start: int
    inputs: torch.Tensor
    predicted: torch.Tensor


@dataclass(frozen=True)
class SlidingWindowPredictor:
    """What it takes to go over a volume; `read` may raise UserErrors, which all ranks then fail with."""

    predict: Predict  # [N, C_in, T, T, T] -> [N, C_out, T, T, T], on the world's device
    read: ReadPlanes
    tiling: WindowGrid
    channels: tuple[int, int]  # C_in, C_out
    batch_size: int  # tiles at once on each rank
    world: World

    @property
    def starts(self) -> tuple[int, ...]:
        """The first plane of each slab; with the one behind the last."""
        return (*self.tiling.x.origins, self.tiling.x.size)

    def tiles(self, first: int = 0) -> int:
        """How many this rank predicts for the slabs from number `first` on."""
        return len(self._mine()) * len(layers(self.tiling, first))

    def slabs(self, first: int = 0, advance: Callable[[int], None] = lambda tiles: None) -> Iterator[Slab]:
        """The slabs from number `first` on; every rank calls it.

        `advance` is told of each batch of this rank's tiles that is done. A slab is valid until the next one is asked
        for.
        """
        axis, device = self.tiling.x, self.world.device
        begin, todo = axis.origins[first], layers(self.tiling, first)
        inputs, total = (
            torch.zeros((channels, axis.tile, *self.tiling.shape[1:]), device=device) for channels in self.channels
        )
        known = 0  # planes of `inputs` that are there
        for index, (origin, number) in enumerate(todo):
            with self.world.raise_together():
                self._read(origin + known, inputs[:, known:])
            self.world.watch.at("prediction")  # of ranks that have no tiles, too
            self._add_layer(number, inputs, total, advance)
            is_wanted = origin >= begin
            stop = self.starts[number + 1] if is_wanted else todo[index + 1][0]
            done = stop - origin  # planes that no later layer reaches
            if is_wanted:
                yield Slab(number, origin, inputs[:, :done], self.world.sum(total[:, :done]))
            known = axis.tile - done
            for field in (inputs, total):
                field[:, :known] = field[:, done:].clone()
            total[:, known:] = 0

    def _mine(self) -> list[tuple[int, int]]:
        return self.tiling.layer()[self.world.rank :: self.world.size]

    def _read(self, start: int, out: torch.Tensor) -> None:
        """Planes from `start` on, around the end if they must, into `out` [C, n, Y, Z]."""
        for there, here in pieces(start, out.shape[1], self.tiling.x.size):
            planes = np.array(self.read(here.start, here.stop))
            out[:, there] = torch.from_numpy(planes).to(out.device)

    def _add_layer(
        self, number: int, inputs: torch.Tensor, total: torch.Tensor, advance: Callable[[int], None]
    ) -> None:
        """This rank's tiles of layer `number`, weighed, onto `total` [C_out, T, Y, Z]."""
        axes = (self.tiling.x, self.tiling.y, self.tiling.z)
        along_x, along_y, along_z = (torch.from_numpy(axis.windows).to(total.device) for axis in axes)
        side, mine = self.tiling.x.tile, self._mine()
        for begin in range(0, len(mine), self.batch_size):
            batch = mine[begin : begin + self.batch_size]
            self.world.watch.at("prediction")
            tiles = torch.empty((len(batch), len(inputs), side, side, side), device=inputs.device)
            for tile, place in zip(tiles, batch, strict=True):
                for y, z in self._pieces(*place):
                    tile[:, :, y.tile, z.tile] = inputs[:, :, y.volume, z.volume]
            for made, place in zip(self.predict(tiles).float(), batch, strict=True):
                share = along_y[place[0]].view(-1, 1) * along_z[place[1]]  # [T, T]
                weighed = made * (along_x[number].view(-1, 1, 1) * share)
                for y, z in self._pieces(*place):
                    total[:, :, y.volume, z.volume] += weighed[:, :, y.tile, z.tile]
            advance(len(batch))

    def _pieces(self, y: int, z: int) -> Iterator[tuple[Piece, Piece]]:
        """The straight pieces of a tile across its layer."""
        along_y, along_z = (
            pieces(axis.origins[number], axis.tile, axis.size)
            for axis, number in ((self.tiling.y, y), (self.tiling.z, z))
        )
        return itertools.product(along_y, along_z)


def layers(tiling: WindowGrid, first: int = 0) -> list[tuple[int, int]]:
    """The layers of tiles that slabs from number `first` on are made of, in order: first plane, and number.

    Those that begin before that slab and reach into it come first, for its sake alone; from behind the end, where the
    volume is periodic, with negative planes.
    """
    axis = tiling.x
    begin = axis.origins[first]
    wraps = any(origin + axis.tile > axis.size for origin in axis.origins)
    before = [(origin - axis.size, number) for number, origin in enumerate(axis.origins)] if wraps else []
    before += [(origin, number) for number, origin in enumerate(axis.origins[:first])]
    reaching = [(origin, number) for origin, number in before if origin > begin - axis.tile]
    return reaching + [(axis.origins[number], number) for number in range(first, len(axis.origins))]
