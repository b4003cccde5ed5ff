"""Fields of simulations in the layouts that other programs write.

Raw files are a directory of little-endian float32 values, one `NAME.f32` per field, as in SDRBench's Nyx data. NumPy
grids are a directory with one `.npy` file per field, [X, Y, Z] or, as in CAMELS, [N, X, Y, Z]. `nyx.py` reads HDF5.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from utils.errors import UserError
from utils.volumes.hdf5 import cells_text, check_real
from utils.volumes.storage import reading

Shape = tuple[int, int, int]

# The names of Nyx; those of the dark-matter velocity, which Nyx does not write, are this project's.
DARK_MATTER_DENSITY, GAS_DENSITY, TEMPERATURE = "dark_matter_density", "baryon_density", "temperature"
DARK_MATTER_VELOCITY = tuple(f"dark_matter_velocity_{axis}" for axis in "xyz")
GAS_VELOCITY = tuple(f"velocity_{axis}" for axis in "xyz")
FIELDS = (DARK_MATTER_DENSITY, *DARK_MATTER_VELOCITY, GAS_DENSITY, *GAS_VELOCITY, TEMPERATURE)
CAMELS = {DARK_MATTER_DENSITY: "Grids_Mcdm_*.npy", GAS_DENSITY: "Grids_Mgas_*.npy", TEMPERATURE: "Grids_T_*.npy"}
# Factors to the units of channels.py. A density in any other unit is divided by its mean.
UNITS = {
    "density": {"mean": 1.0},
    "velocity": {"km/s": 1.0, "m/s": 1e-3, "cm/s": 1e-5},
    "temperature": {"K": 1.0},
}


def quantity_of(name: str) -> str:
    """The key of UNITS for the field `name`."""
    return next(quantity for quantity in UNITS if quantity in name)


@dataclass(frozen=True)
class GridField:
    """A field [X, Y, Z], as a dataset of HDF5 or as a mapped array."""

    name: str  # file and dataset, for errors
    quantity: str  # a key of UNITS
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


def open_directory(path: Path, shape: Shape | None, index: int | None) -> Snapshot:
    """The fields of raw or NumPy files; raises UserError if they contradict each other, `shape` or `index`."""
    if any(path.glob("*.npy")):
        return _open_npy(path, index)
    if not any(path.glob("*.f32")):
        raise UserError(f"{path} has neither .f32 nor .npy files; give another --input")
    if shape is None:
        raise UserError("raw files do not state their shape; give --shape X,Y,Z")
    return _open_raw(path, shape)


def _open_raw(path: Path, shape: Shape) -> Snapshot:
    """The files `NAME.f32` of a directory, all with `shape` cells."""
    fields = {}
    for name, file in _files(path, "f32").items():
        size, expected = file.stat().st_size, 4 * int(np.prod(shape))
        if size != expected:
            cells = cells_text(shape)
            raise UserError(f"{file} has {size} bytes, but {cells} float32 values have {expected}; correct --shape")
        fields[name] = GridField(str(file), quantity_of(name), np.memmap(file, "<f4", "r", shape=shape))
    return Snapshot(str(path), fields)


def _open_npy(path: Path, index: int | None) -> Snapshot:
    """The files `NAME.npy` or CAMELS's `Grids_…` of a directory; `index` chooses one box of [N, X, Y, Z]."""
    fields = {}
    for name, file in _files(path, "npy").items():
        with reading(str(file)):
            values = np.load(file, mmap_mode="r", allow_pickle=False)
        if values.ndim != (3 if index is None else 4) or (index or 0) not in range(len(values)):
            raise UserError(f"{file} is {values.shape}; choose a box of (N, X, Y, Z) with --index, or remove --index")
        fields[name] = GridField(str(file), quantity_of(name), values if index is None else values[index])
    return Snapshot(str(path), fields)


def _files(path: Path, ending: str) -> dict[str, Path]:
    """The file of each field in a directory; raises UserError if several match."""
    files, suites = {}, set()
    for name in FIELDS:
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
