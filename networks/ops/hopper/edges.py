"""Convolutions with kernel 4, stride 2 and padding 1 whose fine grid has few channels: of the first and last layer.

One relation serves the forward passes and all gradients. Padded rows [N, Cs, D, D, D] of the coarse grid, see
padded.py, and cells [N, C, 2D, 2D, 2D] of the fine one, which blocks [N, 8C, D + 1, D + 1, D + 1] contain, see
blocks.py, belong together by weights [Cs, C, 4, 4, 4]:

    rows_to_cells     cells from rows: a transposed convolution, and the input gradient of a convolution
    blocks_to_rows    rows from blocks: a convolution, and the input gradient of a transposed one
    weight_gradient   from rows and blocks, for both

In the kernels rows are a matrix [F, Cs] and blocks a matrix [F, 8C]. Both have PITCH cells in each row, rows in each
plane and planes in each sample, so neighbors are the same number of cells away everywhere: block b + a holds tap 2a + r
of cell b in its part r. The neighbors b and b + 1 along a row are one run of 16C channels. A run is read in one or two
parts, whose widths are powers of two. A descriptor fills a tile with zeros where it leaves the matrix.

All sums are float32, in an order that depends on the shapes alone, so results repeat bit for bit.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from networks.ops import padded
from networks.ops.blocks import MOST_CHANNELS
from networks.ops.hopper.common import activated
from networks.ops.hopper.tiles import BLOCK, PROCESSORS
from networks.ops.l1 import Sums, tanh_l1
from networks.ops.launch import launch

# Rows of a tile of rows_to_blocks and of blocks_to_rows; rows of a chunk of the weight gradient. Two programs of
# rows_to_blocks fit into a multiprocessor, so that one computes while the other one loads or writes.
ROWS, OUTPUT_ROWS, CHUNK = 128, 64, 64
BLOCKS_AT_ONCE = 64  # in a program of shuffle_cells
# The axes of weights [Cs, C, a, r, a, r, a, r], for tap 2a + r of part r, as the kernels read them.
TO_BLOCKS, TO_ROWS = (6, 3, 5, 7, 1, 2, 4, 0), (2, 4, 0, 6, 3, 5, 7, 1)


def cells_to_blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`space_to_depth(x, dtype)` of a channels_last_3d x [N, C, 2D, 2H, 2W], without gradient."""
    count, channels, *sides = x.shape
    counts = [side // 2 + 1 for side in sides]
    blocks = padded.empty((count, 8 * channels, *counts), dtype, x.device, pads=False)
    number = blocks.numel() // (8 * channels)
    sizes = {"CHANNELS": channels, "WIDTH": triton.next_power_of_2(8 * channels), "TILE": BLOCKS_AT_ONCE}
    launch(shuffle_cells, -(-number // BLOCKS_AT_ONCE), blocks, x, number, *counts, **sizes)
    return blocks


def rows_to_cells(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The transposed convolution; float32 cells of bfloat16 rows are computed in float16, see precision.py."""
    shape = (len(rows), weight.shape[1], *(2 * side for side in rows.shape[2:]))
    cells = padded.empty(shape, dtype, rows.device, pads=False)
    _rows_to_blocks(padded.padded(rows), weight, dtype, cells)
    return cells


def l1_of_cells(rows: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Sums:
    """sum |tanh(cells + bias) - targets|, and its gradients: that of the blocks in the rows' dtype, and the bias's."""
    rows = padded.padded(rows)
    count, few, pitch = len(rows), len(bias), rows.shape[2] + 1
    assert targets.shape == (count, few, *[2 * pitch - 2] * 3)
    cells, tiles, width = count * pitch**3, -(-count * pitch**3 // (ROWS - 1)), 8 * few
    sums = torch.empty((tiles, 2, 8 * MOST_CHANNELS), dtype=torch.float32, device=rows.device)
    memory = torch.empty(tiles * (ROWS - 1) * width, dtype=rows.dtype, device=rows.device)
    # The last row of a tile has no result, and lies outside of these bounds.
    shape, strides = [tiles, ROWS - 1, width], [(ROWS - 1) * width, width, 1]
    out = TensorDescriptor(memory, shape, strides, [1, ROWS, 16])
    _rows_to_blocks(rows, weight, torch.float32, out, bias, targets, sums)
    total, bias_gradient = sums[..., :width].sum(0)
    gradient = memory[: cells * width].view(count, *[pitch] * 3, width).permute(0, 4, 1, 2, 3)
    return total.sum(), gradient, bias_gradient.view(8, few).sum(0).to(bias.dtype)


def _rows_to_blocks(rows: Tensor, weight: Tensor, dtype: torch.dtype, out: Any, *tail: Tensor) -> None:
    """Launches the kernel. out: cells, or with bias, targets and sums a descriptor of blocks."""
    (small, few), pitch, cells = weight.shape[:2], rows.shape[2] + 1, len(rows) * (rows.shape[2] + 1) ** 3
    precise = rows.dtype == torch.bfloat16 and dtype == torch.float32
    packed = _packed(weight, TO_BLOCKS, torch.float16 if precise else rows.dtype)
    row_tiles = _matrix(padded.with_pads(rows), cells, small, small, ROWS, BLOCK)
    strides = [32 * few * small, 4 * small, 1]
    weight_tiles = TensorDescriptor(packed, [2, 8 * few, 4 * small], strides, [2, _power_of_two(8 * few), BLOCK])
    arguments = (row_tiles, weight_tiles, out, *(tail or [None] * 3), cells, small)
    # Triton 3.7 would use 130 registers, too many for two programs.
    options = {"PITCH": pitch, "CHANNELS": few, "num_warps": 8, "num_stages": 3, "maxnreg": 128}
    launch(rows_to_blocks, -(-cells // (ROWS - 1)), *arguments, **options)


def blocks_to_rows(blocks: Tensor, weight: Tensor, bias: Tensor | None = None, slope: float = 1.0) -> Tensor:
    """Padded rows: leaky ReLU of slope `slope` of (the convolution + bias); slope 1 is the identity."""
    (small, few), pitch, cells = weight.shape[:2], blocks.shape[2], len(blocks) * blocks.shape[2] ** 3
    rows = padded.empty((len(blocks), small, *[pitch - 1] * 3), blocks.dtype, blocks.device)
    # The weights of a program, and the blocks of as many tiles as it has stages, fill the shared memory.
    columns, stages = (math.gcd(small, 2 * BLOCK), 3) if few <= 5 else (BLOCK, 2)
    packed = _packed(weight, TO_ROWS, blocks.dtype)
    out = _matrix(padded.with_pads(rows), cells, small, small, OUTPUT_ROWS, columns)
    views = [*_runs(blocks, OUTPUT_ROWS), *_parts(packed, 4 * small, 16 * few, 16 * few, columns)]
    tiles, groups = -(-cells // OUTPUT_ROWS), small // columns
    arguments = (*views, out, packed if bias is None else bias, slope, 0 if bias is None else small, small, tiles)
    programs = groups * min(tiles, max(1, _processors(blocks.device) // groups))
    launch(blocks_to_padded_rows, programs, *arguments, PITCH=pitch, num_warps=4, num_stages=stages)
    return rows


def weight_gradient(rows: Tensor, blocks: Tensor) -> Tensor:
    """The float32 gradient [Cs, C, 4, 4, 4] of the weights, in channels_last_3d memory."""
    rows, small, pitch, cells = padded.padded(rows), rows.shape[1], blocks.shape[2], len(blocks) * blocks.shape[2] ** 3
    few, chunks = blocks.shape[1] // 8, -(-cells // CHUNK)
    tile = math.gcd(small, 2 * BLOCK) if few <= 5 else BLOCK
    # Two small programs fit into a multiprocessor.
    programs, warps, stages = (2 * PROCESSORS, 4, 2) if few <= 5 and tile == BLOCK else (PROCESSORS, 8, 3)
    tiles = small // tile
    per_split = -(-chunks // max(1, min(programs // tiles, chunks // 16)))
    shape = (-(-chunks // per_split), small, 4, 4, 4, few)
    parts = torch.empty(shape, dtype=torch.float32, device=rows.device)
    row_tiles = _matrix(padded.with_pads(rows), cells, small, small, CHUNK, tile)
    arguments = (row_tiles, *_runs(blocks, CHUNK), parts, chunks, per_split, small)
    options = {"PITCH": pitch, "CHANNELS": few, "num_warps": warps, "num_stages": stages}
    launch(block_weight_gradient, tiles * len(parts), *arguments, **options)
    return parts.sum(0).permute(0, 4, 1, 2, 3)


def _packed(weight: Tensor, order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Contiguous weights in this order of axes, copied once."""
    axes = weight.unflatten(4, (2, 2)).unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(order)
    return axes.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _matrix(memory: Tensor, rows: int, columns: int, stride: int, *block: int) -> Any:
    """A descriptor of the memory from its first element on; rows may overlap."""
    return TensorDescriptor(memory, [rows, columns], [stride, 1], list(block))


def _runs(blocks: Tensor, rows: int) -> list[Any]:
    """Descriptors of the runs of two blocks, which begin at each block but the last one."""
    blocks = blocks.contiguous(memory_format=torch.channels_last_3d)
    channels, cells = blocks.shape[1], len(blocks) * blocks.shape[2] ** 3
    return _parts(blocks, cells - 1, 2 * channels, channels, rows)


def _parts(memory: Tensor, rows: int, columns: int, stride: int, tile: int) -> list[Any]:
    """Descriptors of a matrix for its first 64 columns, and for the others or None."""
    widths = [min(64, columns), max(0, columns - 64)]
    return [_matrix(memory, rows, columns, stride, tile, _power_of_two(width)) if width else None for width in widths]


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS


def _power_of_two(columns: int) -> int:
    """The columns of a tile that holds these."""
    return max(16, 1 << (columns - 1).bit_length())


@triton.jit
def shuffle_cells(  # type: ignore[no-untyped-def]
    blocks, cells, number, planes, rows, columns, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """blocks [number, 2, 2, 2, CHANNELS] from cells; those outside of the grid are zero."""
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    value = tl.arange(0, WIDTH)[None, :]
    part = value // CHANNELS
    column, row = block % columns, block // columns % rows
    plane, sample = block // (columns * rows) % planes, (block // (columns * rows * planes)).to(tl.int64)
    d, h, w = 2 * plane + part // 4 - 1, 2 * row + part // 2 % 2 - 1, 2 * column + part % 2 - 1
    depth, height, width = 2 * planes - 2, 2 * rows - 2, 2 * columns - 2
    exists = (block < number) & (value < 8 * CHANNELS)
    inside = exists & (d >= 0) & (d < depth) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    place = (((sample * depth + d) * height + h) * width + w) * CHANNELS + value % CHANNELS
    values = tl.load(cells + place, mask=inside, other=0.0)
    tl.store(blocks + block.to(tl.int64) * (8 * CHANNELS) + value, values.to(blocks.dtype.element_ty), mask=exists)


@triton.jit
def neighbor(run, PITCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cells from the first of the four runs of neighbors to this one: run 1 is in the next row, run 2 in the plane."""
    return ((run >> 1) * PITCH + (run & 1)) * PITCH


@triton.jit
def rows_to_blocks(  # type: ignore[no-untyped-def]
    rows, weights, out, bias, targets, sums, cells, Cs, PITCH: tl.constexpr, CHANNELS: tl.constexpr
):
    """Blocks = sum over neighbors and channels of rows, in the weights' dtype, × weights; see `store_blocks`.

    The products with both neighbors along a row are computed from the same rows: block b adds those of row b with the
    first weights, and of row b - 1 with the second ones. So a tile of rows gives results for all blocks but one.
    """
    ROWS: tl.constexpr = rows.block_shape[0]
    DEPTH: tl.constexpr = rows.block_shape[1]
    COLUMNS: tl.constexpr = weights.block_shape[1]
    f0 = tl.program_id(0) * (ROWS - 1)
    steps = Cs // DEPTH
    acc = tl.full((ROWS, 2 * COLUMNS), 0.0, tl.float32)
    for t in range(4 * steps):
        run = t // steps
        x = rows.load([f0 - 1 - neighbor(run, PITCH), (t - run * steps) * DEPTH])
        if x.dtype != weights.dtype:  # through float32, because a GPU has no fast instruction from bfloat16 to float16
            x = x.to(tl.float32).to(weights.dtype)
        acc = tl.dot(x, weights.load([0, 0, t * DEPTH]).reshape(2 * COLUMNS, DEPTH).T, acc)
    first, second = acc.reshape(ROWS, 2, COLUMNS).permute(0, 2, 1).split()
    following = tl.minimum(tl.arange(0, ROWS) + 1, ROWS - 1)[:, None] + tl.full((ROWS, COLUMNS), 0, tl.int32)
    acc = tl.gather(first, following, 0) + second
    store_blocks(acc, f0, 0, out, bias, targets, sums, cells, PITCH, CHANNELS)


@triton.jit
def store_blocks(  # type: ignore[no-untyped-def]
    acc, f0, k0: tl.constexpr, out, bias, targets, sums, cells, PITCH: tl.constexpr, CHANNELS: tl.constexpr
):
    """Writes a tile of blocks, from block f0 and channel k0 on, as cells [N, 2D, 2D, 2D, CHANNELS], except the padding.

    The last block of the tile is not written. With targets, `out`, a descriptor of [tiles, blocks, 8 CHANNELS], gets
    the gradient of sum |tanh(blocks + bias) - targets| with respect to them instead, and `sums` [tiles, 2, 64] the
    shares of that sum and of the gradient's sum.
    """
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    SIDE: tl.constexpr = 2 * PITCH - 2
    if COLUMNS > 16:
        low, high = acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        store_blocks(low, f0, k0, out, bias, targets, sums, cells, PITCH, CHANNELS)
        store_blocks(high, f0, k0 + COLUMNS // 2, out, bias, targets, sums, cells, PITCH, CHANNELS)
    elif k0 < 8 * CHANNELS:
        f = f0 + tl.arange(0, ROWS)
        n = f // (PITCH * PITCH * PITCH)
        d = f // (PITCH * PITCH) % PITCH
        h = f // PITCH % PITCH
        w = f % PITCH
        column = k0 + tl.arange(0, COLUMNS)
        part = column // CHANNELS
        channel = column % CHANNELS
        # The first and the last block along an axis have one part inside the grid.
        first = (d == 0) * 4 + (h == 0) * 2 + (w == 0)
        last = (d == PITCH - 1) * 4 + (h == PITCH - 1) * 2 + (w == PITCH - 1)
        outside = (first[:, None] & ~part[None, :]) | (last[:, None] & part[None, :])
        has_result = (f < cells) & (tl.arange(0, ROWS) < ROWS - 1)
        used = (outside == 0) & has_result[:, None] & (part < 8)[None, :]
        n0 = f0 // (PITCH * PITCH * PITCH)
        origin = n0.to(tl.int64) * (SIDE * SIDE * SIDE * CHANNELS)
        cell = (((n - n0) * SIDE + 2 * d) * SIDE + 2 * h) * SIDE + 2 * w
        shift = ((part // 4 - 1) * SIDE + part // 2 % 2 - 1) * SIDE + part % 2 - 1
        place = origin + ((cell * CHANNELS)[:, None] + (shift * CHANNELS + channel)[None, :])
        if targets is None:
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=used)
        else:
            values = acc + tl.load(bias + channel).to(tl.float32)[None, :]
            target = tl.load(targets + place, mask=used, other=0.0).to(tl.float32)
            difference, gradient = tanh_l1(values, target, used)
            tile = f0 // (ROWS - 1)
            out.store([tile, 0, k0], gradient.to(out.dtype).reshape(1, ROWS, COLUMNS))
            sums += tile * 128 + column
            tl.store(sums, tl.sum(difference, 0))
            tl.store(sums + 64, tl.sum(gradient, 0))


@triton.jit(do_not_specialize=["biased", "tiles"])
def blocks_to_padded_rows(  # type: ignore[no-untyped-def]
    b_first, b_second, w_first, w_second, out, bias, slope, biased, Cs, tiles, PITCH: tl.constexpr
):
    """out = activated(sum over neighbors and channels of blocks × weights, plus bias if `biased`), 0 in the pads.

    A program computes every n-th tile of rows, so that its weights, which stay in shared memory, are read once.
    """
    ROWS: tl.constexpr = out.block_shape[0]
    COLUMNS: tl.constexpr = out.block_shape[1]
    LAST: tl.constexpr = PITCH - 1
    columns = Cs // COLUMNS
    c0 = tl.program_id(0) % columns * COLUMNS
    c = c0 + tl.arange(0, COLUMNS)
    shift = tl.load(bias + c, mask=c < biased, other=0.0)[None, :]
    w = load_runs(w_first, c0, 0, Cs, 2 * Cs)
    if w_second is not None:
        v = load_runs(w_second, c0, 64, Cs, 2 * Cs)
    for tile in range(tl.program_id(0) // columns, tiles, tl.num_programs(0) // columns):
        f0 = tile * ROWS
        acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for run in tl.static_range(4):
            f = f0 + neighbor(run, PITCH)
            acc = tl.dot(b_first.load([f, 0]), w[run].T, acc)
            if b_second is not None:
                acc = tl.dot(b_second.load([f, 64]), v[run].T, acc)
        acc = activated(acc + shift, slope)
        f = f0 + tl.arange(0, ROWS)
        inside = (f % PITCH < LAST) & (f // PITCH % PITCH < LAST) & (f // (PITCH * PITCH) % PITCH < LAST)
        out.store([f0, c0], tl.where(inside[:, None], acc, 0.0).to(out.dtype))


@triton.jit(do_not_specialize=["chunks", "per_split"])
def block_weight_gradient(  # type: ignore[no-untyped-def]
    rows, b_first, b_second, out, chunks, per_split, Cs, PITCH: tl.constexpr, CHANNELS: tl.constexpr
):
    """out = sum over cells of rows × blocks, float32 [splits, Cs, 4, 4, 4, CHANNELS]; `per_split` chunks a program."""
    DEPTH: tl.constexpr = rows.block_shape[0]
    ROWS: tl.constexpr = rows.block_shape[1]
    tiles = Cs // ROWS
    row0 = tl.program_id(0) % tiles * ROWS
    split = tl.program_id(0) // tiles
    zero = tl.full((ROWS, b_first.block_shape[1]), 0.0, tl.float32)
    acc = (zero, zero, zero, zero)
    if b_second is not None:
        zero = tl.full((ROWS, b_second.block_shape[1]), 0.0, tl.float32)
        more = (zero, zero, zero, zero)
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, chunks)):
        x = rows.load([i * DEPTH, row0]).T
        acc = add_products(acc, x, load_runs(b_first, i * DEPTH, 0, PITCH, PITCH * PITCH))
        if b_second is not None:
            more = add_products(more, x, load_runs(b_second, i * DEPTH, 64, PITCH, PITCH * PITCH))
    out += (split.to(tl.int64) * Cs + row0) * (64 * CHANNELS)
    for run in tl.static_range(4):
        place = out + ((run >> 1) * 32 + (run & 1) * 8) * CHANNELS
        store_taps(place, acc[run], 0, CHANNELS)
        if b_second is not None:
            store_taps(place, more[run], 64, CHANNELS)


@triton.jit
def load_runs(matrix, f, k0, row, plane):  # type: ignore[no-untyped-def]
    """The tiles of the four runs, from row f of a matrix and its column k0 on."""
    first, second = matrix.load([f, k0]), matrix.load([f + row, k0])
    return first, second, matrix.load([f + plane, k0]), matrix.load([f + plane + row, k0])


@triton.jit
def add_products(acc, x, y):  # type: ignore[no-untyped-def]
    """Adds the products of x with each of the four tiles y."""
    return tl.dot(x, y[0], acc[0]), tl.dot(x, y[1], acc[1]), tl.dot(x, y[2], acc[2]), tl.dot(x, y[3], acc[3])


@triton.jit
def store_taps(out, acc, k0, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the products [rows, columns] with a run, from its channel k0 on, to `out` [rows, 4, 4, 4, CHANNELS]."""
    row = tl.arange(0, acc.shape[0])[:, None]
    k = k0 + tl.arange(0, acc.shape[1])[None, :]
    part = k // CHANNELS % 8
    tap = part // 4 * 16 + part // 2 % 2 * 4 + k // (8 * CHANNELS) * 2 + part % 2
    tl.store(out + row * (64 * CHANNELS) + tap * CHANNELS + k % CHANNELS, acc, mask=(row >= 0) & (k < 16 * CHANNELS))
