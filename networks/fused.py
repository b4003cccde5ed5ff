"""Fused operations between the convolutions, one Triton kernel each: bias, activation, concatenation, and the L1 loss.

The kernels need channels_last_3d tensors on CUDA, whose memory is a matrix [cells, channels]. For all other tensors (on
the CPU, in another layout, float64, without Triton), and under torch.compile, which fuses operations itself, the same
functions use torch's operations.

For the backward pass a convolution keeps its input, not its output. The activations keep only their outputs, which
determine the slopes and are kept by the next convolution anyway. Sums are computed in float32, and results are rounded
once. Each sum over cells is split among a fixed number of programs, whose partial sums are added in a fixed order.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from networks import padded

NEGATIVE_SLOPE = 0.01
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A program's tile: the lanes in a row, which hold complete cells, and all elements, 16 per thread, or 4; see _Tile.
LANES, TILE, WARPS = 256, 2048, 4
# Programs that share a sum over all cells: eight per multiprocessor of an H100 or H200.
PROGRAMS = 1056

Activation = Literal["leaky_relu", "relu", "tanh"]


def bias_activation(x: torch.Tensor, bias: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(x + bias) in x's dtype, for x [N, C, D, H, W] and bias [C]."""
    return bias_activation_twice(x, bias, activation)[0]


