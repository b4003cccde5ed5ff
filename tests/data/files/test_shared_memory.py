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
from reference_samples import ALONE, VolumeFile, read_fields

from utils.data.files import shared_memory as shared
from utils.data.files.hdf5 import Volume, open_volume
from utils.data.files.shared_memory import check_room, share_volume
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError


def fail(*_: object, **__: object) -> None:
    raise OSError("filter returned failure")


class ReadOnlyPath(type(Path())):  # type: ignore[misc]
    """A path of a read-only file system."""

    open = unlink = fail


def test_a_single_rank_gets_a_copy_in_private_memory(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = volume_file(tmp_path / "a.h5", chunks=(1, 8, 8, 8), compression="gzip")
    monkeypatch.setattr(shared, "SHARED_MEMORY", str(tmp_path / "missing"))
    copy = share_volume(open_volume(path, (4, 5)), ALONE)
    assert copy.mapped
    assert copy.path == str(path)
    for field, values in zip((copy.inputs, copy.targets), read_fields(path), strict=True):
        np.testing.assert_array_equal(field, values)
    assert shared.free_shared_memory(World(Launch("test", world_size=2), torch.device("cpu"))) == 0, "no shared memory"


def test_too_little_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume("a.h5", *(np.zeros((channels, 4, 4, 4), np.float32) for channels in (4, 5)))
    monkeypatch.setattr(shared, "available_memory", lambda: volume.bytes)
    check_room([volume], ALONE)
    monkeypatch.setattr(shared, "available_memory", lambda: volume.bytes - 1)
    with pytest.raises(UserError, match=r"needs .* GiB of memory, and .* free; use --data_loader_config=lowmem$"):
        check_room([volume], ALONE)


def fail_on_two_ranks(world: World, path: str, directory: str) -> list[str]:
    """Runs on each rank; returns the errors if the memory is too small, cannot be reserved, or cannot be filled."""
    shared.SHARED_MEMORY, errors = directory, []
    failures: list[tuple[Any, str, Any]] = [
        (shared, "free_shared_memory", lambda _: 1),
        (shared, "Path", ReadOnlyPath),  # removing the file fails as well, and once replaced the error
        (os, "posix_fallocate", fail),
        (shared.np, "memmap", fail),
        (shared, "_fill", fail),
    ]
    for module, name, replacement in failures:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, replacement)
            volume = Volume(path, *(np.zeros((channels, 4, 4, 4), np.float32) for channels in (4, 5)))
            try:
                check_room([volume], world)
                share_volume(volume, world)
            except UserError as error:
                errors.append(str(error))
    return errors


def test_a_failure_is_reported_on_all_ranks_and_leaves_no_file(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    for errors in run_ranks(fail_on_two_ranks, 2, "a.h5", str(memory)):
        assert len(errors) == 5
        assert "0.00 GiB are free" in errors[0]
        for error in errors[1:4]:
            assert f"cannot hold a.h5 in {memory}: filter returned failure" in error
        assert "cannot read a.h5: filter returned failure" in errors[4]
        assert all(error.endswith("use --data_loader_config=lowmem") for error in errors)
    assert os.listdir(memory) == []


def share_on_two_ranks(world: World, path: str, directory: str, token: str) -> dict[str, Any]:
    """Runs on each rank; returns the copy before, and a value after, rank 0 writes to it."""
    shared.uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=token))
    shared.SHARED_MEMORY = directory
    volume = share_volume(open_volume(path, (4, 5)), world)
    fields = (volume.inputs.copy(), volume.targets.copy())
    left = [name for name in os.listdir(directory) if token in name]
    world.barrier()
    if world.is_root:
        volume.inputs[1, 2, 3, 4] = 42
    world.barrier()
    return {"fields": fields, "left": left, "written": float(volume.inputs[1, 2, 3, 4])}


def test_two_ranks_share_one_copy_and_leave_nothing_in_shared_memory(volume_file: VolumeFile, tmp_path: Path) -> None:
    path = str(volume_file(tmp_path / "a.h5"))
    directory = shared.SHARED_MEMORY if os.path.isdir(shared.SHARED_MEMORY) else str(tmp_path)
    token = uuid.uuid4().hex
    try:
        answers = run_ranks(share_on_two_ranks, 2, path, directory, token)
    finally:
        left = [name for name in os.listdir(directory) if token in name]
        for name in left:  # releases the memory even if the test fails
            os.unlink(os.path.join(directory, name))
    assert left == []
    for answer in answers:
        assert answer["left"] == []
        assert answer["written"] == 42, "a rank has a private copy"
        for field, values in zip(answer["fields"], read_fields(path), strict=True):
            np.testing.assert_array_equal(field, values)
