"""The loader `dali-lowmem`: NVIDIA DALI moves crops of `.npy` files to the device and augments them there.

`DaliLoader._augment` defines DALI's graph. It gets each crop and the index of its symmetry, as the sample plan states
them, and returns float32 batches in the memory layout of the step. DALI's CPU backend runs the same graph, for tests.

Threads of this process cut the crops out of the mapped files, straight into (pinned) memory that DALI reads without a
copy. DALI's own reader copies a region of interest value by value, which takes 1.8 times as long (docs/loaders.md).
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch

from utils.config import Config
from utils.data import symmetry
from utils.data.loaders.base import Batch, DataSplits, build_crop_loaders
from utils.data.loaders.prefetcher import Fills, HostPrefetcher
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import SamplePlan
from utils.distributed.world import World
from utils.errors import UserError
from utils.volumes.convert_to_npy import ENDINGS
from utils.volumes.hdf5 import Volume
from utils.volumes.opened import Volumes

QUEUE = 2  # batches that DALI has at a time
SPARE = 2  # buffers for the batch that is being read, and for one whose copy to the device may still run


def build(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    with world.raise_together():
        import_dali()
    return build_crop_loaders(volumes, world, volumes.for_loader(world, npy=True), DaliLoader)


class DaliLoader(ThreadedCropLoader):
    buffers, channels_last_buffers = QUEUE + SPARE, True

    def __init__(self, volumes: Sequence[Volume], plan: SamplePlan, config: Config, world: World) -> None:
        super().__init__(volumes, plan, config, world)
        copiers = zip(ENDINGS, self._copiers, strict=True)
        self._tables = [(name, copier.sources, copier.signs) for name, copier in copiers]
        fn, types, pipeline_def = import_dali()
        gpu = (world.device.index or 0) if self._on_gpu else None
        options = {"device_id": gpu, "prefetch_queue_depth": QUEUE, "enable_conditionals": True}
        size, threads = self.shapes[0][0], max(1, config.num_data_workers)
        define = pipeline_def(batch_size=size, num_threads=threads, **options)
        self._pipeline = define(self._augment)(fn, types)
        self._pipeline.build()
        # DALI's first run fills its whole queue and needs input for that, however short the epoch is.
        for buffer in self._buffers[:QUEUE]:
            self._feed(np.zeros(len(buffer.inputs), np.int64), buffer)
        self._pipeline.schedule_run()
        for _ in range(QUEUE):
            self._pipeline.outputs()

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        prefetcher = self._prefetcher or HostPrefetcher(self.world.device, self.shapes, self.config.channels_last)
        return prefetcher.prefetch(self._fills(epoch, first_batch))

    def close(self) -> None:
        super().close()
        del self._pipeline  # ends its threads

    def _fills(self, epoch: int, first_batch: int) -> Fills:
        """Keeps DALI's queue filled. Each fill takes the next batch out of it."""
        running: deque[int] = deque()  # samples of the batches that DALI has
        with closing(self._read(epoch, first_batch)) as batches:
            try:
                for rows, buffer in batches:
                    self._feed(rows.symmetries, buffer)
                    self._pipeline.schedule_run()
                    running.append(len(rows))
                    if len(running) == QUEUE:
                        yield running.popleft(), self._fill
                while running:
                    yield running.popleft(), self._fill
            finally:
                # After an early end, takes this epoch's batches out of DALI.
                for _ in running:
                    self._pipeline.outputs()

    def _fill(self, batch: Batch) -> None:
        """Copies the next batch out of DALI's memory, which changes from batch to batch."""
        stream = torch.cuda.current_stream(self.world.device) if self._on_gpu else None
        for output, samples in zip(self._pipeline.outputs(stream), batch, strict=True):
            crops = torch.from_dlpack(output.as_tensor())
            samples.copy_(crops.movedim(-1, 1) if self.config.channels_last else crops, non_blocking=True)

    def _read_sample(self, volume: int, origin: np.ndarray, index: int, *sample: np.ndarray) -> None:
        super()._read_sample(volume, origin, symmetry.IDENTITY, *sample)  # DALI applies the symmetry

    def _feed(self, symmetries: np.ndarray, buffer: Batch) -> None:
        """Passes a batch to DALI, as many crops of the buffer as there are symmetries."""
        from nvidia.dali.tensors import TensorListCPU

        self._pipeline.feed_input("symmetry", TensorListCPU(symmetries.astype(np.int32)))
        for name, crops in zip(ENDINGS, buffer.first(len(symmetries)), strict=True):
            # Passed without a copy, and marked as pinned if it is: DALI then copies it to the device directly.
            self._pipeline.feed_input(name, TensorListCPU(crops.movedim(1, -1).numpy(), is_pinned=self._on_gpu))

    def _augment(self, fn: Any, types: Any) -> tuple[Any, ...]:
        """DALI's graph: both fields' crops [D, H, W, C] under the symmetries of their samples, in the step's layout."""
        index, outputs = fn.external_source(name="symmetry", dtype=types.INT32, ndim=0), []
        flips = types.Constant((symmetry.SIGNS < 0).astype(np.int32))[index]
        for name, sources, signs in self._tables:
            crop = fn.external_source(name=name, dtype=types.FLOAT, layout="DHWC", no_copy=True)
            source, sign = types.Constant(sources)[index], types.Constant(signs.astype(np.float32))[index]
            crop, sign = (crop.gpu(), sign.gpu()) if self._on_gpu else (crop, sign)
            for number, axes in enumerate(symmetry.PERMUTATIONS[:: symmetry.REFLECTIONS].tolist()):
                if index // symmetry.REFLECTIONS == number:  # evaluated by DALI, for each sample
                    crop = fn.transpose(crop, perm=[*axes, 3], transpose_layout=False)
            crop = fn.flip(crop, depthwise=flips[0], vertical=flips[1], horizontal=flips[2])
            channels = [crop[:, :, :, source[c]] * sign[c] for c in range(sources.shape[1])]
            outputs.append(fn.stack(*channels, axis=3 if self.config.channels_last else 0))
        return tuple(outputs)


def import_dali() -> tuple[Any, Any, Any]:
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError as error:
        remedy = 'install it with pip install -e ".[dali]", or use --data_loader_config=lowmem'
        fault = f"data_loader_config dali-lowmem: NVIDIA DALI cannot be imported ({error})"
        raise UserError(f"{fault}; {remedy}") from None
    return fn, types, pipeline_def
