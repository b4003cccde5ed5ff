"""Bias, activation and concatenation after a convolution, one Triton kernel each for both passes.

The kernels need channels_last_3d tensors, whose memory is a matrix [cells, channels]. For the backward pass a
convolution keeps its input, not its output. The activations keep only their outputs, which determine the slopes and are
kept by the next convolution anyway. Sums are computed in float32, and results are rounded once. Each sum over cells is
split among a fixed number of programs, whose partial sums are added in a fixed order.

Indices of cells and elements are int64: 128 channels of 32³ cells exceed 2^31 elements from batch size 512 on. NaN
passes through all kernels, so that a run that diverges can be noticed.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from networks.ops import padded
from networks.ops.launch import launch
from networks.ops.reference import NEGATIVE_SLOPE, Twice

CHANNELS_LAST = torch.channels_last_3d
# A program's tile: the lanes in a row, which hold complete cells, and all elements, 16 per thread, or 4; see _Tile.
LANES, TILE = 256, 2048
# Programs that share a sum over all cells: eight per multiprocessor of an H100 or H200.
PROGRAMS = 1056

Activation = Literal["leaky_relu", "relu", "tanh"]


def bias_activation(x: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    """activation(x + bias) in x's dtype, for x [N, C, D, H, W] and bias [C]."""
    return bias_activation_twice(x, bias, activation)[0]


def bias_activation_twice(x: Tensor, bias: Tensor, activation: Activation) -> Twice:
    """`bias_activation` for two uses of its result, whose gradients the backward kernel adds."""
    if _repeats(x):
        return _BiasActivation.apply(x.contiguous(memory_format=CHANNELS_LAST), bias, None, activation)
    # A float32 bias makes the sum float32, under autocast too.
    total = x + bias.view(-1, 1, 1, 1)
    y = F.leaky_relu(total, NEGATIVE_SLOPE) if activation == "leaky_relu" else getattr(torch, activation)(total)
    y = y.to(x.dtype)
    return y, y


