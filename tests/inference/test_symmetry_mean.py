"""The mean of a prediction over the symmetries of the cube: equivariant for any network, of any file."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from test_sliding_window import ALONE, random_field, small_unet
from volume_files import smooth_field

import predict
from utils.data import symmetry
from utils.inference.sliding_window import Predict, symmetry_mean
from utils.inference.trained_network import SYMMETRIES

INPUT_VECTORS, OUTPUT_VECTORS = [(1, 2, 3)], [(2, 3, 1)]  # the target's components in another order


def mean_over(predict_windows: Predict, count: int) -> Predict:
    return symmetry_mean(predict_windows, count, (4, 5), (INPUT_VECTORS, OUTPUT_VECTORS), ALONE)


def largest_error(predict_windows: Predict, index: int) -> float:
    """Largest difference between the prediction of a transformed window and the transformed prediction."""
    window = random_field((8, 8, 8))
    transformed = symmetry.apply(window, index, INPUT_VECTORS)
    found, expected = (predict_windows(torch.from_numpy(field)[None])[0].numpy() for field in (transformed, window))
    return float(np.abs(found - symmetry.apply(expected, index, OUTPUT_VECTORS)).max())


@pytest.mark.parametrize("count", SYMMETRIES)
def test_the_mean_over_a_group_is_equivariant_under_it_and_the_network_is_not(count: int) -> None:
    errors = [largest_error(mean_over(small_unet(), count), index) for index in range(symmetry.COUNT)]
    assert max(errors[:count]) < 1e-5
    assert min(errors[count:], default=1) > 0.1


def equivariant(windows: torch.Tensor) -> torch.Tensor:
    """Density from density, divergence and speed; velocity from velocity and the density's gradient."""

    def slope(field: torch.Tensor, axis: int) -> torch.Tensor:
        return (field.roll(-1, axis) - field.roll(1, axis)) / 2

    density, velocity = windows[:, 0], windows[:, 1:]
    divergence = sum(slope(velocity[:, axis], 1 + axis) for axis in range(3))
    x, y, z = (velocity[:, axis] * density + slope(density, 1 + axis) for axis in range(3))
    return torch.stack([density + divergence, z, x, y, velocity.square().sum(1)], dim=1)


def test_an_equivariant_network_predicts_the_same_with_any_number_of_symmetries() -> None:
    """Lower precision is summed in float32."""
    windows = torch.from_numpy(random_field((3, 8, 8, 8))).movedim(0, 1).contiguous()
    expected = equivariant(windows)
    for count in SYMMETRIES:
        torch.testing.assert_close(mean_over(equivariant, count)(windows), expected, rtol=0, atol=1e-5)
    mean = mean_over(lambda windows: equivariant(windows).bfloat16(), 48)(windows)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, expected, rtol=0.02, atol=0.02)


def test_the_gas_of_a_rotated_box_is_the_rotated_gas(trained_run: Path, tmp_path: Path) -> None:
    """With the vectors of the checkpoint's config, and windows that overlap."""
    vectors, index = [(1, 2, 3)], 30
    box = smooth_field(4, 16, np.random.default_rng(5)).astype(np.float32)
    gas = []
    for name, field in (("box", box), ("rotated", symmetry.apply(box, index, vectors))):
        path, output = tmp_path / f"{name}.h5", tmp_path / f"{name}_gas.h5"
        with h5py.File(path, "w") as file:
            file["Nbody"] = field
        predict.main([f"--checkpoint={trained_run}", f"--input={path}", f"--output={output}", "--symmetries=48"])
        with h5py.File(output) as file:
            gas.append(file["Hydro"][...])
            assert file.attrs["symmetries"] == 48
    expected = symmetry.apply(gas[0], index, vectors)
    np.testing.assert_allclose(gas[1], expected, atol=1e-5 * float(np.abs(expected).max()))
