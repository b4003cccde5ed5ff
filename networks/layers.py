"""Convolutions whose bias can be added later, and a convolution with a float32 result under bfloat16 autocast."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.library import custom_op
from torch.nn import functional as F

from networks import blocks, fused, padded, strided
from networks.fused import passes_as

# Stride, padding, dilation, transposed, output padding and groups of the convolutions here, as aten takes them.
DENSE = [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1
DOWN = [2] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1
UP = [2] * 3, [1] * 3, [1] * 3, True, [0] * 3, 1

Pair = tuple[torch.Tensor, torch.Tensor]


class StridedLayer:
    """A convolution by own kernels, those of blocks.py or of strided.py, where they can compute it.

    convolutions: "auto", by the kernels if they can; "own", or an error; "cudnn".
    """

    convolutions = "auto"
    to_float32 = False  # True if the result is that of `convolve_to_float32`
    without_kernels: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # of input and bias
    weight: torch.Tensor
    bias: Any
    transposed: bool

    def forward(self, input: torch.Tensor, biased: bool = True) -> torch.Tensor:
        """With biased=False the caller adds the bias."""
        bias, dtype = self.bias if biased else None, autocast_dtype(input) or input.dtype
        if not self.own(input, dtype):
            return self.without_kernels(input, bias)
        if not self.has_few_channels():
            result = _strided(input.to(dtype), self.weight, self.transposed)
        elif self.transposed:
            result_dtype = torch.float32 if self.to_float32 and precise_dtype(input) is not None else dtype
            result = blocks.convolve_transpose(input.to(dtype), self.weight, result_dtype)
        else:
            result = blocks.convolve(input, self.weight, dtype)
        return with_bias(result, bias)

    def obstacle(self, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device) -> str:
        """Why the kernels cannot compute the layer for an input [N, C, D, D, D] in dtype; empty if they can."""
        layer: Any = self
        if dtype not in (torch.float16, torch.bfloat16):
            return "the precision is not float16 or bfloat16"
        if len(set(shape[2:])) > 1 or (shape[2] % 2 and not self.transposed):
            return f"a grid of {' × '.join(map(str, shape[2:]))} cells is not a cube of an even side"
        form = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.output_padding, layer.groups
        if form != ((4,) * 3, (2,) * 3, (1,) * 3, (1,) * 3, (0,) * 3, 1):
            return "it is no convolution with kernel 4, stride 2 and padding 1"
        limits = blocks.obstacle if self.has_few_channels() else strided.obstacle
        side = shape[2] if self.transposed else shape[2] // 2
        return strided.unavailable(device) or limits(len(self.weight), self.weight.shape[1], side)

    def plans_own(self, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device) -> bool:
        """True if the kernels compute the layer for a channels-last input of this shape."""
        return self.convolutions != "cudnn" and not self.obstacle(shape, dtype, device)

    def own(self, x: torch.Tensor, dtype: torch.dtype | None) -> bool:
        """True if the kernels compute the layer for this input."""
        if self.convolutions == "cudnn":
            return False
        reason = self.obstacle(x.shape, dtype, x.device)
        if not reason and not (x.is_contiguous(memory_format=torch.channels_last_3d) or padded.is_padded(x)):
            reason = "the input is not channels-last"
        if reason and self.convolutions == "own":
            raise RuntimeError(f"convolutions are to be computed by own kernels, but {reason}")
        return not reason

    def has_few_channels(self) -> bool:
        """True for a layer of the kernels of blocks.py."""
        return self.weight.shape[1] <= blocks.MOST_CHANNELS


class Conv3d(StridedLayer, nn.Conv3d):
    """`nn.Conv3d`, by own kernels where they can compute it."""

    def without_kernels(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._conv_forward(input, self.weight, bias)


class ConvTranspose3d(StridedLayer, nn.ConvTranspose3d):  # type: ignore[misc] # no output_size
    """`nn.ConvTranspose3d` with stride 2 and padding 1, by own kernels where they can compute it."""

    def without_kernels(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.conv_transpose3d(input, self.weight, bias, 2, 1)


class OutputConvTranspose3d(ConvTranspose3d):
    """The last layer of a network, with stride 2 and padding 1."""

    to_float32 = True

    def without_kernels(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return with_bias(convolve_to_float32(input, self.weight, True), bias)


def with_bias(result: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[N, C, D, H, W] plus [C], in the result's type."""
    return result if bias is None else result + bias.to(result.dtype).view(-1, 1, 1, 1)


