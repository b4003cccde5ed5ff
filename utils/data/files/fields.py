"""HDF5 datasets as float32 fields [C, X, Y, Z], regardless of their type of number, order of axes and storage."""

from __future__ import annotations

import os
from typing import Any

import h5py
import numpy as np

from utils.errors import UserError

FLOAT32 = np.dtype("<f4")
NATIVE = "native_fields"  # the group of the fields in Nyx's snapshots
IMPORTER = "python -m utils.data.import_volume"  # makes channels of physical values


class StoredField:
    """A dataset as field[channels, x, y, z] with slices and integers; values are converted as they are read."""

    def __init__(self, dataset: h5py.Dataset, channels_last: bool) -> None:
        self._source: Any = dataset
        self._channels_last = channels_last
        self.name = str(dataset.name)
        self.path = str(dataset.file.filename)  # a dataset may be a link into another file
        self.shape: tuple[int, int, int, int] = self._with_channels_first(dataset.shape)
        self.chunks = None if dataset.chunks is None else self._with_channels_first(dataset.chunks)
        order = " with the channels last" if channels_last else ""
        # Differences from the format that is read without a conversion, for the log.
        self.conversion = "" if dataset.dtype == FLOAT32 and not order else f"{_type_name(dataset.dtype)}{order}"

    def __getitem__(self, key: tuple[Any, ...]) -> np.ndarray:
        channels, *cells = key
        if not self._channels_last:
            return as_float32(self._source[key])
        place = (*cells, *[slice(None)] * (3 - len(cells)), channels)
        values = as_float32(self._source[place])
        return np.moveaxis(values, -1, 0) if isinstance(channels, slice) else values

    def mapped(self) -> Any:
        """The field, mapped into memory if it is contiguous: as an array if its values need no conversion."""
        array = _map_if_contiguous(self._source)
        if array is None:
            return self
        if array.dtype == FLOAT32:
            return np.moveaxis(array, -1, 0) if self._channels_last else array
        self._source = array
        return self

    def _with_channels_first(self, sides: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        return (sides[3], *sides[:3]) if self._channels_last else sides


def as_float32(values: Any) -> np.ndarray:
    """The values as float32, without a copy if they are; values beyond its range become infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32)


def checked_field(
    file: h5py.File,
    path: str,
    name: str,
    channels: int | None = None,
    remedy: str = "choose another file or dataset",
) -> StoredField:
    """A dataset [C, X, Y, Z] or [X, Y, Z, C]; `channels` None accepts any number.

    If both orders fit the shape, that of a cube is meant. If neither is one, a given number of channels is that of the
    first axis, and an unknown one that of the shorter of the first and the last axis.
    """
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        if file.get(NATIVE, getclass=True) is h5py.Group:
            command = f"{IMPORTER} --input {path} --output VOLUME.h5"
            raise UserError(f"{path} is a snapshot of Nyx; import it with {command}, and give VOLUME.h5")
        names = [f"group {key}" if file.get(key, getclass=True) is h5py.Group else key for key in file]
        raise UserError(f"{path} has no dataset {name}; it contains {', '.join(names) or 'nothing'}; {remedy}")
    shape: tuple[int, ...] = dataset.shape or ()  # a null dataset has shape None
    orders = _orders(shape, channels)
    if not orders:
        count = channels or "channels"
        raise UserError(f"{path}: {name} is {shape}, expected ({count}, X, Y, Z) or (X, Y, Z, {count}); {remedy}")
    if dataset.dtype.kind not in "fiu":
        raise UserError(f"{path}: {name} is of type {dataset.dtype}, expected real numbers; write it as float32")
    if not dataset.is_virtual and not dataset.external and dataset.id.get_storage_size() == 0:
        raise UserError(f"{path}: {name} was created but never written; write its values")
    return StoredField(dataset, orders[0])


def _orders(shape: tuple[int, ...], channels: int | None) -> list[bool]:
    """The orders of axes that fit, the likeliest first; True: the channels are last."""
    if len(shape) != 4 or 0 in shape:
        return []
    orders = []
    for last, count, cells in ((False, shape[0], shape[1:]), (True, shape[-1], shape[:-1])):
        if count == (channels or count):
            orders.append((len(set(cells)) > 1, count, last))
    return [last for _, _, last in sorted(orders)]


def _type_name(dtype: np.dtype[Any]) -> str:
    """The name of a type of number; big-endian is the order of bytes that a conversion has to reverse."""
    return f"big-endian {dtype.name}" if dtype.byteorder == ">" else str(dtype.name)


def _map_if_contiguous(dataset: h5py.Dataset) -> np.ndarray | None:
    """A mapped array of a contiguous dataset; None for others, and for types of HDF5 that numpy lacks."""
    offset = dataset.id.get_offset()
    if dataset.chunks is not None or offset is None or dataset.is_virtual or dataset.external:
        return None
    if not h5py.h5t.py_create(dataset.dtype).equal(dataset.id.get_type()):
        return None
    path = dataset.file.filename
    if offset + dataset.nbytes > os.path.getsize(path):
        raise UserError(f"cannot read {path}: the file is truncated inside {dataset.name}; copy or recreate it")
    mapped = np.memmap(path, dtype=dataset.dtype, mode="r", offset=offset, shape=dataset.shape)
    return np.asarray(mapped)  # a plain array: slicing a memmap object is slower
