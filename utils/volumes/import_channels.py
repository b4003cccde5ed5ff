"""The channels of imported fields: their factors, transforms and plausible values."""

import argparse
import logging
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from utils.config.channels import AXES, PLAUSIBLE, QUANTITIES, SIDES, Channel, known_channels
from utils.errors import UserError
from utils.log import warn_once
from utils.progress import Progress
from utils.volumes.hdf5 import DATASETS, stored_slabs
from utils.volumes.snapshots import DARK_MATTER_DENSITY, GAS_DENSITY, OTHER, UNITS, GridField, Snapshot
from utils.volumes.values import MEDIANS

IN_A_PART = (0.01, 1000.0)  # plausible mean densities of a part of a box, such as a void or a cluster
REMEDIES = {  # for values that do not fit the unit
    "density": "correct its attribute units or --mean_density, or give --not_periodic if it is a part of a box",
    "velocity": "correct its attribute units or, without one, give another --velocity_units",
    "temperature": "write temperatures in K, no logarithms and no internal energies (docs/data.md)",
}
RANGE, OWN_UNIT = 100.0, "unit of the file"  # of fields that are not in FIELDS
MISSING = (-9999.0, -99999.0, -999.0)  # numbers that stand for no value

Options = argparse.Namespace  # the command line; the attributes have the names of the flags
# A field, the channel computed from it, and the factor from the field's unit to the channel's.
FieldChannel = tuple[GridField, Channel, float]
Datasets = Mapping[str, Sequence[FieldChannel]]

log = logging.getLogger(__name__)


def plan_channels(snapshot: Snapshot, options: Options, is_part: bool) -> Datasets:
    means = _stated_means(snapshot, options, is_part)
    dark = [name for name in snapshot.fields if name.startswith("dark_matter")]
    gas = [name for name in snapshot.fields if name not in dark and snapshot.fields[name].quantity != OTHER]
    datasets: dict[str, list[FieldChannel]] = {}
    rows = zip(DATASETS, SIDES, (dark, gas), (options.input_field, options.field), strict=True)
    for dataset, side, names, others in rows:
        fields = [snapshot.fields[name] for name in names]
        quantities = tuple(dict.fromkeys(field.quantity for field in fields))
        if quantities != QUANTITIES[side].get(len(names), ()) or not (names or others or dataset == DATASETS[1]):
            needed = f"{DARK_MATTER_DENSITY}, with gas also {GAS_DENSITY}, and all components of a velocity or none"
            raise UserError(f"{snapshot.path} has the fields {', '.join(snapshot.fields)}; give {needed}")
        channels = known_channels(side, len(names), options.transform)
        factors = [_factor(field, options, means.get(name)) for name, field in zip(names, fields, strict=True)]
        planned = [*zip(fields, channels, factors, strict=True)]
        planned += [row for name, parts in others for row in _own_channels(snapshot, name, parts, dict(options.unit))]
        if planned:
            datasets[dataset] = planned
        if len({channel.name for _, channel, _ in planned}) < len(planned):
            raise UserError(f"two {side} have one name; rename the one of --field or --input_field")
    if unused := dict(options.unit).keys() - dict(options.field + options.input_field):
        raise UserError(f"--unit {', '.join(unused)}: there is no such --field or --input_field")
    return datasets


def _stated_means(snapshot: Snapshot, options: Options, is_part: bool) -> dict[str, float | None]:
    """The values of --mean_density by the names of the fields; raises UserError if some are missing."""
    densities = {name: field for name, field in snapshot.fields.items() if field.quantity == "density"}
    is_needed = is_part and any(field.unit != "mean" for field in densities.values())
    means = options.mean_density or ([] if is_needed else [None] * len(densities))
    if len(means) != len(densities) or 0.0 in means:
        needed = f"give a number above 0 per density, --mean_density {' '.join(densities).upper()}"
        text = "the mean of the whole box, not of a part, in the unit of the field (1 for a field in units of the mean)"
        raise UserError(f"{snapshot.path}: {needed}: {text}")
    return dict(zip(densities, means, strict=True))


def _factor(field: GridField, options: Options, mean: float | None) -> float:
    """The factor from a field's unit to that of its channel: one over the mean for densities in unknown units."""
    units, unit, remedy = UNITS[field.quantity], field.unit, "write temperatures in K"
    if field.quantity == "density" and (mean or unit != "mean"):
        if not mean:
            total = 0.0
            for values in _slabs(field, "mean"):
                total += float(values.sum(dtype=np.float64))
            if not total:
                raise UserError(f"{field.name} is 0 everywhere; give another file")
            mean = total / math.prod(field.stored.shape)
        return 1 / mean
    if field.quantity == "temperature":
        unit = unit or "K"
    if field.quantity == "velocity":
        unit, remedy = options.velocity_units or unit, f"give --velocity_units ({', '.join(units)})"
        if field.is_stated and field.unit in units and field.unit != unit:
            raise UserError(f"{field.name} states {field.unit}, not {unit}; correct it, or remove --velocity_units")
    if unit not in units:
        raise UserError(f"{field.name} is in {unit or 'an unknown unit'}; {remedy}")
    return units[unit]


