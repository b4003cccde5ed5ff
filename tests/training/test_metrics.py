"""Losses are averaged over ranks, the slowest rank is named, and the noise scale is the true one of a quadratic."""

import math
import re
import time
from typing import Any

import pytest
import torch
from processes import run_ranks
from small_steps import ALONE, make_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.data.loaders import Batch
from utils.distributed.world import World
from utils.training.metrics import LossRecorder, StepRecord, StepTimer, WeightedMean
from utils.training.noise_scale import SMOOTHING, NoiseScale

NAN, INF = float("nan"), float("inf")


def on_rank(world: World) -> tuple[Any, ...]:
    recorder = LossRecorder(5, world, StepTimer(torch.ones(1, requires_grad=True), world.device))
    assert recorder.read() == []
    for value in (1.0, 2.0):
        recorder.record(torch.tensor(value + world.rank), torch.tensor(value * (1 + world.rank)))
    assert len(recorder) == 2
    good = recorder.read()
    assert len(recorder) == 0, "each step is returned once"
    for *losses, first, second in ((0.5, NAN, 1.0, NAN), (NAN, NAN, 1.0, 1.0), (0.5, 0.5, INF, 1.0)):
        recorder.record(torch.tensor(losses[world.rank]), torch.tensor((first, second)[world.rank]))
    bad = [(r.non_finite_rank, r.updated, math.isfinite(r.loss), str(r.gradient_norm)) for r in recorder.read()]
    mean = WeightedMean(world)
    if world.rank == 0:
        mean.add(torch.tensor(1.0), 8)
        mean.add(torch.tensor(4.0), 4)
    return good, bad, mean.results()


def test_losses_and_means_are_averaged_over_ranks() -> None:
    for good, bad, mean in run_ranks(on_rank, 2):
        assert good == [StepRecord(1.5, 2.0), StepRecord(2.5, 4.0)]
        assert bad == [(1, False, False, "nan"), (0, False, False, "1.0"), (None, False, True, "inf")]
        assert mean == [2.0]


def times_of_rank(world: World) -> tuple[float, int, str]:
    """Three steps on three ranks that wait for each other in the backward pass; rank 1 sleeps in the forward pass."""
    network = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    timer = StepTimer(next(network.parameters()), world.device)
    recorder = LossRecorder(3, world, timer)
    for _ in range(3):
        with timer.waiting():
            time.sleep(0.05 * (world.rank == 1))
        time.sleep(0.3 if world.rank == 1 else 0.1)
        loss = network(torch.ones(1, 4)).sum()
        loss.backward()
        recorder.record(loss.detach(), torch.ones(()))
    assert len(recorder.read()) == 3
    slowest = recorder.slowest
    recorder.record(torch.ones(()), torch.ones(()))
    recorder.read()
    assert recorder.slowest is None, "no times without steps"
    return slowest.ratio, slowest.rank, str(slowest)


def test_the_slowest_rank_is_the_one_that_the_others_wait_for() -> None:
    """Its own time, without the wait in the exchange of the gradients, and read together with the losses."""
    ((ratio, rank, text),) = {*run_ranks(times_of_rank, 3)}  # equal on every rank
    assert rank == 1
    assert ratio > 1.1, text
    assert 0 < int(re.findall(r"data wait (\d+) %", text)[0]) < 100


class FakeEvent:
    """An event of a GPU, with what StepTimer uses. By `device`, the stream has done all that was enqueued."""

    host = device = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    @classmethod
    def enqueue(cls, seconds: float, ready: float = 0.0) -> None:
        """Work of the device that cannot begin before `ready`."""
        cls.device = max(cls.device, cls.host, ready) + seconds

    def record(self) -> None:
        self.time = max(self.device, self.host)

    def query(self) -> bool:
        return self.time <= self.host

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query() and end.query(), "PyTorch raises for events that the device has not reached"  # noqa: PT018
        return 1000 * (end.time - self.time)


