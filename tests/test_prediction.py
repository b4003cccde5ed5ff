"""A network on a whole volume: no seams, the same for any batch, start and number of ranks, in a tile's memory."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from torch import nn
from volume_files import smooth_field

from networks.unet import UNet
from utils.distributed import Launch, World
from utils.errors import UserError
from utils.hub import PHASES
from utils.prediction import Painter, Predict, Slab, layers
from utils.tiling import cut, tile_volume
from utils.watch import Watch

ALONE = World(Launch("test"), torch.device("cpu"))
SHAPES = [  # X, Y, Z, tile, step, periodic
    ((24, 16, 8), 8, 4, True),
    ((24, 16, 8), 8, 4, False),
    ((20, 13, 9), 8, 3, True),  # steps that do not divide
    ((20, 13, 9), 8, 3, False),
    ((9, 20, 11), 8, 5, True),
    ((8, 8, 8), 8, 4, True),  # one tile fills it
    ((8, 8, 8), 8, 8, True),
    ((8, 8, 8), 8, 4, False),
    ((16, 8, 24), 8, 8, True),  # no overlap
    ((16, 9, 8), 8, 2, True),
    ((17, 8, 8), 8, 2, False),
]


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
) -> Painter:
    tiling = tile_volume(field.shape[1:], tile, step, periodic)  # type: ignore[arg-type]
    channels = (len(field), out_channels)
    return Painter(predict, lambda start, stop: field[:, start:stop], tiling, channels, batch_size, world)


def collect(painter: Painter, first: int = 0) -> list[Slab]:
    """Copies of all slabs: they are valid until the next one."""
    slabs = painter.slabs(first)
    return [slab._replace(inputs=slab.inputs.clone(), predicted=slab.predicted.clone()) for slab in slabs]


def paint(painter: Painter) -> np.ndarray:
    return torch.cat([slab.predicted for slab in collect(painter)], dim=1).numpy()


def small_unet(in_channels: int = 4, out_channels: int = 5, width: int = 4, scales: int = 2) -> nn.Module:
    """Random weights; tiles of it differ strongly where they overlap."""
    torch.manual_seed(0)
    network = UNet(in_channels, out_channels, width, scales)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network.eval().requires_grad_(False)


# --- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "tile", "step", "periodic"), SHAPES)
def test_what_depends_on_a_cell_alone_is_as_if_there_were_no_tiles(
    shape: tuple[int, int, int], tile: int, step: int, periodic: bool
) -> None:
    field = random_field(shape)
    slabs = collect(build_painter(field, tile, step, periodic))
    np.testing.assert_array_equal(torch.cat([slab.inputs for slab in slabs], dim=1), field)
    expected = affine(torch.from_numpy(field)[None])[0]
    np.testing.assert_allclose(torch.cat([slab.predicted for slab in slabs], dim=1), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("shape", "tile", "step", "periodic"), SHAPES)
def test_from_any_slab_on_they_are_the_same_bit_for_bit(
    shape: tuple[int, int, int], tile: int, step: int, periodic: bool
) -> None:
    painter = build_painter(random_field(shape), tile, step, periodic, small_unet())
    whole = collect(painter)
    starts = [slab.start for slab in whole]
    assert [slab.number for slab in whole] == list(range(len(painter.starts) - 1))
    assert [*starts, shape[0]] == list(painter.starts)
    assert [slab.inputs.shape[1] for slab in whole] == list(np.diff(painter.starts))
    for first in range(1, len(whole)):
        for slab, expected in zip(collect(painter, first), whole[first:], strict=True):
            assert (slab.number, slab.start) == (expected.number, expected.start)
            assert torch.equal(slab.inputs, expected.inputs)
            assert torch.equal(slab.predicted, expected.predicted)


@pytest.mark.parametrize("periodic", [True, False])
def test_each_cell_is_the_weighed_mean_of_the_tiles_around_it(periodic: bool) -> None:
    """Tile by tile over the whole volume at once, in float64."""
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
    np.testing.assert_allclose(paint(painter), expected, atol=1e-6)


@pytest.mark.parametrize("shift", [(4, 0, 0), (0, 4, 8), (12, -4, 4)])
def test_a_periodic_volume_has_no_first_cell(shift: tuple[int, int, int]) -> None:
    network, field = small_unet(), random_field((16, 24, 8))
    expected = np.roll(paint(build_painter(field, 8, 4, predict=network)), shift, axis=(1, 2, 3))
    moved = np.roll(field, shift, axis=(1, 2, 3))
    np.testing.assert_allclose(paint(build_painter(moved, 8, 4, predict=network)), expected, atol=1e-6)
    held = paint(build_painter(moved, 8, 4, periodic=False, predict=network))
    assert np.abs(held - expected).max() > 1e-2, "one with faces has"


@pytest.mark.parametrize("batch_size", [1, 8, 100])
def test_how_many_tiles_are_made_at_once_changes_nothing(batch_size: int) -> None:
    network, field = small_unet(), random_field((16, 24, 8))
    expected = paint(build_painter(field, 8, 4, predict=network, batch_size=3))
    found = paint(build_painter(field, 8, 4, predict=network, batch_size=batch_size))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_lower_precision_of_a_network_is_added_up_in_float32() -> None:
    field = random_field((16, 8, 8))
    found = paint(build_painter(field, 8, 4, predict=lambda tiles: affine(tiles).bfloat16()))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, affine(torch.from_numpy(field)[None])[0], atol=2e-2)


# --- ranks -----------------------------------------------------------------------------------------------------------


CASES = [((16, 24, 8), 8, 4, True), ((20, 9, 8), 8, 8, False), ((8, 8, 8), 8, 8, True)]
IN_A_LAYER = [12, 2, 1]  # tiles


def paint_cases(world: World) -> list[tuple[np.ndarray, int, list[int]]]:
    """Of each case: what came out, and the tiles that this rank was to make and those that it made."""
    torch.manual_seed(world.rank)
    results = []
    for shape, tile, step, periodic in CASES:
        painter = build_painter(random_field(shape), tile, step, periodic, small_unet(), world=world)
        told: list[int] = []
        slabs = [slab.predicted.clone() for slab in painter.slabs(advance=told.append)]
        results.append((torch.cat(slabs, dim=1).numpy(), painter.tiles(), told))
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


def test_three_ranks_make_the_same_as_one_and_fail_together() -> None:
    """Two ranks make it by way of the command: tests/test_predict.py."""
    alone, answers = paint_cases(ALONE), run_ranks(all_of_ranks, 3)
    for results, line in answers:
        assert line == "rank 2: Nbody[0, 1, 2, 3] is nan; mend the file"
        for (found, tiles, told), (expected, _, _) in zip(results, alone, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)
            assert sum(told) == tiles
    for case, (_, tiles, _) in enumerate(alone):
        shared = [results[case][1] for results, _ in answers]
        assert sum(shared) == tiles, "each tile is made once"
        assert max(shared) == tiles // IN_A_LAYER[case] * -(-IN_A_LAYER[case] // 3)


class SecondOfTwo(World):
    """A rank that hears nothing of the other."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize(("tile", "has_tiles"), [(8, False), (4, True)])
