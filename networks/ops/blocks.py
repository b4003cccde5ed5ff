"""Strided convolutions computed as dense ones over blocks of 2³ cells: the same sums in a form that suits tensor cores.

With kernel 4, stride 2 and padding 1, output cell o of a convolution reads the padded input at 2o + k = 2(o + a) + r
for k = 2a + r. If the cells r of each block of 2³ are moved to channels, this is a convolution over a with kernel 2 and
stride 1: an input of 4 channels becomes one of 32. The transposed convolution is the reverse.

Blocks begin one cell before the grid. Along an axis of 6 cells:

    cell        ·   0   1   2   3   4   5   ·
    block      [  0  ] [  1  ] [  2  ] [  3  ]
    part        0   1   0   1   0   1   0   1

Cell i is part (i + 1) % 2 of block (i + 1) // 2, so D cells need D / 2 + 1 blocks. Channels of blocks are ordered
[2, 2, 2, C]: parts along the three axes, then the channels of a cell.

This is for the layers with few channels, because 4 or 5 channels leave tensor cores mostly idle. All tensors are
channels_last_3d, and grids have an even number of cells along each axis.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_CHANNELS = 8  # of a layer with few channels
CHANNELS_LAST = torch.channels_last_3d
WIDE = torch.complex128  # 16 bytes, the most that a thread of a GPU can load at once


def has_few_channels(weight: Tensor) -> bool:
    """True for a layer with few channels, by its weight; see the head of this file."""
    return weight.shape[1] <= MOST_CHANNELS


def space_to_depth(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[N, C, 2D, 2H, 2W] -> [N, 8C, D + 1, H + 1, W + 1] of `dtype`, blocks of x padded with zeros. One copy."""
    return _Shuffle.apply(x, dtype or x.dtype, True)


def depth_to_space(blocks: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[N, 8C, D + 1, H + 1, W + 1] -> [N, C, 2D, 2H, 2W] of `dtype`, the inverse of `space_to_depth`. One copy."""
    return _Shuffle.apply(blocks, dtype or blocks.dtype, False)


class _Shuffle(torch.autograd.Function):
    """`_to_blocks` or `_to_cells`, each of which is the backward pass of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, to_blocks: bool) -> Tensor:
        ctx.dtype, ctx.to_blocks = x.dtype, to_blocks
        return _to_blocks(x, dtype) if to_blocks else _to_cells(x, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (_to_cells if ctx.to_blocks else _to_blocks)(gradient, ctx.dtype), None, None


def _to_blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    count, channels, *sides = x.shape
    shape = (count, 8 * channels, *(side // 2 + 1 for side in sides))
    blocks = torch.empty(shape, dtype=dtype, device=x.device, memory_format=CHANNELS_LAST).zero_()
    _copy(_cells(blocks), _pairs(x))
    return blocks


def _to_cells(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    count, channels, *sides = blocks.shape
    shape = (count, channels // 8, *(2 * side - 2 for side in sides))
    x = torch.empty(shape, dtype=dtype, device=blocks.device, memory_format=CHANNELS_LAST)
    _copy(_pairs(x), _cells(blocks.contiguous(memory_format=CHANNELS_LAST)))
    return x


def _copy(target: Tensor, source: Tensor) -> None:
    """Copies views [N, C, D, 2, H, 2, W, 2]."""
    bytes_per_cell = target.shape[1] * target.element_size()
    if target.dtype == source.dtype and source.stride(1) == 1 and bytes_per_cell % WIDE.itemsize == 0:
        # PyTorch computes the address of each element of such views, so fewer, larger elements are faster.
        target, source = (view.movedim(1, -1).view(WIDE) for view in (target, source))
    target.copy_(source)


def _pairs(x: Tensor) -> Tensor:
    """A view [N, C, D, 2, H, 2, W, 2] of x [N, C, 2D, 2H, 2W]."""
    return x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))


def _cells(blocks: Tensor) -> Tensor:
    """A view [N, C, D, 2, H, 2, W, 2] of the cells in blocks [N, 8C, D + 1, H + 1, W + 1] that are not padding."""
    sample, part, *steps = blocks.stride()  # of channels_last_3d: in other formats some of those below are negative
    count, channels = blocks.shape[0], blocks.shape[1] // 8
    sizes, strides, offset = [count, channels], [sample, part], blocks.storage_offset()
    for step, side, parts in zip(steps, blocks.shape[2:], (4, 2, 1), strict=True):
        within = parts * channels * part  # from part 0 of a block to part 1
        sizes += [side - 1, 2]
        strides += [step, step - within]
        offset += within
    return blocks.as_strided(sizes, strides, offset)


def blocks_weight(weight: Tensor) -> Tensor:
    """[O, I, 4, 4, 4] of a convolution -> [O, 8I, 2, 2, 2] of a convolution that reads blocks."""
    parts = weight.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2)  # [O, I, 2 (a), 2, 2, 2 (r), 2, 2]
    return parts.permute(0, 2, 3, 4, 5, 6, 7, 1).flatten(4).permute(0, 4, 1, 2, 3)


def cells_weight(weight: Tensor) -> Tensor:
    """[I, O, 4, 4, 4] of a transposed convolution -> [8O, I, 2, 2, 2] of a convolution that returns blocks."""
    # Output cell 2b + r - 1 sums weight[2a + r] times input cell b - a: a convolution with the kernel reversed.
    parts = weight.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2).flip(2, 3, 4)  # [I, O, 2, 2, 2 (a), 2, 2, 2 (r)]
    memory = parts.permute(5, 6, 7, 1, 2, 3, 4, 0).reshape(-1, 8, len(weight))
    return memory.unflatten(1, (2, 2, 2)).permute(0, 4, 1, 2, 3)
