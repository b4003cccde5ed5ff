"""The shuffled plan and the classification loader: exact, resumable, independent of the number of ranks."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from reference_samples import digest, rank_batches

from utils.config import Config
from utils.data.datasets import ClassificationData
from utils.data.loaders.classification import ClassificationLoader, shuffle_plan
from utils.data.loaders.prefetcher import Batch
from utils.data.plan import ShufflePlan
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError

# These never change: a run that resumes under another numpy must continue with the same samples.
GOLDEN_WHOLE = {0: [0, 1, 2, 5, 6, 4, 3, 7], 3: [3, 4, 1, 0, 6, 2, 7, 5]}
GOLDEN_PART = {0: [6275, 20483, 23531, 40253], 3: [35068, 14499, 20476, 25680]}

AVAILABLE = 23
KINDS = ("images", "words")


def random_data(kind: str, count: int = AVAILABLE) -> ClassificationData:
    generator = np.random.default_rng(1)
    labels = generator.integers(0, 10, count)
    if kind == "images":
        return ClassificationData(generator.integers(0, 256, (count, 3, 5, 4), np.uint8), labels)
    return ClassificationData(generator.integers(0, 30982, (count, 300)), labels)


def expected(data: ClassificationData, batches: list[list[int]]) -> list[list[str]]:
    """The digests of batches of these rows by definition."""
    found = []
    for rows in batches:
        inputs = data.inputs[rows]
        values = inputs.astype(np.float32) * np.float32(1 / 255) if inputs.dtype == np.uint8 else inputs
        found.append(digest(Batch(torch.from_numpy(values), torch.from_numpy(data.labels[rows]))))
    return found


def loader_of(
    data: ClassificationData, plan: ShufflePlan, rank: int = 0, ranks: int = 1, device: str = "cpu", **changed: Any
) -> ClassificationLoader:
    world = World(Launch("test", rank, rank, ranks), torch.device(device))
    return ClassificationLoader(data, plan, world=world, scale=1 / 255, **({"batch_size": 4} | changed))


# --- the plan ------------------------------------------------------------------------------------------------------


def test_the_rows_of_an_epoch_are_distinct_and_a_function_of_seed_and_epoch_alone() -> None:
    """More than half of the split is drawn with another algorithm, which must have the same property."""
    for samples in (1, 11, 12, 23):
        plan = ShufflePlan(samples, AVAILABLE, seed=5)
        first = plan.epoch(3)
        assert first.dtype == np.int64
        for epoch in range(20):
            rows = set(plan.epoch(epoch).tolist())
            assert len(rows) == samples
            assert rows <= set(range(AVAILABLE))
        np.testing.assert_array_equal(plan.epoch(3), first)
        for seed, epoch in ((6, 3), (5, 4), (3, 5)):
            other = ShufflePlan(samples, AVAILABLE, seed).epoch(epoch)
            assert samples < 11 or not np.array_equal(other, first), (samples, seed, epoch)


@pytest.mark.parametrize("epoch", GOLDEN_WHOLE)
def test_golden_rows(epoch: int) -> None:
    assert ShufflePlan(8, 8, seed=3).epoch(epoch).tolist() == GOLDEN_WHOLE[epoch]
    assert ShufflePlan(4, 60000, seed=3).epoch(epoch).tolist() == GOLDEN_PART[epoch]
    assert ShufflePlan(9, 23, 7, split="valid").epoch(epoch).tolist() == list(range(9)), "the first rows, in order"


@pytest.mark.parametrize(("split", "key"), [("train", "Nsamples"), ("valid", "Nsamples_val")])
def test_more_samples_than_available_is_an_error(split: str, key: str) -> None:
    config = Config(Nsamples=24, Nsamples_val=24)
    with pytest.raises(UserError, match=f"^{key} 24 is more than the 23 {split} samples of "):
        shuffle_plan(config, split, 23)
    assert shuffle_plan(config, split, 24) == ShufflePlan(24, 24, split=split)


# --- the loader ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_get_the_plans_rows_bit_for_bit(kind: str, split: str, world: int) -> None:
    """For any number of samples, from any batch on; some ranks have no part of the last batch, or of any.

    An epoch that ends early does not affect the next one.
    """
    data = random_data(kind)
    for samples, rank in itertools.product((2, 7, 8, 17, 23), range(world)):
        plan = ShufflePlan(samples, AVAILABLE, seed=3, split=split)
        loader = loader_of(data, plan, batch_size=8 // world, rank=rank, ranks=world)
        for epoch in (0, 5):
            rows = rank_batches(plan.epoch(epoch).tolist(), 8, rank, world, split == "train")
            assert len(loader) == len(rows)
            left = loader.epoch(9)
            next(left, None)
            left.close()
            for first in range(len(rows) + 1):
                assert [digest(batch) for batch in loader.epoch(epoch, first)] == expected(data, rows[first:])


def test_split_and_batches_keep_their_memory_without_warnings() -> None:
    """Also in inference mode, in which validation runs between two epochs of training."""
    data, plan = random_data("images"), ShufflePlan(20, AVAILABLE, seed=3)
    wanted = expected(data, rank_batches(plan.epoch(0).tolist(), 4, 0, 1, True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = loader_of(data, plan)
        for inference in (False, True, False):
            with torch.inference_mode(inference):
                assert [digest(batch) for batch in loader.epoch(0)] == wanted
    assert len({batch.inputs.data_ptr() for batch in loader.epoch(0)}) == 1, "a CUDA graph is recorded for each address"
    assert loader._inputs.dtype == torch.uint8
    assert loader._inputs.data_ptr() == data.inputs.__array_interface__["data"][0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_host_never_waits_and_batches_are_bit_equal(kind: str) -> None:
    """Each batch is read after kernels that still run when the next ones are filled."""
    data, plan = random_data(kind), ShufflePlan(20, AVAILABLE, seed=3)
    loader = loader_of(data, plan, device="cuda")
    busy = torch.randn(2048, 2048, device="cuda")
    batches = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for epoch in (0, 1):
            for inputs, targets in loader.epoch(epoch):
                for _ in range(20):
                    busy = busy @ busy / 2048
                batches.append(Batch(inputs.clone(), targets.clone()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    host = loader_of(data, plan)
    found = [digest(Batch(inputs.cpu(), targets.cpu())) for inputs, targets in batches]
    assert found == [digest(batch) for epoch in (0, 1) for batch in host.epoch(epoch)]
