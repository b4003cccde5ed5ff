"""Writes fields of a simulation as channels, in blocks; memory does not grow with the box."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from utils.data.channels import Channel
from utils.data.files.blocks import Block
from utils.data.files.snapshots import GridField, Shape
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
    any_mean: bool = False  # a density in units of the mean, whose mean here may be any


@dataclass(frozen=True)
class Part:
    """A file to write: planes of the box along x."""

    path: Path
    planes: range
    attributes: Mapping[str, Any]

    def shape(self, channels: int, box: Shape) -> tuple[int, int, int, int]:
        """The shape of a dataset with this number of channels."""
        return channels, len(self.planes), box[1], box[2]


@dataclass
class _Sums:
    """Sums over blocks of a field's values, in its own unit."""

    cells: int = 0
    values: float = 0.0
    squares: float = 0.0

    def add(self, field: GridField, values: np.ndarray, block: Block) -> None:
        """Adds a block; raises UserError, with the place, for values that the quantity cannot have."""
        total = float(values.sum(dtype=np.float64))
        if not math.isfinite(total):
            raise _refusal(field, values, block, np.isfinite, "not finite")
        if field.quantity == "density" and values.min() < 0:
            raise _refusal(field, values, block, lambda density: density >= 0, "negative")
        if field.quantity == "temperature" and values.min() <= 0:
            raise _refusal(field, values, block, lambda kelvin: kelvin > 0, "not above zero")
        self.cells += values.size
        self.values += total
        if field.quantity == "velocity":
            self.squares += float(np.dot(values.reshape(-1), values.reshape(-1)))


def write_volume(
    datasets: Mapping[str, Sequence[FieldChannel]], parts: Sequence[Part], shape: Shape, floor: float, title: str
) -> None:
    """Writes the files; raises UserError, and leaves nothing, for implausible values.

    Densities below `floor`, in units of the mean, are raised to it.
    """
    channels = [source for sources in datasets.values() for source in sources]
    passes = len(channels) + sum(source.factor is None for source in channels)
    targets = [part.path for part in parts]
    with (
        Progress(title, passes * shape[0] * shape[1], "rows") as progress,
        os_errors_for_users(f"cannot write {targets[0]}", "give another --output"),
        atomic_write(targets) as partials,
        ExitStack() as opened,
    ):
        files = [opened.enter_context(h5py.File(partial, "w")) for partial in partials]
        for file, part in zip(files, parts, strict=True):
            file.attrs.update(part.attributes)
        for name, sources in datasets.items():
            stored = [
                file.create_dataset(name, part.shape(len(sources), shape), "<f4")
                for file, part in zip(files, parts, strict=True)
            ]
            for dataset in stored:
                dataset.attrs["channels"] = [source.channel.name for source in sources]
                dataset.attrs["transform"] = [source.channel.formula() for source in sources]
            for number, source in enumerate(sources):
                _write_channel(source, number, stored, parts, floor, progress)


def _write_channel(
    source: FieldChannel,
    number: int,
    datasets: Sequence[h5py.Dataset],
    parts: Sequence[Part],
    floor: float,
    progress: Progress,
) -> None:
    """Converts a field to channel `number` of the datasets, one for each part."""
    field, sums = source.field, _Sums()
    factor = 1 / _mean(field, progress) if source.factor is None else source.factor
    for dataset, part in zip(datasets, parts, strict=True):
        for block in field.blocks(part.planes):
            values = field.read(block)
            sums.add(field, values, block)
            with np.errstate(all="ignore"):  # the result is checked
                values *= np.float32(factor)
                if field.quantity == "density":
                    np.maximum(values, floor, out=values)
                source.channel.from_physical(values)
            if not math.isfinite(values.sum(dtype=np.float64)):
                raise _refusal(field, values, block, np.isfinite, "not finite, as a channel", "write it in other units")
            start = part.planes.start
            dataset[number, block[0].start - start : block[0].stop - start, block[1]] = values
            progress.advance(values.shape[0] * values.shape[1])
    _check_units(source, factor, sums)


def _mean(field: GridField, progress: Progress) -> float:
    """The mean of a density; raises UserError if it is zero."""
    sums = _Sums()
    for block in field.blocks(range(field.shape[0])):
        values = field.read(block)
        sums.add(field, values, block)
        progress.advance(values.shape[0] * values.shape[1])
    if not sums.values:
        raise UserError(f"{field.name} is 0 everywhere; give another file")
    return sums.values / sums.cells


def _check_units(source: FieldChannel, factor: float, sums: _Sums) -> None:
    """Raises UserError if the values do not fit the field's unit."""
    field, mean = source.field, sums.values / sums.cells
    rms = factor * math.sqrt(sums.squares / sums.cells)
    if field.quantity == "velocity" and not VELOCITY_RANGE[0] <= rms <= VELOCITY_RANGE[1]:
        raise UserError(
            f"{field.name}: a root mean square of {rms:.3g} km/s is implausible; give its unit with --velocity_units"
        )
    if field.quantity == "temperature" and mean < COLDEST_MEAN:
        raise UserError(f"{field.name}: a mean of {mean:.3g} K is implausible; write temperatures in K, no logarithms")
    is_checked = field.quantity == "density" and source.factor is not None and not source.any_mean
    if is_checked and not MEAN_RANGE[0] <= mean <= MEAN_RANGE[1]:
        raise UserError(
            f"{field.name} has a mean of {mean:.3g} although it is in units of the mean; give --density_units other to "
            f"divide by it, or mean to keep it"
        )


def _refusal(
    field: GridField,
    values: np.ndarray,
    block: Block,
    valid: Callable[[np.ndarray], np.ndarray],
    fault: str,
    remedy: str = "correct the file",
) -> UserError:
    x, y, z = np.argwhere(~valid(values))[0].tolist()
    place = f"{block[0].start + x}, {block[1].start + y}, {z}"
    return UserError(f"{field.name}[{place}] is {values[x, y, z]:g}, {fault}; {remedy}")
