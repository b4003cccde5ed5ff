"""What an evaluation measures, against numpy and scikit-learn, fields that are known, and any way to share the work."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from volume_files import smooth_field

from utils.channels import Channel, input_channels, target_channels
from utils.config import Transform
from utils.distributed import Launch, World
from utils.evaluation import results
from utils.evaluation.results import Results
from utils.evaluation.spectra import Shells
from utils.evaluation.statistics import Evaluation
from utils.watch import Watch

CPU = torch.device("cpu")
ONE = World(Launch("test"), CPU)
GAS = target_channels(5, Transform())
SHAPE = (12, 10, 8)
ALL_SPECTRA = ["density", "log density", "velocity", "divergence", "log temperature"]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def volumes(shape: tuple[int, int, int] = SHAPE, channels: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, target), [C, X, Y, Z], channel values; the prediction is not quite right."""
    cube = smooth_field(channels, max(shape), np.random.default_rng(seed))
    target = 0.4 * cube[:, : shape[0], : shape[1], : shape[2]].astype(np.float32)
    return target + 0.02 * noise(*target.shape, seed=seed + 1), target


def evaluated(
    predicted: np.ndarray,
    target: np.ndarray,
    channels: Sequence[Channel] = GAS,
    cell: float | None = 0.5,
    thickness: int = 5,
    world: Any = ONE,
    vectors: Sequence[Sequence[int]] = ((1, 2, 3),),
    device: torch.device = CPU,
    backwards: bool = False,
) -> Results:
    shape = target.shape[1:]
    evaluation = Evaluation(channels, input_channels(4, Transform()), shape, cell, world, vectors)
    starts = range(0, shape[0], thickness)
    for start in reversed(starts) if backwards else starts:
        slab = slice(start, start + thickness)
        inputs = 0.5 * target[:4, slab] if len(target) >= 4 else np.zeros((4, *target[0, slab].shape), np.float32)
        values = (torch.from_numpy(field[:, slab].copy()).to(device) for field in (predicted, target))
        evaluation.add(start, inputs, *values)
    return evaluation.results({"epoch": 3})


def physical(values: np.ndarray, channels: Sequence[Channel] = GAS) -> list[np.ndarray]:
    return [channel.to_physical(field.astype(np.float64)) for channel, field in zip(channels, values, strict=True)]


def power(predicted: np.ndarray, target: np.ndarray, cell: float = 0.5) -> np.ndarray:
    """[3, shells] of two fields; the shells have tests of their own."""
    shells = Shells(target.shape, cell, CPU)
    found = shells.spectrum(shells.sums(*(torch.tensor(field, dtype=torch.float32) for field in (predicted, target))))
    return np.stack([found.predicted, found.target, found.cross])


def powers(found: Results, name: str) -> np.ndarray:
    spectrum = found.spectra[name]
    return np.stack([spectrum.predicted, spectrum.target, spectrum.cross])


def numpy_divergence(velocity: Sequence[np.ndarray], cell: float) -> np.ndarray:
    """numpy.gradient on a grid with its neighbours beyond the border."""
    padded = [np.pad(component, 1, mode="wrap") for component in velocity]
    total = sum(np.gradient(component, cell, axis=axis) for axis, component in enumerate(padded))
    return np.asarray(total)[1:-1, 1:-1, 1:-1]


def agree(one: Results, other: Results, tolerance: float = 1e-6) -> None:
    """All of it, spectra and errors within a relative tolerance; counts and slices as they are."""
    for name in ("l1", "r2", "divergence_r2"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=tolerance, atol=tolerance)
    assert list(one.spectra) == list(other.spectra)
    for name, spectrum in one.spectra.items():
        for part, values in vars(spectrum).items():
            theirs = getattr(other.spectra[name], part)
            np.testing.assert_allclose(values, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())
    assert list(one.distributions) == list(other.distributions)
    for name, distribution in one.distributions.items():
        for part, values in vars(distribution).items():
            np.testing.assert_array_equal(values, getattr(other.distributions[name], part))
    assert (one.plane is None) == (other.plane is None)
    if one.plane is not None and other.plane is not None:
        for part, values in vars(one.plane).items():
            np.testing.assert_array_equal(values, getattr(other.plane, part))
    for name, values in one.slices.items():
        np.testing.assert_array_equal(values, other.slices[name])
    assert (one.channels, one.cells, one.length_unit, one.about) == (
        other.channels,
        other.cells,
        other.length_unit,
        other.about,
    )


