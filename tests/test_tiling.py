"""Tiles cover a volume, overlap as they should, and are put together in proportions that add up to one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from utils.errors import UserError
from utils.tiling import cut, pieces, tile_volume

CASES = [
    (size, tile, step, periodic)
    for size, tile, periodic in itertools.product((1, 7, 16, 33, 128), (1, 2, 7, 16, 32), (True, False))
    for step in sorted({1, tile // 3, tile // 2, tile - 1, tile})
    if tile <= size and 1 <= step <= tile
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[int, int, int, bool]:
    return request.param


def test_the_shares_of_all_tiles_add_up_to_one_in_each_cell(case: tuple[int, int, int, bool]) -> None:
    size, tile, _, _ = case
    axis = cut(*case)
    total = np.zeros(size)
    for origin, window in zip(axis.origins, axis.windows, strict=True):
        for place, share in enumerate(window):
            total[(origin + place) % size] += share
    np.testing.assert_allclose(total, 1, atol=1e-6)
    assert axis.windows.dtype == np.float32
    assert axis.windows.shape == (len(axis.origins), tile)
    assert (axis.windows > 0).all()


def test_tiles_are_at_most_a_step_apart_and_inside(case: tuple[int, int, int, bool]) -> None:
    size, tile, step, periodic = case
    origins = cut(*case).origins
    gaps = np.diff([*origins, size + origins[0]] if periodic else origins)
    assert origins[0] == 0
    assert (gaps >= 1).all()
    assert (gaps <= step).all()
    assert origins[-1] < size
    if not periodic:
        assert origins[-1] == size - tile, "it ends with the volume, and does not wrap"


def test_no_more_tiles_than_it_takes(case: tuple[int, int, int, bool]) -> None:
    size, tile, step, periodic = case
    stretch = size if periodic else size - tile
    assert len(cut(*case).origins) == -(-stretch // step) + (not periodic)


def test_half_overlapping_tiles_are_the_squares_of_sines() -> None:
    axis = cut(64, 16, 8)
    assert axis.origins == tuple(range(0, 64, 8))
    expected = np.sin(np.pi * (np.arange(16) + 0.5) / 16) ** 2
    np.testing.assert_allclose(axis.windows, np.tile(expected, (8, 1)), atol=1e-6)


def test_at_the_faces_of_a_volume_that_is_not_periodic_one_tile_has_all() -> None:
    axis = cut(24, 16, 8, periodic=False)
    assert axis.origins == (0, 8)
    np.testing.assert_array_equal(axis.windows[0, :8], 1)
    np.testing.assert_array_equal(axis.windows[1, 8:], 1)


def test_a_step_that_does_not_divide_is_spread_evenly() -> None:
    assert cut(100, 32, 16).origins == (0, 14, 28, 42, 57, 71, 85)
    assert cut(100, 32, 16, periodic=False).origins == (0, 13, 27, 40, 54, 68)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((15, 16, 8), r"the box has 15 cells a side, fewer than a tile's 16; give a larger box or smaller tiles"),
        ((15, 16, 8, False), r"the box has 15 cells a side, fewer than a tile's 16"),
        ((32, 16, 17), r"step 17 does not suit a tile of 16 cells; give one from 1 to 16, best is half"),
        ((32, 16, 0), r"step 0 does not suit a tile of 16 cells"),
        ((32, 16, -1), r"step -1 does not suit a tile of 16 cells"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(arguments: tuple, says: str) -> None:
    with pytest.raises(UserError, match=says):
        cut(*arguments)


@pytest.mark.parametrize("start", [-17, -8, -3, 0, 1, 7, 8, 19])
@pytest.mark.parametrize("length", [0, 1, 5, 8, 13, 24])
def test_pieces_are_the_cells_in_their_order_and_straight(start: int, length: int) -> None:
    volume, tile = np.arange(8), np.full(length, -1)
    found = list(pieces(start, length, 8))
    for piece in found:
        assert 0 <= piece.volume.start < piece.volume.stop <= 8
        tile[piece.tile] = volume[piece.volume]
    np.testing.assert_array_equal(tile, np.arange(start, start + length) % 8)
    assert len(found) == len(set((np.arange(start, start + length)) // 8)), "as few as there can be"


def test_a_volume_is_cut_along_each_axis_by_itself() -> None:
    tiling = tile_volume((64, 24, 16), 16)
    assert [axis.origins for axis in (tiling.x, tiling.y, tiling.z)] == [
        tuple(range(0, 64, 8)),
        (0, 8, 16),
        (0, 8),
    ]
    assert tiling.shape == (64, 24, 16)
    assert (tiling.count, tiling.layer_count) == (48, 6)
    assert tiling.layer() == list(itertools.product(range(3), range(2)))
    assert tile_volume((16, 16, 16), 16, periodic=False).count == 1
    assert tile_volume((3, 2, 1), 1).count == 6, "half of one cell is still a step"
