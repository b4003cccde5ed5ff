"""A file that shrinks while it is mapped: seen by the check, told by the handler in real processes that really die."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

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


def line(path: Path, now: int, size: int = SIZE) -> str:
    return f"{path} became shorter while it was being read (from {size} to {now} bytes); {file_guard.REMEDY}"


# --- the check -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("now", [0, SIZE - 1])
def test_a_shorter_file_is_told_with_both_sizes_and_a_remedy(path: Path, tmp_path: Path, now: int) -> None:
    (tmp_path / "valid.h5").touch()
    guard = FileGuard([tmp_path / "valid.h5", path])
    guard.check()
    os.truncate(path, now)
    with pytest.raises(LocalError) as caught:
        guard.check()
    assert str(caught.value) == line(path, now)
    guard.close()


def test_a_file_that_is_unlinked_replaced_grown_or_written_to_stops_nothing(path: Path, tmp_path: Path) -> None:
    """The mapping keeps the file it was made of, whatever its name leads to."""
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


def test_a_file_that_shrinks_after_it_was_renamed_is_still_seen(path: Path, tmp_path: Path) -> None:
    guard = FileGuard([path])
    path.rename(tmp_path / "old.h5")
    path.write_bytes(b"\1" * SIZE)
    os.truncate(tmp_path / "old.h5", 1)
    with pytest.raises(LocalError, match="became shorter"):
        guard.check()
    guard.close()


def test_a_file_out_of_reach_is_told(path: Path) -> None:
    """A stale handle of a network file system, in place of which a descriptor is taken away."""
    guard = FileGuard([path])
    os.close(guard._files[0][0])
    with pytest.raises(LocalError, match=rf"^{path} can no longer be read: Bad file descriptor; check its file system"):
        guard.check()
    guard._files.clear()


def test_a_missing_file_is_refused_and_the_others_are_let_go(path: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(LocalError, match=r"^cannot read \S+none\.h5: No such file or directory$"):
        FileGuard([path, tmp_path / "none.h5"])
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_guard_gives_its_files_back(path: Path, how: str) -> None:
    gc.collect()  # what other tests have forgotten is not counted
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


def test_a_check_costs_microseconds(path: Path) -> None:
    guard = FileGuard([path, __file__])
    times = []
    for _ in range(1000):
        started = time.perf_counter()
        guard.check()
        times.append(time.perf_counter() - started)
    assert sorted(times)[500] < 100e-6
    guard.close()


# --- the signal ----------------------------------------------------------------------------------------------------


class Death(NamedTuple):
    code: int
    stderr: str
    seconds: float  # from the reading on


BEFORE = f"""
import ctypes, faulthandler, importlib.util, os, signal, sys, threading, time
import numpy as np

# Without its package, whose other modules take seconds to import.
spec = importlib.util.spec_from_file_location("file_guard", {str(TOP / "utils/data/file_guard.py")!r})
file_guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(file_guard)
FileGuard = file_guard.FileGuard

path = sys.argv[1]
libc = ctypes.CDLL(None)

def mapped(path):
    return np.asarray(np.memmap(path, np.uint8, "r"))

def truncate():
    os.truncate(path, 4096)
    print(time.time(), flush=True)
