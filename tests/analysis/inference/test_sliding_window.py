"""Sliding-window prediction: the same for any batch, block and number of ranks, or averaged over symmetries."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from reference_samples import ALONE
from torch import nn

from analysis.inference.sliding_window import Predict, SlidingWindowPredictor, symmetry_mean
from analysis.inference.trained_network import SYMMETRIES
from analysis.inference.window_grid import build_window_grid, window_axis, window_count
from analysis.slabs import Slabs
from networks.unet import UNet
from utils.data import symmetry
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError

SHAPES = [  # X, Y, Z, window, overlap, periodic
    ((24, 16, 8), 8, 4, True),
    ((20, 13, 9), 8, 5, True),  # windows are 3 cells apart, which does not divide the size
    ((20, 13, 9), 8, 5, False),
    ((8, 8, 8), 8, 4, True),  # one window fills the volume
    ((16, 8, 24), 8, 0, True),
    ((16, 9, 8), 8, 6, True),
]
shapes = pytest.mark.parametrize("case", SHAPES)


def random_field(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (4, *shape)).astype(np.float32)


def affine(windows: torch.Tensor) -> torch.Tensor:
    """[N, 4, …] -> [N, 5, …], each cell separately."""
    return torch.cat([2 * windows - 1, windows.sum(dim=1, keepdim=True) / 4], dim=1)


def build_predictor(
    field: Any, window: int, overlap: Any = None, periodic: bool = True, predict: Predict = affine, **options: Any
) -> SlidingWindowPredictor:
    grid = build_window_grid(field.shape[1:], window, overlap, periodic)
    options = {"batch_size": 3, "world": ALONE} | options
    return SlidingWindowPredictor(predict, lambda x, y, z: field[:, x, y, z], grid, (4, 5), **options)


def predict_volume(predictor: SlidingWindowPredictor) -> np.ndarray:
    """The planes of all ranks, in which each rank has its own."""
    slabs = Slabs(predictor.grid.shape, predictor.world)
    return predictor.predict_planes(slabs).numpy()


def small_unet() -> nn.Module:
    """Random weights, so that overlapping windows differ strongly."""
    torch.manual_seed(0)
    network = UNet(4, 5, width=4, scales=2)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network.eval().requires_grad_(False)


@shapes
def test_each_cell_is_the_weighted_mean_of_its_windows_for_any_batch_size(case: Any) -> None:
    """Compared with a sum over the whole volume at once, window by window, in float64."""
    shape, window, *others = case
    network, field = small_unet(), random_field(shape)
    predictor = build_predictor(field, window, *others, network)
    expected, axes = np.zeros((5, *shape)), predictor.grid
    for numbers in itertools.product(*(range(len(axis.origins)) for axis in axes)):
        along = [*zip(axes, numbers, strict=True)]
        places = np.ix_(*((axis.origins[number] + np.arange(window)) % axis.size for axis, number in along))
        cells = (slice(None), *places)
        output = network(torch.from_numpy(field[cells])[None])[0].double().numpy()
        weights = [axis.weights[number].astype(float) for axis, number in along]
        expected[cells] += output * np.einsum("x,y,z->xyz", *weights)
    for batch_size in (1, 8, 100):
        result = predict_volume(replace(predictor, batch_size=batch_size))
        np.testing.assert_allclose(result, expected, atol=1e-6, err_msg=f"{batch_size} windows per forward pass")


@shapes
@pytest.mark.parametrize(("side", "count"), [(100, 3), (12, 5), (8, 1), pytest.param(1, 1000, marks=pytest.mark.slow)])
def test_a_cell_has_the_same_bits_in_blocks_of_any_size(case: Any, side: int, count: int) -> None:
    """The blocks cover each cell once; a read stays within the windows that touch the block."""
    shape, window, *others = case
    field, whole = random_field(shape), (slice(0, shape[0]), slice(0, shape[1]), slice(0, shape[2]))
    network, sizes = small_unet(), set[int]()
    predictor = build_predictor(field, window, *others, lambda x: (sizes.add(len(x)), network(x))[1])
    expected, read = predictor.predict_box(whole), 0
    assert sizes == {3}, "a convolution may round differently in batches of another size"
    np.testing.assert_allclose(expected.predicted, predict_volume(predictor), atol=1e-6)

    def counted(x: slice, y: slice, z: slice) -> np.ndarray:
        nonlocal read
        read += field[0, x, y, z].size
        return field[:, x, y, z]

    seen = torch.zeros(shape)
    for x, y, z in predictor.grid.split_blocks(side, count, limit=10**9):
        reported, read = [0], 0
        with ALONE.pulse.using(show=lambda count, _, reported=reported: reported.append(count)):
            block = replace(predictor, read=counted).predict_box((x, y, z))
        assert torch.equal(block.inputs, torch.from_numpy(field)[:, x, y, z])
        assert torch.equal(block.predicted, expected.predicted[:, x, y, z])
        assert sum(reported) == window_count(predictor.grid.parts((x, y, z)))
        margin = 2 * (window - 1)
        assert read <= np.prod([min(n, a.stop - a.start + margin) for n, a in zip(shape, (x, y, z), strict=True)])
        seen[x, y, z] += 1
    assert torch.equal(seen, torch.ones(shape))


def test_the_memory_of_a_block_is_limited_to_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.inference.sliding_window.memory_limit", lambda: 2 * 3 * 92 * 1000)
    assert build_predictor(random_field((8, 8, 8)), 8).most_cells(per_node=2) == 1000


def test_blocks_are_as_many_and_as_small_as_requested() -> None:
    grid = build_window_grid((128, 64, 64), 16, None, periodic=True)
    for side, count, limit in ((32, 1, 10**9), (128, 5, 10**9), (128, 1, 40_000)):
        blocks = grid.split_blocks(side, count, limit)
        sizes = [[axis.stop - axis.start for axis in block] for block in blocks]
        assert len(blocks) >= count
        assert max(map(max, sizes)) <= side
        assert max(map(np.prod, sizes)) <= limit
        assert all(axis.start % 8 == 0 for block in blocks for axis in block), "blocks begin where windows begin"
    assert len(grid.split_blocks(1, 1, 1)) == 16 * 8 * 8, "no block is smaller than a step of the windows"


CASES = [((16, 24, 8), 8, 4, True), ((20, 9, 8), 8, 0, False), ((8, 8, 8), 8, 0, True), ((2, 9, 13), 2, 1, True)]


def predict_cases(world: World) -> list[tuple[np.ndarray, int, int]]:
    """For each case: the own planes, this rank's number of windows, and how many it reported."""
    results = []
    for shape, window, overlap, periodic in CASES:
        predict = small_unet() if window > 2 else affine
        predictor = build_predictor(random_field(shape), window, overlap, periodic, predict, world=world)
        reported: list[int] = []
        with world.pulse.using(show=lambda count, _, reported=reported: reported.append(count)):
            results.append((predict_volume(predictor), predictor.window_count(), sum(reported)))
    return results


