"""Opens HDF5 files, and checks that the values of a dataset are stored.

For values that are stored nowhere HDF5 returns fill values, without an error.
"""

import contextlib
import importlib
import math
import os
from collections.abc import Iterator

import h5py

from utils.errors import UserError, os_reason, os_remedy

IMPORTER = "python -m utils.volumes.import_volume"  # makes channels of physical values
OF_NPY = f"{IMPORTER} makes one of the .npy files in a directory, named dark_matter_density.npy and so on"
LISTED = 12  # datasets in a message


def open_file(path: str, remedy: str = "give another path") -> h5py.File:
    if not os.path.isfile(path):
        fault = f"cannot read {path}: it is not a regular file" if os.path.exists(path) else f"no such file: {path}"
        if os.path.isdir(path) and any(name.endswith(".npy") for name in os.listdir(path)):
            remedy = OF_NPY
        raise UserError(f"{fault}; {remedy}")
    with reading(path):
        return h5py.File(path, "r")


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Converts the errors of h5py, which raises many types for a damaged file, to UserErrors."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        text = os_reason(error) if isinstance(error, OSError) else " ".join(str(error).split())
        if "truncated" in text:
            text = "the file is truncated"
        (remedy,) = os_remedy(error) or ["copy or recreate it"]
        if "signature" in text:
            text = "it is not an HDF5 file"
            if path.endswith(".npy"):
                remedy = OF_NPY
        raise UserError(f"cannot read {path}: {text}; {remedy}") from None


def contents(file: h5py.File) -> str:
    """The names of the datasets in a file, of many the first ones."""
    names: list[str] = []
    file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more or "no dataset"


def check_storage(dataset: h5py.Dataset) -> None:
    """Raises UserError if values are in other files, were never written, or cannot be decompressed."""
    name, size = f"{dataset.file.filename}: {dataset.name.strip('/')}", dataset.nbytes
    if dataset.is_virtual or dataset.external:
        raise UserError(f"{name} refers to values in other files; copy them: with h5py, new_file[NAME] = dataset[:]")
    stored = dataset.id.get_storage_size()
    if dataset.chunks:
        _check_filters(dataset, name)
        chunks = math.prod(-(-side // chunk) for side, chunk in zip(dataset.shape, dataset.chunks, strict=True))
        stored = size * dataset.id.get_num_chunks() // chunks
    if stored < size:
        raise UserError(f"{name}: {1 - stored / size:.3%} of its values were never written; recreate the file")


def _check_filters(dataset: h5py.Dataset, name: str) -> None:
    """Raises UserError if a filter is missing; tries hdf5plugin, if it is installed."""
    layout = dataset.id.get_create_plist()
    for code, *_ in map(layout.get_filter, range(layout.get_nfilters())):
        if not h5py.h5z.filter_avail(code):
            with contextlib.suppress(ImportError):
                importlib.import_module("hdf5plugin")  # registers its filters
        if not h5py.h5z.filter_avail(code):
            raise UserError(
                f"{name} needs the HDF5 filter number {code}; install its plugin: pip install hdf5plugin, or write the "
                f"file without it: h5repack -f NONE"
            )
