"""Simulation volumes on disk: HDF5 with `Nbody` [4, X, Y, Z] and `Hydro` [5, X, Y, Z], float32.

Contiguous datasets are mapped into memory: a crop reads only its own bytes, and all ranks of a node share the page
cache. Chunked or compressed datasets are read through h5py. Other types of numbers and datasets with the channels last
are converted as they are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from utils.config.sections import TransformConfig
from utils.data.files.attributes import Simulation, attributes_of, cell_size, file_transform, simulation_of
from utils.data.files.fields import checked_field
from utils.data.files.page_cache import read_ahead
from utils.errors import UserError, os_errors_for_users, os_reason
from utils.files import atomic_write, copy_file

DATASETS = ("Nbody", "Hydro")
RECREATE, GIVE_ANOTHER = "copy or recreate it", "give another path"
SLAB_VALUES = 2**22  # values of a slab, 16 MiB as float32: volumes are read, sent and checked in slabs
SLABS_AHEAD = 4  # slabs that the kernel reads from disk while one is processed


@dataclass(frozen=True)
class Volume:
    """Input and target fields [C, X, Y, Z]; both support field[channels, x, y, z] with slices.

    `files` are read for as long as the volume is used; a volume in memory has none.
    """

    path: str
    inputs: Any
    targets: Any
    files: tuple[str, ...] = ()
    cell: float | None = None  # side of a cell in comoving Mpc/h, if known
    names: tuple[str, str] = DATASETS
    conversion: str = ""  # datasets that are converted as they are read, and how, for the log
    simulation: Simulation = field(default_factory=dict)  # redshift, cosmology, cell size, as far as the file has them
    periodic: bool = True  # false for a part of a box, as the file states

    @property
    def shape(self) -> tuple[int, int, int]:
        """Cells along x, y and z."""
        x, y, z = self.inputs.shape[1:]
        return int(x), int(y), int(z)

    @property
    def mapped(self) -> bool:
        return isinstance(self.inputs, np.ndarray) and isinstance(self.targets, np.ndarray)

    @property
    def bytes(self) -> int:
        return sum(4 * int(np.prod(field.shape)) for field in (self.inputs, self.targets))

    def slab_locations(self) -> list[tuple[int, int, slice]]:
        """Field (0 inputs, 1 targets), channel, and planes along x of each slab of the volume, in reading order."""
        return [
            (number, channel, planes)
            for number, field in enumerate((self.inputs, self.targets))
            for channel in range(field.shape[0])
            for planes in slab_planes(field.shape[1:])
        ]

    def slabs(self) -> Iterator[tuple[int, int, int, np.ndarray]]:
        """The whole volume in slabs: (field, channel, first x, values [n, Y, Z])."""
        for number, channel, planes in self.slab_locations():
            field = (self.inputs, self.targets)[number]
            request_read_ahead(field, channel, planes)
            with reading(self.path):
                values = field[channel, planes]
            yield number, channel, planes.start, values


def cells_text(shape: Sequence[int]) -> str:
    """The number of cells along each axis, for messages."""
    return f"{shape[0]}³" if len(set(shape)) == 1 else " × ".join(map(str, shape))


def slab_planes(shape: Sequence[int]) -> list[slice]:
    """Slices along x that divide a grid [X, Y, Z] into slabs of at most SLAB_VALUES values, or of one plane."""
    thickness = max(1, SLAB_VALUES // (shape[1] * shape[2]))
    return [slice(start, min(start + thickness, shape[0])) for start in range(0, shape[0], thickness)]


def request_read_ahead(field: Any, channel: int, planes: slice) -> None:
    """Asks the kernel to read the slabs after `planes` from disk; otherwise it reads mapped arrays in small pieces."""
    if isinstance(field, np.ndarray) and planes.stop < field.shape[1]:
        read_ahead(field[channel, planes.stop : planes.stop + SLABS_AHEAD * (planes.stop - planes.start)])


class FieldReader:
    """Reads one dataset [C, X, Y, Z] of a file in planes along x."""

    def __init__(self, path: str, name: str, channels: int, transform: TransformConfig) -> None:
        """Raises UserError if the file does not match the config."""
        with reading(path):
            file = open_file(path)
            linked = f"link it, in Python: h5py.File('{path}', 'a')['{name}'] = h5py.SoftLink('/NAME')"
            field = checked_field(file, path, name, channels, linked)
            self.attributes = attributes_of(file, field.shape[1:], path)
            file_transform(transform, {path: self.attributes})
            self.values = field.mapped()
        self.path, self.name = path, name
        self.shape: tuple[int, int, int] = field.shape[1:]
        # Side of a cell in comoving Mpc/h, if the file states the box size, which is that of the longest side.
        self.cell = cell_size(self.attributes, max(self.shape), path)
        self.simulation = simulation_of(self.attributes, self.cell)
        self.conversion = f"{field.conversion}: converted" if field.conversion else ""

    def planes(self, start: int, stop: int) -> np.ndarray:
        """Values [C, stop - start, Y, Z]; raises UserError if they cannot be read or are not all finite."""
        with reading(self.path):
            values = np.asarray(self.values[:, start:stop])
        place = nonfinite_place(values)
        if place is None:
            return values
        c, x, y, z = place
        raise UserError(f"{self.path}: {self.name}[{c}, {start + x}, {y}, {z}] is {values[place]}; fix the file")

    def close(self) -> None:
        """Closes the file."""
        self.values = None


def open_volume(
    path: str | os.PathLike[str],
    channels: tuple[int, int],
    transform: TransformConfig | None = None,
    names: tuple[str, str] = DATASETS,
    remedy: str = GIVE_ANOTHER,
) -> Volume:
    """Opens a volume; raises UserError if it does not match the arguments, with this remedy if there is no file."""
    path = str(path)
    with reading(path):
        file = open_file(path, remedy)
        remedies = (f"set dataset_names or {key}" for key in ("N_in_channels", "N_out_channels"))
        stored = [checked_field(file, path, *expected) for expected in zip(names, channels, remedies, strict=True)]
        if transform is not None:
            file_transform(transform, {path: file.attrs})
        attributes = attributes_of(file, stored[0].shape[1:], path)
        cell = cell_size(attributes, max(stored[0].shape[1:]), path)
        simulation = simulation_of(attributes, cell)
        periodic = bool(attributes.get("periodic", True))
        fields = [field.mapped() for field in stored]
    shapes = [field.shape for field in stored]
    if shapes[0][1:] != shapes[1][1:]:
        raise UserError(f"{path}: {names[0]} is {shapes[0]}, {names[1]} is {shapes[1]}; their grids must be equal")
    files = tuple(dict.fromkeys(field.path for field in stored))
    conversions = [
        f"{name} is {field.conversion}" for name, field in zip(names, stored, strict=True) if field.conversion
    ]
    conversion = f"{' and '.join(conversions)}: converted" if conversions else ""
    return Volume(path, fields[0], fields[1], files, cell, names, conversion, simulation, periodic)


def open_file(path: str, remedy: str = GIVE_ANOTHER) -> h5py.File:
    """Opens an HDF5 file for reading; raises UserError if that fails, with this remedy if there is no such file."""
    if not os.path.exists(path):
        raise UserError(f"no such file: {path}; {remedy}")
    if not os.path.isfile(path):
        raise UserError(f"cannot read {path}: it is not a regular file; {remedy}")
    with reading(path):
        return h5py.File(path, "r")


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Converts the errors of h5py, which raises many types for a damaged file, to UserErrors."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {_reason(error)}") from None
    except Exception as error:
        raise UserError(
            f"cannot read {path}: the file is damaged ({' '.join(str(error).split())}); {RECREATE}"
        ) from None


def _reason(error: OSError) -> str:
    text = " ".join(str(error).split())
    if "truncated" in text:
        return f"the file is truncated; {RECREATE}"
    if "signature" in text:
        return "it is not an HDF5 file; give another file"
    if "unable to lock" in text:
        return "it cannot be locked; stop the process that writes to it, or set HDF5_USE_FILE_LOCKING=FALSE"
    if not error.errno:
        return f"{text}; the file is damaged, or compressed with a filter that h5py lacks: {RECREATE}"
    return os_reason(error)


def nonfinite_place(values: np.ndarray) -> tuple[int, ...] | None:
    """Index of the first NaN or infinite value, or None."""
    with np.errstate(invalid="ignore"):
        if np.isfinite(np.sum(values, dtype=np.float64)):  # one pass, no temporary array
            return None
    return tuple(np.argwhere(~np.isfinite(values))[0].tolist())


def check_cache(directory: str) -> None:
    """Raises UserError if `stage` could not create a file in the directory, which need not exist; leaves nothing."""
    parent = Path(directory).absolute()
    while not os.path.lexists(parent):
        parent = parent.parent
    with os_errors_for_users(f"cannot stage data in use_cache={directory}", "choose another use_cache"):
        tempfile.TemporaryFile(dir=parent).close()


def stage(path: str, directory: str) -> str:
    """Copies `path` into a node-local `directory` unless an up-to-date copy exists; returns the copy's path.

    The copy is atomic.
    """
    source = Path(path)
    digest = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]  # distinguishes files of the same name
    target = Path(directory) / f"{source.stem}-{digest}{source.suffix}"
    with os_errors_for_users(f"cannot stage {path} in use_cache={directory}", "choose another use_cache"):
        original = source.stat()
        if target.exists():
            copy = target.stat()
            if (copy.st_size, copy.st_mtime_ns) == (original.st_size, original.st_mtime_ns):
                return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write([target]) as (partial,):
            copy_file(source, partial, f"staging {source.name} in {directory}")
            os.utime(partial, ns=(original.st_atime_ns, original.st_mtime_ns))
    return str(target)