def test_the_watch_hears_of_each_layer_in_the_trainings_step(tile: int, has_tiles: bool) -> None:
    """Else a hang of another rank would look like a slow start of this one, or fall on the wrong rank."""
    watch = Watch(0)
    watch.at("validation", 800)  # of a training that paints after it
    world = SecondOfTwo(Launch("test", rank=1, world_size=2), torch.device("cpu"), watch)
    painter = build_painter(random_field((16, 8, 8)), tile, step=tile, world=world)
    painter = replace(painter, tiling=replace(painter.tiling, x=cut(16, tile, tile // 2)))
    assert (painter.tiles() > 0) == has_tiles
    collect(painter)
    step, phase, reports = watch._place
    assert (step, PHASES[phase]) == (800, "prediction")
    assert reports > len(layers(painter.tiling))


# --- how much it takes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "tile", "step", "periodic"), [case for case in SHAPES if case[0][0] >= 16])
@pytest.mark.parametrize("first", [0, 2])
def test_it_asks_for_a_tiles_thickness_at_most_and_for_each_plane_at_most_twice(
    shape: tuple[int, int, int], tile: int, step: int, periodic: bool, first: int
) -> None:
    asked: Counter[int] = Counter()
    field = random_field(shape)

    def planes(start: int, stop: int) -> np.ndarray:
        assert 0 <= start < stop <= min(shape[0], start + tile)
        asked.update(range(start, stop))
        return field[:, start:stop]

    painter = replace(build_painter(field, tile, step, periodic), read=planes)
    first = min(first, len(painter.starts) - 2)
    told: list[int] = []
    for _ in painter.slabs(first, told.append):
        pass
    assert max(asked.values()) <= 2
    assert set(range(painter.starts[first], shape[0])) <= set(asked)
    if not periodic:
        assert set(asked.values()) == {1}
    assert sum(told) == painter.tiles(first)
    assert max(told) <= painter.batch_size


def test_memory_does_not_grow_with_the_length_of_the_volume() -> None:
    """The largest tensor holds a tile's thickness."""
    largest = []
    for length in (16, 64):
        sizes: list[int] = []

        class Recorded(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
                result = function(*arguments, **(options or {}))
                if isinstance(result, torch.Tensor):
                    sizes.append(result.untyped_storage().nbytes())  # noqa: B023
                return result

        painter = build_painter(np.zeros((4, length, 16, 16), np.float32), 8, 4)
        with Recorded():
            for _ in painter.slabs():
                pass
        largest.append(max(sizes))
    assert largest == [4 * 5 * 8 * 16 * 16] * 2


@pytest.mark.parametrize("periodic", [True, False])
def test_no_tile_is_made_twice_but_those_around_the_end(periodic: bool) -> None:
    painter = build_painter(random_field((32, 8, 8)), 8, 4, periodic)
    assert painter.tiles() == painter.tiling.count + (painter.tiling.layer_count if periodic else 0)
    assert layers(painter.tiling)[0] == ((-4, 7) if periodic else (0, 0))
    assert layers(painter.tiling, 3) == [(8, 2), *((4 * number, number) for number in range(3, 8 if periodic else 7))]


# --- seams -----------------------------------------------------------------------------------------------------------

BOX, TILE, SCALES = 48, 16, 2


def local_problem(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A field, and what a network can only tell from a neighbourhood of several cells: [1, n, n, n] each."""
    field = smooth_field(1, BOX, np.random.default_rng(seed))
    field *= 0.5 / field.std()
    k = [np.fft.fftfreq(BOX), np.fft.fftfreq(BOX), np.fft.rfftfreq(BOX)]
    square = k[0][:, None, None] ** 2 + k[1][None, :, None] ** 2 + k[2][None, None, :] ** 2
    spectrum = np.fft.rfftn(field[0]) * np.exp(-2 * (1.5 * np.pi) ** 2 * square)  # a Gaussian of 1.5 cells
    smoothed = np.fft.irfftn(spectrum, s=(BOX, BOX, BOX), axes=(0, 1, 2))
    smoothed /= smoothed.std()
    return field.astype(np.float32), 0.5 * np.tanh(smoothed + 0.3 * smoothed**2)[None].astype(np.float32)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A network that has seen crops of a tile's size, as in a training: it knows what it is to lack the outside."""
    inputs, targets = (np.tile(part, (1, 2, 2, 2)) for part in local_problem(seed=1))
    torch.manual_seed(0)
    network, rng = UNet(1, 1, width=8, scales=SCALES), np.random.default_rng(0)
    optimizer = torch.optim.Adam(network.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        places = [tuple(slice(start, start + TILE) for start in origin) for origin in rng.integers(0, BOX, (4, 3))]
        batch, wanted = (
            torch.from_numpy(np.stack([part[(slice(None), *place)] for place in places])) for part in (inputs, targets)
        )
        loss = (network(batch) - wanted).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval().requires_grad_(False)


def near_faces(period: int) -> np.ndarray:
    """Cells within two of a tile's face, where tiles begin every `period` cells."""
    place = np.arange(BOX) % period
    near = (place < 2) | (place >= period - 2)
    return near[:, None, None] | near[None, :, None] | near[None, None, :]


def test_there_are_no_seams_where_tiles_overlap_by_half_and_there_are_where_they_do_not(trained: nn.Module) -> None:
    field, target = local_problem(seed=2)
    ratios, errors = {}, {}
    for step in (TILE // 2, TILE):
        error = np.abs(paint(build_painter(field, TILE, step, predict=trained, out_channels=1)) - target)[0]
        near = near_faces(step)
        ratios[step], errors[step] = error[near].mean() / error[~near].mean(), error.mean()
    assert errors[TILE // 2] < 0.25 * np.abs(target - np.median(target)).mean(), "it has learnt something"
    assert 0.9 < ratios[TILE // 2] < 1.1
    assert ratios[TILE] > 1.2
    assert errors[TILE] > 1.2 * errors[TILE // 2]


def test_where_the_tiles_lie_matters_less_than_how_good_the_network_is(trained: nn.Module) -> None:
    """Shifts by what the network itself halves the grid to, but not by the step; and tiles of twice the size."""
    field, target = local_problem(seed=2)

    def painted(shift: int = 0, tile: int = TILE) -> np.ndarray:
        moved = np.roll(field, (shift, shift, shift), axis=(1, 2, 3))
        made = paint(build_painter(moved, tile, predict=trained, out_channels=1))
        return np.roll(made, (-shift, -shift, -shift), axis=(1, 2, 3))

    usual = painted()
    error = np.abs(usual - target).mean()
    for other in (painted(shift=2**SCALES), painted(tile=2 * TILE)):
        assert 0 < np.abs(other - usual).mean() < 0.5 * error


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_paints_what_the_cpu_paints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    field, network = random_field((24, 16, 16)), small_unet()
    expected = paint(build_painter(field, 8, 4, predict=network))
    there = World(Launch("test"), torch.device("cuda"))
    slabs = build_painter(field, 8, 4, predict=network.to(there.device), world=there).slabs()
    found = torch.cat([slab.predicted.cpu() for slab in slabs], dim=1)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 * np.abs(expected).max())