def _slabs(field: GridField, action: str) -> Iterator[np.ndarray]:
    """The values of a field in slabs, after `check_values`, with progress."""
    with Progress(f"{action} of {field.name}", field.stored.shape[0], "planes") as progress:
        for slab, values in stored_slabs(field.stored, field.name):
            check_values(field, slab, values)
            yield values
            progress.advance(len(values))


def _own_channels(snapshot: Snapshot, name: str, fields: str, units: Mapping[str, str]) -> list[FieldChannel]:
    """The channels of a scalar or of a vector's three components, with a transform to about [-1, 1] from the values.

    A logarithm if the values are above 0 and over a factor of RANGE; components have no center and one scale.
    """
    grids = [snapshot.fields[field] for field in fields.split(",")]
    if len(grids) not in (1, 3):
        raise UserError(f"--field {name}={fields}: give one field, or the components along x, y and z")
    unit = units.get(name) or grids[0].unit or OWN_UNIT
    moments = [_moments(grid) for grid in grids]
    if len(grids) == 3:
        scale, names = _rounded(max(3 * part[1] for part in moments)), [f"{name} {axis}" for axis in AXES]
        channels = [Channel(part, unit, scale, component=part) for part in names]
    else:
        mean, deviation, is_log = moments[0]
        channels = [Channel(name, unit, _rounded(3 * deviation), _rounded(mean), is_log)]
    return [(grid, channel, 1.0) for grid, channel in zip(grids, channels, strict=True)]


def _moments(field: GridField) -> tuple[float, float, bool]:
    """Mean and standard deviation of the values, or, if they are positive and span RANGE, of their logarithms."""
    sums, low, high = np.zeros(4), math.inf, -math.inf
    for stored in _slabs(field, "transform"):
        values = stored.astype(np.float64)
        low, high = min(low, values.min()), max(high, values.max())
        logarithms = np.log(values) if low > 0 else values
        sums += [part.sum() for part in (values, values**2, logarithms, logarithms**2)]
    is_log = low > 0 and high > RANGE * low
    mean, square = (sums[2:] if is_log else sums[:2]) / math.prod(field.stored.shape)
    if not square > mean**2:
        raise UserError(f"{field.name} is {low:g} everywhere; give another file, or one without this field")
    return mean, math.sqrt(square - mean**2), is_log


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def check_values(field: GridField, slab: slice, values: np.ndarray) -> None:
    """Raises UserError, with the place, for values that the quantity cannot have."""
    possible = {"density": values >= 0, "temperature": values > 0}.get(field.quantity, True)
    wrong = np.argwhere(~(np.isfinite(values) & possible))
    if field.quantity == "velocity" and np.isin(values, MISSING).any():
        warn_once(f"{field.name} has cells of {MISSING}; if they mean no value, fill them or cut them out")
    if len(wrong):
        x, y, z = wrong[0].tolist()
        value = f"{field.name}[{slab.start + x}, {y}, {z}] is {values[x, y, z]:g}"
        is_contrast = field.quantity == "density" and -1.001 < values.min() < -0.1 and abs(values.mean()) < 0.5
        remedy = "if it holds contrasts ρ/ρ̄ - 1, add 1" if is_contrast else "correct the file (no logarithms)"
        raise UserError(f"{value}, which is impossible for a {field.quantity}; {remedy}")


def check_units(source: FieldChannel, means: np.ndarray, is_part: bool) -> None:
    """UserError for an implausible mean (velocities: root mean square); `means`: of field, its square, its channel."""
    field, channel, factor = source
    if field.quantity == OTHER:
        return
    name, value = ("root mean square", math.sqrt(means[1])) if field.quantity == "velocity" else ("mean", means[0])
    low, high = IN_A_PART if is_part and field.quantity == "density" else PLAUSIBLE[str(channel.unit)]
    typical, remedy = factor * value, REMEDIES[field.quantity]
    if not low <= typical <= high:
        raise UserError(f"{field.name}: a {name} of {typical:.3g} {channel.unit} is implausible; {remedy}")
    typical = channel.to_physical(means[2])
    if field.quantity == "temperature" and typical < MEDIANS[str(channel.unit)][0]:
        log.warning(f"{field.name}: a geometric mean of {typical:.3g} K is low for ionized gas; {remedy}")
