"""The 48 symmetries: a group of matrices, and its action on scalar and vector fields."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from utils.data import symmetry

MATRICES = symmetry.matrices()
ALL = range(symmetry.COUNT)
VECTOR = [(0, 1, 2)]


def random_field(channels: int, size: int = 5) -> np.ndarray:
    return np.random.default_rng(channels).standard_normal((channels, size, size, size)).astype(np.float32)


def positions(size: int) -> np.ndarray:
    """Each cell's position relative to the centre, in half cells so that they are whole numbers: [3, D, D, D]."""
    return (2 * np.indices((size,) * 3) - (size - 1)).astype(np.float32)


def index_of(matrix: np.ndarray) -> int:
    (found,) = np.nonzero((matrix == MATRICES).all(axis=(1, 2)))
    return int(found[0])


def gradient(field: np.ndarray) -> np.ndarray:
    """Periodic central differences of a scalar field [D, D, D] -> [3, D, D, D]."""
    return np.stack([np.roll(field, -1, axis) - np.roll(field, 1, axis) for axis in range(3)])


# --- the group -----------------------------------------------------------------------------------------------------


def test_there_are_48_distinct_signed_permutations() -> None:
    assert MATRICES.shape == (48, 3, 3)
    assert len(np.unique(MATRICES.reshape(48, 9), axis=0)) == 48
    assert (np.abs(MATRICES).sum(axis=1) == 1).all()
    assert (np.abs(MATRICES).sum(axis=2) == 1).all()


def test_half_of_them_are_rotations_and_half_reflections() -> None:
    determinants = np.rint(np.linalg.det(MATRICES)).astype(int)
    assert sorted(determinants) == [-1] * 24 + [1] * 24


def test_index_0_is_the_identity() -> None:
    assert symmetry.IDENTITY == 0
    np.testing.assert_array_equal(MATRICES[0], np.eye(3))
    field = random_field(4)
    np.testing.assert_array_equal(symmetry.apply(field, 0, [(1, 2, 3)]), field)


def test_the_group_is_closed_and_holds_every_inverse() -> None:
    known = {matrix.tobytes() for matrix in MATRICES}
    for a, b in itertools.product(ALL, ALL):
        assert (MATRICES[a] @ MATRICES[b]).tobytes() in known
    for matrix in MATRICES:
        assert matrix.T.copy().tobytes() in known  # orthogonal: the transpose is the inverse
        np.testing.assert_array_equal(matrix @ matrix.T, np.eye(3))


# --- the action on fields ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 5])
def test_a_scalar_moves_as_the_matrix_says(size: int) -> None:
    """The value at x is found at x' = M x about the centre: cell by cell, for an even and an odd size."""
    field = random_field(1, size)
    places = positions(size).reshape(3, -1)
    for index in ALL:
        moved = symmetry.apply(field, index, [])
        x, y, z = ((MATRICES[index] @ places + size - 1) // 2).astype(int)
        np.testing.assert_array_equal(moved[0, x, y, z], field[0].reshape(-1))


@pytest.mark.parametrize("size", [4, 5])
def test_the_field_of_positions_is_invariant(size: int) -> None:
    """A vector field that equals the position: cells and components must move together."""
    field = positions(size)
    for index in ALL:
        np.testing.assert_array_equal(symmetry.apply(field, index, VECTOR), field)


def test_every_symmetry_commutes_with_the_gradient() -> None:
    field = random_field(1, 6)
    for index in ALL:
        turned_then_differentiated = gradient(symmetry.apply(field, index, [])[0])
        differentiated_then_turned = symmetry.apply(gradient(field[0]), index, VECTOR)
        np.testing.assert_array_equal(turned_then_differentiated, differentiated_then_turned)


def test_applying_two_symmetries_is_applying_their_product() -> None:
    field = random_field(4, 3)
    turned = [symmetry.apply(field, index, [(1, 2, 3)]) for index in ALL]
    for a, b in itertools.product(ALL, ALL):
        product = index_of(MATRICES[a] @ MATRICES[b])
        np.testing.assert_array_equal(symmetry.apply(turned[b], a, [(1, 2, 3)]), turned[product])


def test_the_48_images_of_a_field_are_distinct() -> None:
    field = random_field(1, 4)
    assert len({symmetry.apply(field, index, []).tobytes() for index in ALL}) == 48


def test_vectors_in_any_channels_and_any_order() -> None:
    """Two vectors and a scalar, the second vector's components stored as z, x, y."""
    place = positions(4)
    scalar = random_field(1, 4)
    field = np.stack([place[0], scalar[0], place[2], place[0], place[1], place[1], place[2]])
    vectors = [(0, 5, 6), (3, 4, 2)]
    for index in ALL:
        moved = symmetry.apply(field, index, vectors)
        np.testing.assert_array_equal(moved[[0, 5, 6]], place)
        np.testing.assert_array_equal(moved[[3, 4, 2]], place)
        np.testing.assert_array_equal(moved[1], symmetry.apply(scalar, index, [])[0])


def test_mode_grid_leaves_components_in_their_places() -> None:
    field = random_field(4)
    for index in ALL:
        moved = symmetry.apply(field, index, [(1, 2, 3)], mode="grid")
        for channel in range(4):
            np.testing.assert_array_equal(moved[channel], symmetry.apply(field[channel : channel + 1], index, [])[0])


def test_apply_returns_a_new_contiguous_array_and_leaves_its_argument() -> None:
    field = random_field(4)
    before = field.copy()
    for index in ALL:
        moved = symmetry.apply(field, index, [(1, 2, 3)])
        assert moved.flags.c_contiguous
        assert moved.dtype == np.float32
        assert not np.shares_memory(moved, field)
    np.testing.assert_array_equal(field, before)


def test_moving_axes_takes_no_copy_and_leaves_leading_axes() -> None:
    field = random_field(6).reshape(2, 3, 5, 5, 5)
    for index in ALL:
        moved = symmetry.move_axes(field, index)
        assert np.shares_memory(moved, field)
        np.testing.assert_array_equal(moved[1], symmetry.apply(field[1], index, []))
