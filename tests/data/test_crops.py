"""The crop copier against the plain definition: a slice of the array, then symmetry.apply."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from utils.data import symmetry
from utils.data.crops import CropCopier

BOX, CROP = 12, 5
VECTORS = [(1, 2, 3)]
FIELD = np.random.default_rng(0).standard_normal((5, BOX, BOX, BOX)).astype(np.float32)
ORIGINS = np.array([(0, 0, 0), (7, 7, 7), (3, 0, 7), (1, 6, 4)])


def plain(origin: np.ndarray, index: int, mode: str = "full") -> np.ndarray:
    x, y, z = (slice(start, start + CROP) for start in origin)
    return symmetry.apply(FIELD[:, x, y, z], index, VECTORS, mode)


def copied(copier: CropCopier, origin: np.ndarray, index: int) -> np.ndarray:
    out = np.full((5, CROP, CROP, CROP), np.nan, dtype=np.float32)
    copier.copy(origin, index, out)
    return out


@pytest.mark.parametrize("mode", ["full", "grid"])
def test_all_48_symmetries_are_bit_identical_to_the_plain_definition(mode: str) -> None:
    copier = CropCopier(FIELD, CROP, VECTORS, mode)
    for index in range(symmetry.COUNT):
        for origin in ORIGINS:
            expected = plain(origin, index, mode)
            assert copied(copier, origin, index).tobytes() == expected.tobytes()


def test_vector_components_are_permuted_and_negated() -> None:
    """The modes differ: else 'full' would do no more than 'grid'."""
    full, grid = (CropCopier(FIELD, CROP, VECTORS, mode) for mode in ("full", "grid"))
    differing = [
        not np.array_equal(copied(full, ORIGINS[0], index), copied(grid, ORIGINS[0], index))
        for index in range(symmetry.COUNT)
    ]
    assert differing == [False] + [True] * 47


def test_a_chunked_dataset_gives_the_same_crops(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "field.h5", "w") as file:
        dataset = file.create_dataset("field", data=FIELD, chunks=(1, 4, 4, 4), compression="gzip")
        copier = CropCopier(dataset, CROP, VECTORS, "full")
        for index in (0, 1, 23, 47):
            for origin in ORIGINS:
                np.testing.assert_array_equal(copied(copier, origin, index), plain(origin, index))


def test_a_field_with_other_strides_gives_the_same_crops() -> None:
    strided = np.asfortranarray(FIELD)
    copier = CropCopier(strided, CROP, VECTORS, "full")
    for index in (0, 5, 31):
        np.testing.assert_array_equal(copied(copier, ORIGINS[3], index), plain(ORIGINS[3], index))


def test_one_copier_serves_several_threads_at_once() -> None:
    """Each thread has a scratch block of its own; the crop is large enough for numpy to release the lock."""
    field = np.random.default_rng(1).standard_normal((4, 24, 24, 24)).astype(np.float32)
    copier = CropCopier(field, 24, VECTORS, "full")
    expected = [symmetry.apply(field, index, VECTORS) for index in range(symmetry.COUNT)]

    def copy(index: int) -> np.ndarray:
        out = np.empty_like(field)
        copier.copy(np.zeros(3, dtype=int), index, out)
        return out

    with ThreadPoolExecutor(4) as pool:
        for index, result in enumerate(pool.map(copy, list(range(symmetry.COUNT)) * 4)):
            np.testing.assert_array_equal(result, expected[index % symmetry.COUNT])
