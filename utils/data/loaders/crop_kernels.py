"""Gathers crops out of a volume in memory under symmetries, into a batch of any memory format and float type.

`gather_torch` works on the CPU and says in torch what is done; `TritonGather` does it on the device in one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from utils.data import symmetry
from utils.data.loaders.prefetcher import memory_format
from utils.data.plan import EpochPlan
from utils.errors import UserError

ChannelTable = tuple[np.ndarray, np.ndarray]  # source channel and sign, as symmetry.channel_table gives them


# --- on the CPU ----------------------------------------------------------------------------------------------------


def gather_torch(
    field: torch.Tensor, origins: np.ndarray, symmetries: np.ndarray, table: ChannelTable, out: torch.Tensor
) -> None:
    """Writes the crops of `field` [C, L, L, L] at `origins` [N, 3] under `symmetries` [N] to `out` [N, C, D, D, D].

    Each channel of a crop is first read row by row into a block that stays in the core's cache, as in crops.py; it is
    cast and reversed on the way in, for torch has no views that go backwards, and its axes are permuted on the way out.
    """
    for origin, index, sample in zip(origins.tolist(), symmetries.tolist(), out, strict=True):
        x, y, z = (slice(start, start + out.shape[-1]) for start in origin)
        crop = field[:, x, y, z]
        axes = symmetry.PERMUTATIONS[index].tolist()
        flips = [axis for axis, sign in zip(axes, symmetry.SIGNS[index], strict=True) if sign < 0]
        for channel, source, sign in zip(sample, table[0][index].tolist(), table[1][index].tolist(), strict=True):
            block = crop[source].to(out.dtype)
            block = block.flip(flips) if flips else block.contiguous()
            block = block.permute(axes)
            if sign > 0:
                channel.copy_(block)
            else:
                torch.neg(block, out=channel)


class TorchCopier:
    """`gather_torch` for one field and one sample at a time, as the native loader's threads ask for it."""

    def __init__(self, field: torch.Tensor, crop: int, vectors: Sequence[Sequence[int]], mode: str) -> None:
        self._field, self._table = field, symmetry.channel_table(field.shape[0], vectors, mode)

    def copy(self, origin: np.ndarray, index: int, out: np.ndarray) -> None:
        """Writes the crop at `origin` [3] under symmetry `index` to `out` [C, crop, crop, crop]."""
        gather_torch(self._field, origin[None], np.array([index]), self._table, torch.from_numpy(out)[None])


# --- on the device -------------------------------------------------------------------------------------------------

# Cells of a program's tile along the two axes that matter: where all channels are gathered at once, and where one is.
TILE_ALL_CHANNELS, TILE_ONE_CHANNEL = (32, 16), (32, 32)


def device_plan(plan: EpochPlan, box: int) -> np.ndarray:
    """[N, 2] int64: where each sample's crop starts in a channel of `box`³ cells, and its symmetry."""
    return np.stack([plan.origins.astype(np.int64) @ _strides(box), plan.symmetries], axis=1, dtype=np.int64)


def _strides(box: int) -> np.ndarray:
    return np.array([box * box, box, 1], dtype=np.int64)


def walks(box: int, crop: int, strides: Sequence[int]) -> np.ndarray:
    """For each symmetry the way through crop and sample that the kernel goes, [48, 9] int64.

    Of the sample's axes one is the plane, one the tile's row, and the last one (the fastest in memory) its column. The
    row is the axis that the field's fastest axis has become, or any other if that one is still last. Columns of the
    table: whether it has moved; then for the crop, and again for the sample with `strides` along its axes: where the
    walk begins, and its signed strides along plane, row and column.
    """
    table = np.empty((symmetry.COUNT, 9), dtype=np.int64)
    for index, (axes, signs) in enumerate(zip(symmetry.PERMUTATIONS, symmetry.SIGNS, strict=True)):
        load, store = signs * _strides(box)[axes], np.array(strides)
        fastest = axes.tolist().index(2)
        # Along the field's fastest axis the walk follows the field, along the others the sample.
        store[fastest] *= signs[fastest]
        load[fastest] = 1
        begins = [-(crop - 1) * way[way < 0].sum() for way in (load, store)]
        row = fastest if fastest != 2 else 1
        order = [1 - row, row, 2]
        table[index] = [fastest != 2, begins[0], *load[order], begins[1], *store[order]]
    return table


