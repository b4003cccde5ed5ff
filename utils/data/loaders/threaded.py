"""The loaders `lowmem` and `inmem`: threads cut crops out of volumes, straight into batch buffers, a few batches ahead.

The copies release the interpreter lock, so threads do scale. Permuting axes while reading a huge array is slow, because
consecutive reads are kilobytes apart. So each channel of the crop is first read row by row, with the sign of a vector
component, into a scratch block that stays in the core's cache, and its axes are permuted from there.

`inmem` reads crops from one copy of the volumes for all ranks of a node. The copy's file in a tmpfs is unlinked as soon
as every rank has mapped it, before it is filled: the memory is released however the run ends. A single rank uses
private memory, whose large pages make reading crops a tenth faster.
"""

import contextlib
import functools
import logging
import os
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.config import Config
from utils.data import symmetry
from utils.data.loaders.base import Batch, CropLoader, DataSplits, build_crop_loaders, memory_format
from utils.data.loaders.prefetcher import CudaPrefetcher, copies
from utils.data.plan import EpochPlan, SamplePlan
from utils.distributed.world import World
from utils.errors import LocalError, UserError, os_errors_for_users
from utils.files import GIB
from utils.volumes.hdf5 import Volume
from utils.volumes.opened import Volumes, all_volumes
from utils.volumes.page_cache import available_memory

# Batches whose reads are started in advance: the next batch is read while the current one is in use.
BATCHES_AHEAD = 2
SHARED_MEMORY = "/dev/shm"
REMEDY = "use --data_loader_config=lowmem"

log = logging.getLogger(__name__)


def build_lowmem(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    """Crops from the files, which are mapped if they are contiguous."""
    return build_crop_loaders(volumes, world, volumes.for_loader(world), ThreadedCropLoader)


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


class CropCopier:
    """Copies crops of one field of several volumes; safe to call from several threads at once."""

    def __init__(self, fields: Sequence[Any], crop: int, vectors: symmetry.Vectors, mode: str) -> None:
        """Each volume's field is [C, X, Y, Z]: an array, mapped or not, or an HDF5 dataset."""
        self._fields, self._crop = fields, crop
        self.sources, self.signs = symmetry.channel_table(fields[0].shape[0], vectors, mode)
        self._scratch = threading.local()

    def copy(self, volume: int, origin: np.ndarray, index: int, out: np.ndarray) -> None:
        """Writes the crop at `origin` [3] of a volume under symmetry `index` to `out` [C, crop, crop, crop]."""
        side = self._crop
        x, y, z = (slice(int(start), int(start) + side) for start in origin)
        crop = self._fields[volume][:, x, y, z]  # a view of a mapped array; read here from a chunked dataset
        if index == symmetry.IDENTITY:
            np.copyto(out, crop)
            return
        if not hasattr(self._scratch, "block"):
            # Padded, because rows and planes a power of two apart would compete for a few cache lines.
            self._scratch.block = np.empty((side, side + 1, side + 4), dtype=np.float32)[:, :side, :side]
        block = self._scratch.block
        moved = symmetry.move_axes(block, index)
        for channel, (source, sign) in enumerate(zip(self.sources[index], self.signs[index], strict=True)):
            if sign > 0:
                np.copyto(block, crop[source])
            else:
                np.negative(crop[source], out=block)
            np.copyto(out[channel], moved)


class ThreadedCropLoader(CropLoader):
    """Threads read the crops of each batch into one of some `buffers`, with one task per sample."""

    buffers = BATCHES_AHEAD + 1  # the consumer holds at least one
    channels_last_buffers = False  # True: even if the config's batches are not

    def __init__(self, volumes: Sequence[Volume], plan: SamplePlan, config: Config, world: World) -> None:
        super().__init__(plan, config, world)
        self._volumes, self._on_gpu = volumes, world.device.type == "cuda"
        self._copiers = [
            CropCopier(fields, plan.crop, vectors, config.symmetries)
            for *fields, vectors in zip(*(volume.fields for volume in volumes), self.vectors, strict=True)
        ]
        form = memory_format(config.channels_last or self.channels_last_buffers)
        self._buffers = [
            Batch(*(torch.empty(s, pin_memory=self._on_gpu, memory_format=form).zero_() for s in self.shapes))
            for _ in range(self.buffers)
        ]
        self._arrays = [[part.numpy() for part in buffer] for buffer in self._buffers]
        self._pool = ThreadPoolExecutor(max(1, config.num_data_workers), thread_name_prefix="loader")
        self._prefetcher = CudaPrefetcher(world.device, self.shapes, config.channels_last) if self._on_gpu else None

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        with contextlib.closing(self._read(epoch, first_batch)) as filled:
            batches = (buffer.first(len(rows)) for rows, buffer in filled)
            yield from batches if self._prefetcher is None else self._prefetcher.prefetch(copies(batches))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, epoch: int, first_batch: int) -> Generator[tuple[EpochPlan, Batch], None, None]:
        """Yields the samples of each batch, and the buffer that begins with them."""
        plan = self.plan.epoch(epoch)
        pending: deque[tuple[EpochPlan, Batch, list[Future[None]]]] = deque()
        order = iter(range(first_batch, len(self.batches)))
        try:
            while True:
                while len(pending) < BATCHES_AHEAD and (number := next(order, None)) is not None:
                    rows, slot = plan.rows(self.batches[number]), number % len(self._buffers)
                    samples = zip(rows.volumes, rows.origins, rows.symmetries, *self._arrays[slot], strict=False)
                    tasks = [self._pool.submit(self._read_sample, *sample) for sample in samples]
                    pending.append((rows, self._buffers[slot], tasks))
                if not pending:
                    return
                rows, buffer, tasks = pending[0]
                for task in tasks:
                    task.result()
                pending.popleft()
                yield rows, buffer
        finally:
            # Even after an early end or a failure, no thread may still use a buffer when the next epoch starts.
            for _, _, tasks in pending:
                for task in tasks:
                    task.cancel() or task.exception()

    def _read_sample(self, volume: int, origin: np.ndarray, index: int, *sample: np.ndarray) -> None:
        with os_errors_for_users(f"cannot read {self._volumes[volume].path}", "copy or recreate it", LocalError):
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
