"""Statistics of volumes agree with numpy, with an independent library, and on any number of ranks."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from processes import run_ranks
from reference_samples import ALONE
from sample_results import agree, slab_fields
from volume_files import smooth_field

from analysis import modes
from analysis.evaluation.base import Compared
from analysis.evaluation.comparison import volume_statistics
from analysis.evaluation.results import Results, Spectrum, spectrum_names
from analysis.modes import Bispectra, PowerBins
from analysis.slabs import Slabs
from utils.config.channels import TRANSFORM, Channel, known_channels
from utils.distributed.launch import Launch
from utils.distributed.world import World

GAS = known_channels("targets", 5)
SHAPE = (12, 10, 7)  # no mode lies on the edge of a shell


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def volumes(shape: tuple[int, int, int] = SHAPE, channels: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, target), [C, X, Y, Z], channel values; the prediction is close to the target."""
    target = 0.4 * smooth_field(channels, shape, np.random.default_rng(0)).astype(np.float32)
    return target + 0.02 * noise(*target.shape, seed=1), target


def evaluated(predicted: np.ndarray, target: np.ndarray, channels=GAS, cell=0.5, world: World = ALONE) -> Results:
    slabs = Slabs(target.shape[1:], world)  # type: ignore[arg-type]
    inputs = 0.5 * target[:4] if len(target) >= 4 else np.zeros((4, *target.shape[1:]), np.float32)
    fields, sources = slab_fields(slabs, inputs, predicted, target), known_channels("inputs", 4)
    return volume_statistics(Compared(sources, channels, cell, fields, slabs), {"epoch": 3})


@pytest.fixture(scope="module")
def results() -> Results:
    return evaluated(*volumes())


def physical(values: np.ndarray) -> list[np.ndarray]:
    return [channel.to_physical(field.astype(np.float64)) for channel, field in zip(GAS, values, strict=True)]


def spectrum(predicted: np.ndarray, target: np.ndarray, cell: float = 0.5) -> Spectrum:
    bins = PowerBins(Slabs(target.shape, ALONE), cell)  # type: ignore[arg-type]
    sums = bins.sums([torch.tensor(field, dtype=torch.float32) for field in (predicted, target)])
    return Spectrum(bins.k[0], bins.modes[0], *(sums.numpy() * bins.volume / bins.modes)[:, 0])


def powers(results: Spectrum) -> np.ndarray:
    return np.stack([results.predicted, results.target, results.cross])


def power(*fields: np.ndarray) -> np.ndarray:
    return powers(spectrum(*fields))


def divergence(velocity: Sequence[np.ndarray]) -> np.ndarray:
    """Of periodic fields; central differences."""
    return sum(np.roll(part, -1, axis) - np.roll(part, 1, axis) for axis, part in enumerate(velocity)) / (2 * 0.5)


def test_errors_slices_and_histograms_agree_with_numpy(results: Results) -> None:
    predicted, target = volumes()
    p, t = (values.astype(np.float64).reshape(5, -1) for values in (predicted, target))
    np.testing.assert_allclose(results.l1, np.abs(p - t).mean(1), rtol=1e-6)
    residual = ((p - t) ** 2).sum(1) / ((t - t.mean(1, keepdims=True)) ** 2).sum(1)
    np.testing.assert_allclose(results.r2, 1 - residual, rtol=1e-6)
    assert ((results.r2 > 0.5) & (results.r2 < 1)).all(), "the example is neither perfect nor useless"
    for name, values in (("predicted", predicted), ("target", target), ("input", 0.5 * target[:4])):
        np.testing.assert_array_equal(results.slices[name], values[:, 6])
    ours, theirs = physical(predicted), physical(target)
    assert results.mass_ratio == pytest.approx(ours[0].mean() / theirs[0].mean(), rel=1e-6)
    phase = results.statistics["phase_diagram"]
    for name, fields in (("predicted", ours), ("target", theirs)):
        decimal = [np.log10(field) if channel.is_log else field for channel, field in zip(GAS, fields, strict=True)]
        for channel, values in zip(GAS, decimal, strict=True):
            distribution = results.distributions[channel.name]
            assert (distribution.unit, distribution.is_log) == (channel.unit, channel.is_log)
            expected, _ = np.histogram(values, distribution.edges)
            np.testing.assert_array_equal(getattr(distribution, name), expected)
            assert (expected.sum(), len(expected) > 100) == (values.size, True)
        bins = phase.density_edges, phase.temperature_edges
        expected = np.histogram2d(decimal[0].ravel(), decimal[4].ravel(), bins)[0]
        np.testing.assert_array_equal(getattr(phase, name), expected)


