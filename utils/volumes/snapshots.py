"""Fields of simulations in the layouts that other programs write.

Raw files are a directory of little-endian float32 values, one `NAME.f32` per field, as in SDRBench's Nyx data. NumPy
grids are a directory with one `.npy` file per field, [X, Y, Z] or, as in CAMELS, [N, X, Y, Z].

Nyx's snapshots are HDF5, in the layout that tools for the Lyman-alpha forest read ("nyx-lyaf"): datasets
native_fields/NAME [X, Y, Z] with an attribute `units`. The group `domain` has the attributes size (three lengths in
comoving Mpc/h: Nyx's converter multiplies those of its input file, in Mpc, by h) and shape (three counts); `universe`
has hubble (h = H0 / 100), omega_m, omega_l, omega_b and redshift.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from utils.config import did_you_mean
from utils.errors import UserError
from utils.volumes.attributes import CELL, TYPES, UNIVERSE, cubic_cell, domain_of, plain_attributes, universe_of
from utils.volumes.hdf5 import DATASETS, NATIVE, cells_text, check_real, check_storage, contents, open_file, reading

Shape = tuple[int, int, int]

# The names of Nyx; those of the dark-matter velocity, which Nyx does not write, are this project's.
DARK_MATTER_DENSITY, GAS_DENSITY, TEMPERATURE = "dark_matter_density", "baryon_density", "temperature"
DARK_MATTER_VELOCITY = tuple(f"dark_matter_velocity_{axis}" for axis in "xyz")
GAS_VELOCITY = tuple(f"velocity_{axis}" for axis in "xyz")
FIELDS = (DARK_MATTER_DENSITY, *DARK_MATTER_VELOCITY, GAS_DENSITY, *GAS_VELOCITY, TEMPERATURE)
VECTORS = {"dark_matter_velocity": DARK_MATTER_VELOCITY, "velocity": GAS_VELOCITY}  # [X, Y, Z, 3], in place of these
CAMELS = {DARK_MATTER_DENSITY: "Grids_Mcdm_*.npy", GAS_DENSITY: "Grids_Mgas_*.npy", TEMPERATURE: "Grids_T_*.npy"}
# Factors to the units of channels.py. A density in any other unit is divided by its mean.
UNITS = {"density": {"mean": 1.0}, "velocity": {"km/s": 1.0, "m/s": 1e-3, "cm/s": 1e-5}, "temperature": {"K": 1.0}}
log = logging.getLogger(__name__)

FORMATS = ("volume", "nyx")  # layouts that predict.py and the simulation write
DEFAULT_UNITS = {"density": "mean", "velocity": "cm/s", "temperature": "K"}  # of Nyx's datasets that state none
OTHER = "field"  # the quantity of a field that is not in FIELDS
PER_SECOND = re.compile(r" */ *s$|[ .*]+s(\*\*|\^)?-1$")  # astropy's and yt's "km / s", "cm*s**-1", "km s^-1"


def quantity_of(name: str) -> str:
    """The key of UNITS for the field `name` of FIELDS or VECTORS; OTHER for any other name."""
    return next(quantity for quantity in UNITS if quantity in name) if name in (*FIELDS, *VECTORS) else OTHER


class Component:
    """Component `axis` of vectors [X, Y, Z, 3], a dataset or an array, which is read in slabs."""

    def __init__(self, vectors: Any, axis: int) -> None:
        self.shape, self.dtype = vectors.shape[:3], vectors.dtype
        self.chunks = (getattr(vectors, "chunks", None) or ())[:3]
        self._vectors, self._axis = vectors, axis

    def __getitem__(self, key: Any) -> np.ndarray:
        cells = (*key, slice(None))
        return self._vectors[cells][..., self._axis]


@dataclass(frozen=True)
class GridField:
    """A field [X, Y, Z], as a dataset of HDF5 or as a mapped array."""

    name: str  # file and dataset, for errors
    quantity: str  # a key of UNITS, or OTHER
    stored: Any
    unit: str | None = None
    is_stated: bool = False  # by the file

    def __post_init__(self) -> None:
        check_real(self.stored.dtype, self.name)


@dataclass(frozen=True)
class Snapshot:
    """The fields of one simulation by names of FIELDS, and what is known of its redshift, cosmology and cell size."""

    path: str
    fields: Mapping[str, GridField]
    simulation: Mapping[str, float] = field(default_factory=dict)
    periodic: bool = True

    @property
    def shape(self) -> Shape:
        """Cells along x, y and z; raises UserError if they differ between fields, or if there are none."""
        if not self.fields:
            raise UserError(f"{self.path} has none of the fields {', '.join(FIELDS)}; give its files these names")
        first, *remaining = self.fields.values()
        x, y, z = shape = first.stored.shape
        for grid in remaining:
            if grid.stored.shape != shape:
                raise UserError(f"{first.name} has {shape} cells, {grid.name} {grid.stored.shape}; give one grid")
        return x, y, z


def open_snapshot(path: Path, shape: Shape | None, index: int | None, others: Sequence[str] = ()) -> Snapshot:
    """The fields of a file or directory, scalars `others` last; UserError if they, `shape` and `index` contradict."""
    if not path.is_dir():
        return _open_nyx(path, others)
    ending = "npy" if any(path.glob("*.npy")) else "f32"
    if not any(path.glob(f"*.{ending}")):
        raise UserError(f"{path} has neither .f32 nor .npy files; give another --input")
    fields, files = {}, _files(path, ending, others)
    for unused in {*path.glob(f"*.{ending}")} - {*files.values()}:
        if hint := did_you_mean(unused.stem.lower(), (*FIELDS, *VECTORS)):
            log.warning(f"{unused} is not used{hint}")
    for name, file in files.items():
        axes = (3,) if name in VECTORS else ()
        values = _read_npy(file, index, axes) if ending == "npy" else _read_raw(file, shape, axes)
        fields[name] = GridField(str(file), quantity_of(name), values)
    return Snapshot(str(path), _components(path, fields, others))


def _components(path: Path, grids: Mapping[str, GridField], others: Sequence[str]) -> dict[str, GridField]:
    """The fields in the order of FIELDS, then `others`, and components of vectors; UserError if the input has both."""
    fields = {name: grid for name, grid in grids.items() if name not in VECTORS}
    for vector in filter(grids.__contains__, VECTORS):
        for axis, name in enumerate(VECTORS[vector]):
            if name in grids:
                raise UserError(f"{path} has {vector} and {name}; leave one of them in it")
            grid = grids[vector]
            fields[name] = replace(grid, name=f"{grid.name}[..., {axis}]", stored=Component(grid.stored, axis))
    if missing := [name for name in others if name not in fields]:
        raise UserError(f"{path} has no field {', '.join(missing)}; correct --field or --input_field")
    return {name: fields[name] for name in (*FIELDS, *others) if name in fields}


def _read_raw(file: Path, shape: Shape | None, axes: tuple[int, ...]) -> np.ndarray:
    if shape is None:
        raise UserError("raw files do not state their shape; give --shape X,Y,Z")
    size, expected = file.stat().st_size, 4 * int(np.prod(shape + axes))
    if size != expected:
        cells = cells_text(shape + axes)
        raise UserError(f"{file} has {size} bytes, but {cells} float32 values have {expected}; correct --shape")
    return np.memmap(file, "<f4", "r", shape=shape + axes)


def _read_npy(file: Path, index: int | None, axes: tuple[int, ...]) -> np.ndarray:
    with reading(str(file)):
        values = np.load(file, mmap_mode="r", allow_pickle=False)
    count = 3 + len(axes) + (index is not None)
    if values.ndim != count or values.shape[count - len(axes) :] != axes or (index or 0) not in range(len(values)):
        grid = "X, Y, Z, 3" if axes else "X, Y, Z"
        raise UserError(f"{file} is {values.shape}; choose a box of (N, {grid}) with --index, or write ({grid})")
    return values if index is None else values[index]


def _files(path: Path, ending: str, others: Sequence[str]) -> dict[str, Path]:
    """The file `NAME.ending`, or CAMELS's `Grids_…`, of each field; raises UserError if several match."""
    files, suites = {}, set()
    for name in (*FIELDS, *VECTORS, *others):
        patterns = [f"{name}.{ending}", *([CAMELS[name]] if ending == "npy" and name in CAMELS else [])]
        matches = [file for pattern in patterns for file in path.glob(pattern)]
        if len(matches) > 1:
            names = " and ".join(sorted(file.name for file in matches))
            raise UserError(f"{path} has {names}; leave one of them in the directory")
        for file in matches:
            files[name] = file
            suites.add(file.name.partition("_")[2].partition("_")[2] if file.name.startswith("Grids_") else "")
    if len(suites) > 1:
        raise UserError(f"{path} has fields of different simulations ({', '.join(sorted(suites))}); leave those of one")
    return files


