"""Values that the training loop collects between two reads: losses on the device, times on the host."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from utils.distributed.world import World


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


class LossRecorder:
    """Keeps each step's loss and gradient norm on the device, to be read once per logging interval.

    Reading a value waits for the device; recording one does not.
    """

    def __init__(self, interval: int, world: World) -> None:
        self._world = world
        self._values = torch.zeros(interval, 3, device=world.device)  # loss, gradient norm, squared norm of a part
        self._count = 0

    def record(
        self, loss: torch.Tensor, gradient_norm: torch.Tensor, part_norm_squared: torch.Tensor | None = None
    ) -> None:
        row = self._values[self._count]
        row[0].copy_(loss)
        row[1].copy_(gradient_norm)
        if part_norm_squared is not None:
            row[2].copy_(part_norm_squared)
        self._count += 1

    def __len__(self) -> int:
        """Steps since the last read."""
        return self._count

    def read(self) -> list[StepRecord]:
        """The steps since the last read, equal on every rank. Every rank calls it after the same step."""
        count, self._count = self._count, 0
        if count == 0:
            return []
        values = self._world.gather(self._values[:count]).cpu()  # [ranks, steps, 3]; .cpu() waits for the device
        records = []
        for losses, norms, squares in zip(*values.double().permute(2, 1, 0), strict=True):
            ranks = (~torch.isfinite(losses)).nonzero()
            rank = int(ranks[0]) if len(ranks) else None
            records.append(StepRecord(float(losses.mean()), float(norms.max()), rank, float(squares.mean())))
        return records


@dataclass
class Stopwatch:
    """Wall time, the time in it that was spent waiting for data, and the steps made in it."""

    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    steps: int = 0

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def lap(self) -> float:
        """Seconds since the last call; starts again."""
        seconds = self.seconds()
        self.started += seconds
        return seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Adds the time in the block to the waiting time."""
        started = time.perf_counter()
        yield
        self.waited += time.perf_counter() - started

    def wait_fraction(self) -> float:
        return self.waited / max(self.seconds(), 1e-9)


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
