"""The shuffled plan and the classification loader: exact, resumable, independent of the number of ranks."""

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from devices import ON_GPU
from reference_samples import digest, rank_batches
from small_steps import refusing_to_wait

from utils.data.datasets import ClassificationData
from utils.data.loaders.classification import ClassificationLoader
from utils.data.loaders.prefetcher import Batch
from utils.data.plan import ShufflePlan
from utils.distributed.launch import Launch
from utils.distributed.world import World

# These never change: a run that resumes under another numpy must continue with the same samples.
GOLDEN_WHOLE = {0: [0, 1, 2, 5, 6, 4, 3, 7], 3: [3, 4, 1, 0, 6, 2, 7, 5]}
GOLDEN_PART = {0: [6275, 20483, 23531, 40253], 3: [35068, 14499, 20476, 25680]}
AVAILABLE = 23
RANDOM = np.random.default_rng(1)
LABELS = RANDOM.integers(0, 10, AVAILABLE)
DATA = {
    "images": ClassificationData(RANDOM.integers(0, 256, (AVAILABLE, 3, 5, 4), np.uint8), LABELS),
    "words": ClassificationData(RANDOM.integers(0, 30982, (AVAILABLE, 300)), LABELS),
}
KINDS = pytest.mark.parametrize("kind", DATA)


def expected(data: ClassificationData, batches: list[list[int]]) -> list[list[str]]:
    """The digests of batches of these rows by definition."""
    digests = []
    for rows in batches:
        inputs = data.inputs[rows]
        values = inputs.astype(np.float32) * np.float32(1 / 255) if inputs.dtype == np.uint8 else inputs
        digests.append(digest(Batch(torch.from_numpy(values), torch.from_numpy(data.labels[rows]))))
    return digests


def loader_of(kind: str, plan: Any, rank: int = 0, ranks: int = 1, device: str = "cpu", batch_size: int = 4) -> Any:
    world = World(Launch("test", rank, rank, ranks), torch.device(device))
    return ClassificationLoader(DATA[kind], plan, world=world, scale=1 / 255, batch_size=batch_size)


def test_the_rows_of_an_epoch_are_distinct_and_a_function_of_seed_and_epoch_alone() -> None:
    """More than half of the split is drawn with another algorithm, which must have the same property."""
    for samples in (1, 11, 12, 23):
        plan = ShufflePlan(samples, AVAILABLE, seed=5)
        for epoch in range(20):
            rows = set(plan.epoch(epoch).tolist())
            assert len(rows) == samples
            assert rows <= set(range(AVAILABLE))
        for seed, epoch in ((6, 3), (5, 4), (3, 5)):
            rows_of_other = ShufflePlan(samples, AVAILABLE, seed).epoch(epoch)
            assert samples < 11 or not np.array_equal(rows_of_other, plan.epoch(3)), (samples, seed, epoch)
    for epoch in GOLDEN_WHOLE:
        assert ShufflePlan(8, 8, seed=3).epoch(epoch).tolist() == GOLDEN_WHOLE[epoch]
        assert ShufflePlan(4, 60000, seed=3).epoch(epoch).tolist() == GOLDEN_PART[epoch]
        assert ShufflePlan(9, 23, 7, split="valid").epoch(epoch).tolist() == list(range(9)), "the first, in order"


@KINDS
@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_together_get_the_plans_rows_bit_for_bit(kind: str, split: str, ranks: int) -> None:
    """From any batch on, after an epoch that ended early; some ranks have no part of the last batch, or of any."""
    for samples, rank in itertools.product((2, 7, 8, 17, 23), range(ranks)):
        plan = ShufflePlan(samples, AVAILABLE, seed=3, split=split)
        loader = loader_of(kind, plan, rank, ranks, batch_size=8 // ranks)
        for epoch in (0, 5):
            rows = rank_batches(plan.epoch(epoch).tolist(), 8, rank, ranks, split == "train")
            assert len(loader) == len(rows)
            left = loader.epoch(9)
            next(left, None)
            left.close()
            for first in range(len(rows) + 1):
                assert [digest(batch) for batch in loader.epoch(epoch, first)] == expected(DATA[kind], rows[first:])


def test_batches_keep_their_memory_without_warnings() -> None:
    """Also in inference mode, in which validation runs between two epochs of training."""
    plan = ShufflePlan(20, AVAILABLE, seed=3)
    wanted = expected(DATA["images"], rank_batches(plan.epoch(0).tolist(), 4, 0, 1, True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = loader_of("images", plan)
        for inference in (False, True, False):
            with torch.inference_mode(inference):
                assert [digest(batch) for batch in loader.epoch(0)] == wanted
    assert len({batch.inputs.data_ptr() for batch in loader.epoch(0)}) == 1, "a CUDA graph is recorded for each address"


@KINDS
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_on_a_gpu_the_host_never_waits_and_batches_are_bit_equal(kind: str, device: str) -> None:
    """Each batch is read after kernels that still run when the next ones are filled."""
    plan = ShufflePlan(20, AVAILABLE, seed=3)
    loader, busy, batches = loader_of(kind, plan, device=device), torch.randn(2048, 2048, device=device), []
    torch.cuda.synchronize()
    with refusing_to_wait(device):
        for inputs, targets in itertools.chain(loader.epoch(0), loader.epoch(1)):
            for _ in range(20):
                busy = busy @ busy / 2048
            batches.append((inputs.clone(), targets.clone()))
    digests = [digest(Batch(inputs.cpu(), targets.cpu())) for inputs, targets in batches]
    assert digests == [digest(batch) for epoch in (0, 1) for batch in loader_of(kind, plan).epoch(epoch)]
