"""Learning-rate schedules: the learning rate as a pure function of the step.

To add one, write a subclass of Schedule and a builder, add a line to SCHEDULES, and add the name to the values of
`lr_schedule.shape` in utils/config/sections.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from utils.config import Config


@dataclass(frozen=True)
class Schedule(ABC):
    """Linear warm-up to `peak` over `warmup_steps` (Goyal et al. 2017), then the shape of the subclass."""

    peak: float
    warmup_steps: int

    def __call__(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.after_warmup(step)

    @abstractmethod
    def after_warmup(self, step: int) -> float:
        """The learning rate of a step after the warm-up; `step` counts from the start of the run."""


@dataclass(frozen=True)
class CosineSchedule(Schedule):
    """Half-cosine decay from `peak` to `end`, which it reaches at the last step (Loshchilov & Hutter 2017)."""

    end: float
    total_steps: int

    def after_warmup(self, step: int) -> float:
        span = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        return self.end + (self.peak - self.end) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class StepSchedule(Schedule):
    """`peak`, multiplied by `factor` at each of the steps `drops` (He et al. 2016)."""

    factor: float
    drops: tuple[int, ...]

    def after_warmup(self, step: int) -> float:
        return self.peak * self.factor ** sum(step >= drop for drop in self.drops)


def lr_scale(scaling: str, batch: int, base_batch: int) -> float:
    """Factor of the learning rate at `batch`, relative to `base_batch`; scaling is none, sqrt or linear."""
    ratio = batch / base_batch
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scaling]


def build_schedule(config: Config) -> Schedule:
    """The schedule of a config returned by `Config.for_world`."""
    options = config.lr_schedule
    peak = options.start_lr * lr_scale(options.scaling, config.global_batch_size, config.base_batch_size)
    return SCHEDULES[options.shape](config, peak)


def _cosine(config: Config, peak: float) -> Schedule:
    return CosineSchedule(peak, config.warmup_steps, end=config.lr_schedule.end_lr, total_steps=config.total_steps)


def _step(config: Config, peak: float) -> Schedule:
    drops = tuple(epoch * config.steps_per_epoch for epoch in config.lr_schedule.drop_epochs)
    return StepSchedule(peak, config.warmup_steps, factor=config.lr_schedule.drop_factor, drops=drops)


def _constant(config: Config, peak: float) -> Schedule:
    return StepSchedule(peak, config.warmup_steps, factor=1.0, drops=())


SCHEDULES: dict[str, Callable[[Config, float], Schedule]] = {
    "cosine": _cosine,
    "step": _step,
    "constant": _constant,
}
