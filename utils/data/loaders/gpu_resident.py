"""The loader `resident`: the volumes are kept in device memory, and one kernel per field gathers each batch from it.

The host reads no data; only the epoch's plan is copied to the device. Without CUDA the loader is the same as `inmem`.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Generator, Sequence

import torch

from utils.config import Config
from utils.data.files.hdf5 import Volume, request_read_ahead
from utils.data.loader import Batch, Loader, Loaders
from utils.data.loaders.build import build_crop_loaders, load_volumes
from utils.data.loaders.crop_kernels import TritonGather, device_plan
from utils.data.loaders.crops import CropOptions
from utils.data.loaders.prefetcher import CudaPrefetcher, Fills
from utils.data.loaders.threaded import build_inmem
from utils.data.plan import EpochPlan
from utils.data.volumes import of_both_splits, open_volumes
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.files import GIB
from utils.progress import Progress

FLOAT16_MAX = torch.finfo(torch.float16).max

log = logging.getLogger(__name__)


def build(config: Config, world: World, reserve: int = 0) -> Loaders:
    if world.device.type != "cuda":
        log.info("data_loader_config resident: without a GPU it is inmem%s", unused_options(config))
        return build_inmem(config, world)
    volumes = open_volumes(config, world)
    with world.raise_together():
        check_memory(config, world, of_both_splits(volumes), reserve)
    dtype = getattr(torch, config.resident_dtype)
    place = f"the memory of {world.device}, as {config.resident_dtype}"
    loaded = load_volumes(volumes, lambda split: load_resident(split, world, dtype), place)
    return build_crop_loaders(config, world, loaded, GpuResidentLoader)


def unused_options(config: Config) -> str:
    """The end of a note: options of this loader that other loaders do not use."""
    return "; resident_dtype has no effect" if config.resident_dtype != "float32" else ""


class GpuResidentLoader(Loader):
    """Loads one rank's part of a sample plan on a CUDA device; batches are float32.

    `volumes` are what `load_resident` returns.
    """

    def __init__(self, volumes: Sequence[Volume], options: CropOptions) -> None:
        fields = [volume.inputs for volume in volumes], [volume.targets for volume in volumes]
        self._plan = plan = options.plan
        self._batches = options.batches()
        self._gathers = [
            TritonGather(volume_fields, plan.crop, vectors, options.symmetry_mode, options.channels_last)
            for volume_fields, vectors in zip(fields, options.vectors, strict=True)
        ]
        device = volumes[0].inputs.device
        self._rows = torch.empty((plan.samples, 2), dtype=torch.int64, device=device)
        self._step = options.world_size
        shapes = options.shapes(len(part[0]) for part in fields)
        self._prefetcher = CudaPrefetcher(options.device, shapes, options.channels_last)

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        return self._prefetcher.prefetch(self._fills(self._plan.epoch(epoch), first_batch))

    def _fills(self, plan: EpochPlan, first_batch: int) -> Fills:
        # On the prefetcher's stream, the epoch's plan is uploaded before the batches that read it.
        rows = torch.from_numpy(device_plan(plan, self._plan.boxes)).pin_memory()
        for number, batch in enumerate(self._batches[first_batch:]):
            fill = functools.partial(self._fill, rows if number == 0 else None, batch.start)
            yield len(range(len(plan))[batch]), fill

    def _fill(self, plan: torch.Tensor | None, first: int, slot: Batch) -> None:
        """Enqueues the upload of an epoch's plan, if it is given, and the gathering of a batch from row `first` on."""
        if plan is not None:
            self._rows.copy_(plan, non_blocking=True)
        for gather, part in zip(self._gathers, slot, strict=True):
            gather(self._rows, first, self._step, part)


# --- memory --------------------------------------------------------------------------------------------------------


def check_memory(config: Config, world: World, volumes: Sequence[Volume], reserve: int) -> None:
    """Raises UserError if the volumes do not fit into the device's free memory next to `reserve` bytes."""
    size, (free, _) = sum(volume.bytes for volume in volumes), torch.cuda.mem_get_info(world.device)
    check_fits(size, getattr(torch, config.resident_dtype), free, reserve)


def check_fits(size: int, dtype: torch.dtype, free: int, reserve: int) -> None:
    """Raises UserError if volumes of `size` bytes, stored as `dtype`, do not fit.

    size: bytes in float32.
    free: free bytes on the device now (`torch.cuda.mem_get_info`).
    reserve: bytes that training needs.
    """
    if size * dtype.itemsize // 4 + reserve > free:
        raise _too_large(size, dtype, free, reserve)


