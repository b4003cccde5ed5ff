"""Simulation volumes on disk: HDF5 with `Nbody` [4, L, L, L] and `Hydro` [5, L, L, L], float32.

Contiguous datasets are mapped into memory, so that a crop costs its own bytes and all ranks of a node share the
page cache; chunked or compressed ones are read through h5py.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from utils.config import TransformConfig
from utils.data.files.file_guard import FileGuard
from utils.data.files.page_cache import read_ahead
from utils.errors import UserError
from utils.files import atomic_write
from utils.progress import Progress

DATASETS = ("Nbody", "Hydro")
SLABS_AHEAD = 4  # that are read from disk while one is used
CHANNEL_NAMES = {
    "Nbody": ("dark-matter density", "dark-matter velocity x", "dark-matter velocity y", "dark-matter velocity z"),
    "Hydro": ("gas density", "gas velocity x", "gas velocity y", "gas velocity z", "temperature"),
}


@dataclass(frozen=True)
class Volume:
    """Input and target fields [C, L, L, L]; both support field[channels, x, y, z] with slices.

    `files` are those that are read for as long as the volume is used: none once it is in memory.
    """

    path: str
    inputs: Any
    targets: Any
    files: tuple[str, ...] = ()
    cell: float | None = None  # side of a cell in comoving Mpc/h, where it is known

    @property
    def box(self) -> int:
        return int(self.inputs.shape[-1])

    @property
    def mapped(self) -> bool:
        return isinstance(self.inputs, np.ndarray) and isinstance(self.targets, np.ndarray)

    @property
    def bytes(self) -> int:
        return sum(4 * int(np.prod(field.shape)) for field in (self.inputs, self.targets))

    def slabs(self) -> Iterator[tuple[str, int, int, np.ndarray]]:
        """The whole volume in pieces of a few MB: (dataset, channel, first x, values [n, L, L])."""
        thickness = max(1, 2**22 // self.box**2)
        for name, field in zip(DATASETS, (self.inputs, self.targets), strict=True):
            for channel in range(field.shape[0]):
                for start in range(0, self.box, thickness):
                    prefetch(field, channel, start + thickness, thickness)
                    yield name, channel, start, field[channel, start : start + thickness]

    def slab_count(self) -> int:
        thickness = max(1, 2**22 // self.box**2)
        return (self.inputs.shape[0] + self.targets.shape[0]) * -(-self.box // thickness)


class Fields:
    """One dataset [C, X, Y, Z] of a file, of any three sides, read in planes along x."""

    def __init__(self, path: str, name: str, channels: int, transform: TransformConfig) -> None:
        """UserError with one line where it is not what the config says."""
        file = open_file(path)
        dataset = checked_dataset(file, path, name, channels, is_cube=False)
        check_transform(file.attrs, transform, path)
        self.path, self.name = path, name
        self.unfit = False  # whether a value has been met that is no number
        self.attributes = dict(file.attrs)
        self.shape: tuple[int, int, int] = dataset.shape[1:]
        # Side of a cell in comoving Mpc/h, where the file tells that of the box: of its longest side.
        self.cell = cell_size(self.attributes, max(self.shape), path)
        self._values = _mapped(dataset)
        self._guard = FileGuard((str(dataset.file.filename),))  # a dataset may be a link into another file

    def planes(self, start: int, stop: int) -> np.ndarray:
        """[C, stop - start, Y, Z]; UserError where one of its values is not finite, or cannot be read."""
        self._guard.check()
        try:
            values = np.asarray(self._values[:, start:stop])
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {_reason(error)}") from None
        with np.errstate(invalid="ignore", over="ignore"):
            if np.isfinite(values.sum(dtype=np.float64)):
                return values
        self.unfit = True
        c, x, y, z = (int(place[0]) for place in np.nonzero(~np.isfinite(values)))
        where = f"{self.path}: {self.name}[{c}, {start + x}, {y}, {z}]"
        raise UserError(f"{where} is {values[c, x, y, z]}; mend the file")

    def close(self) -> None:
        self._guard.close()


def prefetch(field: Any, channel: int, start: int, thickness: int) -> None:
    """Has the slabs from plane `start` on read from disk meanwhile: else a mapped array is read in small pieces."""
    if isinstance(field, np.ndarray) and start < field.shape[1]:
        read_ahead(field[channel, start : start + SLABS_AHEAD * thickness])


def open_volume(
    path: str | os.PathLike[str],
    channels: tuple[int, int],
    box: int | None = None,
    transform: TransformConfig | None = None,
) -> Volume:
    """Opens and checks a volume; raises UserError with one line where it is not what the config says."""
    path = str(path)
    file = open_file(path)
    datasets = [checked_dataset(file, path, name, count, box) for name, count in zip(DATASETS, channels, strict=True)]
    if transform is not None:
        check_transform(file.attrs, transform, path)
    fields = [_mapped(dataset) for dataset in datasets]
    if fields[0].shape[1:] != fields[1].shape[1:]:
        raise UserError(f"{path}: Nbody is {fields[0].shape}, Hydro is {fields[1].shape}; their grids must be equal")
    # A dataset may be a link into another file.
    files = dict.fromkeys(str(dataset.file.filename) for dataset in datasets)
    return Volume(path, fields[0], fields[1], tuple(files), cell_size(file.attrs, fields[0].shape[-1], path))


def open_file(path: str) -> h5py.File:
    """An HDF5 file to read from; raises UserError with one line where it cannot be."""
    try:
        return h5py.File(path, "r")
    except FileNotFoundError:
        raise UserError(f"no such file: {path}; make one with python -m utils.simulation, or set its path") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    text = " ".join(str(error).split())
    if "truncated" in text:
        return f"the file is truncated ({text}); copy or make it again"
    if "signature" in text:
        return "it is not an HDF5 file"
    if "unable to lock" in text:
        return "it cannot be locked; end what writes to it, or set HDF5_USE_FILE_LOCKING=FALSE"
    return os.strerror(error.errno) if error.errno else text


def checked_dataset(
    file: h5py.File,
    path: str,
    name: str,
    channels: int | None = None,
    box: int | None = None,
    is_cube: bool = True,
) -> h5py.Dataset:
    """One dataset [C, L, L, L]; None leaves the number of channels, or the box, free, and not `is_cube` each side."""
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        there = [f"group {key}" if file.get(key, getclass=True) is h5py.Group else key for key in file]
        raise UserError(f"{path} has no dataset {name}; it holds {', '.join(there) or 'nothing'}")
    shape: tuple[int, ...] = dataset.shape or ()  # None where the dataset is null
    if len(shape) != 4 or 0 in shape or shape[0] != (channels or shape[0]) or (is_cube and len(set(shape[1:])) != 1):
        sides = "L, L, L" if is_cube else "X, Y, Z"
        raise UserError(f"{path}: {name} is {shape}, expected ({channels or 'channels'}, {sides})")
    if box is not None and shape[1] != box:
        raise UserError(f"{path}: {name} is a box of {shape[1]} cells a side, but box_size says {box}; set box_size")
    if dataset.dtype != np.dtype("<f4"):
        raise UserError(f"{path}: {name} is of type {dataset.dtype}, expected little-endian float32")
    return dataset


def check_transform(attributes: Mapping[str, Any], transform: TransformConfig, path: str) -> None:
    """UserError where a file says that its channels were made otherwise than the config says; most say nothing."""
    for key, expected in transform.model_dump().items():
        said = _number(attributes, key, path)
        if said is not None and expected is not None and not np.isclose(said, expected, rtol=1e-6):
            raise UserError(
                f"{path} says that its channels were made with {key} {said:g}, the config says {expected:g}; "
                f"scale the file's channels, or set transform.{key} for a training on such files"
            )


def cell_size(attributes: Mapping[str, Any], side: int, path: str) -> float | None:
    """Side of a cell in comoving Mpc/h, where the file tells the box's; `side` is the box's in cells."""
    length = _number(attributes, "box_size_mpc_h", path)
    return None if length is None else length / side


def _number(attributes: Mapping[str, Any], key: str, path: str) -> float | None:
    """An attribute, where it is there; UserError where it is no number."""
    value = attributes.get(key)
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise UserError(f"{path}: its attribute {key} is {value!r}; make it a number, or remove it") from None


def _mapped(dataset: h5py.Dataset) -> Any:
    """The dataset as a mapped array where it lies in one piece, else itself."""
    offset = dataset.id.get_offset()
    if dataset.chunks is None and offset is not None and not dataset.is_virtual and not dataset.external:
        holder = dataset.file.filename
        if offset + dataset.nbytes > os.path.getsize(holder):
            raise UserError(f"cannot read {holder}: the file is truncated inside {dataset.name}; copy or make it again")
        mapped = np.memmap(holder, dtype="<f4", mode="r", offset=offset, shape=dataset.shape)
        return np.asarray(mapped)  # the plain type: slicing a memmap object is slower
    return dataset


def first_nonfinite(volume: Volume, step: Any = None) -> str | None:
    """Where the first NaN or infinity lies, in words; None where there is none. `step` is called once a slab."""
    for name, channel, start, values in volume.slabs():
        # The sum is finite unless a value is not: one pass, no temporary array.
        with np.errstate(invalid="ignore"):
            total = np.sum(values, dtype=np.float64)
        if not np.isfinite(total):
            x, y, z = (int(i[0]) for i in np.nonzero(~np.isfinite(values)))
            return f"{volume.path}: {name}[{channel}, {start + x}, {y}, {z}] is {values[x, y, z]}"
        if step is not None:
            step()
    return None


def stage(path: str, directory: str, silent: bool = False) -> str:
    """Copies `path` into a node-local `directory`, unless the same file is there; returns the copy's path.

    The copy appears under its name only when it is whole.
    """
    source = Path(path)
    digest = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]  # two files of one name may be staged
    target = Path(directory) / f"{source.stem}-{digest}{source.suffix}"
    try:
        original = source.stat()
        if target.exists():
            copy = target.stat()
            if (copy.st_size, copy.st_mtime_ns) == (original.st_size, original.st_mtime_ns):
                return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write([target]) as (partial,):
            _copy(source, partial, f"staging {source.name} in {directory}", silent)
            os.utime(partial, ns=(original.st_atime_ns, original.st_mtime_ns))
    except OSError as error:
        raise UserError(f"cannot stage {path} in use_cache={directory}: {error.strerror or error}") from None
    return str(target)


def _copy(source: Path, target: Path, name: str, silent: bool) -> None:
    buffer, done, mib = memoryview(bytearray(2**24)), 0, 2**20
    with (
        open(source, "rb", buffering=0) as read,
        open(target, "wb") as written,
        Progress(name, source.stat().st_size // mib, "MiB", silent=silent) as progress,
    ):
        while count := read.readinto(buffer):
            written.write(buffer[:count])
            done += count
            progress.advance(done // mib - progress.done)
