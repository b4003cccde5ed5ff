"""The converter: `.npy` files equal to the HDF5 fields, bounded memory, atomic writes, errors in one line."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
from reference_samples import VolumeFile, read_fields

from utils.data.convert_to_npy import convert, main
from utils.data.files import hdf5

STORAGES = [{}, {"chunks": (1, 5, 4, 7)}, {"chunks": True, "compression": "gzip"}]


@pytest.mark.parametrize("storage", STORAGES, ids=["contiguous", "chunked", "compressed"])
def test_copies_hold_the_fields_with_channels_last_in_slabs_of_any_size(
    volume_file: VolumeFile, tmp_path: Path, storage: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI and numpy's mapping expect float32 in C order, [L, L, L, C]."""
    source = volume_file(tmp_path / "train.h5", box=12, **storage)
    for slab_values in (1, 5 * 12 * 12, 10**6):
        monkeypatch.setattr(hdf5, "SLAB_VALUES", slab_values)
        copies = convert(source, overwrite=True)
        assert copies == [tmp_path / "train_data.npy", tmp_path / "train_label.npy"]
        for copy, field in zip(copies, read_fields(source), strict=True):
            values = np.load(copy, mmap_mode="r")
            assert (values.dtype, values.flags.c_contiguous) == (np.dtype("<f4"), True)
            np.testing.assert_array_equal(values, np.moveaxis(field, 0, -1))


def test_memory_is_bounded_by_the_slabs(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slabs of two planes, 40 KiB, for a volume of 1.2 MB; h5py and Python need little in addition."""
    source = volume_file(tmp_path / "train.h5", box=32)
    monkeypatch.setattr(hdf5, "SLAB_VALUES", 2 * 32 * 32)
    tracemalloc.start()
    try:
        convert(source)
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()


def test_faults_end_in_one_line_and_leave_existing_files_alone(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second dataset is damaged: the first file is complete by then, and must not appear without the other."""
    source = volume_file(tmp_path / "train.h5", chunks=(1, 8, 8, 8), compression="gzip")
    with h5py.File(source, "r+") as file:
        file["flat"], file["small"] = np.zeros((6, 6, 6), np.float32), np.zeros((5, 8, 8, 8), np.float32)
        place = file["Hydro"].id.get_chunk_info(7)
    damaged = tmp_path / "damaged.h5"
    damaged.write_bytes(source.read_bytes())
    with open(damaged, "r+b") as raw:
        raw.seek(place.byte_offset)
        raw.write(b"\xff" * place.size)
    (tmp_path / "train_data.npy").write_text("earlier")
    before = sorted(os.listdir(tmp_path))
    for flags, message in (
        (["-i", str(tmp_path / "none.h5")], "no such file"),
        (["-i", str(source), "-d", "flat"], "expected (channels, X, Y, Z)"),
        (["-i", str(source), "-l", "small"], "grids must be equal"),
        (["-i", str(source)], "train_data.npy exists; give --overwrite"),
        (["-i", str(damaged)], f"cannot read {damaged}"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(flags)
        err = capsys.readouterr().err
        assert (caught.value.code, err.count("\n"), message in err) == (2, 1, True), err
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "train_data.npy").read_text() == "earlier"
