"""Memory of a node: the page cache, filled once, and the copy of a volume that all ranks share and always release."""

import logging
import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from processes import run_ranks
from reference_samples import ALONE

from utils.data.loaders import threaded as shared
from utils.data.loaders.threaded import check_room, share_volume
from utils.distributed.world import World
from utils.errors import UserError
from utils.volumes import page_cache
from utils.volumes.hdf5 import Volume
from utils.volumes.page_cache import available_memory, memory_limit, warm_page_cache

MIB = 2**20
VOLUME = Volume("a.h5", *(np.full((channels, 4, 4, 4), channels, np.float32) for channels in (4, 5)))


def test_files_are_read_only_if_all_of_them_fit_in_memory(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
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
    (proc / "self" / "cgroup").write_text("1:name=systemd:/other\n0::/job/step\n")
    for group in (cgroups, step.parent, step):
        for limit, used, expected in (("max", 5, 32 * MIB), (20 * MIB, 12 * MIB, 16 * MIB), (1024, 9 * MIB, 0)):
            (group / "memory.max").write_text(f"{limit}\n")
            (group / "memory.current").write_text(f"{used}\n")
            (group / "memory.stat").write_text(f"anon 1\nactive_file {4 * MIB}\ninactive_file {4 * MIB}\n")
            assert available_memory(proc, cgroups) == expected, (group, limit)
            assert memory_limit(proc, cgroups) == (64 * MIB if limit == "max" else limit), "whatever is in use"
        (group / "memory.max").unlink()


def warm_on_two_ranks(world: World, path: str) -> list[str]:
    """The paths that this rank has read. The second reading fails, which a rank that does not wait cannot know."""
    read: list[str] = []

    def copy(source: str, *_: Any) -> None:
        read.append(source)
        if len(read) == 2:
            raise UserError("the disk is gone")

    page_cache.copy_file = copy  # type: ignore[assignment]
    warm_page_cache([path], [], world)
    with pytest.raises(UserError, match="the disk is gone"):
        warm_page_cache([path], [], world)
    return read


def test_one_rank_per_node_reads_and_the_others_wait_for_it(tmp_path: Path) -> None:
    (path := tmp_path / "train.h5").touch()
    assert run_ranks(warm_on_two_ranks, 2, str(path)) == [[str(path)] * 2, []]


def share(world: World, directory: str, private: str, token: str) -> tuple[list[str], list[float], list[str]]:
    """Errors if the memory is too small or fails; values, the last one written by rank 0; files that are left."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("filter returned failure")

    shared.SHARED_MEMORY, errors = private, []
    for module, name, replacement in (
        (shared, "free_shared_memory", lambda _: 2 * VOLUME.bytes - 1),
        (os, "posix_fallocate", fail),
        (shared.np, "memmap", fail),
        (shared.Volume, "slabs", fail),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, replacement)
            try:
                check_room([VOLUME, VOLUME], world)
                share_volume(VOLUME, world)
            except UserError as error:
                errors.append(str(error))
    shared.uuid, shared.SHARED_MEMORY = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=token)), directory
    volume = share_volume(VOLUME, world)
    values = [float(volume.inputs.mean()), float(volume.targets.mean())]
    left = [name for name in os.listdir(directory) if token in name]
    world.barrier()
    if world.is_root:
        volume.inputs[1, 2, 3, 3] = 42
    world.barrier()
    return errors, [*values, float(volume.inputs[1, 2, 3, 3])], [*left, *os.listdir(private)]


def test_two_ranks_share_one_copy_and_a_failure_is_reported_on_both(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    directory = shared.SHARED_MEMORY if os.path.isdir(shared.SHARED_MEMORY) else str(tmp_path)
    for errors, values, left in run_ranks(share, 2, directory, str(tmp_path / "private"), uuid.uuid4().hex):
        for error, says in zip(errors, ("are free", "cannot hold", "cannot hold", "cannot read"), strict=True):
            assert says in error
            assert error.endswith("use --data_loader_config=lowmem")
        assert (values, left) == ([4.0, 5.0, 42.0], [])