class TritonGather:
    """Gathers samples of one field on the device, on the current stream, one kernel a batch."""

    def __init__(
        self, field: torch.Tensor, crop: int, vectors: Sequence[Sequence[int]], mode: str, channels_last: bool = False
    ) -> None:
        """`field` is [C, L, L, L], contiguous, float32 or float16."""
        assert field.is_contiguous()
        assert field.dtype in (torch.float32, torch.float16)
        self._kernel = _kernel()
        channels, box = field.shape[0], field.shape[-1]
        sample = torch.empty((1, channels, *(crop,) * 3), device="meta", memory_format=memory_format(channels_last))
        self._strides = sample.stride()
        sources, signs = symmetry.channel_table(channels, vectors, mode)
        # A sign is changed in the bits, which is exact for zeros and NaN, too.
        bits = torch.int32 if field.element_size() == 4 else torch.int16
        flips = np.where(signs < 0, torch.iinfo(bits).min, 0)
        tables = (walks(box, crop, self._strides[2:]), sources * box**3, flips)
        walk, source, flip = (torch.from_numpy(table).to(field.device) for table in tables)
        self._inputs = field.view(bits), walk, source, flip.to(bits)
        self._half = field.dtype == torch.float16
        self._crop, self._channels, self._channels_last = crop, channels, channels_last

    def __call__(self, plan: torch.Tensor, first: torch.Tensor, step: int, out: torch.Tensor) -> None:
        """Writes every `step`-th sample of a `device_plan`, from row `first` on, to `out` [N, C, D, D, D].

        `first` is an int64 on the device: it is read when the kernel runs, so that a CUDA graph can hold the kernel.
        """
        field, walk, source, flip = self._inputs
        assert out.stride() == self._strides
        if self._channels_last:
            lanes, tile = 1 << (self._channels - 1).bit_length(), TILE_ALL_CHANNELS
        else:
            lanes, tile = 1, TILE_ONE_CHANNEL
        tiles = [-(-self._crop // cells) for cells in tile]
        grid = (tiles[0] * tiles[1] * -(-self._channels // lanes), self._crop, len(out))
        self._kernel[grid](
            out,
            field,
            plan,
            walk,
            source,
            flip,
            first,
            step,
            self._strides[0],
            self._strides[1],
            HALF=self._half,
            CROP=self._crop,
            CHANNELS=self._channels,
            LANES=lanes,
            ROWS=tile[0],
            COLUMNS=tile[1],
            num_warps=8 if lanes > 1 else 4,
            enable_fp_fusion=False,  # there is nothing to fuse, and triton 3.9 warns where it is not told
        )


@functools.cache
def _kernel() -> Any:
    """The kernel; made when it is first used, as triton comes with CUDA builds of torch alone."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        raise UserError(
            "the loader resident needs triton on a GPU: pip install triton, or use --data_loader_config=lowmem"
        ) from None

    # Each program copies a tile of rows × columns in one plane of a sample, of one channel or of all of them. Where
    # the symmetry moves the field's fastest axis, either reads or writes would lie far apart: the tile is read along
    # its rows then, written along its columns, and turned in between in the multiprocessor's shared memory. The
    # compiler sees to that, as long as it sees along which axis of the tile memory is contiguous: so one branch of the
    # reading says `row`, the other `column`, without a stride. Where channels are contiguous in the sample, they come
    # last in the tile, which makes them neighbours in the writes. A crop starts anywhere, so that tiles share lines of
    # memory at their edges: the second reading finds them in the L2 cache.
    @triton.jit(do_not_specialize=["step"])
    def gather(  # type: ignore[no-untyped-def]
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
        HALF: tl.constexpr,
        CROP: tl.constexpr,
        CHANNELS: tl.constexpr,
        LANES: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        ACROSS: tl.constexpr = (CROP + COLUMNS - 1) // COLUMNS
        DOWN: tl.constexpr = (CROP + ROWS - 1) // ROWS
        tile = tl.program_id(0)
        plane = tl.program_id(1)
        sample = tl.program_id(2).to(tl.int64)
        # Everything that may pass 2^31 is int64: 5 · 1024³ does.
        row = (tile // ACROSS % DOWN * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
        column = (tile % ACROSS * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :, None]
        lane = (tile // (ACROSS * DOWN) * LANES + tl.arange(0, LANES))[None, None, :]
        inside = (row < CROP) & (column < CROP) & (lane < CHANNELS)

        entry = plan + 2 * (tl.load(first) + sample * step)
        start = tl.load(entry)
        symmetry = tl.load(entry + 1)
        source = tl.load(sources + symmetry * CHANNELS + lane, mask=lane < CHANNELS, other=0)
        flip = tl.load(flips + symmetry * CHANNELS + lane, mask=lane < CHANNELS, other=0)
        walk = walks + symmetry * 9
        begin = field + start + tl.load(walk + 1) + plane * tl.load(walk + 2)
        if tl.load(walk) != 0:
            bits = tl.load(begin + (row + column * tl.load(walk + 4) + source), mask=inside, other=0)
        else:
            bits = tl.load(begin + (row * tl.load(walk + 3) + column + source), mask=inside, other=0)
        values = (bits ^ flip).to(tl.float16 if HALF else tl.float32, bitcast=True)
        place = out + sample * sample_stride + tl.load(walk + 5) + plane * tl.load(walk + 6)
        place += row * tl.load(walk + 7) + column * tl.load(walk + 8) + lane * channel_stride
        # Neighbours along the sample's last axis are neighbours in memory, or a cell's channels apart: a hint for the
        # order in which threads write. It makes no write wider, which takes an alignment that nobody can know.
        place = tl.max_contiguous(place, (1, 2, LANES))
        tl.store(place, values.to(out.dtype.element_ty), mask=inside)

    return gather
