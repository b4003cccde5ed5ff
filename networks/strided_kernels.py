"""The Triton kernels of strided.py, for Hopper GPUs: tiles of both factors arrive through tensor descriptors (TMA).

All relate a small grid S [N, D, D, D, Cs], a large grid L [N, 2D, 2D, 2D, Cl] and weights W [Cs, 4, 4, 4, Cl]. Tap k of
cell i of S, along each axis, is cell 2i + k - 1 of L. Cells of L outside the grid are zero: a descriptor fills a tile
with zeros where it leaves the tensor. D is a power of two. A tile of cells of S has BB samples, BD planes, BH rows and
complete rows of D cells. See strided.py for the descriptors.

Sums are float32. The product of a tile is computed transposed, because Triton keeps only a reshaped second factor of
tl.dot in shared memory on Hopper; a first one passes through registers.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401 # for strided.py


@triton.jit
def activated(values, slope):  # type: ignore[no-untyped-def]
    """values where they are positive, otherwise slope × values. NaN passes through, also at slope 0."""
    return tl.where(values <= 0, tl.where(slope == 0, 0.0, slope * values), values)


@triton.jit
def cells_of_tile(n0, d0, h0, D: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sample, plane, row and column of each cell of the tile that begins at these."""
    r = tl.arange(0, BM)
    return n0 + r // (D * BH * BD), d0 + r // (D * BH) % BD, h0 + r // D % BH, r % D


