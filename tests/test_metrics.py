"""Losses are read once per interval, averaged over ranks, and a NaN is named on every rank."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks

from utils.distributed import Launch, World
from utils.metrics import LossRecorder, NonFiniteLoss, WeightedMean

ALONE = World(Launch("test"), torch.device("cpu"))


def test_recorder_gives_each_step_and_starts_anew() -> None:
    recorder = LossRecorder(3, ALONE)
    for value in (1.0, 2.0):
        recorder.record(torch.tensor(value), torch.tensor(10 * value))
    assert not recorder.full
    assert recorder.read() == ([1.0, 2.0], [10.0, 20.0])
    for value in (3.0, 4.0, 5.0):
        recorder.record(torch.tensor(value), torch.tensor(value))
    assert recorder.full
    assert recorder.read()[0] == [3.0, 4.0, 5.0]


def record_on_rank(world: World) -> tuple:
    recorder = LossRecorder(4, world)
    for value in (1.0, 2.0):
        recorder.record(torch.tensor(value + world.rank), torch.tensor(value * (1 + world.rank)))
    good = recorder.read()
    # Rank 1 fails first; by the next step its gradients have spoiled both.
    for step in range(4):
        bad = step == 2 if world.rank == 1 else step == 3
        recorder.record(torch.tensor(float("nan") if bad else 0.5), torch.tensor(1.0))
    try:
        recorder.read()
    except NonFiniteLoss as error:
        return good, (error.steps_ago, error.rank, str(error.explained(12, 1e-3)))
    return good, None


def test_two_ranks_average_and_agree_on_the_first_bad_step() -> None:
    for good, bad in run_ranks(record_on_rank, 2):
        assert good == ([1.5, 2.5], [2.0, 4.0])
        assert bad is not None
        steps_ago, rank, line = bad
        assert (steps_ago, rank) == (-2, 1)
        assert line.startswith("loss is nan at step 12 on rank 1, learning rate 1.000e-03: training stops")


def mean_on_rank(world: World) -> float:
    mean = WeightedMean(world)
    if world.rank == 0:
        mean.add(torch.tensor(1.0), 3)
    return mean.result()


def test_mean_is_weighted_by_samples_and_bears_a_rank_without_any() -> None:
    mean = WeightedMean(ALONE)
    mean.add(torch.tensor(1.0), 8)
    mean.add(torch.tensor(4.0), 4)
    assert mean.result() == pytest.approx(2.0)
    assert run_ranks(mean_on_rank, 2) == [1.0, 1.0]
