"""One copy of a volume in memory for all ranks of a node, for the loaders `inmem` and, on the CPU, `resident`.

The copy lies in the node's shared memory (a tmpfs). Its file is unlinked as soon as every rank has mapped it, before
it is filled: whatever ends the run, even SIGKILL, the memory is given back. A rank that is alone takes memory of its
own, where the kernel has large pages: crops are read a tenth faster from them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from utils.data.files.file_guard import FileGuard
from utils.data.files.hdf5 import DATASETS, Volume
from utils.data.files.page_cache import available_memory
from utils.distributed.world import World
from utils.errors import UserError
from utils.progress import Progress

SHARED_MEMORY = "/dev/shm"


def room_for_copies(world: World) -> int:
    """Bytes that `share_volume` can take on this rank's node."""
    available = available_memory() if world.size == 1 else None
    return _free_in(SHARED_MEMORY) if available is None else available


def _free_in(directory: str) -> int:
    try:
        free = os.statvfs(directory)
    except OSError:
        return 0
    return free.f_bavail * free.f_frsize


def share_volume(volume: Volume, world: World, directory: str | None = None) -> Volume:
    """Reads the volume once a node and returns it as arrays that all ranks of the node share.

    `directory` is the tmpfs to hold it; by default the system's, or for a single rank none.
    """
    if directory is None and world.size == 1:
        memory = _own_memory(volume)
        fields = _fields(memory, volume)
        with _one_line(volume, "memory"):
            _fill(volume, dict(zip(DATASETS, fields, strict=True)), silent=False)
        return Volume(volume.path, fields[0], fields[1])
    return _share(volume, world, directory or SHARED_MEMORY)


def _own_memory(volume: Volume) -> mmap.mmap:
    available = available_memory()
    if available is not None and available < volume.bytes:
        raise UserError(
            f"{volume.path} needs {volume.bytes / 2**30:.2f} GiB of memory, {available / 2**30:.2f} GiB are available; "
            f"use --data_loader_config=lowmem"
        )
    with _one_line(volume, "memory"):
        memory = mmap.mmap(-1, volume.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # other systems; kernels without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _fields(memory: mmap.mmap, volume: Volume) -> list[np.ndarray]:
    """The memory as inputs and targets."""
    flat = np.frombuffer(memory, dtype=np.float32)
    count = int(np.prod(volume.inputs.shape))
    return [flat[:count].reshape(volume.inputs.shape), flat[count:].reshape(volume.targets.shape)]


def _share(volume: Volume, world: World, directory: str) -> Volume:
    size = volume.bytes
    with world.raise_together():
        if world.is_node_leader:
            available = _free_in(directory)
            if available < size:
                raise UserError(
                    f"{volume.path} needs {size / 2**30:.2f} GiB of shared memory, {directory} has "
                    f"{available / 2**30:.2f} GiB free; use --data_loader_config=lowmem"
                )
    # One name a run, so that runs sharing a node do not meet; only the ranks of one node see the same file.
    token = world.gather_objects(uuid.uuid4().hex)[0]
    path = Path(directory) / f"volume-{token}"
    with contextlib.ExitStack() as opened:
        try:
            with world.raise_together(), _one_line(volume, directory):
                if world.is_node_leader:
                    with open(path, "xb") as created:
                        created.truncate(size)
            with world.raise_together(), _one_line(volume, directory):
                file = open(path, "r+b")  # noqa: SIM115
                opened.callback(file.close)
                memory = mmap.mmap(file.fileno(), size)
        finally:
            world.barrier()
            if world.is_node_leader:
                path.unlink(missing_ok=True)
        fields = _fields(memory, volume)
        with world.raise_together(), _one_line(volume, directory):
            if world.is_node_leader:
                if hasattr(os, "posix_fallocate"):
                    # Reserved now: what is taken while it is filled would end the process, without a word.
                    os.posix_fallocate(file.fileno(), 0, size)
                _fill(volume, dict(zip(DATASETS, fields, strict=True)), silent=not world.is_root)
    return Volume(volume.path, fields[0], fields[1])


def _fill(volume: Volume, destination: dict[str, np.ndarray], silent: bool) -> None:
    name = f"reading {os.path.basename(volume.path)} into memory"
    guard = FileGuard(volume.files)
    with closing(guard), Progress(name, volume.slab_count(), "slabs", silent=silent) as progress:
        for dataset, channel, x, values in volume.slabs():
            guard.check()
            destination[dataset][channel, x : x + len(values)] = values
            progress.advance()


@contextlib.contextmanager
def _one_line(volume: Volume, directory: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot hold {volume.path} in {directory}: {error.strerror or error}; use --data_loader_config=lowmem"
        ) from None
