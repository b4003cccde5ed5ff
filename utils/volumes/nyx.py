"""The HDF5 layout of Nyx's snapshots that tools for the Lyman-alpha forest read ("nyx-lyaf").

Datasets native_fields/NAME [X, Y, Z]: densities in units of the mean, temperature in K, velocities in cm/s, each with
an attribute `units`. The group `domain` has the attributes size (three lengths in comoving Mpc/h: Nyx's converter
multiplies the lengths of its input file, in Mpc, by h) and shape (three counts); `universe` has hubble (h = H0 / 100),
omega_m, omega_l, omega_b and redshift.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from utils.errors import UserError
from utils.volumes.attributes import CELL, TYPES, UNIVERSE, domain_of, plain_attributes, universe_of
from utils.volumes.hdf5 import DATASETS, NATIVE
from utils.volumes.snapshots import FIELDS, UNITS, GridField, Shape, Snapshot, quantity_of
from utils.volumes.storage import contents, open_file, reading, storage_files

FORMATS = ("volume", "nyx")  # layouts that predict.py and the simulation write
FORMAT = "nyx-lyaf"
DEFAULT_UNITS = {"density": "mean", "velocity": "cm/s", "temperature": "K"}  # of datasets that state none
PER_SECOND = re.compile(r" */ *s$|[ .*]+s(\*\*|\^)?-1$")  # astropy's and yt's "km / s", "cm*s**-1", "km s^-1"
CELL_TOLERANCE = 1e-4  # relative difference of the sides of a cell


def open_nyx(path: Path) -> Snapshot:
    """The fields of a snapshot; raises UserError if it contradicts itself."""
    file = open_file(str(path))
    with reading(str(path)):
        if NATIVE not in file:
            raise _other_layout(path, file)
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


def _other_layout(path: Path, file: h5py.File) -> UserError:
    """The error for an HDF5 file that is no snapshot of Nyx: what it seems to be, and how to import it."""
    if DATASETS[0] in file:
        return UserError(f"{path} is a volume already; set train_path to it, or give it to predict.py")
    kind, first = "has another layout than Nyx", ""
    if str(plain_attributes(file).get("data_type", "")).startswith("yt"):
        kind = "seems to be a file of yt"
    if any(name.startswith("PartType") for name in file):
        kind, first = "seems to be a snapshot of particles (Gadget, SWIFT)", "deposit them on a grid, and "
    return UserError(
        f"{path} {kind}; it contains {contents(file)}; {first}link each grid to its name in docs/data.md, in Python: "
        f"h5py.File('{path}', 'a')['{NATIVE}/{FIELDS[0]}'] = h5py.SoftLink('/NAME'); then give --box_size, --redshift"
    )


def _field(path: Path, field: str, dataset: h5py.Dataset) -> GridField:
    name, quantity = f"{path}: {NATIVE}/{field}", quantity_of(field)
    if len(dataset.shape) != 3:
        raise UserError(f"{name} is {dataset.shape}, expected (X, Y, Z); give another file")
    storage_files(dataset)
    stated = plain_attributes(dataset).get("units")
    unit = DEFAULT_UNITS[quantity] if stated is None else PER_SECOND.sub("/s", str(stated).strip("() "))
    return GridField(name, quantity, dataset, unit, stated is not None)


def layout_attributes(names: Sequence[str], shape: Shape, cell: float, simulation: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the file, its groups and datasets; texts have a fixed length, as programs in C expect."""
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