@pytest.mark.parametrize(
    ("step", "host_wait", "ready", "share"),
    [
        pytest.param(1.0, "batch", 0.0, 2 / 3, id="the host waits for a slow loader"),
        pytest.param(1.0, "", 3.0, 2 / 3, id="the device waits for a slow copy"),
        pytest.param(5.0, "buffer", 0.0, 0.0, id="the host waits for a buffer that a slow step reads"),
        pytest.param(5.0, "batch", 0.0, 0.0, id="a slow step hides a loader that is faster"),
    ],
)
def test_the_wait_for_data_is_the_time_in_which_the_device_has_nothing_to_do(
    step: float, host_wait: str, ready: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixed bug: the wait for a free buffer counted, 95 % of the time of a run that the device limited."""
    timeline, period, steps = FakeEvent, 3.0, 200
    timeline.host = timeline.device = 0.0
    monkeypatch.setattr(torch.cuda, "Event", timeline)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight = torch.nn.Parameter(torch.ones(()))
    timer = StepTimer(weight, torch.device("cuda"))
    for number in range(steps):
        with timer.waiting():
            if host_wait == "batch":  # one every `period` seconds
                timeline.host = max(timeline.host, period * (number + 1))
            elif host_wait == "buffer":  # that of the step before the last
                timeline.host = max(timeline.host, timeline.device - step)
            timeline.enqueue(0.0, ready * (number + 1))
        timeline.enqueue(step)
        weight.square().backward()
        timeline.host += 0.1
        if number % 7 == 0:
            timer.read()
            timeline.host = max(timeline.host, timeline.device)  # reading the losses waits for the device
    timeline.host = max(timeline.host, timeline.device)
    timer.read()
    assert timer.waited / max(timeline.host, timeline.device) == pytest.approx(share, abs=0.02)


SIZE, NOISE, STEPS = 200, 3.0, 250
TRUE_GRADIENT_SQUARE, TRUE_NOISE = 0.5**2 * SIZE, NOISE**2 * SIZE  # of the quadratic below, at parameters of zero


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(SIZE // 4)), nn.Parameter(torch.zeros(SIZE - SIZE // 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first, self.second]) - inputs


class HalfSquare(nn.Module):
    """Gradient -x for sample x: the mean of the samples is the gradient without noise, their scatter is the noise."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.5 * outputs.square().sum(1).mean()


def measure(world: World, local_batch: int, options: dict[str, Any]) -> tuple[float, float, float]:
    """|G|², S and the noise scale of a quadratic whose samples are N(0.5, 3²), without updates."""
    options = {"log_noise_scale": True, "bucket_cap_mb": 1e-4, **options}
    step = make_step(world=world, network=Offset(), loss=HalfSquare(), **options)
    sums: dict[str, float] = {}
    estimate = NoiseScale(local_batch * world.size / step.probe.parts, local_batch * world.size, sums)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(STEPS):
        inputs = 0.5 + NOISE * torch.randn(local_batch, SIZE, generator=generator)
        step(Batch(inputs, inputs), 0.0)
        estimate.add(float(world.sum(step.probe.square)) / world.size, float(step.gradient_norm) ** 2)
    weight = 1 - SMOOTHING**STEPS  # of all steps
    return sums["gradient"] / weight, sums["noise"] / weight, estimate.samples


TRUE = [pytest.approx(x, rel=0.1) for x in (TRUE_GRADIENT_SQUARE, TRUE_NOISE, TRUE_NOISE / TRUE_GRADIENT_SQUARE)]


def test_micro_batches_of_a_quadratic_give_its_noise_scale() -> None:
    """float16 scales the gradients; neither norm may contain the factor."""
    plain = measure(ALONE, 32, {"accumulation_steps": 4})
    assert [*plain] == TRUE
    scaled = measure(ALONE, 32, {"accumulation_steps": 4, "enable_amp": True, "precision": "float16"})
    assert scaled == pytest.approx(plain, rel=1e-3)


def measure_all(world: World) -> dict[str, tuple[float, float, float]]:
    cases = {"buckets": {}, "one bucket": {"bucket_cap_mb": 25}, "manual": {"ddp": "manual"}}
    cases |= {"micro-batches": {"accumulation_steps": 2}}
    return {case: measure(world, 16, options) for case, options in cases.items()}


def test_the_ranks_batches_of_a_quadratic_give_its_noise_scale_with_any_buckets() -> None:
    """A fixed bug: DistributedDataParallel changes them early in each process; a resumed run had other last digits."""
    for rank in run_ranks(measure_all, 2):
        assert [[*estimates] for estimates in rank.values()] == [TRUE] * 4
        assert rank["buckets"] == rank["one bucket"] == rank["manual"]


def test_the_advice_in_the_log() -> None:
    """For halves of a batch of 100: |G|² = 2 b² − p², S = 100 (p² − b²)."""
    for part_square, batch_square, says in (
        (1.16, 1.08, ["few steps, so expect little from more ranks: twice the batch of 100 ", " batch of 8.0 samples"]),
        (21.0, 11.0, ["Larger batches would save steps: twice the batch of 100 ", " batch of 1,000 samples"]),
        (2.0, 1.0, ["Larger batches than 100 would save steps: the noise scale is too large"]),
        (3.0, 2.0, ["would save steps, with diminishing returns: ", " would save 25 % of the steps", "100 samples"]),
    ):
        estimate = NoiseScale(50, 100, {})
        for _ in range(20):
            assert estimate.sentence() == "", "too few steps"
            estimate.add(part_square, batch_square)
        assert all(part in estimate.sentence() for part in says)
    assert [estimate.result, *estimate.scalars().values()] == pytest.approx([100, 100, 0.5])
    assert (NoiseScale(50, 100, {}).result, NoiseScale(50, 100, {}).scalars()) == (None, {})
