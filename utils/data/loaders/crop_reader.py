"""Threads read the crops of a sample plan into rotating buffers, ahead of the consumer.

Threads, not processes: batch systems send their signals to every process of a job, which would kill worker processes
and with them the run. The copies release the interpreter lock, so threads do scale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from utils.data.files.hdf5 import Volume
from utils.data.loader import Batch
from utils.data.loaders.crops import CropOptions
from utils.data.plan import EpochPlan
from utils.errors import LocalError, os_errors_for_users

# Batches whose reads are started in advance: the next batch is read while the current one is in use.
BATCHES_AHEAD = 2

# Called with a volume's index, an origin [3], a symmetry and two arrays; writes the crop's inputs and targets to the
# arrays.
Copy = Callable[[int, np.ndarray, int, Sequence[np.ndarray]], None]


class CropReader:
    """Reads one rank's part of a sample plan, with one task per sample."""

    def __init__(self, volumes: Sequence[Volume], options: CropOptions, buffers: Sequence[Batch], copy: Copy) -> None:
        """There are more `buffers` than BATCHES_AHEAD, because the consumer holds at least one."""
        self.batches = options.batches()
        self._plan, self._buffers, self._copy = options.plan, buffers, copy
        self._paths = [volume.path for volume in volumes]
        self._arrays = [[part.numpy() for part in buffer] for buffer in buffers]
        self._pool = ThreadPoolExecutor(options.threads, thread_name_prefix="loader") if options.threads > 0 else None

    def read(self, epoch: int, first_batch: int) -> Generator[tuple[EpochPlan, Batch], None, None]:
        """Yields the samples of each batch, and the buffer that begins with them."""
        plan = self._plan.epoch(epoch)
        pending: deque[tuple[EpochPlan, Batch, list[Future[None]]]] = deque()
        order = iter(range(first_batch, len(self.batches)))
        try:
            while True:
                while len(pending) < BATCHES_AHEAD and (number := next(order, None)) is not None:
                    pending.append(self._start(plan.rows(self.batches[number]), number % len(self._buffers)))
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

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, rows: EpochPlan, number: int) -> tuple[EpochPlan, Batch, list[Future[None]]]:
        """Starts to read a batch into buffer `number`; without threads, reads it."""
        tasks = []
        samples = zip(rows.volumes, rows.origins, rows.symmetries, strict=True)
        for slot, (volume, origin, symmetry) in enumerate(samples):
            task = (int(volume), origin, int(symmetry), [array[slot] for array in self._arrays[number]])
            if self._pool is None:
                self._read(*task)
            else:
                tasks.append(self._pool.submit(self._read, *task))
        return rows, self._buffers[number], tasks

    def _read(self, volume: int, origin: np.ndarray, symmetry: int, sample: Sequence[np.ndarray]) -> None:
        with os_errors_for_users(f"cannot read {self._paths[volume]}", "copy or recreate it", LocalError):
            self._copy(volume, origin, symmetry, sample)
