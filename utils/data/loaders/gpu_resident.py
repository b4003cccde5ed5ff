"""The loader `resident`: the volumes are kept in device memory, and one kernel per field gathers each batch from it."""

import functools
import logging
import math
import os
from collections.abc import Generator, Sequence

import torch

from utils.config import Config
from utils.data.loaders.base import Batch, CropLoader, DataSplits, build_crop_loaders
from utils.data.loaders.crop_kernels import TritonGather, device_plan
from utils.data.loaders.prefetcher import CudaPrefetcher, Fills
from utils.data.loaders.threaded import build_inmem
from utils.data.plan import EpochPlan, SamplePlan
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import GIB
from utils.volumes.hdf5 import Volume, slab_planes
from utils.volumes.opened import Volumes, all_volumes
from utils.volumes.page_cache import warm_page_cache

FLOAT16_MAX = torch.finfo(torch.float16).max

log = logging.getLogger(__name__)


def build(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    stored = volumes.config.resident_dtype
    if world.device.type != "cuda":
        unused = "; resident_dtype has no effect" if stored != "float32" else ""
        log.info("data_loader_config resident: without a GPU it is inmem%s", unused)
        return build_inmem(volumes, world)
    opened, dtype = volumes.for_loader(world), getattr(torch, stored)
    both = all_volumes(opened)
    with world.raise_together():
        free, _ = torch.cuda.mem_get_info(world.device)
        check_fits(sum(volume.bytes for volume in both), dtype, free, reserve)
    warm_page_cache([path for volume in both for path in volume.files], [], world)
    with world.raise_together():
        loaded = {split: load_resident(opened[split], world.device, dtype) for split in opened}
    names = ", ".join(os.path.basename(volume.path) for volume in both)
    log.info("%s: read into the memory of %s, as %s", names, world.device, stored)
    return build_crop_loaders(volumes, world, loaded, GpuResidentLoader)


class GpuResidentLoader(CropLoader):
    """Loads crops of the volumes of `load_resident` on a CUDA device; batches are float32."""

    def __init__(self, volumes: Sequence[Volume], plan: SamplePlan, config: Config, world: World) -> None:
        super().__init__(plan, config, world)
        self._gathers = [
            TritonGather(fields, plan.crop, vectors, config.symmetries, config.channels_last)
            for *fields, vectors in zip(*(volume.fields for volume in volumes), self.vectors, strict=True)
        ]
        self._rows = torch.empty((plan.samples, 2), dtype=torch.int64, device=volumes[0].inputs.device)
        self._prefetcher = CudaPrefetcher(world.device, self.shapes, config.channels_last)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        return self._prefetcher.prefetch(self._fills(self.plan.epoch(epoch), first_batch))

    def _fills(self, plan: EpochPlan, first_batch: int) -> Fills:
        # On the prefetcher's stream, the epoch's plan is uploaded before the batches that read it.
        rows = torch.from_numpy(device_plan(plan, self.plan.boxes)).pin_memory()
        for number, batch in enumerate(self.batches[first_batch:]):
            fill = functools.partial(self._fill, rows if number == 0 else None, batch.start)
            yield len(range(len(plan))[batch]), fill

    def _fill(self, plan: torch.Tensor | None, first: int, slot: Batch) -> None:
        """Enqueues the upload of an epoch's plan, if it is given, and the gathering of a batch from row `first` on."""
        if plan is not None:
            self._rows.copy_(plan, non_blocking=True)
        for gather, part in zip(self._gathers, slot, strict=True):
            gather(self._rows, first, self.world.size, part)


def check_fits(size: int, dtype: torch.dtype, free: int, reserve: int) -> None:
    """Raises UserError if volumes of `size` bytes in float32, stored as `dtype`, exceed `free` less `reserve` bytes."""
    needed, half = size * dtype.itemsize // 4, size // 2
    if needed + reserve <= free:
        return
    remedy = "use --data_loader_config=lowmem"
    if needed > half and half + reserve <= free:
        remedy = f"use --set resident_dtype=float16 ({half / GIB:.2f} GiB) or --data_loader_config=lowmem"
    raise UserError(
        f"the volumes need {needed / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}; the device has "
        f"{free / GIB:.2f} GiB free, and {reserve / GIB:.2f} GiB are reserved for training; {remedy}"
    )


def load_resident(volumes: Sequence[Volume], device: torch.device, dtype: torch.dtype) -> list[Volume]:
    """The volumes as tensors [C, X, Y, Z] on the device; UserError for values that float16 cannot hold.

    The inputs of all volumes share one storage, and so do the targets.
    """
    inputs = _allocate([volume.inputs.shape for volume in volumes], dtype, device)
    targets = _allocate([volume.targets.shape for volume in volumes], dtype, device)
    fields = list(zip(inputs, targets, strict=True))
    for volume, stored in zip(volumes, fields, strict=True):
        # Reading through pinned memory is twice as fast as through pageable memory.
        thickness, on_gpu = slab_planes(volume.shape)[0].stop, device.type == "cuda"
        staging = torch.empty((thickness, *volume.shape[1:]), pin_memory=on_gpu)
        name = f"reading {os.path.basename(volume.path)} into {'device ' if on_gpu else ''}memory"
        for number, channel, start, slab in volume.slabs(name):
            staging[: len(slab)].numpy()[...] = slab
            values = staging[: len(slab)].to(device)
            if dtype == torch.float16 and bool((values.abs() > FLOAT16_MAX).any()):
                raise UserError(
                    f"{volume.path}: {volume.names[number]}[{channel}] has values beyond ±{FLOAT16_MAX:.0f}, the "
                    f"range of float16; use --set resident_dtype=float32"
                )
            stored[number][channel, start : start + len(slab)] = values
    return [Volume(volume.path, *pair) for volume, pair in zip(volumes, fields, strict=True)]


def _allocate(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Tensors of these shapes that are parts of one storage."""
    sizes = [math.prod(shape) for shape in shapes]
    storage = torch.empty(sum(sizes), dtype=dtype, device=device)
    return [part.view(*shape) for part, shape in zip(storage.split(sizes), shapes, strict=True)]
