"""Tiles cover a volume, overlap as required, and have weights that add up to one in every cell."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from utils.errors import UserError
from utils.inference.window_grid import build_window_grid, cut, pieces

CASES = [
    (size, tile, step, periodic)
    for size, tile, periodic in itertools.product((1, 7, 16, 33, 128), (1, 2, 7, 16, 32), (True, False))
    for step in sorted({1, tile // 3, tile // 2, tile - 1, tile})
    if tile <= size and 1 <= step <= tile
]


def test_any_size_tile_and_step_give_complete_overlapping_tiles() -> None:
    """Weights are positive and sum to one; tiles start at most a step apart; there are no more than needed."""
    for case in CASES:
        size, tile, step, periodic = case
        axis = cut(*case)
        origins, windows = axis.origins, axis.windows
        total = np.zeros(size)
        np.add.at(total, (np.array(origins)[:, None] + np.arange(tile)) % size, windows)
        np.testing.assert_allclose(total, 1, atol=1e-6, err_msg=str(case))
        assert windows.dtype == np.float32, case
        assert windows.shape == (len(origins), tile), case
        assert (windows > 0).all(), case
        gaps = np.diff([*origins, size + origins[0]] if periodic else origins)
        assert origins[0] == 0, case
        assert ((gaps >= 1) & (gaps <= step)).all(), case
        assert origins[-1] < size if periodic else origins[-1] == size - tile, case
        stretch = size if periodic else size - tile
        assert len(origins) == -(-stretch // step) + (not periodic), case


def test_windows_and_origins_of_known_tilings() -> None:
    half = cut(64, 16, 8)
    assert half.origins == tuple(range(0, 64, 8))
    expected = np.sin(np.pi * (np.arange(16) + 0.5) / 16) ** 2
    np.testing.assert_allclose(half.windows, np.tile(expected, (8, 1)), atol=1e-6)
    faces = cut(24, 16, 8, periodic=False)
    assert faces.origins == (0, 8)
    np.testing.assert_array_equal(faces.windows[0, :8], 1)  # only one tile covers the cells at a face
    np.testing.assert_array_equal(faces.windows[1, 8:], 1)
    assert cut(100, 32, 16).origins == (0, 14, 28, 42, 57, 71, 85)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((15, 16, 8), r"the box has 15 cells a side, fewer than a tile's 16; give a larger box or smaller tiles"),
        ((32, 16, 17), r"step 17 does not suit a tile of 16 cells; give one from 1 to 16, best is half"),
        ((32, 16, 0), r"step 0 does not suit a tile of 16 cells"),
    ],
)
def test_a_tiling_that_does_not_fit_is_refused_with_the_remedy(arguments: tuple, says: str) -> None:
    with pytest.raises(UserError, match=says):
        cut(*arguments)


def test_pieces_of_a_periodic_axis_are_in_order_and_do_not_wrap() -> None:
    volume = np.arange(8)
    for start, length in itertools.product((-17, -8, -3, 0, 1, 7, 8, 19), (0, 1, 5, 8, 13, 24)):
        tile, found = np.full(length, -1), list(pieces(start, length, 8))
        for piece in found:
            assert 0 <= piece.volume.start < piece.volume.stop <= 8
            tile[piece.tile] = volume[piece.volume]
        cells = np.arange(start, start + length)
        np.testing.assert_array_equal(tile, cells % 8, err_msg=f"start {start}, length {length}")
        assert len(found) == len(set(cells // 8)), "more pieces than needed"


def test_a_volume_is_tiled_along_each_axis_separately() -> None:
    tiling = build_window_grid((64, 24, 16), 16)
    assert [axis.origins for axis in (tiling.x, tiling.y, tiling.z)] == [tuple(range(0, 64, 8)), (0, 8, 16), (0, 8)]
    assert tiling.shape == (64, 24, 16)
    assert (tiling.count, tiling.layer_count) == (48, 6)
    assert tiling.layer() == list(itertools.product(range(3), range(2)))
    assert build_window_grid((16, 16, 16), 16, periodic=False).count == 1
    assert build_window_grid((3, 2, 1), 1).count == 6, "the default step is at least one cell"
