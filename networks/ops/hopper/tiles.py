"""Tiles of the kernels for Hopper GPUs. They depend on shapes alone, so results repeat bit for bit."""

import math
from typing import NamedTuple

BLOCK = 64  # channels of one step of a sum; channels are multiples of it
LARGEST_SIDE = 64  # of the coarse grid: a chunk of the weight gradient holds complete rows
MOST_ELEMENTS = 2**30  # of a sample's cells in edges.py: their addresses within a tile are int32
PROCESSORS = 132  # multiprocessors of H100 and H200; other GPUs use the same tiles, so that they give the same bits
SHARED_MEMORY = 227 * 1024  # bytes per program that the tiles may need


class Tile(NamedTuple):
    """Cells (or rows of the weights), columns and summands of a program's tile, and its warps."""

    rows: int
    columns: int
    depth: int
    warps: int = 8

    def constants(self) -> dict[str, int]:
        sizes = {"BM": self.rows, "BN": self.columns, "BK": self.depth}
        return {**sizes, "num_warps": self.warps, "num_stages": 4}


def convolution_tile(cells: int, small: int) -> Tile:
    columns = math.gcd(2 * BLOCK, small)  # the largest power of two up to 2 BLOCK that divides the channels
    for rows in (4 * BLOCK, 2 * BLOCK):
        if -(-cells // rows) * (small // columns) >= PROCESSORS * 2 // 3:
            return Tile(rows, columns, BLOCK)
    return Tile(2 * BLOCK if cells > BLOCK else BLOCK, columns, BLOCK)


def transposed_tile(cells: int, channels: int, classes: int) -> Tile:
    columns = math.gcd(2 * BLOCK, channels)
    if classes * -(-cells // (4 * BLOCK)) * (channels // columns) >= PROCESSORS * 2 // 3:
        return Tile(4 * BLOCK, columns, BLOCK)
    enough = cells > BLOCK and classes * -(-cells // (2 * BLOCK)) * (channels // columns) >= PROCESSORS // 3
    return Tile(2 * BLOCK, columns, BLOCK, warps=4) if enough else Tile(BLOCK, BLOCK, BLOCK, warps=4)


def weight_tile(small: int, large: int, runs: bool) -> Tile:
    columns = 4 * large if runs else math.gcd(4 * BLOCK, large)
    return Tile(math.gcd(2 * BLOCK if columns > 2 * BLOCK else 4 * BLOCK, small), columns, BLOCK)


def splits_of(tiles: int, chunks: int) -> int:
    """Number of programs for the sum of a tile: rounds of all processors are full, and a program has 16 chunks."""

    def score(count: int) -> float:
        rounds = tiles * count / PROCESSORS
        return rounds / math.ceil(rounds) - 0.004 * count

    return max(range(1, max(1, min(64, chunks // 16)) + 1), key=score)


def box(side: int, cells: int, planes: int = 1) -> tuple[int, int, int]:
    """Samples, planes and complete rows of a tile of that many cells; at most `planes` planes of a sample."""
    rows = min(side, cells // side)
    depth = min(planes, side, cells // side // rows)
    return cells // side // rows // depth, depth, rows
