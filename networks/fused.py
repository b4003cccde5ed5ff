"""What lies between the convolutions, in one Triton kernel each: bias, activation, concatenation, and the L1 loss.

The kernels take channels_last_3d tensors on CUDA, which in memory are matrices [cells, channels]. For all others (on
the CPU, in another layout, float64, without triton), and under torch.compile and torch.jit.trace, which fuse by
themselves what they can look into, the same functions do the same with torch's operations.

A convolution keeps its input for the backward pass, not its output; the activations keep their outputs alone, which
tell the slopes and are the next convolution's inputs anyway. Sums are taken in float32, values rounded once. What is
summed over cells is summed by a fixed number of programs and then over the programs: always in the same order.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

NEGATIVE_SLOPE = 0.01
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A program's tile: so many lanes, filled with whole cells, and so many elements in all, 16 for each of its threads.
LANES, TILE, WARPS = 256, 2048, 4
# Programs that share a sum over all cells: eight for each multiprocessor of an H100 or H200.
PROGRAMS = 1056

Activation = Literal["leaky_relu", "relu", "tanh"]
Context = Any  # torch.autograd's, on which a function keeps what it likes


def bias_activation(x: torch.Tensor, bias: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(x + bias) in x's dtype, for x [N, C, D, H, W] and bias [C]."""
    return bias_activation_twice(x, bias, activation)[0]


