"""Parts of the kernels of strided convolutions: descriptors of memory, split sums, and places of tiles.

One relation serves the forward passes and all gradients of convolutions with kernel 4, stride 2 and padding 1, and of
their transposes. A coarse grid [N, Cs, D, D, D] and a fine grid [N, Cl, 2D, 2D, 2D], in channels_last_3d memory, belong
together by weights [Cs, Cl, 4, 4, 4]:

    convolve              the coarse grid: a convolution, and the input gradient of a transposed one
    convolve_transposed   the fine grid: a transposed convolution, and the input gradient of a convolution
    weight_gradient       from both grids, for both

In the kernels the channels are the last axis: coarse [N, D, D, D, Cs], fine [N, 2D, 2D, 2D, Cl] and weights
[Cs, 4, 4, 4, Cl]. Tap k of cell i of the coarse grid, along each axis, is cell 2i + k - 1 of the fine one. Cells
outside the grid are zero: a descriptor fills a tile with zeros where it leaves the tensor. D is a power of two. A tile
of coarse cells has BB samples, BD planes, BH rows and complete rows of D cells. Tiles of both factors arrive through
tensor descriptors (TMA).

All sums are float32, in an order that depends on the shapes alone, so results repeat bit for bit. The product of a tile
is computed transposed, because Triton keeps only a reshaped second factor of tl.dot in shared memory on Hopper; a first
one passes through registers.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from networks.ops import padded
from networks.ops.hopper.tiles import BLOCK
from networks.ops.launch import launch


def in_half(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights in dtype and in the memory order that the kernels read."""
    return weight.detach().to(dtype, memory_format=torch.channels_last_3d)


def laid_out(x: Tensor) -> Tensor:
    return x if padded.is_padded(x) else x.contiguous(memory_format=torch.channels_last_3d)


def strides_of(x: Tensor) -> tuple[int, int, int, int]:
    """Elements from one sample, plane, row and cell to the next. x.stride() is arbitrary for axes of size 1."""
    pitch, channels = x.shape[2] + padded.is_padded(x), x.shape[1]
    return pitch**3 * channels, pitch**2 * channels, pitch * channels, channels


def float32(x: Tensor, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=x.device)


def descriptor(x: Tensor, start: int, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> Any:
    """A descriptor of x's memory from element `start` of x on."""
    base = x.as_strided((1,), (1,), x.storage_offset() + start)
    return TensorDescriptor(base, list(shape), list(strides), list(block))


def add_splits(parts: Tensor, out: Tensor, bias: Tensor, slope: float, biased: int, splits: int) -> None:
    """Adds the parts of a split sum, and applies bias and activation."""
    size, block = out.numel(), 16 * BLOCK
    arguments = parts, out, bias, slope, biased, out.shape[1] if biased else 1, size, splits
    launch(sum_splits, -(-size // block), *arguments, BLOCK=block)


@triton.jit
def activated(values, slope):  # type: ignore[no-untyped-def]
    """values where they are positive, otherwise slope × values. NaN passes through, also at slope 0."""
    return tl.where(values <= 0, tl.where(slope == 0, 0.0, slope * values), values)


@triton.jit
def remainder_and_quotient(number, divisor):  # type: ignore[no-untyped-def]
    return number % divisor, number // divisor


@triton.jit
def bits(number):  # type: ignore[no-untyped-def]
    """The three bits of a number below 8, one per axis, the highest first."""
    return number >> 2, (number >> 1) & 1, number & 1


@triton.jit
def cells_of_tile(n0, d0, h0, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sample, plane, row and column of each cell of the tile that begins at these."""
    r = tl.arange(0, BM)
    return n0 + r // (D * BH * BD), d0 + r // (D * BH) % BD, h0 + r // D % BH, r % D


@triton.jit(do_not_specialize=["biased", "channels", "splits"])
def sum_splits(  # type: ignore[no-untyped-def]
    partial, out, bias, slope, biased, channels, size, splits, BLOCK: tl.constexpr
):
    """out = activated(sum of partial [splits, size] in order, plus the bias of the first `biased` channels)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for _ in range(splits):
        total += tl.load(partial + place, mask=inside, other=0.0)
        partial += size
    c = place % channels
    total = activated(total + tl.load(bias + c, mask=c < biased, other=0.0), slope)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
