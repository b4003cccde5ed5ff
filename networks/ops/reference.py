"""The layers' operations in plain PyTorch: their definition, and what CPUs, torch.compile and exports compute.

Every file of operations has the same functions, except `smoothed`. `layer` has weight and bias of a convolution with
kernel 4, stride 2 and padding 1, or of its transpose. `between` is applied between convolution and activation, if it is
given.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from networks.ops.precision import at_least_float32, convolve_to_float32

NEGATIVE_SLOPE = 0.01

Half = Tensor | None
# (the convolution's result, a bias that is added later or None) -> its replacement
Between = Callable[[Tensor, Tensor | None], Tensor] | None
Twice = tuple[Tensor, Tensor]


def down(x: Tensor, layer: Any, half: Half = None, between: Between = None) -> Twice:
    """[N, I, 2D, 2D, 2D] -> leaky_relu(convolution), [N, O, D, D, D], twice, for its two uses."""
    y = F.conv3d(x, layer.weight, layer.bias, 2, 1)
    y = F.leaky_relu(y if between is None else between(y, None), NEGATIVE_SLOPE)
    return y, y


def up(x: Tensor, skip: Tensor, layer: Any, half: Half = None, between: Between = None) -> Tensor:
    """[N, I, D, D, D] and skip [N, S, 2D, 2D, 2D] -> relu(transposed convolution) and skip, [N, O + S, 2D, 2D, 2D]."""
    y = F.conv_transpose3d(x, layer.weight, layer.bias, 2, 1)
    return torch.cat([F.relu(y if between is None else between(y, None)), skip], dim=1)


def last(x: Tensor, layer: Any) -> Tensor:
    """[N, I, D, D, D] -> tanh(transposed convolution), [N, O, 2D, 2D, 2D]; float32 under bfloat16 autocast."""
    y = convolve_to_float32(x, layer.weight)
    return torch.tanh(y + layer.bias.to(y.dtype).view(-1, 1, 1, 1))


def last_l1(x: Tensor, layer: Any, targets: Tensor) -> Tensor:
    """Mean |last - targets| as a float32 scalar; float64 for float64 outputs."""
    return (at_least_float32(last(x, layer)) - targets).abs().mean()


def smoothed(fields: Tensor, added: Sequence[int | None]) -> Tensor:
    """[N, I, D, D, D] -> [N, len(added), D, D, D]: means of the named inputs over 3³ cells, fewer at faces; None: 0."""
    # Gas does not follow the dark matter from cell to cell, nor the noise of its particles there.
    fields = F.avg_pool3d(fields, 3, stride=1, padding=1, count_include_pad=False)
    zero = torch.zeros_like(fields[:, :1])
    return torch.cat([zero if place is None else fields[:, place : place + 1] for place in added], dim=1)


def minus_smoothed(targets: Tensor, fields: Tensor, added: Sequence[int | None]) -> Tensor:
    return targets - smoothed(fields, added)
