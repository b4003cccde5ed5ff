"""The flux of a volume, and P(k, mu), agree with numpy and closed forms, on any number of ranks."""

import math
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from processes import run_ranks
from reference_samples import ALONE
from sample_results import SIMULATION, agree, slab_fields
from scipy.ndimage import gaussian_filter
from volume_files import smooth_field

from analysis.lyman_alpha.flux import Universe, fgpa_relation, optical_depth, power_law
from analysis.lyman_alpha.forest import K_RATIO, MU_BINS, FluxStatistics, KnownFlux, Sightlines, smooth
from analysis.lyman_alpha.results import FGPA, FITTED, PREDICTION, REAL_FGPA, TARGET, TRANSFER, Flux, FluxField
from analysis.lyman_alpha.setup import FluxOptions, FluxSetup, GasFit
from analysis.modes import Bispectra, PowerBins, bin_edges
from analysis.slabs import Slabs
from utils.config import Config
from utils.config.channels import TRANSFORM as PUBLISHED
from utils.config.channels import Channel, known_channels
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.volumes.hdf5 import Volume

SHAPE, CELL = (12, 10, 8), 0.2
UNIVERSE = Universe.of(SIMULATION)
WIDTH = UNIVERSE.pixel_width(CELL)
TRANSFORM = {**PUBLISHED, "velocity_scale_km_s": 300.0}
DARK, GAS = known_channels("inputs", 4, TRANSFORM), known_channels("targets", 5, TRANSFORM)
HIGH = {**SIMULATION, "redshift": 6.0}
OTHER_UNITS = [replace(GAS[0], unit="g/cm3"), *(replace(part, unit="m/s") for part in GAS[1:4])]
FIT = GasFit(8000.0, 1.5, np.array([1.0, 8.0, 30.0]), np.array([1.1, 0.9, 0.2]))
Fields = tuple[np.ndarray, np.ndarray, np.ndarray]


def setup(inputs=DARK, targets=GAS, shape=SHAPE, cell=CELL, simulation=SIMULATION, **options: Any) -> FluxSetup | None:
    values = (np.zeros((count, *shape), np.float32) for count in (4, 5))
    volume = Volume("box.h5", *values, cell=cell, simulation=simulation)
    channels = {"inputs": [*map(asdict, inputs)], "targets": [*map(asdict, targets)]}
    return FluxSetup.of(volume, Config(channels=channels), FluxOptions(**options))


def fields() -> Fields:
    """(inputs, predicted, target), channel values: densities from 0.2 to 5, velocities up to 100 km/s."""
    rng = np.random.default_rng(0)
    target = np.stack([scale * smooth_field(1, SHAPE, rng)[0] for scale in (0.2, 0.6, 0.6, 0.6, 0.1)])
    target[4] -= 0.3
    predicted = target + 0.01 * rng.standard_normal(target.shape)
    return tuple(values.astype(np.float32) for values in (1.1 * target[:4], predicted, target))


def measured(volumes: Fields, world: World = ALONE, known: Any = None, fit: Any = None, **options: Any) -> Flux:
    slabs = Slabs(SHAPE, world)
    prepared = replace(setup(**{"mean_flux": 0.7, "pressure_smoothing": 0.15, **options}), fit=fit)
    return FluxStatistics(prepared, slabs, known).results(slab_fields(slabs, *volumes))


@pytest.fixture(scope="module")
def base() -> Flux:
    return measured(fields())


def depths(density: np.ndarray, velocity: np.ndarray, temperature: np.ndarray) -> list[np.ndarray]:
    """Optical depths [lines, cells] of all sight-lines along x, y and z."""
    result = []
    for axis in range(3):
        lines = (np.moveaxis(field, axis, -1) for field in (density, velocity[axis], temperature))
        parts = (torch.from_numpy(field.reshape(-1, field.shape[-1]).astype(np.float32)) for field in lines)
        result.append(optical_depth(*parts, UNIVERSE, CELL).numpy().astype(np.float64))
    return result


def depths_of_gas(values: np.ndarray) -> list[np.ndarray]:
    pairs = zip(GAS, values.astype(np.float64), strict=True)
    density, *velocity, temperature = (channel.to_physical(part) for channel, part in pairs)
    return depths(density, np.stack(velocity), temperature)


