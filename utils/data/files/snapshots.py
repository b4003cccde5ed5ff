"""Fields of simulations in the layouts that other programs write, read in blocks.

Raw files are a directory of little-endian float32 values, one `NAME.f32` per field, as in SDRBench's Nyx data. NumPy
grids are a directory with one `.npy` file per field, [X, Y, Z] or, as in CAMELS, [N, X, Y, Z]. `nyx.py` reads HDF5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from utils.data.files.fields import as_float32
from utils.data.files.hdf5 import reading
from utils.errors import UserError, os_errors_for_users
from utils.files import open_regular

Shape = tuple[int, int, int]
Block = tuple[slice, slice]  # planes along x, and in each of them rows along y; rows along z are whole
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
    """A field [X, Y, Z]."""

    name: str  # file and dataset, for errors
    quantity: str  # a key of UNITS
    shape: Shape
    read: Callable[[Block], np.ndarray]  # the values of a block, as stored
    unit: str | None = None  # as the file states it
    chunk: tuple[int, int] | None = None  # planes and rows of a chunk, which HDF5 unpacks as a whole

    def values(self, block: Block) -> np.ndarray:
        """Values [x, y, Z], an array of its own; raises UserError if they cannot be read."""
        with reading(self.name):
            return as_float32(self.read(block))

    def blocks(self, planes: range) -> Iterator[Block]:
        """Divides a range of planes into blocks of BLOCK_VALUES, or of whole chunks along z if these hold more."""
        _, y, z = self.shape
        depth, width = self.chunk or (1, y)
        rows = min(max(BLOCK_VALUES // (depth * z) // width, 1) * width, y)
        thickness = max(BLOCK_VALUES // (rows * z) // depth, 1) * depth
        for first in range(planes.start // thickness * thickness, planes.stop, thickness):
            for row in range(0, y, rows):
                along_x = slice(max(first, planes.start), min(first + thickness, planes.stop))
                yield along_x, slice(row, min(row + rows, y))


@dataclass(frozen=True)
class Snapshot:
    """The fields of one simulation, by names of FIELDS, as far as the files have them."""

    path: str
    fields: Mapping[str, GridField]
    cell: float | None = None  # side of a cell in comoving Mpc/h
    periodic: bool = True
    about: Mapping[str, float] = field(default_factory=dict)  # attributes that state redshift and cosmology

    @property
    def shape(self) -> Shape:
        """Cells along x, y and z; raises UserError if they differ between fields."""
        first, *others = self.fields.values()
        for other in others:
            if other.shape != first.shape:
                raise UserError(
                    f"{first.name} has {first.shape} cells, {other.name} has {other.shape}; give fields of one grid"
                )
        return first.shape


def read_stored(path: Path, dtype: np.dtype, offset: int, shape: Shape, block: Block) -> np.ndarray:
    """A block of values that a file holds in C order from a byte `offset` on; a mapping would count as memory."""
    (planes, rows), cells = block, shape[1] * shape[2]
    count, begin = (planes.stop - planes.start) * cells, offset + planes.start * cells * dtype.itemsize
    values = np.fromfile(path, dtype, count, offset=begin)
    if values.size < count:
        raise UserError(f"cannot read {path}: the file is truncated; copy or recreate it")
    return values.reshape(-1, *shape[1:])[:, rows]


def open_raw(path: str, shape: Shape) -> Snapshot:
    """The files `NAME.f32` of a directory, all with `shape` cells."""
    fields, dtype = {}, np.dtype("<f4")
    for name, file in _files(path, {name: f"{name}.f32" for name in FIELDS}).items():
        size, expected = file.stat().st_size, dtype.itemsize * int(np.prod(shape))
        if size != expected:
            raise UserError(
                f"{file} has {size} bytes, but {' × '.join(map(str, shape))} float32 values have {expected}; give "
                f"another --shape"
            )
        fields[name] = GridField(str(file), quantity_of(name), shape, partial(read_stored, file, dtype, 0, shape))
    return Snapshot(path, fields)


def open_npy(path: str, index: int | None) -> Snapshot:
    """The files `NAME.npy` or CAMELS's `Grids_…` of a directory; `index` chooses one box of [N, X, Y, Z]."""
    fields = {}
    for name, file in _files(path, {name: f"{name}.npy" for name in FIELDS}, CAMELS).items():
        with reading(str(file)):
            values = np.load(file, mmap_mode="r", allow_pickle=False)
            offset = int(getattr(values, "offset", 0))
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu" or not values.flags.c_contiguous:
            raise UserError(f"{file} does not hold real numbers in C order; write np.ascontiguousarray(…) of them")
        if values.ndim not in (3, 4) or 0 in values.shape:
            raise UserError(f"{file} is {values.shape}, expected (X, Y, Z) or (N, X, Y, Z); write it with these axes")
        if (values.ndim == 4) != (index is not None):
            remedy = "remove --index" if values.ndim == 3 else "choose one box with --index"
            raise UserError(f"{file} is {values.shape}; {remedy}")
        if values.ndim == 4:
            assert index is not None
            if not 0 <= index < len(values):
                raise UserError(f"{file} has boxes 0 to {len(values) - 1}; give another --index")
            offset, values = offset + index * values[0].nbytes, values[0]
        x, y, z = values.shape
        read = partial(read_stored, file, values.dtype, offset, (x, y, z))
        fields[name] = GridField(str(file), quantity_of(name), (x, y, z), read)
    return Snapshot(path, fields)


def _files(path: str, *patterns: Mapping[str, str]) -> dict[str, Path]:
    """The file of each field in a directory, found by its patterns; raises UserError for several, and for a pipe."""
    found: dict[str, Path] = {}
    for name, pattern in ((name, pattern) for each in patterns for name, pattern in each.items()):
        for file in sorted(Path(path).glob(pattern)):
            if name in found:
                raise UserError(f"{path} has {found[name].name} and {file.name}; leave one of them in the directory")
            with os_errors_for_users(f"cannot read {file}", "replace it with a file"):
                open_regular(file).close()  # a pipe would be read forever
            found[name] = file
    suites = {file.name.split("_", 2)[2]: file for file in found.values() if file.name.startswith("Grids_")}
    if len(suites) > 1:
        one, other, *_ = suites.values()
        raise UserError(
            f"{path} has {one.name} and {other.name}, which are of different simulations; leave one of them"
        )
    return found