def _too_large(size: int, dtype: torch.dtype, free: int, reserve: int) -> UserError:
    needed, half = size * dtype.itemsize // 4, size // 2
    remedy = "use --data_loader_config=lowmem"
    if needed > half and half + reserve <= free:
        remedy = f"use --set resident_dtype=float16 ({half / GIB:.2f} GiB) or --data_loader_config=lowmem"
    return UserError(
        f"the volumes need {needed / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}; the device has "
        f"{free / GIB:.2f} GiB free, and {reserve / GIB:.2f} GiB are reserved for training; {remedy}"
    )


# --- loading -------------------------------------------------------------------------------------------------------


def load_resident(volumes: Sequence[Volume], world: World, dtype: torch.dtype) -> list[Volume]:
    """The volumes as tensors [C, X, Y, Z] of type float32 or float16 on the rank's device; every rank calls it.

    The inputs of all volumes share one storage, and so do the targets. One rank per node reads the files and broadcasts
    them to the other ranks. If one rank fails, all fail with one line.
    """
    with world.raise_together():
        free = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else 0
        try:
            inputs = _allocate([volume.inputs.shape for volume in volumes], dtype, world.device)
            targets = _allocate([volume.targets.shape for volume in volumes], dtype, world.device)
        except torch.OutOfMemoryError:
            raise _too_large(sum(volume.bytes for volume in volumes), dtype, free, reserve=0) from None
    loaded = [
        Volume(volume.path, *fields) for volume, fields in zip(volumes, zip(inputs, targets, strict=True), strict=True)
    ]
    for volume, copy in zip(volumes, loaded, strict=True):
        _load(volume, (copy.inputs, copy.targets), world)
    return loaded


def _allocate(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Tensors of these shapes that are parts of one storage."""
    sizes = [math.prod(shape) for shape in shapes]
    storage = torch.empty(sum(sizes), dtype=dtype, device=device)
    return [part.view(*shape) for part, shape in zip(storage.split(sizes), shapes, strict=True)]


def _load(volume: Volume, fields: Sequence[torch.Tensor], world: World) -> None:
    """Fills the fields with the volume's inputs and targets."""
    on_gpu = world.device.type == "cuda"
    slabs = volume.slab_locations()
    reads = world.node.source == world.rank
    with world.raise_together():
        # Reading through pinned memory is twice as fast as through pageable memory.
        thickness = slabs[0][2].stop if reads else 0
        staging = torch.empty((thickness, *volume.shape[1:]), pin_memory=on_gpu)
    with world.raise_together():
        failure: Exception | None = None
        name = f"reading {os.path.basename(volume.path)} into {'device ' if on_gpu else ''}memory"
        with Progress(name, len(slabs), "slabs") as progress:
            for number, channel, planes in slabs:
                part = fields[number][channel, planes]
                if reads and failure is None:
                    failure = _read_slab(volume, (number, channel, planes), staging, part)
                # Even after a failure, or the other ranks would wait forever; all ranks learn of it at the end.
                world.broadcast_on_node(part)
                if on_gpu:
                    # Otherwise ranks that only receive would run far ahead, and the last broadcasts would time out.
                    torch.cuda.synchronize(world.device)
                progress.advance()
        if failure is not None:
            raise failure


def _read_slab(
    volume: Volume, slab: tuple[int, int, slice], staging: torch.Tensor, part: torch.Tensor
) -> Exception | None:
    """Reads a slab through `staging` into `part` on the device; returns the error if that fails."""
    number, channel, planes = slab
    field = (volume.inputs, volume.targets)[number]
    try:
        with os_errors_for_users(f"cannot read {volume.path}", "copy or recreate it"):
            request_read_ahead(field, channel, planes)
            staging[: len(part)].numpy()[...] = field[channel, planes]
        values = staging[: len(part)].to(part.device)
        if part.dtype == torch.float16 and bool((values.abs() > FLOAT16_MAX).any()):
            raise UserError(
                f"{volume.path}: {volume.names[number]}[{channel}] has values beyond ±{FLOAT16_MAX:.0f}, the range of "
                f"float16; use --set resident_dtype=float32"
            )
        part.copy_(values)
    except Exception as error:
        return error
    return None
