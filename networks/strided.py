"""Convolutions with kernel 4, stride 2 and padding 1, and their transposes, by own kernels on Hopper GPUs.

One relation serves the forward passes and all gradients. A small grid S [N, Cs, D, D, D] and a large grid
L [N, Cl, 2D, 2D, 2D], in channels_last_3d memory, belong together by weights [Cs, Cl, 4, 4, 4]:

    gather            S from L: a convolution, and the input gradient of a transposed one
    scatter           L from S: a transposed convolution, and the input gradient of a convolution
    weight_gradient   from S and L, for both

All sums are float32, in an order that depends on the shapes alone, so results repeat bit for bit.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from networks import fused, padded

BLOCK = 64  # channels of one step of a sum; channels are multiples of it
LARGEST_SIDE = 64  # of S: a chunk of the weight gradient holds complete rows
PROCESSORS = 132  # multiprocessors of H100 and H200; other GPUs use the same tiles, so that they give the same bits
SHARED_MEMORY = 227 * 1024  # bytes per program that the tiles may need
# Programs that share a sum of gather, by D: small grids have few tiles. Their number is the same for all batch sizes,
# so that a prediction has the same bits with all of them.
GATHER_SPLITS = {1: 16, 2: 8}


class Tile(NamedTuple):
    """Cells (or rows of the weights), columns and summands of a program's tile, and its warps."""

    rows: int
    columns: int
    depth: int
    warps: int = 8


@functools.cache
def kernels() -> Any:
    """The module of the kernels, or None without Triton's tensor descriptors."""
    try:
        from networks import strided_kernels as module
    except ImportError:
        return None
    return module


def unavailable(device: torch.device) -> str:
    """Why no kernel here can run on the device; empty if they can, or if this machine has no GPU to ask."""
    trial = fused.passes_as(device)
    device = device if trial is None else trial.device
    if device.type != "cuda":
        return "there is no CUDA device"
    if not torch.cuda.is_available():
        return ""
    if kernels() is None:
        return "Triton is not installed"
    properties = torch.cuda.get_device_properties(device)
    # Descriptors need compute capability 9. Gaming GPUs above it have less shared memory.
    if properties.major < 9 or getattr(properties, "shared_memory_per_block_optin", 0) < SHARED_MEMORY:
        return f"{properties.name} is not a Hopper GPU or a later one for data centers"
    return ""


def obstacle(small: int, large: int, side: int) -> str:
    """Why the kernels cannot relate grids of these channels, of D = side cells; empty if they can."""
    if small % BLOCK or large % BLOCK:
        return f"{small} and {large} channels are not both multiples of {BLOCK}"
    if side > LARGEST_SIDE or side & (side - 1) or side < 1:
        return f"a side of {side} cells is not a power of two up to {LARGEST_SIDE}"
    return ""


# --- passes ----------------------------------------------------------------------------------------------------------


