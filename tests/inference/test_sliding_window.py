"""A network on a whole volume: the same for any batch, start and number of ranks, in one tile's memory."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from processes import run_ranks
from torch import nn

from networks.unet import UNet
from utils.distributed.world import Launch, World
from utils.errors import UserError
from utils.inference.sliding_window import Predict, Slab, SlidingWindowPredictor
from utils.inference.window_grid import build_window_grid

ALONE = World(Launch("test"), torch.device("cpu"))
SHAPES = [  # X, Y, Z, tile, step, periodic
    ((24, 16, 8), 8, 4, True),
    ((20, 13, 9), 8, 3, True),  # steps that do not divide the size
    ((20, 13, 9), 8, 3, False),
    ((8, 8, 8), 8, 4, True),  # one tile fills the volume
    ((16, 8, 24), 8, 8, True),  # no overlap
    ((16, 9, 8), 8, 2, True),
]
shapes = pytest.mark.parametrize(("shape", "tile", "step", "periodic"), SHAPES)


def random_field(shape: tuple[int, ...], channels: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (channels, *shape)).astype(np.float32)


def affine(tiles: torch.Tensor) -> torch.Tensor:
    """[N, 4, …] -> [N, 5, …], each cell by itself."""
    return torch.cat([2 * tiles - 1, tiles.sum(dim=1, keepdim=True) / 4], dim=1)


def build_painter(
    field: np.ndarray,
    tile: int,
    step: int | None = None,
    periodic: bool = True,
    predict: Predict = affine,
    batch_size: int = 3,
    world: World = ALONE,
    out_channels: int = 5,
) -> SlidingWindowPredictor:
    tiling = build_window_grid(field.shape[1:], tile, step, periodic)  # type: ignore[arg-type]
    channels = (len(field), out_channels)
    return SlidingWindowPredictor(
        predict, lambda start, stop: field[:, start:stop], tiling, channels, batch_size, world
    )


def collect(painter: SlidingWindowPredictor, first: int = 0) -> list[Slab]:
    """Copies of all slabs, since a slab is valid only until the next one."""
    slabs = painter.slabs(first)
    return [slab._replace(inputs=slab.inputs.clone(), predicted=slab.predicted.clone()) for slab in slabs]


def paint(painter: SlidingWindowPredictor) -> np.ndarray:
    return torch.cat([slab.predicted for slab in collect(painter)], dim=1).numpy()


def small_unet() -> nn.Module:
    """Random weights, so that overlapping tiles differ strongly."""
    torch.manual_seed(0)
    network = UNet(4, 5, width=4, scales=2)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network.eval().requires_grad_(False)


# --- the prediction --------------------------------------------------------------------------------------------------


@shapes
def test_a_function_of_single_cells_is_computed_as_without_tiles(
    shape: tuple[int, int, int], tile: int, step: int, periodic: bool
) -> None:
    field = random_field(shape)
    expected = affine(torch.from_numpy(field)[None])[0]
    slabs = collect(build_painter(field, tile, step, periodic))
    np.testing.assert_array_equal(torch.cat([slab.inputs for slab in slabs], dim=1), field)
    np.testing.assert_allclose(torch.cat([slab.predicted for slab in slabs], dim=1), expected, rtol=1e-6, atol=1e-6)
    lower = paint(build_painter(field, tile, step, periodic, predict=lambda tiles: affine(tiles).bfloat16()))
    assert lower.dtype == np.float32, "a network's lower precision is summed in float32"
    np.testing.assert_allclose(lower, expected, atol=2e-2)


@shapes
def test_a_prediction_that_starts_at_any_slab_is_the_same_bit_for_bit(
    shape: tuple[int, int, int], tile: int, step: int, periodic: bool
) -> None:
    painter = build_painter(random_field(shape), tile, step, periodic, small_unet())
    whole = collect(painter)
    assert [slab.number for slab in whole] == list(range(len(painter.starts) - 1))
    assert [*(slab.start for slab in whole), shape[0]] == list(painter.starts)
    assert [slab.inputs.shape[1] for slab in whole] == list(np.diff(painter.starts))
    for first in range(1, len(whole)):
        for slab, expected in zip(collect(painter, first), whole[first:], strict=True):
            assert (slab.number, slab.start) == (expected.number, expected.start)
            assert torch.equal(slab.inputs, expected.inputs)
            assert torch.equal(slab.predicted, expected.predicted)


@pytest.mark.parametrize("periodic", [True, False])
def test_each_cell_is_the_weighted_mean_of_its_tiles_for_any_batch_size(periodic: bool) -> None:
    """Compared with a sum over the whole volume at once, tile by tile, in float64."""
    network, field = small_unet(), random_field((20, 12, 8))
    painter = build_painter(field, 8, 3, periodic, network)
    expected = np.zeros((5, 20, 12, 8))
    axes = (painter.tiling.x, painter.tiling.y, painter.tiling.z)
    for numbers in itertools.product(*(range(len(axis.origins)) for axis in axes)):
        tile = np.ix_(*(axis.covered(number) for axis, number in zip(axes, numbers, strict=True)))
        cells = (slice(None), *tile)
        made = network(torch.from_numpy(field[cells])[None])[0].double().numpy()
        x, y, z = (axis.windows[number].astype(float) for axis, number in zip(axes, numbers, strict=True))
        expected[cells] += made * np.einsum("x,y,z->xyz", x, y, z)
    for batch_size in (1, 3, 8, 100):
        found = paint(replace(painter, batch_size=batch_size))
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=f"{batch_size} tiles at once")


def test_moving_a_periodic_volume_moves_its_prediction() -> None:
    network, field = small_unet(), random_field((16, 24, 8))
    usual = paint(build_painter(field, 8, 4, predict=network))
    for shift in ((4, 0, 0), (0, 4, 8), (12, -4, 4)):
        expected, moved = (np.roll(values, shift, axis=(1, 2, 3)) for values in (usual, field))
        found = paint(build_painter(moved, 8, 4, predict=network))
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=str(shift))
        faces = paint(build_painter(moved, 8, 4, periodic=False, predict=network))
        assert np.abs(faces - expected).max() > 1e-2, "a volume that is not periodic has faces"


# --- ranks -----------------------------------------------------------------------------------------------------------


CASES = [((16, 24, 8), 8, 4, True), ((20, 9, 8), 8, 8, False), ((8, 8, 8), 8, 8, True)]
TILES_PER_LAYER = [12, 2, 1]


def paint_cases(world: World) -> list[tuple[np.ndarray, int, list[int]]]:
    """For each case: the prediction, this rank's number of tiles, and the batches that it reported."""
    torch.manual_seed(world.rank)
    results = []
    for shape, tile, step, periodic in CASES:
        painter = build_painter(random_field(shape), tile, step, periodic, small_unet(), world=world)
        reported: list[int] = []
        slabs = [slab.predicted.clone() for slab in painter.slabs(advance=reported.append)]
        results.append((torch.cat(slabs, dim=1).numpy(), painter.tiles(), reported))
    return results


