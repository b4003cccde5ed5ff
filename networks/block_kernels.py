"""The Triton kernels of blocks.py, for Hopper GPUs: tiles of both factors arrive through tensor descriptors (TMA).

All relate padded rows S, a matrix [F, Cs] of cells (see padded.py), and blocks B, a matrix [F, 8C] of 2³ cells with C
channels (see space_to_depth.py). Both have PITCH cells in each row, rows in each plane and planes in each sample, so
neighbors are the same number of cells away everywhere: block b + a holds tap 2a + r of cell b in its part r. The
neighbors b and b + 1 along a row are one run of 16C channels. A run is read in one or two parts, whose widths are
powers of two. A descriptor fills a tile with zeros where it leaves the matrix. Sums are float32.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401 # for blocks.py

from networks.kernels import tanh
from networks.strided_kernels import activated

PART = tl.constexpr(128)  # blocks whose results are written at once: more of them need too many registers


@triton.jit
def neighbor(run, PITCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cells from the first of the four runs of neighbors to this one: run 1 is in the next row, run 2 in the plane."""
    return ((run >> 1) * PITCH + (run & 1)) * PITCH


@triton.jit
def rows_to_blocks(  # type: ignore[no-untyped-def]
    s, w, out, bias, targets, sums, cells, Cs, PITCH: tl.constexpr, CHANNELS: tl.constexpr
):
    """B = sum over neighbors and channels of S × W; see `store_blocks`. S is converted to W's dtype."""
    ROWS: tl.constexpr = s.block_shape[0]
    DEPTH: tl.constexpr = s.block_shape[1]
    f0 = tl.program_id(0) * ROWS
    steps = Cs // DEPTH
    acc = tl.full((ROWS, w.block_shape[0]), 0.0, tl.float32)
    for t in range(8 * steps):
        a = t // steps
        x = s.load([f0 - neighbor(a >> 1, PITCH) - (a & 1), (t - a * steps) * DEPTH])
        if x.dtype != w.dtype:  # through float32, because a GPU has no fast instruction from bfloat16 to float16
            x = x.to(tl.float32).to(w.dtype)
        acc = tl.dot(x, w.load([0, t * DEPTH]).T, acc)
    store_blocks(acc, f0, 0, out, bias, targets, sums, cells, PITCH, CHANNELS)


