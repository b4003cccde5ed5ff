"""The transposed convolution of a coarse grid, which gives a fine one; see common.py."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from networks.ops import padded
from networks.ops.hopper import common
from networks.ops.hopper.common import activated, bits, cells_of_tile, remainder_and_quotient
from networks.ops.hopper.tiles import BLOCK, box, transposed_tile
from networks.ops.launch import launch


def convolve_transposed(
    coarse: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    slope: float = 1.0,
    skip: Tensor | None = None,
    pads: bool = False,
) -> Tensor:
    """Leaky ReLU of `slope` of (the transposed convolution + bias), concatenated with `skip`; padded if `pads`."""
    (samples, small), side, large = coarse.shape[:2], coarse.shape[2], weights.shape[1]
    # Tiles of BLOCK columns leave tensor cores idle: then a program computes pairs of planes.
    planes = 2 if large % (2 * BLOCK) and side > 2 else 1
    tile = transposed_tile(samples * side**3, planes * large, 8 // planes)
    boxes, depth, rows = box(side, tile.rows, planes=1 if planes == 2 else side)
    assert skip is None or skip.shape[1] == large, "a program copies as many channels as it computes"
    channels = large * (1 if skip is None else 2)
    out = padded.empty((samples, channels, *[2 * side] * 3), coarse.dtype, coarse.device, pads)
    if pads:
        padded.zero_pads(out)
    coarse = common.laid_out(coarse)
    sample, plane, row, cell = common.strides_of(coarse)
    shape, strides = (samples, *[side] * 3, small), (sample, plane, row, cell, 1)
    view = common.descriptor(coarse, 0, shape, strides, (boxes, depth, rows, side, tile.depth))
    packed, matrix = weights, (small, 64 * large)
    if planes == 2:
        packed = weights.permute(0, 2, 3, 4, 1).unflatten(1, (2, 2)).permute(1, 3, 4, 0, 2, 5).contiguous()
        matrix = 32 * small, 2 * large
    tiles_of_weights = common.descriptor(packed, 0, matrix, (matrix[1], 1), (tile.depth, tile.columns))
    tiles = (side // rows) * (side // depth if planes == 1 else side + 1) * -(-samples // boxes)
    programs = 8 // planes * (planes * large // tile.columns) * tiles
    given = common.float32(coarse, 0) if bias is None else bias
    copied = out if skip is None else common.laid_out(skip)
    pitches = [2 * side + padded.is_padded(grid) for grid in (out, copied)]
    arguments: Any = (out, given, copied, slope, 0 if bias is None else large, channels - large, channels, *pitches)
    arguments = (view, tiles_of_weights, *arguments, samples, small, large)
    sizes = {"D": side, "PLANES": planes, "BB": boxes, "BD": depth, "BH": rows}
    launch(transposed_convolution, programs, *arguments, **sizes, **tile.constants())
    return out


@triton.jit(do_not_specialize=["biased", "out_pitch", "skip_pitch", "samples"])
def transposed_convolution(  # type: ignore[no-untyped-def]
    coarse,
    weights,
    out,
    bias,
    skip,
    slope,
    biased,
    skipped,
    out_channels,
    out_pitch,
    skip_pitch,
    samples,
    Cs,
    Cl,
    D: tl.constexpr,
    PLANES: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out = activated(sum over taps and channels of coarse × weights, plus the bias of the first `biased` channels).

    A program computes the fine cells of one parity along each axis, for which 2³ taps count; with PLANES = 2 those of
    two planes, 2d - 1 and 2d, whose taps are the same coarse cells. See `store_fine` for the other arguments.
    """
    CLASSES: tl.constexpr = 8 // PLANES
    parity, pid = remainder_and_quotient(tl.program_id(0), CLASSES)
    column, pid = remainder_and_quotient(pid, PLANES * Cl // BN)
    row, pid = remainder_and_quotient(pid, D // BH)
    plane, box_number = remainder_and_quotient(pid, D // BD if PLANES == 1 else D + 1)
    col0, h0, d0, n0 = column * BN, row * BH, plane * BD, box_number * BB
    rd, rh, rw = bits(parity)
    steps = Cs // BK
    # With PLANES = 2 the first and the last pair have one plane inside the grid.
    begin = tl.where(d0 == 0, 4 * steps, 0) if PLANES == 2 else 0
    end = tl.where(d0 == D, 4 * steps, 8 * steps) if PLANES == 2 else (1 if D == 1 else 8) * steps
    acc = tl.full((BN, BM), 0.0, tl.float32)
    for t in range(begin, end):
        tap = t // steps
        c0 = (t - tap * steps) * BK
        d, ah, aw, row, column = transposed_tap(tap, d0, c0, col0, rd, rh, rw, Cs, Cl, PLANES)
        x = coarse.load([n0, d, h0 + ah * (2 * rh - 1), aw * (2 * rw - 1), c0]).reshape(BM, BK)
        acc = tl.dot(weights.load([row, column]).T, x.T, acc)
    n, d, h, w = cells_of_tile(n0, d0, h0, D, BD, BH, BM)
    j = (col0 + tl.arange(0, BN)) // Cl
    c = col0 + tl.arange(0, BN) - j * Cl
    acc = activated(acc + tl.load(bias + c, mask=c < biased, other=0.0)[:, None], slope).T
    # Fine planes: a column of the tile is in plane 2d + rd, or in one of the pair.
    first = 2 * d + rd if PLANES == 1 else 2 * d - 1
    inside = (n < samples)[:, None] & (first[:, None] + j[None, :] >= 0) & (first[:, None] + j[None, :] < 2 * D)
    h, w = 2 * h + rh, 2 * w + rw
    store_fine(acc, n, first, h, w, j, c, inside, out, skip, skipped, out_channels, out_pitch, skip_pitch, Cl)


@triton.jit
def transposed_tap(tap, d0, c0, col0, rd, rh, rw, Cs, Cl, PLANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The plane of a tap's coarse cells, its cells along the two other axes, and its row and column of the weights."""
    ad, ah, aw = bits(tap)
    kw = 1 + rw + 2 * aw * (1 - 2 * rw)
    kh = 1 + rh + 2 * ah * (1 - 2 * rh)
    if PLANES == 1:
        d = d0 + ad * (2 * rd - 1)
        kd = 1 + rd + 2 * ad * (1 - 2 * rd)
        row = c0
        column = ((kd * 4 + kh) * 4 + kw) * Cl + col0
    else:
        d = d0 - 1 + ad
        row = (((1 - ad) * 4 + kh) * 4 + kw) * Cs + c0
        column = col0
    return d, ah, aw, row, column


@triton.jit
def store_fine(  # type: ignore[no-untyped-def]
    acc, n, d, h, w, j, c, inside, out, skip, skipped, out_channels, out_pitch, skip_pitch, Cl
):
    """Writes a tile of fine cells, column j, c being channel c in plane d + j.

    `out` has out_channels channels per cell and out_pitch cells from row to row. The `skipped` channels of `skip`, with
    skip_pitch cells from row to row, are copied to the channels that follow.
    """
    cell = ((n.to(tl.int64) * out_pitch + d) * out_pitch + h) * out_pitch + w
    place = cell[:, None] * out_channels + (j * (out_pitch * out_pitch) * out_channels + c)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
    if skipped > 0:
        cell = ((n.to(tl.int64) * skip_pitch + d) * skip_pitch + h) * skip_pitch + w
        source = cell[:, None] * skipped + (j * (skip_pitch * skip_pitch) * skipped + c)[None, :]
        tl.store(out + place + Cl, tl.load(skip + source, mask=inside), mask=inside)
