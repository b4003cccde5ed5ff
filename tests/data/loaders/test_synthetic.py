"""The synthetic loader yields one random batch as often as a real loader yields batches."""

from __future__ import annotations

from typing import Any

import torch
from reference_samples import cubes, loader_of

from utils.data.loaders.synthetic import SyntheticLoader
from utils.data.plan import SamplePlan


def loader(samples: int = 10, split: str = "train", seed: int = 0, **changed: Any) -> SyntheticLoader:
    plan = SamplePlan(samples, boxes=cubes(8), crop=4, seed=seed, split=split)
    return loader_of(lambda _, *rest: SyntheticLoader(*rest), None, plan, local_batch_size=3, **changed)


def test_each_seed_and_rank_has_one_batch_of_values_between_minus_one_and_one() -> None:
    batches = list(loader(seed=1).epoch(0))
    assert {batch.inputs.data_ptr() for batch in batches} == {batches[0].inputs.data_ptr()}
    for part, again, channels in zip(batches[0], next(loader(seed=1).epoch(5)), (4, 5), strict=True):
        assert part.shape == (3, channels, 4, 4, 4)
        assert part.dtype == torch.float32
        assert -1 <= part.min() < -0.9
        assert 0.9 < part.max() < 1
        assert torch.equal(part, again)
    for others in (loader(seed=2), loader(seed=1, rank=1, ranks=2)):
        assert not torch.equal(batches[0].inputs, next(others.epoch(0)).inputs)


def test_number_and_size_of_batches_follow_the_plan() -> None:
    """Training drops an incomplete batch."""
    training, validation = loader(), loader(split="valid")
    assert len(training) == len(list(training.epoch(0))) == 3
    assert len(validation) == 4
    assert [len(batch.inputs) for batch in validation.epoch(0)] == [3, 3, 3, 1]
    assert [len(batch.inputs) for batch in validation.epoch(0, first_batch=2)] == [3, 1]