# --- cell by cell --------------------------------------------------------------------------------------------------


def test_l1_and_r2_are_those_of_numpy_and_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    predicted, target = volumes()
    found = evaluated(predicted, target)
    rows = [values.reshape(5, -1).T.astype(np.float64) for values in (target, predicted)]
    np.testing.assert_allclose(found.l1, metrics.mean_absolute_error(*rows, multioutput="raw_values"), rtol=1e-6)
    np.testing.assert_allclose(found.r2, metrics.r2_score(*rows, multioutput="raw_values"), rtol=1e-6)
    assert (found.r2 > 0.5).all()
    assert (found.r2 < 1).all()


def test_r2_of_a_channel_far_from_zero_keeps_its_digits() -> None:
    """Σt² − (Σt)²/N would lose twelve of them."""
    channels = (Channel("channel 0"),)
    predicted, target = (2e4 + noise(1, *SHAPE, seed=seed) for seed in (0, 1))
    predicted = 0.9 * target + 0.1 * predicted
    found = evaluated(predicted, target, channels)
    p, t = predicted.astype(np.float64), target.astype(np.float64)
    assert found.r2[0] == pytest.approx(1 - ((p - t) ** 2).sum() / ((t - t.mean()) ** 2).sum(), rel=1e-9)


def test_distributions_are_those_of_numpy() -> None:
    predicted, target = volumes()
    found = evaluated(predicted, target)
    for number, channel in enumerate(GAS):
        distribution = found.distributions[channel.name]
        assert (distribution.unit, distribution.is_log) == (channel.unit, channel.is_log)
        assert len(distribution.edges) > 100
        for counts, values in ((distribution.predicted, predicted), (distribution.target, target)):
            value = physical(values)[number]
            value = np.log10(value) if channel.is_log else value
            np.testing.assert_array_equal(counts, np.histogram(value, distribution.edges)[0])
            assert counts.sum() == target[0].size


def test_velocities_to_1500_km_s_have_bins() -> None:
    edges = evaluated(*volumes()).distributions["gas velocity y"].edges
    assert (edges[0], edges[-1]) == (-1500, 1500)


def test_what_lies_outside_is_in_the_end_bins() -> None:
    """Nothing is lost, and a value that is no number does not end the evaluation."""
    predicted, target = volumes()
    target[0, 0], target[0, 1, 0] = 3.0, -3.0  # e^±42
    predicted[2, 3, 2, 2:6] = np.inf, -np.inf, np.nan, 1e30
    found = evaluated(predicted, target)
    density, velocity = found.distributions["gas density"], found.distributions["gas velocity y"]
    assert (density.target[-1], density.target[0]) == (80, 8)
    assert (velocity.predicted[-1], velocity.predicted[0]) == (2, 2)
    assert velocity.predicted.sum() == density.target.sum() == target[0].size
    assert np.isfinite(found.r2[[0, 1, 3, 4]]).all()
    assert np.isnan(found.r2[2])


def test_the_plane_is_that_of_numpy_and_its_margins_are_the_distributions() -> None:
    predicted, target = volumes()
    found = evaluated(predicted, target)
    plane = found.plane
    assert plane is not None
    for counts, values in ((plane.predicted, predicted), (plane.target, target)):
        density, *_, temperature = (np.log10(value).ravel() for value in np.abs(physical(values)))
        expected = np.histogram2d(density, temperature, (plane.density_edges, plane.temperature_edges))[0]
        np.testing.assert_array_equal(counts, expected)
    np.testing.assert_array_equal(plane.target.sum(1), found.distributions["gas density"].target)
    np.testing.assert_array_equal(plane.predicted.sum(0), found.distributions["temperature"].predicted)


def test_slices_are_the_middle_plane() -> None:
    predicted, target = volumes()
    slices = evaluated(predicted, target).slices
    np.testing.assert_array_equal(slices["predicted"], predicted[:, 6])
    np.testing.assert_array_equal(slices["target"], target[:, 6])
    np.testing.assert_array_equal(slices["input"], 0.5 * target[:4, 6])


# --- spectra and divergence ----------------------------------------------------------------------------------------


