"""What happened since the last look: losses on the device, times on the host."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from utils.distributed.world import World


class StepRecord(NamedTuple):
    """One step over all ranks: loss, their mean; gradient norm, the largest."""

    loss: float
    gradient_norm: float
    bad_rank: int | None = None  # the first with a loss that is no number; None also where only the norm is none
    part_square: float = 0.0  # squared norm of the gradient of a part of the batch, mean over ranks; 0: not measured

    @property
    def updated(self) -> bool:
        """A step leaves its update out if a loss or the gradients' norm is no number on any rank."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class LossRecorder:
    """Each step's loss and gradient norm, kept on the device and read once per interval.

    Reading a value waits for the device; writing one here does not.
    """

    def __init__(self, interval: int, world: World) -> None:
        self._world = world
        self._values = torch.zeros(interval, 3, device=world.device)  # loss, gradient norm, part's square
        self._count = 0

    def record(self, loss: torch.Tensor, gradient_norm: torch.Tensor, part_square: torch.Tensor | None = None) -> None:
        row = self._values[self._count]
        row[0].copy_(loss)
        row[1].copy_(gradient_norm)
        if part_square is not None:
            row[2].copy_(part_square)
        self._count += 1

    def __len__(self) -> int:
        """Steps since the last read."""
        return self._count

    def read(self) -> list[StepRecord]:
        """The steps since the last read. Every rank calls it at the same step, and gets the same."""
        count, self._count = self._count, 0
        if count == 0:
            return []
        values = self._world.gather(self._values[:count]).cpu()  # [ranks, steps, 3]; .cpu() waits for the device
        records = []
        for losses, norms, squares in zip(*values.double().permute(2, 1, 0), strict=True):
            bad = (~torch.isfinite(losses)).nonzero()
            bad_rank = int(bad[0]) if len(bad) else None
            records.append(StepRecord(float(losses.mean()), float(norms.max()), bad_rank, float(squares.mean())))
        return records


@dataclass
class Stopwatch:
    """Wall time, the part of it spent waiting for data, and the steps made in it."""

    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    steps: int = 0

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def lap(self) -> float:
        """Seconds since the last lap; a new one begins."""
        seconds = self.seconds()
        self.started += seconds
        return seconds

    def wait_fraction(self) -> float:
        return self.waited / max(self.seconds(), 1e-9)


class WeightedMean:
    """Means of per-batch values weighted by samples, summed on the device and over all ranks at the end."""

    def __init__(self, world: World, values: int = 1) -> None:
        self._world = world
        # float64: an epoch's sum is exact to well below what is printed.
        self._sums = torch.zeros(values + 1, dtype=torch.float64, device=world.device)

    def add(self, values: torch.Tensor, samples: int) -> None:
        """A scalar, or [values]."""
        self._sums[:-1] += values.double() * samples
        self._sums[-1] += samples

    def results(self) -> list[float]:
        """On every rank; waits for the device."""
        *totals, samples = self._world.sum(self._sums).tolist()
        return [total / samples for total in totals]
