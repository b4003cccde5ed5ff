"""How a volume is cut into overlapping tiles, and in what proportions they are put together again.

A network is at its worst beside the faces of what it is given, where it sees zeros instead of the neighbourhood. So
tiles overlap, and count less towards their faces: along each axis with the square of a sine, which half-overlapping
tiles add up to one with, and which is brought to add up to one where they overlap otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from utils.errors import UserError


@dataclass(frozen=True)
class Axis:
    """Tiles along one axis of `size` cells; those of a periodic one go on behind its end at its beginning."""

    size: int
    tile: int
    origins: tuple[int, ...]
    windows: np.ndarray  # [tiles, tile], float32: a tile's share in each of its cells; in each cell they add up to 1

    def covered(self, number: int) -> np.ndarray:
        """The cells of tile `number`, [tile]."""
        return (self.origins[number] + np.arange(self.tile)) % self.size


class Piece(NamedTuple):
    """Cells of a tile, and where they lie in the volume."""

    tile: slice
    volume: slice


def cut(size: int, tile: int, step: int, periodic: bool = True) -> Axis:
    """Tiles at most `step` cells apart; evenly, so that they are exactly so where `step` divides the size.

    UserError where a tile does not fit.
    """
    if size < tile:
        raise UserError(
            f"the box has {size} cells a side, fewer than a tile's {tile}; give a larger box or smaller tiles"
        )
    if not 1 <= step <= tile:
        raise UserError(f"step {step} does not suit a tile of {tile} cells; give one from 1 to {tile}, best is half")
    if periodic:
        count = -(-size // step)
        origins = tuple(number * size // count for number in range(count))
    else:
        count = -(-(size - tile) // step) + 1
        origins = tuple(number * (size - tile) // max(count - 1, 1) for number in range(count))
    share = np.sin(np.pi * (np.arange(tile) + 0.5) / tile) ** 2  # [tile]
    total = np.zeros(size)
    for origin in origins:
        total[(origin + np.arange(tile)) % size] += share
    windows = np.stack([share / total[(origin + np.arange(tile)) % size] for origin in origins])
    return Axis(size, tile, origins, windows.astype(np.float32))


def pieces(start: int, length: int, size: int) -> Iterator[Piece]:
    """The cells [start, start + length) of a periodic axis, which may wrap around its end, in straight pieces."""
    done = 0
    while done < length:
        place = (start + done) % size
        count = min(length - done, size - place)
        yield Piece(slice(done, done + count), slice(place, place + count))
        done += count


@dataclass(frozen=True)
class WindowGrid:
    """Tiles of a volume: each axis by itself, all combinations of their tiles."""

    x: Axis
    y: Axis
    z: Axis

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.x.size, self.y.size, self.z.size

    @property
    def count(self) -> int:
        return len(self.x.origins) * self.layer_count

    @property
    def layer_count(self) -> int:
        """Tiles that begin at the same plane of x."""
        return len(self.y.origins) * len(self.z.origins)

    def about(self) -> str:
        """In words."""
        steps = {end - start for axis in (self.x, self.y, self.z) for start, end in itertools.pairwise(axis.origins)}
        apart = f", {max(steps)} cells apart" if steps else ""
        return f"{self.count} tiles of {self.x.tile}³{apart}"

    def near_faces(self, cells: int) -> np.ndarray:
        """Which cells lie within so many of the face of some tile that another goes on behind: [X, Y, Z]."""
        near = []
        for axis in (self.x, self.y, self.z):
            periodic = any(origin + axis.tile > axis.size for origin in axis.origins)
            faces = {place for origin in axis.origins for place in (origin, origin + axis.tile)}
            faces = {face % axis.size for face in faces} if periodic else faces - {0, axis.size}
            centre = np.arange(axis.size) + 0.5
            close = np.zeros(axis.size, dtype=bool)
            for face in faces:
                away = np.abs(centre - face)
                close |= np.minimum(away, axis.size - away if periodic else away) < cells
            near.append(close)
        return near[0][:, None, None] | near[1][:, None] | near[2]

    def layer(self) -> list[tuple[int, int]]:
        """Their numbers along y and z."""
        return [(y, z) for y in range(len(self.y.origins)) for z in range(len(self.z.origins))]


def build_window_grid(
    shape: tuple[int, int, int], tile: int, step: int | None = None, periodic: bool = True
) -> WindowGrid:
    """Cubic tiles of `tile` cells a side, at most `step` apart (half a tile); UserError where they do not fit."""
    step = max(tile // 2, 1) if step is None else step
    return WindowGrid(*(cut(size, tile, step, periodic) for size in shape))
