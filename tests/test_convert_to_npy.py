"""The converter: `.npy` files equal to the HDF5 fields, bounded memory, atomic writes, errors in one line."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from processes import GENEROUS

from utils import convert_to_npy
from utils.convert_to_npy import convert, main

VolumeFile = Callable[..., Path]
TOP = Path(__file__).resolve().parents[1]
STORAGES = [{}, {"chunks": (1, 5, 4, 7)}, {"chunks": True, "compression": "gzip"}]


def assert_copies(source: Path, copies: Sequence[Path], names: tuple[str, str] = ("Nbody", "Hydro")) -> None:
    """DALI and numpy's mapping expect float32 in C order, [L, L, L, C]."""
    with h5py.File(source) as file:
        for name, copy in zip(names, copies, strict=True):
            values = np.load(copy, mmap_mode="r")
            assert values.dtype == np.dtype("<f4")
            assert values.flags.c_contiguous
            np.testing.assert_array_equal(values, np.moveaxis(file[name][...], 0, -1))
            header = copy.stat().st_size - values.nbytes
            assert header % 64 == 0  # numpy's alignment, which mappings rely on


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Runs the command, which must end with exit code 2 and one line; returns the line."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.strip()


# --- the copies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES, ids=["contiguous", "chunked", "compressed"])
def test_copies_hold_the_fields_with_channels_last_for_any_buffer(
    volume_file: VolumeFile, tmp_path: Path, storage: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of one row, of several rows or planes, and of the whole volume, with remainders at the edges."""
    source = volume_file(tmp_path / "train.h5", box=12, **storage)
    copies = convert(source)
    assert copies == [tmp_path / "train_data.npy", tmp_path / "train_label.npy"]
    assert_copies(source, copies)
    for buffer_bytes in (1, 12 * 4 * 4 * 7, 12 * 4 * 5 * 12 * 5, 10**6):
        monkeypatch.setattr(convert_to_npy, "BUFFER_BYTES", buffer_bytes)
        assert_copies(source, convert(source, overwrite=True))


@pytest.mark.parametrize("storage", [{}, {"chunks": (1, 32, 4, 4)}], ids=["contiguous", "deep chunks"])
def test_memory_is_bounded_by_the_buffers(
    volume_file: VolumeFile, tmp_path: Path, storage: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of 64 KiB for a volume of 1.2 MB; h5py and Python need little in addition."""
    source = volume_file(tmp_path / "train.h5", box=32, **storage)
    monkeypatch.setattr(convert_to_npy, "BUFFER_BYTES", 2**16)
    tracemalloc.start()
    try:
        copies = convert(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * 2**16 + 2**17
    assert_copies(source, copies)


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command_creates_its_output_directory_and_accepts_other_names_and_numbers_of_channels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, source = tmp_path / "deep" / "npy", tmp_path / "box.hdf5"
    rng = np.random.default_rng(0)
    with h5py.File(source, "w") as file:
        file["fields/matter"] = rng.random((1, 6, 6, 6), dtype=np.float32)
        file["fields/gas"] = rng.random((7, 6, 6, 6), dtype=np.float32)
    main(["-i", str(source), "-d", "fields/matter", "-l", "fields/gas", "--output_dir", str(folder)])
    copies = [folder / "box_data.npy", folder / "box_label.npy"]
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {copies[0]}: (6, 6, 6, 1)",
        f"wrote {copies[1]}: (6, 6, 6, 7)",
    ]
    assert sorted(folder.iterdir()) == copies
    assert_copies(source, copies, ("fields/matter", "fields/gas"))


def test_the_command_runs_as_a_file(volume_file: VolumeFile, tmp_path: Path) -> None:
    """Python then searches the file's directory for modules, not its parent."""
    source = volume_file(tmp_path / "train.h5", box=8)
    command = [sys.executable, str(TOP / "utils" / "convert_to_npy.py"), "-i", str(source)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stderr) == (0, "")
    assert_copies(source, [tmp_path / "train_data.npy", tmp_path / "train_label.npy"])


# --- refusals ------------------------------------------------------------------------------------------------------


def test_files_and_datasets_that_cannot_be_converted_are_reported(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--help" in refused(capsys, "-i", "a.h5", "--nonsense")
    assert "no such file" in refused(capsys, "-i", tmp_path / "none.h5")
    source = volume_file(tmp_path / "train.h5")
    assert "no dataset Gas; it contains Hydro, Nbody" in refused(capsys, "-i", source, "-l", "Gas")
    os.truncate(source, source.stat().st_size // 2)
    assert "truncated" in refused(capsys, "-i", source)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["flat"] = np.zeros((6, 6, 6), np.float32)
        file["six"] = np.zeros((4, 6, 6, 6), np.float32)
        file["eight"] = np.zeros((5, 8, 8, 8), np.float32)
        file["complex"] = np.zeros((4, 6, 6, 6), np.complex64)
    for data, label, message in (
        ("flat", "six", "expected (channels, X, Y, Z) or (X, Y, Z, channels)"),
        ("complex", "six", "expected real numbers"),
        ("six", "eight", "grids must be equal"),
    ):
        assert message in refused(capsys, "-i", tmp_path / "a.h5", "-d", data, "-l", label)
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "train.h5"]


def test_outputs_that_cannot_be_written_are_refused_before_anything_is_written(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, size = volume_file(tmp_path / "train.h5"), 4 * 9 * 16**3
    assert "--output_dir" in refused(capsys, "-i", source, "-o", source)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size - 1))
    assert "free some space, or give another --output_dir" in refused(capsys, "-i", source)
    assert os.listdir(tmp_path) == ["train.h5"]
    (tmp_path / "train_label.npy").mkdir()
    assert "is a directory" in refused(capsys, "-i", source, "--overwrite")
    (tmp_path / "train_label.npy").rmdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))
    convert(source)


