"""The node's copy of a volume in memory: complete, shared by all ranks, and always released."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from reference_samples import VolumeFile, read_fields

from utils.data.files import shared_memory as shared
from utils.data.files.hdf5 import Volume, open_volume
from utils.data.files.shared_memory import share_volume
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError

ALONE = World(Launch("single process"), torch.device("cpu"))


@pytest.fixture
def volume(volume_file: VolumeFile, tmp_path: Path) -> Volume:
    return open_volume(volume_file(tmp_path / "a.h5"), (4, 5))


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A directory that stands in for the node's shared memory."""
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def fail(*_: object, **__: object) -> None:
    raise OSError("filter returned failure")


def test_the_copy_equals_the_file_and_leaves_no_name(
    volume_file: VolumeFile, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory for shared memory, and for a single rank in private memory."""
    path = volume_file(tmp_path / "a.h5", chunks=(1, 8, 8, 8), compression="gzip")
    monkeypatch.setattr(shared, "SHARED_MEMORY", str(tmp_path / "missing"))
    for directory in (str(memory), None):
        copy = share_volume(open_volume(path, (4, 5)), ALONE, directory)
        assert copy.mapped
        assert copy.path == str(path)
        for field, values in zip((copy.inputs, copy.targets), read_fields(path), strict=True):
            np.testing.assert_array_equal(field, values)
    assert os.listdir(memory) == []
    assert shared.room_for_copies(World(Launch("test", world_size=2), torch.device("cpu"))) == 0, "no shared memory"


def test_too_little_memory_is_reported_before_anything_is_written(
    volume: Volume, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the process would be killed by SIGBUS while it fills the copy."""
    free = SimpleNamespace(f_bavail=volume.bytes - 1, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: free)
    with pytest.raises(UserError, match=r"GiB of shared memory.*use --data_loader_config=lowmem$"):
        share_volume(volume, ALONE, str(memory))
    assert os.listdir(memory) == []
    free.f_bavail += 1
    share_volume(volume, ALONE, str(memory))
    monkeypatch.setattr(shared, "available_memory", lambda: volume.bytes - 1)
    with pytest.raises(UserError, match=r"GiB of memory.*use --data_loader_config=lowmem$"):
        share_volume(volume, ALONE)
    assert shared.room_for_copies(ALONE) == volume.bytes - 1


def test_a_failure_is_one_line_and_leaves_no_file(
    volume: Volume, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for failing in ((shared, "_fill"), (shared.mmap, "mmap")):
        with monkeypatch.context() as patched:
            patched.setattr(*failing, fail)
            for directory in (str(memory), None):
                with pytest.raises(UserError, match=r"filter returned failure; use --data_loader_config=lowmem$"):
                    share_volume(volume, ALONE, directory)
    assert os.listdir(memory) == []


def share_on_two_ranks(world: World, path: str, directory: str, token: str) -> dict[str, Any]:
    """Runs on each rank; returns the copy before, and a value after, rank 0 writes to it."""
    shared.uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=token))
    volume = share_volume(open_volume(path, (4, 5)), world, directory)
    fields = (volume.inputs.copy(), volume.targets.copy())
    left = [name for name in os.listdir(directory) if token in name]
    world.barrier()
    if world.is_root:
        volume.inputs[1, 2, 3, 4] = 42
    world.barrier()
    return {"fields": fields, "left": left, "written": float(volume.inputs[1, 2, 3, 4])}


def test_two_ranks_share_one_copy_and_leave_nothing_in_shared_memory(volume: Volume, tmp_path: Path) -> None:
    directory = shared.SHARED_MEMORY if os.path.isdir(shared.SHARED_MEMORY) else str(tmp_path)
    token = uuid.uuid4().hex
    try:
        answers = run_ranks(share_on_two_ranks, 2, volume.path, directory, token)
    finally:
        left = [name for name in os.listdir(directory) if token in name]
        for name in left:  # releases the memory even if the test fails
            os.unlink(os.path.join(directory, name))
    assert left == []
    for answer in answers:
        assert answer["left"] == []
        assert answer["written"] == 42, "a rank has a private copy"
        for field, values in zip(answer["fields"], read_fields(volume.path), strict=True):
            np.testing.assert_array_equal(field, values)
