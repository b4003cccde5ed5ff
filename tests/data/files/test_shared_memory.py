"""The node's copy of a volume in memory: one for all ranks, always released. test_loaders.py compares its values."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from processes import run_ranks

from utils.data.files import shared_memory as shared
from utils.data.files.hdf5 import Volume
from utils.data.files.shared_memory import check_room, share_volume
from utils.distributed.world import World
from utils.errors import UserError

VOLUME = Volume("a.h5", *(np.full((channels, 4, 4, 4), channels, np.float32) for channels in (4, 5)))


def fail(*_: object, **__: object) -> None:
    raise OSError("filter returned failure")


def fail_on_two_ranks(world: World, directory: str) -> list[str]:
    """The errors if the memory is too small, cannot be reserved, mapped, or filled."""
    shared.SHARED_MEMORY, errors = directory, []
    for module, name, replacement in (
        (shared, "free_shared_memory", lambda _: 2 * VOLUME.bytes - 1),
        (os, "posix_fallocate", fail),
        (shared.np, "memmap", fail),
        (shared, "_fill", fail),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, replacement)
            try:
                check_room([VOLUME, VOLUME], world)
                share_volume(VOLUME, world)
            except UserError as error:
                errors.append(str(error))
    return errors


def test_a_failure_is_reported_on_all_ranks_and_leaves_no_file(tmp_path: Path) -> None:
    for errors in run_ranks(fail_on_two_ranks, 2, str(tmp_path)):
        for error, says in zip(errors, ("are free", "cannot hold", "cannot hold", "cannot read"), strict=True):
            assert says in error
            assert error.endswith("use --data_loader_config=lowmem")
    assert os.listdir(tmp_path) == []


def share_on_two_ranks(world: World, directory: str, token: str) -> tuple[float, float, float, list[str]]:
    """A value of both fields, one that rank 0 has written to its copy, and the files that are left meanwhile."""
    shared.uuid, shared.SHARED_MEMORY = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=token)), directory
    volume = share_volume(VOLUME, world)
    before = float(volume.inputs.mean()), float(volume.targets.mean())
    left = [name for name in os.listdir(directory) if token in name]
    world.barrier()
    if world.is_root:
        volume.inputs[1, 2, 3, 3] = 42
    world.barrier()
    return *before, float(volume.inputs[1, 2, 3, 3]), left


def test_two_ranks_share_one_copy_and_leave_nothing_in_shared_memory(tmp_path: Path) -> None:
    directory = shared.SHARED_MEMORY if os.path.isdir(shared.SHARED_MEMORY) else str(tmp_path)
    assert run_ranks(share_on_two_ranks, 2, directory, uuid.uuid4().hex) == [(4.0, 5.0, 42.0, [])] * 2
