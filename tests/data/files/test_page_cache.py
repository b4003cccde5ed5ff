"""The page cache before training: filled once per node unless the files are too large for the memory."""

from __future__ import annotations

import logging
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


def test_files_are_read_only_if_all_of_them_fit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A file of both splits is read and counted once."""
    for name, size in (("train.h5", 16 * MIB), ("valid.h5", MIB)):
        (tmp_path / name).write_bytes(bytes(size))
    paths = [str(tmp_path / "train.h5"), str(tmp_path / "valid.h5")]
    arrays = [np.memmap(paths[0], dtype=np.uint8, mode="r")]
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(page_cache, "available_memory", lambda: 17 * MIB)
    warm_page_cache([*paths, paths[0]], arrays, ALONE)
    assert caplog.messages[-1].startswith("train.h5, valid.h5: 0.02 GiB read into the page cache in ")
    monkeypatch.setattr(page_cache, "available_memory", lambda: 17 * MIB - 1)
    monkeypatch.setattr(page_cache.ctypes, "CDLL", lambda _: pytest.fail("asked the kernel to read from disk"))
    warm_page_cache(paths, arrays, ALONE)
    assert "do not fit" in caplog.messages[-1]


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


def warm_on_two_ranks(world: World, path: str) -> tuple[list[str], bool]:
    """What this rank has read, and whether it returned after the end of the reading, which rank 1 enters first."""
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
    saw_the_end = read.exists()
    with pytest.raises(UserError, match="none: No such file or directory"):
        warm_page_cache([f"{path}.none"], [], world)
    return reads, saw_the_end


def test_one_rank_per_node_reads_and_the_others_wait_for_it(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    path.write_bytes(bytes(MIB))
    assert run_ranks(warm_on_two_ranks, 2, str(path)) == [([str(path)], True), ([], True)]