def bias_activation_twice(
    x: torch.Tensor, bias: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bias_activation` for two uses of its result, whose gradients the backward kernel adds."""
    if _repeats(x) and fusible(x):
        return _BiasActivation.apply(x, bias, None, activation)
    # A float32 bias makes the sum float32, under autocast too.
    total = x + bias.view(-1, 1, 1, 1)
    if activation == "leaky_relu":
        y = F.leaky_relu(total, NEGATIVE_SLOPE)
    else:
        y = F.relu(total) if activation == "relu" else torch.tanh(total)
    y = y.to(x.dtype)
    return y, y


def bias_relu_cat(x: torch.Tensor, bias: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    """cat([relu(x + bias), skip], 1) in x's dtype."""
    if _repeats(x) and fusible(x, skip):
        return _BiasActivation.apply(x, bias, skip, "relu")[0]
    return torch.cat([bias_activation(x, bias, "relu"), skip], dim=1)


def l1(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean |outputs - targets| as a float32 scalar; float64 for float64 outputs."""
    if fusible(outputs) and fusible(targets) and outputs.shape == targets.shape and not targets.requires_grad:
        return _L1.apply(outputs, targets)
    return (at_least_float32(outputs) - targets).abs().mean()


def at_least_float32(outputs: torch.Tensor) -> torch.Tensor:
    """Half precision would round differences by about a tenth of the loss of a trained network."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


def fusible(*tensors: torch.Tensor) -> bool:
    """True if a kernel can process these tensors together."""
    if torch.compiler.is_compiling() or kernels() is None:
        return False
    return all(
        _on_gpu(x)
        and x.dtype in DTYPES
        and x.dtype == tensors[0].dtype
        and x.is_contiguous(memory_format=torch.channels_last_3d)
        and x.numel() > 0
        for x in tensors
    )


def _repeats(x: torch.Tensor) -> bool:
    """False for one channel, for which repeated calls on an H200 gave different bits."""
    return x.shape[1] > 1


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda or passes_as(x) is not None


# --- autograd ------------------------------------------------------------------------------------------------------


class _BiasActivation(torch.autograd.Function):
    """activation(x + bias), concatenated with `skip` if that is given; returned twice, for two uses.

    Allocates its result, so that x is unchanged, and freed if nothing else refers to it. The gradient of `skip` is a
    strided view of the result's gradient, not a copy.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, skip: torch.Tensor | None, activation: Activation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        channels, skip_channels = x.shape[1], 0 if skip is None else skip.shape[1]
        shape = (x.shape[0], channels + skip_channels, *x.shape[2:])
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)
        cells, width = x.numel() // channels, max(channels, skip_channels)
        tile = _Tile.of(width)
        arguments = (y, x, bias, x if skip is None else skip, cells, channels + skip_channels)
        sizes = {"CHANNELS": channels, "SKIP_CHANNELS": skip_channels, "WIDTH": width, **tile.sizes()}
        slopes: dict[str, Any] = {"ACTIVATION": activation, "NEGATIVE_SLOPE": NEGATIVE_SLOPE}
        launch(kernels().bias_activation, tile.count(cells), *arguments, **sizes, **slopes)
        ctx.save_for_backward(y)
        ctx.channels, ctx.activation = channels, activation
        # A result that the loss does not depend on gets None as its gradient instead of zeros.
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        channels, (y,) = ctx.channels, ctx.saved_tensors
        given = [gradient for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 4
        x_gradient, bias_gradient = activation_gradient(y, given, ctx.activation, channels)
        skip_gradient = given[0][:, channels:] if channels < y.shape[1] else None
        return x_gradient, bias_gradient, skip_gradient, None


def activation_gradient(
    y: torch.Tensor, given: Sequence[torch.Tensor], activation: Activation, channels: int, pads: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
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
    launch(kernels().activation_backward, programs, *arguments, TWICE=len(given) == 2, **sizes, **slopes)
    return x_gradient, partial.sum(0)


class _L1(torch.autograd.Function):
    """Processes the elements in memory order, which is the same for both tensors."""

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        count = outputs.numel()
        programs = min(-(-count // TILE), PROGRAMS)
        partial = torch.empty(programs, dtype=torch.float32, device=outputs.device)
        launch(kernels().l1, programs, partial, outputs, targets, count, TILE=TILE)
        ctx.save_for_backward(outputs, targets)
        return partial.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        outputs, targets = ctx.saved_tensors
        count = outputs.numel()
        outputs_gradient = torch.empty_like(outputs)
        # `gradient` stays on the device: the host must not wait for it, and a CUDA graph could not.
        arguments = (outputs_gradient, outputs, targets, gradient, count)
        launch(kernels().l1_backward, -(-count // TILE), *arguments, TILE=TILE)
        return outputs_gradient, None


@functools.cache
def kernels() -> Any:
    """The module of the kernels, or None without Triton."""
    try:
        from networks import kernels as module
    except ImportError:
        return None
    return module


# --- launching -----------------------------------------------------------------------------------------------------


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
        """The kernels' constants."""
        return {"LANES": self.lanes, "ROWS": self.rows}

    def count(self, cells: int) -> int:
        """The number of tiles that hold `cells`."""
        return -(-cells // (self.rows * self.packed))


def _by_cells(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """x [N, C, D, H, W], its elements from one cell to the next, and its cells from one row to the next.

    A contiguous copy if these vary. The pitch is W, or W + 1 in a padded cube.
    """
    step, (*_, depth, height, width) = x.stride(4), x.shape
    if x.stride() == (depth * height * width * step, 1, height * width * step, width * step, step):
        return x, step, width
    pitch = width + 1
    if depth == height == width and x.stride() == (pitch**3 * step, 1, pitch**2 * step, pitch * step, step):
        return x, step, pitch
    x = x.contiguous(memory_format=torch.channels_last_3d)
    return x, x.shape[1], width


class Launch(NamedTuple):
    """A kernel, its arguments and its constants and options."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class DryRun(NamedTuple):
    """Meta tensors pass as tensors on `device` under autocast to `dtype`; launches are noted instead of made."""

    device: torch.device
    dtype: torch.dtype | None
    launches: list[Launch]


_dry_run: DryRun | None = None


@contextlib.contextmanager
def dry_run(device: torch.device, dtype: torch.dtype | None) -> Iterator[list[Launch]]:
    """Context of a DryRun; yields its launches."""
    global _dry_run
    _dry_run = DryRun(device, dtype, [])
    try:
        yield _dry_run.launches
    finally:
        _dry_run = None


def passes_as(x: torch.Tensor | torch.device) -> DryRun | None:
    """The dry run in which the meta tensor, or device, passes as another one."""
    device = x.device if isinstance(x, torch.Tensor) else x
    return _dry_run if device.type == "meta" else None


def fake(real: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """The fake implementation of an operator: `shapes`, but `real` in a dry run."""
    return lambda x, *others: (real if passes_as(x) else shapes)(x, *others)


def signature(launch: Launch) -> tuple[Any, ...]:
    """A launch as Triton compiles kernels for it: types, block shapes, multiples of 16, ones and constants."""
    return launch.kernel, *map(_kind, launch.arguments), *sorted(launch.options.items())


def _kind(argument: Any) -> Any:
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return (argument.base.dtype, *argument.block_shape) if hasattr(argument, "block_shape") else type(argument)


def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = WARPS, **constants: Any) -> None:
    # Without multiply-add fusion the results equal the interpreter's. Triton 3.9 warns if the option is missing.
    options = {**constants, "num_warps": num_warps, "enable_fp_fusion": False}
    if _dry_run is not None:
        _dry_run.launches.append(Launch(kernel, arguments, options))
    else:
        kernel[(programs,)](*arguments, **options)