def _open_nyx(path: Path, others: Sequence[str]) -> Snapshot:
    file = open_file(str(path))
    with reading(str(path)):
        if NATIVE not in file:
            raise _other_layout(path, file)
        group = file[NATIVE]
        grids = {name: _nyx_field(path, name, group[name]) for name in (*FIELDS, *VECTORS, *others) if name in group}
        fields, simulation = _components(path, grids, others), universe_of(file)
        if fields and (lengths := domain_of(file)):
            simulation[CELL] = cubic_cell(str(path), lengths, Snapshot(str(path), fields).shape)
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
    link = f"h5py.File('{path}', 'a')['{NATIVE}/{FIELDS[0]}'] = h5py.SoftLink('/NAME')"
    remedy = f"{first}link each grid to its name in docs/data.md, in Python: {link}"
    fault = f"{path} {kind}; it contains {contents(file)}"
    return UserError(f"{fault}; {remedy}; then give --box_size_mpc_h, --redshift")


def _nyx_field(path: Path, field: str, dataset: h5py.Dataset) -> GridField:
    name, quantity = f"{path}: {NATIVE}/{field}", quantity_of(field)
    axes = (3,) if field in VECTORS else ()
    if len(dataset.shape) != 3 + len(axes) or dataset.shape[3:] != axes:
        raise UserError(f"{name} is {dataset.shape}, expected (X, Y, Z{', 3' if axes else ''}); give another file")
    check_storage(dataset)
    stated = plain_attributes(dataset).get("units")
    unit = DEFAULT_UNITS.get(quantity) if stated is None else PER_SECOND.sub("/s", str(stated).strip("() "))
    return GridField(name, quantity, dataset, unit, stated is not None)


def nyx_attributes(names: Sequence[str], shape: Shape, cell: float, simulation: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a file of Nyx, its groups and datasets; texts have a fixed length, as programs in C expect."""
    units = DEFAULT_UNITS | {"density": "(mean)"}
    return {
        "": {"format": np.bytes_("nyx-lyaf")},
        "domain": {"size": np.array([cell * count for count in shape]), "shape": np.array(shape, np.int32)},
        "universe": {name: float(simulation[key]) / factor for name, (key, factor) in UNIVERSE.items()},
        "derived_fields": {},  # where such tools write their results
        **{f"{NATIVE}/{name}": {"units": np.bytes_(units.get(quantity_of(name), ""))} for name in names},
    }


def nyx_datasets(fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fields in the units of channels.py as datasets of Nyx's layout: names in the file, and values in its units."""
    quantities = {name: quantity_of(name) for name in fields}
    units = UNITS | {OTHER: {"": 1.0}}
    factors = {name: np.float32(units[key][DEFAULT_UNITS.get(key, "")]) for name, key in quantities.items()}
    return {f"{NATIVE}/{name}": values / factors[name] for name, values in fields.items()}
