"""Writes fields of a simulation as channels, in blocks and by several threads; memory does not grow with the box."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from utils.data.channels import Channel
from utils.data.files.snapshots import Block, GridField, Shape
from utils.data.files.writer import create_contiguous, write_at
from utils.distributed.in_order import in_order
from utils.errors import UserError, os_errors_for_users
from utils.files import atomic_write
from utils.progress import Progress

MEAN_RANGE = (0.5, 2.0)  # of a density in units of the mean; that of a part of a box is not exactly 1
COLDEST_MEAN = 100.0  # K, of a temperature; decimal logarithms are about 4
VELOCITY_RANGE = (1.0, 3000.0)  # km/s, of the root mean square of a component


@dataclass(frozen=True)
class FieldChannel:
    """A channel of the output, and the field that it is computed from."""

    field: GridField
    channel: Channel
    factor: float | None  # from the field's unit to the channel's; None: one over the mean of the field
    any_mean: bool = False  # a density in units of the mean, whatever its mean here is


@dataclass(frozen=True)
class Part:
    """A file to write: planes of the box along x."""

    path: Path
    planes: range


class _Sums(NamedTuple):
    """Sums over blocks of a field."""

    cells: int = 0
    rows: int = 0
    values: float = 0.0
    squares: float = 0.0


@dataclass(frozen=True)
class Conversion:
    """The channels of each dataset, and the files that they are written to."""

    datasets: Mapping[str, Sequence[FieldChannel]]
    parts: Sequence[Part]
    shape: Shape
    floor: float  # densities below it, in units of the mean, are raised to it
    threads: int

    @property
    def bytes(self) -> int:
        """Size of the datasets of all files."""
        return sum(4 * math.prod(shape) for part in self.parts for shape in self._shapes(part).values())

    def write(self, attributes: Sequence[Mapping[str, Any]], title: str) -> None:
        """Writes the files with these attributes each; raises UserError, and leaves nothing, for wrong values."""
        unscaled = [each for each in self._channels() if each.factor is None]
        planes = sum(len(part.planes) for part in self.parts) * len(self._channels()) + self.shape[0] * len(unscaled)
        targets = [part.path for part in self.parts]
        with (
            Progress(title, planes * self.shape[1], "rows") as progress,
            os_errors_for_users(f"cannot write {targets[0]}", "give another --output"),
            atomic_write(targets) as partials,
            ExitStack() as files,
        ):
            means = {each.field.name: _mean(each.field, self.threads, progress) for each in unscaled}
            outputs = []
            for part, partial, about in zip(self.parts, partials, attributes, strict=True):
                offsets = create_contiguous(partial, self._shapes(part), {"": about, **self._channel_attributes()})
                outputs.append(_Output(part, files.enter_context(partial.open("r+b", buffering=0)), offsets))
            for name, channels in self.datasets.items():
                for number, each in enumerate(channels):
                    factor = 1 / means[each.field.name] if each.factor is None else each.factor
                    pieces = (piece for output in outputs for piece in output.pieces(name, number, each.field))
                    converter = _Converter(each, factor, self.floor)
                    converter.check(_total(in_order(converter.convert, pieces, self.threads), progress))

    def _channels(self) -> list[FieldChannel]:
        return [channel for channels in self.datasets.values() for channel in channels]

    def _shapes(self, part: Part) -> dict[str, tuple[int, int, int, int]]:
        _, y, z = self.shape
        return {name: (len(channels), len(part.planes), y, z) for name, channels in self.datasets.items()}

    def _channel_attributes(self) -> dict[str, dict[str, Any]]:
        return {
            name: {
                "channels": [each.channel.name for each in channels],
                "transform": [each.channel.formula() for each in channels],
            }
            for name, channels in self.datasets.items()
        }


class _Piece(NamedTuple):
    """A block of a field, and where its channel is written."""

    block: Block
    file: IO[bytes]
    offset: int  # of the first plane
    stride: int  # bytes from plane to plane


@dataclass(frozen=True)
class _Output:
    """An open file."""

    part: Part
    file: IO[bytes]
    offsets: Mapping[str, int]  # of the data of each dataset

    def pieces(self, dataset: str, channel: int, field: GridField) -> Iterator[_Piece]:
        """The blocks of a field that this file holds as a channel of a dataset."""
        planes, row_bytes = self.part.planes, 4 * field.shape[2]
        plane_bytes = row_bytes * field.shape[1]
        for block in field.blocks(planes):
            plane = channel * len(planes) + block[0].start - planes.start
            offset = self.offsets[dataset] + plane * plane_bytes + block[1].start * row_bytes
            yield _Piece(block, self.file, offset, plane_bytes)


@dataclass(frozen=True)
class _Converter:
    """Converts one field to its channel."""

    source: FieldChannel
    factor: float
    floor: float

    def convert(self, piece: _Piece) -> _Sums:
        field = self.source.field
        values = field.values(piece.block)
        sums = _sums(field, values, piece.block)
        with np.errstate(all="ignore"):  # the result is checked
            if self.factor != 1.0:
                values *= self.factor
            if field.quantity == "density":
                np.maximum(values, self.floor, out=values)
            self.source.channel.from_physical(values)
        if not math.isfinite(values.sum(dtype=np.float64)):
            _refuse(field, values, piece.block, np.isfinite, "not finite, as a channel", "write it in other units")
        for number, plane in enumerate(values):
            write_at(piece.file, piece.offset + number * piece.stride, plane.data.cast("B"))
        return sums

    def check(self, sums: _Sums) -> None:
        """Raises UserError if the values do not fit the field's unit."""
        field, mean = self.source.field, sums.values / sums.cells
        rms = self.factor * math.sqrt(sums.squares / sums.cells)
        if field.quantity == "velocity" and not VELOCITY_RANGE[0] <= rms <= VELOCITY_RANGE[1]:
            raise UserError(
                f"{field.name}: a root mean square of {rms:.3g} km/s is implausible; give its unit with "
                f"--velocity_units"
            )
        if field.quantity == "temperature" and mean < COLDEST_MEAN:
            raise UserError(
                f"{field.name}: a mean of {mean:.3g} K is implausible; write temperatures in K, no logarithms"
            )
        is_checked = field.quantity == "density" and self.source.factor is not None and not self.source.any_mean
        if is_checked and not MEAN_RANGE[0] <= mean <= MEAN_RANGE[1]:
            raise UserError(
                f"{field.name} has a mean of {mean:.3g} although it is in units of the mean; give --density_units "
                f"other to divide by it, or mean to keep it"
            )