@triton.jit(do_not_specialize=["biased", "per_split", "samples"])
def gather(  # type: ignore[no-untyped-def]
    l_even,
    l_odd,
    w,
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
    """S = activated(sum over taps and channels of L × W, plus the bias of the first `biased` channels).

    l_even, l_odd: rows of L of even and of odd number. With SPLIT, the programs of one tile share the sum, `per_split`
    steps each, and write their parts to `partial` [splits, cells, Cs] float32.
    """
    pid = tl.program_id(0)
    columns = Cs // BN
    col0 = pid % columns * BN
    pid = pid // columns
    h0 = pid % (D // BH) * BH
    pid = pid // (D // BH)
    d0 = pid % D
    pid = pid // D
    tiles = (samples + BB - 1) // BB
    n0 = pid % tiles * BB
    split = pid // tiles
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
            if D == 1:
                kw = 1 + (tap & 1)
                q = odd
                kd = 1 + (tap >> 1)
            else:
                kw = tap & 3
                q = (tap >> 2) & 1
                kd = tap >> 3
            kh = 2 * q + 1 - odd
            rw = 1 - (kw & 1)
            column = (kw >> 1) - rw
            if odd == 0:
                x = l_even.load([n0, 2 * d0 - 1 + kd, h0 + q, column, rw * Cl + c0])
            else:
                x = l_odd.load([n0, 2 * d0 - 1 + kd, h0 + q - 1, column, rw * Cl + c0])
            y = w.load([col0, ((kd * 4 + kh) * 4 + kw) * Cl + c0])
            acc = tl.dot(y, x.reshape(BM, BK).T, acc)
    n, d, h, w_ = cells_of_tile(n0, d0, h0, D, 1, BH, BM)
    cell = ((n.to(tl.int64) * D + d) * D + h) * D + w_
    c = col0 + tl.arange(0, BN)
    place = cell[:, None] * Cs + c[None, :]
    inside = (n < samples)[:, None] & (c < Cs)[None, :]
    if SPLIT:
        part = partial + split.to(tl.int64) * samples * (D * D * D) * Cs
        tl.store(part + place, acc.T, mask=inside)
    else:
        acc = activated(acc + tl.load(bias + c, mask=c < biased, other=0.0)[:, None], slope)
        tl.store(out + place, acc.T.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["biased", "out_pitch", "skip_pitch", "samples"])
def scatter(  # type: ignore[no-untyped-def]
    s,
    w,
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
    """L = activated(sum over taps and channels of S × W, plus the bias of the first `biased` channels).

    A program computes the cells of L of one parity along each axis, for which 2³ taps count; with PLANES = 2 those of
    two planes, 2d - 1 and 2d, whose taps are the same cells of S. L has out_channels channels per cell and out_pitch
    cells from row to row. The `skipped` channels of `skip`, with skip_pitch cells from row to row, are copied to the
    channels that follow.
    """
    pid = tl.program_id(0)
    CLASSES: tl.constexpr = 8 // PLANES
    parity = pid % CLASSES
    pid = pid // CLASSES
    columns = PLANES * Cl // BN
    col0 = pid % columns * BN
    pid = pid // columns
    h0 = pid % (D // BH) * BH
    pid = pid // (D // BH)
    d_tiles: tl.constexpr = D // BD if PLANES == 1 else D + 1
    d0 = pid % d_tiles * BD
    n0 = pid // d_tiles * BB
    rw = parity & 1
    rh = (parity >> 1) & 1
    rd = parity >> 2
    steps = Cs // BK
    begin = 0
    end = (1 if D == 1 else 8) * steps
    if PLANES == 2:  # the first and the last pair have one plane inside the grid
        begin = tl.where(d0 == 0, 4 * steps, 0)
        end = tl.where(d0 == D, 4 * steps, 8 * steps)
    acc = tl.full((BN, BM), 0.0, tl.float32)
    for t in range(begin, end):
        tap = t // steps
        c0 = (t - tap * steps) * BK
        aw = tap & 1
        ah = (tap >> 1) & 1
        ad = tap >> 2
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
        x = s.load([n0, d, h0 + ah * (2 * rh - 1), aw * (2 * rw - 1), c0]).reshape(BM, BK)
        acc = tl.dot(w.load([row, column]).T, x.T, acc)
    n, d, h, w_ = cells_of_tile(n0, d0, h0, D, BD, BH, BM)
    j = (col0 + tl.arange(0, BN)) // Cl
    c = col0 + tl.arange(0, BN) - j * Cl
    # Planes of L: a column of the tile is in plane 2d + rd, or in one of the pair.
    first = 2 * d + rd if PLANES == 1 else 2 * d - 1
    plane = first[:, None] + j[None, :]
    inside = (n < samples)[:, None] & (plane >= 0) & (plane < 2 * D)
    acc = activated(acc + tl.load(bias + c, mask=c < biased, other=0.0)[:, None], slope)
    cell = ((n.to(tl.int64) * out_pitch + first) * out_pitch + 2 * h + rh) * out_pitch + 2 * w_ + rw
    place = cell[:, None] * out_channels + (j * (out_pitch * out_pitch) * out_channels + c)[None, :]
    tl.store(out + place, acc.T.to(out.dtype.element_ty), mask=inside)
    if skipped > 0:
        cell = ((n.to(tl.int64) * skip_pitch + first) * skip_pitch + 2 * h + rh) * skip_pitch + 2 * w_ + rw
        source = cell[:, None] * skipped + (j * (skip_pitch * skip_pitch) * skipped + c)[None, :]
        tl.store(out + place + Cl, tl.load(skip + source, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["chunks", "per_split"])
def weight_gradient(  # type: ignore[no-untyped-def]
    s,
    l0,
    l1,
    l2,
    l3,
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
    """W = sum over cells of S × L, float32 [splits, Cs, 64 Cl]; a program adds `per_split` chunks of BK cells.

    l0 … l3: L's cells in planes and rows of even and odd number. With RUNS, all taps of a cell along its row are one
    run of memory; otherwise pairs of cells are.
    """
    pid = tl.program_id(0)
    rows = Cs // BM
    row0 = pid % rows * BM
    pid = pid // rows
    columns = 64 * Cl // BN
    col0 = pid % columns * BN
    split = pid // columns
    tap = col0 // Cl
    c0 = col0 - tap * Cl
    kw = tap & 3
    kh = (tap >> 2) & 3
    kd = tap >> 4
    rh = 1 - (kh & 1)
    rd = 1 - (kd & 1)
    dh = (kh >> 1) - rh
    dd = (kd >> 1) - rd
    if RUNS:
        column = 0
        k0 = kw * Cl + c0
    else:
        rw = 1 - (kw & 1)
        column = (kw >> 1) - rw
        k0 = rw * Cl + c0
    begin = split * per_split
    end = tl.minimum(begin + per_split, chunks)
    if D == 1:  # only the middle taps are inside the grid
        end = tl.where((kd == 1) | (kd == 2), tl.where((kh == 1) | (kh == 2), end, begin), begin)
    acc = tl.full((BM, BN), 0.0, tl.float32)
    for number in tl.static_range(4):
        mine = number == 2 * rd + rh
        for i in range(tl.where(mine, begin, 0), tl.where(mine, end, 0)):
            h0 = i % (D // BH) * BH
            rest = i // (D // BH)
            d0 = rest % (D // BD) * BD
            n0 = rest // (D // BD) * BB
            x = s.load([i * BK, row0])
            if number == 0:
                y = l0.load([n0, d0 + dd, h0 + dh, column, k0])
            elif number == 1:
                y = l1.load([n0, d0 + dd, h0 + dh, column, k0])
            elif number == 2:
                y = l2.load([n0, d0 + dd, h0 + dh, column, k0])
            else:
                y = l3.load([n0, d0 + dd, h0 + dh, column, k0])
            acc = tl.dot(x.T, y.reshape(BK, BN), acc)
    r = row0 + tl.arange(0, BM)
    place = r[:, None].to(tl.int64) * (64 * Cl) + (col0 + tl.arange(0, BN))[None, :]
    tl.store(out + split.to(tl.int64) * Cs * Cl * 64 + place, acc)


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
