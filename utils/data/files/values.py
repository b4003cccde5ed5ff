"""Checks of a volume's values: of a sample before each training run, of all of them in a preflight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from utils.data.files.fields import IMPORTER
from utils.data.files.hdf5 import Volume, nonfinite_place, reading
from utils.errors import UserError

# Channels are scaled to lie roughly in [-1, 1]. A channel is taken for physical if a tenth of its values are beyond
# PHYSICAL. No transform comes close: the published one reaches about 3 (shocks of 3000 km/s), standardized fields have
# a standard deviation of 1, and even unscaled logarithms stay within 75 (ln of a density in g/cm³). Velocities in km/s
# have a standard deviation of hundreds, and temperatures of diffuse gas are above 10⁴ K. It is a share, because single
# extreme values do not make a channel physical.
PHYSICAL, PHYSICAL_SHARE = 100.0, 0.1
LARGEST_LIKELY = 30.0  # larger values get a warning
LIKELY_ZEROS = 0.1  # share of zeros; a larger one gets a warning: parts of the file may not have been written
VALIDATES_TRAINING = "training and validation use the same volume; results look better than they are"
LISTED_TWICE = "the same volume twice, so that its crops are drawn twice as often; remove one from train_path"

# The sample of a channel: rows along z, spread over the volume. Fewer rows than that would miss its structure; more
# values would not change the result.
LEAST_ROWS, SAMPLED_VALUES = 16, 4096
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it are spread evenly over [0, 1)


class ChannelValues:
    """Range and number of zeros of a channel's values."""

    def __init__(self) -> None:
        self.lowest, self.highest = math.inf, -math.inf
        self._count = self._zeros = 0

    def add(self, values: np.ndarray) -> None:
        if values.size:
            self.lowest = min(self.lowest, float(values.min()) + 0.0)  # + 0.0 turns -0.0 into 0.0
            self.highest = max(self.highest, float(values.max()) + 0.0)
            self._count += values.size
            self._zeros += values.size - np.count_nonzero(values)

    def warning(self) -> str:
        """A remark on values that are unlikely for a channel; empty for others."""
        largest = max(-self.lowest, self.highest)
        if self.lowest == self.highest:
            return f"is {self.lowest:g} everywhere"
        if self._zeros > LIKELY_ZEROS * self._count:
            return f"is 0 in {self._zeros / self._count:.0%} of the cells; check that all of it was written"
        if largest > LARGEST_LIKELY:
            return f"has values up to ±{largest:,.0f}, but networks learn channels of about 1; check its transform"
        return ""


def check_samples(volumes: Sequence[Volume], allow_physical: bool) -> list[str]:
    """Warnings about single channels, from samples.

    Raises UserError for NaN and infinite values, for physical values, unless they are allowed, and for a dataset with
    the same value everywhere.
    """
    samples = [(volume, _samples(volume)) for volume in volumes]
    for volume, fields in samples:
        for name, values in zip(volume.names, fields, strict=True):
            if (place := nonfinite_place(values)) is not None:
                channel, row, z = place
                cell = (channel, *_places(volume.shape)[row], z)
                raise _nonfinite(volume.path, name, cell, values[place])
    return [
        line
        for volume, fields in samples
        for name, values in zip(volume.names, fields, strict=True)
        for line in _check_values(volume.path, name, values, allow_physical)
    ]


def check_distinct(volumes: Mapping[str, Sequence[Volume]]) -> list[str]:
    """Warnings about volumes of training and validation that are the same, from samples."""
    samples = {split: [(volume.path, _samples(volume)) for volume in opened] for split, opened in volumes.items()}
    pairs = [(pair, VALIDATES_TRAINING) for pair in itertools.product(samples["train"], samples["valid"])]
    pairs += [(pair, LISTED_TWICE) for pair in itertools.combinations(samples["train"], 2)]
    return [
        f"{' and '.join(dict.fromkeys((first[0], second[0])))}: {fault}"
        for (first, second), fault in pairs
        if all(map(np.array_equal, first[1], second[1]))
    ]


def _samples(volume: Volume) -> list[np.ndarray]:
    return [_sample(volume.path, field) for field in (volume.inputs, volume.targets)]


def check_sample(path: str, name: str, field: Any, allow_physical: bool) -> list[str]:
    """Warnings about the channels of one dataset [C, X, Y, Z], from a sample.

    Raises UserError for physical values, unless they are allowed, and for the same value everywhere.
    """
    return _check_values(path, name, _sample(path, field), allow_physical)


def check_all(volume: Volume, advance: Callable[[], None] = lambda: None) -> list[str]:
    """Warnings about single channels; calls `advance` after each slab.

    Raises UserError at the first NaN or infinite value, and for a dataset with the same value everywhere.
    """
    fields = [[ChannelValues() for _ in range(field.shape[0])] for field in (volume.inputs, volume.targets)]
    for number, channel, start, values in volume.slabs():
        place = nonfinite_place(values)
        if place is not None:
            x, y, z = place
            raise _nonfinite(volume.path, volume.names[number], (channel, start + x, y, z), values[place])
        fields[number][channel].add(values)
        advance()
    pairs = zip(volume.names, fields, strict=True)
    return [line for name, channels in pairs for line in _channel_warnings(volume.path, name, channels)]


def _nonfinite(path: str, name: str, place: tuple[int, ...], value: float) -> UserError:
    return UserError(
        f"{path}: {name}[{', '.join(map(str, place))}] is {value}; correct or remove it: training skips every update "
        f"whose samples contain it"
    )


def _places(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Places (x, y) of the sampled rows, the same in each volume of the same size."""
    rows = min(shape[0] * shape[1], max(LEAST_ROWS, SAMPLED_VALUES // shape[2]))
    return [(row * shape[0] // rows, int(row * GOLDEN % 1 * shape[1])) for row in range(rows)]


def _sample(path: str, field: Any) -> np.ndarray:
    """Values [C, rows, Z] of a field [C, X, Y, Z]."""
    with reading(path):
        return np.stack([field[:, x, y] for x, y in _places(field.shape[1:])], axis=1)


def _check_values(path: str, name: str, sample: np.ndarray, allow_physical: bool) -> list[str]:
    channels = []
    for number, values in enumerate(sample):
        if not allow_physical and np.count_nonzero(np.abs(values) > PHYSICAL) > PHYSICAL_SHARE * values.size:
            raise UserError(
                f"{path}: {name}[{number}] holds physical values (up to {np.abs(values).max():.3g}), but networks "
                f"learn channels of about 1; import the original fields with {IMPORTER} (docs/data.md, Your own "
                f"files), or train with allow_physical_values: true"
            )
        channels.append(ChannelValues())
        channels[-1].add(values)
    return _channel_warnings(path, name, channels)


def _channel_warnings(path: str, name: str, channels: Sequence[ChannelValues]) -> list[str]:
    lowest, highest = min(values.lowest for values in channels), max(values.highest for values in channels)
    if lowest == highest:
        raise UserError(f"{path}: {name} is {lowest:g} everywhere; write its values, or choose another file or dataset")
    remarks = (values.warning() for values in channels)
    return [f"{path}: {name}[{number}] {remark}" for number, remark in enumerate(remarks) if remark]
