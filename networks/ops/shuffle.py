"""The blocks of 2³ cells of a grid in half precision, by one kernel; see networks/ops/blocks.py."""

import torch
import triton
import triton.language as tl

from networks.ops.launch import launch

TILE = 64  # blocks in a program


def cells_to_blocks(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`space_to_depth(x, dtype)` of a channels_last_3d x [N, C, 2D, 2H, 2W], without gradient."""
    count, channels, *sides = x.shape
    counts = [side // 2 + 1 for side in sides]
    shape = (count, 8 * channels, *counts)
    blocks = torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last_3d)
    number = blocks.numel() // (8 * channels)
    launch(
        shuffle_cells,
        -(-number // TILE),
        *(blocks, x, number, *counts),
        CHANNELS=channels,
        WIDTH=triton.next_power_of_2(8 * channels),
        TILE=TILE,
    )
    return blocks


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
