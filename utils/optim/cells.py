"""Adam's update of a convolution with 4³ cells, for SOAP in a basis along these cells, in one kernel on a GPU."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from networks.ops.launch import launch

CELLS = 64
BLOCK = 64  # second channels in a program
WARPS = 8


def fits(weight: torch.Tensor) -> bool:
    """True if the kernel can update the weight [first, second, 4, 4, 4]."""
    # Moments have the strides of the weight: cells after the first channels, before the second ones.
    return weight.shape[2:].numel() == CELLS and weight.is_contiguous(memory_format=torch.channels_last_3d)


def descend(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    basis: torch.Tensor | None,
    group: Mapping[str, Any],
    idle: torch.Tensor,
) -> None:
    """Updates the weight, the state's moments, and the weight in half precision that its layer uses, if there is one.

    basis: [64, 64], a vector per column; None: Adam itself. state["step"]: the number of this update, from 1 on. No
    update if `idle` > 0. Weight decay is decoupled.
    """
    first, second = weight.shape[:2]
    lr = group["lr"]
    if not isinstance(lr, torch.Tensor):
        lr = torch.full((), lr, device=weight.device)  # by a kernel: a copy from the host would wait
    half = getattr(weight, "half_copy", None)
    gradient = gradient.contiguous(memory_format=torch.channels_last_3d)
    launch(
        adam_of_cells,
        first * -(-second // BLOCK),
        *(weight, gradient, state["exp_avg"], state["exp_avg_sq"]),
        *(weight if part is None else part for part in (half, basis)),
        *(lr, state["step"], idle, *group["betas"], group["eps"], group["weight_decay"], second),
        CELLS=CELLS,
        BLOCK=BLOCK,
        HAS_HALF=half is not None,
        ROTATES=basis is not None,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        num_warps=WARPS,
    )
    if half is not None:
        weight.half_version = weight._version  # type: ignore[attr-defined] # the kernel does not change it


@triton.jit(do_not_specialize=["channels"])
def adam_of_cells(  # type: ignore[no-untyped-def]
    weight, gradient, first, second, half, basis, lr, step, idle, beta1, beta2, eps, decay, channels,
    CELLS: tl.constexpr, BLOCK: tl.constexpr, HAS_HALF: tl.constexpr, ROTATES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: all cells [CELLS, BLOCK] of one first channel and BLOCK second ones."""
    if tl.load(idle) == 0:
        blocks = (channels + BLOCK - 1) // BLOCK
        cell = tl.arange(0, CELLS)[:, None]
        channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
        place = ((tl.program_id(0) // blocks).to(tl.int64) * CELLS + cell) * channels + channel
        inside = (channel < channels) & (cell >= 0)
        values = tl.load(gradient + place, mask=inside, other=0.0)
        if ROTATES:
            vectors = tl.load(basis + cell * CELLS + tl.arange(0, CELLS)[None, :])
            values = tl.dot(tl.trans(vectors), values, input_precision=PRECISION)
        number = tl.maximum(tl.load(step), 1)  # 0 if its first gradient comes later than others'
        mean = tl.load(first + place, mask=inside, other=0.0)
        mean += (1 - beta1) * (values - mean)
        square = beta2 * tl.load(second + place, mask=inside, other=0.0) + (1 - beta2) * values * values
        tl.store(first + place, mean, mask=inside)
        tl.store(second + place, square, mask=inside)
        rate = tl.load(lr)
        scale = tl.sqrt(1 - tl.exp2(number * tl.log2(beta2)))
        direction = rate / (1 - tl.exp2(number * tl.log2(beta1))) * mean / (tl.sqrt(square) / scale + eps)
        if ROTATES:
            direction = tl.dot(vectors, direction, input_precision=PRECISION)
        old = tl.load(weight + place, mask=inside, other=0.0)
        new = old - rate * decay * old - direction
        tl.store(weight + place, new, mask=inside)
        if HAS_HALF:
            tl.store(half + place, new.to(half.dtype.element_ty), mask=inside)
