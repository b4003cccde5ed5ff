"""The converter: twins equal to the HDF5 fields, in bounded memory, whole or not at all, errors in one line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from utils import convert_to_npy
from utils.convert_to_npy import convert, main, tile_shape
from utils.errors import UserError

VolumeFile = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[1]
STORAGES = [{}, {"chunks": (1, 5, 4, 7)}, {"chunks": True, "compression": "gzip"}]


class Dying:
    """Something that weak references may point to."""


def assert_twins(source: Path, twins: Sequence[Path], names: tuple[str, str] = ("Nbody", "Hydro")) -> None:
    """Read the way DALI and numpy's mapping read them: float32, C order, [L, L, L, C]."""
    with h5py.File(source) as file:
        for name, twin in zip(names, twins, strict=True):
            values = np.load(twin, mmap_mode="r")
            assert values.dtype == np.dtype("<f4")
            assert values.flags.c_contiguous
            np.testing.assert_array_equal(values, np.moveaxis(file[name][...], 0, -1))
            header = twin.stat().st_size - values.nbytes
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


# --- the twins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES, ids=["contiguous", "chunked", "compressed"])
def test_twins_hold_the_fields_with_channels_last(volume_file: VolumeFile, tmp_path: Path, storage: dict) -> None:
    source = volume_file(tmp_path / "train.h5", box=12, **storage)
    twins = convert(source)
    assert twins == [tmp_path / "train_data.npy", tmp_path / "train_label.npy"]
    assert_twins(source, twins)


@pytest.mark.parametrize("storage", STORAGES, ids=["contiguous", "chunked", "compressed"])
@pytest.mark.parametrize("buffer_bytes", [1, 12 * 4 * 4 * 7, 12 * 4 * 5 * 12 * 5, 10**6])
def test_any_buffer_gives_the_same_twins(
    volume_file: VolumeFile, tmp_path: Path, storage: dict, buffer_bytes: int
) -> None:
    """Tiles of one row, of some rows, of some planes, of everything, and what is left over at the edges."""
    source = volume_file(tmp_path / "train.h5", box=12, **storage)
    assert_twins(source, convert(source, buffer_bytes=buffer_bytes))


def test_names_and_numbers_of_channels_are_free(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "box.hdf5", "w") as file:
        file["fields/matter"] = rng.random((1, 6, 6, 6), dtype=np.float32)
        file["fields/gas"] = rng.random((7, 6, 6, 6), dtype=np.float32)
    main(["-i", str(tmp_path / "box.hdf5"), "-d", "fields/matter", "-l", "fields/gas"])
    twins = [tmp_path / "box_data.npy", tmp_path / "box_label.npy"]
    assert_twins(tmp_path / "box.hdf5", twins, ("fields/matter", "fields/gas"))


def test_memory_is_bounded_by_the_buffers(volume_file: VolumeFile, tmp_path: Path) -> None:
    """Two buffers of 64 KiB for a volume of 1.2 MB; what h5py and Python take beside them is small."""
    source = volume_file(tmp_path / "train.h5", box=32)
    tracemalloc.start()
    try:
        convert(source, buffer_bytes=2**16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * 2**16 + 2**17


@pytest.mark.parametrize(
    "shape", [(4, 1024, 1024, 1024), (5, 1024, 1024, 1024), (5, 512, 512, 512), (9, 4096, 4096, 4096)]
)
@pytest.mark.parametrize("chunks", [None, (1, 64, 64, 64), (5, 16, 16, 16), (1, 256, 256, 256)])
def test_tiles_fit_the_buffer_and_follow_the_chunks(shape: tuple[int, ...], chunks: tuple[int, ...] | None) -> None:
    channels, box = shape[:2]
    row = 4 * channels * box
    x, y = tile_shape(shape, chunks, convert_to_npy.BUFFER_BYTES)
    assert 1 <= x <= box
    assert 1 <= y <= box
    assert x * y * row <= convert_to_npy.BUFFER_BYTES
    assert 3 * x * y * row > convert_to_npy.BUFFER_BYTES  # and use it: small tiles would be slow
    if chunks is not None and chunks[1] * chunks[2] * row <= convert_to_npy.BUFFER_BYTES:
        assert x % chunks[1] == 0, "a chunk is unpacked twice"
        assert y % chunks[2] == 0, "a chunk is unpacked twice"


# --- where they go -------------------------------------------------------------------------------------------------


def test_another_directory_is_made_and_nothing_else_lies_there(volume_file: VolumeFile, tmp_path: Path) -> None:
    source = volume_file(tmp_path / "train.h5")
    main(["-i", str(source), "--output_dir", str(tmp_path / "deep" / "npy")])
    assert sorted(os.listdir(tmp_path / "deep" / "npy")) == ["train_data.npy", "train_label.npy"]
    assert sorted(os.listdir(tmp_path)) == ["deep", "train.h5"]


def test_twins_are_as_readable_as_other_new_files(volume_file: VolumeFile, tmp_path: Path) -> None:
    source = volume_file(tmp_path / "train.h5")
    (tmp_path / "new").touch()
    for twin in convert(source):
        assert twin.stat().st_mode == (tmp_path / "new").stat().st_mode


def test_the_command_tells_what_it_wrote(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["-i", str(volume_file(tmp_path / "train.h5"))])
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {tmp_path}/train_data.npy: (16, 16, 16, 4)",
        f"wrote {tmp_path}/train_label.npy: (16, 16, 16, 5)",
    ]


