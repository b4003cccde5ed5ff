"""A file that shrinks while it is mapped: found by the check, and reported by processes that read what is gone."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import GENEROUS

from utils.data import file_guard
from utils.data.file_guard import FileGuard
from utils.errors import LocalError

TOP = Path(__file__).parents[2]
SIZE = 2**24


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "train.h5"
    path.write_bytes(b"\1" * SIZE)
    return path


def line(path: Path, now: int) -> str:
    return f"{path} became shorter while it was being read (from {SIZE} to {now} bytes); {file_guard.REMEDY}"


# --- the check -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", [0, SIZE - 1])
def test_a_shorter_file_is_reported_with_both_sizes_and_a_remedy(path: Path, tmp_path: Path, now: int) -> None:
    """Its name may have changed in the meantime."""
    (tmp_path / "valid.h5").touch()
    guard = FileGuard([tmp_path / "valid.h5", path])
    guard.check()
    path.rename(tmp_path / "old.h5")
    path.write_bytes(b"\1" * SIZE)
    guard.check()
    os.truncate(tmp_path / "old.h5", now)
    with pytest.raises(LocalError) as caught:
        guard.check()
    assert str(caught.value) == line(path, now)
    guard.close()


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


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_guard_closes_its_files(path: Path, how: str) -> None:
    gc.collect()  # files that other tests have forgotten are not counted
    before = len(os.listdir("/dev/fd"))
    guard = FileGuard([path, str(path)])
    assert len(os.listdir("/dev/fd")) == before + 1, "a file given twice is opened once"
    if how == "closed":
        guard.close()
        guard.close()
        assert guard.fault() is None
    else:
        del guard
        gc.collect()
    assert len(os.listdir("/dev/fd")) == before


# --- processes that read what is gone ------------------------------------------------------------------------------

BEFORE = f"""
import ctypes, faulthandler, importlib.util, os, signal, sys
import numpy as np

# Without its package, whose other modules take seconds to import.
spec = importlib.util.spec_from_file_location("file_guard", {str(TOP / "utils/data/file_guard.py")!r})
file_guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(file_guard)
FileGuard = file_guard.FileGuard

path = sys.argv[1]
mapped = np.asarray(np.memmap(path, np.uint8, "r"))

def truncate():
    os.truncate(path, 4096)
"""


def run(script: str, path: Path) -> tuple[int, str]:
    """Exit code and standard error of a process that calls truncate() and reads on."""
    command = [sys.executable, "-c", BEFORE + textwrap.dedent(script), str(path)]
    process = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=GENEROUS)
    return process.returncode, process.stderr


READINGS = {
    "in the main thread, with the interpreter lock": """
        guard = FileGuard([path])
        truncate()
        mapped[2**20]
    """,
    "in a thread that Python does not know, after a renaming, with other guards": """
        faulthandler.enable()
        other, guard = FileGuard([sys.executable]), FileGuard([path])
        os.rename(path, path + ".old")
        path += ".old"
        libc, thread = ctypes.CDLL(None), ctypes.c_size_t()
        truncate()
        start = (ctypes.byref(thread), None, libc.strlen, ctypes.c_void_p(mapped.ctypes.data))
        assert libc.pthread_create(*start) == 0
        libc.pthread_join(thread, None)
    """,
}


@pytest.mark.parametrize("reading", READINGS)
def test_reading_what_a_file_no_longer_has_ends_in_one_line_and_exit_code_2(path: Path, reading: str) -> None:
    assert run(READINGS[reading], path) == (2, f"error: {line(path, 4096)}\n")


@pytest.mark.parametrize("fault", ["mapped.copy()", "os.kill(os.getpid(), signal.SIGBUS); signal.pause()"])
def test_any_other_bus_error_kills_the_process_as_before(path: Path, fault: str) -> None:
    """Caused by a file that no guard watches, or sent by another process."""
    assert run(f"guard = FileGuard([sys.executable]); truncate(); {fault}", path) == (-signal.SIGBUS, "")
