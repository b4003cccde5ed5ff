"""The 48 symmetries: a group of matrices, and its action on scalar and vector fields."""

import numpy as np
import pytest
import torch

from utils.data import symmetry

ALL = range(symmetry.COUNT)
# The group as matrices [48, 3, 3]: x' = M x. Row a has the sign of axis a in column perm[a].
MATRICES = symmetry.SIGNS[:, :, None] * np.eye(3, dtype=np.int64)[symmetry.PERMUTATIONS]
VECTOR = [(0, 1, 2)]


def positions(size: int) -> np.ndarray:
    """Each cell's position relative to the center, in half cells so that they are integers: [3, D, D, D]."""
    return (2 * np.indices((size,) * 3) - (size - 1)).astype(np.float32)


def test_the_order_of_the_symmetries_is_fixed() -> None:
    """Plans draw an index: with another order, a resumed training run would continue with other samples."""
    assert len(np.unique(MATRICES, axis=0)) == symmetry.COUNT == 48, "all signed permutations, each once"
    assert (MATRICES[symmetry.IDENTITY] == np.eye(3)).all()
    assert MATRICES[1].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, -1]]
    assert MATRICES[30].tolist() == [[0, -1, 0], [0, 0, -1], [1, 0, 0]]
    assert MATRICES[47].tolist() == [[0, 0, -1], [0, -1, 0], [-1, 0, 0]]


@pytest.mark.parametrize("size", [4, 5])
def test_values_and_vectors_move_by_the_matrix(size: int) -> None:
    """The value at x moves to x' = M x about the center; a vector field that equals the position is invariant."""
    field, places = np.random.default_rng(1).random((1, size, size, size)), positions(size).reshape(3, -1)
    for index in ALL:
        moved = symmetry.apply(field, index, [])
        x, y, z = ((MATRICES[index] @ places + size - 1) // 2).astype(int)
        np.testing.assert_array_equal(moved[0, x, y, z], field[0].reshape(-1))
        np.testing.assert_array_equal(symmetry.apply(positions(size), index, VECTOR), positions(size))


def test_vectors_in_any_channels_and_any_order() -> None:
    """Two vectors and a scalar, the second vector's components stored as z, x, y; in mode grid all are scalars."""
    place = positions(4)
    scalar = np.random.default_rng(1).random((1, 4, 4, 4), np.float32)
    field = np.stack([place[0], scalar[0], place[2], place[0], place[1], place[1], place[2]])
    vectors = [(0, 5, 6), (3, 4, 2)]
    for index in ALL:
        moved = symmetry.apply(field, index, vectors)
        np.testing.assert_array_equal(moved[[0, 5, 6]], place)
        np.testing.assert_array_equal(moved[[3, 4, 2]], place)
        np.testing.assert_array_equal(moved[1], symmetry.apply(scalar, index, [])[0])
        assert moved.flags.c_contiguous
        assert not np.shares_memory(moved, field)
        grid = symmetry.apply(field, index, vectors, mode="grid")
        np.testing.assert_array_equal(grid, symmetry.apply(field, index, []))
        on_device = symmetry.apply_on_device(
            torch.from_numpy(field), index, *map(torch.from_numpy, symmetry.channel_table(7, vectors, "full"))
        )
        np.testing.assert_array_equal(on_device, moved)
        np.testing.assert_array_equal(symmetry.apply(moved, symmetry.inverse(index), vectors), field)
        np.testing.assert_array_equal(grid, [symmetry.apply(channel[None], index, [])[0] for channel in field])


def test_the_symmetries_of_the_tutorial_are_16_rotations_and_8_reflections() -> None:
    """Two examples of its table: x and y exchanged, then x reversed; a cyclic exchange with all axes reversed."""
    chosen = np.array(symmetry.TUTORIAL)
    parity = [np.linalg.det(np.eye(3)[axes]) for axes in symmetry.PERMUTATIONS[chosen]]
    determinants = np.round(parity * symmetry.SIGNS[chosen].prod(axis=1)).astype(int)
    assert (len({*symmetry.TUTORIAL}), np.sum(determinants == 1), np.sum(determinants == -1)) == (24, 16, 8)
    field = np.arange(27.0).reshape(3, 3, 3)
    moved = [symmetry.move_axes(field, index) for index in symmetry.TUTORIAL]
    for expected in (field.transpose(1, 0, 2)[::-1], field.transpose(1, 2, 0)[::-1, ::-1, ::-1]):
        assert any(np.array_equal(expected, view) for view in moved)
    assert not any(np.array_equal(field[::-1], view) for view in moved)
