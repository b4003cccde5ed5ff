"""The loader `resident`: the volumes are kept in device memory, and one kernel per field gathers each batch from it."""

import functools
import logging
import math
import os
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch

from utils.config import Config
from utils.data import symmetry
from utils.data.loaders.base import Batch, CropLoader, DataSplits, build_crop_loaders, memory_format
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
# Rows and columns of the tile of a program that gathers all channels at once, and of one that gathers one channel.
TILE_ALL_CHANNELS, TILE_ONE_CHANNEL = (32, 16), (32, 32)

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
    fault = f"the volumes need {needed / GIB:.2f} GiB as {str(dtype).removeprefix('torch.')}"
    room = f"the device has {free / GIB:.2f} GiB free, and {reserve / GIB:.2f} GiB are reserved for training"
    raise UserError(f"{fault}; {room}; {remedy}")


def load_resident(volumes: Sequence[Volume], device: torch.device, dtype: torch.dtype) -> list[Volume]:
    """The volumes on the device, [C, X, Y, Z]; inputs share one storage, so do targets; UserError beyond float16."""
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
                fault = f"{volume.names[number]}[{channel}] has values beyond ±{FLOAT16_MAX:.0f}, the range of float16"
                raise UserError(f"{volume.path}: {fault}; use --set resident_dtype=float32")
            stored[number][channel, start : start + len(slab)] = values
    return [Volume(volume.path, *pair) for volume, pair in zip(volumes, fields, strict=True)]


