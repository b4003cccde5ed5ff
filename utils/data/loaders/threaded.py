"""The loaders `lowmem` and `inmem`: threads assemble crops straight into batch buffers, a few batches ahead.

`inmem` reads crops from one copy of the volumes for all ranks of a node. The copy's file in a tmpfs is unlinked as soon
as every rank has mapped it, before it is filled: the memory is released however the run ends. A single rank uses
private memory, whose large pages make reading crops a tenth faster.
"""

import contextlib
import functools
import logging
import os
import shutil
import time
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import torch

from utils.config import Config
from utils.data.loaders.base import Batch, CropLoader, DataSplits, build_crop_loaders, memory_format
from utils.data.loaders.crops import BATCHES_AHEAD, CropCopier, CropReader
from utils.data.loaders.prefetcher import CudaPrefetcher, copies
from utils.data.plan import SamplePlan
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.files import GIB
from utils.volumes.hdf5 import Volume
from utils.volumes.opened import Volumes, all_volumes
from utils.volumes.page_cache import available_memory

SHARED_MEMORY = "/dev/shm"
REMEDY = "use --data_loader_config=lowmem"

log = logging.getLogger(__name__)


def build_lowmem(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    """Crops from the files, which are mapped if they are contiguous."""
    return build_crop_loaders(volumes, world, volumes.for_loader(world), ThreadedCropLoader, from_files=True)


def build_inmem(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    """Crops from one copy in the node's memory."""
    opened, started = volumes.for_loader(world), time.perf_counter()
    both = all_volumes(opened)
    check_room(both, world)
    shared = {split: [share_volume(volume, world) for volume in opened[split]] for split in opened}
    names, size = ", ".join(os.path.basename(volume.path) for volume in both), sum(volume.bytes for volume in both)
    seconds = time.perf_counter() - started
    log.info("%s: %.2f GiB read into memory in %.2f s (%.1f GB/s)", names, size / GIB, seconds, size / 1e9 / seconds)
    return build_crop_loaders(volumes, world, shared, ThreadedCropLoader)


class ThreadedCropLoader(CropLoader):
    def __init__(self, volumes: Sequence[Volume], plan: SamplePlan, config: Config, world: World) -> None:
        super().__init__(plan, config, world)
        self._copiers = [
            CropCopier(fields, plan.crop, vectors, config.symmetries)
            for *fields, vectors in zip(*(volume.fields for volume in volumes), self.vectors, strict=True)
        ]
        on_gpu, form = world.device.type == "cuda", memory_format(config.channels_last)
        buffers = [
            Batch(*(torch.empty(shape, pin_memory=on_gpu, memory_format=form).zero_() for shape in self.shapes))
            for _ in range(BATCHES_AHEAD + 1)
        ]
        self._reader = CropReader(self, [volume.path for volume in volumes], buffers, self._copy)
        self._prefetcher = CudaPrefetcher(world.device, self.shapes, config.channels_last) if on_gpu else None

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        batches = self._assemble(epoch, first_batch)
        return batches if self._prefetcher is None else self._prefetcher.prefetch(copies(batches))

    def close(self) -> None:
        self._reader.close()

    def _assemble(self, epoch: int, first_batch: int) -> Generator[Batch, None, None]:
        with contextlib.closing(self._reader.read(epoch, first_batch)) as filled:
            for rows, buffer in filled:
                yield buffer.first(len(rows))

    def _copy(self, volume: int, origin: np.ndarray, index: int, sample: Sequence[np.ndarray]) -> None:
        for copier, out in zip(self._copiers, sample, strict=True):
            copier.copy(volume, origin, index, out)


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
    os_errors = functools.partial(os_errors_for_users, f"cannot hold {volume.path} in {SHARED_MEMORY}", REMEDY)
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
