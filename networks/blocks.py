"""Convolutions with kernel 4, stride 2 and padding 1 whose larger grid has few channels, by own kernels on Hopper GPUs.

One relation serves the forward passes and all gradients of the first and the last layer of a U-Net. Rows
S [N, Cs, D, D, D], padded as in padded.py, and cells [N, C, 2D, 2D, 2D], which blocks B [N, 8C, D + 1, D + 1, D + 1]
contain (see space_to_depth.py), belong together by weights [Cs, C, 4, 4, 4]:

    rows_to_cells     cells from S: a transposed convolution, and the input gradient of a convolution
    blocks_to_rows    S from B: a convolution, and the input gradient of a transposed one
    weight_gradient   from S and B, for both

All sums are float32, in an order that depends on the shapes alone, so results repeat bit for bit.
"""

import math
from typing import Any

import torch
from torch.library import custom_op

from networks import fused, padded
from networks.strided import BLOCK, PROCESSORS

MOST_CHANNELS = 8
MOST_ELEMENTS = 2**30  # of a sample's cells: their addresses within a tile are int32
# Rows of a tile of rows_to_blocks and of blocks_to_rows; rows of a chunk of the weight gradient. Two programs fit into
# a multiprocessor, so that one computes while the other one loads or writes.
ROWS, OUTPUT_ROWS, CHUNK = 128, 128, 64
# The axes of weights [Cs, C, a, r, a, r, a, r], for tap 2a + r of part r, as the kernels read them.
TO_BLOCKS, TO_ROWS = (3, 5, 7, 1, 2, 4, 6, 0), (2, 4, 0, 6, 3, 5, 7, 1)


def obstacle(small: int, few: int, side: int) -> str:
    """Why the kernels cannot relate rows of `small` channels, D = side, and cells of `few`; empty if they can."""
    if small % BLOCK:
        return f"{small} channels are not a multiple of {BLOCK}"
    return "" if 8 * side**3 * few < MOST_ELEMENTS else f"a grid of {2 * side}³ cells is too large"


def kernels() -> Any:
    from networks import block_kernels

    return block_kernels


# --- passes ----------------------------------------------------------------------------------------------------------