def _allocate(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Tensors of these shapes that are parts of one storage."""
    sizes = [math.prod(shape) for shape in shapes]
    storage = torch.empty(sum(sizes), dtype=dtype, device=device)
    return [part.view(*shape) for part, shape in zip(storage.split(sizes), shapes, strict=True)]


def device_plan(plan: EpochPlan, boxes: Sequence[Sequence[int]]) -> np.ndarray:
    """[N, 2] int64: the cell of its volume where each crop starts, and its row of tables with 48 per volume."""
    strides = np.array([(y * z, z, 1) for _, y, z in boxes], dtype=np.int64)
    starts = (plan.origins * strides[plan.volumes]).sum(axis=1)
    return np.stack([starts, symmetry.COUNT * plan.volumes + plan.symmetries], axis=1, dtype=np.int64)


def walks(box: Sequence[int], crop: int, strides: Sequence[int]) -> np.ndarray:
    """The kernel's path through crop and sample for each symmetry, [48, 9] int64.

    One of the sample's axes is the plane, one is the tile's row, and the last one (the fastest in memory) is its
    column. The row is the axis to which the symmetry moves the field's fastest axis; if that stays last, the row is
    either of the others. Columns of the table: 1 if the fastest axis moves, else 0; then for the crop, and again for
    the sample with `strides` along its axes: the offset where the path starts, and its signed strides along plane, row
    and column.
    """
    table, pitch = np.empty((symmetry.COUNT, 9), dtype=np.int64), np.array([box[1] * box[2], box[2], 1])
    for index, (axes, signs) in enumerate(zip(symmetry.PERMUTATIONS, symmetry.SIGNS, strict=True)):
        load, store = signs * pitch[axes], np.array(strides)
        fastest = axes.tolist().index(2)
        # Along the field's fastest axis the path follows the field, along its other axes the sample.
        store[fastest] *= signs[fastest]
        load[fastest] = 1
        starts = [-(crop - 1) * path[path < 0].sum() for path in (load, store)]
        row = fastest if fastest != 2 else 1
        order = [1 - row, row, 2]
        table[index] = [fastest != 2, starts[0], *load[order], starts[1], *store[order]]
    return table


class TritonGather:
    """Gathers samples of one field of the volumes on the device, on the current stream, with one kernel per batch."""

    def __init__(
        self, fields: Sequence[torch.Tensor], crop: int, vectors: symmetry.Vectors, mode: str, channels_last: bool
    ) -> None:
        """Each volume's field is [C, X, Y, Z], contiguous, float32 or float16; all are parts of one storage."""
        field = fields[0]
        assert field.dtype in (torch.float32, torch.float16)
        assert all(part.is_contiguous() for part in fields)
        assert len({part.untyped_storage().data_ptr() for part in fields}) == 1
        self._kernel = _kernel()
        channels = len(field)
        sample = torch.empty((1, channels, *(crop,) * 3), device="meta", memory_format=memory_format(channels_last))
        self._strides = sample.stride()
        # The tables have a row for each symmetry of each volume.
        walk = np.concatenate([walks(part.shape[1:], crop, self._strides[2:]) for part in fields])
        sources, signs = symmetry.channel_table(channels, vectors, mode)
        starts = [part.storage_offset() - field.storage_offset() for part in fields]
        source = np.concatenate([start + sources * part[0].numel() for start, part in zip(starts, fields, strict=True)])
        # Signs are flipped in the bits, which is exact even for zeros and NaN.
        bits = torch.int32 if field.element_size() == 4 else torch.int16
        flip = np.where(np.concatenate([signs] * len(fields)) < 0, torch.iinfo(bits).min, 0)
        *tables, flips = (torch.from_numpy(table).to(field.device) for table in (walk, source, flip))
        self._inputs = field.view(bits), *tables, flips.to(bits)
        lanes, (rows, columns) = 1, TILE_ONE_CHANNEL
        if channels_last:
            lanes, (rows, columns) = 1 << (channels - 1).bit_length(), TILE_ALL_CHANNELS
        self._programs = -(-crop // rows) * -(-crop // columns) * -(-channels // lanes), crop
        self._constants = {
            "CROP": crop,
            "CHANNELS": channels,
            "DIVISOR": math.gcd(16, *self._strides[2:]),
            "LANES": lanes,
            "ROWS": rows,
            "COLUMNS": columns,
            "num_warps": 8 if lanes > 1 else 4,
            "enable_fp_fusion": False,  # there is nothing to fuse, and triton 3.9 warns if this is not set
        }

    def __call__(self, plan: torch.Tensor, first: int, step: int, out: torch.Tensor) -> None:
        """Writes every `step`-th sample of a `device_plan`, from row `first` on, to `out` [N, C, D, D, D]."""
        field, *tables = self._inputs
        assert out.stride() == self._strides
        grid = (*self._programs, len(out))
        self._kernel[grid](out, field, plan, *tables, first, step, *self._strides[:2], **self._constants)


# Each program copies a tile of rows × columns in one plane of a sample, of one channel or of all of them. If the
# symmetry moves the field's fastest axis, either reads or writes would be far apart. Then the tile is read along its
# rows, transposed in the multiprocessor's shared memory, and written along its columns. The compiler does that if it
# can see along which axis of the tile memory is contiguous; so one branch of the read adds `row` without a stride, the
# other `column`. If channels are contiguous in the sample, they come last in the tile, so that the writes of a cell's
# channels are adjacent. A crop can start anywhere, so tiles share cache lines at their edges; the second read hits the
# L2 cache.
#
# Values that may exceed 2^31 are int64: 5 · 1024³ does. `max_contiguous` is a hint for the order in which threads
# write: neighbors along the sample's last axis are adjacent in memory, or a cell's channels apart. DIVISOR, a common
# divisor of the offsets of all cells in a sample, lets a thread write several channels at once.
@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["first", "step"])
    def cut_crops(  # type: ignore[no-untyped-def]
        out,
        field,
        plan,
        walks,
        sources,
        flips,
        first,
        step,
        sample_stride,
        channel_stride,
        CROP: tl.constexpr,
        CHANNELS: tl.constexpr,
        DIVISOR: tl.constexpr,
        LANES: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        ACROSS: tl.constexpr = (CROP + COLUMNS - 1) // COLUMNS
        DOWN: tl.constexpr = (CROP + ROWS - 1) // ROWS
        tile = tl.program_id(0)
        plane = tl.program_id(1)
        sample = tl.program_id(2).to(tl.int64)
        row = (tile // ACROSS % DOWN * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
        column = (tile % ACROSS * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :, None]
        lane = (tile // (ACROSS * DOWN) * LANES + tl.arange(0, LANES))[None, None, :]
        inside = (row < CROP) & (column < CROP) & (lane < CHANNELS)
        entry = plan + 2 * (first + sample * step)
        number = tl.load(entry + 1)
        source = tl.load(sources + number * CHANNELS + lane, mask=lane < CHANNELS, other=0)
        flip = tl.load(flips + number * CHANNELS + lane, mask=lane < CHANNELS, other=0)
        walk = walks + number * 9
        begin = field + tl.load(entry) + tl.load(walk + 1) + plane * tl.load(walk + 2)
        if tl.load(walk) != 0:
            bits = tl.load(begin + (row + column * tl.load(walk + 4) + source), mask=inside, other=0)
        else:
            bits = tl.load(begin + (row * tl.load(walk + 3) + column + source), mask=inside, other=0)
        values = (bits ^ flip).to(tl.float16 if bits.dtype == tl.int16 else tl.float32, bitcast=True)
        cell = tl.load(walk + 5) + plane * tl.load(walk + 6) + row * tl.load(walk + 7) + column * tl.load(walk + 8)
        place = out + sample * sample_stride + lane * channel_stride + tl.multiple_of(cell, (DIVISOR, DIVISOR, DIVISOR))
        tl.store(tl.max_contiguous(place, (1, 2, LANES)), values.to(out.dtype.element_ty), mask=inside)

    return cut_crops
