"""The page cache before training: measured, filled once per node, and skipped if files are cached or too large."""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks, wait_until

from utils.data.files import page_cache
from utils.data.files.page_cache import (
    available_memory,
    cached_fraction,
    drop_from_page_cache,
    map_cached_pages,
    warm_page_cache,
)
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError

ALONE = World(Launch("single process"), torch.device("cpu"))
MIB = 2**20
PAGES = 16 * MIB // mmap.PAGESIZE


def written(path: Path) -> Path:
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    return path


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """An uncached file of 16 MiB; skips the test if the file system cannot drop or report cached pages."""
    path = written(tmp_path / "train.h5")
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("this system has no posix_fadvise, or no RWF_NOWAIT")
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
            pytest.skip(f"the file system of {tmp_path} keeps files only in memory (a tmpfs)")
        except BlockingIOError:
            pass
        except OSError as error:
            pytest.skip(f"the file system of {tmp_path} has no RWF_NOWAIT: {error.strerror}")
    drop_from_page_cache(str(path))
    return path


# --- files ---------------------------------------------------------------------------------------------------------


def test_the_cached_fraction_is_that_of_the_pages_read_however_often_it_is_measured(on_disk: Path) -> None:
    """The kernel fetches each page that is probed: a second measurement of the same pages would find all of them."""
    fractions = [cached_fraction(str(on_disk)) for _ in range(3)]
    assert fractions == pytest.approx([0, 1 / 16, 2 / 16], abs=0.2), "each measurement adds 1/16"
    drop_from_page_cache(str(on_disk))
    with open(on_disk, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        file.read(PAGES * mmap.PAGESIZE // 4)
    assert cached_fraction(str(on_disk)) == pytest.approx(0.25, abs=0.2)
    on_disk.write_bytes(b"")
    assert cached_fraction(str(on_disk)) == 1


def test_files_that_are_not_cached_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fractions are given: on a loaded machine, the kernel may drop pages or not report them."""
    written(tmp_path / "train.h5")
    (tmp_path / "valid.h5").write_bytes(bytes(MIB))
    fractions = {str(tmp_path / "train.h5"): 0.98, str(tmp_path / "valid.h5"): 0.99}
    monkeypatch.setattr(page_cache, "cached_fraction", fractions.get)
    valid, train = str(tmp_path / "valid.h5"), str(tmp_path / "train.h5")
    cached, read = warm_page_cache([valid, train, train], ALONE).split("; ")
    assert cached == "valid.h5: 1.0 MiB already in the page cache"
    assert read.startswith("train.h5: 16.0 MiB read into the page cache in ")
    assert read.endswith(" GB/s)")


def test_reading_a_file_brings_it_into_the_page_cache(on_disk: Path) -> None:
    warm_page_cache([str(on_disk)], ALONE)
    assert (cached_fraction(str(on_disk)) or 0) > 0.8


def test_files_are_read_only_if_all_of_them_fit_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("train.h5", 16 * MIB), ("valid.h5", MIB)):
        (tmp_path / name).write_bytes(bytes(size))
    paths = [str(tmp_path / "train.h5"), str(tmp_path / "valid.h5")]
    monkeypatch.setattr(page_cache, "cached_fraction", lambda _: 0.5)
    monkeypatch.setattr(page_cache, "available_memory", lambda: 17 * MIB - 1)
    assert warm_page_cache(paths, ALONE) == (
        "train.h5 and valid.h5: 17.0 MiB do not fit in the 17.0 MiB of available memory; crops are read from disk"
    )
    assert warm_page_cache(paths[:1], ALONE).startswith("train.h5: 16.0 MiB read ")
    monkeypatch.setattr(page_cache, "available_memory", lambda: 17 * MIB)
    assert warm_page_cache(paths, ALONE).count("read into the page cache") == 2


def test_a_file_is_read_if_the_kernel_cannot_report_what_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "train.h5")

    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "preadv", refuse, raising=False)
    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    assert cached_fraction(str(path)) is None
    assert "read into the page cache" in warm_page_cache([str(path)], ALONE)
    monkeypatch.delattr(os, "RWF_NOWAIT")
    assert cached_fraction(str(path)) is None


# --- memory --------------------------------------------------------------------------------------------------------


def test_available_memory_is_bounded_by_the_machine_and_its_control_groups(tmp_path: Path) -> None:
    """A group's limit minus its use, without cached files, which can be dropped; parent groups count, too."""
    proc, step = tmp_path / "proc", tmp_path / "cgroup" / "job" / "step"
    assert available_memory(str(proc), str(tmp_path / "cgroup")) is None
    (proc / "self").mkdir(parents=True)
    step.mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 64 kB\nMemFree: 1 kB\nMemAvailable: {32 * MIB // 1024} kB\n")

    def available() -> int | None:
        return available_memory(str(proc), str(tmp_path / "cgroup"))

    assert available() == 32 * MIB, "no groups"
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    for limit, used, expected in (("max", 5, 32 * MIB), (20 * MIB, 12 * MIB, 16 * MIB), (1024, 9 * MIB, 0)):
        (step.parent / "memory.max").write_text(f"{limit}\n")
        (step.parent / "memory.current").write_text(f"{used}\n")
        (step.parent / "memory.stat").write_text(f"anon 1\nactive_file {4 * MIB}\ninactive_file {4 * MIB}\n")
        assert available() == expected, limit


# --- ranks ---------------------------------------------------------------------------------------------------------


def warm_on_two_ranks(world: World, path: str) -> dict[str, Any]:
    """Rank 0 finishes reading only after rank 1 has entered; each rank reports whether it returned after that."""
    entered, read, reads = Path(f"{path}.entered"), Path(f"{path}.read"), []

    def slow(*_: Any) -> float:
        wait_until(entered.exists)
        time.sleep(0.2)  # a rank that does not wait returns first
        reads.append(path)
        read.touch()
        return 0.1

    page_cache._read = slow
    page_cache.cached_fraction = lambda _: None
    if world.rank == 1:
        entered.touch()
    line = warm_page_cache([path], world)
    saw = read.exists()
    try:
        warm_page_cache([f"{path}.none"], world)
        error = ""
    except UserError as caught:
        error = str(caught)
    return {"line": line, "reads": reads, "saw the end": saw, "error": error}


def test_one_rank_per_node_reads_and_the_others_wait_for_it(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    path.write_bytes(bytes(MIB))
    first, second = run_ranks(warm_on_two_ranks, 2, str(path))
    assert (first["reads"], second["reads"]) == ([str(path)], [])
    assert second["saw the end"]
    assert first["line"] == "train.h5: 1.0 MiB read into the page cache in 0.10 s (0.0 GB/s)"
    assert second["line"] == ""
    for rank in (first, second):
        assert rank["error"] == f"rank 0: cannot read {path}.none: No such file or directory"


# --- this process's page table -------------------------------------------------------------------------------------


def test_only_cached_files_are_entered_into_the_page_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "train.h5")
    array = np.memmap(file, dtype=np.uint8, mode="r")
    monkeypatch.setattr(page_cache, "cached_fraction", lambda _: 1.0)
    map_cached_pages([str(file)], [array])
    assert bytes(array) == file.read_bytes()
    monkeypatch.setattr(page_cache, "cached_fraction", lambda _: 0.5)
    monkeypatch.setattr(page_cache.ctypes, "CDLL", lambda _: pytest.fail("asked the kernel to read from disk"))
    map_cached_pages([str(file)], [array])
