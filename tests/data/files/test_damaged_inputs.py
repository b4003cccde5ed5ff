"""A damaged input file is read as data, or refused in one line. HDF5 and .npy files have no digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from damage import bytewise, replacements
from volume_files import write_volume

from utils.config.sections import TransformConfig
from utils.data.files.hdf5 import FieldReader, open_volume
from utils.data.files.npy import open_npy_volume
from utils.data.files.values import check_all
from utils.errors import UserError

BOX, CHANNELS = 4, (4, 5)
few_or_many = pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])


def refusals(path: Path, versions: Iterable[bytes], read: Callable[[], Any]) -> int:
    """The number of versions of the file that `read` refuses in one line; no other error may be raised."""
    errors = []
    for version in versions:
        path.unlink()  # HDF5 shares what it has cached among all openings of a file
        path.write_bytes(version)
        try:
            read()
        except UserError as error:
            errors.append(str(error))
    assert [error for error in errors if "\n" in error] == []
    assert {error for error in errors if "; " not in error} == set(), "no remedy"
    return len(errors)


@few_or_many
@pytest.mark.parametrize("layout", [{}, {"chunks": (1, 2, 2, 2), "compression": "gzip"}], ids=["contiguous", "gzip"])
def test_damaged_hdf5_file(tmp_path: Path, layout: dict[str, Any], count: int) -> None:
    """A damaged header once ended with a traceback: h5py raises RuntimeError, KeyError and others."""
    path = write_volume(tmp_path / "a.h5", box=BOX, **layout)
    with h5py.File(path, "r+") as file:
        # No text of variable length: libhdf5 reads some damaged ones forever (github.com/HDFGroup/hdf5/issues/1707).
        file.attrs.update(box_size_mpc_h=10.0, periodic=True, redshift=0.5, cosmology=np.bytes_("x" * 20))
    content, head = path.read_bytes(), 2200

    def read() -> None:
        fields = FieldReader(str(path), "Nbody", CHANNELS[0], TransformConfig())
        fields.planes(0, BOX)
        fields.close()
        check_all(open_volume(path, CHANNELS, TransformConfig()))

    refusals(path, bytewise(content, count, 1), read)
    heads = (version + content[head:] for version in bytewise(content[:head], count, 2))
    assert refusals(path, heads, read) > count / 2
    for kind in replacements(path):  # HDF5 would wait for the writer of a pipe, as `cat` does
        with pytest.raises(UserError, match=r"; (give|copy)"):
            read()
        assert kind


@few_or_many
def test_damaged_npy_file(tmp_path: Path, count: int) -> None:
    """A damaged header once ended with a traceback of Python's tokenizer."""
    paths = tmp_path / "x_data.npy", tmp_path / "x_label.npy"
    for path, channels in zip(paths, CHANNELS, strict=True):
        np.save(path, np.zeros((BOX,) * 3 + (channels,), np.float32))
    path, head = paths[0], 128
    content, files = path.read_bytes(), (str(paths[0]), str(paths[1]))

    def read() -> None:
        open_npy_volume(files, ("data", "label"), str(tmp_path / "x.h5"), CHANNELS)

    refusals(path, bytewise(content, count, 3), read)
    heads = (version + content[head:] for version in bytewise(content[:head], count, 4))
    assert refusals(path, heads, read) > count / 2
    for kind in replacements(path):
        with pytest.raises(UserError):
            read()
        assert kind