def bias_activation_twice(
    x: torch.Tensor, bias: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bias_activation` for two uses: their gradients are added in the activation's own backward kernel."""
    if _fusible(x):
        return _BiasActivation.apply(x, bias, activation)
    # A float32 bias makes the sum float32 even under autocast.
    total = x + bias.view(-1, 1, 1, 1)
    if activation == "leaky_relu":
        y = F.leaky_relu(total, NEGATIVE_SLOPE)
    else:
        y = F.relu(total) if activation == "relu" else torch.tanh(total)
    y = y.to(x.dtype)
    return y, y


def bias_relu_cat(x: torch.Tensor, bias: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    """cat([relu(x + bias), skip], 1) in x's dtype."""
    if _fusible(x, skip):
        return _BiasReluCat.apply(x, bias, skip)
    return torch.cat([bias_activation(x, bias, "relu"), skip], dim=1)


def l1(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean |outputs - targets|, a float32 scalar (float64 for float64 outputs)."""
    if _fusible(outputs) and _fusible(targets) and outputs.shape == targets.shape and not targets.requires_grad:
        return _L1.apply(outputs, targets)
    # Half precision would round the difference to about a tenth of the loss to be reached.
    outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
    return (outputs - targets).abs().mean()


def _fusible(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can take these together."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return _kernels() is not None and all(
        _on_gpu(x)
        and x.dtype in DTYPES
        and x.dtype == tensors[0].dtype
        and x.is_contiguous(memory_format=torch.channels_last_3d)
        and x.numel() > 0
        for x in tensors
    )


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


# --- autograd ------------------------------------------------------------------------------------------------------


class _BiasActivation(torch.autograd.Function):
    """Writes new memory: x is free as soon as nobody else holds it, and whoever does finds it as it was."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, bias: torch.Tensor, activation: Activation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.empty_like(x)
        _activation(y, x, bias, activation)
        ctx.save_for_backward(y)
        ctx.activation, ctx.bias_dtype = activation, bias.dtype
        # A use that the loss does not depend on has no gradient, not one of zeros.
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (y,) = ctx.saved_tensors
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return None, None, None
        x_gradient, bias_gradient = _activation_backward(y, given, ctx.activation)
        return x_gradient, bias_gradient.to(ctx.bias_dtype), None


class _BiasReluCat(torch.autograd.Function):
    """The skip's gradient is a view of the concatenation's: whoever takes it reads it with its strides."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, bias: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        shape = (x.shape[0], x.shape[1] + skip.shape[1], *x.shape[2:])
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)
        _activation(y, x, bias, "relu", skip)
        ctx.save_for_backward(y)
        ctx.channels, ctx.bias_dtype = x.shape[1], bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (y,) = ctx.saved_tensors
        channels = ctx.channels
        x_gradient, bias_gradient = _activation_backward(y[:, :channels], [gradient[:, :channels]], "relu")
        return x_gradient, bias_gradient.to(ctx.bias_dtype), gradient[:, channels:]


def _activation(
    y: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, activation: Activation, skip: torch.Tensor | None = None
) -> None:
    """Writes activation(x + bias) to the first channels of y, and skip to the others."""
    channels, skip_channels = x.shape[1], 0 if skip is None else skip.shape[1]
    cells, width = x.numel() // channels, max(channels, skip_channels)
    tile = _Tile.of(width)
    _launch(
        _kernels().bias_activation,
        tile.count(cells),
        y,
        x,
        bias,
        x if skip is None else skip,
        cells,
        channels + skip_channels,
        ACTIVATION=activation,
        NEGATIVE_SLOPE=NEGATIVE_SLOPE,
        CHANNELS=channels,
        SKIP_CHANNELS=skip_channels,
        WIDTH=width,
        LANES=tile.lanes,
        ROWS=tile.rows,
    )


def _activation_backward(
    y: torch.Tensor, gradients: list[torch.Tensor], activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """From outputs y and the gradients of their one or two uses: the gradients of x, in y's dtype, and of the bias."""
    channels = y.shape[1]
    cells = y.numel() // channels
    tile = _Tile.of(channels)
    programs = min(tile.count(cells), PROGRAMS)
    x_gradient = torch.empty(y.shape, dtype=y.dtype, device=y.device, memory_format=torch.channels_last_3d)
    partial = torch.empty((programs * tile.packed, channels), dtype=torch.float32, device=y.device)
    (first, first_stride), (second, second_stride) = _by_cells(gradients[0]), _by_cells(gradients[-1])
    _launch(
        _kernels().activation_backward,
        programs,
        x_gradient,
        partial,
        *_by_cells(y),
        first,
        first_stride,
        second,
        second_stride,
        cells,
        TWICE=len(gradients) == 2,
        ACTIVATION=activation,
        NEGATIVE_SLOPE=NEGATIVE_SLOPE,
        CHANNELS=channels,
        LANES=tile.lanes,
        ROWS=tile.rows,
    )
    return x_gradient, partial.sum(0)


class _L1(torch.autograd.Function):
    """Works on the elements in memory's order, which is the same for both tensors."""

    @staticmethod
    def forward(ctx: Context, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        count = outputs.numel()
        programs = min(-(-count // TILE), PROGRAMS)
        partial = torch.empty(programs, dtype=torch.float32, device=outputs.device)
        _launch(_kernels().l1, programs, partial, outputs, targets, count, TILE=TILE)
        ctx.save_for_backward(outputs, targets)
        return partial.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        outputs, targets = ctx.saved_tensors
        count = outputs.numel()
        outputs_gradient = torch.empty_like(outputs)
        _launch(
            _kernels().l1_backward,
            -(-count // TILE),
            outputs_gradient,
            outputs,
            targets,
            gradient,  # stays on the device: a step must not wait for it, nor could a CUDA graph
            count,
            TILE=TILE,
        )
        return outputs_gradient, None


# --- launching -----------------------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """`rows` of `lanes`; each row holds `packed` cells, and what is left of it stays idle."""

    lanes: int
    rows: int
    packed: int

    @classmethod
    def of(cls, channels: int) -> _Tile:
        lanes = max(LANES, 1 << (channels - 1).bit_length())
        return cls(lanes, max(TILE // lanes, 1), lanes // channels)

    def count(self, cells: int) -> int:
        """How many of these tiles hold so many cells."""
        return -(-cells // (self.rows * self.packed))


def _by_cells(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x with the step from cell to cell in memory, or a copy of it where there is no one step."""
    step = cell_stride(x)
    return (x, step) if step is not None else (x.contiguous(memory_format=torch.channels_last_3d), x.shape[1])


def cell_stride(x: torch.Tensor) -> int | None:
    """Elements from one cell of x [N, C, D, H, W] to the next; None where it varies or channels are no neighbours."""
    if x.shape[1] > 1 and x.stride(1) != 1:
        return None
    # From the fastest axis to the slowest; where an axis has one cell its stride says nothing.
    axes = [(x.shape[axis], x.stride(axis)) for axis in (4, 3, 2, 0) if x.shape[axis] > 1]
    if not axes:
        return x.shape[1]
    first = run = axes[0][1]
    for size, stride in axes:
        if stride != run:
            return None
        run = size * stride
    return first


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    # Triton 3.9 warns where it is not told about fusing, and without it the results are the interpreter's.
    kernel[(programs,)](*arguments, **constants, num_warps=WARPS, enable_fp_fusion=False)


# --- on the device -------------------------------------------------------------------------------------------------


@functools.cache
def _kernels() -> Any:
    """The kernels by name, or None without triton; made when first used: it comes with CUDA builds of torch alone."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    # What counts cells or elements is int64: 128 channels of 32³ cells pass 2^31 from batch 512 on. NaN passes through
    # every activation: a training that has gone astray is to be seen.
    @triton.jit
    def bias_activation(  # type: ignore[no-untyped-def]
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
            # Triton has no tanh on every target: this is tanhf of Moshier's Cephes library.
            square = values * values
            series = -5.70498872745e-3 * square + 2.06390887954e-2
            series = series * square - 5.37397155531e-2
            series = series * square + 1.33314422036e-1
            series = series * square - 3.33332819422e-1
            far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(values)) + 1.0)
            far = tl.where(values < 0, -far, far)
            values = tl.where(tl.abs(values) < 0.625, series * square * values + values, far)
        tl.store(y + cell * y_stride + channel, values.to(y.dtype.element_ty), mask=inside)
        if SKIP_CHANNELS > 0:
            inside = used & (channel < SKIP_CHANNELS)
            copied = tl.load(skip + cell * SKIP_CHANNELS + channel, mask=inside, other=0.0)
            tl.store(y + cell * y_stride + (channel + CHANNELS), copied, mask=inside)

    @triton.jit
    def activation_backward(  # type: ignore[no-untyped-def]
        x_gradient,
        partial,
        y,
        y_stride,
        first,
        first_stride,
        second,
        second_stride,
        cells,
        TWICE: tl.constexpr,
        ACTIVATION: tl.constexpr,
        NEGATIVE_SLOPE: tl.constexpr,
        CHANNELS: tl.constexpr,
        LANES: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        PACKED: tl.constexpr = LANES // CHANNELS
        lane = tl.arange(0, LANES)[None, :]
        channel = lane % CHANNELS
        inner = tl.arange(0, ROWS)[:, None] * PACKED + lane // CHANNELS
        total = tl.full([ROWS, LANES], 0.0, tl.float32)
        start = tl.program_id(0).to(tl.int64) * (ROWS * PACKED)
        while start < cells:
            cell = start + inner
            inside = (cell < cells) & (lane < PACKED * CHANNELS)
            gradient = tl.load(first + cell * first_stride + channel, mask=inside, other=0.0).to(tl.float32)
            if TWICE:
                gradient += tl.load(second + cell * second_stride + channel, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(y + cell * y_stride + channel, mask=inside, other=0.0).to(tl.float32)
            if ACTIVATION == "leaky_relu":
                gradient = tl.where(value > 0, gradient, NEGATIVE_SLOPE * gradient)
            elif ACTIVATION == "relu":
                gradient = tl.where(value <= 0, 0.0, gradient)
            else:
                gradient = gradient * (1.0 - value * value)
            place = x_gradient + cell * CHANNELS + channel
            tl.store(place, gradient.to(x_gradient.dtype.element_ty), mask=inside)
            total += gradient
            start += tl.num_programs(0) * (ROWS * PACKED)
        # A program's share: [PACKED, CHANNELS].
        share = partial + tl.program_id(0) * (PACKED * CHANNELS)
        tl.store(share + lane, tl.sum(total, 0)[None, :], mask=lane < PACKED * CHANNELS)

    @triton.jit
    def l1(partial, outputs, targets, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        total = tl.full([TILE], 0.0, tl.float32)
        start = tl.program_id(0).to(tl.int64) * TILE
        while start < count:
            place = start + tl.arange(0, TILE)
            inside = place < count
            output = tl.load(outputs + place, mask=inside, other=0.0).to(tl.float32)
            total += tl.abs(output - tl.load(targets + place, mask=inside, other=0.0).to(tl.float32))
            start += tl.num_programs(0) * TILE
        tl.store(partial + tl.program_id(0), tl.sum(total, 0))

    @triton.jit
    def l1_backward(outputs_gradient, outputs, targets, gradient, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < count
        output = tl.load(outputs + place, mask=inside, other=0.0).to(tl.float32)
        difference = output - tl.load(targets + place, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(gradient).to(tl.float32) / count
        # The last is 0, or NaN with a loss that is: by the comparisons alone a NaN would pass for no difference.
        signed = tl.where(difference > 0, share, tl.where(difference < 0, -share, 0.0 * share))
        tl.store(outputs_gradient + place, signed.to(outputs_gradient.dtype.element_ty), mask=inside)

    return _Kernels(bias_activation, activation_backward, l1, l1_backward)


class _Kernels(NamedTuple):
    """Triton's functions, to be launched by `_launch`."""

    bias_activation: Any
    activation_backward: Any
    l1: Any
    l1_backward: Any
