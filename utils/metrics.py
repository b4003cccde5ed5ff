"""What happened since the last look: losses on the device, times on the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from utils.distributed import World
from utils.errors import UserError


class LossRecorder:
    """Each step's loss and gradient norm, kept on the device and read once per interval.

    Reading a value waits for the device; writing one here does not.
    """

    def __init__(self, interval: int, world: World) -> None:
        self._world = world
        self._values = torch.zeros(interval, 2, device=world.device)  # loss, gradient norm
        self._count = 0

    def record(self, loss: torch.Tensor, gradient_norm: torch.Tensor) -> None:
        self._values[self._count, 0].copy_(loss)
        self._values[self._count, 1].copy_(gradient_norm)
        self._count += 1

    @property
    def full(self) -> bool:
        return self._count == len(self._values)

    def read(self) -> tuple[list[float], list[float]]:
        """Losses, averaged over ranks, and gradient norms, the largest of all ranks, of the steps since the last read.

        Every rank calls it at the same step. Raises NonFiniteLoss, on every rank, for the first step with a loss that
        is no number on any rank.
        """
        count, self._count = self._count, 0
        values = self._world.gather(self._values[:count]).cpu()  # [ranks, steps, 2]; .cpu() waits for the device
        bad = (~torch.isfinite(values[:, :, 0])).nonzero()
        if len(bad):
            rank, step = min(bad.tolist(), key=lambda pair: (pair[1], pair[0]))
            raise NonFiniteLoss(step - count, rank, float(values[rank, step, 0]))
        return values[:, :, 0].double().mean(0).tolist(), values[:, :, 1].amax(0).tolist()


class NonFiniteLoss(Exception):
    """A loss of NaN or infinity; `steps_ago` is negative: -1 is the step just taken."""

    def __init__(self, steps_ago: int, rank: int, value: float) -> None:
        super().__init__(f"loss is {value} on rank {rank}")
        self.steps_ago, self.rank, self.value = steps_ago, rank, value

    def explained(self, step: int, rate: float) -> UserError:
        """The line for the user; `step` is the one with this loss, counted from 1."""
        return UserError(
            f"loss is {self.value} at step {step} on rank {self.rank}, learning rate {rate:.3e}: training stops; "
            f"check the data with --preflight, lower lr_schedule.start_lr, or set clip_grad_norm"
        )


@dataclass
class Stopwatch:
    """Wall time, and the part of it spent waiting for data."""

    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def wait_fraction(self) -> float:
        return self.waited / max(self.seconds(), 1e-9)


class WeightedMean:
    """Mean of per-batch values weighted by samples, summed on the device and over all ranks at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        # float64: an epoch's sum is exact to well below what is printed.
        self._sums = torch.zeros(2, dtype=torch.float64, device=world.device)

    def add(self, value: torch.Tensor, samples: int) -> None:
        self._sums[0] += value.double() * samples
        self._sums[1] += samples

    def result(self) -> float:
        """On every rank; waits for the device."""
        total, samples = self._world.sum(self._sums).tolist()
        return total / samples
