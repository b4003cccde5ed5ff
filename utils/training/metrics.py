"""Values that the training loop collects between two reads, and means over the ranks: losses and times of steps."""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from utils.distributed.world import World
from utils.run import tags


class StepRecord(NamedTuple):
    """One step over all ranks: mean loss, largest gradient norm."""

    loss: float
    gradient_norm: float
    non_finite_rank: int | None = None  # first rank whose loss is not finite; None also if only the norm is not
    part_norm_squared: float = 0.0  # of the gradient of a part of the batch, mean over ranks; 0 if not measured

    @property
    def updated(self) -> bool:
        """False if the step skipped its update because a rank's loss or the gradient norm was not finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class StepTimer:
    """The seconds per step that this rank itself needs: the device's wait for data, and its computation.

    The device waits if it has nothing to do because the batch is not ready: on a GPU from the end of the step before,
    or from the request for the batch if that is later, until the batch is there; on a CPU during the request. A wait of
    the host alone, such as that for memory which the device still reads, does not count. The computation ends when the
    gradient of `parameter` is ready: for a network's first parameter that is before this rank waits for gradients of
    others. A CUDA graph has no such event, so its computation is not measured. On a GPU, nothing waits for the events.
    """

    def __init__(self, parameter: torch.Tensor, device: torch.device) -> None:
        self._device, self.waited = device, 0.0  # seconds for data in all steps that were read
        self._steps: list[list[Any]] = []  # request and start of each step, and the end of its computation, if known
        parameter.register_post_accumulate_grad_hook(self._end)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of the request for a step's batch, before its computation."""
        requested = self._now()
        yield
        self._steps.append([requested, self._now(), None])

    def _end(self, _: torch.Tensor) -> None:
        if self._steps and not (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._steps[-1][2] = self._now()  # of the last micro-batch

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self._device.type == "cuda" else end - start

    def read(self) -> tuple[float, float]:
        """Mean seconds of computation and of waiting since the last call; the former is NaN if no step is complete."""
        steps = self._steps
        if self._device.type == "cuda":  # only those whose end the device has reached
            steps = [*itertools.takewhile(lambda step: all(event is None or event.query() for event in step), steps)]
        self._steps = self._steps[len(steps) :]
        waits = [self._seconds(requested, start) for requested, start, _ in steps]
        computed = [self._seconds(start, end) for _, start, end in steps if end is not None]
        self.waited += sum(waits)
        return sum(computed) / len(computed) if computed else math.nan, sum(waits) / max(1, len(waits))


class SlowestRank(NamedTuple):
    """The rank that needs the most time per step; the others wait for it."""

    rank: int
    ratio: float  # of its seconds to the median over the ranks, the lower one if there are two
    waiting: float  # share of its seconds in which it waits for data

    @classmethod
    def of(cls, seconds: torch.Tensor) -> "SlowestRank | None":
        """From [ranks, (computation, waiting)]; None if there is one rank, or no time of all ranks."""
        totals = seconds.sum(dim=1)
        if len(totals) == 1 or not totals.isfinite().all() or not totals.any():
            return None
        rank, median = int(totals.argmax()), max(float(totals.median()), 1e-9)
        return cls(rank, float(totals[rank]) / median, float(seconds[rank, 1] / totals[rank]))

    def __str__(self) -> str:
        return f"slowest rank {self.rank} (+{100 * (self.ratio - 1):.0f} %; data wait {100 * self.waiting:.0f} %)"


class LossRecorder:
    """Keeps losses and gradient norms of steps on the device until they are read, with the times of all ranks."""

    def __init__(self, interval: int, world: World, timer: StepTimer) -> None:
        self._world, self._timer = world, timer
        # Loss, gradient norm, squared norm of a part; the last row: seconds of computation and of waiting for data.
        self._values = torch.zeros(interval + 1, 3, device=world.device)
        self._count = 0
        self.slowest: SlowestRank | None = None  # of the last read

    def record(self, *values: torch.Tensor) -> None:
        """Adds a step: loss, gradient norm and, if it is measured, the squared norm of a part's gradient."""
        for column, value in enumerate(values):
            self._values[self._count, column].copy_(value)
        self._count += 1

    def __len__(self) -> int:
        """Steps since the last read."""
        return self._count

    def read(self) -> list[StepRecord]:
        """The steps since the last read, equal on every rank. Every rank calls it after the same step."""
        count, self._count = self._count, 0
        if count == 0:
            return []
        for column, seconds in enumerate(self._timer.read()):
            self._values[count, column] = seconds
        # [ranks, steps + 1, 3]; .cpu() waits for the device
        values = self._world.gather(self._values[: count + 1]).cpu().double()
        self.slowest = SlowestRank.of(values[:, count, :2])
        records = []
        for losses, norms, squares in zip(*values[:, :count].permute(2, 1, 0), strict=True):
            ranks = (~torch.isfinite(losses)).nonzero()
            rank = int(ranks[0]) if len(ranks) else None
            records.append(StepRecord(float(losses.mean()), float(norms.max()), rank, float(squares.mean())))
        return records


@dataclass
class Stopwatch:
    started: float = field(default_factory=lambda: time.perf_counter())
    steps: int = 0

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def lap(self) -> float:
        """Seconds since the last call; starts again."""
        seconds = self.seconds()
        self.started += seconds
        return seconds


class WeightedMean:
    """Means of per-batch values weighted by samples, summed on the device and over all ranks at the end."""

    def __init__(self, world: World, values: int = 1) -> None:
        self._world = world
        # float64: an epoch's sum is exact to well below what is printed.
        self._sums = torch.zeros(values + 1, dtype=torch.float64, device=world.device)

    def add(self, values: torch.Tensor, samples: int) -> None:
        """Adds a batch's values: a scalar, or shape [values]."""
        self._sums[:-1] += values.double() * samples
        self._sums[-1] += samples

    def results(self) -> list[float]:
        """The means over all ranks, on every rank; waits for the device."""
        *totals, samples = self._world.sum(self._sums).tolist()
        return [total / samples for total in totals]


class Validation(NamedTuple):
    """Mean loss and metrics over the validation volumes, and the loss of each if there are several."""

    loss: float
    metrics: dict[str, float]
    seconds: float
    volumes: dict[str, float]

    @classmethod
    def of(cls, results: Mapping[str, Sequence[float]], metrics: Sequence[str], seconds: float) -> "Validation":
        """From each volume's loss and the values of `metrics`, by its name; each volume counts equally."""
        loss, *means = (statistics.fmean(values) for values in zip(*results.values(), strict=True))
        volumes = {name: values[0] for name, values in results.items()} if len(results) > 1 else {}
        return cls(loss, dict(zip(metrics, means, strict=True)), seconds, volumes)

    def scalars(self) -> dict[str, float]:
        volumes = {tags.VOLUME_LOSS + name: loss for name, loss in self.volumes.items()}
        metrics = {name.capitalize().replace("_", " ") + tags.VALID_SUFFIX: x for name, x in self.metrics.items()}
        return {tags.VALID_LOSS: self.loss, **volumes, **metrics}
