"""Sliding-window prediction: the same for any batch, block and number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from processes import run_ranks
from torch import nn

from networks.unet import UNet
from utils.data.slabs import Slabs
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError
from utils.inference.sliding_window import Predict, SlidingWindowPredictor
from utils.inference.window_grid import build_window_grid, split_blocks, window_count

ALONE = World(Launch("test"), torch.device("cpu"))
SHAPES = [  # X, Y, Z, window, overlap, periodic
    ((24, 16, 8), 8, 4, True),
    ((20, 13, 9), 8, 5, True),  # windows are 3 cells apart, which does not divide the size
    ((20, 13, 9), 8, 5, False),
    ((8, 8, 8), 8, 4, True),  # one window fills the volume
    ((16, 8, 24), 8, 0, True),
    ((16, 9, 8), 8, 6, True),
]
shapes = pytest.mark.parametrize(("shape", "window", "overlap", "periodic"), SHAPES)


def random_field(shape: tuple[int, ...], channels: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (channels, *shape)).astype(np.float32)


def affine(windows: torch.Tensor) -> torch.Tensor:
    """[N, 4, …] -> [N, 5, …], each cell separately."""
    return torch.cat([2 * windows - 1, windows.sum(dim=1, keepdim=True) / 4], dim=1)


def build_predictor(
    field: np.ndarray,
    window: int,
    overlap: int | None = None,
    periodic: bool = True,
    predict: Predict = affine,
    batch_size: int = 3,
    world: World = ALONE,
    out_channels: int = 5,
) -> SlidingWindowPredictor:
    grid = build_window_grid(field.shape[1:], window, overlap, periodic)  # type: ignore[arg-type]
    channels = (len(field), out_channels)
    return SlidingWindowPredictor(predict, lambda x, y, z: field[:, x, y, z], grid, channels, batch_size, world)


def predict_volume(predictor: SlidingWindowPredictor, advance: Callable[[int], object] = lambda _: None) -> np.ndarray:
    """The planes of all ranks, in which each rank has its own."""
    slabs = Slabs(predictor.grid.shape, predictor.world)
    return predictor.predict_planes(slabs, advance).numpy()


def small_unet() -> nn.Module:
    """Random weights, so that overlapping windows differ strongly."""
    torch.manual_seed(0)
    network = UNet(4, 5, width=4, scales=2)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network.eval().requires_grad_(False)


@shapes
def test_a_function_of_single_cells_is_computed_as_without_windows(
    shape: tuple[int, int, int], window: int, overlap: int, periodic: bool
) -> None:
    field = random_field(shape)
    expected = affine(torch.from_numpy(field)[None])[0]
    found = predict_volume(build_predictor(field, window, overlap, periodic))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("periodic", [True, False])
def test_each_cell_is_the_weighted_mean_of_its_windows_for_any_batch_size(periodic: bool) -> None:
    """Compared with a sum over the whole volume at once, window by window, in float64."""
    network, field = small_unet(), random_field((20, 12, 8))
    predictor = build_predictor(field, 8, 5, periodic, network)
    expected = np.zeros((5, 20, 12, 8))
    axes = (predictor.grid.x, predictor.grid.y, predictor.grid.z)
    for numbers in itertools.product(*(range(len(axis.origins)) for axis in axes)):
        window = np.ix_(
            *((axis.origins[number] + np.arange(8)) % axis.size for axis, number in zip(axes, numbers, strict=True))
        )
        cells = (slice(None), *window)
        output = network(torch.from_numpy(field[cells])[None])[0].double().numpy()
        x, y, z = (axis.weights[number].astype(float) for axis, number in zip(axes, numbers, strict=True))
        expected[cells] += output * np.einsum("x,y,z->xyz", x, y, z)
    for batch_size in (1, 3, 8, 100):
        found = predict_volume(replace(predictor, batch_size=batch_size))
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=f"{batch_size} windows per forward pass")


@shapes
@pytest.mark.parametrize(("side", "count"), [(100, 1), (100, 3), (12, 5), (8, 1), (1, 1000)])
def test_a_cell_has_the_same_bits_in_blocks_of_any_size(
    shape: tuple[int, int, int], window: int, overlap: int, periodic: bool, side: int, count: int
) -> None:
    """The blocks cover each cell once; a read stays within the windows that touch the block."""
    field, whole = random_field(shape), (slice(0, shape[0]), slice(0, shape[1]), slice(0, shape[2]))
    network, sizes = small_unet(), set[int]()
    predictor = build_predictor(field, window, overlap, periodic, lambda x: (sizes.add(len(x)), network(x))[1])
    expected, read = predictor.predict_box(whole), 0
    assert sizes == {3}, "a convolution may round differently in batches of another size"
    np.testing.assert_allclose(expected.predicted, predict_volume(predictor), atol=1e-6)

    def counted(x: slice, y: slice, z: slice) -> np.ndarray:
        nonlocal read
        read += field[0, x, y, z].size
        return field[:, x, y, z]

    seen = torch.zeros(shape)
    for x, y, z in split_blocks(predictor.grid, side, count, limit=10**9):
        reported: list[int] = []
        read = 0
        block = replace(predictor, read=counted).predict_box((x, y, z), reported.append)
        assert torch.equal(block.inputs, torch.from_numpy(field)[:, x, y, z])
        assert torch.equal(block.predicted, expected.predicted[:, x, y, z])
        assert sum(reported) == window_count(predictor.grid, (x, y, z))
        margin = 2 * (window - 1)
        assert read <= np.prod([min(n, a.stop - a.start + margin) for n, a in zip(shape, (x, y, z), strict=True)])
        seen[x, y, z] += 1
    assert torch.equal(seen, torch.ones(shape))


def test_the_memory_of_a_block_is_limited_to_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.inference.sliding_window.memory_limit", lambda: 2 * 3 * 92 * 1000)
    assert build_predictor(random_field((8, 8, 8)), 8).most_cells(per_node=2) == 1000


def test_blocks_are_as_many_and_as_small_as_requested() -> None:
    grid = build_window_grid((128, 64, 64), 16)
    for side, count, limit in ((32, 1, 10**9), (128, 5, 10**9), (128, 1, 40_000)):
        blocks = split_blocks(grid, side, count, limit)
        sizes = [[axis.stop - axis.start for axis in block] for block in blocks]
        assert len(blocks) >= count
        assert max(map(max, sizes)) <= side
        assert max(map(np.prod, sizes)) <= limit
        assert all(axis.start % 8 == 0 for block in blocks for axis in block), "blocks begin where windows begin"
    assert len(split_blocks(grid, 1, 1, 1)) == 16 * 8 * 8, "no block is smaller than a step of the windows"


CASES = [((16, 24, 8), 8, 4, True), ((20, 9, 8), 8, 0, False), ((8, 8, 8), 8, 0, True), ((2, 9, 13), 2, 1, True)]


def predict_cases(world: World) -> list[tuple[np.ndarray, int, int]]:
    """For each case: the own planes, this rank's number of windows, and how many it reported."""
    results = []
    for shape, window, overlap, periodic in CASES:
        predict = small_unet() if window > 2 else affine
        predictor = build_predictor(random_field(shape), window, overlap, periodic, predict, world=world)
        reported: list[int] = []
        results.append((predict_volume(predictor, reported.append), predictor.window_count(), sum(reported)))
    return results