def read_and_fail(world: World, bad_rank: int) -> str:
    """One rank cannot read a later layer."""
    field, read = random_field((32, 8, 8)), 0

    def planes(start: int, stop: int) -> np.ndarray:
        nonlocal read
        read += 1
        if world.rank == bad_rank and read == 4:
            raise UserError("Nbody[0, 1, 2, 3] is nan; mend the file")
        return field[:, start:stop]

    painter = replace(build_painter(field, 8, 8, predict=affine, world=world), read=planes)
    with pytest.raises(UserError) as error:
        collect(painter)
    return str(error.value)


def all_of_ranks(world: World) -> tuple[list[tuple[np.ndarray, int, list[int]]], str]:
    return paint_cases(world), read_and_fail(world, world.size - 1)


def test_three_ranks_predict_what_one_does_and_fail_together() -> None:
    """tests/test_predict.py has two ranks, with the command."""
    alone, answers = paint_cases(ALONE), run_ranks(all_of_ranks, 3)
    for results, line in answers:
        assert line == "rank 2: Nbody[0, 1, 2, 3] is nan; mend the file"
        for (found, tiles, reported), (expected, _, _) in zip(results, alone, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)
            assert sum(reported) == tiles
    for case, (_, tiles, _) in enumerate(alone):
        shared = [results[case][1] for results, _ in answers]
        assert sum(shared) == tiles, "each tile is predicted once"
        assert max(shared) == tiles // TILES_PER_LAYER[case] * -(-TILES_PER_LAYER[case] // 3)


# --- work and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "tile", "step", "periodic"), [case for case in SHAPES if case[0][0] >= 16])
def test_a_read_is_at_most_a_tile_thick_and_a_plane_is_read_at_most_twice(
    shape: tuple[int, int, int], tile: int, step: int, periodic: bool
) -> None:
    asked: Counter[int] = Counter()
    field = random_field(shape)

    def planes(start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= min(shape[0], start + tile)
        asked.update(range(start, stop))
        return field[:, start:stop]

    painter = replace(build_painter(field, tile, step, periodic), read=planes)
    first = min(2, len(painter.starts) - 2)
    reported: list[int] = []
    for _ in painter.slabs(first, reported.append):
        pass
    assert max(asked.values()) <= (2 if periodic else 1)
    assert set(range(painter.starts[first], shape[0])) <= set(asked)
    assert sum(reported) == painter.tiles(first)
    assert max(reported) <= painter.batch_size
    wrapping = -(-tile // step) - 1 if periodic else 0
    layers = len(painter.tiling.x.origins) + wrapping
    assert painter.tiles() <= painter.tiling.layer_count * layers, "only tiles around the end are predicted twice"


def test_memory_does_not_grow_with_the_length_of_the_volume() -> None:
    """A slab is a view of buffers that are one tile thick."""
    for length in (16, 64):
        for slab in build_painter(np.zeros((4, length, 16, 16), np.float32), 8, 4).slabs():
            sizes = [field.untyped_storage().nbytes() for field in (slab.inputs, slab.predicted)]
            assert sizes == [4 * channels * 8 * 16 * 16 for channels in (4, 5)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_predicts_what_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    field, network = random_field((24, 16, 16)), small_unet()
    expected = paint(build_painter(field, 8, 4, predict=network))
    gpu = World(Launch("test"), torch.device("cuda"))
    slabs = build_painter(field, 8, 4, predict=network.to(gpu.device), world=gpu).slabs()
    found = torch.cat([slab.predicted.cpu() for slab in slabs], dim=1)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 * np.abs(expected).max())