def test_spectra_are_of_the_physical_fields() -> None:
    predicted, target = volumes()
    found = evaluated(predicted, target)
    ours, theirs = physical(predicted), physical(target)
    assert list(found.spectra) == ALL_SPECTRA
    expected = {
        "density": power(ours[0], theirs[0]),
        "log density": power(np.log(ours[0]), np.log(theirs[0])),
        "velocity": sum(power(ours[axis], theirs[axis]) for axis in (1, 2, 3)),
        "divergence": power(*(numpy_divergence(values[1:4], 0.5) for values in (ours, theirs))),
        "log temperature": power(np.log(ours[4]), np.log(theirs[4])),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(powers(found, name), values, rtol=1e-4, atol=1e-5 * np.abs(values).max())
    assert found.length_unit == "Mpc/h"
    assert found.spectra["density"].k[0] == pytest.approx(2 * np.pi / (12 * 0.5), rel=0.2)


def test_without_a_cell_size_lengths_are_in_cells() -> None:
    predicted, target = volumes()
    found, known = evaluated(predicted, target, cell=None), evaluated(predicted, target, cell=0.5)
    assert found.length_unit == "cells"
    np.testing.assert_allclose(found.spectra["velocity"].k, 0.5 * known.spectra["velocity"].k)
    np.testing.assert_allclose(powers(found, "velocity"), powers(known, "velocity") / 0.5**3, rtol=1e-5)
    units = [each.distributions["velocity divergence"].unit for each in (found, known)]
    assert units == ["km/s per cell", "km/s per Mpc/h"]
    assert found.divergence_r2 == pytest.approx(known.divergence_r2, rel=1e-5)


def test_divergence_r2_and_distribution_are_those_of_numpy() -> None:
    predicted, target = volumes()
    found = evaluated(predicted, target)
    p, t = (numpy_divergence(physical(values)[1:4], 0.5) for values in (predicted, target))
    assert found.divergence_r2 == pytest.approx(1 - ((p - t) ** 2).sum() / (t**2).sum(), rel=1e-5)
    distribution = found.distributions["velocity divergence"]
    assert 7.9 * t.std() < distribution.edges[-1] == -distribution.edges[0] < 8.9 * t.std()
    for counts, values in ((distribution.predicted, p), (distribution.target, t)):
        expected = np.histogram(np.clip(values, *distribution.edges[[0, -1]]), distribution.edges)[0]
        assert np.abs(counts - expected).sum() <= 4  # float32 may put a value beyond an edge that it is on
        assert counts.sum() == t.size


def test_the_divergence_of_waves_is_the_one_it_has() -> None:
    """v_x = A sin(kx) has A k cos(kx), less the factor sin(kh)/(kh) of central differences; v_y = sin(kx) has none."""
    shape, cell, amplitude = (32, 8, 8), 0.5, 300.0
    k = 2 * np.pi * 3 / (32 * cell)
    wave = np.broadcast_to(np.sin(k * cell * np.arange(32))[:, None, None], shape)
    target = 0.01 * noise(5, *shape)
    target[1], target[2], target[3] = wave * amplitude / 1000, 0, 0
    predicted = target.copy()
    predicted[1], predicted[2] = 0, target[1]
    found = evaluated(predicted, target, cell=cell).spectra["divergence"]
    shell = found.at(k)
    variance = found.target * found.modes / (target[0].size * cell**3)
    assert variance[shell] == pytest.approx((amplitude * np.sin(k * cell) / cell) ** 2 / 2, rel=1e-5)
    assert np.delete(variance, shell).max() < 1e-9 * variance[shell]
    np.testing.assert_array_equal(found.predicted, 0)


def test_a_perfect_prediction() -> None:
    _, target = volumes()
    found = evaluated(target, target)
    assert (found.l1 == 0).all()
    assert (found.r2 == 1).all()
    assert found.divergence_r2 == 1
    for spectrum in found.spectra.values():
        np.testing.assert_allclose(spectrum.ratio, 1)
        np.testing.assert_allclose(spectrum.correlation, 1)


def test_a_prediction_in_proportion_has_its_power_in_proportion() -> None:
    """Velocities times 1.1, densities times 1.3: the mean of the prediction's density is its own, not set to one."""
    _, target = volumes()
    predicted = target.copy()
    predicted[1:4] *= 1.1
    predicted[0] += np.log(1.3) / GAS[0].scale
    found = evaluated(predicted, target)
    for name, ratio in (("velocity", 1.21), ("divergence", 1.21), ("density", 1.69), ("log density", 1.0)):
        np.testing.assert_allclose(found.spectra[name].ratio, ratio, rtol=1e-4)
        np.testing.assert_allclose(found.spectra[name].correlation, 1, rtol=1e-5)


def test_an_unrelated_prediction_is_not_correlated() -> None:
    predicted, target = 0.1 * noise(5, 24, 24, 24), 0.1 * noise(5, 24, 24, 24, seed=1)
    found = evaluated(predicted, target)
    for spectrum in found.spectra.values():
        assert (np.abs(spectrum.correlation) < 4.5 / np.sqrt(spectrum.modes / 2)).all()
    assert (found.r2 < -0.8).all()
    assert -1.2 < found.divergence_r2 < -0.8


def test_moving_both_volumes_changes_nothing_but_the_slices() -> None:
    predicted, target = volumes()
    found = evaluated(predicted, target)
    moved = evaluated(*(np.roll(values, (5, -3, 2), (1, 2, 3)) for values in (predicted, target)))
    assert not np.array_equal(found.slices["target"], moved.slices["target"])
    agree(dataclasses.replace(moved, slices=found.slices), found, 1e-4)


# --- who does what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thickness", [1, 3, 12])
def test_the_slabs_thickness_changes_no_bit(thickness: int) -> None:
    predicted, target = volumes()
    agree(evaluated(predicted, target, thickness=thickness), evaluated(predicted, target, thickness=5), 0)


def test_slabs_may_come_in_any_order() -> None:
    predicted, target = volumes()
    agree(evaluated(predicted, target, thickness=4, backwards=True), evaluated(predicted, target))


@dataclasses.dataclass
class Thread:
    """A rank among threads, as far as an evaluation asks for one: real ones take seconds each to start."""

    rank: int
    size: int
    barrier: threading.Barrier
    given: list[torch.Tensor]
    device: torch.device = CPU
    watch: Watch = dataclasses.field(default_factory=lambda: Watch(0))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.barrier.wait()
        self.given[self.rank] = tensor
        self.barrier.wait()
        return torch.stack(self.given).sum(0)


def on_threads(function: Callable[[Any], Results], size: int) -> list[Results]:
    barrier, given, found = threading.Barrier(size), [torch.empty(0)] * size, {}

    def work(rank: int) -> None:
        try:
            found[rank] = function(Thread(rank, size, barrier, given))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5, 16])