def convolve_to_float32(x: torch.Tensor, weight: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """The convolution UP if `transposed`, else DENSE, without bias; float32 where autocast would round to bfloat16.

    bfloat16 has 8 significant bits: for values in ±1 the mean error is 6.5e-4, while a trained network has a loss of
    4.7e-3. float16 has 11 and is as fast on tensor cores, but the gradients of a mean over millions of cells underflow
    in it. So the result is computed from float16 values (float32 on a CPU, where float16 is slow), and the gradients
    from bfloat16 values.
    """
    if precise_dtype(x) is None:
        return F.conv_transpose3d(x, weight, None, 2, 1) if transposed else F.conv3d(x, weight, None, 1, 1)
    with without_autocast(x):
        return _convolve(*coarse_and_precise(x, weight), transposed)


def coarse_and_precise(*operands: torch.Tensor) -> list[torch.Tensor]:
    """x and weight in bfloat16, which determine the gradients, and in `precise_dtype`, which determine the result."""
    dtype = torch.float16 if operands[0].is_cuda else torch.float32
    return [*(x.to(torch.bfloat16) for x in operands), *(x.detach().to(dtype) for x in operands)]


def without_autocast(x: torch.Tensor) -> Any:
    """Context in which autocast leaves operations on x's device as they are."""
    if autocast_dtype(x) is None:
        return contextlib.nullcontext()
    return torch.autocast("cuda" if passes_as(x) else x.device.type, enabled=False)


def is_channels_last(x: torch.Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last_3d) and not x.is_contiguous()


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes x's convolutions, None if it leaves x as it is."""
    if trial := passes_as(x):
        return trial.dtype
    # PyTorch raises an error for other devices, such as meta.
    known = x.device.type in ("cpu", "cuda")
    if x.dtype == torch.float64 or not known or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def precise_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype of last layers' convolutions where autocast would round their results to bfloat16, else None."""
    if autocast_dtype(x) != torch.bfloat16:
        return None
    return torch.float16 if x.is_cuda else torch.float32


# --- custom operators -------------------------------------------------------------------------------------------------
# torch.compile does not support autograd functions where it splits the graph at DDP's buckets.


def operator(name: str, forward: Any, backward: Any, fakes: Any = None) -> Any:
    """The custom operator `forward`(x, weight, ...) with the gradients of x and weight from `backward`.

    backward: called with the gradient of the result, x, weight, and those further arguments that are not tensors.
    fakes: both for tensors without data, if the same code does not compute shapes from them.
    """
    made = custom_op(f"networks::{name}", forward, mutates_args=())
    gradients = custom_op(f"networks::{name}_backward", backward, mutates_args=())
    for defined, fake in zip((made, gradients), fakes or (forward, backward), strict=True):
        defined.register_fake(fake)

    def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.settings = [value for value in inputs[2:] if not isinstance(value, torch.Tensor)]
        ctx.others = (None,) * (len(inputs) - 2)

    def differentiate(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *gradients(gradient, *ctx.saved_tensors, *ctx.settings), *ctx.others

    made.register_autograd(differentiate, setup_context=save_inputs)
    return made


def convolution_gradients(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, form: Any) -> Pair:
    """The gradients of x and weight for that of their convolution DENSE, DOWN or UP."""
    return torch.ops.aten.convolution_backward(gradient, x, weight, None, *form, [True, True, False])[:2]


def _forward(
    x: torch.Tensor, weight: torch.Tensor, precise_x: torch.Tensor, precise_weight: torch.Tensor, transposed: bool
) -> torch.Tensor:
    return torch.ops.aten.convolution(precise_x, precise_weight, None, *(UP if transposed else DENSE)).float()


def _backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> Pair:
    return convolution_gradients(gradient.to(x.dtype), x, weight, UP if transposed else DENSE)


_convolve = operator("convolve_to_float32", _forward, _backward)


def _strided_forward(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    w = strided.in_half(weight, x.dtype)
    return strided.scatter(x, w) if transposed else strided.gather(x, w)


def _strided_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> Pair:
    w = strided.in_half(weight, x.dtype)
    gradient = gradient.to(x.dtype)
    x_gradient = strided.gather(gradient, w) if transposed else strided.scatter(gradient, w)
    weight_gradient = strided.weight_gradient(*((x, gradient) if transposed else (gradient, x)))
    return x_gradient, weight_gradient.to(weight.dtype)


def _strided_shape(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    channels = weight.shape[1 if transposed else 0]
    sides = [2 * side if transposed else side // 2 for side in x.shape[2:]]
    return x.new_empty((len(x), channels, *sides)).contiguous(memory_format=torch.channels_last_3d)


def _strided_shapes(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> Pair:
    forms = torch.empty_like(x), torch.empty_like(weight)
    return forms[0].contiguous(memory_format=torch.channels_last_3d), forms[1]


_strided = operator(
    "strided_convolution",
    _strided_forward,
    _strided_backward,
    (fused.fake(_strided_forward, _strided_shape), fused.fake(_strided_backward, _strided_shapes)),
)
