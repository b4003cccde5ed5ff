"""Power and cross power against an independent library, their definition, and fields that are known to have some."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from utils.evaluation import spectra
from utils.evaluation.results import Spectrum
from utils.evaluation.spectra import Shells

# Sides that are even and odd, and whose ratios put no wave just between two shells, where rounding would decide.
SHAPES = [(16, 16, 16), (12, 16, 10), (9, 16, 15), (24, 6, 7)]
CPU = torch.device("cpu")


def measured(predicted: np.ndarray, target: np.ndarray, cell: float = 1.0) -> Spectrum:
    shells = Shells(predicted.shape, cell, CPU)
    return shells.spectrum(shells.sums(*(torch.tensor(field, dtype=torch.float32) for field in (predicted, target))))


def noise(shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def related(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Two fields that have something in common, with means."""
    common = noise(shape)
    return 2.0 * common + noise(shape, 1) + 3.0, common - 0.5 * noise(shape, 2) - 1.0


def wavenumber(mode: tuple[int, ...], shape: tuple[int, int, int], cell: float) -> float:
    """Of the wave with so many periods along each axis; the upper half of them are the negative ones."""
    periods = [number if number <= n / 2 else number - n for number, n in zip(mode, shape, strict=True)]
    return 2 * np.pi / cell * math.hypot(*(number / n for number, n in zip(periods, shape, strict=True)))


