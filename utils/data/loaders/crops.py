"""Cuts the crops of each batch out of volumes: threads read files or arrays into buffers, ahead of the consumer.

The copies release the interpreter lock, so threads do scale. Permuting axes while reading a huge array is slow, because
consecutive reads are kilobytes apart. So each channel of the crop is first read row by row, with the sign of a vector
component, into a scratch block that stays in the core's cache, and its axes are permuted from there.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from utils.data import symmetry
from utils.data.loaders.base import Batch, CropLoader
from utils.data.plan import EpochPlan
from utils.errors import LocalError, os_errors_for_users

# Batches whose reads are started in advance: the next batch is read while the current one is in use.
BATCHES_AHEAD = 2

# Writes a crop's inputs and targets: (index of the volume, origin [3], symmetry, two arrays).
Copy = Callable[[int, np.ndarray, int, Sequence[np.ndarray]], None]
# Symmetries that keep rows in order and read them forwards; they need no scratch block.
ROW_PRESERVING = {*np.flatnonzero((symmetry.PERMUTATIONS == (0, 1, 2)).all(1) & (symmetry.SIGNS[:, 2] > 0)).tolist()}


class CropCopier:
    """Copies crops of one field of several volumes; safe to call from several threads at once."""

    def __init__(self, fields: Sequence[Any], crop: int, vectors: symmetry.Vectors, mode: str) -> None:
        """Each volume's field is [C, X, Y, Z]: an array, mapped or not, or an HDF5 dataset."""
        self._fields, self._crop = fields, crop
        self._sources, self._signs = symmetry.channel_table(fields[0].shape[0], vectors, mode)
        self._scratch = threading.local()

    def copy(self, volume: int, origin: np.ndarray, index: int, out: np.ndarray) -> None:
        """Writes the crop at `origin` [3] of a volume under symmetry `index` to `out` [C, crop, crop, crop]."""
        side = self._crop
        if not hasattr(self._scratch, "block"):
            # Padded, because rows and planes a power of two apart would compete for a few cache lines.
            self._scratch.block = np.empty((side, side + 1, side + 4), dtype=np.float32)[:, :side, :side]
        block = self._scratch.block
        x, y, z = (slice(int(start), int(start) + side) for start in origin)
        crop = self._fields[volume][:, x, y, z]  # a view of a mapped array; read here from a chunked dataset
        moved = symmetry.move_axes(block, index)
        for channel, (source, sign) in enumerate(zip(self._sources[index], self._signs[index], strict=True)):
            if index in ROW_PRESERVING and sign > 0:
                np.copyto(out[channel], symmetry.move_axes(crop[source], index))
                continue
            if sign > 0:
                np.copyto(block, crop[source])
            else:
                np.negative(crop[source], out=block)
            np.copyto(out[channel], moved)


class CropReader:
    """Reads the batches of a loader, with one task per sample."""

    def __init__(self, loader: CropLoader, paths: Sequence[str], buffers: Sequence[Batch], copy: Copy) -> None:
        """`paths` of the volumes. There are more `buffers` than BATCHES_AHEAD: the consumer holds at least one."""
        self._plan, self._batches, threads = loader.plan, loader.batches, max(1, loader.config.num_data_workers)
        self._paths, self._buffers, self._copy = paths, buffers, copy
        self._arrays = [[part.numpy() for part in buffer] for buffer in buffers]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="loader")

    def read(self, epoch: int, first_batch: int) -> Generator[tuple[EpochPlan, Batch], None, None]:
        """Yields the samples of each batch, and the buffer that begins with them."""
        plan = self._plan.epoch(epoch)
        pending: deque[tuple[EpochPlan, Batch, list[Future[None]]]] = deque()
        order = iter(range(first_batch, len(self._batches)))
        try:
            while True:
                while len(pending) < BATCHES_AHEAD and (number := next(order, None)) is not None:
                    pending.append(self._start(plan.rows(self._batches[number]), number % len(self._buffers)))
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
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, rows: EpochPlan, number: int) -> tuple[EpochPlan, Batch, list[Future[None]]]:
        samples = zip(rows.volumes, rows.origins, rows.symmetries, *self._arrays[number], strict=False)
        tasks = [
            self._pool.submit(self._read, int(volume), origin, int(index), sample)
            for volume, origin, index, *sample in samples
        ]
        return rows, self._buffers[number], tasks

    def _read(self, volume: int, origin: np.ndarray, index: int, sample: Sequence[np.ndarray]) -> None:
        with os_errors_for_users(f"cannot read {self._paths[volume]}", "copy or recreate it", LocalError):
            self._copy(volume, origin, index, sample)