def predict_and_fail(world: World) -> tuple[list[tuple[np.ndarray, int, int]], str]:
    """The results of `predict_cases`, and an error: the last rank cannot read its second block of windows."""
    field, calls = random_field((64, 8, 8)), itertools.count()

    def cells(*box: slice) -> np.ndarray:
        if world.rank == world.size - 1 and next(calls) == 1:
            raise UserError("Nbody[0, 1, 2, 3] is nan; fix the file")
        return field[(slice(None), *box)]

    predictor = replace(build_predictor(field, 8, 0, predict=affine, batch_size=1, world=world), read=cells)
    with pytest.raises(UserError) as error:
        predict_volume(predictor)
    return predict_cases(world), str(error.value)


def test_three_ranks_predict_what_one_does_and_fail_together() -> None:
    """Some have no planes, or no windows."""
    alone, answers = predict_cases(ALONE), run_ranks(predict_and_fail, 3)
    assert {line for _, line in answers} == {"rank 2: Nbody[0, 1, 2, 3] is nan; fix the file"}
    for (expected, windows, _), *result in zip(alone, *(results for results, _ in answers), strict=True):
        planes, counts, reported = zip(*result, strict=True)
        np.testing.assert_allclose(np.concatenate(planes, axis=1), expected, atol=1e-6)
        assert counts == reported
        assert sum(counts) == windows, "each window is predicted once"
        assert windows < 12 or max(counts) <= 0.6 * windows


