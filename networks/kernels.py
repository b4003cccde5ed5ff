"""The Triton kernels of fused.py and tail.py, imported when the first kernel is needed.

Triton comes with CUDA builds of torch only. Indices of cells and elements are int64: 128 channels of 32³ cells exceed
2^31 elements from batch size 512 on. NaN passes through all kernels, so that a run that diverges can be noticed.
tanh follows tanhf of Moshier's Cephes library, because Triton does not have it on every target.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(values):  # type: ignore[no-untyped-def]
    square = values * values
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(values)) + 1.0)
    far = tl.where(values < 0, -far, far)
    return tl.where(tl.abs(values) < 0.625, series * square * values + values, far)


@triton.jit
def bias_activation(  # type: ignore[no-untyped-def]
    y,
    x,
    bias,
    skip,
    cells,
    y_stride,
    ACTIVATION: tl.constexpr,
    NEGATIVE_SLOPE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SKIP_CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes activation(x + bias) to the first CHANNELS channels of y, and skip to the SKIP_CHANNELS after them."""
    PACKED: tl.constexpr = LANES // WIDTH
    lane = tl.arange(0, LANES)[None, :]
    channel = lane % WIDTH
    cell = tl.program_id(0).to(tl.int64) * (ROWS * PACKED)
    cell += tl.arange(0, ROWS)[:, None] * PACKED + lane // WIDTH
    used = (cell < cells) & (lane < PACKED * WIDTH)
    inside = used & (channel < CHANNELS)
    values = tl.load(x + cell * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    if ACTIVATION == "leaky_relu":
        values = tl.where(values > 0, values, NEGATIVE_SLOPE * values)
    elif ACTIVATION == "relu":
        values = tl.where(values <= 0, 0.0, values)
    else:
        values = tanh(values)
    place = cell * y_stride + channel
    tl.store(y + place, values.to(y.dtype.element_ty), mask=inside)
    if SKIP_CHANNELS > 0:
        inside = used & (channel < SKIP_CHANNELS)
        copied = tl.load(skip + cell * SKIP_CHANNELS + channel, mask=inside, other=0.0)
        tl.store(y + place + CHANNELS, copied, mask=inside)


@triton.jit
def activation_backward(  # type: ignore[no-untyped-def]
    x_gradient,
    partial,
    y,
    y_stride,
    y_pitch,
    first,
    first_stride,
    first_pitch,
    second,
    second_stride,
    second_pitch,
    cells,
    TWICE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NEGATIVE_SLOPE: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    PITCH: tl.constexpr,
):
    """Writes the gradient of x, and per program a partial sum of the gradient of the bias, [PACKED, CHANNELS].

    With a SIDE, grids are cubes of that side, and each has its own pitch, the cells from row to row and the rows from
    plane to plane; PITCH is that of the gradient of x, whose pads become zero. See padded.py.
    """
    PACKED: tl.constexpr = LANES // CHANNELS
    lane = tl.arange(0, LANES)[None, :]
    channel = lane % CHANNELS
    inner = tl.arange(0, ROWS)[:, None] * PACKED + lane // CHANNELS
    total = tl.full([ROWS, LANES], 0.0, tl.float32)
    start = tl.program_id(0).to(tl.int64) * (ROWS * PACKED)
    while start < cells:
        cell = start + inner
        stored = (cell < cells) & (lane < PACKED * CHANNELS)
        inside = stored
        y_cell = cell
        first_cell = cell
        second_cell = cell
        if SIDE > 0:
            w = cell % PITCH
            h = cell // PITCH % PITCH
            d = cell // (PITCH * PITCH) % PITCH
            n = cell // (PITCH * PITCH * PITCH)
            inside = stored & (w < SIDE) & (h < SIDE) & (d < SIDE)
            y_cell = ((n * y_pitch + d) * y_pitch + h) * y_pitch + w
            first_cell = ((n * first_pitch + d) * first_pitch + h) * first_pitch + w
            second_cell = ((n * second_pitch + d) * second_pitch + h) * second_pitch + w
        gradient = tl.load(first + first_cell * first_stride + channel, mask=inside, other=0.0).to(tl.float32)
        if TWICE:
            gradient += tl.load(second + second_cell * second_stride + channel, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(y + y_cell * y_stride + channel, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION == "leaky_relu":
            gradient = tl.where(value > 0, gradient, NEGATIVE_SLOPE * gradient)
        elif ACTIVATION == "relu":
            gradient = tl.where(value <= 0, 0.0, gradient)
        else:
            gradient = gradient * (1.0 - value * value)
        place = x_gradient + cell * CHANNELS + channel
        tl.store(place, gradient.to(x_gradient.dtype.element_ty), mask=stored)
        total += gradient
        start += tl.num_programs(0) * (ROWS * PACKED)
    share = partial + tl.program_id(0) * (PACKED * CHANNELS)
    tl.store(share + lane, tl.sum(total, 0)[None, :], mask=lane < PACKED * CHANNELS)


@triton.jit
def l1(partial, outputs, targets, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes a partial sum of |outputs - targets| per program."""
    total = tl.full([TILE], 0.0, tl.float32)
    start = tl.program_id(0).to(tl.int64) * TILE
    while start < count:
        place = start + tl.arange(0, TILE)
        inside = place < count
        output = tl.load(outputs + place, mask=inside, other=0.0).to(tl.float32)
        total += tl.abs(output - tl.load(targets + place, mask=inside, other=0.0).to(tl.float32))
        start += tl.num_programs(0) * TILE
    tl.store(partial + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def l1_backward(outputs_gradient, outputs, targets, gradient, count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the gradient of mean |outputs - targets|, times the gradient of that mean."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    output = tl.load(outputs + place, mask=inside, other=0.0).to(tl.float32)
    difference = output - tl.load(targets + place, mask=inside, other=0.0).to(tl.float32)
    share = tl.load(gradient).to(tl.float32) / count
    # 0 * share is 0, or NaN if the loss is. The comparisons alone would treat a NaN as no difference.
    signed = tl.where(difference > 0, share, tl.where(difference < 0, -share, 0.0 * share))
    tl.store(outputs_gradient + place, signed.to(outputs_gradient.dtype.element_ty), mask=inside)


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

    blocks: [planes, ROWS, COLUMNS, 2, 2, 2, CHANNELS], where planes are samples × DEPTH; see the picture in
      space_to_depth.py. Half of each outermost block lies in the padding: it has no target, and its gradient is 0.
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