def test_r2_of_a_channel_far_from_zero_is_accurate_and_that_of_a_constant_is_nan() -> None:
    """Σt² − (Σt)²/N would lose twelve digits."""
    target = 2e4 + noise(1, *SHAPE)
    predicted = 0.9 * target + 0.1 * (2e4 + noise(1, *SHAPE, seed=1))
    p, t = predicted.astype(np.float64), target.astype(np.float64)
    r2 = evaluated(predicted, target, (Channel("channel 0"),)).r2[0]
    assert r2 == pytest.approx(1 - ((p - t) ** 2).sum() / ((t - t.mean()) ** 2).sum(), rel=1e-9)
    predicted, target = volumes()
    target[1:4] = 0.25
    results = evaluated(predicted, target)
    assert np.isnan([*results.r2[1:4], results.divergence_r2]).all()
    assert np.isfinite(results.r2[[0, 4]]).all()
    assert results.distributions["velocity divergence"].target.sum() == target[0].size


def test_values_outside_the_histogram_are_counted_in_the_end_bins() -> None:
    """Every cell is counted, and non-finite values do not end the results."""
    predicted, target = volumes()
    target[0, 0], target[0, 1, 0] = 3.0, -3.0  # e^±42
    predicted[2, 3, 2, 2:6] = np.inf, -np.inf, np.nan, 1e30
    results = evaluated(predicted, target)
    density, velocity = results.distributions["gas density"], results.distributions["gas velocity y"]
    assert (density.target[-1], density.target[0]) == (SHAPE[1] * SHAPE[2], SHAPE[2])
    assert (velocity.predicted[-1], velocity.predicted[0]) == (2, 2)
    assert velocity.predicted.sum() == density.target.sum() == target[0].size
    assert np.isnan(results.r2).tolist() == [False, False, True, False, False]


def test_spectra_and_divergence_are_those_of_the_physical_fields(results: Results) -> None:
    ours, theirs = (physical(values) for values in volumes())
    expected = {
        "density": power(ours[0], theirs[0]),
        "log density": power(np.log(ours[0]), np.log(theirs[0])),
        "velocity": sum(power(ours[axis], theirs[axis]) for axis in (1, 2, 3)),
        "divergence": power(divergence(ours[1:4]), divergence(theirs[1:4])),
        "log temperature": power(np.log(ours[4]), np.log(theirs[4])),
    }
    assert list(results.spectra) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(powers(results.spectra[name]), values, rtol=1e-4, atol=1e-5 * np.abs(values).max())
    assert results.spectra["density"].k[0] == pytest.approx(2 * np.pi / (12 * 0.5), rel=0.2)
    p, t = (divergence(values[1:4]) for values in (ours, theirs))
    assert results.divergence_r2 == pytest.approx(1 - ((p - t) ** 2).sum() / (t**2).sum(), rel=1e-5)
    distribution = results.distributions["velocity divergence"]
    assert 7.9 * t.std() < distribution.edges[-1] == -distribution.edges[0] < 8.9 * t.std()
    for counts, values in ((distribution.predicted, p), (distribution.target, t)):
        expected = np.histogram(np.clip(values, *distribution.edges[[0, -1]]), distribution.edges)[0]
        assert np.abs(counts - expected).sum() <= 4  # float32 may move a value across a bin edge
        assert counts.sum() == t.size


