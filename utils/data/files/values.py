"""Checks of a volume's values: of a sample before each training, of all of them in a preflight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

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

# The sample of a channel: rows along z, spread over the volume. Fewer rows than that would miss its structure; more
# values would not change the result.
LEAST_ROWS, SAMPLED_VALUES = 16, 4096
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it are spread evenly over [0, 1)


class ChannelValues:
    """Range and number of zeros of a channel's values, of which NaN and infinite ones are ignored."""

    def __init__(self) -> None:
        self.lowest, self.highest = math.inf, -math.inf
        self._count = self._zeros = 0

    def add(self, values: np.ndarray) -> None:
        if values.size:
            self.lowest = min(self.lowest, float(values.min()))
            self.highest = max(self.highest, float(values.max()))
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


def check_samples(volumes: Mapping[str, Volume], allow_physical: bool) -> tuple[list[str], list[str]]:
    """Warnings about the training and the validation volume together, and about single channels, from samples.

    Raises UserError for physical values, unless they are allowed, and for a dataset with the same value everywhere.
    """
    samples = {split: _sample(volume) for split, volume in volumes.items()}
    warnings = []
    for split, volume in volumes.items():
        channels: dict[tuple[int, int], ChannelValues] = {}
        for number, field in enumerate(samples[split]):
            for channel, values in enumerate(field):
                finite = values[np.isfinite(values)]
                if not allow_physical and np.count_nonzero(np.abs(finite) > PHYSICAL) > PHYSICAL_SHARE * values.size:
                    raise UserError(
                        f"{volume.path}: {volume.names[number]}[{channel}] holds physical values "
                        f"(up to {np.abs(finite).max():.3g}), but networks learn channels of about 1; transform the "
                        f"file as docs/data.md, Your own files, describes, or set allow_physical_values: true"
                    )
                channels[number, channel] = ChannelValues()
                channels[number, channel].add(finite)
        warnings += _channel_warnings(volume, channels)
    train, valid = samples.values()
    if all(np.array_equal(*fields, equal_nan=True) for fields in zip(train, valid, strict=True)):
        paths = " and ".join(dict.fromkeys(volume.path for volume in volumes.values()))
        return [f"{paths}: training and validation use the same volume; results look better than they are"], warnings
    return [], warnings


def check_all(volume: Volume, advance: Callable[[], None] = lambda: None) -> list[str]:
    """Warnings about single channels; calls `advance` after each slab.

    Raises UserError at the first NaN or infinite value, and for a dataset with the same value everywhere.
    """
    channels: dict[tuple[int, int], ChannelValues] = {}
    for number, channel, start, values in volume.slabs():
        place = nonfinite_place(values)
        if place is not None:
            x, y, z = place
            raise UserError(
                f"{volume.path}: {volume.names[number]}[{channel}, {start + x}, {y}, {z}] is {values[place]}; correct "
                f"or remove it: training skips every update whose samples contain it"
            )
        channels.setdefault((number, channel), ChannelValues()).add(values)
        advance()
    return _channel_warnings(volume, channels)


def _sample(volume: Volume) -> list[np.ndarray]:
    """Values [C, rows, L] of the inputs and the targets, at the same places in each volume of the same size."""
    box = volume.box
    rows = min(box**2, max(LEAST_ROWS, SAMPLED_VALUES // box))
    places = [(row * box // rows, int(row * GOLDEN % 1 * box)) for row in range(rows)]
    with reading(volume.path):
        return [np.stack([field[:, x, y] for x, y in places], axis=1) for field in (volume.inputs, volume.targets)]


def _channel_warnings(volume: Volume, channels: Mapping[tuple[int, int], ChannelValues]) -> list[str]:
    for number, name in enumerate(volume.names):
        own = [values for (field, _), values in channels.items() if field == number]
        lowest, highest = min(values.lowest for values in own), max(values.highest for values in own)
        if lowest == highest:
            raise UserError(
                f"{volume.path}: {name} is {lowest:g} everywhere; write its values, or choose another file or dataset"
            )
    return [
        f"{volume.path}: {volume.names[number]}[{channel}] {remark}"
        for (number, channel), values in channels.items()
        if (remark := values.warning())
    ]
