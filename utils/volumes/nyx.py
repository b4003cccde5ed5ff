"""The HDF5 layout of Nyx's snapshots that tools for the Lyman-alpha forest read ("nyx-lyaf").

Datasets native_fields/NAME [X, Y, Z]: densities in units of the mean, temperature in K, velocities in cm/s, each with
an attribute `units`. The group `domain` has the attributes size (three lengths in comoving Mpc/h: Nyx's converter
multiplies the lengths of its input file, in Mpc, by h) and shape (three counts); `universe` has hubble (h = H0 / 100),
omega_m, omega_l, omega_b and redshift.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from utils.errors import UserError
from utils.volumes.attributes import CELL, TYPES, UNIVERSE, domain_of, plain_attributes, universe_of
from utils.volumes.hdf5 import NATIVE
from utils.volumes.snapshots import FIELDS, UNITS, GridField, Shape, Snapshot, quantity_of
from utils.volumes.storage import open_file, reading, storage_files

FORMATS = ("volume", "nyx")  # layouts that predict.py and the simulation write
FORMAT = "nyx-lyaf"
DEFAULT_UNITS = {"density": "mean", "velocity": "cm/s", "temperature": "K"}  # of datasets that state none
CELL_TOLERANCE = 1e-4  # relative difference of the sides of a cell


def open_nyx(path: Path) -> Snapshot:
    """The fields of a snapshot; raises UserError if it contradicts itself."""
    file = open_file(str(path))
    with reading(str(path)):
        if NATIVE not in file:
            raise UserError(f"{path} has no group {NATIVE}; it contains {', '.join(file)}; give another file")
        group = file[NATIVE]
        fields = {name: _field(path, name, group[name]) for name in FIELDS if name in group}
        simulation = universe_of(file)
        if fields and (lengths := domain_of(file)):
            cells = np.array(lengths) / Snapshot(str(path), fields).shape
            if max(cells) > min(cells) * (1 + CELL_TOLERANCE):
                sides = " × ".join(f"{cell:.6g}" for cell in cells)
                raise UserError(f"{path}: cells of {sides} Mpc/h (domain/size over shape) are not cubes; resample them")
            simulation[CELL] = float(cells[0])
        periodic = plain_attributes(file, TYPES).get("periodic", True)  # predict.py writes it
        return Snapshot(str(path), fields, simulation, periodic)


def _field(path: Path, field: str, dataset: h5py.Dataset) -> GridField:
    name, quantity = f"{path}: {NATIVE}/{field}", quantity_of(field)
    if len(dataset.shape) != 3:
        raise UserError(f"{name} is {dataset.shape}, expected (X, Y, Z); give another file")
    storage_files(dataset)
    unit = str(plain_attributes(dataset).get("units", DEFAULT_UNITS[quantity]))
    return GridField(name, quantity, dataset, unit.strip("() "))


def layout_attributes(names: Sequence[str], shape: Shape, cell: float, simulation: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the file, its groups and datasets; `simulation` has this project's attributes.

    Texts have a fixed length, as programs in C expect.
    """
    sizes = {"size": np.array([cell * count for count in shape]), "shape": np.array(shape, np.int32)}
    universe = {name: float(simulation[key]) / factor for name, (key, factor) in UNIVERSE.items()}
    units = DEFAULT_UNITS | {"density": "(mean)"}
    return {
        "": {"format": np.bytes_(FORMAT)},
        "domain": sizes,
        "universe": universe,
        "derived_fields": {},  # where such tools write their results
        **{f"{NATIVE}/{name}": {"units": np.bytes_(units[quantity_of(name)])} for name in names},
    }


def datasets(fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fields in the units of channels.py as datasets of this layout: names in the file, and values in its units."""
    quantities = {name: quantity_of(name) for name in fields}
    factors = {name: np.float32(UNITS[key][DEFAULT_UNITS[key]]) for name, key in quantities.items()}
    return {f"{NATIVE}/{name}": values / factors[name] for name, values in fields.items()}
