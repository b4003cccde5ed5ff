"""Convolutions that can leave their bias to what follows, and one whose result is finer than bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.library import custom_op
from torch.nn import functional as F


class Conv3d(nn.Conv3d):
    """`nn.Conv3d`; with `biased` False without its bias, which then is for the caller to add."""

    def forward(self, input: torch.Tensor, biased: bool = True) -> torch.Tensor:
        return self._conv_forward(input, self.weight, self.bias if biased else None)


class ConvTranspose3d(nn.ConvTranspose3d):
    """`nn.ConvTranspose3d`; with `biased` False without its bias, which then is for the caller to add."""

    def forward(  # type: ignore[override] # no output size is ever chosen
        self, input: torch.Tensor, biased: bool = True
    ) -> torch.Tensor:
        assert not isinstance(self.padding, str)  # nn.ConvTranspose3d takes numbers alone
        bias = self.bias if biased else None
        return F.conv_transpose3d(
            input, self.weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class OutputConvTranspose3d(nn.ConvTranspose3d):
    """A network's last layer: its result is float32 under bfloat16 autocast, too; see `convolve_finely`."""

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, biased: bool = True
    ) -> torch.Tensor:
        result = convolve_finely(input, self.weight, self.stride, self.padding, transposed=True)
        return with_bias(result, self.bias if biased else None)


def with_bias(result: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[N, C, D, H, W] plus [C], in the result's type."""
    return result if bias is None else result + bias.to(result.dtype).view(-1, 1, 1, 1)


def convolve_finely(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int | str], transposed: bool = False
) -> torch.Tensor:
    """The convolution without bias, in float32 where autocast would round its result to bfloat16.

    bfloat16 keeps 8 bits: on values in ±1 that is an error of 6.5e-4 on average, and the loss to reach is 4.7e-3.
    float16 keeps 11, and tensor cores take it as fast; but gradients of a mean over millions of cells are too small for
    it. So the result is computed from float16 numbers, and its gradients from bfloat16 ones. (On a CPU, where float16
    is slow, from float32 ones.)
    """
    sides = [int(side) for side in padding]
    if not _rounds_to_bfloat16(x.device.type):
        if transposed:
            return F.conv_transpose3d(x, weight, None, tuple(stride), tuple(sides))
        return F.conv3d(x, weight, None, tuple(stride), tuple(sides))
    fine = torch.float16 if x.is_cuda else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        # What the gradients are computed from, and what the result is: casts are outside for a compiler to fuse.
        coarse = [tensor.to(torch.bfloat16) for tensor in (x, weight)]
        return _finely(*coarse, *(tensor.detach().to(fine) for tensor in (x, weight)), list(stride), sides, transposed)


def _rounds_to_bfloat16(device: str) -> bool:
    # Of other devices (meta) PyTorch refuses to tell.
    known = device in ("cpu", "cuda")
    return known and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


# --- an operator of PyTorch's own kind: a compiler that splits DDP's graph takes no autograd function in it -----------

_GEOMETRY = "int[] stride, int[] padding, bool transposed"


def _plain(
    x: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int], transposed: bool
) -> torch.Tensor:
    ones, zeros = [1] * len(stride), [0] * len(stride)
    result = torch.ops.aten.convolution(x, weight, None, stride, padding, ones, transposed, zeros, 1)
    return result.float()


def _gradients(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: list[int],
    padding: list[int],
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    ones, zeros = [1] * len(stride), [0] * len(stride)
    x_gradient, weight_gradient, _ = torch.ops.aten.convolution_backward(
        gradient.to(x.dtype), x, weight, None, stride, padding, ones, transposed, zeros, 1, [True, True, False]
    )
    return x_gradient, weight_gradient


def _from_fine(
    x: torch.Tensor, weight: torch.Tensor, fine_x: torch.Tensor, fine_weight: torch.Tensor, *geometry: Any
) -> torch.Tensor:
    return _plain(fine_x, fine_weight, *geometry)


_finely = custom_op(
    "networks::convolve_finely",
    _from_fine,
    mutates_args=(),
    schema=f"(Tensor x, Tensor weight, Tensor fine_x, Tensor fine_weight, {_GEOMETRY}) -> Tensor",
)
_backward = custom_op(
    "networks::convolve_finely_backward",
    _gradients,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor x, Tensor weight, {_GEOMETRY}) -> (Tensor, Tensor)",
)
# Asked for shapes alone, the same code runs on tensors without numbers.
_finely.register_fake(_from_fine)
_backward.register_fake(_gradients)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, _, *ctx.geometry = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return (*_backward(gradient, *ctx.saved_tensors, *ctx.geometry), *(None,) * 5)


_finely.register_autograd(_differentiate, setup_context=_keep)
