"""The loaders `lowmem` and `inmem`: threads assemble crops straight into batch buffers, a few batches ahead.

Threads, not processes: batch systems send their signals to every process of a job, which kills worker processes and
with them the run; and the copies release the interpreter lock, so threads do scale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from utils.data.files.file_guard import FileGuard
from utils.data.files.hdf5 import Volume
from utils.data.loaders.crops import CropCopier
from utils.data.loaders.prefetcher import Batch, CudaPrefetcher, copies, memory_format
from utils.data.plan import EpochPlan, SamplePlan, rank_batches
from utils.errors import LocalError

BATCHES_AHEAD = 2


class Copier(Protocol):
    """Copies crops of one field: the one at `origin` [3] under a symmetry, to `out` [C, D, D, D]; from any thread."""

    def copy(self, origin: np.ndarray, index: int, out: np.ndarray) -> None: ...


class ThreadedCropLoader:
    """Carries out this rank's part of a sample plan; `epoch(e)` iterates over its batches.

    A batch is valid until the next one is asked for: its memory is used again.
    """

    def __init__(
        self,
        volume: Volume,
        plan: SamplePlan,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        threads: int = 2,
        device: torch.device | None = None,
        vectors: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]] = ((), ()),
        symmetry_mode: str = "full",
        channels_last: bool = False,
        copier: Callable[[Any, int, Sequence[Sequence[int]], str], Copier] = CropCopier,
    ) -> None:
        self.volume, self.plan = volume, plan
        self._device = device or torch.device("cpu")
        self._batches = rank_batches(plan.samples, batch_size, rank, world_size, drop_last=plan.split == "train")
        self._copiers = tuple(
            copier(field, plan.crop, field_vectors, symmetry_mode)
            for field, field_vectors in zip((volume.inputs, volume.targets), vectors, strict=True)
        )
        self._guard = FileGuard(volume.files)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="loader") if threads > 0 else None
        shapes: list[tuple[int, ...]] = [
            (batch_size, field.shape[0], *(plan.crop,) * 3) for field in (volume.inputs, volume.targets)
        ]
        pinned = self._device.type == "cuda"
        form = memory_format(channels_last)
        # One buffer more than the batches ahead: the one in the consumer's hands.
        self._buffers = [
            Batch(*(torch.empty(shape, pin_memory=pinned, memory_format=form).zero_() for shape in shapes))
            for _ in range(BATCHES_AHEAD + 1)
        ]
        self._feeder = CudaPrefetcher(self._device, shapes, channels_last) if pinned else None

    def __len__(self) -> int:
        """Batches an epoch on this rank."""
        return len(self._batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch, from `first_batch` on."""
        batches = self._assemble(self.plan.epoch(epoch), first_batch)
        return batches if self._feeder is None else self._feeder.feed(copies(batches))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._guard.close()

    def _assemble(self, plan: EpochPlan, first_batch: int) -> Generator[Batch, None, None]:
        pending: deque[tuple[Batch, list[Future[None]]]] = deque()
        order = iter(range(first_batch, len(self._batches)))
        try:
            while True:
                self._guard.check()
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
            raise LocalError(f"cannot read {self.volume.path}: {error}") from error
        finally:
            # Left early, or failed: the threads must be done with the buffers before another epoch uses them.
            for _, tasks in pending:
                for task in tasks:
                    task.cancel() or task.exception()

    def _start(self, rows: EpochPlan, number: int) -> tuple[Batch, list[Future[None]]]:
        """Begins to assemble batch `number`; one task a sample."""
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