def gather(
    l: torch.Tensor,  # noqa: E741
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    slope: float = 1.0,
) -> torch.Tensor:
    """S = leaky ReLU of slope `slope` of (the convolution of L + bias); slope 1 is the identity, 0 is ReLU."""
    (samples, large), side, small = l.shape[:2], l.shape[2] // 2, len(w)
    tile = _gather_tile(samples * side**3, small)
    s = torch.empty((samples, small, *[side] * 3), dtype=l.dtype, device=l.device, memory_format=torch.channels_last_3d)
    steps = (8 if side == 1 else 64) * (large // tile.depth)
    per_split = -(-steps // max(1, min(GATHER_SPLITS.get(side, 1), steps // 4)))
    splits = -(-steps // per_split)
    boxes, _, rows = _box(side, tile.rows)
    l = _laid_out(l)  # noqa: E741
    sample, plane, row, _ = _strides(l)
    shape, strides = (samples, 2 * side, side, side, 2 * large), (sample, plane, 2 * row, 2 * large, 1)
    views = [_descriptor(l, odd * row, shape, strides, (boxes, 1, rows, side, tile.depth)) for odd in (0, 1)]
    weights = _descriptor(w, 0, (small, 64 * large), (64 * large, 1), (tile.columns, tile.depth))
    programs = (small // tile.columns) * (side // rows) * side * -(-samples // boxes) * splits
    partial = _float32(l, splits * s.numel() if splits > 1 else 0)
    given = _float32(l, 0) if bias is None else bias
    biased = 0 if bias is None else small
    sizes = {"D": side, "SPLIT": splits > 1, "BB": boxes, "BH": rows}
    arguments = (s, given, partial, slope, biased, per_split, samples, small, large)
    fused.launch(kernels().gather, programs, *views, weights, *arguments, **sizes, **_constants(tile))
    if splits > 1:
        _sum(partial, s, given, slope, biased, splits)
    return s


def scatter(
    s: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    slope: float = 1.0,
    skip: torch.Tensor | None = None,
    pads: bool = False,
) -> torch.Tensor:
    """L = leaky ReLU of slope `slope` of (the transposed convolution of S + bias), concatenated with `skip`.

    pads: the result is padded, see padded.py.
    """
    (samples, small), side, large = s.shape[:2], s.shape[2], w.shape[1]
    # Tiles of BLOCK columns leave tensor cores idle: then a program computes pairs of planes.
    planes = 2 if large % (2 * BLOCK) and side > 2 else 1
    tile = _scatter_tile(samples * side**3, planes * large, 8 // planes)
    boxes, depth, rows = _box(side, tile.rows, planes=1 if planes == 2 else side)
    channels = large + (0 if skip is None else skip.shape[1])
    shape = (samples, channels, *[2 * side] * 3)
    out = padded.empty(shape, s.dtype, s.device, pads)
    if pads:
        padded.zero_pads(out)
    s = _laid_out(s)
    sample, plane, row, cell = _strides(s)
    view = _descriptor(
        s, 0, (samples, *[side] * 3, small), (sample, plane, row, cell, 1), (boxes, depth, rows, side, tile.depth)
    )
    if planes == 2:
        packed = w.permute(0, 2, 3, 4, 1).unflatten(1, (2, 2)).permute(1, 3, 4, 0, 2, 5).contiguous()
        weights = _descriptor(packed, 0, (32 * small, 2 * large), (2 * large, 1), (tile.depth, tile.columns))
    else:
        weights = _descriptor(w, 0, (small, 64 * large), (64 * large, 1), (tile.depth, tile.columns))
    tiles = (side // rows) * (side // depth if planes == 1 else side + 1) * -(-samples // boxes)
    programs = 8 // planes * (planes * large // tile.columns) * tiles
    given = _float32(s, 0) if bias is None else bias
    copied = out if skip is None else _laid_out(skip)
    pitches = [2 * side + padded.is_padded(grid) for grid in (out, copied)]
    arguments = (out, given, copied, slope, 0 if bias is None else large, channels - large, channels, *pitches)
    sizes = {"D": side, "PLANES": planes, "BB": boxes, "BD": depth, "BH": rows}
    fused.launch(
        kernels().scatter, programs, view, weights, *arguments, samples, small, large, **sizes, **_constants(tile)
    )
    return out


def weight_gradient(s: torch.Tensor, l: torch.Tensor) -> torch.Tensor:  # noqa: E741
    """The float32 gradient [Cs, Cl, 4, 4, 4] of the weights, in channels_last_3d memory."""
    (samples, small), side, large = s.shape[:2], s.shape[2], l.shape[1]
    runs = large == BLOCK  # a tile of all four taps along a row needs zero cells between rows
    l = padded.padded(l) if runs else _laid_out(l)  # noqa: E741
    tile = _weight_tile(small, large, runs)
    boxes, depth, rows = _box(side, tile.depth, planes=side)
    chunks = -(-samples * side**3 // tile.depth)
    splits = _splits((small // tile.rows) * (64 * large // tile.columns), chunks)
    per_split = -(-chunks // splits)
    splits = -(-chunks // per_split)
    s = s.contiguous(memory_format=torch.channels_last_3d)
    view = _descriptor(s, 0, (samples * side**3, small), (small, 1), (tile.depth, tile.rows))
    sample, plane, row, _ = _strides(l)
    shape = (samples, side, side, side, (4 if runs else 2) * large)
    strides, block = (sample, 2 * plane, 2 * row, 2 * large, 1), (boxes, depth, rows, side, tile.columns)
    starts = [d * plane + h * row - (large if runs else 0) for d in (0, 1) for h in (0, 1)]
    views = [_descriptor(l, start, shape, strides, block) for start in starts]
    gradient = _float32(s, small * 64 * large)
    parts = _float32(s, splits * gradient.numel()) if splits > 1 else gradient
    programs = (small // tile.rows) * (64 * large // tile.columns) * splits
    sizes = {"D": side, "RUNS": runs, "BB": boxes, "BD": depth, "BH": rows}
    arguments = (view, *views, parts, chunks, per_split, small, large)
    fused.launch(kernels().weight_gradient, programs, *arguments, **sizes, **_constants(tile))
    if splits > 1:
        _sum(parts, gradient, _float32(s, 0), 1.0, 0, splits)
    return gradient.view(small, 4, 4, 4, large).permute(0, 4, 1, 2, 3)


def _sum(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor, slope: float, biased: int, splits: int) -> None:
    """Adds the parts of a split sum, and applies bias and activation."""
    size, block = out.numel(), 16 * BLOCK
    arguments = parts, out, bias, slope, biased, out.shape[1] if biased else 1, size, splits
    fused.launch(kernels().sum_splits, -(-size // block), *arguments, BLOCK=block)


def in_half(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights in dtype and in the memory order that the kernels read."""
    return weight.detach().to(dtype, memory_format=torch.channels_last_3d)


# --- tiles: they depend on shapes alone ------------------------------------------------------------------------------


def _gather_tile(cells: int, small: int) -> Tile:
    columns = math.gcd(2 * BLOCK, small)  # the largest power of two up to 2 BLOCK that divides the channels
    for rows in (4 * BLOCK, 2 * BLOCK):
        if -(-cells // rows) * (small // columns) >= PROCESSORS * 2 // 3:
            return Tile(rows, columns, BLOCK)
    return Tile(2 * BLOCK if cells > BLOCK else BLOCK, columns, BLOCK)


def _scatter_tile(cells: int, channels: int, classes: int) -> Tile:
    columns = math.gcd(2 * BLOCK, channels)
    if classes * -(-cells // (4 * BLOCK)) * (channels // columns) >= PROCESSORS * 2 // 3:
        return Tile(4 * BLOCK, columns, BLOCK)
    return Tile(2 * BLOCK, columns, BLOCK, warps=4) if cells > BLOCK else Tile(BLOCK, BLOCK, BLOCK, warps=4)


def _weight_tile(small: int, large: int, runs: bool) -> Tile:
    columns = 4 * large if runs else math.gcd(4 * BLOCK, large)
    return Tile(math.gcd(2 * BLOCK if columns > 2 * BLOCK else 4 * BLOCK, small), columns, BLOCK)


def _splits(tiles: int, chunks: int) -> int:
    """Number of programs for the sum of a tile: rounds of all processors are full, and a program has 16 chunks."""

    def score(count: int) -> float:
        rounds = tiles * count / PROCESSORS
        return rounds / math.ceil(rounds) - 0.004 * count

    return max(range(1, max(1, min(64, chunks // 16)) + 1), key=score)


def _box(side: int, cells: int, planes: int = 1) -> tuple[int, int, int]:
    """Samples, planes and complete rows of a tile of that many cells; at most `planes` planes of a sample."""
    rows = min(side, cells // side)
    depth = min(planes, side, cells // side // rows)
    return cells // side // rows // depth, depth, rows


# --- memory ----------------------------------------------------------------------------------------------------------


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    return x if padded.is_padded(x) else x.contiguous(memory_format=torch.channels_last_3d)


def _strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Elements from one sample, plane, row and cell to the next. x.stride() is arbitrary for axes of size 1."""
    pitch, channels = x.shape[2] + padded.is_padded(x), x.shape[1]
    return pitch**3 * channels, pitch**2 * channels, pitch * channels, channels


def _float32(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float32, device=x.device)


def _descriptor(x: torch.Tensor, start: int, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> Any:
    """A descriptor of x's memory from element `start` of x on."""
    base = x.as_strided((1,), (1,), x.storage_offset() + start)
    return kernels().TensorDescriptor(base, list(shape), list(strides), list(block))


def _constants(tile: Tile) -> dict[str, int]:
    sizes = {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth}
    return {**sizes, "num_warps": tile.warps, "num_stages": 4}