# --- failures during the conversion --------------------------------------------------------------------------------


def test_existing_copies_are_kept_unless_overwrite_is_given_and_there_is_space(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = volume_file(tmp_path / "train.h5")
    (tmp_path / "train_data.npy").write_text("earlier")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert "train_data.npy exists; give --overwrite" in refused(capsys, "-i", source)
    with monkeypatch.context() as patch:
        patch.setattr(convert_to_npy.os, "fsync", full)
        assert "No space left on device" in refused(capsys, "-i", source, "--overwrite")
    assert sorted(os.listdir(tmp_path)) == ["train.h5", "train_data.npy"]
    assert (tmp_path / "train_data.npy").read_text() == "earlier"
    main(["-i", str(source), "--overwrite"])
    assert_copies(source, [tmp_path / "train_data.npy", tmp_path / "train_label.npy"])


def test_a_chunk_that_cannot_be_unpacked_is_reported_in_one_line(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second dataset is damaged: the first file is complete by then, and must not appear without the other."""
    source = volume_file(tmp_path / "train.h5", chunks=(1, 8, 8, 8), compression="gzip")
    with h5py.File(source) as file:
        place = file["Hydro"].id.get_chunk_info(7)
    with open(source, "r+b") as raw:
        raw.seek(place.byte_offset)
        raw.write(b"\xff" * place.size)
    assert "cannot read /Hydro" in refused(capsys, "-i", source)
    assert os.listdir(tmp_path) == ["train.h5"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_canceled_command_leaves_nothing_partial(
    volume_file: VolumeFile, tmp_path: Path, number: signal.Signals
) -> None:
    """The signal arrives in a callback. A fixed bug: Python ignores an exception there, so the command continued."""
    source = volume_file(tmp_path / "train.h5")
    script = (
        "import runpy, signal, weakref\n"
        "from utils import progress\n"
        "class Referenced: pass\n"
        f"progress.Progress.advance = lambda *_: weakref.finalize(Referenced(), signal.raise_signal, {int(number)})\n"
        "runpy.run_module('utils.convert_to_npy', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", script, "-i", str(source)]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stderr) == (128 + number, "")
    assert os.listdir(tmp_path) == ["train.h5"]
