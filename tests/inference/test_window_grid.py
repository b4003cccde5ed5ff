"""Windows cover a volume, overlap as required, and have weights that add up to one in every cell."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from utils.errors import UserError
from utils.inference.window_grid import build_window_grid, window_axis, wrapped_segments

CASES = [
    (size, window, window - step, periodic)
    for size, window, periodic in itertools.product((1, 7, 16, 33, 128), (1, 2, 7, 16, 32), (True, False))
    for step in sorted({1, window // 3, window // 2, window - 1, window})
    if window <= size and 1 <= step <= window
]


def test_any_size_window_and_overlap_cover_the_axis() -> None:
    """Weights are positive and sum to one; windows overlap by at least the overlap; there are no more than needed."""
    for case in CASES:
        size, window, overlap, periodic = case
        step, axis = window - overlap, window_axis(*case)
        origins, weights = axis.origins, axis.weights
        total = np.zeros(size)
        np.add.at(total, (np.array(origins)[:, None] + np.arange(window)) % size, weights)
        np.testing.assert_allclose(total, 1, atol=1e-6, err_msg=str(case))
        assert weights.dtype == np.float32, case
        assert (weights > 0).all(), case
        gaps = np.diff([*origins, size] if periodic else origins)
        assert origins[0] == 0, case
        assert ((gaps >= 1) & (gaps <= step)).all(), case
        assert periodic or origins[-1] == size - window, case
        assert len(origins) == -(-(size if periodic else size - window) // step) + (not periodic), case


def test_weights_and_origins_of_known_grids() -> None:
    half = window_axis(64, 16, 8)
    assert half.origins == tuple(range(0, 64, 8))
    expected = np.sin(np.pi * (np.arange(16) + 0.5) / 16) ** 2
    np.testing.assert_allclose(half.weights, np.tile(expected, (8, 1)), atol=1e-6)
    faces = window_axis(24, 16, 8, periodic=False)
    assert faces.origins == (0, 8)
    np.testing.assert_array_equal(faces.weights[0, :8], 1)  # only one window covers the cells at a face
    np.testing.assert_array_equal(faces.weights[1, 8:], 1)
    assert window_axis(100, 32, 16).origins == (0, 14, 28, 42, 57, 71, 85)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((15, 16, 8), "the box has 15 cells per side, fewer than a window's 16; give a larger box or smaller --window"),
        ((32, 16, 16), r"overlap 16 must be smaller than the window \(16\); 8 is recommended"),
        ((32, 16, -1), "overlap -1 must be at least 0; 8 is recommended"),
    ],
)
def test_windows_that_do_not_fit_are_refused_with_the_remedy(arguments: tuple, says: str) -> None:
    with pytest.raises(UserError, match=says):
        window_axis(*arguments)


def test_pieces_of_a_periodic_axis_are_in_order_and_do_not_wrap() -> None:
    volume = np.arange(8)
    for start, length in itertools.product((-17, -8, -3, 0, 1, 7, 8, 19), (0, 1, 5, 8, 13, 24)):
        window, found = np.full(length, -1), list(wrapped_segments(start, length, 8))
        for piece in found:
            assert 0 <= piece.volume.start < piece.volume.stop <= 8
            window[piece.window] = volume[piece.volume]
        cells = np.arange(start, start + length)
        np.testing.assert_array_equal(window, cells % 8, err_msg=f"start {start}, length {length}")
        assert len(found) == len(set(cells // 8)), "more pieces than needed"


def test_the_axes_of_a_grid_are_cut_separately() -> None:
    grid = build_window_grid((64, 24, 16), 16)
    assert [axis.origins for axis in (grid.x, grid.y, grid.z)] == [tuple(range(0, 64, 8)), (0, 8, 16), (0, 8)]
    assert grid.shape == (64, 24, 16)
    assert grid.count == 48
    assert build_window_grid((16, 16, 16), 16, periodic=False).count == 1
    assert build_window_grid((3, 2, 1), 1).count == 6, "windows are at least one cell apart by default"