def bias_relu_cat(x: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    """cat([relu(x + bias), skip], 1) in x's dtype."""
    if _repeats(x):
        x, skip = (part.contiguous(memory_format=CHANNELS_LAST) for part in (x, skip))
        return _BiasActivation.apply(x, bias, skip, "relu")[0]
    return torch.cat([bias_activation(x, bias, "relu"), skip], dim=1)


def _repeats(x: Tensor) -> bool:
    """False for one channel, for which repeated calls on an H200 gave different bits."""
    return x.shape[1] > 1


class _BiasActivation(torch.autograd.Function):
    """activation(x + bias), concatenated with `skip` if that is given; returned twice, for two uses.

    Allocates its result, so that x is unchanged, and freed if nothing else refers to it. The gradient of `skip` is a
    strided view of the result's gradient, not a copy.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, skip: Tensor | None, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        channels, skip_channels = x.shape[1], 0 if skip is None else skip.shape[1]
        shape = (x.shape[0], channels + skip_channels, *x.shape[2:])
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=CHANNELS_LAST)
        cells, width = x.numel() // channels, max(channels, skip_channels)
        tile = _Tile.of(width)
        arguments = (y, x, bias, x if skip is None else skip, cells, channels + skip_channels)
        sizes = {"CHANNELS": channels, "SKIP_CHANNELS": skip_channels, "WIDTH": width, **tile.sizes()}
        slopes: dict[str, Any] = {"ACTIVATION": activation, "NEGATIVE_SLOPE": NEGATIVE_SLOPE}
        launch(bias_activation_forward, tile.count(cells), *arguments, **sizes, **slopes)
        ctx.save_for_backward(y)
        ctx.channels, ctx.activation = channels, activation
        # A result that the loss does not depend on gets None as its gradient instead of zeros.
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        channels, (y,) = ctx.channels, ctx.saved_tensors
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 4
        x_gradient, bias_gradient = activation_gradient(y, given, ctx.activation, channels)
        skip_gradient = given[0][:, channels:] if channels < y.shape[1] else None
        return x_gradient, bias_gradient, skip_gradient, None


def activation_gradient(
    y: Tensor, given: Sequence[Tensor], activation: Activation, channels: int, pads: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of x and bias for y = activation(x + bias), the first `channels` channels of y.

    given: the gradient of y, or two whose sum it is. pads: the result is padded, see padded.py.
    """
    x_gradient = padded.empty((len(y), channels, *y.shape[2:]), y.dtype, y.device, pads)
    operands = [_by_cells(values[:, :channels]) for values in (y, given[0], given[-1])]
    # If no operand has pads, all are matrices [cells, channels].
    side = y.shape[4] if pads or any(pitch != y.shape[4] for *_, pitch in operands) else 0
    pitch = side + pads
    cells = len(y) * pitch**3 if side else y.numel() // y.shape[1]
    tile = _Tile.of(channels)
    programs = min(tile.count(cells), PROGRAMS)
    partial = torch.empty((programs * tile.packed, channels), dtype=torch.float32, device=y.device)
    arguments = (x_gradient, partial, *(value for operand in operands for value in operand), cells)
    sizes = {"CHANNELS": channels, "SIDE": side, "PITCH": pitch, **tile.sizes()}
    slopes: dict[str, Any] = {"ACTIVATION": activation, "NEGATIVE_SLOPE": NEGATIVE_SLOPE}
    launch(bias_activation_backward, programs, *arguments, TWICE=len(given) == 2, **sizes, **slopes)
    return x_gradient, partial.sum(0)


class _Tile(NamedTuple):
    """`rows` of `lanes`. Each row holds `packed` cells; its other lanes are idle."""

    lanes: int
    rows: int
    packed: int

    @classmethod
    def of(cls, channels: int) -> "_Tile":
        lanes = max(LANES, 1 << (channels - 1).bit_length())
        # Where rows have idle lanes, a load is one element, and 16 addresses per thread would need 230 registers.
        tile = TILE // 4 if lanes % channels else TILE
        return cls(lanes, max(tile // lanes, 1), lanes // channels)

    def sizes(self) -> dict[str, int]:
        return {"LANES": self.lanes, "ROWS": self.rows}

    def count(self, cells: int) -> int:
        """The number of tiles that hold `cells`."""
        return -(-cells // (self.rows * self.packed))


def _by_cells(x: Tensor) -> tuple[Tensor, int, int]:
    """x [N, C, D, H, W], its elements from one cell to the next, and its cells from one row to the next.

    A contiguous copy if these vary. The pitch is W, or W + 1 in a padded cube.
    """
    step, (*_, depth, height, width) = x.stride(4), x.shape
    if x.stride() == (depth * height * width * step, 1, height * width * step, width * step, step):
        return x, step, width
    pitch = width + 1
    if depth == height == width and x.stride() == (pitch**3 * step, 1, pitch**2 * step, pitch * step, step):
        return x, step, pitch
    x = x.contiguous(memory_format=CHANNELS_LAST)
    return x, x.shape[1], width


@triton.jit
def tanh(values):  # type: ignore[no-untyped-def]
    """tanhf of Moshier's Cephes library, because Triton does not have it on every target."""
    square = values * values
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(values)) + 1.0)
    far = tl.where(values < 0, -far, far)
    return tl.where(tl.abs(values) < 0.625, series * square * values + values, far)


@triton.jit
def bias_activation_forward(  # type: ignore[no-untyped-def]
    y,
    x,
    bias,
    skip,
    cells,
    y_stride,
    ACTIVATION: tl.constexpr,
    NEGATIVE_SLOPE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SKIP_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes activation(x + bias) to the first CHANNELS channels of y, and skip to the SKIP_CHANNELS after them."""
    PACKED: tl.constexpr = LANES // WIDTH
    lane = tl.arange(0, LANES)[None, :]
    channel = lane % WIDTH
    cell = tl.program_id(0).to(tl.int64) * (ROWS * PACKED)
    cell += tl.arange(0, ROWS)[:, None] * PACKED + lane // WIDTH
    used = (cell < cells) & (lane < PACKED * WIDTH)
    inside = used & (channel < CHANNELS)
    values = tl.load(x + cell * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    if ACTIVATION == "leaky_relu":
        values = tl.where(values > 0, values, NEGATIVE_SLOPE * values)
    elif ACTIVATION == "relu":
        values = tl.where(values <= 0, 0.0, values)
    else:
        values = tanh(values)
    place = cell * y_stride + channel
    tl.store(y + place, values.to(y.dtype.element_ty), mask=inside)
    if SKIP_CHANNELS > 0:
        inside = used & (channel < SKIP_CHANNELS)
        copied = tl.load(skip + cell * SKIP_CHANNELS + channel, mask=inside, other=0.0)
        tl.store(y + place + CHANNELS, copied, mask=inside)


@triton.jit
def times_slope(gradient, value, ACTIVATION: tl.constexpr, NEGATIVE_SLOPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient times the slope of the activation where its result is `value`."""
    if ACTIVATION == "leaky_relu":
        gradient = tl.where(value > 0, gradient, NEGATIVE_SLOPE * gradient)
    elif ACTIVATION == "relu":
        gradient = tl.where(value <= 0, 0.0, gradient)
    else:
        gradient = gradient * (1.0 - value * value)
    return gradient


@triton.jit
def bias_activation_backward(  # type: ignore[no-untyped-def]
    x_gradient,
    partial,
    y,
    y_stride,
    y_pitch,
    first,
    first_stride,
    first_pitch,
    second,
    second_stride,
    second_pitch,
    cells,
    TWICE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NEGATIVE_SLOPE: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    PITCH: tl.constexpr,
):
    """Writes the gradient of x, and per program a partial sum of the gradient of the bias, [PACKED, CHANNELS].

    With a SIDE, grids are cubes of that side, and each has its own pitch, the cells from row to row and the rows from
    plane to plane; PITCH is that of the gradient of x, whose pads become zero. See padded.py.
    """
    PACKED: tl.constexpr = LANES // CHANNELS
    lane = tl.arange(0, LANES)[None, :]
    channel = lane % CHANNELS
    inner = tl.arange(0, ROWS)[:, None] * PACKED + lane // CHANNELS
    total = tl.full([ROWS, LANES], 0.0, tl.float32)
    start = tl.program_id(0).to(tl.int64) * (ROWS * PACKED)
    while start < cells:
        cell = start + inner
        stored = (cell < cells) & (lane < PACKED * CHANNELS)
        inside = stored
        y_cell, first_cell, second_cell = cell, cell, cell
        if SIDE > 0:
            w, h, d = cell % PITCH, cell // PITCH % PITCH, cell // (PITCH * PITCH) % PITCH
            n = cell // (PITCH * PITCH * PITCH)
            inside = stored & (w < SIDE) & (h < SIDE) & (d < SIDE)
            y_cell = ((n * y_pitch + d) * y_pitch + h) * y_pitch + w
            first_cell = ((n * first_pitch + d) * first_pitch + h) * first_pitch + w
            second_cell = ((n * second_pitch + d) * second_pitch + h) * second_pitch + w
        gradient = tl.load(first + first_cell * first_stride + channel, mask=inside, other=0.0).to(tl.float32)
        if TWICE:
            gradient += tl.load(second + second_cell * second_stride + channel, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + y_cell * y_stride + channel, mask=inside, other=0.0).to(tl.float32)
        gradient = times_slope(gradient, value, ACTIVATION, NEGATIVE_SLOPE)
        place = x_gradient + cell * CHANNELS + channel
        tl.store(place, gradient.to(x_gradient.dtype.element_ty), mask=stored)
        total += gradient
        start += tl.num_programs(0) * (ROWS * PACKED)
    share = partial + tl.program_id(0) * (PACKED * CHANNELS)
    tl.store(share + lane, tl.sum(total, 0)[None, :], mask=lane < PACKED * CHANNELS)
