"""Losses are read once per interval and averaged over ranks; every rank knows which one was not finite."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from processes import run_ranks
from torch.nn.parallel import DistributedDataParallel

from utils.distributed.world import World
from utils.training.metrics import LossRecorder, StepRecord, StepTimer, WeightedMean

NAN, INF = float("nan"), float("inf")


def on_rank(world: World) -> tuple[Any, ...]:
    recorder = LossRecorder(5, world)
    assert recorder.read() == []
    for value in (1.0, 2.0):
        recorder.record(torch.tensor(value + world.rank), torch.tensor(value * (1 + world.rank)))
    assert len(recorder) == 2
    good = recorder.read()
    assert len(recorder) == 0, "each step is returned once"
    losses = [(0.5, NAN), (NAN, NAN), (INF, -INF), (0.5, 0.5), (0.5, 0.5)]
    norms = [(1.0, NAN), (1.0, 1.0), (1.0, 1.0), (INF, 1.0), (1.0, NAN)]
    for loss, norm in zip(losses, norms, strict=True):
        recorder.record(torch.tensor(loss[world.rank]), torch.tensor(norm[world.rank]))
    bad = [(r.non_finite_rank, r.updated, math.isfinite(r.loss), str(r.gradient_norm)) for r in recorder.read()]
    mean = WeightedMean(world)
    if world.rank == 0:
        mean.add(torch.tensor(1.0), 8)
        mean.add(torch.tensor(4.0), 4)
    return good, bad, mean.results()


def test_losses_and_means_are_averaged_over_ranks() -> None:
    """Mean loss, largest norm, and the first rank that is not finite; a weighted mean also if a rank has no samples."""
    for good, bad, mean in run_ranks(on_rank, 2):
        assert good == [StepRecord(1.5, 2.0), StepRecord(2.5, 4.0)]
        assert bad == [
            (1, False, False, "nan"),
            (0, False, False, "1.0"),
            (0, False, False, "1.0"),
            (None, False, True, "inf"),
            (None, False, True, "nan"),
        ]
        assert mean == [2.0]


def times_of_rank(world: World) -> tuple[float, int | None, str]:
    """Three steps on three ranks that wait for each other in the backward pass; rank 1 sleeps in the forward pass."""
    network = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    timer = StepTimer(next(network.parameters()), world.device)
    recorder = LossRecorder(3, world, timer)
    for _ in range(3):
        timer.start(0.05 * (world.rank == 1))
        time.sleep(0.3 if world.rank == 1 else 0.1)
        loss = network(torch.ones(1, 4)).sum()
        loss.backward()
        recorder.record(loss.detach(), torch.ones(()))
    assert len(recorder.read()) == 3
    slowest = recorder.slowest
    assert slowest is not None
    recorder.record(torch.ones(()), torch.ones(()))
    recorder.read()
    return slowest.ratio, slowest.rank, f"{slowest} {recorder.slowest}"


def test_the_slowest_rank_is_the_one_that_the_others_wait_for() -> None:
    """Its own time, without the wait in the exchange of the gradients, and read together with the losses."""
    answers = run_ranks(times_of_rank, 3)
    assert len(set(answers)) == 1, "equal on every rank"
    ratio, rank, text = answers[0]
    assert rank == 1
    assert ratio > 1.1, text
    assert text.startswith("slowest rank: 1, ")
    assert "(0.05 s of it waiting for data)" in text
    assert text.endswith("None"), "no times without steps"
