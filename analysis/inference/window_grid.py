"""Overlapping windows that cover a volume, and the weights with which their predictions are added.

A network predicts worst next to the faces of its input, where it sees zero padding instead of the neighborhood. So
windows overlap, and their weight falls toward their faces: along each axis with the square of a sine. For windows
that overlap by half these weights add up to one; for other overlaps they are normalized so that they do.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from utils.errors import UserError


class Segment(NamedTuple):
    """Cells of a window, and the cells of the volume that they are."""

    window: slice
    volume: slice


@dataclass(frozen=True)
class Axis:
    """Windows along one axis of `size` cells; on a periodic axis they may wrap around its end."""

    size: int
    window: int
    origins: tuple[int, ...]
    weights: np.ndarray  # [windows, window], float32: the weight of each window in its cells; they add up to 1 per cell

    def segments(self, start: int, length: int) -> Iterator[Segment]:
        """The cells [start, start + length), split where they wrap around the end of the axis."""
        done = 0
        while done < length:
            place = (start + done) % self.size
            count = min(length - done, self.size - place)
            yield Segment(slice(done, done + count), slice(place, place + count))
            done += count

    def consecutive(self, numbers: range) -> "AxisPart":
        """Consecutive windows, and all cells in them."""
        start, stop = self.origins[numbers[0]], self.origins[numbers[-1]] + self.window
        return axis_part(self, *((start, stop) if stop - start < self.size else (0, self.size)), numbers)


Box = tuple[slice, slice, slice]  # cells along x, y and z, with start and stop


def window_axis(size: int, window: int, overlap: int, periodic: bool = True) -> Axis:
    """Windows that overlap by at least `overlap` cells, spaced evenly; UserError if one does not fit."""
    if size < window:
        remedy = "give a larger box or a smaller window"
        raise UserError(f"the box has {size} cells per side, fewer than a window's {window}; {remedy}")
    if not 0 <= overlap < window:
        raise UserError(f"overlap {overlap} is not from 0 to {window - 1}; {window // 2} is recommended")
    length = size if periodic else size - window
    steps = -(-length // (window - overlap))
    count = steps if periodic else steps + 1
    origins = tuple(number * length // max(steps, 1) for number in range(count))
    shape = np.sin(np.pi * (np.arange(window) + 0.5) / window) ** 2  # [window]
    places = (np.array(origins)[:, None] + np.arange(window)) % size  # [windows, window]
    total = np.bincount(places.flatten(), np.tile(shape, count), size)
    return Axis(size, window, origins, (shape / total[places]).astype(np.float32))


class PlacedWindow(NamedTuple):
    """A window that touches a part of an axis."""

    number: int
    inputs: Sequence[Segment]  # its cells among those that are read
    outputs: Sequence[Segment]  # its cells in the part


class AxisPart(NamedTuple):
    """The cells [start, stop) of an axis, and the windows that touch them, each once."""

    start: int
    stop: int
    first: int  # the first cell to read; negative if a window begins behind the end of a periodic axis
    length: int  # number of cells to read, at most those of the axis
    windows: Sequence[PlacedWindow]


def axis_part(axis: Axis, start: int, stop: int, numbers: range | None = None) -> AxisPart:
    """The windows (of `numbers`, if given) that touch the cells [start, stop) of an axis, in order."""
    placed: dict[int, list[int]] = {}  # first cells by number, also before the beginning of the axis
    for number in numbers or range(len(axis.origins)):
        for cell in (axis.origins[number] - axis.size, axis.origins[number]):
            if cell < stop and cell + axis.window > start:
                placed.setdefault(number, []).append(cell)
    all_cells = [cell for cells in placed.values() for cell in cells]
    first, length = min(all_cells), max(all_cells) + axis.window - min(all_cells)
    if length >= axis.size:
        first, length = 0, axis.size
    windows = []
    for number, cells in placed.items():
        outputs = []
        for cell in cells:
            begin, end = max(cell, start), min(cell + axis.window, stop)
            outputs.append(Segment(slice(begin - cell, end - cell), slice(begin - start, end - start)))
        windows.append(PlacedWindow(number, tuple(axis.segments(cells[0] - first, axis.window)), outputs))
    return AxisPart(start, stop, first, length, windows)


class WindowGrid(NamedTuple):
    """Cubic windows of a volume: all combinations of the windows along its axes."""

    x: Axis
    y: Axis
    z: Axis

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.x.size, self.y.size, self.z.size

    @property
    def windows(self) -> int:
        return math.prod(len(axis.origins) for axis in self)

    def parts(self, box: Box) -> list[AxisPart]:
        """The windows that touch a box, along each axis."""
        return [axis_part(axis, cells.start, cells.stop) for axis, cells in zip(self, box, strict=True)]

    def split_windows(self, side: int, count: int, limit: int) -> list[list[range]]:
        """Divides the windows along each axis into ranges of their numbers, so that blocks of cells begin with each.

        The blocks have at most `side` cells per side and at most `limit` cells, and there are at least `count` of them,
        as far as blocks of one step of the windows allow.
        """
        parts = [min(-(-axis.size // side), len(axis.origins)) for axis in self]
        while True:
            sizes = [axis.size / number for axis, number in zip(self, parts, strict=True)]
            divisible = [number for number in range(3) if parts[number] < len(self[number].origins)]
            if not divisible or (math.prod(parts) >= count and math.prod(sizes) <= limit):
                break
            parts[max(divisible, key=lambda number: sizes[number])] += 1  # x first: its planes are contiguous
        ranges = []
        for axis, number in zip(self, parts, strict=True):
            ends = [part * len(axis.origins) // number for part in range(number + 1)]
            ranges.append([range(*pair) for pair in itertools.pairwise(ends)])
        return ranges

    def split_blocks(self, side: int, count: int, limit: int) -> list[Box]:
        """The blocks of cells of `split_windows`."""
        cuts = []
        for axis, ranges in zip(self, self.split_windows(side, count, limit), strict=True):
            starts = [axis.origins[numbers[0]] for numbers in ranges]
            cuts.append([slice(*pair) for pair in itertools.pairwise([*starts, axis.size])])
        return list(itertools.product(*cuts))

    def describe(self) -> str:
        steps = {end - start for axis in self for start, end in itertools.pairwise(axis.origins)}
        overlap = f", overlapping by {self.x.window - max(steps)} cells" if steps else ""
        return f"{self.windows} windows of {self.x.window}³ cells{overlap}"


def build_window_grid(shape: tuple[int, int, int], window: int, overlap: int | None, periodic: bool) -> WindowGrid:
    """Cubic windows that overlap by at least `overlap` cells (None: half a window); UserError if they do not fit."""
    overlap = window - max(window // 2, 1) if overlap is None else overlap
    return WindowGrid(*(window_axis(size, window, overlap, periodic) for size in shape))


def window_count(parts: Sequence[AxisPart]) -> int:
    return math.prod(len(part.windows) for part in parts)
