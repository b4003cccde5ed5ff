"""HDF5 files: volumes, with `Nbody` [4, X, Y, Z] and `Hydro` [5, X, Y, Z], and their values; see docs/data.md."""

import contextlib
import importlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from utils.config.channels import Channels, Side
from utils.errors import UserError, os_reason, os_remedy, value_errors_for_users
from utils.log import warn_once
from utils.progress import Progress
from utils.volumes import attributes as stated
from utils.volumes.attributes import Attributes, Simulation, attributes_of, simulation_of
from utils.volumes.page_cache import MADV_WILLNEED, advise

DATASETS = ("Nbody", "Hydro")
NATIVE = "native_fields"  # the group of the fields in Nyx's snapshots
SLAB_VALUES = 2**22  # values of a slab, 16 MiB as float32: volumes are read, sent, checked and converted in slabs
LARGE_CHUNK = 2**28  # bytes
SLABS_AHEAD = 4  # slabs that the kernel reads from disk while one is processed
IMPORTER = "python -m utils.volumes.import_volume"  # makes channels of physical values
OF_NPY = f"{IMPORTER} makes one of the .npy files in a directory, named dark_matter_density.npy and so on"
RENAMED = "if it has another name: h5py.File(PATH, 'a')[NAME] = h5py.SoftLink('/OTHER_NAME')"
LISTED = 12  # datasets in a message


def open_file(path: str, remedy: str = "give another path") -> h5py.File:
    if not os.path.isfile(path):
        fault = f"cannot read {path}: it is not a regular file" if os.path.exists(path) else f"no such file: {path}"
        if os.path.isdir(path) and any(name.endswith(".npy") for name in os.listdir(path)):
            remedy = OF_NPY
        raise UserError(f"{fault}; {remedy}")
    with reading(path):
        return h5py.File(path, "r")


def reading(path: str) -> contextlib.AbstractContextManager[None]:
    """Converts the errors of h5py, which raises many types for a damaged file, to UserErrors."""

    def line(error: Exception) -> str:
        text = os_reason(error) if isinstance(error, OSError) else " ".join(str(error).split())
        if "truncated" in text:
            text = "the file is truncated"
        (remedy,) = os_remedy(error) or ["copy or recreate it"]
        if "signature" in text:
            text = "it is not an HDF5 file"
            if path.endswith(".npy"):
                remedy = OF_NPY
        return f"cannot read {path}: {text}; {remedy}"

    return value_errors_for_users(line, (Exception,))


def contents(file: h5py.File) -> str:
    """The names of the datasets in a file, of many the first ones."""
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more or "no dataset"


