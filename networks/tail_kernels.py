"""The Triton kernel of tail.py, which imports this module when it needs the kernel."""

import triton
import triton.language as tl

from networks.kernels import tanh


@triton.jit
def tail_l1(  # type: ignore[no-untyped-def]
    blocks_gradient,
    loss_partial,
    bias_partial,
    blocks,
    bias,
    targets,
    planes,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the gradient of sum |tanh(blocks + bias) - targets| with respect to the blocks, and partial sums.

    blocks: [planes, ROWS, COLUMNS, 2, 2, 2, CHANNELS], where planes are samples × DEPTH. Half of each outermost block
      lies in the padding: it has no target, and its gradient is 0.
    loss_partial: [programs], partial sums of |tanh(blocks + bias) - targets|.
    bias_partial: [programs, TILE], partial sums of the gradient.

    Each program processes the same tile of several planes, at equal distances. So all that depends on the place in the
    plane is computed once: channel, bias, and the address of the target in the first plane.
    """
    BLOCK: tl.constexpr = 8 * CHANNELS
    PLANE: tl.constexpr = ROWS * COLUMNS * BLOCK
    TILES: tl.constexpr = (PLANE + TILE - 1) // TILE
    CELLS_X: tl.constexpr = 2 * DEPTH - 2
    CELLS_Y: tl.constexpr = 2 * ROWS - 2
    CELLS_Z: tl.constexpr = 2 * COLUMNS - 2
    program = tl.program_id(0)
    place = program % TILES * TILE + tl.arange(0, TILE)
    channel = place % CHANNELS
    corner = place // CHANNELS % 8
    block = place // BLOCK
    x = corner // 4 - 1
    y = block // COLUMNS * 2 + corner // 2 % 2 - 1
    z = block % COLUMNS * 2 + corner % 2 - 1
    stored = place < PLANE
    inside = stored & (y >= 0) & (y < CELLS_Y) & (z >= 0) & (z < CELLS_Z)
    offset = ((x * CELLS_Y + y) * CELLS_Z + z) * CHANNELS + channel
    shift = tl.load(bias + channel).to(tl.float32)
    loss = tl.full([TILE], 0.0, tl.float32)
    total = tl.full([TILE], 0.0, tl.float32)
    plane = program // TILES
    while plane < planes:
        depth = plane % DEPTH * 2
        used = inside & (depth + x >= 0) & (depth + x < CELLS_X)
        here = plane.to(tl.int64) * PLANE + place
        origin = ((plane // DEPTH).to(tl.int64) * CELLS_X + depth) * (CELLS_Y * CELLS_Z * CHANNELS)
        values = tl.load(blocks + here, mask=stored, other=0.0).to(tl.float32) + shift
        target = tl.load(targets + origin + offset, mask=used, other=0.0).to(tl.float32)
        output = tanh(values)
        difference = output - target
        # 0 * difference is 0, or NaN. The comparisons alone would treat a NaN as no difference.
        sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0 * difference))
        gradient = tl.where(used, sign * (1.0 - output * output), 0.0)
        tl.store(blocks_gradient + here, gradient.to(blocks_gradient.dtype.element_ty), mask=stored)
        loss += tl.where(used, tl.abs(difference), 0.0)
        total += gradient
        plane += tl.num_programs(0) // TILES
    tl.store(loss_partial + program, tl.sum(loss, 0))
    tl.store(bias_partial + program.to(tl.int64) * TILE + tl.arange(0, TILE), total)
