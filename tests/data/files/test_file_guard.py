"""A file that shrinks while it is mapped: found by the check, and reported by processes that read what is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import GENEROUS

from utils.data.files import file_guard
from utils.data.files.file_guard import FileGuard
from utils.errors import LocalError

TOP = Path(__file__).parents[3]
SIZE = 2**24


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "train.h5"
    path.write_bytes(b"\1" * SIZE)
    return path


def line(path: Path, now: int) -> str:
    return f"{path} became shorter while it was being read (from {SIZE} to {now} bytes); {file_guard.REMEDY}"


# --- the check -----------------------------------------------------------------------------------------------------


def test_a_shorter_file_is_reported_with_both_sizes_and_a_remedy(path: Path, tmp_path: Path) -> None:
    """Its name may have changed in the meantime; a closed guard has closed its files, and reports nothing."""
    before = len(os.listdir("/dev/fd"))
    (tmp_path / "valid.h5").touch()
    guard = FileGuard([tmp_path / "valid.h5", path])
    guard.check()
    path.rename(tmp_path / "old.h5")
    path.write_bytes(b"\1" * SIZE)
    guard.check()
    os.truncate(tmp_path / "old.h5", SIZE - 1)
    with pytest.raises(LocalError) as caught:
        guard.check()
    assert str(caught.value) == line(path, SIZE - 1)
    guard.close()
    guard.close()
    assert guard.fault() is None
    assert len(os.listdir("/dev/fd")) == before


def test_a_file_that_is_written_to_grown_replaced_or_unlinked_stops_nothing(path: Path, tmp_path: Path) -> None:
    """A mapping keeps the file that it was made of, whatever its name leads to."""
    guard = FileGuard([path])
    with open(path, "r+b") as file:
        file.write(b"\2")
        file.truncate(SIZE + 1)
    guard.check()
    os.chmod(path, 0)
    guard.check()
    (tmp_path / "new").write_bytes(b"short")
    os.replace(tmp_path / "new", path)
    guard.check()
    path.unlink()
    guard.check()
    guard.close()


def test_unreachable_and_missing_files_are_reported(path: Path, tmp_path: Path) -> None:
    """A closed descriptor stands for a stale handle of a network file system."""
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(LocalError, match=r"^cannot read .+none\.h5: No such file or directory$"):
        FileGuard([path, tmp_path / "none.h5"])
    assert len(os.listdir("/dev/fd")) == before
    guard = FileGuard([path])
    os.close(guard._files[0][0])
    with pytest.raises(LocalError, match=r"can no longer be read: Bad file descriptor; check its file system"):
        guard.check()
    guard._files.clear()


# --- processes that read what is gone ------------------------------------------------------------------------------


def test_reading_what_a_file_no_longer_has_ends_in_one_line_and_exit_code_2(path: Path) -> None:
    """In a thread that Python does not know, after a renaming, with another guard."""
    # Without its package, whose other modules take seconds to import.
    script = f"""
import ctypes, importlib.util, os, sys
import numpy as np
spec = importlib.util.spec_from_file_location("file_guard", {str(TOP / "utils/data/files/file_guard.py")!r})
file_guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(file_guard)
path = sys.argv[1]
mapped = np.asarray(np.memmap(path, np.uint8, "r"))
other, guard = file_guard.FileGuard([sys.executable]), file_guard.FileGuard([path])
os.rename(path, path + ".old")
os.truncate(path + ".old", 4096)
libc, thread = ctypes.CDLL(None), ctypes.c_size_t()
assert libc.pthread_create(ctypes.byref(thread), None, libc.strlen, ctypes.c_void_p(mapped.ctypes.data)) == 0
libc.pthread_join(thread, None)
"""
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stderr) == (2, f"error: {line(path, 4096)}\n")