def check_storage(dataset: h5py.Dataset) -> None:
    """UserError if values are in other files, were never written (HDF5 reads fill values) or cannot be decompressed."""
    name, size = f"{dataset.file.filename}: {dataset.name.strip('/')}", dataset.nbytes
    if dataset.is_virtual or dataset.external:
        raise UserError(f"{name} refers to values in other files; copy them: with h5py, new_file[NAME] = dataset[:]")
    stored = dataset.id.get_storage_size()
    if dataset.chunks:
        layout = dataset.id.get_create_plist()
        for code, *_ in map(layout.get_filter, range(layout.get_nfilters())):
            if not h5py.h5z.filter_avail(code):
                with contextlib.suppress(ImportError):
                    importlib.import_module("hdf5plugin")  # registers its filters
            if not h5py.h5z.filter_avail(code):
                remedy = "install its plugin: pip install hdf5plugin, or write the file without it: h5repack -f NONE"
                raise UserError(f"{name} needs the HDF5 filter number {code}; {remedy}")
        chunks = math.prod(-(-side // chunk) for side, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        stored = size * dataset.id.get_num_chunks() // chunks
    if stored < size:
        raise UserError(f"{name}: {1 - stored / size:.3%} of its values were never written; recreate the file")


@dataclass(frozen=True)
class Volume:
    """Input and target fields [C, X, Y, Z]; both support field[channels, x, y, z] with slices."""

    path: str
    inputs: Any
    targets: Any
    files: tuple[str, ...] = ()  # read for as long as the volume is used; a volume in memory has none
    cell: float | None = None  # side of a cell in comoving Mpc/h, if known
    names: Sequence[str] = DATASETS
    simulation: Simulation = field(default_factory=dict)  # redshift, cosmology, cell size, as far as the file has them
    periodic: bool = True  # false for a part of a box, as the file states
    attributes: Attributes = field(default_factory=dict)  # of the file
    channels: tuple[Channels | None, Channels | None] = None, None  # of inputs and targets, if the file states them

    @property
    def shape(self) -> tuple[int, int, int]:
        """Cells along x, y and z."""
        x, y, z = self.inputs.shape[1:]
        return int(x), int(y), int(z)

    @property
    def fields(self) -> tuple[Any, Any]:
        return self.inputs, self.targets

    @property
    def mapped(self) -> bool:
        return all(isinstance(field, np.ndarray) for field in self.fields)

    @property
    def bytes(self) -> int:
        return sum(4 * int(np.prod(field.shape)) for field in self.fields)

    def slabs(self, action: str) -> Iterator[tuple[int, int, int, np.ndarray]]:
        """The whole volume in slabs: (0 inputs or 1 targets, channel, first x, values [n, Y, Z]), with progress."""
        channels = [(number, channel) for number, field in enumerate(self.fields) for channel in range(field.shape[0])]
        places = [(*channel, planes) for channel in channels for planes in slab_planes(self.shape)]
        with Progress(action, len(places), "slabs") as progress:
            for number, channel, planes in places:
                field = self.fields[number]
                if isinstance(field, np.ndarray) and planes.stop < field.shape[1]:
                    ahead = slice(planes.stop, planes.stop + SLABS_AHEAD * (planes.stop - planes.start))
                    advise(field[channel, ahead], MADV_WILLNEED)  # or the kernel reads mapped arrays in small pieces
                with reading(self.path):
                    values = field[channel, planes]
                yield number, channel, planes.start, values
                progress.advance()


def cells_text(shape: Sequence[int]) -> str:
    """The number of cells along each axis, for messages."""
    return f"{shape[0]}³" if len(set(shape)) == 1 else " × ".join(map(str, shape))


def slab_planes(shape: Sequence[int], chunk: Sequence[int] | None = None) -> list[slice]:
    """Slices along x into slabs of at most SLAB_VALUES values, or one plane; with `chunk`, of whole chunks."""
    depth = chunk[0] if chunk else 1
    thickness = max(1, SLAB_VALUES // (shape[1] * shape[2]) // depth) * depth
    return [slice(start, min(start + thickness, shape[0])) for start in range(0, shape[0], thickness)]


def stored_slabs(stored: Any, name: str) -> Iterator[tuple[slice, np.ndarray]]:
    """A field [..., X, Y, Z], a dataset or an array, in slabs: planes along x, and their values as float32."""
    chunk = getattr(stored, "chunks", None)
    for planes in slab_planes(stored.shape[-3:], chunk and chunk[-3:]):
        with reading(name):
            values = as_float32(stored[..., planes, :, :])
        yield planes, values


class FieldReader:
    """Reads one dataset [C, X, Y, Z] of a file: `values` is a mapped array, unless h5py must convert them."""

    def __init__(
        self, path: str, name: str, channels: int | None = None, remedy: str = RENAMED, file: h5py.File | None = None
    ) -> None:
        """UserError if the file, open as `file` or not, contradicts the config; `remedy` if it lacks the dataset."""
        self.path, self.name = path, name
        with reading(path):
            file = file or open_file(path)
            dataset = checked_dataset(file, path, name, channels, remedy)
            self.shape: tuple[int, int, int] = dataset.shape[1:]
            self.attributes = attributes_of(file, self.shape)
            check_storage(dataset)
            self._stated = stated.stated_channels(dataset)
            self.file = str(dataset.file.filename)  # another one than `path` if the dataset is an external link
            offset = dataset.id.get_offset()
            self.values: Any = ConvertedField(dataset)
            if dataset.dtype == np.dtype("<f4") and not dataset.chunks and offset is not None:
                # A plain array: slicing a memmap object is slower.
                self.values = np.asarray(np.memmap(self.file, "<f4", "r", offset, dataset.shape))
        self.cell, self.simulation = simulation_of(self.attributes, max(self.shape), path)
        self.periodic: bool = self.attributes.get("periodic", True)

    def channels(self, side: Side) -> Channels | None:
        """The channels that the file states, if the dataset holds inputs or targets."""
        return stated.file_channels(side, self.values.shape[0], self.attributes, self._stated)

    def box(self, x: slice, y: slice, z: slice, channels: slice = slice(None)) -> np.ndarray:
        """Values [C, x, y, z]; raises UserError if they cannot be read or are not all finite."""
        cells = (channels, x, y, z)
        with reading(self.path):
            values = np.asarray(self.values[cells])
        if (place := nonfinite_place(values)) is None:
            return values
        where = ", ".join(str((axis.start or 0) + index) for axis, index in zip(cells, place, strict=True))
        raise UserError(f"{self.path}: {self.name}[{where}] is {values[place]}; fix the file")

    def planes(self, channels: slice, planes: slice) -> np.ndarray:
        """Values [C, n, Y, Z] of planes along x; errors as in `box`."""
        return self.box(planes, slice(None), slice(None), channels)

    def close(self) -> None:
        self.values = None


def open_field(path: str, name: str, side: Side, expected: Channels, whose: str) -> FieldReader:
    """Opens a dataset; UserError if the channels that its file states are not those that are expected."""
    channels = FieldReader(path, name, None).channels(side)
    if channels and (difference := stated.channel_difference(channels, expected)):
        fault = f"{path}: {name} has other channels than {whose}: {difference}"
        raise UserError(f"{fault}; {stated.SAME_CHANNELS}")
    stated.warn_of_assumed(side, {path: channels}, expected)
    return FieldReader(path, name, len(expected))


class ArrayReader(FieldReader):
    """Channel values [C, X, Y, Z] in memory, read like those of a file with these attributes."""

    def __init__(self, values: np.ndarray, channels: int, attributes: Attributes) -> None:
        if values.ndim != 4 or len(values) != channels:
            raise UserError(f"the array is {values.shape}, expected ({channels}, X, Y, Z)")
        self.path = self.name = self.file = stated.ARRAY
        self.shape = values.shape[1], values.shape[2], values.shape[3]
        self.attributes = stated.checked_attributes(attributes, self.shape, self.path)
        self.values, self._stated = as_float32(values), None
        self.cell, self.simulation = simulation_of(self.attributes, max(self.shape), self.path)
        self.periodic = self.attributes.get("periodic", True)


def open_volume(path: str | os.PathLike[str], names: Sequence[str] = DATASETS) -> Volume:
    """Opens a volume with any numbers of channels; raises UserError if the file has no such datasets."""
    file = open_file(str(path))
    remedy = f"choose another file, or set dataset_names (only predict.py needs no {names[1]})"
    inputs, targets = (FieldReader(str(path), name, None, remedy, file) for name in names)
    if inputs.shape != targets.shape:
        raise UserError(f"{path}: {names[0]} has {inputs.shape} cells, {names[1]} {targets.shape}; make them equal")
    files = tuple(dict.fromkeys((inputs.file, targets.file)))
    channels = inputs.channels("inputs"), targets.channels("targets")
    first = inputs.values, targets.values, files, inputs.cell, names, inputs.simulation, inputs.periodic
    return Volume(str(path), *first, inputs.attributes, channels)


class ConvertedField:
    """A dataset [C, X, Y, Z] that cannot be mapped; field[channels, x, y, z] is read through h5py, as float32."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset, self.chunks = dataset, dataset.chunks
        self.shape: tuple[int, ...] = dataset.shape

    def __getitem__(self, key: Any) -> np.ndarray:
        return as_float32(self._dataset[key])


def as_float32(values: Any) -> np.ndarray:
    """The values as float32, without a copy if they are; values beyond its range become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32)


def checked_dataset(file: h5py.File, path: str, name: str, channels: int | None, remedy: str) -> h5py.Dataset:
    """A dataset [C, X, Y, Z]; `channels` None accepts any number. `remedy` is that for a missing dataset."""
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        link = file.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise UserError(f"{path}: {name} is a link to {link.path} in {link.filename}, which is missing; restore it")
        if NATIVE in file:
            command = f"{IMPORTER} --input {path} --output VOLUME.h5"
            raise UserError(f"{path} is a snapshot of Nyx; import it with {command}, and give VOLUME.h5")
        raise UserError(f"{path} has no dataset {name}; it contains {contents(file)}; {remedy}")
    shape: tuple[int, ...] = dataset.shape or ()  # a null dataset has shape None
    is_last = len(shape) == 4 and shape[0] == shape[1] > shape[3]  # no crop fits into so flat a volume
    if len(shape) != 4 or 0 in shape or is_last or shape[0] != (channels or shape[0]):
        first = "channels come first: write numpy.moveaxis(values, -1, 0)"
        fix = first if is_last else "choose or write one of that shape"
        raise UserError(f"{path}: {name} is {shape}, expected ({channels or 'channels'}, X, Y, Z); {fix}")
    check_real(dataset.dtype, f"{path}: {name}")
    if (chunk := math.prod(dataset.chunks or ()) * dataset.dtype.itemsize) > LARGE_CHUNK:
        text = f"{path}: {name} has chunks of {chunk / 1e9:.1f} GB, and a crop needs whole ones: this is slow"
        warn_once(f"{text}; rewrite it contiguously, or use --data_loader_config=inmem")
    return dataset


def check_real(dtype: np.dtype, name: str) -> None:
    if dtype.kind not in "fiu":
        raise UserError(f"{name} holds {dtype}, expected real numbers; write it as float32")


def nonfinite_place(values: np.ndarray) -> tuple[int, ...] | None:
    """Index of the first NaN or infinite value, or None."""
    with np.errstate(invalid="ignore"):
        if np.isfinite(np.sum(values, dtype=np.float64)):  # one pass, no temporary array
            return None
    return tuple(np.argwhere(~np.isfinite(values))[0].tolist())
