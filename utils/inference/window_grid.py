"""Overlapping windows that cover a volume, and the weights with which their predictions are added.

A network predicts worst next to the faces of its input, where it sees zero padding instead of the neighborhood. So
windows overlap, and their weight falls toward their faces: along each axis with the square of a sine. For windows
that overlap by half these weights add up to one; for other overlaps they are normalized so that they do.
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
    """Windows along one axis of `size` cells; on a periodic axis they may wrap around its end."""

    size: int
    window: int
    origins: tuple[int, ...]
    weights: np.ndarray  # [windows, window], float32: the weight of each window in its cells; they add up to 1 per cell


class Segment(NamedTuple):
    """Cells of a window, and the cells of the volume that they are."""

    window: slice
    volume: slice


def window_axis(size: int, window: int, overlap: int, periodic: bool = True) -> Axis:
    """Windows that overlap by at least `overlap` cells, spaced evenly.

    Raises UserError if a window does not fit.
    """
    if size < window:
        raise UserError(
            f"the box has {size} cells per side, fewer than a window's {window}; give a larger box or smaller windows"
        )
    if not 0 <= overlap < window:
        limit = f"smaller than the window ({window})" if overlap >= window else "at least 0"
        raise UserError(f"overlap {overlap} must be {limit}; {window // 2} is recommended")
    step = window - overlap
    if periodic:
        count = -(-size // step)
        origins = tuple(number * size // count for number in range(count))
    else:
        count = -(-(size - window) // step) + 1
        origins = tuple(number * (size - window) // max(count - 1, 1) for number in range(count))
    shape = np.sin(np.pi * (np.arange(window) + 0.5) / window) ** 2  # [window]
    total = np.zeros(size)
    for origin in origins:
        total[(origin + np.arange(window)) % size] += shape
    weights = np.stack([shape / total[(origin + np.arange(window)) % size] for origin in origins])
    return Axis(size, window, origins, weights.astype(np.float32))


def wrapped_segments(start: int, length: int, size: int) -> Iterator[Segment]:
    """The cells [start, start + length) of a periodic axis, split where they wrap around its end."""
    done = 0
    while done < length:
        place = (start + done) % size
        count = min(length - done, size - place)
        yield Segment(slice(done, done + count), slice(place, place + count))
        done += count


@dataclass(frozen=True)
class WindowGrid:
    """Cubic windows of a volume: all combinations of the windows along its axes."""

    x: Axis
    y: Axis
    z: Axis

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.x.size, self.y.size, self.z.size

    @property
    def count(self) -> int:
        return len(self.x.origins) * len(self.layer())

    def describe(self) -> str:
        """One phrase for logs and reports."""
        steps = {end - start for axis in (self.x, self.y, self.z) for start, end in itertools.pairwise(axis.origins)}
        overlap = f", overlapping by {self.x.window - max(steps)} cells" if steps else ""
        return f"{self.count} windows of {self.x.window}³ cells{overlap}"

    def layer(self) -> list[tuple[int, int]]:
        """The windows that begin at the same plane of x, as numbers along y and z."""
        return [(y, z) for y in range(len(self.y.origins)) for z in range(len(self.z.origins))]


def build_window_grid(
    shape: tuple[int, int, int], window: int, overlap: int | None = None, periodic: bool = True
) -> WindowGrid:
    """Cubic windows that overlap by at least `overlap` cells (None: half a window); UserError if they do not fit."""
    overlap = window - max(window // 2, 1) if overlap is None else overlap
    return WindowGrid(*(window_axis(size, window, overlap, periodic) for size in shape))