def read_and_fail(world: World) -> str:
    """The last rank cannot read its second block of windows."""
    field, calls = random_field((64, 8, 8)), itertools.count()

    def cells(*box: slice) -> np.ndarray:
        if world.rank == world.size - 1 and next(calls) == 1:
            raise UserError("Nbody[0, 1, 2, 3] is nan; fix the file")
        return field[(slice(None), *box)]

    predictor = replace(build_predictor(field, 8, 0, predict=affine, batch_size=1, world=world), read=cells)
    with pytest.raises(UserError) as error:
        predict_volume(predictor)
    return str(error.value)


def all_of_ranks(world: World) -> tuple[list[tuple[np.ndarray, int, int]], str]:
    return predict_cases(world), read_and_fail(world)


def test_three_ranks_predict_what_one_does_and_fail_together() -> None:
    """Some have no planes, or no windows."""
    alone, answers = predict_cases(ALONE), run_ranks(all_of_ranks, 3)
    assert {line for _, line in answers} == {"rank 2: Nbody[0, 1, 2, 3] is nan; fix the file"}
    for (expected, windows, _), *found in zip(alone, *(results for results, _ in answers), strict=True):
        planes, counts, reported = zip(*found, strict=True)
        np.testing.assert_allclose(np.concatenate(planes, axis=1), expected, atol=1e-6)
        assert counts == reported
        assert sum(counts) == windows, "each window is predicted once"
        assert windows < 12 or max(counts) <= 0.6 * windows


def test_a_rank_reads_blocks_of_windows_and_predicts_each_window_once() -> None:
    """The margins of 32 blocks: less than reading the volume for each window."""
    field, read = random_field((64, 32, 16)), 0

    def cells(*box: slice) -> np.ndarray:
        nonlocal read
        read += field[(0, *box)].size
        return field[(slice(None), *box)]

    predictor = replace(build_predictor(field, 8, 4, batch_size=4), read=cells)
    worlds = [World(Launch("test", rank, world_size=8), torch.device("cpu")) for rank in range(8)]
    counts = [replace(predictor, world=world).window_count() for world in worlds]
    assert sum(counts) == predictor.grid.count == 16 * 8 * 4
    assert max(counts) <= 1.2 * 64
    predict_volume(predictor)
    assert read < 3 * field[0].size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_predicts_what_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    field, network = random_field((24, 16, 16)), small_unet()
    expected = predict_volume(build_predictor(field, 8, 4, predict=network))
    gpu = World(Launch("test"), torch.device("cuda"))
    predictor = build_predictor(field, 8, 4, predict=network.to(gpu.device), world=gpu)
    found = predictor.predict_planes(Slabs(predictor.grid.shape, gpu)).cpu()
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 * np.abs(expected).max())
