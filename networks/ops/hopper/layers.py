"""Operations in one kernel each, see reference.py; unlike in cudnn.py, the sum with the bias is not rounded first."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from networks.ops import pointwise
from networks.ops.blocks import has_few_channels, space_to_depth
from networks.ops.hopper import edges
from networks.ops.hopper.common import in_half
from networks.ops.hopper.strided import convolve, convolve_transposed, weight_gradient
from networks.ops.hopper.tiles import BLOCK
from networks.ops.l1 import LastL1
from networks.ops.precision import Pair, without_autocast
from networks.ops.reference import NEGATIVE_SLOPE, Between, Half, Twice
from networks.ops.smoothing import minus_smoothed

__all__ = ["down", "last", "last_l1", "minus_smoothed", "up"]


def down(x: Tensor, layer: Any, half: Half = None, between: Between = None) -> Twice:
    """half: the layer's weight as `in_half` returns it, if the caller has it."""
    half, few = in_half(layer.weight, layer.dtype) if half is None else half, has_few_channels(layer.weight)
    if between is None:
        return _Down.apply(x, layer.weight, layer.bias, half, few)
    y, _ = _Down.apply(x, layer.weight, None, half, few)
    return pointwise.bias_activation_twice(between(y, layer.bias), layer.bias, "leaky_relu")


def up(x: Tensor, skip: Tensor, layer: Any, half: Half = None, between: Between = None) -> Tensor:
    half = in_half(layer.weight, layer.dtype) if half is None else half
    x, skip = x.to(layer.dtype), skip.to(layer.dtype)
    if between is not None:
        y = _Up.apply(x, layer.weight, None, None, half, False)
        return pointwise.bias_relu_cat(between(y, layer.bias), layer.bias, skip)
    if skip.shape[1] == layer.weight.shape[1]:  # the kernel copies as many channels as it computes
        return _Up.apply(x, layer.weight, layer.bias, skip, half, layer.pads)
    return torch.cat([_Up.apply(x, layer.weight, layer.bias, None, half, False), skip], dim=1)


def last(x: Tensor, layer: Any) -> Tensor:
    y = _Last.apply(x.to(layer.dtype), layer.weight)
    return pointwise.bias_activation(y, layer.bias, "tanh")


def last_l1(x: Tensor, layer: Any, targets: Tensor) -> Tensor:
    def differentiate(gradient: Tensor, rows: Tensor, weight: Tensor) -> Pair:
        weights_gradient = edges.weight_gradient(rows, gradient)
        return edges.blocks_to_rows(gradient, weight), weights_gradient

    with without_autocast(x):
        return LastL1.apply(edges.l1_of_cells, differentiate, x.to(layer.dtype), layer.weight, layer.bias, targets)


class _Down(torch.autograd.Function):
    """half: the weight in half precision. few: True for kernels of edges.py. Without a bias there is no activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, half: Tensor, few: bool) -> Twice:
        ctx.few, ctx.x_dtype, ctx.activates = few, x.dtype, bias is not None
        slope = NEGATIVE_SLOPE if ctx.activates else 1.0
        if few:
            x = edges.cells_to_blocks(x.contiguous(memory_format=torch.channels_last_3d), half.dtype)
            y = edges.blocks_to_rows(x, weight, bias, slope)
        else:
            x = x.to(half.dtype)
            y = convolve(x, half, bias, slope)
        ctx.save_for_backward(x, weight, half, y)
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, half, y = ctx.saved_tensors
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 5
        gradient, bias_gradient = given[0].to(y.dtype), None
        if ctx.activates:
            gradient, bias_gradient = pointwise.activation_gradient(y, given, "leaky_relu", y.shape[1], pads=ctx.few)
        x_gradient = None
        if ctx.few:
            weights_gradient = edges.weight_gradient(gradient, x)
            if ctx.needs_input_grad[0]:
                x_gradient = edges.rows_to_cells(gradient, weight, gradient.dtype).to(ctx.x_dtype)
        else:
            weights_gradient = weight_gradient(gradient, x)
            if ctx.needs_input_grad[0]:
                x_gradient = convolve_transposed(gradient, half)
        return x_gradient, weights_gradient.to(weight.dtype), bias_gradient, None, None


class _Up(torch.autograd.Function):
    """half: as in `_Down`. Without a bias there is no activation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, skip: Tensor | None, half: Tensor, pads: bool
    ) -> Tensor:
        ctx.activates = bias is not None
        y = convolve_transposed(x, half, bias, 0.0 if ctx.activates else 1.0, skip, pads)
        ctx.save_for_backward(x, weight, half, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, half, y = ctx.saved_tensors
        channels = weight.shape[1]
        bias_gradient, skip_gradient = None, gradient[:, channels:] if ctx.needs_input_grad[3] else None
        gradient = gradient.to(y.dtype)
        if ctx.activates:
            # The weight gradient reads complete rows of padded grids if a cell is one block of channels.
            pads = channels == BLOCK
            gradient, bias_gradient = pointwise.activation_gradient(y, [gradient], "relu", channels, pads)
        x_gradient = convolve(gradient, half) if ctx.needs_input_grad[0] else None
        weights_gradient = weight_gradient(x, gradient).to(weight.dtype)
        return x_gradient, weights_gradient, bias_gradient, skip_gradient, None, None


class _Last(torch.autograd.Function):
    """The transposed convolution without bias; float32 for bfloat16 rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return edges.rows_to_cells(rows, weight, torch.float32 if rows.dtype == torch.bfloat16 else rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        blocks = space_to_depth(gradient.contiguous(memory_format=torch.channels_last_3d), rows.dtype)
        rows_gradient = edges.blocks_to_rows(blocks, weight) if ctx.needs_input_grad[0] else None
        return rows_gradient, edges.weight_gradient(rows, blocks).to(weight.dtype)