def test_without_a_cell_size_lengths_are_in_cells(results: Results) -> None:
    plain = evaluated(*volumes(), cell=None)
    assert (plain.cell, plain.wavenumber_unit) == (None, "rad/cell")
    np.testing.assert_allclose(plain.spectra["velocity"].k, 0.5 * results.spectra["velocity"].k)
    ours, theirs = (powers(part.spectra["velocity"]) for part in (plain, results))
    np.testing.assert_allclose(ours, theirs / 0.5**3, rtol=1e-5)
    units = [results.distributions["velocity divergence"].unit for results in (plain, results)]
    assert units == ["km/s per cell", "km/s per Mpc/h"]
    assert plain.divergence_r2 == pytest.approx(results.divergence_r2, rel=1e-5)


def on_ranks(world: World) -> tuple[Results, Results]:
    """The second volume has fewer planes than eight ranks."""
    return evaluated(*volumes(), world=world), evaluated(*volumes((5, 7, 6)), world=world)


def test_results_do_not_depend_on_ranks_and_pieces(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = on_ranks(ALONE)
    for answer in run_ranks(on_ranks, 8):
        for measured, expected in zip(answer, alone, strict=True):
            agree(measured, expected)
    for values in (1, 300):  # a plane; four planes, three pieces
        monkeypatch.setattr("utils.volumes.hdf5.SLAB_VALUES", values)
        agree(evaluated(*volumes()), results, 1e-12)


@pytest.mark.gpu
def test_a_gpu_gets_the_results_of_the_cpu() -> None:
    predicted, target = volumes((24, 20, 16))
    alone = evaluated(predicted, target)
    results = evaluated(predicted, target, world=World(Launch("test"), torch.device("cuda")))
    for name, distribution in results.distributions.items():
        # Different rounding may move single cells to a neighboring bin.
        assert np.abs(distribution.target - alone.distributions[name].target).sum() <= 8
    phases = {"phase_diagram": alone.statistics["phase_diagram"]}
    assert results.statistics["phase_diagram"].predicted.sum() == predicted[0].size
    same = {"distributions": alone.distributions, "statistics": results.statistics | phases}
    agree(dataclasses.replace(results, **same), alone, 1e-5)


def test_channels_without_known_units_are_evaluated_as_plain_values() -> None:
    """Without names there are no vectors, except of the usual place of the velocity."""
    predicted, target = volumes(channels=7)
    results = evaluated(predicted, target, known_channels("targets", 7))
    assert list(results.distributions) == [f"channel {number}" for number in range(7)]
    assert list(results.spectra) == ["channel 0", "vector 0", "channel 4", "channel 5", "channel 6"]
    values, distribution = power(predicted[6], target[6]), results.distributions["channel 6"]
    np.testing.assert_allclose(powers(results.spectra["channel 6"]), values, rtol=1e-5, atol=1e-5 * abs(values).max())
    assert (distribution.edges[0], distribution.edges[-1], distribution.unit) == (-1.5, 1.5, None)
    np.testing.assert_array_equal(distribution.target, np.histogram(target[6], distribution.edges)[0])
    assert list(results.statistics) == []
    assert np.isnan(results.divergence_r2)
    assert all(np.isfinite(value) for value in results.scalars().values())
    for unknown, missing in (("velocity_scale_km_s", "divergence"), ("density_log_scale", "log density")):
        results = evaluated(*volumes(), known_channels("targets", 5, {**TRANSFORM, unknown: None}))
        assert missing not in results.spectra
        assert {"log temperature", "gas velocity" if "velocity" in unknown else "gas density"} <= {*results.spectra}


# In this order: temperature, x and y of a field, a second species, z and y of the velocity, pressure, gas density, …
FIELD = [Channel(f"B {axis}", "nG", 2.0, component=f"magnetic field {axis}") for axis in "xyz"]
PRESSURE, STARS = Channel("pressure", "Pa", 3.0, 1.0, True), Channel("stars", "mean density", 14.0, is_log=True)
UNUSUAL = [GAS[4], FIELD[0], FIELD[1], STARS, GAS[3], GAS[2], PRESSURE, GAS[0], FIELD[2], GAS[1]]


def unusual(world: World) -> Results:
    """The channels of GAS and others at unusual places; the inputs are those of `evaluated` in the opposite order."""
    ours, theirs = (np.concatenate(pair) for pair in zip(volumes(), volumes(channels=6), strict=True))
    own = [*GAS, *FIELD, PRESSURE, STARS]
    order, slabs = [own.index(channel) for channel in UNUSUAL], Slabs(SHAPE, world)
    inputs = np.ascontiguousarray(0.5 * volumes()[1][3::-1])
    fields = slab_fields(slabs, inputs, ours[order], theirs[order])
    return volume_statistics(Compared(known_channels("inputs", 4)[::-1], UNUSUAL, 0.5, fields, slabs), {"epoch": 3})


def test_channels_at_any_place_have_the_same_bits_and_all_have_spectra_and_distributions(results: Results) -> None:
    found = unusual(ALONE)
    for channel in GAS:
        places = (GAS.index(channel), UNUSUAL.index(channel))
        for name in ("l1", "copied_l1", "r2"):
            usual, other = (getattr(part, name)[place] for part, place in zip((results, found), places, strict=True))
            np.testing.assert_equal(other, usual)
    assert (found.divergence_r2, found.mass_ratio) == (results.divergence_r2, results.mass_ratio)
    for name in ("spectra", "distributions"):
        agree({key: getattr(found, name)[key] for key in getattr(results, name)}, getattr(results, name), 0)
    agree(found.statistics, results.statistics, 0)
    for answer in run_ranks(unusual, 2):
        agree(answer, found)
    # Fixed: a second species in units of the mean density was added to the spectrum of the gas density.
    ours, theirs = volumes(channels=6)
    others = ["magnetic field", "stars", "pressure"]
    assert list(found.spectra) == ["density", "log density", "velocity", "divergence", "log temperature", *others]
    for name, expected in {
        "magnetic field": sum(4 * power(ours[place], theirs[place]) for place in (0, 1, 2)),
        "pressure": 9 * power(ours[3], theirs[3]),
        "stars": 14**2 * power(ours[4], theirs[4]),
    }.items():
        tolerance = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(powers(found.spectra[name]), expected, rtol=1e-4, atol=tolerance)
    distribution = found.distributions["pressure"]
    assert (distribution.unit, distribution.is_log) == ("Pa", True)
    values = (1 + 3 * theirs[3].astype(np.float64)) / np.log(10)
    np.testing.assert_array_equal(distribution.target, np.histogram(values, distribution.edges)[0])
    assert list(found.distributions) == [*(channel.name for channel in UNUSUAL), "velocity divergence"]
    copied = dict(zip((channel.name for channel in UNUSUAL), found.copied_l1, strict=True))
    known = {channel.name for channel in GAS[:4]}
    assert {name for name, value in copied.items() if np.isfinite(value)} == known


def test_names_of_spectra_of_the_gas_are_not_shared() -> None:
    """Channels and vectors may have the names that spectra have."""
    scalars, parts = [Channel("density", "Pa"), Channel("velocity", "s"), Channel("B")], (("velocity", "B"), "xyz")
    vectors = [Channel(f"{name}{axis}", component=f"{name} {axis}") for name, axis in itertools.product(*parts)]
    names = ["channel density", "channel velocity", "B", *["vector velocity"] * 3, *["vector B"] * 3]
    assert spectrum_names([*scalars, *vectors]) == names
    assert spectrum_names([*GAS, Channel("velocity divergence")])[-2:] == ["log temperature", "velocity divergence"]


def related(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Two correlated fields with non-zero means."""
    common = noise(*shape).astype(float)
    return 2.0 * common + noise(*shape, seed=1) + 3.0, common - 0.5 * noise(*shape, seed=2) - 1.0


@pytest.mark.parametrize("shape", [(16, 16, 16), (9, 16, 15), (24, 6, 7)])
def test_power_and_cross_power_agree_with_powerbox(shape: tuple[int, int, int]) -> None:
    """Even and odd sides. No mode is exactly between two shells, where rounding would decide."""
    tools = pytest.importorskip("powerbox.tools")
    cell = 0.37
    first, second = related(shape)
    results = spectrum(first, second, cell)
    edges = (np.arange(max(shape) // 2 + 1) + 0.5) * 2 * np.pi / (max(shape) * cell)
    lengths = [cells * cell for cells in shape]

    def theirs(field: np.ndarray, partner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        result = tools.get_power(field, lengths, deltax2=partner, bins=edges, dimensionless=False)
        return (result.power, result.bin_avg) if hasattr(result, "power") else result[:2]  # before powerbox 1.0

    pairs = (first, first), (second, second), (first, second)
    for ours, pair in zip(powers(results), pairs, strict=True):
        power, k = theirs(*pair)
        np.testing.assert_allclose(ours, power, rtol=1e-5, atol=1e-5 * np.abs(power).max())
        np.testing.assert_allclose(results.k, k, rtol=1e-9)
    axes = np.meshgrid(*(np.fft.fftfreq(cells) * max(shape) for cells in shape), indexing="ij")
    shells = np.floor(np.sqrt(sum(axis**2 for axis in axes)) + 0.5).astype(int)
    np.testing.assert_array_equal(results.modes, np.bincount(shells.ravel())[1 : max(shape) // 2 + 1])


def test_a_large_mean_and_few_columns_at_once_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, values in steps of 1/256 fit next to a mean of 2^14; a transform of both together would lose them."""
    fields = [np.round(256 * field) / 256 for field in related((16, 16, 16))]
    near, far = spectrum(*fields), spectrum(*(field + 2**14 for field in fields))
    for name in ("predicted", "target", "cross"):
        np.testing.assert_allclose(getattr(far, name), getattr(near, name), rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(modes, "MODES_AT_ONCE", 500)  # three columns at a time, one in the last batch
    for name, values in vars(spectrum(*fields)).items():
        np.testing.assert_allclose(values, getattr(near, name), rtol=1e-12)


Shell = tuple[float, float]


def sum_over_triangles(field: np.ndarray, first: Shell, shell: Shell) -> tuple[int, float]:
    """The number of ordered triangles with one side in a shell and two in another, and B: all pairs, one by one."""
    shape, longest = field.shape, max(field.shape)
    modes = np.fft.fftn(field) / field.size
    limits = [(side - 1) // 2 for side in shape]

    def waves_in(low: float, high: float) -> set[tuple[int, ...]]:
        waves = itertools.product(*(range(-limit, limit + 1) for limit in limits))
        return {wave for wave in waves if low < np.linalg.norm(np.array(wave) * longest / shape) < high}

    products, waves = [], waves_in(*shell)
    for one_side, second in itertools.product(waves_in(*first), waves):
        third = tuple(-a - b for a, b in zip(one_side, second, strict=True))
        if third in waves:
            products.append(modes[one_side] * modes[second] * modes[third])
    mean = sum(products).real / len(products) if products else math.nan
    return len(products), mean * (field.size * 0.5**3) ** 2


def test_bispectra_agree_with_a_sum_over_all_triangles() -> None:
    """Also of a box whose sides differ, where the first shell has no triangle."""
    for shape in ((10, 10, 10), (9, 12, 7)):
        triangles, shells = Bispectra(Slabs(shape, ALONE), 0.5), ((0.5, 1.5), (1.5, 2.5))
        for seed, (number, shell) in itertools.product((0, 1), enumerate(shells)):
            field = np.exp(0.7 * noise(*shape, seed=seed))
            results = triangles.measure(torch.tensor(field))[:, number]
            for result, first in zip(results, (shell, shells[0]), strict=True):
                count, expected = sum_over_triangles(field, first, shell)
                assert (count > 0) == (number > 0 or shape == (10, 10, 10))
                np.testing.assert_allclose(result, expected, rtol=1e-4, err_msg=f"{shape} {number}")
