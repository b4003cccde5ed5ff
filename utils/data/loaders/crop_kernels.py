"""Gathers crops under symmetries out of volumes in device memory, in one Triton kernel per field and batch."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from utils.data import symmetry
from utils.data.loaders.base import memory_format
from utils.data.plan import EpochPlan

# Rows and columns of the tile of a program that gathers all channels at once, and of one that gathers one channel.
TILE_ALL_CHANNELS, TILE_ONE_CHANNEL = (32, 16), (32, 32)


def device_plan(plan: EpochPlan, boxes: Sequence[Sequence[int]]) -> np.ndarray:
    """[N, 2] int64: the cell of a channel of its volume where each sample's crop starts, and its row of the tables.

    The tables have 48 rows for each volume, one for each symmetry.
    """
    strides = np.stack([_strides(box) for box in boxes])
    starts = (plan.origins * strides[plan.volumes]).sum(axis=1)
    return np.stack([starts, symmetry.COUNT * plan.volumes + plan.symmetries], axis=1, dtype=np.int64)


def _strides(box: Sequence[int]) -> np.ndarray:
    return np.array([box[1] * box[2], box[2], 1], dtype=np.int64)


def walks(box: Sequence[int], crop: int, strides: Sequence[int]) -> np.ndarray:
    """The kernel's path through crop and sample for each symmetry, [48, 9] int64.

    One of the sample's axes is the plane, one is the tile's row, and the last one (the fastest in memory) is its
    column. The row is the axis to which the symmetry moves the field's fastest axis; if that stays last, the row is
    either of the others. Columns of the table: 1 if the fastest axis moves, else 0; then for the crop, and again for
    the sample with `strides` along its axes: the offset where the path starts, and its signed strides along plane, row
    and column.
    """
    table = np.empty((symmetry.COUNT, 9), dtype=np.int64)
    for index, (axes, signs) in enumerate(zip(symmetry.PERMUTATIONS, symmetry.SIGNS, strict=True)):
        load, store = signs * _strides(box)[axes], np.array(strides)
        fastest = axes.tolist().index(2)
        # Along the field's fastest axis the path follows the field, along its other axes the sample.
        store[fastest] *= signs[fastest]
        load[fastest] = 1
        starts = [-(crop - 1) * path[path < 0].sum() for path in (load, store)]
        row = fastest if fastest != 2 else 1
        order = [1 - row, row, 2]
        table[index] = [fastest != 2, starts[0], *load[order], starts[1], *store[order]]
    return table


def _volume_tables(
    fields: Sequence[torch.Tensor], crop: int, strides: Sequence[int], vectors: symmetry.Vectors, mode: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`walks`, and the sources and signs of all channels, for each symmetry of each volume."""
    assert all(field.is_contiguous() for field in fields)
    assert len({field.untyped_storage().data_ptr() for field in fields}) == 1
    sources, signs = symmetry.channel_table(len(fields[0]), vectors, mode)
    starts = [field.storage_offset() - fields[0].storage_offset() for field in fields]
    return (
        np.concatenate([walks(field.shape[1:], crop, strides) for field in fields]),
        np.concatenate([start + sources * field[0].numel() for start, field in zip(starts, fields, strict=True)]),
        np.concatenate([signs for _ in fields]),
    )


class TritonGather:
    """Gathers samples of one field of the volumes on the device, on the current stream, with one kernel per batch."""

    def __init__(
        self, fields: Sequence[torch.Tensor], crop: int, vectors: symmetry.Vectors, mode: str, channels_last: bool
    ) -> None:
        """Each volume's field is [C, X, Y, Z], contiguous, float32 or float16; all are parts of one storage."""
        field = fields[0]
        assert field.dtype in (torch.float32, torch.float16)
        self._kernel = _kernel()
        channels = len(field)
        sample = torch.empty((1, channels, *(crop,) * 3), device="meta", memory_format=memory_format(channels_last))
        self._strides = sample.stride()
        walk, source, sign = _volume_tables(fields, crop, self._strides[2:], vectors, mode)
        # Signs are flipped in the bits, which is exact even for zeros and NaN.
        bits = torch.int32 if field.element_size() == 4 else torch.int16
        flip = np.where(sign < 0, torch.iinfo(bits).min, 0)
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
