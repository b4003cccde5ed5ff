"""The loaders `lowmem` and `inmem`: threads assemble crops straight into batch buffers, a few batches ahead.

Threads, not processes: batch systems send their signals to every process of a job, which would kill worker processes
and with them the run. The copies release the interpreter lock, so threads do scale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from utils.config import Config
from utils.data.files.hdf5 import Volume
from utils.data.files.page_cache import map_cached_pages, warm_page_cache
from utils.data.files.shared_memory import share_volume
from utils.data.files.size_check import SizeCheck
from utils.data.loader import Batch, Loader, Loaders, TrainingBytes, memory_format
from utils.data.loaders.crops import CropCopier, CropOptions
from utils.data.loaders.prefetcher import CudaPrefetcher, copies
from utils.data.plan import EpochPlan
from utils.data.sources import build_splits, crop_options, load_volumes, open_volumes
from utils.distributed.world import World
from utils.errors import LocalError

BATCHES_AHEAD = 2


def build_lowmem(config: Config, world: World, training_bytes: TrainingBytes) -> Loaders:
    """Crops from the files, which are mapped if they are contiguous."""
    volumes = open_volumes(config, world)
    note = warm_page_cache([path for volume in volumes.values() for path in volume.files], world)
    for volume in volumes.values():
        if volume.mapped:
            map_cached_pages(volume.files, (volume.inputs, volume.targets))
    return build_splits(
        lambda split: ThreadedCropLoader(volumes[split], crop_options(config, world, split)), world, note
    )


def build_inmem(config: Config, world: World, training_bytes: TrainingBytes) -> Loaders:
    """Crops from one copy in the node's memory."""
    volumes, note = load_volumes(open_volumes(config, world), lambda volume: share_volume(volume, world), "memory")
    return build_splits(
        lambda split: ThreadedCropLoader(volumes[split], crop_options(config, world, split)), world, note
    )


class ThreadedCropLoader(Loader):
    """Carries out one rank's part of a sample plan."""

    def __init__(self, volume: Volume, options: CropOptions) -> None:
        self._volume, self._plan = volume, options.plan
        self._batches = options.batches()
        fields = (volume.inputs, volume.targets)
        self._copiers = [
            CropCopier(field, options.plan.crop, vectors, options.symmetry_mode)
            for field, vectors in zip(fields, options.vectors, strict=True)
        ]
        self._size_check = SizeCheck(volume.files)
        self._pool = ThreadPoolExecutor(options.threads, thread_name_prefix="loader") if options.threads > 0 else None
        shapes = options.shapes(field.shape[0] for field in fields)
        pinned = options.device.type == "cuda"
        form = memory_format(options.channels_last)
        # One buffer more than the batches ahead: the consumer has that one.
        self._buffers = [
            Batch(*(torch.empty(shape, pin_memory=pinned, memory_format=form).zero_() for shape in shapes))
            for _ in range(BATCHES_AHEAD + 1)
        ]
        self._prefetcher = CudaPrefetcher(options.device, shapes, options.channels_last) if pinned else None

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        batches = self._assemble(self._plan.epoch(epoch), first_batch)
        return batches if self._prefetcher is None else self._prefetcher.prefetch(copies(batches))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._size_check.close()

    def _assemble(self, plan: EpochPlan, first_batch: int) -> Generator[Batch, None, None]:
        pending: deque[tuple[Batch, list[Future[None]]]] = deque()
        order = iter(range(first_batch, len(self._batches)))
        try:
            while True:
                self._size_check.check()
                while len(pending) < BATCHES_AHEAD and (number := next(order, None)) is not None:
                    pending.append(self._start(plan.rows(self._batches[number]), number))
                if not pending:
                    return
                batch, tasks = pending[0]
                for task in tasks:
                    task.result()
                pending.popleft()
                yield batch
        except OSError as error:
            raise LocalError(f"cannot read {self._volume.path}: {error}") from error
        finally:
            # After an early end or a failure, too, the threads must release the buffers before another epoch.
            for _, tasks in pending:
                for task in tasks:
                    task.cancel() or task.exception()

    def _start(self, rows: EpochPlan, number: int) -> tuple[Batch, list[Future[None]]]:
        """Starts to assemble batch `number`, with one task per sample."""
        buffer = self._buffers[number % len(self._buffers)]
        batch = Batch(*(part[: len(rows)] for part in buffer))
        arrays = tuple(part.numpy() for part in batch)
        if self._pool is None:
            for slot in range(len(rows)):
                self._copy(rows, slot, arrays)
            return batch, []
        return batch, [self._pool.submit(self._copy, rows, slot, arrays) for slot in range(len(rows))]

    def _copy(self, rows: EpochPlan, slot: int, arrays: tuple[np.ndarray, ...]) -> None:
        for copier, array in zip(self._copiers, arrays, strict=True):
            copier.copy(rows.origins[slot], int(rows.symmetries[slot]), array[slot])
