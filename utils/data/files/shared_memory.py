"""One copy of a volume in memory for all ranks of a node, for the loaders `inmem` and, on the CPU, `resident`.

The copy is in the node's shared memory (a tmpfs). Its file is unlinked as soon as every rank has mapped it, before it
is filled: the memory is released however the run ends, even by SIGKILL. A single rank uses private memory instead,
with large pages if the kernel has them, from which crops are read a tenth faster.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import IO

import numpy as np

from utils.data.files.hdf5 import DATASETS, Volume
from utils.data.files.page_cache import available_memory
from utils.data.files.size_check import SizeCheck
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.files import GIB
from utils.progress import Progress

SHARED_MEMORY = "/dev/shm"
REMEDY = "use --data_loader_config=lowmem"


def room_for_copies(world: World) -> int:
    """Bytes that `share_volume` can allocate on this rank's node."""
    available = available_memory() if world.size == 1 else None
    return _free_in(SHARED_MEMORY) if available is None else available


def _free_in(directory: str) -> int:
    try:
        free = os.statvfs(directory)
    except OSError:
        return 0
    return free.f_bavail * free.f_frsize


def share_volume(volume: Volume, world: World, directory: str | None = None) -> Volume:
    """Reads the volume once per node and returns arrays that all ranks of the node share.

    `directory` is the tmpfs for the copy; None means the system's, or private memory for a single rank.
    """
    if directory is not None or world.size > 1:
        return _share(volume, world, Path(directory or SHARED_MEMORY))
    memory = _private_memory(volume)
    with _os_errors(volume, "memory"):
        _fill(volume, memory)
    return Volume(volume.path, *_fields(memory, volume))


def _private_memory(volume: Volume) -> mmap.mmap:
    available = available_memory()
    if available is not None:
        _check_size(volume, available, "memory", "available")
    with _os_errors(volume, "memory"):
        memory = mmap.mmap(-1, volume.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # other systems; kernels without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _share(volume: Volume, world: World, directory: Path) -> Volume:
    with world.raise_together():
        if world.is_node_leader:
            _check_size(volume, _free_in(str(directory)), "shared memory", f"free in {directory}")
    # Runs that share a node use different names; only the ranks of one node see the same file.
    token = world.gather_objects(uuid.uuid4().hex)[0]
    with contextlib.ExitStack() as opened:
        file, memory = _map_on_all_ranks(directory / f"volume-{token}", volume, world, opened)
        with world.raise_together(), _os_errors(volume, directory):
            if world.is_node_leader:
                if hasattr(os, "posix_fallocate"):
                    # Reserved in advance: running out of memory while it is filled would kill the process by SIGBUS.
                    os.posix_fallocate(file.fileno(), 0, volume.bytes)
                _fill(volume, memory)
    return Volume(volume.path, *_fields(memory, volume))


def _map_on_all_ranks(
    path: Path, volume: Volume, world: World, opened: contextlib.ExitStack
) -> tuple[IO[bytes], mmap.mmap]:
    """Creates a file of the volume's size, maps it on every rank of the node and unlinks it; `opened` closes it."""
    try:
        with world.raise_together(), _os_errors(volume, path.parent):
            if world.is_node_leader:
                with open(path, "xb") as created:
                    created.truncate(volume.bytes)
        with world.raise_together(), _os_errors(volume, path.parent):
            file = opened.enter_context(path.open("r+b"))
            memory = mmap.mmap(file.fileno(), volume.bytes)
    finally:
        world.barrier()
        if world.is_node_leader:
            path.unlink(missing_ok=True)
    return file, memory


def _fields(memory: mmap.mmap, volume: Volume) -> tuple[np.ndarray, np.ndarray]:
    """The memory as arrays of the inputs and the targets."""
    flat = np.frombuffer(memory, dtype=np.float32)
    count = int(np.prod(volume.inputs.shape))
    return flat[:count].reshape(volume.inputs.shape), flat[count:].reshape(volume.targets.shape)


def _fill(volume: Volume, memory: mmap.mmap) -> None:
    description = f"reading {os.path.basename(volume.path)} into memory"
    destination = dict(zip(DATASETS, _fields(memory, volume), strict=True))
    size_check = SizeCheck(volume.files)
    slabs = len(volume.slab_locations())
    with closing(size_check), Progress(description, slabs, "slabs") as progress:
        for dataset, channel, x, values in volume.slabs():
            size_check.check()
            destination[dataset][channel, x : x + len(values)] = values
            progress.advance()


def _check_size(volume: Volume, available: int, memory: str, where: str) -> None:
    if available < volume.bytes:
        raise UserError(
            f"{volume.path} needs {volume.bytes / GIB:.2f} GiB of {memory}, "
            f"{available / GIB:.2f} GiB are {where}; {REMEDY}"
        )


def _os_errors(volume: Volume, where: Path | str) -> AbstractContextManager[None]:
    return os_errors_for_users(f"cannot hold {volume.path} in {where}", REMEDY)
