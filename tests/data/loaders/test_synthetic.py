"""The synthetic loader: one random batch, given as often as the real loader gives batches."""

from __future__ import annotations

from typing import Any

import torch

from utils.data.loaders.synthetic import SyntheticLoader


def loader(samples: int = 10, drop_last: bool = True, **changed: Any) -> SyntheticLoader:
    options = {"crop": 4, "batch_size": 3, "channels": (4, 5)} | changed
    return SyntheticLoader(samples=samples, drop_last=drop_last, **options)


def test_a_seed_and_rank_have_one_batch_of_values_between_minus_one_and_one() -> None:
    batches = list(loader(seed=1).epoch(0))
    assert {batch.inputs.data_ptr() for batch in batches} == {batches[0].inputs.data_ptr()}
    for part, again, channels in zip(batches[0], next(loader(seed=1).epoch(5)), (4, 5), strict=True):
        assert part.shape == (3, channels, 4, 4, 4)
        assert part.dtype == torch.float32
        assert -1 <= part.min() < -0.9
        assert 0.9 < part.max() < 1
        assert torch.equal(part, again)
    for others in (loader(seed=2), loader(seed=1, rank=1, world_size=2)):
        assert not torch.equal(batches[0].inputs, next(others.epoch(0)).inputs)


def test_the_number_and_size_of_batches_are_those_of_the_plan() -> None:
    """Training drops an incomplete batch; validation's last one is divided among the ranks."""
    training, validation = loader(), loader(drop_last=False)
    assert len(training) == len(list(training.epoch(0))) == 3
    assert len(validation) == 4
    assert [len(batch.inputs) for batch in validation.epoch(0)] == [3, 3, 3, 1]
    assert [len(batch.inputs) for batch in validation.epoch(0, first_batch=2)] == [3, 1]
    for rank, sizes in enumerate(([3, 2], [3, 2], [3, 1])):
        part = loader(samples=14, drop_last=False, rank=rank, world_size=3)
        assert [len(batch.inputs) for batch in part.epoch(0)] == sizes


def test_channels_last_changes_the_memory_format_and_no_value() -> None:
    """Also in the smaller last batch, and where a single channel would fit both formats."""
    plain, last = (loader(drop_last=False, channels=(1, 5), channels_last=each) for each in (False, True))
    for batch, batch_last in zip(plain.epoch(0), last.epoch(0), strict=True):
        assert batch_last.inputs.stride() == (64, 1, 16, 4, 1)
        assert all(torch.equal(part, other) for part, other in zip(batch, batch_last, strict=True))
    last.close()
