"""Strided convolutions between grids with many channels: both directions, and the weights' gradient; see common.py."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from networks.ops import padded
from networks.ops.hopper import common
from networks.ops.hopper.common import activated, bits, cells_of_tile, remainder_and_quotient
from networks.ops.hopper.tiles import BLOCK, box, convolution_tile, splits_of, transposed_tile, weight_tile
from networks.ops.launch import launch

# Programs that share a sum, by D: small grids have few tiles. Their number is the same for all batch sizes, so that a
# prediction has the same bits with all of them.
SPLITS = {1: 16, 2: 8, 4: 4}


def convolve(fine: Tensor, weights: Tensor, bias: Tensor | None = None, slope: float = 1.0) -> Tensor:
    """Leaky ReLU of slope `slope` of (the convolution + bias); slope 1 is the identity, 0 is ReLU."""
    (samples, large), side, small = fine.shape[:2], fine.shape[2] // 2, len(weights)
    tile = convolution_tile(samples * side**3, small)
    coarse = padded.empty((samples, small, *[side] * 3), fine.dtype, fine.device, pads=False)
    steps = (8 if side == 1 else 64) * (large // tile.depth)
    per_split = -(-steps // max(1, min(SPLITS.get(side, 1), steps // 4)))
    splits = -(-steps // per_split)
    boxes, _, rows = box(side, tile.rows)
    fine = common.laid_out(fine)
    sample, plane, row, _ = common.strides_of(fine)
    shape, strides = (samples, 2 * side, side, side, 2 * large), (sample, plane, 2 * row, 2 * large, 1)
    views = [common.descriptor(fine, odd * row, shape, strides, (boxes, 1, rows, side, tile.depth)) for odd in (0, 1)]
    tiles_of_weights = common.descriptor(weights, 0, (small, 64 * large), (64 * large, 1), (tile.columns, tile.depth))
    programs = (small // tile.columns) * (side // rows) * side * -(-samples // boxes) * splits
    partial = common.float32(fine, splits * coarse.numel() if splits > 1 else 0)
    given = common.float32(fine, 0) if bias is None else bias
    biased = 0 if bias is None else small
    sizes = {"D": side, "SPLIT": splits > 1, "BB": boxes, "BH": rows}
    arguments = (coarse, given, partial, slope, biased, per_split, samples, small, large)
    launch(strided_convolution, programs, *views, tiles_of_weights, *arguments, **sizes, **tile.constants())
    if splits > 1:
        common.add_splits(partial, coarse, given, slope, biased, splits)
    return coarse


@triton.jit(do_not_specialize=["biased", "per_split", "samples"])
def strided_convolution(  # type: ignore[no-untyped-def]
    fine_even,
    fine_odd,
    weights,
    out,
    bias,
    partial,
    slope,
    biased,
    per_split,
    samples,
    Cs,
    Cl,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    BB: tl.constexpr,
    BH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out = activated(sum over taps and channels of fine × weights, plus the bias of the first `biased` channels).

    fine_even, fine_odd: rows of the fine grid of even and of odd number. With SPLIT, the programs of one tile share the
    sum, `per_split` steps each, and write their parts to `partial` [splits, cells, Cs] float32.
    """
    column, pid = remainder_and_quotient(tl.program_id(0), Cs // BN)
    row, pid = remainder_and_quotient(pid, D // BH)
    d0, pid = remainder_and_quotient(pid, D)
    box_number, split = remainder_and_quotient(pid, (samples + BB - 1) // BB)
    col0, h0, n0 = column * BN, row * BH, box_number * BB
    steps = Cl // BK
    # A grid of one cell has neighbors at the middle taps only.
    half = (4 if D == 1 else 32) * steps
    begin = split * per_split
    end = tl.minimum(begin + per_split, 2 * half)
    acc = tl.full((BN, BM), 0.0, tl.float32)
    for odd in tl.static_range(2):
        for t in range(tl.maximum(begin - odd * half, 0), tl.minimum(end - odd * half, half)):
            tap = t // steps
            c0 = (t - tap * steps) * BK
            kd, q, kw = strided_tap(tap, odd, D)
            kh = 2 * q + 1 - odd
            rw = 1 - (kw & 1)
            place = [n0, 2 * d0 - 1 + kd, h0 + q - odd, (kw >> 1) - rw, rw * Cl + c0]
            x = fine_odd.load(place) if odd else fine_even.load(place)
            y = weights.load([col0, ((kd * 4 + kh) * 4 + kw) * Cl + c0])
            acc = tl.dot(y, x.reshape(BM, BK).T, acc)
    n, d, h, w = cells_of_tile(n0, d0, h0, D, 1, BH, BM)
    c = col0 + tl.arange(0, BN)
    place = (((n.to(tl.int64) * D + d) * D + h) * D + w)[:, None] * Cs + c[None, :]
    inside = (n < samples)[:, None] & (c < Cs)[None, :]
    if SPLIT:
        part = partial + split.to(tl.int64) * samples * (D * D * D) * Cs
        tl.store(part + place, acc.T, mask=inside)
    else:
        acc = activated(acc + tl.load(bias + c, mask=c < biased, other=0.0)[:, None], slope)
        tl.store(out + place, acc.T.to(out.dtype.element_ty), mask=inside)


@triton.jit
def strided_tap(tap, odd: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of a tap, whose rows are `odd`, along planes; its row of the pair; its number along the row."""
    if D == 1:
        kd, q, kw = 1 + (tap >> 1), odd, 1 + (tap & 1)
    else:
        kd, q, kw = tap >> 3, (tap >> 2) & 1, tap & 3
    return kd, q, kw


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


def weight_gradient(coarse: Tensor, fine: Tensor) -> Tensor:
    """The float32 gradient [Cs, Cl, 4, 4, 4] of the weights, in channels_last_3d memory."""
    (samples, small), side, large = coarse.shape[:2], coarse.shape[2], fine.shape[1]
    runs = large == BLOCK  # a tile of all four taps along a row needs zero cells between rows
    fine = padded.padded(fine) if runs else common.laid_out(fine)
    tile = weight_tile(small, large, runs)
    boxes, depth, rows = box(side, tile.depth, planes=side)
    chunks = -(-samples * side**3 // tile.depth)
    splits = splits_of((small // tile.rows) * (64 * large // tile.columns), chunks)
    per_split = -(-chunks // splits)
    splits = -(-chunks // per_split)
    coarse = coarse.contiguous(memory_format=torch.channels_last_3d)
    view = common.descriptor(coarse, 0, (samples * side**3, small), (small, 1), (tile.depth, tile.rows))
    sample, plane, row, _ = common.strides_of(fine)
    shape = (samples, side, side, side, (4 if runs else 2) * large)
    strides, block = (sample, 2 * plane, 2 * row, 2 * large, 1), (boxes, depth, rows, side, tile.columns)
    starts = [d * plane + h * row - (large if runs else 0) for d in (0, 1) for h in (0, 1)]
    views = [common.descriptor(fine, start, shape, strides, block) for start in starts]
    gradient = common.float32(coarse, small * 64 * large)
    parts = common.float32(coarse, splits * gradient.numel()) if splits > 1 else gradient
    programs = (small // tile.rows) * (64 * large // tile.columns) * splits
    sizes = {"D": side, "RUNS": runs, "BB": boxes, "BD": depth, "BH": rows}
    arguments = (view, *views, parts, chunks, per_split, small, large)
    launch(strided_weight_gradient, programs, *arguments, **sizes, **tile.constants())
    if splits > 1:
        common.add_splits(parts, gradient, common.float32(coarse, 0), 1.0, 0, splits)
    return gradient.view(small, 4, 4, 4, large).permute(0, 4, 1, 2, 3)


@triton.jit(do_not_specialize=["chunks", "per_split"])
def strided_weight_gradient(  # type: ignore[no-untyped-def]
    coarse,
    fine0,
    fine1,
    fine2,
    fine3,
    out,
    chunks,
    per_split,
    Cs,
    Cl,
    D: tl.constexpr,
    RUNS: tl.constexpr,
    BB: tl.constexpr,
    BD: tl.constexpr,
    BH: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out = sum over cells of coarse × fine, float32 [splits, Cs, 64 Cl]; a program adds `per_split` chunks of cells.

    fine0 … fine3: the cells in planes and rows of even and odd number. With RUNS, all taps of a cell along its row are
    one run of memory; otherwise pairs of cells are. A chunk has BK cells.
    """
    row, pid = remainder_and_quotient(tl.program_id(0), Cs // BM)
    column, split = remainder_and_quotient(pid, 64 * Cl // BN)
    row0, col0 = row * BM, column * BN
    c0, tap = remainder_and_quotient(col0, Cl)
    kd, kh, kw = tap >> 4, (tap >> 2) & 3, tap & 3
    rd, rh, rw = 1 - (kd & 1), 1 - (kh & 1), 1 - (kw & 1)
    dd, dh, dw = (kd >> 1) - rd, (kh >> 1) - rh, 0 if RUNS else (kw >> 1) - rw
    k0 = (kw if RUNS else rw) * Cl + c0
    begin = split * per_split
    end = tl.minimum(begin + per_split, chunks)
    if D == 1:  # only the middle taps are inside the grid
        end = tl.where((kd == 1) | (kd == 2), tl.where((kh == 1) | (kh == 2), end, begin), begin)
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for number in tl.static_range(4):
        mine = number == 2 * rd + rh
        for i in range(tl.where(mine, begin, 0), tl.where(mine, end, 0)):
            h, rest = remainder_and_quotient(i, D // BH)
            d, n = remainder_and_quotient(rest, D // BD)
            x = coarse.load([i * BK, row0])
            place = [n * BB, d * BD + dd, h * BH + dh, dw, k0]
            if number < 2:
                y = fine1.load(place) if number else fine0.load(place)
            else:
                y = fine3.load(place) if number == 3 else fine2.load(place)
            acc = tl.dot(x.T, y.reshape(BK, BN), acc)
    r = row0 + tl.arange(0, BM)
    place = r[:, None].to(tl.int64) * (64 * Cl) + (col0 + tl.arange(0, BN))[None, :]
    tl.store(out + split.to(tl.int64) * Cs * Cl * 64 + place, acc)
