"""The convolution of a fine grid, which gives a coarse one; see common.py."""

import triton
import triton.language as tl
from torch import Tensor

from networks.ops import padded
from networks.ops.hopper import common
from networks.ops.hopper.common import activated, cells_of_tile, remainder_and_quotient
from networks.ops.hopper.tiles import box, convolution_tile
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
