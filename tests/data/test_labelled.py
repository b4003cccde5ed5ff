"""The shuffled plan, and the loader that carries it out: exact, the same for any number of ranks, and resumable."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from utils.data.datasets import Labelled
from utils.data.feeder import Batch
from utils.data.labelled import LabelledLoader
from utils.data.plan import ShufflePlan, batch_rows
from utils.errors import UserError

# Fixed for good: a run resumed under another numpy must go on with the same samples.
GOLDEN_WHOLE = {0: [0, 1, 2, 5, 6, 4, 3, 7], 3: [3, 4, 1, 0, 6, 2, 7, 5]}
GOLDEN_PART = {0: [6275, 20483, 23531, 40253], 3: [35068, 14499, 20476, 25680]}

AVAILABLE = 23
KINDS = ("images", "words")


def split_of(kind: str, count: int = AVAILABLE) -> Labelled:
    generator = np.random.default_rng(1)
    labels = generator.integers(0, 10, count)
    if kind == "images":
        return Labelled(generator.integers(0, 256, (count, 3, 5, 4), np.uint8), labels)
    return Labelled(generator.integers(0, 30982, (count, 300)), labels)


def expected_values(data: Labelled, rows: np.ndarray, scale: float) -> np.ndarray:
    inputs = data.inputs[rows]
    return inputs.astype(np.float32) * np.float32(scale) if inputs.dtype == np.uint8 else inputs


def loader_of(data: Labelled, plan: ShufflePlan, **changed: Any) -> LabelledLoader:
    return LabelledLoader(data, plan, **({"batch_size": 4, "scale": 1 / 255} | changed))


def kept(batches: Iterator[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Copies: a batch's memory is used again."""
    return [(inputs.numpy().copy(), targets.numpy().copy()) for inputs, targets in batches]


def assert_same(batches: list[tuple[np.ndarray, np.ndarray]], others: list[tuple[np.ndarray, np.ndarray]]) -> None:
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        for part, values in zip(batch, other, strict=True):
            np.testing.assert_array_equal(part, values)


# --- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 1, 11, 12, 22, 23])
def test_an_epochs_rows_are_distinct_and_of_the_split(samples: int) -> None:
    """Above half of the split the rows are drawn in another way, which must keep the promise too."""
    for epoch in range(20):
        rows = ShufflePlan(samples, AVAILABLE, seed=1).epoch(epoch)
        assert rows.dtype == np.int64
        assert len(set(rows.tolist())) == len(rows) == samples
        assert set(rows.tolist()) <= set(range(AVAILABLE))


def test_the_rows_are_a_function_of_seed_and_epoch_alone() -> None:
    plan = ShufflePlan(30, 100, seed=5)
    first = plan.epoch(3)
    plan.epoch(0)
    np.testing.assert_array_equal(plan.epoch(3), first)
    np.testing.assert_array_equal(ShufflePlan(30, 100, seed=5).epoch(3), first)
    for seed, epoch in ((6, 3), (5, 4), (3, 5)):
        assert not np.array_equal(ShufflePlan(30, 100, seed).epoch(epoch), first)


@pytest.mark.parametrize("epoch", GOLDEN_WHOLE)
def test_golden_rows(epoch: int) -> None:
    assert ShufflePlan(8, 8, seed=3).epoch(epoch).tolist() == GOLDEN_WHOLE[epoch]
    assert ShufflePlan(4, 60000, seed=3).epoch(epoch).tolist() == GOLDEN_PART[epoch]


def test_every_row_comes_at_every_place_equally_often() -> None:
    """Of 5 rows in 2,000 epochs; 400 ± 18 is one standard deviation."""
    counts = np.zeros((5, 5))
    for epoch in range(2000):
        counts[np.arange(5), ShufflePlan(5, 5, seed=2).epoch(epoch)] += 1
    assert abs(counts - 400).max() < 90


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 9), (7, 0)])
def test_validation_is_always_the_first_rows_in_order(seed: int, epoch: int) -> None:
    rows = ShufflePlan(9, AVAILABLE, seed, split="valid").epoch(epoch)
    assert rows.tolist() == list(range(9))
    assert rows.dtype == np.int64


@pytest.mark.parametrize("split", ["train", "valid"])
def test_more_samples_than_there_are_is_an_error(split: str) -> None:
    with pytest.raises(UserError, match=rf"^24 samples of the {split} split are asked for, and it has 23; "):
        ShufflePlan(24, 23, split=split)


# --- the loader ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_batches_are_the_plans_rows_to_the_bit(kind: str, split: str) -> None:
    data, plan = split_of(kind), ShufflePlan(18, AVAILABLE, seed=3, split=split)
    with closing(loader_of(data, plan)) as loader:
        for epoch in (0, 4):
            rows = plan.epoch(epoch)
            batches = list(kept(loader.epoch(epoch)))
            assert [len(labels) for _, labels in batches] == ([4] * 4 if split == "train" else [4] * 4 + [2])
            assert len(loader) == len(batches)
            for number, (inputs, labels) in enumerate(batches):
                part = rows[4 * number : 4 * number + 4]
                values = expected_values(data, part, 1 / 255)
                assert inputs.dtype == values.dtype
                assert labels.dtype == np.int64
                assert inputs.tobytes() == values.tobytes()
                np.testing.assert_array_equal(labels, data.labels[part])


