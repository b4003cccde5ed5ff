"""Fields of simulations in the layouts that other programs write, read in blocks.

Raw files are a directory of little-endian float32 values, one `NAME.f32` per field, as in SDRBench's Nyx data. NumPy
grids are a directory with one `.npy` file per field, [X, Y, Z] or, as in CAMELS, [N, X, Y, Z]. `nyx.py` reads HDF5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from utils.data.files.blocks import Block, blocks
from utils.data.files.hdf5 import reading
from utils.errors import UserError

Shape = tuple[int, int, int]
BLOCK_VALUES = 2**20  # values of a block, 4 MiB as float32, which caches hold

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
    unit: str | None = None  # as the file states it

    @property
    def shape(self) -> Shape:
        """Cells along x, y and z."""
        x, y, z = self.stored.shape
        return x, y, z

    def read(self, block: Block) -> np.ndarray:
        """A copy of the values [x, y, Z] as float32; raises UserError if they cannot be read."""
        with reading(self.name), np.errstate(over="ignore"):  # values beyond float32 become infinite, and are refused
            return np.array(self.stored[block], np.float32)

    def blocks(self, planes: range) -> Iterator[Block]:
        """Divides a range of planes into blocks."""
        chunks = getattr(self.stored, "chunks", None)
        return blocks(planes, self.shape[1], self.shape[2], chunks and chunks[:2], BLOCK_VALUES)


@dataclass(frozen=True)
class Snapshot:
    """The fields of one simulation, by names of FIELDS, as far as the files have them."""

    path: str
    fields: Mapping[str, GridField]
    cell: float | None = None  # side of a cell in comoving Mpc/h
    periodic: bool = True
    simulation: Mapping[str, float] = field(default_factory=dict)  # attributes that state redshift and cosmology

    @property
    def shape(self) -> Shape:
        """Cells along x, y and z; raises UserError if they differ between fields."""
        first, *remaining = self.fields.values()
        for grid_field in remaining:
            if grid_field.shape != first.shape:
                raise UserError(
                    f"{first.name} has {first.shape} cells, {grid_field.name} has {grid_field.shape}; give fields of "
                    f"one grid"
                )
        return first.shape


def open_raw(path: str, shape: Shape) -> Snapshot:
    """The files `NAME.f32` of a directory, all with `shape` cells."""
    fields = {}
    for name, file in _files(path, {name: f"{name}.f32" for name in FIELDS}).items():
        size, expected = file.stat().st_size, 4 * int(np.prod(shape))
        if size != expected:
            raise UserError(
                f"{file} has {size} bytes, but {' × '.join(map(str, shape))} float32 values have {expected}; give "
                f"another --shape"
            )
        fields[name] = GridField(str(file), quantity_of(name), np.memmap(file, "<f4", "r", shape=shape))
    return Snapshot(path, fields)


def open_npy(path: str, index: int | None) -> Snapshot:
    """The files `NAME.npy` or CAMELS's `Grids_…` of a directory; `index` chooses one box of [N, X, Y, Z]."""
    fields = {}
    for name, file in _files(path, {name: f"{name}.npy" for name in FIELDS}, CAMELS).items():
        with reading(str(file)):
            values = np.load(file, mmap_mode="r", allow_pickle=False)
        if values.ndim not in (3, 4) or values.dtype.kind not in "fiu":
            raise UserError(f"{file} is {values.dtype} {values.shape}, expected real numbers (X, Y, Z) or (N, X, Y, Z)")
        if (values.ndim == 4) != (index is not None):
            remedy = "remove --index" if values.ndim == 3 else "choose one box with --index"
            raise UserError(f"{file} is {values.shape}; {remedy}")
        if index is not None:
            if not 0 <= index < len(values):
                raise UserError(f"{file} has boxes 0 to {len(values) - 1}; give another --index")
            values = values[index]
        fields[name] = GridField(str(file), quantity_of(name), values)
    return Snapshot(path, fields)


def _files(path: str, *patterns: Mapping[str, str]) -> dict[str, Path]:
    """The file of each field in a directory, found by its patterns; raises UserError if several match."""
    files: dict[str, Path] = {}
    for name, pattern in (item for mapping in patterns for item in mapping.items()):
        for file in sorted(Path(path).glob(pattern)):
            if name in files:
                raise UserError(f"{path} has {files[name].name} and {file.name}; leave one of them in the directory")
            files[name] = file
    suites = {file.name.split("_", 2)[2]: file.name for file in files.values() if file.name.startswith("Grids_")}
    if len(suites) > 1:
        names = " and ".join(suites.values())
        raise UserError(f"{path} has {names}, which are of different simulations; leave one of them")
    return files
