"""Blocks in which the importer and the converter read fields, so that memory does not grow with the field."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

Block = tuple[slice, slice]  # planes along x, and in each of them rows along y; rows along z are whole

_received: list[int] = []


def blocks(planes: range, rows: int, row_values: int, chunk: Sequence[int] | None, most_values: int) -> Iterator[Block]:
    """Divides planes of `rows` rows into blocks of at most `most_values` values, or of one chunk if that holds more.

    `chunk` is the number of planes and rows of a chunk, which HDF5 unpacks as a whole. Ends with SystemExit once
    `catch_signals` has caught a signal.
    """
    depth, width = chunk or (1, 1)
    height = min(max(most_values // (depth * row_values) // width, 1) * width, rows)
    thickness = max(most_values // (height * row_values) // depth, 1) * depth
    for first in range(planes.start // thickness * thickness, planes.stop, thickness):
        for row in range(0, rows, height):
            along_x = slice(max(first, planes.start), min(first + thickness, planes.stop))
            yield along_x, slice(row, min(row + height, rows))
            if _received:
                raise SystemExit(128 + _received[0])  # the exit code that shells report


def catch_signals() -> None:
    """Lets SIGTERM, SIGHUP and SIGINT end the command between two blocks, so that unfinished files are removed.

    The handlers do not raise: an exception in a callback, which h5py runs at the end of each read, would be lost.
    """
    for stop in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(stop, lambda number, _: _received.append(number))
