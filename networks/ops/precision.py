"""Autocast, and the transposed convolution whose result stays float32 under bfloat16 autocast."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

# Stride, padding, dilation, transposed, output padding and groups of convolutions, as aten takes them.
DENSE = [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1
UP = [2] * 3, [1] * 3, [1] * 3, True, [0] * 3, 1

Pair = tuple[Tensor, Tensor]


def at_least_float32(outputs: Tensor) -> Tensor:
    """Half precision would round differences by about a tenth of the loss of a trained network."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def without_autocast(x: Tensor) -> Any:
    """Context in which autocast leaves operations on x's device as they are."""
    if autocast_dtype(x) is None:
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes x's convolutions, None if it leaves x as it is."""
    # PyTorch raises an error for other devices, such as meta.
    known = x.device.type in ("cpu", "cuda")
    if x.dtype == torch.float64 or not known or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def precise(x: Tensor) -> Tensor:
    """x, without gradient, in the dtype of last layers' convolutions: float16; float32 on a CPU, where that is slow."""
    return x.detach().to(torch.float32 if x.device.type == "cpu" else torch.float16)


def coarse_and_precise(x: Tensor, weight: Tensor) -> list[Tensor]:
    """x and weight in bfloat16, which determine the gradients, and those that determine the result."""
    return [x.to(torch.bfloat16), weight.to(torch.bfloat16), precise(x), precise(weight)]


def convolution_gradients(gradient: Tensor, x: Tensor, weight: Tensor, form: Any) -> Pair:
    """The gradients of x and weight for that of their convolution DENSE or UP."""
    return torch.ops.aten.convolution_backward(gradient, x, weight, None, *form, [True, True, False])[:2]


def convolve_to_float32(x: Tensor, weight: Tensor) -> Tensor:
    """The transposed convolution UP without bias; float32 where autocast would round it to bfloat16.

    bfloat16 has 8 significant bits: for values in ±1 the mean error is 6.5e-4, while a trained network has a loss of
    4.7e-3. float16 has 11 and is as fast on tensor cores, but the gradients of a mean over millions of cells underflow
    in it. So the result is computed from float16 values, and the gradients from bfloat16 values.
    """
    if autocast_dtype(x) != torch.bfloat16:
        return F.conv_transpose3d(x, weight, None, 2, 1)
    with without_autocast(x):
        return _convolve(*coarse_and_precise(x, weight))


# A custom operator: torch.compile does not support autograd functions where it splits the graph at DDP's buckets.


def _forward(x: Tensor, weight: Tensor, precise_x: Tensor, precise_weight: Tensor) -> Tensor:
    return torch.ops.aten.convolution(precise_x, precise_weight, None, *UP).float()


def _backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Pair:
    return convolution_gradients(gradient.to(x.dtype), x, weight, UP)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(gradient, *ctx.saved_tensors), None, None


_convolve = custom_op("networks::convolve_to_float32", _forward, mutates_args=())
_gradients = custom_op("networks::convolve_to_float32_backward", _backward, mutates_args=())
_convolve.register_fake(_forward)
_gradients.register_fake(_backward)
_convolve.register_autograd(_differentiate, setup_context=_save)
