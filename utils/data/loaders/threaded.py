"""The loaders `lowmem` and `inmem`: threads assemble crops straight into batch buffers, a few batches ahead."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

import numpy as np
import torch

from utils.config import Config
from utils.data.files.hdf5 import Volume
from utils.data.files.page_cache import warm_page_cache
from utils.data.files.shared_memory import check_room, share_volume
from utils.data.loader import Batch, Loader, Loaders, memory_format
from utils.data.loaders.build import build_crop_loaders, load_volumes
from utils.data.loaders.crop_reader import BATCHES_AHEAD, CropReader
from utils.data.loaders.crops import CropCopier, CropOptions
from utils.data.loaders.prefetcher import CudaPrefetcher, copies
from utils.data.volumes import of_both_splits, open_volumes
from utils.distributed.world import World


def build_lowmem(config: Config, world: World) -> Loaders:
    """Crops from the files, which are mapped if they are contiguous."""
    volumes = open_volumes(config, world)
    both = of_both_splits(volumes)
    mapped = [field for volume in both if volume.mapped for field in (volume.inputs, volume.targets)]
    warm_page_cache([path for volume in both for path in volume.files], mapped, world)
    return build_crop_loaders(config, world, volumes, ThreadedCropLoader)


def build_inmem(config: Config, world: World) -> Loaders:
    """Crops from one copy in the node's memory."""
    opened = open_volumes(config, world)
    check_room(of_both_splits(opened), world)
    volumes = load_volumes(opened, lambda split: [share_volume(volume, world) for volume in split], "memory")
    return build_crop_loaders(config, world, volumes, ThreadedCropLoader)


class ThreadedCropLoader(Loader):
    """Loads one rank's part of a sample plan from the volumes of a split."""

    def __init__(self, volumes: Sequence[Volume], options: CropOptions) -> None:
        fields = [volume.inputs for volume in volumes], [volume.targets for volume in volumes]
        self._copiers = [
            CropCopier(volume_fields, options.plan.crop, vectors, options.symmetry_mode)
            for volume_fields, vectors in zip(fields, options.vectors, strict=True)
        ]
        shapes = options.shapes(volume_fields[0].shape[0] for volume_fields in fields)
        pinned = options.device.type == "cuda"
        form = memory_format(options.channels_last)
        buffers = [
            Batch(*(torch.empty(shape, pin_memory=pinned, memory_format=form).zero_() for shape in shapes))
            for _ in range(BATCHES_AHEAD + 1)
        ]
        self._reader = CropReader(volumes, options, buffers, self._copy)
        self._prefetcher = CudaPrefetcher(options.device, shapes, options.channels_last) if pinned else None

    def __len__(self) -> int:
        return len(self._reader.batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        batches = self._assemble(epoch, first_batch)
        return batches if self._prefetcher is None else self._prefetcher.prefetch(copies(batches))

    def close(self) -> None:
        self._reader.close()

    def _assemble(self, epoch: int, first_batch: int) -> Generator[Batch, None, None]:
        with closing(self._reader.read(epoch, first_batch)) as filled:
            for rows, buffer in filled:
                yield Batch(*(part[: len(rows)] for part in buffer))

    def _copy(self, volume: int, origin: np.ndarray, index: int, sample: Sequence[np.ndarray]) -> None:
        for copier, out in zip(self._copiers, sample, strict=True):
            copier.copy(volume, origin, index, out)
