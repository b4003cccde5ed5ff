"""The loader `dali-lowmem`: crops are read from `.npy` files, and NVIDIA DALI moves them to the device.

Threads of this process cut the crops out of the mapped files, straight into (pinned) memory that DALI reads without a
copy. DALI's own reader copies a region of interest value by value, which takes 1.5 times as long. torch then applies
the symmetries of the sample plan on the device.
"""

import functools
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from utils.config import Config
from utils.data import symmetry
from utils.data.loaders.base import Batch, CropLoader, DataSplits, build_crop_loaders
from utils.data.loaders.crops import CropReader
from utils.data.loaders.prefetcher import CudaPrefetcher, Fills, HostPrefetcher
from utils.data.plan import SamplePlan
from utils.distributed.world import World
from utils.errors import UserError
from utils.volumes.hdf5 import Volume
from utils.volumes.npy import ENDINGS
from utils.volumes.opened import Volumes

QUEUE = 2  # batches that DALI has at a time
SPARE = 2  # buffers for the batch that is being read, and for one whose copy to the device may still run


def build(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    with world.raise_together():
        import_dali()
    return build_crop_loaders(volumes, world, volumes.for_loader(world, npy=True), DaliLoader, from_files=True)


class DaliLoader(CropLoader):
    def __init__(self, volumes: Sequence[Volume], plan: SamplePlan, config: Config, world: World) -> None:
        super().__init__(plan, config, world)
        self._volumes, self._on_gpu = volumes, world.device.type == "cuda"
        # For each field the source channels [48, C] and their signs [48, C], on the device.
        fields = zip(self.shapes, self.vectors, strict=True)
        tables = [symmetry.channel_table(shape[1], vectors, config.symmetries) for shape, vectors in fields]
        self._tables = [[torch.from_numpy(table).to(world.device) for table in pair] for pair in tables]
        buffers = [
            Batch(*(torch.zeros((n, *sides, c), pin_memory=self._on_gpu) for n, c, *sides in self.shapes))
            for _ in range(QUEUE + SPARE)
        ]
        prefetcher = CudaPrefetcher if self._on_gpu else HostPrefetcher
        self._prefetcher = prefetcher(world.device, self.shapes, config.channels_last)
        self._reader = CropReader(self, [volume.path for volume in volumes], buffers, self._copy)
        self._pipeline = self._build()
        # DALI's first run fills its whole queue and needs input for that, however short the epoch is.
        for buffer in buffers[:QUEUE]:
            self._feed(buffer)
        self._pipeline.schedule_run()
        for _ in range(QUEUE):
            self._pipeline.outputs()

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        return self._prefetcher.prefetch(self._fills(epoch, first_batch))

    def close(self) -> None:
        self._reader.close()
        del self._pipeline  # ends its threads

    def _fills(self, epoch: int, first_batch: int) -> Fills:
        """Keeps DALI's queue filled. Each fill takes the next batch out of it."""
        running: deque[np.ndarray] = deque()  # symmetries of the batches that DALI has
        with closing(self._reader.read(epoch, first_batch)) as batches:
            try:
                for rows, buffer in batches:
                    self._feed(buffer)
                    self._pipeline.schedule_run()
                    running.append(rows.symmetries)
                    if len(running) == QUEUE:
                        yield self._next_fill(running)
                while running:
                    yield self._next_fill(running)
            finally:
                # After an early end, takes this epoch's batches out of DALI.
                for _ in running:
                    self._pipeline.outputs()

    def _next_fill(self, running: deque[np.ndarray]) -> tuple[int, Any]:
        symmetries = running.popleft()
        return len(symmetries), functools.partial(self._fill, symmetries)

    def _fill(self, symmetries: np.ndarray, batch: Batch) -> None:
        """Copies the next batch out of DALI's memory, which changes from batch to batch, under its symmetries."""
        stream = torch.cuda.current_stream(self.world.device) if self._on_gpu else None
        outputs = [torch.from_dlpack(output.as_tensor()) for output in self._pipeline.outputs(stream)]
        for crops, samples, (sources, signs) in zip(outputs, batch, self._tables, strict=True):
            if not self.plan.is_augmented:
                samples.copy_(crops[: len(samples)].movedim(-1, 1), non_blocking=True)
                continue
            for crop, sample, index in zip(crops, samples, symmetries.tolist(), strict=False):
                sample.copy_(symmetry.apply_on_device(crop.movedim(-1, 0), index, sources, signs))

    def _copy(self, volume: int, origin: np.ndarray, index: int, sample: Sequence[np.ndarray]) -> None:
        x, y, z = (slice(int(start), int(start) + self.plan.crop) for start in origin)
        for field, out in zip(self._volumes[volume].fields, sample, strict=True):
            np.copyto(out, np.moveaxis(field[:, x, y, z], 0, -1))

    def _feed(self, buffer: Batch) -> None:
        """Passes a batch to DALI. A shorter one keeps old crops at its end."""
        from nvidia.dali.tensors import TensorListCPU

        for name, crops in zip(ENDINGS, buffer, strict=True):
            # Passed without a copy, and marked as pinned if it is: DALI then copies it to the device directly.
            self._pipeline.feed_input(name, TensorListCPU(crops.numpy(), is_pinned=self._on_gpu))

    def _build(self) -> Any:
        fn, types, pipeline_class = import_dali()
        size, threads = self.shapes[0][0], max(1, self.config.num_data_workers)
        gpu = (self.world.device.index or 0) if self._on_gpu else None
        pipeline = pipeline_class(batch_size=size, num_threads=threads, device_id=gpu, prefetch_queue_depth=QUEUE)
        with pipeline:
            crops = [fn.external_source(name=name, dtype=types.FLOAT, ndim=4, no_copy=True) for name in ENDINGS]
            pipeline.set_outputs(*(crop.gpu() if self._on_gpu else crop for crop in crops))
        pipeline.build()
        return pipeline


def import_dali() -> tuple[Any, Any, Any]:
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
    except ImportError as error:
        raise UserError(
            f"data_loader_config dali-lowmem: NVIDIA DALI cannot be imported ({error}); install it with "
            f'pip install -e ".[dali]", or use --data_loader_config=lowmem'
        ) from None
    return fn, types, Pipeline