def rows_to_cells(rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The transposed convolution; float32 cells of bfloat16 rows are computed in float16, see layers.py."""
    cells = _empty_cells(rows, weight, dtype)
    _rows_to_blocks(padded.padded(rows), weight, dtype, cells)
    return cells


def tail(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """sum |tanh(cells + bias) - targets|, and its gradients: that of the blocks in the rows' dtype, and the bias's."""
    count, few, pitch, part = len(rows), len(bias), rows.shape[2] + 1, kernels().PART.value
    assert targets.shape == (count, few, *[2 * pitch - 2] * 3)
    shape = (count, 8 * few, *[pitch] * 3)
    gradient = torch.empty(shape, dtype=rows.dtype, device=rows.device, memory_format=torch.channels_last_3d)
    parts = -(-count * pitch**3 // ROWS) * (ROWS // part)
    sums = torch.empty((parts, 2, 8 * MOST_CHANNELS), dtype=torch.float32, device=rows.device)
    out = _matrix(gradient, count * pitch**3, 8 * few, 8 * few, part, 16)
    _rows_to_blocks(rows, weight, torch.float32, out, bias, targets, sums)
    total, bias_gradient = sums[..., : 8 * few].sum(0)
    return total.sum(), gradient, bias_gradient.view(8, few).sum(0).to(bias.dtype)


def _rows_to_blocks(
    rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, out: Any, *tail: torch.Tensor
) -> None:
    """Launches the kernel. out: cells, or with bias, targets and sums a descriptor of blocks."""
    (small, few), pitch, cells = weight.shape[:2], rows.shape[2] + 1, len(rows) * (rows.shape[2] + 1) ** 3
    precise = rows.dtype == torch.bfloat16 and dtype == torch.float32
    packed = _packed(weight, TO_BLOCKS, torch.float16 if precise else rows.dtype)
    s = _matrix(padded.with_pads(rows), cells, small, small, ROWS, BLOCK)
    w = _matrix(packed, 8 * few, 8 * small, 8 * small, _power_of_two(8 * few), BLOCK)
    arguments = (s, w, out, *(tail or [None] * 3), cells, small)
    options = {"PITCH": pitch, "CHANNELS": few, "num_warps": 4, "num_stages": 3}
    fused.launch(kernels().rows_to_blocks, -(-cells // ROWS), *arguments, **options)


def blocks_to_rows(
    blocks: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, slope: float = 1.0
) -> torch.Tensor:
    """Padded rows: leaky ReLU of slope `slope` of (the convolution + bias); slope 1 is the identity."""
    (small, few), pitch, cells = weight.shape[:2], blocks.shape[2], len(blocks) * blocks.shape[2] ** 3
    rows, columns = _empty_rows(blocks, weight), math.gcd(small, 2 * BLOCK)
    packed = _packed(weight, TO_ROWS, blocks.dtype)
    out = _matrix(padded.with_pads(rows), cells, small, small, OUTPUT_ROWS, columns)
    views = [*_runs(blocks, OUTPUT_ROWS), *_parts(packed, 4 * small, 16 * few, 16 * few, columns)]
    arguments = (*views, out, packed if bias is None else bias, slope, 0 if bias is None else small, small)
    programs = small // columns * -(-cells // OUTPUT_ROWS)
    fused.launch(kernels().blocks_to_rows, programs, *arguments, PITCH=pitch, num_warps=4, num_stages=2)
    return rows


def weight_gradient(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The float32 gradient [Cs, C, 4, 4, 4] of the weights, in channels_last_3d memory."""
    rows, small, pitch, cells = padded.padded(rows), rows.shape[1], blocks.shape[2], len(blocks) * blocks.shape[2] ** 3
    tile, chunks = math.gcd(small, 2 * BLOCK), -(-cells // CHUNK)
    tiles = 2 * small // tile
    per_split = -(-chunks // max(1, min(2 * PROCESSORS // tiles, chunks // 16)))
    parts = _empty_weights(rows, blocks, -(-chunks // per_split))
    s = _matrix(padded.with_pads(rows), cells, small, small, CHUNK, tile)
    arguments = (s, *_runs(blocks, CHUNK), parts, chunks, per_split, small)
    options = {"PITCH": pitch, "CHANNELS": parts.shape[-1], "num_warps": tile // 16, "num_stages": 3}
    fused.launch(kernels().block_weight_gradient, tiles * len(parts), *arguments, **options)
    return parts.sum(0).permute(0, 4, 1, 2, 3)


# --- memory ----------------------------------------------------------------------------------------------------------


def _empty_cells(rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    shape = (len(rows), weight.shape[1], *(2 * side for side in rows.shape[2:]))
    return torch.empty(shape, dtype=dtype, device=rows.device, memory_format=torch.channels_last_3d)


def _empty_rows(blocks: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return padded.empty((len(blocks), len(weight), *[blocks.shape[2] - 1] * 3), blocks.dtype, blocks.device)


def _empty_weights(rows: torch.Tensor, blocks: torch.Tensor, splits: int = 1) -> torch.Tensor:
    shape = (splits, rows.shape[1], 4, 4, 4, blocks.shape[1] // 8)
    return torch.empty(shape, dtype=torch.float32, device=rows.device)


def _packed(weight: torch.Tensor, order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Contiguous weights in this order of axes, copied once."""
    axes = weight.unflatten(4, (2, 2)).unflatten(3, (2, 2)).unflatten(2, (2, 2)).permute(order)
    return axes.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _matrix(memory: torch.Tensor, rows: int, columns: int, stride: int, *block: int) -> Any:
    """A descriptor of the memory from its first element on; rows may overlap."""
    return kernels().TensorDescriptor(memory, [rows, columns], [stride, 1], list(block))


def _runs(blocks: torch.Tensor, rows: int) -> list[Any]:
    """Descriptors of the runs of two blocks, which begin at each block but the last one."""
    blocks = blocks.contiguous(memory_format=torch.channels_last_3d)
    channels, cells = blocks.shape[1], len(blocks) * blocks.shape[2] ** 3
    return _parts(blocks, cells - 1, 2 * channels, channels, rows)


def _parts(memory: torch.Tensor, rows: int, columns: int, stride: int, tile: int) -> list[Any]:
    """Descriptors of a matrix for its first 64 columns, and for the others or None."""
    widths = [min(64, columns), max(0, columns - 64)]
    return [_matrix(memory, rows, columns, stride, tile, _power_of_two(width)) if width else None for width in widths]


def _power_of_two(columns: int) -> int:
    """The columns of a tile that holds these."""
    return max(16, 1 << (columns - 1).bit_length())


# --- operators: the gradients of the first two are the two others -----------------------------------------------------

_to_rows = custom_op(
    "networks::blocks_to_rows", blocks_to_rows, mutates_args=(), schema="(Tensor blocks, Tensor weight) -> Tensor"
)
_to_rows.register_fake(fused.fake(blocks_to_rows, _empty_rows))
convolve_transpose = custom_op("networks::rows_to_cells", rows_to_cells, mutates_args=())
convolve_transpose.register_fake(fused.fake(rows_to_cells, _empty_cells))
_weight_gradient = custom_op("networks::block_weight_gradient", weight_gradient, mutates_args=())
_weight_gradient.register_fake(
    fused.fake(weight_gradient, lambda rows, blocks: _empty_weights(rows, blocks)[0].permute(0, 4, 1, 2, 3))
)


def convolve(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The convolution of cells, computed in `dtype`; the result is padded."""
    return _to_rows(_to_blocks(x, dtype), weight)


def _to_blocks(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    from networks.space_to_depth import space_to_depth  # which imports this module

    return space_to_depth(x, dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _rows_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    blocks, weight = ctx.saved_tensors
    rows, blocks_gradient = gradient.to(blocks.dtype), None
    if ctx.needs_input_grad[0]:
        blocks_gradient = _to_blocks(convolve_transpose(rows, weight, rows.dtype))
    return blocks_gradient, _weight_gradient(rows, blocks).to(weight.dtype)


def _cells_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, weight = ctx.saved_tensors
    blocks = _to_blocks(gradient, rows.dtype)
    rows_gradient = _to_rows(blocks, weight) if ctx.needs_input_grad[0] else None
    return rows_gradient, _weight_gradient(rows, blocks).to(weight.dtype), None


_to_rows.register_autograd(_rows_backward, setup_context=_save)
convolve_transpose.register_autograd(_cells_backward, setup_context=_save)