"""


def run(script: str, path: Path) -> Death:
    """What becomes of a process that calls truncate() and reads on."""
    process = subprocess.run(
        [sys.executable, "-c", BEFORE + textwrap.dedent(script), str(path)],
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert process.stdout, process.stderr
    return Death(process.returncode, process.stderr, time.time() - float(process.stdout))


READINGS = {
    "in the main thread, with the interpreter lock": """
        guard, array = FileGuard([path]), mapped(path)
        truncate()
        array[2**20]
    """,
    "in the main thread, without it": """
        guard, array = FileGuard([path]), mapped(path)
        truncate()
        array.copy()
    """,
    "in a thread, without the lock": """
        from concurrent.futures import ThreadPoolExecutor
        guard, array = FileGuard([path]), mapped(path)
        target = np.empty_like(array)
        with ThreadPoolExecutor(1) as pool:
            truncate()
            pool.submit(np.copyto, target, array).result()
    """,
    "in eight threads at once": """
        guard, array = FileGuard([path]), mapped(path)
        together = threading.Barrier(9)
        def read():
            together.wait()
            array.copy()
        write = os.write
        os.write = lambda *line: (write(*line), time.sleep(0.3))  # time for the others to write it, too
        for _ in range(8):
            threading.Thread(target=read).start()
        truncate()
        together.wait()
        time.sleep(20)
    """,
    "in a thread that Python does not know": """
        guard, array = FileGuard([path]), mapped(path)
        thread = ctypes.c_size_t()
        truncate()
        start = (ctypes.byref(thread), None, libc.strlen, ctypes.c_void_p(array.ctypes.data))
        assert libc.pthread_create(*start) == 0
        libc.pthread_join(thread, None)
    """,
    "with faulthandler on before": """
        faulthandler.enable()
        guard, array = FileGuard([path]), mapped(path)
        truncate()
        array.copy()
    """,
    "with several guards": """
        others = [FileGuard([__import__("os").__file__]), FileGuard([sys.executable])]
        guard, array = FileGuard([path]), mapped(path)
        others.pop().close()
        truncate()
        array.copy()
    """,
    "after the file was renamed": """
        guard, array = FileGuard([path]), mapped(path)
        os.rename(path, path + ".old")
        open(path, "wb").close()
        path += ".old"
        truncate()
        array.copy()
    """,
}


@pytest.mark.parametrize("reading", READINGS)
def test_reading_what_a_file_no_longer_has_ends_in_its_one_line(path: Path, reading: str) -> None:
    death = run(READINGS[reading], path)
    assert death.stderr == f"error: {line(path, 4096)}\n"
    assert death.code == 2
    assert death.seconds < 5


UNRELATED = {
    "another file's": ("guard, array = FileGuard([sys.executable]), mapped(path)", "array.copy()", ""),
    "that of a file whose guard is closed": (
        "guard, array = FileGuard([path]), mapped(path); guard.close()",
        "array.copy()",
        "",
    ),
    "one that was sent": ("guard = FileGuard([sys.executable])", "os.kill(os.getpid(), signal.SIGBUS)", ""),
    "with faulthandler on before": (
        "faulthandler.enable(); guard, array = FileGuard([sys.executable]), mapped(path)",
        "array.copy()",
        "Fatal Python error: Bus error",
    ),
}


@pytest.mark.parametrize("case", UNRELATED)
def test_any_other_bus_error_kills_as_it_did_before(path: Path, case: str) -> None:
    start, fault, says = UNRELATED[case]
    death = run(f"{start}; truncate(); {fault}; time.sleep(20)", path)
    assert death.code == -signal.SIGBUS
    assert death.stderr.splitlines()[:1] == ([says] if says else [])
    assert death.seconds < 5


def test_a_dump_of_faulthandlers_that_is_on_later_comes_before_the_line(path: Path) -> None:
    death = run("guard, array = FileGuard([path]), mapped(path); faulthandler.enable(); truncate(); array.copy()", path)
    assert death.code == 2
    assert death.stderr.startswith("Fatal Python error: Bus error")
    assert death.stderr.endswith(f"error: {line(path, 4096)}\n")


def test_a_bus_error_that_the_handler_cannot_explain_ends_the_process_too(path: Path) -> None:
    """Else the reading, which fails again, would call it for ever."""
    death = run(
        "guard, array = FileGuard([path]), mapped(path); guard.fault = lambda: 1 / 0; truncate(); array.copy()", path
    )
    assert death.code == -signal.SIGBUS
    assert "ZeroDivisionError" in death.stderr


def has_dali() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(not has_dali(), reason="NVIDIA DALI is not installed")
def test_dalis_threads_end_in_the_line_while_python_waits_for_them(tmp_path: Path) -> None:
    path = tmp_path / "train.npy"
    np.save(path, np.ones((32, 32, 32, 4), np.float32))
    size = path.stat().st_size
    death = run(
        """
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline

        pipeline = Pipeline(batch_size=2, num_threads=2, device_id=None, prefetch_queue_depth=2)
        with pipeline:
            origin = fn.external_source(name="origin", dtype=types.INT32, ndim=1)
            reader = fn.readers.numpy(files=[path], roi_start=origin, roi_shape=[8] * 3, roi_axes=[0, 1, 2])
            pipeline.set_outputs(reader)
        pipeline.build()
        guard = FileGuard([path])

        for _ in range(2):
            pipeline.feed_input("origin", np.zeros((2, 3), np.int32))
        pipeline.schedule_run()  # the first run is two
        pipeline.outputs(), pipeline.outputs()
        sys.setswitchinterval(100)  # other threads get the lock when this one gives it up, and not before
        truncate()
        pipeline.feed_input("origin", np.full((2, 3), 24, np.int32))
        pipeline.schedule_run()
        pipeline.outputs()
        """,
        path,
    )
    assert death.stderr == f"error: {line(path, 4096, size)}\n"
    assert death.code == 2
    assert death.seconds < 5
