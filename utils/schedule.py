"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from utils.config import Config


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up over `warmup_steps`, then half a cosine from `peak` to `end`, reached at the last step.

    Source: Loshchilov & Hutter 2017 (cosine), Goyal et al. 2017 (warm-up and scaling).
    """

    peak: float
    end: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int) -> float:
        """The rate of step 0, 1, …, total_steps − 1."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        return self.end + (self.peak - self.end) * 0.5 * (1.0 + math.cos(math.pi * progress))


def rate_scale(scaling: str, batch: int, base_batch: int) -> float:
    """How much larger the rate is at `batch` than at `base_batch`; scaling is none, sqrt or linear."""
    ratio = batch / base_batch
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[scaling]


def build_schedule(config: Config) -> CosineSchedule:
    """The learning rate of a config that is settled for its world."""
    options = config.lr_schedule
    return CosineSchedule(
        peak=options.start_lr * rate_scale(options.scaling, config.global_batch_size, config.base_batch_size),
        end=options.end_lr,
        warmup_steps=options.warmup_steps if config.warms_up else 0,
        total_steps=config.total_steps,
    )
