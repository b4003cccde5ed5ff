"""Power and cross power agree with an independent library and with known fields."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from utils.data import modes
from utils.data.slabs import Slabs
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.evaluation.results import Spectrum
from utils.evaluation.spectra import KShells

# Even and odd sides. No mode is exactly between two shells, where rounding would decide.
SHAPES = [(16, 16, 16), (9, 16, 15), (24, 6, 7)]
ONE = World(Launch("test"), torch.device("cpu"))


def measured(predicted: np.ndarray, target: np.ndarray, cell: float = 1.0) -> Spectrum:
    shells = KShells(Slabs(predicted.shape, ONE), cell)
    return shells.spectrum(shells.sums([torch.tensor(field, dtype=torch.float32) for field in (predicted, target)]))


def noise(shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def related(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Two correlated fields with non-zero means."""
    common = noise(shape)
    return 2.0 * common + noise(shape, 1) + 3.0, common - 0.5 * noise(shape, 2) - 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_power_and_cross_power_agree_with_powerbox(shape: tuple[int, int, int]) -> None:
    tools = pytest.importorskip("powerbox.tools")
    cell = 0.37
    first, second = related(shape)
    found = measured(first, second, cell)
    edges = (np.arange(max(shape) // 2 + 1) + 0.5) * 2 * np.pi / (max(shape) * cell)
    lengths = [cells * cell for cells in shape]

    def theirs(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        result = tools.get_power(one, lengths, deltax2=other, bins=edges, dimensionless=False)
        return (result.power, result.bin_avg) if hasattr(result, "power") else result[:2]  # before powerbox 1.0

    for ours, pair in ((found.predicted, (first, first)), (found.target, (second, second))):
        power, k = theirs(*pair)
        np.testing.assert_allclose(ours, power, rtol=1e-5)
        np.testing.assert_allclose(found.k, k, rtol=1e-9)
    cross, _ = theirs(first, second)
    np.testing.assert_allclose(found.cross, cross, rtol=1e-5, atol=1e-5 * np.abs(cross).max())
    axes = np.meshgrid(*(np.fft.fftfreq(cells) * max(shape) for cells in shape), indexing="ij")
    shells = np.floor(np.sqrt(sum(axis**2 for axis in axes)) + 0.5).astype(int)
    np.testing.assert_array_equal(found.modes, np.bincount(shells.ravel())[1 : max(shape) // 2 + 1])


def test_a_large_mean_and_few_columns_at_once_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, values in steps of 1/256 fit next to a mean of 2^14; a transform of both together would lose them."""
    fields = [np.round(256 * field) / 256 for field in related((16, 16, 16))]
    near, far = measured(*fields), measured(*(field + 2**14 for field in fields))
    for name in ("predicted", "target", "cross"):
        np.testing.assert_allclose(getattr(far, name), getattr(near, name), rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(modes, "MODES_AT_ONCE", 500)  # three columns at a time, one in the last batch
    for name, values in vars(measured(*fields)).items():
        np.testing.assert_allclose(values, getattr(near, name), rtol=1e-12)


def test_no_shell_is_empty_for_any_shape() -> None:
    for shape in ((2, 2, 40), (40, 3, 1), (1, 9, 2), (7, 7, 7)):
        found = measured(noise(shape), noise(shape, 1))
        assert (found.modes > 0).all(), shape
        assert (np.diff(found.k) > 0).all(), shape
        assert np.isfinite(found.correlation).all(), shape


def test_a_constant_field_has_no_power_and_fields_are_not_modified() -> None:
    fields = [torch.full((8, 8, 8), 3.0), torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))]
    before = [field.clone() for field in fields]
    shells = KShells(Slabs((8, 8, 8), ONE), 1.0)
    found = shells.spectrum(shells.sums([*fields]))
    assert (found.predicted == 0).all()
    assert (found.ratio == 0).all()
    assert (found.target > 0).all()
    assert all(torch.equal(field, old) for field, old in zip(fields, before, strict=True))
