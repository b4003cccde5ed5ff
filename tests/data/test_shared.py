"""The node's one copy of a volume in memory: whole, shared by all ranks, and never left behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from processes import run_ranks

from utils.data import shared
from utils.data.shared import share_volume
from utils.data.volumes import open_volume
from utils.distributed import Launch, World
from utils.errors import UserError

VolumeFile = Callable[..., Path]
ALONE = World(Launch("single process"), torch.device("cpu"))


@pytest.mark.parametrize("how", [{}, {"chunks": (1, 8, 8, 8), "compression": "gzip"}])
def test_the_copy_equals_the_file_and_leaves_no_name(volume_file: VolumeFile, tmp_path: Path, how: dict) -> None:
    path = volume_file(tmp_path / "a.h5", **how)
    (tmp_path / "memory").mkdir()
    copy = share_volume(open_volume(path, (4, 5)), ALONE, str(tmp_path / "memory"))
    assert os.listdir(tmp_path / "memory") == []
    assert copy.mapped
    assert copy.path == str(path)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(copy.inputs, file["Nbody"][...])
        np.testing.assert_array_equal(copy.targets, file["Hydro"][...])


def test_a_rank_alone_has_the_copy_in_memory_of_its_own(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = volume_file(tmp_path / "a.h5")
    monkeypatch.setattr(shared, "SHARED_MEMORY", str(tmp_path / "not there"))
    copy = share_volume(open_volume(path, (4, 5)), ALONE)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(copy.inputs, file["Nbody"][...])
        np.testing.assert_array_equal(copy.targets, file["Hydro"][...])
    monkeypatch.setattr(shared, "available_memory", lambda: copy.bytes - 1)
    with pytest.raises(UserError, match=r"GiB of memory.*use --data_loader_config=lowmem"):
        share_volume(open_volume(path, (4, 5)), ALONE)


def test_a_read_error_of_a_rank_alone_is_one_line(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("filter returned failure")

    monkeypatch.setattr(shared, "_fill", fail)
    with pytest.raises(UserError, match="filter returned failure; use --data_loader_config=lowmem"):
        share_volume(open_volume(volume_file(tmp_path / "a.h5"), (4, 5)), ALONE)


def test_too_little_shared_memory_is_said_before_anything_is_written(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the process dies by SIGBUS while it fills the copy."""
    volume = open_volume(volume_file(tmp_path / "a.h5"), (4, 5))
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=volume.bytes - 1, f_frsize=1))
    with pytest.raises(UserError, match=r"GiB of shared memory.*use --data_loader_config=lowmem") as caught:
        share_volume(volume, ALONE, str(tmp_path / "memory"))
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path / "memory") == []
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=volume.bytes, f_frsize=1))
    share_volume(volume, ALONE, str(tmp_path / "memory"))


def test_a_failure_while_mapping_leaves_no_file(
    volume_file: VolumeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = open_volume(volume_file(tmp_path / "a.h5"), (4, 5))
    (tmp_path / "memory").mkdir()

    def fail(*_: object) -> None:
        assert len(os.listdir(tmp_path / "memory")) == 1
        raise OSError("no memory")

    monkeypatch.setattr(shared.mmap, "mmap", fail)
    with pytest.raises(UserError, match=r"cannot hold .*no memory; use --data_loader_config=lowmem"):
        share_volume(volume, ALONE, str(tmp_path / "memory"))
    assert os.listdir(tmp_path / "memory") == []


def share_on_two_ranks(world: World, path: str, directory: str, token: str) -> dict[str, Any]:
    """Runs on each rank: what it sees of the copy before and after rank 0 writes to it."""
    shared.uuid = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=token))
    volume = share_volume(open_volume(path, (4, 5)), world, directory)
    fields = (volume.inputs.copy(), volume.targets.copy())
    left = [name for name in os.listdir(directory) if token in name]
    world.barrier()
    if world.is_root:
        volume.inputs[1, 2, 3, 4] = 42
    world.barrier()
    return {"fields": fields, "left": left, "written": float(volume.inputs[1, 2, 3, 4])}


def test_two_ranks_share_one_copy_and_leave_nothing_in_shared_memory(volume_file: VolumeFile, tmp_path: Path) -> None:
    path = volume_file(tmp_path / "a.h5")
    directory = shared.SHARED_MEMORY if os.path.isdir(shared.SHARED_MEMORY) else str(tmp_path)
    token = uuid.uuid4().hex
    with h5py.File(path) as file:
        expected = (file["Nbody"][...], file["Hydro"][...])
    try:
        answers = run_ranks(share_on_two_ranks, 2, str(path), directory, token)
    finally:
        left = [name for name in os.listdir(directory) if token in name]
        for name in left:  # a failure must not cost the machine memory
            os.unlink(os.path.join(directory, name))
    assert left == []
    for answer in answers:
        assert answer["left"] == []
        assert answer["written"] == 42, "a rank has a copy of its own"
        for field, values in zip(answer["fields"], expected, strict=True):
            np.testing.assert_array_equal(field, values)
