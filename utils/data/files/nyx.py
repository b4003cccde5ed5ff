"""The HDF5 layout of Nyx's snapshots that tools for the Lyman-alpha forest read ("nyx-lyaf").

Datasets native_fields/NAME [X, Y, Z]: densities in units of the mean, temperature in K, velocities in cm/s, each with
an attribute `units`. The group `domain` has the attributes size (three lengths in comoving Mpc/h: Nyx's converter
multiplies the lengths of its input file, in Mpc, by h) and shape (three counts); `universe` has hubble (h = H0 / 100),
omega_m, omega_l, omega_b and redshift.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from utils.data.files.attributes import UNIVERSE, scalar, universe_of
from utils.data.files.fields import NATIVE
from utils.data.files.hdf5 import open_file, reading
from utils.data.files.snapshots import FIELDS, UNITS, GridField, Shape, Snapshot, quantity_of
from utils.errors import UserError

FORMAT = "nyx-lyaf"
DEFAULT_UNITS = {"density": "mean", "velocity": "cm/s", "temperature": "K"}  # of datasets that state none
CELL_TOLERANCE = 1e-4  # relative difference of the sides of a cell


def open_nyx(path: str) -> Snapshot:
    """The fields of a snapshot; raises UserError if it contradicts itself."""
    file = open_file(path)
    with reading(path):
        if NATIVE not in file:
            raise UserError(
                f"{path} has no group {NATIVE}; it contains {', '.join(file) or 'nothing'}; give another file"
            )
        group = file[NATIVE]
        fields = {name: _field(path, name, group[name]) for name in FIELDS if name in group}
        domain, universe = (dict(file[name].attrs) if name in file else {} for name in ("domain", "universe"))
        cell = _cell(path, domain, Snapshot(path, fields).shape) if fields else None
        periodic = bool(scalar(file.attrs.get("periodic", True)))  # predict.py writes it
        return Snapshot(path, fields, cell, periodic, universe_of(universe, path))


def _field(path: str, field: str, dataset: h5py.Dataset) -> GridField:
    name, quantity = f"{path}: {NATIVE}/{field}", quantity_of(field)
    if len(dataset.shape) != 3 or dataset.dtype.kind not in "fiu":
        raise UserError(f"{name} is {dataset.shape}, expected (X, Y, Z) of real numbers; give another file")
    unit = str(scalar(dataset.attrs.get("units", DEFAULT_UNITS[quantity]))).strip().strip("()")
    return GridField(name, quantity, dataset, unit)


def _cell(path: str, domain: Mapping[str, Any], shape: Shape) -> float | None:
    """Side of a cell in comoving Mpc/h, if the file states the size of its box."""
    stated = tuple(np.ravel(domain.get("shape", shape)).tolist())
    if stated != shape:
        raise UserError(f"{path}: its fields have {shape} cells, domain/shape is {stated}; give another file")
    if "size" not in domain:
        return None
    sizes = np.ravel(domain["size"]).astype(float).tolist()
    if len(sizes) != 3:
        raise UserError(f"{path}: domain/size is {sizes}, expected three lengths in Mpc/h; correct the attribute")
    cells = [size / count for size, count in zip(sizes, shape, strict=True)]
    if max(cells) > min(cells) * (1 + CELL_TOLERANCE):
        sides = " × ".join(f"{cell:.6g}" for cell in cells)
        raise UserError(f"{path}: cells of {sides} Mpc/h (domain/size over domain/shape) are not cubes; resample them")
    return cells[0]


def layout_attributes(names: list[str], shape: Shape, cell: float, simulation: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the file, its groups and datasets; `simulation` has this project's attributes.

    Texts have a fixed length, as programs in C expect.
    """
    sizes = {"size": np.array([cell * count for count in shape]), "shape": np.array(shape, np.int32)}
    universe = {name: float(simulation[key]) / factor for name, (key, factor) in UNIVERSE.items()}
    units = {"density": "(mean)", "velocity": "cm/s", "temperature": "K"}
    return {
        "": {"format": np.bytes_(FORMAT)},
        "domain": sizes,
        "universe": universe,
        "derived_fields": {},  # where such tools write their results
        **{f"{NATIVE}/{name}": {"units": np.bytes_(units[quantity_of(name)])} for name in names},
    }


def from_physical(name: str, values: np.ndarray) -> np.ndarray:
    """The values of a field in this layout's units, from those of channels.py."""
    unit = DEFAULT_UNITS[quantity_of(name)]
    return values / np.float32(UNITS[quantity_of(name)][unit])
