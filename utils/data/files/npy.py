"""The `.npy` twins of a volume, [L, L, L, C] float32 in C order: what DALI reads crops from.

Rows of a crop are C times as long as in the HDF5 file, so that a file that is not cached costs fewer reads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from utils.data.files.hdf5 import Volume
from utils.errors import UserError

FIELDS = ("data", "label")  # as utils/convert_to_npy.py names them


@dataclass(frozen=True)
class NpyVolume:
    """The inputs' and the targets' file, checked and mapped: arrays [L, L, L, C]."""

    paths: tuple[str, str]
    arrays: tuple[np.ndarray, np.ndarray]

    def volume(self) -> Volume:
        """The same as a volume: fields [C, L, L, L]."""
        inputs, targets = (np.moveaxis(array, -1, 0) for array in self.arrays)
        return Volume(" and ".join(self.paths), inputs, targets, self.paths)


def open_npy_volume(
    paths: tuple[str | None, str | None],
    keys: tuple[str, str],
    source: str,
    channels: tuple[int, int],
    box: int,
    volume: Volume | None = None,
) -> NpyVolume:
    """Checks both files, and that they hold what `volume` does, where that is given.

    `keys` are the config's names of the paths, `source` is the HDF5 file that they are made from. Raises UserError
    with one line.
    """
    remedy = f"make it with python -m utils.convert_to_npy -i {source}"
    opened = []
    for path, key, count in zip(paths, keys, channels, strict=True):
        if path is None:
            raise UserError(f"{key} is not set, and dali-lowmem reads it; {remedy}, or use --data_loader_config=lowmem")
        opened.append(_open(path, (box, box, box, count), remedy))
    if volume is not None:
        for array, field, path in zip(opened, (volume.inputs, volume.targets), paths, strict=True):
            if array.shape != (*field.shape[1:], field.shape[0]):
                raise UserError(
                    f"{path} is {array.shape}, its HDF5 file {volume.path} {field.shape}: they are no twins; {remedy} "
                    f"--overwrite"
                )
            if not _same_values(array, field):
                raise UserError(
                    f"{path} holds other values than its HDF5 file {volume.path}: they are no twins; {remedy} "
                    f"--overwrite"
                )
    return NpyVolume((str(paths[0]), str(paths[1])), (opened[0], opened[1]))


def _open(path: str, shape: tuple[int, ...], remedy: str) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}; {remedy}") from None
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, OSError) and error.errno:
            raise UserError(f"cannot read {path}: {os.strerror(error.errno)}") from None
        # numpy says of a short file that its size does not fit, of any other that it holds pickled data.
        short = "mmap length" in str(error)
        reason = "the file is truncated" if short else "it is not a .npy file"
        raise UserError(f"cannot read {path}: {reason}; {remedy} --overwrite") from None
    if not isinstance(array, np.ndarray):
        raise UserError(f"cannot read {path}: it is not a .npy file; {remedy} --overwrite")
    if array.dtype != np.dtype("<f4"):
        raise UserError(f"{path} is of type {array.dtype}, expected little-endian float32; {remedy} --overwrite")
    if array.shape != shape:
        raise UserError(f"{path} is {array.shape}, expected {shape}; check box_size, or {remedy} --overwrite")
    if not array.flags.c_contiguous:
        raise UserError(f"{path} is in Fortran order, expected C order; {remedy} --overwrite")
    return np.asarray(array)


def _same_values(array: np.ndarray, field: np.ndarray) -> bool:
    """Rows across the middle and along three edges: enough to tell another simulation, or a box turned over."""
    box = array.shape[0]
    for x, y in ((0, 0), (0, box - 1), (box - 1, 0), (box // 2, box // 3)):
        if not np.array_equal(array[x, y].T, field[:, x, y], equal_nan=True):
            return False
    return True
