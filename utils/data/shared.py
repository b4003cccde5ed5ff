"""One copy of a volume in memory for all ranks of a node, for the loader `inmem`.

The copy lies in the node's shared memory (a tmpfs). Its file is unlinked as soon as every rank has mapped it, before
it is filled: whatever ends the run, even SIGKILL, the memory is given back.
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

from utils.data.file_guard import FileGuard
from utils.data.volumes import DATASETS, Volume
from utils.distributed import World
from utils.errors import UserError
from utils.progress import Progress

SHARED_MEMORY = "/dev/shm"


def shared_memory_free(directory: str = SHARED_MEMORY) -> int:
    """Bytes that `share_volume` can take on this node."""
    try:
        free = os.statvfs(directory)
    except OSError:
        return 0
    return free.f_bavail * free.f_frsize


def share_volume(volume: Volume, world: World, directory: str = SHARED_MEMORY) -> Volume:
    """Reads the volume once a node and returns it as arrays that all ranks of the node share."""
    size = volume.bytes
    with world.agreed():
        if world.is_node_leader:
            available = shared_memory_free(directory)
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
            with world.agreed(), _one_line(volume, directory):
                if world.is_node_leader:
                    with open(path, "xb") as created:
                        created.truncate(size)
            with world.agreed(), _one_line(volume, directory):
                file = open(path, "r+b")  # noqa: SIM115
                opened.callback(file.close)
                memory = mmap.mmap(file.fileno(), size)
        finally:
            world.barrier()
            if world.is_node_leader:
                path.unlink(missing_ok=True)
        flat = np.frombuffer(memory, dtype=np.float32)
        fields, start = [], 0
        for field in (volume.inputs, volume.targets):
            count = int(np.prod(field.shape))
            fields.append(flat[start : start + count].reshape(field.shape))
            start += count
        with world.agreed(), _one_line(volume, directory):
            if world.is_node_leader:
                if hasattr(os, "posix_fallocate"):
                    # Reserved now: what is taken while it is filled would end the process, without a word.
                    os.posix_fallocate(file.fileno(), 0, size)
                _fill(volume, dict(zip(DATASETS, fields, strict=True)), silent=not world.is_root)
    return Volume(volume.path, *fields)


def _fill(volume: Volume, destination: dict[str, np.ndarray], silent: bool) -> None:
    name = f"reading {os.path.basename(volume.path)} into shared memory"
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