@triton.jit
def store_blocks(  # type: ignore[no-untyped-def]
    acc, f0, k0: tl.constexpr, out, bias, targets, sums, cells, PITCH: tl.constexpr, CHANNELS: tl.constexpr
):
    """Writes a tile of B, from block f0 and channel k0 on, as cells [N, 2D, 2D, 2D, CHANNELS], except the padding.

    With targets, `out`, a descriptor of blocks, gets the gradient of sum |tanh(B + bias) - targets| with respect to B
    instead, and `sums` [parts of PART blocks, 2, 64] the shares of that sum and of the gradient's sum.
    """
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    SIDE: tl.constexpr = 2 * PITCH - 2
    if ROWS > PART:
        low, high = acc.reshape(2, ROWS // 2, COLUMNS).permute(1, 2, 0).split()
        store_blocks(low, f0, k0, out, bias, targets, sums, cells, PITCH, CHANNELS)
        store_blocks(high, f0 + ROWS // 2, k0, out, bias, targets, sums, cells, PITCH, CHANNELS)
    elif COLUMNS > 16:
        low, high = acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        store_blocks(low, f0, k0, out, bias, targets, sums, cells, PITCH, CHANNELS)
        store_blocks(high, f0, k0 + COLUMNS // 2, out, bias, targets, sums, cells, PITCH, CHANNELS)
    elif k0 < 8 * CHANNELS:
        f = f0 + tl.arange(0, ROWS)
        n = f // (PITCH * PITCH * PITCH)
        d = f // (PITCH * PITCH) % PITCH
        h = f // PITCH % PITCH
        w = f % PITCH
        column = k0 + tl.arange(0, COLUMNS)
        part = column // CHANNELS
        channel = column % CHANNELS
        # The first and the last block along an axis have one part inside the grid.
        first = (d == 0) * 4 + (h == 0) * 2 + (w == 0)
        last = (d == PITCH - 1) * 4 + (h == PITCH - 1) * 2 + (w == PITCH - 1)
        outside = (first[:, None] & ~part[None, :]) | (last[:, None] & part[None, :])
        used = (outside == 0) & (f < cells)[:, None] & (part < 8)[None, :]
        n0 = f0 // (PITCH * PITCH * PITCH)
        origin = n0.to(tl.int64) * (SIDE * SIDE * SIDE * CHANNELS)
        cell = (((n - n0) * SIDE + 2 * d) * SIDE + 2 * h) * SIDE + 2 * w
        shift = ((part // 4 - 1) * SIDE + part // 2 % 2 - 1) * SIDE + part % 2 - 1
        place = origin + ((cell * CHANNELS)[:, None] + (shift * CHANNELS + channel)[None, :])
        if targets is None:
            tl.store(out + place, acc.to(out.dtype.element_ty), mask=used)
        else:
            output = tanh(acc + tl.load(bias + channel).to(tl.float32)[None, :])
            difference = output - tl.load(targets + place, mask=used, other=0.0).to(tl.float32)
            # 0 * difference is 0, or NaN. The comparisons alone would treat a NaN as no difference.
            sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0 * difference))
            gradient = tl.where(used, sign * (1.0 - output * output), 0.0)
            out.store([f0, k0], gradient.to(out.dtype))
            sums += f0 // PART * 128 + column
            tl.store(sums, tl.sum(tl.where(used, tl.abs(difference), 0.0), 0))
            tl.store(sums + 64, tl.sum(gradient, 0))


@triton.jit(do_not_specialize=["biased"])
def blocks_to_rows(  # type: ignore[no-untyped-def]
    b_first, b_second, w_first, w_second, out, bias, slope, biased, Cs, PITCH: tl.constexpr
):
    """S = activated(sum over neighbors and channels of B × W, plus the bias if `biased`), zero in the pads."""
    ROWS: tl.constexpr = out.block_shape[0]
    COLUMNS: tl.constexpr = out.block_shape[1]
    columns = Cs // COLUMNS
    c0 = tl.program_id(0) % columns * COLUMNS
    f0 = tl.program_id(0) // columns * ROWS
    acc = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for run in range(4):
        f = f0 + neighbor(run, PITCH)
        acc = tl.dot(b_first.load([f, 0]), w_first.load([run * Cs + c0, 0]).T, acc)
        if b_second is not None:
            acc = tl.dot(b_second.load([f, 64]), w_second.load([run * Cs + c0, 64]).T, acc)
    c = c0 + tl.arange(0, COLUMNS)
    acc = activated(acc + tl.load(bias + c, mask=c < biased, other=0.0)[None, :], slope)
    f = f0 + tl.arange(0, ROWS)
    LAST: tl.constexpr = PITCH - 1
    inside = (f % PITCH < LAST) & (f // PITCH % PITCH < LAST) & (f // (PITCH * PITCH) % PITCH < LAST)
    out.store([f0, c0], tl.where(inside[:, None], acc, 0.0).to(out.dtype))


@triton.jit(do_not_specialize=["chunks", "per_split"])
def block_weight_gradient(  # type: ignore[no-untyped-def]
    s, b_first, b_second, out, chunks, per_split, Cs, PITCH: tl.constexpr, CHANNELS: tl.constexpr
):
    """W = sum over cells of S × B, float32 [splits, Cs, 4, 4, 4, CHANNELS]; a program adds `per_split` chunks of cells.

    A program computes the products with two of the four runs, those of one plane.
    """
    DEPTH: tl.constexpr = s.block_shape[0]
    ROWS: tl.constexpr = s.block_shape[1]
    rows = Cs // ROWS
    plane = tl.program_id(0) % 2
    row0 = tl.program_id(0) // 2 % rows * ROWS
    split = tl.program_id(0) // (2 * rows)
    acc0 = tl.full((ROWS, b_first.block_shape[1]), 0.0, tl.float32)
    acc1 = acc0
    if b_second is not None:
        acc2 = tl.full((ROWS, b_second.block_shape[1]), 0.0, tl.float32)
        acc3 = acc2
    for i in range(split * per_split, tl.minimum((split + 1) * per_split, chunks)):
        x = s.load([i * DEPTH, row0]).T
        f = i * DEPTH + plane * PITCH * PITCH
        acc0 = tl.dot(x, b_first.load([f, 0]), acc0)
        acc1 = tl.dot(x, b_first.load([f + PITCH, 0]), acc1)
        if b_second is not None:
            acc2 = tl.dot(x, b_second.load([f, 64]), acc2)
            acc3 = tl.dot(x, b_second.load([f + PITCH, 64]), acc3)
    out += (split.to(tl.int64) * Cs + row0) * (64 * CHANNELS) + plane * (32 * CHANNELS)
    store_taps(out, acc0, 0, CHANNELS)
    store_taps(out + 8 * CHANNELS, acc1, 0, CHANNELS)
    if b_second is not None:
        store_taps(out, acc2, 64, CHANNELS)
        store_taps(out + 8 * CHANNELS, acc3, 64, CHANNELS)


@triton.jit
def store_taps(out, acc, k0, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the products [rows, columns] with a run, from its channel k0 on, to `out` [rows, 4, 4, 4, CHANNELS]."""
    row = tl.arange(0, acc.shape[0])[:, None]
    k = k0 + tl.arange(0, acc.shape[1])[None, :]
    part = k // CHANNELS % 8
    tap = part // 4 * 16 + part // 2 % 2 * 4 + k // (8 * CHANNELS) * 2 + part % 2
    tl.store(out + row * (64 * CHANNELS) + tap * CHANNELS + k % CHANNELS, acc, mask=(row >= 0) & (k < 16 * CHANNELS))
