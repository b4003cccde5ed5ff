"""The L1 loss with bias and tanh of a last layer that returns blocks of 2³ cells, in one Triton kernel.

The fields themselves are never in memory: the kernel reads the convolution's result and the targets, and writes the
gradient of the blocks. So the gradient is computed in the forward pass, before that of the loss is known. It is a
factor of all gradients, so the backward pass applies it to small tensors: to the weight for the gradient of the
convolution's input, and to the gradients of weight and bias. The gradient of the blocks stays without that factor and
without the 1 / count of the mean, between -1 and 1, where half precision has its full accuracy.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from networks.ops import pointwise
from networks.ops.launch import launch
from networks.ops.pointwise import tanh
from networks.ops.precision import Pair

BLOCKS_TILE = 512  # elements of a program's tile: four per thread leave registers for 32 warps per multiprocessor

Sums = tuple[Tensor, Tensor, Tensor]


class LastL1(torch.autograd.Function):
    """The loss for the last layer's input x; see the head of this file.

    compute: of x, weight, bias and targets, the sum of the differences, its gradient by blocks, and that of the bias.
    differentiate: the gradients of x and weight from that of the blocks, x, and the weight.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Sums], differentiate: Callable[..., Pair], *tensors: Tensor) -> Tensor:
        x, weight, bias, targets = tensors
        ctx.differentiate, ctx.count, form = differentiate, targets.numel(), torch.channels_last_3d
        total, gradient, bias_gradient = compute(x, weight, bias, targets.contiguous(memory_format=form))
        ctx.save_for_backward(x, weight, gradient, bias_gradient)
        return total / ctx.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gradient, bias_gradient = ctx.saved_tensors
        factor = upstream / ctx.count  # stays on the device, and may be NaN
        x_gradient, weight_gradient = ctx.differentiate(gradient, x, weight * factor)
        return None, None, x_gradient, weight_gradient.to(weight.dtype) * factor, bias_gradient * factor, None


def l1_of_blocks(blocks: Tensor, bias: Tensor, targets: Tensor, dtype: torch.dtype) -> Sums:
    """sum |tanh(cells + bias) - targets|, and its gradients: that of the blocks in `dtype`, and that of the bias."""
    blocks = blocks.contiguous(memory_format=torch.channels_last_3d)
    channels, depth, rows, columns = len(bias), *blocks.shape[2:]
    assert targets.shape == (len(blocks), channels, *(2 * side - 2 for side in blocks.shape[2:]))
    plane, planes = 8 * channels * rows * columns, len(blocks) * depth
    tiles = -(-plane // BLOCKS_TILE)
    groups = min(planes, max(1, pointwise.PROGRAMS // tiles))
    gradient = torch.empty_like(blocks, dtype=dtype)
    partial = torch.empty(groups * tiles, dtype=torch.float32, device=blocks.device)
    bias_partial = torch.empty((groups, tiles * BLOCKS_TILE), dtype=torch.float32, device=blocks.device)
    arguments = (gradient, partial, bias_partial, blocks, bias, targets, planes)
    sizes = {"DEPTH": depth, "ROWS": rows, "COLUMNS": columns, "CHANNELS": channels, "TILE": BLOCKS_TILE}
    launch(blocks_l1, groups * tiles, *arguments, **sizes)
    bias_gradient = bias_partial[:, :plane].sum(0).view(-1, channels).sum(0)
    return partial.sum(), gradient, bias_gradient.to(bias.dtype)


@triton.jit
def tanh_l1(values, targets, used):  # type: ignore[no-untyped-def]
    """|tanh(values) - targets| and its gradient; 0 where not `used`."""
    output = tanh(values)
    difference = output - targets
    # 0 * difference is 0, or NaN. The comparisons alone would treat a NaN as no difference.
    sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0 * difference))
    return tl.where(used, tl.abs(difference), 0.0), tl.where(used, sign * (1.0 - output * output), 0.0)


@triton.jit
def blocks_l1(  # type: ignore[no-untyped-def]
    blocks_gradient,
    loss_partial,
    bias_partial,
    blocks,
    bias,
    targets,
    planes,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the gradient of sum |tanh(blocks + bias) - targets| with respect to the blocks, and partial sums.

    blocks: [planes, ROWS, COLUMNS, 2, 2, 2, CHANNELS], where planes are samples × DEPTH; see the picture in
      blocks.py. Half of each outermost block lies in the padding: it has no target, and its gradient is 0.
    loss_partial: [programs], partial sums of |tanh(blocks + bias) - targets|.
    bias_partial: [programs, TILE], partial sums of the gradient.

    Each program processes the same tile of several planes, at equal distances. So all that depends on the place in the
    plane is computed once: channel, bias, and the address of the target in the first plane.
    """
    PLANE: tl.constexpr = ROWS * COLUMNS * 8 * CHANNELS
    TILES: tl.constexpr = (PLANE + TILE - 1) // TILE
    CELLS_X: tl.constexpr = 2 * DEPTH - 2
    CELLS_Y: tl.constexpr = 2 * ROWS - 2
    CELLS_Z: tl.constexpr = 2 * COLUMNS - 2
    program = tl.program_id(0)
    place = program % TILES * TILE + tl.arange(0, TILE)
    corner = place // CHANNELS % 8
    block = place // (8 * CHANNELS)
    x, y, z = corner // 4 - 1, block // COLUMNS * 2 + corner // 2 % 2 - 1, block % COLUMNS * 2 + corner % 2 - 1
    stored = place < PLANE
    inside = stored & (y >= 0) & (y < CELLS_Y) & (z >= 0) & (z < CELLS_Z)
    offset = ((x * CELLS_Y + y) * CELLS_Z + z) * CHANNELS + place % CHANNELS
    shift = tl.load(bias + place % CHANNELS).to(tl.float32)
    loss = tl.full([TILE], 0.0, tl.float32)
    total = tl.full([TILE], 0.0, tl.float32)
    plane = program // TILES
    while plane < planes:
        depth = plane % DEPTH * 2
        used = inside & (depth + x >= 0) & (depth + x < CELLS_X)
        here = plane.to(tl.int64) * PLANE + place
        origin = ((plane // DEPTH).to(tl.int64) * CELLS_X + depth) * (CELLS_Y * CELLS_Z * CHANNELS)
        values = tl.load(blocks + here, mask=stored, other=0.0).to(tl.float32) + shift
        target = tl.load(targets + origin + offset, mask=used, other=0.0).to(tl.float32)
        difference, gradient = tanh_l1(values, target, used)
        tl.store(blocks_gradient + here, gradient.to(blocks_gradient.dtype.element_ty), mask=stored)
        loss += difference
        total += gradient
        plane += tl.num_programs(0) // TILES
    tl.store(loss_partial + program, tl.sum(loss, 0))
    tl.store(bias_partial + program.to(tl.int64) * TILE + tl.arange(0, TILE), total)