@pytest.mark.parametrize("existing", ["train_data.npy", "train_label.npy"])
def test_an_existing_twin_is_kept_unless_overwrite_is_given(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], existing: str
) -> None:
    source = volume_file(tmp_path / "train.h5")
    (tmp_path / existing).write_text("mine")
    line = refused(capsys, "-i", source)
    assert f"{existing} exists" in line
    assert "--overwrite" in line
    assert (tmp_path / existing).read_text() == "mine"
    assert len(os.listdir(tmp_path)) == 2
    main(["-i", str(source), "--overwrite"])
    assert_twins(source, [tmp_path / "train_data.npy", tmp_path / "train_label.npy"])


@pytest.mark.parametrize("command", [["-m", "utils.convert_to_npy"], ["utils/convert_to_npy.py"]])
def test_both_ways_to_start_the_command(volume_file: VolumeFile, tmp_path: Path, command: list[str]) -> None:
    source = volume_file(tmp_path / "train.h5")
    arguments = [sys.executable, *command, "-i", str(source), "-d", "Nbody", "-l", "Hydro"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert_twins(source, [tmp_path / "train_data.npy", tmp_path / "train_label.npy"])


# --- what is refused, and what is left behind ----------------------------------------------------------------------


def test_a_missing_file_or_dataset_is_named(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such file" in refused(capsys, "-i", tmp_path / "none.h5")
    source = volume_file(tmp_path / "train.h5")
    assert "no dataset Gas; it holds Hydro, Nbody" in refused(capsys, "-i", source, "-l", "Gas")
    assert "no dataset /" in refused(capsys, "-i", source, "-d", "/")
    assert os.listdir(tmp_path) == ["train.h5"]


def test_a_truncated_file_is_refused(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = volume_file(tmp_path / "train.h5")
    os.truncate(source, source.stat().st_size // 2)
    assert "truncated" in refused(capsys, "-i", source)


@pytest.mark.parametrize("dtype", ["f8", ">f4", "i4"])
def test_another_type_is_refused(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    assert "float32" in refused(capsys, "-i", volume_file(tmp_path / "train.h5", dtype=dtype))


def test_another_shape_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["Nbody"] = np.zeros((4, 6, 6, 7), np.float32)
        file["flat"] = np.zeros((6, 6, 6), np.float32)
        file["none"] = h5py.Empty("f4")
        file["six"] = np.zeros((4, 6, 6, 6), np.float32)
        file["eight"] = np.zeros((5, 8, 8, 8), np.float32)
    for name in ("Nbody", "flat", "none"):
        assert "expected (channels, L, L, L)" in refused(capsys, "-i", tmp_path / "a.h5", "-d", name, "-l", "six")
    assert "grids must be equal" in refused(capsys, "-i", tmp_path / "a.h5", "-d", "six", "-l", "eight")
    assert os.listdir(tmp_path) == ["a.h5"]


def test_unreadable_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--help" in refused(capsys)
    assert "--help" in refused(capsys, "-i", "a.h5", "--nonsense")


def test_too_little_room_is_said_before_anything_is_written(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = volume_file(tmp_path / "train.h5")
    monkeypatch.setattr(convert_to_npy.shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * 9 * 16**3 - 1))
    assert "--output_dir" in refused(capsys, "-i", source)
    assert os.listdir(tmp_path) == ["train.h5"]
    monkeypatch.setattr(convert_to_npy.shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * 9 * 16**3))
    convert(source)


def test_an_output_directory_that_cannot_be_is_refused(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = volume_file(tmp_path / "train.h5")
    assert "--output_dir" in refused(capsys, "-i", source, "-o", source)
    (tmp_path / "train_label.npy").mkdir()
    assert "is a directory" in refused(capsys, "-i", source, "--overwrite")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_earlier_twins_and_nothing_half_written(
    volume_file: VolumeFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    source = volume_file(tmp_path / "train.h5")
    (tmp_path / "train_data.npy").write_text("earlier")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(convert_to_npy.os, call, full)
    assert "No space left on device" in refused(capsys, "-i", source, "--overwrite")
    assert sorted(os.listdir(tmp_path)) == ["train.h5", "train_data.npy"]
    assert (tmp_path / "train_data.npy").read_text() == "earlier"


def test_a_chunk_that_cannot_be_unpacked_is_told_in_one_line(
    volume_file: VolumeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage in the second dataset: the first twin is whole by then, and must not appear without the other."""
    source = volume_file(tmp_path / "train.h5", chunks=(1, 8, 8, 8), compression="gzip")
    with h5py.File(source) as file:
        place = file["Hydro"].id.get_chunk_info(7)
    with open(source, "r+b") as raw:
        raw.seek(place.byte_offset)
        raw.write(b"\xff" * place.size)
    assert "cannot read /Hydro" in refused(capsys, "-i", source)
    assert os.listdir(tmp_path) == ["train.h5"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_cancelled_command_leaves_nothing_half_written(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The signal comes while the first twin is put on the disk."""
    source = volume_file(tmp_path / "train.h5")
    monkeypatch.setattr(convert_to_npy.os, "fsync", lambda _: os.kill(os.getpid(), number))
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        main(["-i", str(source)])
    assert caught.value.code == 128 + number
    assert os.listdir(tmp_path) == ["train.h5"]
    assert signal.getsignal(number) is handler


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_comes_up_in_a_callback_of_h5py_ends_the_command_too(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ignores what is raised in a callback, and the command went on to its end once."""
    source = volume_file(tmp_path / "train.h5")
    read = convert_to_npy._read

    def read_and_die(*arguments: Any) -> None:
        read(*arguments)
        weakref.finalize(Dying(), signal.raise_signal, signal.SIGTERM)

    monkeypatch.setattr(convert_to_npy, "_read", read_and_die)
    with pytest.raises(SystemExit) as caught:
        main(["-i", str(source)])
    assert caught.value.code == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == ["train.h5"]


def test_a_failure_in_the_library_call_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        convert(tmp_path / "none.h5")
