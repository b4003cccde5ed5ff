"""Targets minus what a network adds to its outputs, inputs smoothed over 3³ cells, in one Triton kernel."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from networks.ops import reference
from networks.ops.launch import launch

TILE = 512  # elements of a program's tile: four per thread


def minus_smoothed(targets: Tensor, fields: Tensor, added: Sequence[int | None]) -> Tensor:
    # The kernel takes cubes, and has four bits for the number of an input; fields get no gradient from it.
    if max(len(added), fields.shape[1]) > 15 or len({*targets.shape[2:]}) > 1 or fields.requires_grad:
        return reference.minus_smoothed(targets, fields, added)
    targets, fields = (part.contiguous(memory_format=torch.channels_last_3d) for part in (targets, fields))
    result, (count, channels, side) = torch.empty_like(targets), targets.shape[:3]
    places = sum((0 if place is None else place + 1) << 4 * channel for channel, place in enumerate(added))
    sizes = {"PLACES": places, "SIDE": side, "CHANNELS": channels, "INPUTS": fields.shape[1], "TILE": TILE}
    launch(subtract_smoothed, count * -(-(side**2) * channels // TILE), result, targets, fields, **sizes)
    return result


@triton.jit
def subtract_smoothed(  # type: ignore[no-untyped-def]
    result,
    targets,
    fields,
    PLACES: tl.constexpr,
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """PLACES has four bits per channel: the number of its input, from 1 on, or 0.

    Each program goes through the planes of a sample, with the sums of 3² cells of three planes in registers.
    """
    PLANE: tl.constexpr = SIDE * SIDE
    TILES: tl.constexpr = (PLANE * CHANNELS + TILE - 1) // TILE
    first = (tl.program_id(0) // TILES).to(tl.int64) * SIDE * PLANE
    place = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    stored, cell = place < PLANE * CHANNELS, place // CHANNELS % PLANE
    source = (tl.full([TILE], PLACES, tl.int64) >> place % CHANNELS * 4) % 16
    y, z, used = cell // SIDE, cell % SIDE, stored & (source > 0)
    fields += (first + cell) * INPUTS + source - 1
    near = (tl.minimum(y, 1) + 1 + tl.minimum(SIDE - 1 - y, 1)) * (tl.minimum(z, 1) + 1 + tl.minimum(SIDE - 1 - z, 1))
    before, here = tl.full([TILE], 0.0, tl.float32), sum_of_9(fields, y, z, used, SIDE, INPUTS)
    for x in range(SIDE):
        after = sum_of_9(fields + (x + 1) * PLANE * INPUTS, y, z, used & (x < SIDE - 1), SIDE, INPUTS)
        cells = near * (tl.minimum(x, 1) + 1 + tl.minimum(SIDE - 1 - x, 1))
        there = (first + x * PLANE) * CHANNELS + place
        tl.store(result + there, tl.load(targets + there, mask=stored) - (before + here + after) / cells, mask=stored)
        before, here = here, after


@triton.jit
def sum_of_9(cells, y, z, used, SIDE: tl.constexpr, INPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of a cell at (y, z) and its neighbors in a plane."""
    total = tl.full(y.shape, 0.0, tl.float32)
    for number in tl.static_range(9):
        y_step, z_step = number // 3 - 1, number % 3 - 1
        inside = used & (y + y_step >= 0) & (y + y_step < SIDE) & (z + z_step >= 0) & (z + z_step < SIDE)
        total += tl.load(cells + (y_step * SIDE + z_step) * INPUTS, mask=inside, other=0.0).to(tl.float32)
    return total