def _mean(field: GridField, threads: int, progress: Progress) -> float:
    """The mean of a density; raises UserError if it is zero."""

    def read(block: Block) -> _Sums:
        return _sums(field, field.values(block), block)

    sums = _total(in_order(read, field.blocks(range(field.shape[0])), threads), progress)
    if not sums.values:
        raise UserError(f"{field.name} is 0 everywhere; give another file")
    return sums.values / sums.cells


def _total(done: Iterator[_Sums], progress: Progress) -> _Sums:
    total = _Sums()
    for cells, rows, values, squares in done:
        total = _Sums(total.cells + cells, total.rows + rows, total.values + values, total.squares + squares)
        progress.advance(rows)
    return total


def _sums(field: GridField, values: np.ndarray, block: Block) -> _Sums:
    """Sums of physical values; raises UserError, with the place, for values that the quantity cannot have."""
    flat = values.reshape(-1)
    total = float(flat.sum(dtype=np.float64))
    if not math.isfinite(total):
        _refuse(field, values, block, np.isfinite, "not finite")
    if field.quantity == "density" and flat.min() < 0:
        _refuse(field, values, block, lambda density: density >= 0, "negative")
    if field.quantity == "temperature" and flat.min() <= 0:
        _refuse(field, values, block, lambda kelvin: kelvin > 0, "not above zero")
    squares = float(np.dot(flat, flat)) if field.quantity == "velocity" else 0.0
    return _Sums(values.size, values.shape[0] * values.shape[1], total, squares)


def _refuse(
    field: GridField,
    values: np.ndarray,
    block: Block,
    valid: Callable[[np.ndarray], np.ndarray],
    fault: str,
    remedy: str = "correct the file",
) -> None:
    x, y, z = np.argwhere(~valid(values))[0].tolist()
    place = f"{block[0].start + x}, {block[1].start + y}, {z}"
    raise UserError(f"{field.name}[{place}] is {values[x, y, z]:g}, {fault}; {remedy}")
