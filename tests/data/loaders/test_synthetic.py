"""The synthetic loader yields one random batch as often as a real loader yields batches."""

from __future__ import annotations

from typing import Any

import torch
from reference_samples import cubes, loader_of

from utils.data.loaders.synthetic import SyntheticLoader
from utils.data.plan import SamplePlan


def loader(split: str = "train", seed: int = 0, **changed: Any) -> SyntheticLoader:
    plan = SamplePlan(10, boxes=cubes(8), crop=4, seed=seed, split=split)
    return loader_of(lambda _, *rest: SyntheticLoader(*rest), None, plan, local_batch_size=3, **changed)


def test_each_seed_and_rank_has_one_batch_whose_number_follows_the_plan() -> None:
    batches, validation = list(loader().epoch(0)), loader(split="valid")
    assert len({batch.inputs.data_ptr() for batch in batches}) == 1
    for part, again, channels in zip(batches[0], next(loader().epoch(5)), (4, 5), strict=True):
        assert (part.shape, part.dtype) == ((3, channels, 4, 4, 4), torch.float32)
        assert -1 <= part.min() < -0.9 < 0.9 < part.max() < 1
        assert torch.equal(part, again)
    for other in (loader(seed=2), loader(rank=1, ranks=2)):
        assert not torch.equal(batches[0].inputs, next(other.epoch(0)).inputs)
    assert (len(loader()), len(batches), len(validation)) == (3, 3, 4), "training drops an incomplete batch"
    assert [len(batch.inputs) for batch in validation.epoch(0, first_batch=2)] == [3, 1]
