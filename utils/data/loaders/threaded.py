"""The loaders `lowmem` and `inmem`: threads assemble crops straight into batch buffers, a few batches ahead."""

import logging
import os
import time
from collections.abc import Generator, Sequence
from contextlib import closing

import numpy as np
import torch

from utils.config import Config
from utils.data.loaders.base import Batch, CropLoader, DataSplits, build_crop_loaders, memory_format
from utils.data.loaders.crops import BATCHES_AHEAD, CropCopier, CropReader
from utils.data.loaders.prefetcher import CudaPrefetcher, copies
from utils.data.plan import SamplePlan
from utils.distributed.world import World
from utils.files import GIB
from utils.volumes.hdf5 import Volume
from utils.volumes.opened import Volumes, all_volumes
from utils.volumes.shared_memory import check_room, share_volume

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
        fields = [volume.inputs for volume in volumes], [volume.targets for volume in volumes]
        self._copiers = [
            CropCopier(volume_fields, plan.crop, vectors, config.symmetries)
            for volume_fields, vectors in zip(fields, self.vectors, strict=True)
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
        with closing(self._reader.read(epoch, first_batch)) as filled:
            for rows, buffer in filled:
                yield buffer.first(len(rows))

    def _copy(self, volume: int, origin: np.ndarray, index: int, sample: Sequence[np.ndarray]) -> None:
        for copier, out in zip(self._copiers, sample, strict=True):
            copier.copy(volume, origin, index, out)
