"""One copy of a volume in memory for all ranks of a node, for the loaders `inmem` and, on the CPU, `resident`.

Its file in a tmpfs is unlinked as soon as every rank has mapped it, before it is filled: the memory is released however
the run ends. A single rank uses private memory, whose large pages make reading crops a tenth faster.
"""

import contextlib
import os
import shutil
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.files import GIB
from utils.volumes.hdf5 import Volume
from utils.volumes.page_cache import available_memory

SHARED_MEMORY = "/dev/shm"
REMEDY = "use --data_loader_config=lowmem"


def free_shared_memory(world: World) -> int:
    """Bytes that `share_volume` can allocate on this rank's node."""
    if world.size == 1:
        return available_memory()
    return shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else 0


def check_room(volumes: Sequence[Volume], world: World) -> None:
    """Raises UserError if a node lacks the memory for all volumes together; every rank calls it."""
    size = sum(volume.bytes for volume in volumes)
    with world.raise_together():
        if world.is_node_leader and (free := free_shared_memory(world)) < size:
            names, verb = ", ".join(volume.path for volume in volumes), "needs" if len(volumes) == 1 else "need"
            needed = f"{names} {verb} {size / GIB:.2f} GiB of memory"
            raise UserError(f"{needed}, and {free / GIB:.2f} GiB are free; {REMEDY}")


def share_volume(volume: Volume, world: World) -> Volume:
    """Reads the volume once per node and returns arrays that all ranks of the node share, after `check_room`."""
    if world.size == 1:
        fields = [np.empty(field.shape, np.float32) for field in volume.fields]
    else:
        fields = _map_shared_memory(volume, world)
    with world.raise_together(), os_errors_for_users(f"cannot read {volume.path}", REMEDY):
        if world.is_node_leader:
            for number, channel, x, values in volume.slabs(f"reading {os.path.basename(volume.path)} into memory"):
                fields[number][channel, x : x + len(values)] = values
    return Volume(volume.path, fields[0], fields[1])


def _map_shared_memory(volume: Volume, world: World) -> list[np.ndarray]:
    """Arrays of the inputs and the targets in a file of shared memory, which every rank of the node has mapped."""
    os_errors = partial(os_errors_for_users, f"cannot hold {volume.path} in {SHARED_MEMORY}", REMEDY)
    # Runs that share a node use different names; only the ranks of one node see the same file.
    path = Path(SHARED_MEMORY, f"volume-{world.gather_json(uuid.uuid4().hex)[0]}")
    with contextlib.ExitStack() as opened:
        try:
            with world.raise_together(), os_errors():
                if world.is_node_leader:
                    file = opened.enter_context(path.open("xb"))
                    file.truncate(volume.bytes)
            with world.raise_together(), os_errors():
                memory = np.asarray(np.memmap(path, np.float32, "r+"))
        finally:
            world.barrier()
            if world.is_node_leader:
                with contextlib.suppress(OSError):  # there is none, or the directory is read-only
                    path.unlink()
        with world.raise_together(), os_errors():
            if world.is_node_leader:
                # Reserved in advance: running out of memory while it is filled would kill the process by SIGBUS.
                os.posix_fallocate(file.fileno(), 0, volume.bytes)
    inputs, targets = np.split(memory, [int(np.prod(volume.inputs.shape))])
    return [inputs.reshape(volume.inputs.shape), targets.reshape(volume.targets.shape)]
