"""The gradient of the weights that relate a coarse and a fine grid; see common.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from networks.ops import padded
from networks.ops.hopper import common
from networks.ops.hopper.common import remainder_and_quotient
from networks.ops.hopper.tiles import BLOCK, box, splits_of, weight_tile
from networks.ops.launch import launch


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