@pytest.mark.gpu
def test_a_gpu_predicts_what_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    field, network = random_field((24, 16, 16)), small_unet()
    expected = predict_volume(build_predictor(field, 8, 4, predict=network))
    gpu = World(Launch("test"), torch.device("cuda"))
    predictor = build_predictor(field, 8, 4, predict=network.to(gpu.device), world=gpu)
    result = predictor.predict_planes(Slabs(predictor.grid.shape, gpu)).cpu()
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-5 * np.abs(expected).max())


def test_any_size_window_and_overlap_cover_the_axis() -> None:
    """Weights are positive and sum to one; windows overlap by at least the overlap; there are no more than needed."""
    products = itertools.product((1, 7, 16, 33, 128), (1, 2, 7, 16, 32), (True, False), (0, 0.3, 0.5, 0.95))
    for size, window, periodic, part in (product for product in products if product[1] <= product[0]):
        case = size, window, int(part * window), periodic
        step, axis = window - case[2], window_axis(*case)
        origins, weights = axis.origins, axis.weights
        total = np.zeros(size)
        np.add.at(total, (np.array(origins)[:, None] + np.arange(window)) % size, weights)
        np.testing.assert_allclose(total, 1, atol=1e-6, err_msg=str(case))
        assert weights.dtype == np.float32, case
        assert (weights > 0).all(), case
        gaps = np.diff([*origins, size] if periodic else origins)
        assert origins[0] == 0, case
        assert ((gaps >= 1) & (gaps <= step)).all(), case
        assert periodic or origins[-1] == size - window, case
        assert len(origins) == -(-(size if periodic else size - window) // step) + (not periodic), case
    assert build_window_grid((3, 2, 1), 1, None, True).windows == 6, "windows are at least one cell apart by default"
    expected = np.sin(np.pi * (np.arange(16) + 0.5) / 16) ** 2
    np.testing.assert_allclose(window_axis(64, 16, 8).weights, np.tile(expected, (8, 1)), atol=1e-6)


INPUT_VECTORS, OUTPUT_VECTORS = [(1, 2, 3)], [(2, 3, 1)]  # the target's components in another order


@pytest.mark.parametrize("count", SYMMETRIES)
def test_the_mean_over_a_group_is_equivariant_under_it_and_the_network_is_not(count: int) -> None:
    """Compares the predictions of transformed windows with transformed predictions."""
    mean = symmetry_mean([small_unet()], count, (4, 5), (INPUT_VECTORS, OUTPUT_VECTORS), ALONE)
    window, errors = random_field((8, 8, 8)), list[float]()
    expected = mean(torch.from_numpy(window)[None])[0].numpy()
    for index in range(symmetry.COUNT):
        result = mean(torch.from_numpy(symmetry.apply(window, index, INPUT_VECTORS))[None])[0].numpy()
        errors.append(float(np.abs(result - symmetry.apply(expected, index, OUTPUT_VECTORS)).max()))
    assert max(errors[:count]) < 1e-5
    assert min(errors[count:], default=1) > 0.1


def equivariant(windows: torch.Tensor) -> torch.Tensor:
    """Density from density; velocity from velocity and density; the square of the speed. In low precision."""
    density, velocity = windows[:, :1], windows[:, 1:]
    parts = [density, velocity[:, [2, 0, 1]] * density, velocity.square().sum(1, keepdim=True)]
    return torch.cat(parts, dim=1).bfloat16()


def test_means_and_spread_are_those_over_networks_and_symmetries_in_float32() -> None:
    windows, networks = torch.from_numpy(random_field((8, 8, 8)))[None], [small_unet(), equivariant]
    mean = symmetry_mean(networks, 8, (4, 5), (INPUT_VECTORS, OUTPUT_VECTORS), ALONE, spread=True)
    single = []
    for index, network in itertools.product(range(8), networks):
        augmented = torch.from_numpy(symmetry.apply(windows[0].numpy(), index, INPUT_VECTORS))[None]
        outputs = network(augmented)[0].float().numpy()
        single.append(symmetry.apply(outputs, symmetry.inverse(index), OUTPUT_VECTORS))
    expected = np.concatenate([np.mean(single, axis=0), np.var(single, axis=0)])
    np.testing.assert_allclose(mean(windows)[0].numpy(), expected, rtol=1e-4, atol=1e-6)