def test_any_number_of_ranks_finds_the_same(size: int) -> None:
    predicted, target = volumes()
    alone = evaluated(predicted, target)
    for found in on_threads(lambda world: evaluated(predicted, target, world=world), size):
        agree(found, alone, 1e-9)


def test_a_rank_keeps_the_fields_it_transforms_and_no_others() -> None:
    """Of six, among four ranks: two, two, one, one. Alone it keeps all six."""

    def kept(rank: int, size: int) -> int:
        world = World(Launch("test", rank=rank, world_size=size), CPU)
        evaluation = Evaluation(GAS, GAS[:4], SHAPE, None, world)
        return sum(tensor.numel() for tensor in evaluation._kept)

    pair = 2 * int(np.prod(SHAPE))
    assert [kept(rank, 4) for rank in range(4)] == [2 * pair, 2 * pair, pair, pair]
    assert kept(0, 1) == 6 * pair
    assert kept(7, 8) == 0


def as_rank(world: World) -> Results:
    return evaluated(*volumes(), world=world)


def test_real_ranks_find_what_one_finds() -> None:
    alone = as_rank(ONE)
    for found in run_ranks(as_rank, 2):
        agree(found, alone, 1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_finds_what_the_cpu_finds() -> None:
    gpu = torch.device("cuda")
    predicted, target = volumes((24, 20, 16))
    alone = evaluated(predicted, target)
    found = evaluated(predicted, target, world=World(Launch("test"), gpu), device=gpu)
    for name, distribution in found.distributions.items():
        # Other rounding may put single cells into the next bin.
        assert np.abs(distribution.target - alone.distributions[name].target).sum() <= 8
    assert found.plane is not None
    assert found.plane.predicted.sum() == predicted[0].size
    agree(dataclasses.replace(found, distributions=alone.distributions, plane=alone.plane), alone, 1e-5)


# --- other channels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "vectors"), [(1, ()), (2, ()), (4, ((1, 2, 3),)), (7, ((0, 1, 2), (4, 5, 6)))])
def test_channels_of_which_nothing_is_known(count: int, vectors: tuple[tuple[int, ...], ...]) -> None:
    """A spectrum and a distribution of each one's value, and nothing that takes units."""
    predicted, target = volumes(channels=count)
    channels = target_channels(count, Transform())
    found = evaluated(predicted, target, channels, vectors=vectors)
    names = [f"channel {number}" for number in range(count)]
    assert list(found.spectra) == list(found.distributions) == names
    for number, name in enumerate(names):
        values = power(predicted[number], target[number])
        np.testing.assert_allclose(powers(found, name), values, rtol=1e-5, atol=1e-5 * np.abs(values).max())
        edges = found.distributions[name].edges
        assert (edges[0], edges[-1], found.distributions[name].unit) == (-1.5, 1.5, None)
        np.testing.assert_array_equal(found.distributions[name].target, np.histogram(target[number], edges)[0])
    assert found.plane is None
    assert np.isnan(found.divergence_r2)
    assert all(np.isfinite(value) for value in found.scalars().values())


@pytest.mark.parametrize(
    ("unknown", "spectra"),
    [
        ("velocity_scale_km_s", ["density", "log density", "log temperature", *(f"gas velocity {a}" for a in "xyz")]),
        ("density_log_scale", ["velocity", "divergence", "log temperature", "gas density"]),
        ("temperature_log10_scale", ["density", "log density", "velocity", "divergence", "temperature"]),
    ],
)
def test_a_transform_that_is_unknown_leaves_the_rest(unknown: str, spectra: list[str]) -> None:
    channels = target_channels(5, Transform(**{unknown: None}))
    found = evaluated(*volumes(), channels)
    assert list(found.spectra) == spectra
    assert (found.plane is None) == (unknown != "velocity_scale_km_s")
    assert np.isnan(found.divergence_r2) == ("divergence" not in spectra)
    assert ("velocity divergence" in found.distributions) == ("divergence" in spectra)


def test_velocities_that_are_no_vector_are_fields_of_their_own() -> None:
    found = evaluated(*volumes(), vectors=())
    assert {f"gas velocity {axis}" for axis in "xyz"} < set(found.spectra)
    assert not {"velocity", "divergence"} & set(found.spectra)
    assert np.isnan(found.divergence_r2)


def test_another_order_of_channels() -> None:
    """What a channel is stands in its unit, not in its place."""
    predicted, target = volumes()
    order = [4, 3, 1, 2, 0]
    moved = evaluated(predicted[order], target[order], [GAS[place] for place in order], vectors=((2, 3, 1),))
    found = evaluated(predicted, target)
    for name in ALL_SPECTRA:
        np.testing.assert_allclose(powers(moved, name), powers(found, name), rtol=1e-6)
    assert moved.divergence_r2 == pytest.approx(found.divergence_r2, rel=1e-6)
    assert moved.plane is not None
    assert found.plane is not None
    np.testing.assert_array_equal(moved.plane.target, found.plane.target)


def test_a_logarithm_may_have_a_center() -> None:
    """Of a density, too, though none has one today."""
    predicted, target = volumes()
    moved = evaluated(predicted, target, (dataclasses.replace(GAS[0], center=0.4), *GAS[1:]))
    found = evaluated(predicted, target)
    np.testing.assert_allclose(powers(moved, "density"), np.exp(0.8) * powers(found, "density"), rtol=1e-5)
    np.testing.assert_allclose(powers(moved, "log density"), powers(found, "log density"), rtol=1e-4)


def test_a_constant_target_has_no_r2_and_the_rest_goes_on() -> None:
    predicted, target = volumes()
    target[1:4] = 0.25
    found = evaluated(predicted, target)
    assert np.isnan(found.r2[1:4]).all()
    assert np.isfinite(found.r2[[0, 4]]).all()
    assert np.isnan(found.divergence_r2)
    assert found.distributions["velocity divergence"].target.sum() == target[0].size
    assert (found.spectra["velocity"].target < 1e-3 * found.spectra["velocity"].predicted).all()


def test_results_that_are_no_cube_can_be_kept(tmp_path: Any) -> None:
    found = evaluated(*volumes())
    results.save(found, tmp_path / "evaluation.npz")
    agree(results.load(tmp_path / "evaluation.npz"), found, 0)
    assert found.about == {"epoch": 3}


def test_planes_that_are_missing_are_noticed() -> None:
    predicted, target = (torch.from_numpy(values) for values in volumes())
    evaluation = Evaluation(GAS, GAS[:4], SHAPE, None, ONE)
    evaluation.add(0, target[:4, :5], predicted[:, :5], target[:, :5])
    with pytest.raises(AssertionError):
        evaluation.results()
