"""Learning-rate schedules: the rate as a pure function of the step. docs/architecture.md says how to add one."""

import math
from collections.abc import Callable

from utils.config import Config
from utils.log import once_per_job

log = once_per_job(__name__)


class Schedule:
    """Linear warm-up to `peak` (Goyal et al. 2017), then the shape of a config returned by `Config.for_world`."""

    def __init__(self, config: Config) -> None:
        options, ratio = config.lr_schedule, config.global_batch_size / config.base_batch_size
        self.peak = options.start_lr * {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[options.scaling]
        self.warmup_steps = config.warmup_steps
        self._config, self._shape = config, SCHEDULES[options.shape]

    def __call__(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self._shape(self._config, self.peak, step)


def warn_of_long_warmup(config: Config) -> None:
    """Logs a warning if a training run ends within its warm-up, which benchmarks may do."""
    steps, total = config.warmup_steps, config.total_steps
    if steps >= total and not config.enable_benchy:
        log.warning(
            f"the run of {total} steps ends within the warm-up of {steps} steps of the learning rate; lower "
            f"lr_schedule.warmup_steps or warmup_epochs, or raise num_epochs"
        )


def cosine(config: Config, peak: float, step: int) -> float:
    """Half-cosine decay from `peak` to `end_lr` (Loshchilov & Hutter 2017), as in the SC21 tutorial.

    It spans as many steps as the run has, also after a warm-up, at whose end it begins. The last rate is then a little
    above `end_lr`.
    """
    end, progress = config.lr_schedule.end_lr, (step + 1 - config.warmup_steps) / config.total_steps
    return end + (peak - end) * 0.5 * (1.0 + math.cos(math.pi * progress))


def cooldown(config: Config, peak: float, step: int) -> float:
    """`peak`, then a linear decay to `end_lr` over the last fifth of the steps (Hägele et al. 2024)."""
    end, decay = config.lr_schedule.end_lr, max(1, config.total_steps // 5)
    return end + (peak - end) * min(1.0, (config.total_steps - 1 - step) / decay)


SCHEDULES: dict[str, Callable[[Config, float, int], float]] = {
    "cosine": cosine,
    "constant": lambda config, peak, step: peak,
    "cooldown": cooldown,
}


def log_learning_rate(config: Config) -> None:
    """Logs the rate at some steps of a config returned by `Config.for_world`, and a warm-up that is too long."""
    schedule, total = Schedule(config), config.total_steps
    steps = sorted({0, schedule.warmup_steps, total // 4, total // 2, 3 * total // 4, total - 1})
    curve = ", ".join(f"step {step}: {schedule(step):.3e}" for step in steps if step < total)
    shape, scaling = config.lr_schedule.shape, config.lr_schedule.scaling
    warmup = f"{schedule.warmup_steps} steps of warm-up" if schedule.warmup_steps else "no warm-up"
    log.info(f"learning rate: shape {shape}, scaling {scaling}, {warmup}, peak {schedule.peak:.3e}; {curve}")
    warn_of_long_warmup(config)
