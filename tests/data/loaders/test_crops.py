"""Compares the crop copier with the definition: a slice of the array, then symmetry.apply."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from utils.data import symmetry
from utils.data.loaders.crops import CropCopier

BOX, CROP = 12, 5
VECTORS = [(1, 2, 3)]
FIELD = np.random.default_rng(0).standard_normal((5, BOX, BOX, BOX)).astype(np.float32)
ORIGINS = np.array([(0, 0, 0), (7, 7, 7), (3, 0, 7), (1, 6, 4)])


def copied(copier: CropCopier, origin: np.ndarray, index: int) -> np.ndarray:
    out = np.full((5, CROP, CROP, CROP), np.nan, dtype=np.float32)
    copier.copy(0, origin, index, out)
    return out


@pytest.mark.parametrize("stored", ["in C order", "in Fortran order", "chunked"])
def test_all_48_symmetries_are_bit_identical_to_the_definition(tmp_path: Path, stored: str) -> None:
    """In both modes, which differ in every symmetry except the identity."""
    with h5py.File(tmp_path / "field.h5", "w") as file:
        dataset = file.create_dataset("field", data=FIELD, chunks=(1, 4, 4, 4), compression="gzip")
        field = {"in C order": FIELD, "in Fortran order": np.asfortranarray(FIELD), "chunked": dataset}[stored]
        full, grid = (CropCopier([field], CROP, VECTORS, mode) for mode in ("full", "grid"))
        for index in range(symmetry.COUNT):
            for origin in ORIGINS:
                x, y, z = (slice(start, start + CROP) for start in origin)
                crops = {"full": copied(full, origin, index), "grid": copied(grid, origin, index)}
                for mode, crop in crops.items():
                    expected = symmetry.apply(FIELD[:, x, y, z], index, VECTORS, mode)
                    assert crop.tobytes() == expected.tobytes(), f"symmetry {index}, mode {mode}"
                assert np.array_equal(crops["full"], crops["grid"]) == (index == symmetry.IDENTITY)


def test_one_copier_serves_several_threads_at_once() -> None:
    """Each thread has its own scratch block. The crop is large enough for numpy to release the interpreter lock."""
    field = np.random.default_rng(1).standard_normal((4, 24, 24, 24)).astype(np.float32)
    copier = CropCopier([field], 24, VECTORS, "full")
    expected = [symmetry.apply(field, index, VECTORS) for index in range(symmetry.COUNT)]

    def copy(index: int) -> np.ndarray:
        out = np.empty_like(field)
        copier.copy(0, np.zeros(3, dtype=int), index, out)
        return out

    with ThreadPoolExecutor(4) as pool:
        for index, result in enumerate(pool.map(copy, list(range(symmetry.COUNT)) * 4)):
            np.testing.assert_array_equal(result, expected[index % symmetry.COUNT])