def structure(taus: list[np.ndarray], field: FluxField) -> tuple[np.ndarray, np.ndarray]:
    """P(k, mu) of all modes along x, y and z, whose sums the last test checks, and the mean bispectra."""
    triangles, bispectra = Bispectra(Slabs(SHAPE, ALONE), CELL), []
    bins, sums = PowerBins(Slabs(SHAPE, ALONE), CELL, K_RATIO, MU_BINS), []
    for axis, tau in enumerate(taus):
        others = [side for number, side in enumerate(SHAPE) if number != axis]
        flux = np.moveaxis(np.exp(-field.scale * tau).reshape(*others, SHAPE[axis]), -1, axis)
        contrast = torch.tensor(flux / field.mean - 1).float()
        sums.append(bins.sums([contrast], axis)[0].numpy())
        bispectra.append(triangles.measure(contrast))
    return sum(sums) * bins.volume / np.where(bins.modes, bins.modes, np.nan), np.mean(bispectra, axis=0)


def test_mean_distribution_and_power_agree_with_numpy(base: Flux) -> None:
    """The baseline is smoothed by 0.75 cells."""
    inputs, predicted, target = fields()
    dark = np.exp(14 * inputs[0].astype(np.float64))
    dark = gaussian_filter(dark, 0.15 / CELL, mode="wrap", truncate=4.0)
    temperature = power_law(torch.from_numpy(dark), *fgpa_relation(SIMULATION["redshift"])).numpy()
    expected = {TARGET: depths_of_gas(target), PREDICTION: depths_of_gas(predicted)}
    expected[FGPA] = depths(dark, 300 * inputs[1:4], temperature)
    assert list(base.fields) == list(expected)
    assert base.sightlines == [80, 96, 120]
    for name, taus in expected.items():
        field, pixels = base.fields[name], np.concatenate([tau.ravel() for tau in taus])
        assert field.unscaled_mean == pytest.approx(np.exp(-pixels).mean(), rel=1e-5)
        flux = np.exp(-field.scale * pixels)
        assert flux.mean() == pytest.approx(field.mean, rel=1e-5)
        assert field.mean == pytest.approx(0.7, rel=2e-6)
        counts = np.histogram(flux, base.edges)[0]
        np.testing.assert_allclose(field.pdf, counts / (pixels.size * 0.05), atol=3 / (pixels.size * 0.05))
        weighted, modes = np.zeros(6), np.zeros(6)
        for axis, tau in enumerate(taus):
            lines, cells = tau.shape
            transform = np.fft.rfft(np.exp(-field.scale * tau) / field.mean - 1)
            power = (np.abs(transform) ** 2).mean(0)[1:] * WIDTH / cells
            bins = np.rint(np.arange(1, cells // 2 + 1) * 12 / cells + 1e-9).astype(int) - 1  # along x there are 12
            np.testing.assert_allclose(field.axis_power[axis, bins], power, rtol=1e-4)
            assert np.isnan(field.axis_power[axis]).sum() == 6 - len(bins)
            weighted[bins] += lines * power
            modes[bins] += lines
        np.testing.assert_allclose(field.power, weighted / modes, rtol=1e-4)
        p3d, bispectrum = structure(taus, field)
        np.testing.assert_allclose(field.p3d, p3d, rtol=1e-4)
        np.testing.assert_allclose(field.flux_bispectrum, bispectrum, rtol=1e-3)
        theirs = np.concatenate([tau.ravel() for tau in expected[TARGET]]) * base.fields[TARGET].scale
        assert field.correlation == pytest.approx(np.corrcoef(flux, np.exp(-theirs))[0, 1], rel=1e-5)
        middle = np.exp(-field.scale * taus[2].reshape(SHAPE)[6, 5])
        np.testing.assert_allclose(field.sightline, middle, rtol=1e-4)
    np.testing.assert_allclose(base.velocity, WIDTH * np.arange(8))
    along_x_and_y = (80 / 12 + 96 / 10) / 176  # along z the first mode is in the second bin
    assert base.k[0] == pytest.approx(2 * math.pi / WIDTH * along_x_and_y)


def test_the_last_mode_of_an_even_axis_next_to_odd_ones_is_not_lost() -> None:
    statistics = FluxStatistics(setup(shape=(5, 4, 5)), Slabs((5, 4, 5), ALONE))
    assert np.isfinite(statistics._average([np.ones(2)] * 3)[0]).all()


def test_without_velocities_of_dark_matter_the_baseline_is_in_real_space(caplog: pytest.LogCaptureFixture) -> None:
    inputs, predicted, target = fields()
    caplog.set_level("INFO")
    flux = measured((inputs[:1], predicted, target), inputs=DARK[:1])
    assert caplog.messages == ["Lyman-alpha flux: the dark matter lacks velocity in physical units"]
    assert list(flux.fields) == [TARGET, PREDICTION, REAL_FGPA]
    at_rest = np.concatenate([inputs[:1], np.zeros_like(inputs[1:])])
    expected = measured((at_rest, predicted, target)).fields[FGPA]
    np.testing.assert_allclose(flux.fields[REAL_FGPA].power, expected.power, rtol=1e-12)
    seven = measured((fields()[0][[0] * 7], predicted, target), inputs=known_channels("inputs", 7))
    assert list(seven.fields) == [TARGET, PREDICTION], "the units of seven channels are unknown"


def test_the_smoothing_is_applied_if_cells_resolve_it_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at the mean. Training switches TF32 on; the baseline must not depend on that."""
    assert [setup(pressure_smoothing=length).smoothing for length in (0.0, 0.099, 0.1)] == [0, 0, 0.1]
    field = torch.rand(5, 6, 7, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(smooth(field.clone(), math.inf, Slabs((5, 6, 7), ALONE)), field.mean(), rtol=1e-6)
    switches, seen = torch.backends.cuda.matmul, []
    before, switches.allow_tf32 = switches.allow_tf32, True
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: seen.append(switches.allow_tf32))
    smooth(torch.ones(4, 4, 4), 1.0, Slabs((4, 4, 4), ALONE))
    monkeypatch.setattr(torch.Tensor, "copy_", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):  # fixed: after an error TF32 stayed off
        smooth(torch.ones(4, 4, 4), 1.0, Slabs((4, 4, 4), ALONE))
    after, switches.allow_tf32 = switches.allow_tf32, before
    assert (set(seen), after) == ({False}, True)


def on_ranks(world: World) -> tuple[Flux, Flux]:
    """With nine sight-lines per axis there are three rows, fewer than four ranks."""
    return measured(fields(), world=world), measured(fields(), world=world, sightlines=9)


def test_results_do_not_depend_on_ranks_and_pieces(base: Flux, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, answers = on_ranks(ALONE), run_ranks(on_ranks, 4)
    for answer in answers:
        for flux, expected, first in zip(answer, alone, answers[0], strict=True):
            agree(flux, expected, 1e-6)
            agree(flux, first, 0)
    monkeypatch.setattr("utils.volumes.hdf5.SLAB_VALUES", 300)  # three planes
    agree(measured(fields()), base, 0)


def with_fit(world: World) -> Flux:
    return measured(fields(), world, fit=FIT)


def test_fitted_baselines_agree_with_numpy_on_one_rank_and_on_three() -> None:
    """The transfer function acts on each mode of log density, whose mean density becomes 1."""
    inputs = fields()[0].astype(np.float64)
    dark = np.exp(14 * inputs[0])
    waves = np.meshgrid(*(np.fft.fftfreq(side) / CELL for side in SHAPE), indexing="ij")
    factor = np.interp(2 * np.pi * np.linalg.norm(waves, axis=0), FIT.k, FIT.transfer)
    modes = np.fft.fftn(np.log(dark)) * factor
    gas = np.exp(np.fft.ifftn(modes).real)
    smoothed = gaussian_filter(dark, 0.15 / CELL, mode="wrap", truncate=4.0)
    densities = {f"{FGPA}, {FITTED}": smoothed, TRANSFER: gas / gas.mean()}
    for flux in (with_fit(ALONE), *run_ranks(with_fit, 3)):
        assert list(flux.fields) == [TARGET, PREDICTION, FGPA, *densities]
        for name, density in densities.items():
            taus = depths(density, 300 * inputs[1:4], FIT.kelvin * density ** (FIT.gamma - 1))
            pixels = np.concatenate([tau.ravel() for tau in taus])
            assert flux.fields[name].unscaled_mean == pytest.approx(np.exp(-pixels).mean(), rel=1e-4)
            line = np.exp(-flux.fields[name].scale * taus[2].reshape(SHAPE)[6, 5])
            np.testing.assert_allclose(flux.fields[name].sightline, line, rtol=1e-3)


def test_the_flux_of_channels_at_other_places_has_the_same_bits() -> None:
    """Also that of fitted baselines. A second gas is not mistaken for the first."""
    orders, others = ([3, 1, 0, 2], [4, 3, 5, 0, 2, 1]), Channel("stars", "mean density", 14.0, is_log=True)
    inputs, gas = [DARK[place] for place in orders[0]], [[*GAS, others][place] for place in orders[1]]
    dark, *sides = fields()
    sides = [np.concatenate([side, side[:1] + 0.1])[orders[1]] for side in sides]
    found = measured((dark[orders[0]], *sides), fit=FIT, inputs=inputs, targets=gas)
    agree(found, with_fit(ALONE), 0)


@pytest.mark.gpu
def test_a_gpu_gets_the_results_of_the_cpu(base: Flux) -> None:
    for name, field in measured(fields(), world=World(Launch("test"), torch.device("cuda"))).fields.items():
        for part in ("scale", "mean", "power", "axis_power", "sightline"):
            np.testing.assert_allclose(getattr(field, part), getattr(base.fields[name], part), rtol=1e-3)


@pytest.mark.parametrize(("axis", "limit"), [(0, 100), (1, 65), (2, 7)])
def test_sight_lines_are_evenly_spaced_and_shared(axis: int, limit: int) -> None:
    shape = (30, 20, 300)
    worlds = [World(Launch("test", rank=rank, world_size=3), torch.device("cpu")) for rank in range(3)]
    lines = [Sightlines(axis, Slabs(shape, world), limit) for world in worlds]
    rows, columns = sorted(row for part in lines for row in part.rows), lines[0].columns.tolist()
    assert limit / 2 < lines[0].count == len(rows) * len(columns) <= limit
    sides = [side for number, side in enumerate(shape) if number != axis]
    for places, side in ((rows, sides[0]), (columns, sides[1])):
        gaps = np.diff([*places, places[0] + side])
        assert gaps.max() - gaps.min() <= 1


def test_later_evaluations_compute_the_prediction_alone_and_each_row_is_progress(base: Flux, monkeypatch: Any) -> None:
    """The heartbeat ends a run without progress. A slab of hot gas takes longer than a step."""
    (inputs, predicted, target), known, calls = fields(), KnownFlux(), []
    monkeypatch.setattr(ALONE.pulse, "advance", lambda: calls.append(1))
    measured((inputs, target, target), known=known)
    rows, exchanges = 3 * (10 + 12 + 12), 3 + 3 + 2  # of target, prediction and baseline
    assert len(calls) >= rows + exchanges
    agree(measured((0 * inputs, predicted, 0 * target), known=known), base, 0)


@pytest.mark.parametrize("value", [math.nan, 1e30, -1e30])
def test_a_diverged_prediction_does_not_affect_the_other_fields(value: float, base: Flux) -> None:
    inputs, predicted, target = fields()
    predicted[:, 3, 4] = value
    flux = measured((inputs, predicted, target))
    for name in (TARGET, FGPA):
        np.testing.assert_array_equal(flux.fields[name].power, base.fields[name].power)
    field = flux.fields[PREDICTION]
    assert math.isnan(field.mean) == np.isnan(field.power).all() == np.isnan(field.pdf).all()
    assert math.isnan(field.mean) or value == -1e30
    empty = measured((inputs, np.full_like(predicted, -1e3), target)).fields[PREDICTION]
    assert math.isnan(empty.mean), "gas that does not absorb cannot be rescaled"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"simulation": {}}, "box.h5 does not state redshift, cosmology_H0, cosmology_Om0, cosmology_Ode0, cosmology"),
        ({"cell": None}, "box.h5 does not state box_size_mpc_h"),
        ({"simulation": HIGH | {"cosmology_H0": 0.0}}, "box.h5: cosmology_H0 is 0, expected 10 to 200; correct its"),
        ({"simulation": HIGH | {"cosmology_Ob0": 0.0}}, "box.h5: cosmology_Ob0 is 0, so there are no baryons; correct"),
        ({"shape": (8, 3, 8)}, "a side of fewer than 4 cells"),
        ({"simulation": HIGH}, "no fit of the observed mean flux at redshift 6 "),
        ({"targets": GAS[:4]}, "the gas lacks temperature in physical units"),
        ({"targets": [*OTHER_UNITS, GAS[4]]}, "the gas lacks density, velocity in physical"),
    ],
)
def test_a_flux_that_cannot_be_computed_is_skipped_with_one_line(changes: Any, reason: str, caplog: Any) -> None:
    """The switch skips it silently; a given mean flux needs no fit."""
    caplog.set_level("INFO")
    assert setup(**changes) is setup(flux=False) is None
    (line,) = caplog.messages
    assert line.startswith("Lyman-alpha flux skipped: ")
    assert reason in line
    assert setup(simulation=HIGH, mean_flux=0.1) is not None
    assert 0.7 < setup().mean_flux < 0.9


def test_a_field_with_the_power_of_redshift_space_has_it_in_every_bin() -> None:
    """P(k, mu) = (1 + beta mu²)² k**-1.5 (Kaiser 1987): all modes have this power, with random phases."""
    side, model, modes, sums = 24, np.zeros((2, 4, 20)), np.zeros((4, 20)), []
    volume, edges = (side * CELL) ** 3, bin_edges(side // 2, K_RATIO)
    result = PowerBins(Slabs((side,) * 3, ALONE), CELL, K_RATIO, MU_BINS)
    waves = np.stack(np.meshgrid(*[np.fft.fftfreq(side) * side] * 3, indexing="ij"))
    k = np.sqrt((waves**2).sum(0))
    for axis in range(3):
        mu = np.abs(waves[axis]) / np.maximum(k, 1e-9)
        true = (1 + 0.8 * mu**2) ** 2 * np.maximum(k, 0.5) ** -1.5
        noise = np.fft.fftn(np.random.default_rng(axis).standard_normal([side] * 3))
        field = np.fft.ifftn(noise / np.abs(noise) * np.sqrt(true / volume)).real * side**3
        sums.append(result.sums([torch.tensor(field).float()], axis)[0].numpy())
        used = (k > 0.5) & (k < edges[-1])
        place = np.minimum(4 * mu[used], 3).astype(int), np.digitize(k[used], edges) - 1
        for row, values in zip((*model, modes), (true, k, np.ones_like(k)), strict=True):
            np.add.at(row, place, values[used])
    some, power = slice(len(edges) - 1), sum(sums) * result.volume / np.where(result.modes, result.modes, np.nan)
    np.testing.assert_array_equal(result.modes, modes[:, some])
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(power, (model[0] / modes)[:, some], rtol=1e-5)
        fundamental = 2 * math.pi / (side * CELL)
        np.testing.assert_allclose(result.k, (model[1] / modes)[:, some] * fundamental, rtol=1e-9)
    assert np.isnan(power[1:3, 0]).tolist() == [True, False], "the longest waves have mu = 0, 1/√2 or 1"


def test_known_noise_gives_the_correlation_and_kaisers_factor_the_bias(base: Flux) -> None:
    """Flux −0.2 (1 + 1.5 mu²) × matter of constant power; the prediction adds a quarter of its power as noise."""
    side, bias, beta = 32, -0.2, 1.5
    bins, random = PowerBins(Slabs((side,) * 3, ALONE), 1.0, K_RATIO, MU_BINS), np.random.default_rng(0)
    waves = np.stack(np.meshgrid(*[np.fft.fftfreq(side)] * 3, indexing="ij"))
    phases = [np.fft.fftn(random.standard_normal([side] * 3)) for _ in range(2)]
    matter, noise = (part / np.abs(part) for part in phases)
    sums = np.zeros((6, *bins.modes.shape))
    for axis in range(3):
        factor = bias * (1 + beta * waves[axis] ** 2 / np.maximum((waves**2).sum(0), 1e-9))
        target, predicted = factor * matter, factor * (matter + noise / 2)
        fields = [torch.tensor(np.fft.ifftn(part).real).float() for part in (target, predicted, matter)]
        own, true, cross, _ = bins.sums([fields[1], fields[0]], axis)
        _, power, with_matter, quadrupole = bins.sums([fields[0], fields[2]], axis)
        sums += torch.stack([true, own, cross, with_matter, power, quadrupole]).numpy()
    quadrupole = sums[5].sum(0) / bins.modes.sum(0)
    true, own, cross, with_matter, power, _ = sums / np.where(bins.modes, bins.modes, np.nan)
    part = {"matter_p3d": with_matter, "quadrupole": quadrupole}
    known = {
        TARGET: replace(base.fields[TARGET], p3d=true, target_p3d=true, **part),
        PREDICTION: replace(base.fields[TARGET], p3d=own, target_p3d=cross, **part),
    }
    grid = {"p3d_k": bins.k, "p3d_modes": bins.modes, "p3d_mu_square": bins.mu_square, "matter_power": power}
    flux = replace(base, fields=known, **grid)
    np.testing.assert_allclose(flux.bias(PREDICTION), (bias, beta), rtol=1e-4)
    kaiser = (4 * beta / 3 + 4 * beta**2 / 7) / (1 + 2 * beta / 3 + beta**2 / 5)
    monopole, quadrupole = flux.multipoles(TARGET)
    np.testing.assert_allclose((quadrupole / monopole)[5:], kaiser, rtol=0.03)
    small = bins.modes > 1000
    np.testing.assert_allclose(flux.correlation(PREDICTION)[small], 1 / math.sqrt(1.25), rtol=0.02)
    np.testing.assert_allclose(flux.residual(PREDICTION)[small], 0.25, rtol=0.1)
    measures = flux.structure(PREDICTION)
    assert measures["bias ratio"] == measures["beta ratio"] == 1
    assert 0.4 < next(value for name, value in measures.items() if name.startswith("residual error")) < 0.6
