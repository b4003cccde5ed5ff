"""Writes fields of a simulation as channels, slab by slab and by several threads; memory does not grow with the box."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from utils.data.files.snapshots import GridField, Shape
from utils.data.files.writer import create_contiguous, write_at
from utils.distributed.in_order import in_order
from utils.errors import UserError, os_errors_for_users
from utils.files import atomic_write
from utils.inference.channels import Channel
from utils.progress import Progress

MEAN_RANGE = (0.5, 2.0)  # of a density in units of the mean; that of a part of a box is not exactly 1
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
    """Sums over planes of a field."""

    cells: int = 0
    planes: int = 0
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
            Progress(title, planes, "planes") as progress,
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
                    slabs = (slab for output in outputs for slab in output.slabs(name, number, each.field))
                    converter = _Converter(each, factor, self.floor)
                    converter.check(_total(in_order(converter.convert, slabs, self.threads), progress))

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


class _Slab(NamedTuple):
    """Planes of a field, and where their channel is written."""

    planes: slice
    file: IO[bytes]
    offset: int


@dataclass(frozen=True)
class _Output:
    """An open file."""

    part: Part
    file: IO[bytes]
    offsets: Mapping[str, int]  # of the data of each dataset

    def slabs(self, dataset: str, channel: int, field: GridField) -> Iterator[_Slab]:
        """The slabs of a field that this file holds as a channel of a dataset."""
        planes, plane_bytes = self.part.planes, 4 * field.shape[1] * field.shape[2]
        for slab in field.slabs(planes):
            plane = channel * len(planes) + slab.start - planes.start
            yield _Slab(slab, self.file, self.offsets[dataset] + plane * plane_bytes)


@dataclass(frozen=True)
class _Converter:
    """Converts one field to its channel."""

    source: FieldChannel
    factor: float
    floor: float

    def convert(self, slab: _Slab) -> _Sums:
        field = self.source.field
        values = field.planes(slab.planes)
        sums = _sums(field, values, slab.planes.start)
        if self.factor != 1.0:
            values *= self.factor
        if field.quantity == "density":
            np.maximum(values, self.floor, out=values)
        self.source.channel.from_physical(values)
        write_at(slab.file, slab.offset, values.data.cast("B"))
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
        is_checked = field.quantity == "density" and self.source.factor is not None and not self.source.any_mean
        if is_checked and not MEAN_RANGE[0] <= mean <= MEAN_RANGE[1]:
            raise UserError(
                f"{field.name} has a mean of {mean:.3g} although it is in units of the mean; give --density_units "
                f"other to divide by it, or mean to keep it"
            )


def _mean(field: GridField, threads: int, progress: Progress) -> float:
    """The mean of a density; raises UserError if it is zero."""

    def read(planes: slice) -> _Sums:
        return _sums(field, field.planes(planes), planes.start)

    sums = _total(in_order(read, field.slabs(range(field.shape[0])), threads), progress)
    if not sums.values:
        raise UserError(f"{field.name} is 0 everywhere; give another file")
    return sums.values / sums.cells


def _total(done: Iterator[_Sums], progress: Progress) -> _Sums:
    total = _Sums()
    for cells, planes, values, squares in done:
        total = _Sums(total.cells + cells, total.planes + planes, total.values + values, total.squares + squares)
        progress.advance(planes)
    return total


def _sums(field: GridField, values: np.ndarray, start: int) -> _Sums:
    """Sums of physical values; raises UserError, with the place, for values that the quantity cannot have."""
    flat = values.reshape(-1)
    total = float(flat.sum(dtype=np.float64))
    if not math.isfinite(total):
        _refuse(field, values, start, np.isfinite, "not finite")
    if field.quantity == "density" and flat.min() < 0:
        _refuse(field, values, start, lambda density: density >= 0, "negative")
    if field.quantity == "temperature" and flat.min() <= 0:
        _refuse(field, values, start, lambda kelvin: kelvin > 0, "not above zero")
    squares = float(np.dot(flat, flat)) if field.quantity == "velocity" else 0.0
    return _Sums(values.size, len(values), total, squares)


def _refuse(
    field: GridField, values: np.ndarray, start: int, valid: Callable[[np.ndarray], np.ndarray], fault: str
) -> None:
    x, y, z = np.argwhere(~valid(values))[0].tolist()
    raise UserError(f"{field.name}[{start + x}, {y}, {z}] is {values[x, y, z]:g}, {fault}; correct the file")
