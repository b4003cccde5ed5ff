"""Checks of a volume's values: of a sample before each training run, of all of them in a preflight."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from utils.config.channels import DENSITY_UNIT, PLAUSIBLE, TEMPERATURE_UNIT, Channel
from utils.errors import UserError
from utils.log import warn_once
from utils.volumes.hdf5 import IMPORTER, Volume, nonfinite_place, reading

# A channel is taken for physical if a tenth of its values are beyond PHYSICAL. No transform comes close: the published
# one reaches about 3, and even unscaled logarithms stay within 75 (ln of a density in g/cm³). Velocities in km/s have a
# standard deviation of hundreds, and temperatures of diffuse gas are above 10⁴ K.
PHYSICAL, PHYSICAL_SHARE = 100.0, 0.1
# Plausible medians of a sample: half of a volume's cells may be empty, and none has such a density in half of them.
# Ionized gas that seems to be colder has internal energies in (km/s)² in place of temperatures.
MEDIANS = {**PLAUSIBLE, DENSITY_UNIT: (0.0, 100.0), TEMPERATURE_UNIT: (1000.0, 1e9)}
# Mean correlation of the channels of two inputs: above 0.8 for one seed at z = 2 and 4 (of the density alone 0.40 in
# 128³ cells of 0.16 Mpc/h), at most 0.39 (0.20) for two seeds, and negative for the members of a pair.
SAME_STRUCTURES, SAME_DENSITY = 0.65, 0.3

# The sample of a channel: rows along z, spread over the volume. Fewer rows would miss its structure.
LEAST_ROWS, SAMPLED_VALUES = 16, 4096
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it are spread evenly over [0, 1)


def check_samples(volumes: Sequence[Volume], allow_physical: bool) -> None:
    """Raises UserError for samples with NaN, infinite or disallowed physical values, and for constant datasets."""
    for volume in volumes:
        for name, field in zip(volume.names, volume.fields, strict=True):
            check_sample(volume.path, name, field, allow_physical)


def check_sample(path: str, name: str, field: Any, allow_physical: bool) -> None:
    """The check of one dataset [C, X, Y, Z]; a constant channel is a warning."""
    stored, places = sample(path, field), _places(field.shape[1:])
    if (place := nonfinite_place(stored)) is not None:
        channel, row, z = place
        raise _nonfinite(path, name, (channel, *places[row], z), stored[place])
    if stored.min() == stored.max():
        raise _constant(path, name, stored.flat[0])
    for number, values in enumerate(stored):
        if values.min() == values.max():
            warn_once(str(_constant(path, f"{name}[{number}]", values[0, 0])))
        if not allow_physical and np.count_nonzero(np.abs(values) > PHYSICAL) > PHYSICAL_SHARE * values.size:
            fault = f"{path}: {name}[{number}] holds physical values (up to {np.abs(values).max():.3g})"
            remedy = f"import the original fields with {IMPORTER} (docs/data.md, Your own files)"
            other = "train with allow_physical_values: true"
            raise UserError(f"{fault}, but networks learn channels of about 1; {remedy}, or {other}")


def check_all(volume: Volume, allow_physical: bool = False) -> None:
    """Reads all values; UserError if a dataset is constant or not finite. Constant or physical channels: warnings."""
    ranges: list[list[dict[float, list[int]]]] = [[{} for _ in range(field.shape[0])] for field in volume.fields]
    for number, channel, start, values in volume.slabs(f"checking all values of {volume.path}"):
        if (place := nonfinite_place(values)) is not None:
            x, y, z = place
            raise _nonfinite(volume.path, volume.names[number], (channel, start + x, y, z), values[place])
        for index in (values.argmin(), values.argmax()):
            x, y, z = (int(axis) for axis in np.unravel_index(index, values.shape))
            ranges[number][channel].setdefault(float(values[x, y, z]), [start + x, y, z])
    for name, channels in zip(volume.names, ranges, strict=True):
        if len(distinct := {*itertools.chain(*channels)}) == 1:
            raise _constant(volume.path, name, distinct.pop())
        for number, extremes in enumerate(channels):
            if len(extremes) == 1:
                warn_once(str(_constant(volume.path, f"{name}[{number}]", *extremes)))
            farthest = max(extremes, key=abs)
            if abs(farthest) > PHYSICAL and not allow_physical:
                values_text = f"{min(extremes):g} to {max(extremes):g}, the farthest at {extremes[farthest]}"
                remedy = "networks learn channels of about 1: correct or remove them"
                warn_once(f"{volume.path}: {name}[{number}] has values from {values_text}; {remedy}")


def warn_of_units(volume: Volume, channels: Sequence[Sequence[Channel]]) -> None:
    """Warns of values that are implausible by the transforms of the inputs and the targets."""
    for name, field, known in zip(volume.names, volume.fields, channels, strict=True):
        for number, (channel, values) in enumerate(zip(known, sample(volume.path, field), strict=True)):
            if channel.unit not in MEDIANS:
                continue
            with np.errstate(over="ignore"):
                typical = np.median(np.abs(channel.to_physical(values.astype(np.float64))))
            low, high = MEDIANS[channel.unit]
            if not low <= typical <= high:
                fault = f"{channel.name}, would be {typical:.3g} {channel.unit} in half of the cells"
                remedy = "correct the transform in the file's attributes or the config (docs/data.md)"
                warn_once(f"{volume.path}: {name}[{number}], {fault}; {remedy}")


def check_distinct(volumes: Mapping[str, Sequence[Volume]]) -> list[str]:
    """Warnings about volumes of training that are also used for validation, or a snapshot of the same simulation is."""
    lines = []
    for first, second in itertools.product(volumes["train"], volumes["valid"]):
        if [field.shape for field in first.fields] == [field.shape for field in second.fields]:
            one, other = ([sample(volume.path, field) for field in volume.fields] for volume in (first, second))
            is_same = all(map(np.array_equal, one, other))
            with np.errstate(all="ignore"):  # of constant channels
                alike = np.mean([np.corrcoef(pair.reshape(2, -1))[0, 1] for pair in np.stack([one[0], other[0]], 1)])
            if is_same or alike > (SAME_DENSITY if first.inputs.shape[0] == 1 else SAME_STRUCTURES):
                use = "use the same volume" if is_same else "have the same structures, like snapshots of one simulation"
                paths = " and ".join(dict.fromkeys((first.path, second.path)))
                lines.append(f"{paths}: training and validation {use}; results look better than they are")
    return lines


def _places(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Places (x, y) of the sampled rows, the same in each volume of the same size."""
    rows = min(shape[0] * shape[1], max(LEAST_ROWS, SAMPLED_VALUES // shape[2]))
    return [(row * shape[0] // rows, int(row * GOLDEN % 1 * shape[1])) for row in range(rows)]


def sample(path: str, field: Any) -> np.ndarray:
    """Values [C, rows, Z] of a field [C, X, Y, Z]."""
    with reading(path):
        return np.stack([field[:, x, y] for x, y in _places(field.shape[1:])], axis=1)


def _nonfinite(path: str, name: str, place: tuple[int, ...], value: float) -> UserError:
    return UserError(f"{path}: {name}[{', '.join(map(str, place))}] is {value}; correct or remove it")


def _constant(path: str, name: str, value: float) -> UserError:
    value += 0.0  # turns -0.0 into 0.0
    return UserError(f"{path}: {name} is {value:g} everywhere; write its values, or choose another file or dataset")
