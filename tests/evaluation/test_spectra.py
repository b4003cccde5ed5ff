"""Power and cross power agree with an independent library, with their definition, and with known fields."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from utils.evaluation import spectra
from utils.evaluation.results import Spectrum
from utils.evaluation.spectra import Shells

# Even and odd sides. In no case is a mode exactly between two shells, where rounding would decide.
SHAPES = [(16, 16, 16), (9, 16, 15), (24, 6, 7)]
CPU = torch.device("cpu")


def measured(predicted: np.ndarray, target: np.ndarray, cell: float = 1.0) -> Spectrum:
    shells = Shells(predicted.shape, cell, CPU)
    return shells.spectrum(shells.sums(*(torch.tensor(field, dtype=torch.float32) for field in (predicted, target))))


def noise(shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def related(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Two correlated fields with non-zero means."""
    common = noise(shape)
    return 2.0 * common + noise(shape, 1) + 3.0, common - 0.5 * noise(shape, 2) - 1.0


def wavenumber(mode: tuple[int, ...], shape: tuple[int, int, int], cell: float) -> float:
    """k of the wave with that many periods along each axis; the upper half of them are the negative ones."""
    periods = [number if number <= n / 2 else number - n for number, n in zip(mode, shape, strict=True)]
    return 2 * np.pi / cell * math.hypot(*(number / n for number, n in zip(periods, shape, strict=True)))


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


def test_a_shell_is_the_mean_over_its_modes() -> None:
    """The definition, mode by mode over the whole Fourier space: no half transform, no weights."""
    shape, cell = (9, 16, 15), 2.5
    first, second = related(shape)
    p, t = np.fft.fftn(first), np.fft.fftn(second)
    longest = max(shape)
    members: dict[int, list[tuple[float, float, float, float]]] = {}
    for mode in itertools.product(*(range(cells) for cells in shape)):
        k = wavenumber(mode, shape, cell)
        shell = math.floor(k / (2 * np.pi / (longest * cell)) + 0.5)
        values = (k, abs(p[mode]) ** 2, abs(t[mode]) ** 2, (p[mode] * np.conj(t[mode])).real)
        members.setdefault(shell, []).append(values)
    cells = math.prod(shape)
    found = measured(first, second, cell)
    assert len(found.k) == longest // 2
    for number in range(longest // 2):
        k, *powers = np.mean(members[number + 1], axis=0)
        assert found.modes[number] == len(members[number + 1])
        assert found.k[number] == pytest.approx(k, rel=1e-9)
        expected = np.array(powers) * cells * cell**3 / cells**2
        ours = [found.predicted[number], found.target[number], found.cross[number]]
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5 * expected[0])


def test_a_large_mean_costs_no_digits() -> None:
    """In float32, values in steps of 1/256 fit next to a mean of 2^14; a transform of both together would lose them."""
    fields = [np.round(256 * field) / 256 for field in related((16, 16, 16))]
    near, far = measured(*fields), measured(*(field + 2**14 for field in fields))
    for name in ("predicted", "target", "cross"):
        np.testing.assert_allclose(getattr(far, name), getattr(near, name), rtol=1e-6, atol=1e-6)


def test_no_shell_is_empty_whatever_the_shape() -> None:
    for shape in ((2, 2, 40), (40, 3, 1), (1, 9, 2), (7, 7, 7)):
        found = measured(noise(shape), noise(shape, 1))
        assert (found.modes > 0).all(), shape
        assert (np.diff(found.k) > 0).all(), shape
        assert np.isfinite(found.correlation).all(), shape


def test_processing_a_few_planes_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = related((13, 10, 8))
    whole = measured(*fields)
    monkeypatch.setattr(spectra, "MODES_AT_ONCE", 120)  # three planes; one in the last part
    parts = measured(*fields)
    for name in ("k", "modes", "predicted", "target", "cross"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12)


def test_a_constant_field_has_no_power_and_fields_are_not_modified() -> None:
    fields = [torch.full((8, 8, 8), 3.0), torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))]
    before = [field.clone() for field in fields]
    shells = Shells((8, 8, 8), 1.0, CPU)
    found = shells.spectrum(shells.sums(*fields))
    assert (found.predicted == 0).all()
    assert (found.ratio == 0).all()
    assert (found.target > 0).all()
    assert all(torch.equal(field, old) for field, old in zip(fields, before, strict=True))
