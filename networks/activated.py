"""Strided convolutions with bias, activation and concatenation in one kernel, for GPUs that own kernels support.

Their results are those of fused.py after the convolution, except that the sum with the bias is not rounded first.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from networks import blocks, fused, strided
from networks.layers import StridedLayer
from networks.space_to_depth import space_to_depth


def down(layer: StridedLayer, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """leaky_relu(layer(x)), twice for two uses. w: the layer's weight in half precision."""
    return _Down.apply(x, layer.weight, layer.bias, w, layer.has_few_channels())


def up(layer: StridedLayer, x: torch.Tensor, skip: torch.Tensor, w: torch.Tensor, pads: bool) -> torch.Tensor:
    """cat([relu(layer(x)), skip], 1), padded if `pads`. w: the layer's weight in half precision."""
    return _Up.apply(x, layer.weight, layer.bias, skip, w, pads)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, w: torch.Tensor, few: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.few, ctx.x_dtype = few, x.dtype
        if few:
            x = space_to_depth(x, w.dtype)
            y = blocks.blocks_to_rows(x, weight, bias, fused.NEGATIVE_SLOPE)
        else:
            y = strided.gather(x, w, bias, fused.NEGATIVE_SLOPE)
        ctx.save_for_backward(x, weight, w, y)
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, w, y = ctx.saved_tensors
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 5
        gradient, bias_gradient = fused.activation_gradient(y, given, "leaky_relu", y.shape[1], pads=ctx.few)
        x_gradient = None
        if ctx.few:
            weight_gradient = blocks.weight_gradient(gradient, x)
            if ctx.needs_input_grad[0]:
                x_gradient = blocks.rows_to_cells(gradient, weight, gradient.dtype).to(ctx.x_dtype)
        else:
            weight_gradient = strided.weight_gradient(gradient, x)
            if ctx.needs_input_grad[0]:
                x_gradient = strided.scatter(gradient, w)
        return x_gradient, weight_gradient.to(weight.dtype), bias_gradient, None, None


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        skip: torch.Tensor,
        w: torch.Tensor,
        pads: bool,
    ) -> torch.Tensor:
        y = strided.scatter(x, w, bias, 0.0, skip, pads)
        ctx.save_for_backward(x, weight, w, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, w, y = ctx.saved_tensors
        channels = weight.shape[1]
        skip_gradient = gradient[:, channels:]
        # The weight gradient reads complete rows of padded grids if a cell is one block of channels.
        pads = channels == strided.BLOCK
        gradient, bias_gradient = fused.activation_gradient(y, [gradient], "relu", channels, pads)
        x_gradient = strided.gather(gradient, w) if ctx.needs_input_grad[0] else None
        weight_gradient = strided.weight_gradient(x, gradient).to(weight.dtype)
        return x_gradient, weight_gradient, bias_gradient, skip_gradient, None, None