@pytest.mark.parametrize("scale", [1.0, 1 / 16, 1 / 255, 3.7])
def test_every_byte_is_scaled_exactly(scale: float) -> None:
    data = Labelled(np.arange(256, dtype=np.uint8).reshape(256, 1, 1, 1), np.zeros(256, dtype=np.int64))
    plan = ShufflePlan(256, 256, split="valid")
    inputs, _ = next(loader_of(data, plan, batch_size=256, scale=scale).epoch(0))
    expected = np.arange(256, dtype=np.float32) * np.float32(scale)
    assert inputs.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_together_get_the_one_ranks_batches(kind: str, split: str, world: int) -> None:
    """Step for step at the same global batch; the last of validation, too, which some ranks have no part of."""
    data, plan = split_of(kind), ShufflePlan(17, AVAILABLE, seed=3, split=split)
    one = kept(loader_of(data, plan, batch_size=8).epoch(2))
    loaders = [loader_of(data, plan, batch_size=8 // world, rank=rank, world_size=world) for rank in range(world)]
    ranks = [kept(loader.epoch(2)) for loader in loaders]
    assert [len(loader) for loader in loaders] == [len(batches) for batches in ranks]
    assert [len(batches) for batches in ranks] == [2 + (split == "valid" and rank == 0) for rank in range(world)]
    for whole, parts in zip(one, itertools.zip_longest(*ranks), strict=True):
        for rank, part in enumerate(parts):
            for place, values in enumerate(whole):
                mine = values[rank::world]
                assert part is not None or len(mine) == 0
                if part is not None:
                    np.testing.assert_array_equal(part[place], mine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_resumed_epoch_goes_on_with_the_same_batches(kind: str, split: str) -> None:
    data, plan = split_of(kind), ShufflePlan(19, AVAILABLE, seed=3, split=split)
    options = {"batch_size": 2, "rank": 1, "world_size": 2}
    whole = kept(loader_of(data, plan, **options).epoch(5))
    loader = loader_of(data, plan, **options)
    for first in range(len(whole) + 1):
        assert_same(kept(loader.epoch(5, first_batch=first)), whole[first:])


def test_an_epoch_left_early_leaves_no_trace() -> None:
    data, plan = split_of("images"), ShufflePlan(20, AVAILABLE, seed=3)
    loader = loader_of(data, plan)
    left = loader.epoch(0)
    next(left)
    left.close()
    assert_same(kept(loader.epoch(1)), kept(loader_of(data, plan).epoch(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_come_in_the_same_memory_again_and_again(kind: str) -> None:
    """A CUDA graph is recorded for each place; a short last batch begins at the same one."""
    loader = loader_of(split_of(kind), ShufflePlan(22, AVAILABLE, split="valid"))
    places = {(inputs.data_ptr(), targets.data_ptr()) for epoch in range(3) for inputs, targets in loader.epoch(epoch)}
    assert len(places) == 1
    assert all(inputs.is_contiguous() for inputs, _ in loader.epoch(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_a_batch_gets_none(kind: str) -> None:
    plan = ShufflePlan(2, AVAILABLE, split="valid")
    loaders = [loader_of(split_of(kind), plan, rank=rank, world_size=4) for rank in range(4)]
    assert [[len(targets) for _, targets in loader.epoch(0)] for loader in loaders] == [[1], [1], [], []]
    short = loader_of(split_of(kind), ShufflePlan(3, AVAILABLE))
    assert len(short) == len(list(short.epoch(0))) == 0


def test_the_split_is_kept_in_bytes_and_nothing_warns() -> None:
    data = split_of("images")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = loader_of(data, ShufflePlan(22, AVAILABLE, split="valid"))
        batches = kept(loader.epoch(0))
    assert len(batches) == 6
    assert loader._inputs.dtype == torch.uint8
    assert loader._inputs.data_ptr() == data.inputs.__array_interface__["data"][0], "no second copy on the CPU"


def test_batches_within_inference_are_those_outside() -> None:
    """Validation runs so, and training goes on in the same memory."""
    data, plan = split_of("images"), ShufflePlan(20, AVAILABLE, seed=3)
    loader = loader_of(data, plan)
    outside = kept(loader.epoch(0))
    with torch.inference_mode():
        assert_same(kept(loader.epoch(0)), outside)
    assert_same(kept(loader.epoch(0)), outside)


def test_the_rows_are_those_of_the_volumes_loaders() -> None:
    """`batch_rows` alone says which rows a rank takes."""
    data = Labelled(np.zeros((AVAILABLE, 1, 1, 1), dtype=np.uint8), np.arange(AVAILABLE))
    for split, samples, world in itertools.product(("train", "valid"), range(AVAILABLE + 1), (1, 2, 3, 5)):
        plan = ShufflePlan(samples, AVAILABLE, seed=1, split=split)
        for rank in range(world):
            loader = loader_of(data, plan, batch_size=3, rank=rank, world_size=world)
            rows = batch_rows(samples, 3, rank, world, drop_last=split == "train")
            expected = [plan.epoch(7)[selection].tolist() for selection in rows]
            assert [targets.tolist() for _, targets in loader.epoch(7)] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_nothing_waits_and_no_bit_changes(kind: str) -> None:
    """Each batch is read behind kernels that still run when the next ones are filled."""
    data, plan = split_of(kind), ShufflePlan(20, AVAILABLE, seed=3)
    loader = loader_of(data, plan, device=torch.device("cuda"))
    busy = torch.randn(2048, 2048, device="cuda")
    batches = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for epoch in (0, 1):
            for inputs, targets in loader.epoch(epoch):
                for _ in range(20):
                    busy = busy @ busy / 2048
                batches.append((inputs.clone(), targets.clone()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    host = loader_of(data, plan)
    expected = [batch for epoch in (0, 1) for batch in kept(host.epoch(epoch))]
    assert_same([(inputs.cpu().numpy(), targets.cpu().numpy()) for inputs, targets in batches], expected)