@pytest.mark.parametrize("shape", SHAPES)
def test_power_and_cross_power_are_those_of_powerbox(shape: tuple[int, int, int]) -> None:
    tools = pytest.importorskip("powerbox.tools")
    cell = 0.37
    first, second = related(shape)
    found = measured(first, second, cell)
    edges = (np.arange(max(shape) // 2 + 1) + 0.5) * 2 * np.pi / (max(shape) * cell)
    lengths = [cells * cell for cells in shape]

    def theirs(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        result = tools.get_power(one, lengths, deltax2=other, bins=edges, dimensionless=False)
        return (result.power, result.bin_avg) if hasattr(result, "power") else result[:2]  # since 1.0, before

    for ours, pair in ((found.predicted, (first, first)), (found.target, (second, second))):
        power, k = theirs(*pair)
        np.testing.assert_allclose(ours, power, rtol=1e-5)
        np.testing.assert_allclose(found.k, k, rtol=1e-9)
    cross, _ = theirs(first, second)
    np.testing.assert_allclose(found.cross, cross, rtol=1e-5, atol=1e-5 * np.abs(cross).max())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shell_is_the_mean_over_its_modes(shape: tuple[int, int, int]) -> None:
    """The definition, mode by mode over the whole space: no half transform, no weights."""
    cell = 2.5
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


def test_it_is_the_spectrum_that_the_simulation_is_held_against() -> None:
    pytest.importorskip("scipy")
    from utils.data.fourier import power_spectrum

    field = noise((24, 24, 24))
    k, power = power_spectrum(field, 24 * 0.5)
    found = measured(field, field, 0.5)
    np.testing.assert_allclose(found.k, k, rtol=1e-6)
    np.testing.assert_allclose(found.target, power, rtol=1e-5)


def test_a_wave_has_all_its_variance_in_one_shell() -> None:
    """Power times the shell's modes over the volume is A²/2, and cross power AB/2 times the cosine of the phase."""
    shape, cell, waves, phase = (16, 24, 12), 0.5, (2, 6, 1), 0.9
    x, y, z = (2 * np.pi * number * np.arange(n) / n for n, number in zip(shape, waves, strict=True))
    angle = x[:, None, None] + y[:, None] + z
    found = measured(3.0 * np.cos(angle), 5.0 * np.cos(angle + phase), cell)
    shell = found.at(wavenumber(waves, shape, cell))
    variance = np.array([found.predicted, found.target, found.cross]) * found.modes / (math.prod(shape) * cell**3)
    np.testing.assert_allclose(variance[:, shell], [9 / 2, 25 / 2, 15 / 2 * math.cos(phase)], rtol=1e-5)
    assert np.abs(np.delete(variance, shell, axis=1)).max() < 1e-10


def test_a_field_made_with_a_spectrum_has_it() -> None:
    """Every mode is given the power A k^-1.5 exactly, with random phases."""
    n, cell, amplitude = 32, 0.5, 7.0
    modes = np.fft.rfftn(noise((n, n, n)))
    full, half = 2 * np.pi * np.fft.fftfreq(n, cell), 2 * np.pi * np.fft.rfftfreq(n, cell)
    k = np.sqrt(full[:, None, None] ** 2 + full[:, None] ** 2 + half**2)
    k[0, 0, 0] = np.inf
    size = np.sqrt(amplitude * k**-1.5 * n**6 / (n * cell) ** 3)
    field = np.fft.irfftn(modes / np.abs(modes) * size, s=(n, n, n), axes=(0, 1, 2))
    found = measured(field, field, cell)
    # A shell's mean power is not quite that at its mean k; the first shells are wide for their k.
    np.testing.assert_allclose(found.target[6:], amplitude * found.k[6:] ** -1.5, rtol=0.004)
    np.testing.assert_allclose(found.target, amplitude * found.k**-1.5, rtol=0.06)


def test_a_multiple_is_perfectly_correlated() -> None:
    target = noise((16, 16, 16))
    found = measured(1.7 * target + 4.0, target)  # a constant more is no structure
    np.testing.assert_allclose(found.ratio, 1.7**2, rtol=1e-5)
    np.testing.assert_allclose(found.correlation, 1.0, rtol=1e-6)
    np.testing.assert_allclose(measured(-target, target).correlation, -1.0, rtol=1e-6)


def test_a_large_mean_costs_no_digits() -> None:
    """Values in steps of 1/256 have room for 2^14 beside them in float32; a transform of both has not."""
    fields = [np.round(256 * field) / 256 for field in related((16, 16, 16))]
    near, far = measured(*fields), measured(*(field + 2**14 for field in fields))
    for name in ("predicted", "target", "cross"):
        np.testing.assert_allclose(getattr(far, name), getattr(near, name), rtol=1e-6, atol=1e-6)


def test_independent_noise_is_not_correlated() -> None:
    """r of a shell scatters by 1 / √(independent modes), which are half of all."""
    found = measured(noise((32, 32, 32), 1), noise((32, 32, 32), 2))
    assert (np.abs(found.correlation) < 4.5 / np.sqrt(found.modes / 2)).all()
    assert np.abs(found.correlation[-1]) < 0.05  # some 5,000 of them
    np.testing.assert_allclose(found.predicted[-8:], 1.0, rtol=0.15)  # white noise of variance 1 in cells of volume 1


def test_moving_both_fields_changes_nothing() -> None:
    first, second = related((12, 16, 10))
    found = measured(first, second)
    moved = measured(*(np.roll(field, (5, -3, 8), (0, 1, 2)) for field in (first, second)))
    for name in ("predicted", "target", "cross"):
        np.testing.assert_allclose(getattr(moved, name), getattr(found, name), rtol=1e-4, atol=1e-4)
    alone = measured(np.roll(first, 5, 0), second)
    assert not np.allclose(alone.cross, found.cross, rtol=0.1)
    np.testing.assert_allclose(alone.predicted, found.predicted, rtol=1e-4)


@pytest.mark.parametrize("shape", [(2, 2, 40), (40, 3, 1), (1, 9, 2), (7, 7, 7)])
def test_no_shell_is_empty(shape: tuple[int, int, int]) -> None:
    found = measured(noise(shape), noise(shape, 1))
    assert (found.modes > 0).all()
    assert (np.diff(found.k) > 0).all()
    assert np.isfinite(found.correlation).all()


def test_all_directions_are_there_up_to_nyquist() -> None:
    """So the modes within a radius below it are as many as whole numbers within a sphere."""
    found = measured(*related((32, 32, 32)))
    within = sum(1 for mode in itertools.product(range(-15, 16), repeat=3) if 0 < sum(m * m for m in mode) < 15.5**2)
    assert found.modes[:15].sum() == within
    assert len(found.modes) == 16


def test_planes_taken_a_few_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = related((13, 10, 8))
    whole = measured(*fields)
    monkeypatch.setattr(spectra, "MODES_AT_ONCE", 120)  # 3 planes, the last time 1
    parts = measured(*fields)
    for name in ("k", "modes", "predicted", "target", "cross"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12)


def test_a_field_without_structure_has_no_power() -> None:
    found = measured(np.full((8, 8, 8), 3.0), noise((8, 8, 8)))
    assert (found.predicted == 0).all()
    assert (found.ratio == 0).all()
    assert (found.target > 0).all()


def test_the_fields_stay_as_they_are() -> None:
    fields = [torch.randn(6, 6, 6, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    before = [field.clone() for field in fields]
    Shells((6, 6, 6), 1.0, CPU).sums(*fields)
    assert all(torch.equal(field, old) for field, old in zip(fields, before, strict=True))
