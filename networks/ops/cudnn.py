"""Operations by cuDNN, with Triton kernels for what follows; see reference.py, and blocks.py for few channels."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from networks.ops.blocks import blocks_weight, cells_weight, depth_to_space, has_few_channels, space_to_depth
from networks.ops.l1 import LastL1, Sums, l1_of_blocks
from networks.ops.pointwise import CHANNELS_LAST, bias_activation, bias_activation_twice, bias_relu_cat
from networks.ops.precision import DENSE, Pair, coarse_and_precise, convolution_gradients, precise, without_autocast
from networks.ops.reference import Between, Half, Twice
from networks.ops.smoothing import minus_smoothed

__all__ = ["down", "last", "last_l1", "minus_smoothed", "up"]


def down(x: Tensor, layer: Any, half: Half = None, between: Between = None) -> Twice:
    if has_few_channels(layer.weight):
        weight = blocks_weight(layer.weight).to(layer.dtype)
        y = F.conv3d(space_to_depth(x.contiguous(memory_format=CHANNELS_LAST), layer.dtype), weight)
    else:
        y = F.conv3d(x.to(layer.dtype), layer.weight.to(layer.dtype), None, 2, 1)
    return bias_activation_twice(y if between is None else between(y, layer.bias), layer.bias, "leaky_relu")


def up(x: Tensor, skip: Tensor, layer: Any, half: Half = None, between: Between = None) -> Tensor:
    y = F.conv_transpose3d(x.to(layer.dtype), layer.weight.to(layer.dtype), None, 2, 1)
    return bias_relu_cat(y if between is None else between(y, layer.bias), layer.bias, skip.to(layer.dtype))


def last(x: Tensor, layer: Any) -> Tensor:
    with without_autocast(x):
        weight = cells_weight(layer.weight)
        if layer.dtype == torch.bfloat16:
            y = _PreciseLast.apply(*coarse_and_precise(x, weight))
        else:
            y = depth_to_space(F.conv3d(x.to(layer.dtype), weight.to(layer.dtype), padding=1))
    return bias_activation(y, layer.bias, "tanh")


def last_l1(x: Tensor, layer: Any, targets: Tensor) -> Tensor:
    def compute(coarse: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Sums:
        blocks = torch.ops.aten.convolution(precise(x), precise(weight), None, *DENSE)
        return l1_of_blocks(blocks, bias, targets, coarse.dtype)

    def differentiate(gradient: Tensor, coarse: Tensor, weight: Tensor) -> Pair:
        return convolution_gradients(gradient, coarse, weight.to(coarse.dtype), DENSE)

    with without_autocast(x):
        weight = cells_weight(layer.weight)
        return LastL1.apply(compute, differentiate, x.to(layer.dtype), weight, layer.bias, targets)


class _PreciseLast(torch.autograd.Function):
    """The float32 result from precise operands, and the gradients from those in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, precise_x: Tensor, precise_weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The shuffles also convert the results to float32 and their gradients to bfloat16.
        return depth_to_space(torch.ops.aten.convolution(precise_x, precise_weight, None, *DENSE), torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        blocks = space_to_depth(gradient.contiguous(memory_format=CHANNELS_LAST), x.dtype)
        return *convolution_gradients(blocks, x, weight, DENSE), None, None
