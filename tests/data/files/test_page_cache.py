"""The page cache before training: filled once per node unless the files are too large for the memory."""

from __future__ import annotations

import logging
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run_ranks, wait_until
from reference_samples import ALONE

from utils.data.files import page_cache
from utils.data.files.page_cache import available_memory, memory_limit, warm_page_cache
from utils.distributed.world import World
from utils.errors import UserError

MIB = 2**20
PAGES = 16 * MIB // mmap.PAGESIZE


def cached(path: Path) -> float:
    """Fraction of 16 pages of a file that are in the page cache; skips the test if the system cannot report it."""
    found = 0
    with open(path, "rb", buffering=0) as file:
        for page in range(0, PAGES, PAGES // 16):
            try:
                found += os.preadv(file.fileno(), [bytearray(1)], page * mmap.PAGESIZE, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except (AttributeError, OSError) as error:
                pytest.skip(f"cannot report cached pages: {error}")
    return found / 16


# --- files ---------------------------------------------------------------------------------------------------------


def test_reading_a_file_brings_it_into_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(path) > 0.5:
        pytest.skip(f"the file system of {tmp_path} keeps files only in memory (a tmpfs)")
    array = np.memmap(path, dtype=np.uint8, mode="r")
    warm_page_cache([str(path)], [array], ALONE)
    assert cached(path) > 0.8
    assert bytes(array) == path.read_bytes()


def test_files_are_read_only_if_all_of_them_fit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of both splits is read and counted once."""
    for name, size in (("train.h5", 16 * MIB), ("valid.h5", MIB)):
        (tmp_path / name).write_bytes(bytes(size))
    paths = [str(tmp_path / "train.h5"), str(tmp_path / "valid.h5")]
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(page_cache, "available_memory", lambda: 17 * MIB)
    warm_page_cache([*paths, paths[0]], [], ALONE)
    assert caplog.messages[-1].startswith("train.h5, valid.h5: 0.02 GiB read into the page cache in ")
    monkeypatch.setattr(page_cache, "available_memory", lambda: 17 * MIB - 1)
    monkeypatch.setattr(page_cache.ctypes, "CDLL", lambda _: pytest.fail("asked the kernel to read from disk"))
    warm_page_cache(paths, [np.memmap(paths[0], dtype=np.uint8, mode="r")], ALONE)
    assert "do not fit in the 0.02 GiB of free memory; crops are read from disk" in caplog.messages[-1]


def test_available_memory_is_bounded_by_the_machine_and_its_control_groups(tmp_path: Path) -> None:
    """A group's limit minus its use, except for cached files, which can be dropped. Groups above it also count."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    step = cgroups / "job" / "step"
    assert available_memory(proc, cgroups) > 2**60, "unknown"
    (proc / "self").mkdir(parents=True)
    step.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 65536 kB\nMemFree:          1 kB\nMemAvailable:   32768 kB\n")
    assert available_memory(proc, cgroups) == 32 * MIB, "no groups"
    (proc / "self" / "cgroup").write_text("1:name=systemd:/other\n0::/job/step\n")
    for group in (cgroups, step.parent, step):
        for limit, used, expected in (("max", 5, 32 * MIB), (20 * MIB, 12 * MIB, 16 * MIB), (1024, 9 * MIB, 0)):
            (group / "memory.max").write_text(f"{limit}\n")
            (group / "memory.current").write_text(f"{used}\n")
            (group / "memory.stat").write_text(f"anon 1\nactive_file {4 * MIB}\ninactive_file {4 * MIB}\n")
            assert available_memory(proc, cgroups) == expected, (group, limit)
            assert memory_limit(proc, cgroups) == (64 * MIB if limit == "max" else limit), "whatever is in use"
        (group / "memory.max").unlink()


# --- ranks ---------------------------------------------------------------------------------------------------------


def warm_on_two_ranks(world: World, path: str) -> dict[str, Any]:
    """Rank 0 finishes reading only after rank 1 has entered; each rank reports whether it returned after that."""
    entered, read, reads = Path(f"{path}.entered"), Path(f"{path}.read"), []

    def slow(*_: Any) -> None:
        wait_until(entered.exists)
        time.sleep(0.2)  # a rank that does not wait returns first
        reads.append(path)
        read.touch()

    page_cache.copy_file = slow  # type: ignore[assignment]
    if world.rank == 1:
        entered.touch()
    warm_page_cache([path], [], world)
    saw = read.exists()
    with pytest.raises(UserError, match="none: No such file or directory"):
        warm_page_cache([f"{path}.none"], [], world)
    return {"reads": reads, "saw the end": saw}


def test_one_rank_per_node_reads_and_the_others_wait_for_it(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    path.write_bytes(bytes(MIB))
    first, second = run_ranks(warm_on_two_ranks, 2, str(path))
    assert (first["reads"], second["reads"]) == ([str(path)], [])
    assert second["saw the end"]
