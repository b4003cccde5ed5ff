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

This is for the layers with few channels, because 4 or 5 channels leave tensor cores mostly idle. All layers here have
kernel 4, stride 2 and padding 1, and grids of an even number of cells along each axis.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from networks import layers


class SpaceToDepthConv3d(layers.Conv3d):
    """`Conv3d` for few input channels."""

    def without_kernels(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        blocks = space_to_depth(input, layers.autocast_dtype(input))  # autocast would convert them after the copy
        return F.conv3d(blocks, _move_to_channels(self.weight), bias)


class DepthToSpaceConvTranspose3d(layers.OutputConvTranspose3d):
    """`OutputConvTranspose3d` for few output channels."""

    def without_kernels(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = dense_weight(self.weight)
        if layers.precise_dtype(input) is None:
            return layers.with_bias(depth_to_space(F.conv3d(input, weight, padding=1)), bias)
        with layers.without_autocast(input):
            result = _last(*layers.coarse_and_precise(input, weight))
        return layers.with_bias(result, bias)


# --- shuffles --------------------------------------------------------------------------------------------------------
# In channels_last_3d memory each is one copy, forward and backward. The backward pass of the operations below would be
# several copies, which leave that format, but a compiler fuses them, and other formats need them.

WIDE = torch.complex128  # 16 bytes, the most that a thread of a GPU can load at once


def space_to_depth(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[N, C, 2D, 2H, 2W] -> [N, 8C, D + 1, H + 1, W + 1] of `dtype`, blocks of x padded with zeros."""
    dtype = dtype or x.dtype
    if torch.compiler.is_compiling() or not layers.is_channels_last(x):
        return _move_to_channels(F.pad(x.to(dtype), (1,) * 6))
    return _Shuffle.apply(x, dtype, True)


def depth_to_space(blocks: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[N, 8C, D + 1, H + 1, W + 1] -> [N, C, 2D, 2H, 2W] of `dtype`, the inverse of `space_to_depth`."""
    dtype = dtype or blocks.dtype
    if torch.compiler.is_compiling() or not layers.is_channels_last(blocks):
        x = blocks.unflatten(1, (2, 2, 2, -1)).permute(0, 4, 5, 1, 6, 2, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        form = torch.channels_last_3d if layers.is_channels_last(blocks) else torch.contiguous_format
        return F.pad(x, (-1,) * 6).to(dtype, memory_format=form)
    return _Shuffle.apply(blocks, dtype, False)


class _Shuffle(torch.autograd.Function):
    """`_gather` or `_scatter`, each of which is the backward pass of the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype, to_blocks: bool) -> torch.Tensor:
        ctx.dtype, ctx.to_blocks = x.dtype, to_blocks
        return _gather(x, dtype) if to_blocks else _scatter(x, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (_scatter if ctx.to_blocks else _gather)(gradient, ctx.dtype), None, None


def _gather(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    count, channels, *sides = x.shape
    shape = (count, 8 * channels, *(side // 2 + 1 for side in sides))
    blocks = torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last_3d).zero_()
    _copy(_cells(blocks), _pairs(x))
    return blocks


def _scatter(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    count, channels, *sides = blocks.shape
    shape = (count, channels // 8, *(2 * side - 2 for side in sides))
    x = torch.empty(shape, dtype=dtype, device=blocks.device, memory_format=torch.channels_last_3d)
    _copy(_pairs(x), _cells(blocks.contiguous(memory_format=torch.channels_last_3d)))
    return x


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies views [N, C, D, 2, H, 2, W, 2]."""
    bytes_per_cell = target.shape[1] * target.element_size()
    if target.dtype == source.dtype and source.stride(1) == 1 and bytes_per_cell % WIDE.itemsize == 0:
        # PyTorch computes the address of each element of such views, so fewer, larger elements are faster.
        target, source = (view.movedim(1, -1).view(WIDE) for view in (target, source))
    target.copy_(source)


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """A view [N, C, D, 2, H, 2, W, 2] of x [N, C, 2D, 2H, 2W]."""
    return x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))


def _cells(blocks: torch.Tensor) -> torch.Tensor:
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


def _move_to_channels(x: torch.Tensor) -> torch.Tensor:
    """[N, C, D, H, W] -> [N, 8C, D // 2, H // 2, W // 2] in the same memory format."""
    blocks = x.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2)  # [N, C, D/2, H/2, W/2, 2, 2, 2]
    if layers.is_channels_last(x):
        return blocks.permute(0, 2, 3, 4, 5, 6, 7, 1).flatten(4).permute(0, 4, 1, 2, 3)
    return blocks.permute(0, 5, 6, 7, 1, 2, 3, 4).flatten(1, 4)


# --- convolutions -----------------------------------------------------------------------------------------------------


def dense_weight(weight: torch.Tensor) -> torch.Tensor:
    """[I, O, 4, 4, 4] of a transposed convolution -> [8O, I, 2, 2, 2] of a convolution that returns blocks."""
    # Output cell 2b + r - 1 sums weight[2a + r] times input cell b - a: a convolution with the kernel reversed.
    parts = weight.unfold(2, 2, 2).unfold(3, 2, 2).unfold(4, 2, 2).flip(2, 3, 4)  # [I, O, 2, 2, 2 (a), 2, 2, 2 (r)]
    if layers.is_channels_last(weight):
        memory = parts.permute(5, 6, 7, 1, 2, 3, 4, 0).reshape(-1, 8, len(weight))
        return memory.unflatten(1, (2, 2, 2)).permute(0, 4, 1, 2, 3)
    return parts.permute(5, 6, 7, 1, 0, 2, 3, 4).flatten(0, 3)


def _last_forward(
    x: torch.Tensor, weight: torch.Tensor, precise_x: torch.Tensor, precise_weight: torch.Tensor
) -> torch.Tensor:
    # The shuffles also convert the results to float32 and their gradients to bfloat16.
    return depth_to_space(torch.ops.aten.convolution(precise_x, precise_weight, None, *layers.DENSE), torch.float32)


def _last_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> layers.Pair:
    return layers.convolution_gradients(space_to_depth(gradient, x.dtype), x, weight, layers.DENSE)


_last = layers.operator("dense_last", _last_forward, _last_backward)
