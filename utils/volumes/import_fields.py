"""Checks of the values of imported fields, and the channels of fields that the project does not know."""

import math
from collections.abc import Mapping

import numpy as np

from utils.config.channels import AXES, Channel
from utils.errors import UserError
from utils.log import warn_once
from utils.progress import Progress
from utils.volumes.hdf5 import stored_slabs
from utils.volumes.snapshots import GridField, Snapshot

RANGE, OWN_UNIT = 100.0, "unit of the file"  # of fields that the project does not know
MISSING = (-9999.0, -99999.0, -999.0)  # numbers that stand for no value

# A field, the channel computed from it, and the factor from the field's unit to the channel's.
FieldChannel = tuple[GridField, Channel, float]


def own_channels(snapshot: Snapshot, name: str, fields: str, units: Mapping[str, str]) -> list[FieldChannel]:
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
    with Progress(f"transform of {field.name}", field.stored.shape[0], "planes") as progress:
        for slab, stored in stored_slabs(field.stored, field.name):
            check_values(field, slab, stored)
            values = stored.astype(np.float64)
            low, high = min(low, values.min()), max(high, values.max())
            logarithms = np.log(values) if low > 0 else values
            sums += [part.sum() for part in (values, values**2, logarithms, logarithms**2)]
            progress.advance(len(values))
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
