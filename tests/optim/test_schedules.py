"""The learning rate: warm-up, peak, decay, the tutorial's formula, and its plot."""

import math
from itertools import pairwise
from typing import Any

import pytest
from trainings import YAML

from utils import cli
from utils import config as configs
from utils.config import Config
from utils.config.sections import LrScheduleConfig
from utils.optim.schedules import SCHEDULES, Schedule, warn_of_long_warmup


def scheduled(batch: int = 256, epochs: int = 6, **settings: Any) -> Config:
    """A config with epochs of ten steps; at batch 256 the peak is 2e-3."""
    schedule = LrScheduleConfig(**{"scaling": "linear", "start_lr": 5e-4, **settings})
    return Config(
        global_batch_size=batch, base_batch_size=64, Nsamples=10 * batch, num_epochs=epochs, lr_schedule=schedule
    )


@pytest.mark.parametrize(
    ("batch", "scaling", "factor", "warm"),
    [(512, "none", 1.0, False), (512, "linear", 8.0, True), (64, "sqrt", 1.0, False), (16, "sqrt", 0.5, False)],
)
def test_the_peak_is_scaled_by_the_batch_and_warmed_up_only_above_the_base_batch(
    batch: int, scaling: str, factor: float, warm: bool
) -> None:
    schedule = Schedule(scheduled(batch, scaling=scaling, warmup_steps=10))
    assert schedule.peak == pytest.approx(5e-4 * factor)
    assert schedule.warmup_steps == (10 if warm else 0)
    assert (schedule(0) < schedule(5)) == warm


@pytest.mark.parametrize("shape", SCHEDULES)
@pytest.mark.parametrize("warmup", [{"warmup_steps": 15}, {"warmup_epochs": 1.5}], ids=str)
def test_every_shape_warms_up_linearly_and_is_a_function_of_the_step_alone(shape: str, warmup: dict[str, Any]) -> None:
    """Steps may be requested in any order and repeatedly: a resumed run needs nothing but the step."""
    schedule = Schedule(scheduled(shape=shape, **warmup))
    assert (schedule.warmup_steps, schedule.peak) == (15, 2e-3)
    lrs = [schedule(step) for step in range(60)]
    assert lrs[:15] == pytest.approx([2e-3 * (step + 1) / 15 for step in range(15)])
    assert all(first >= second for first, second in pairwise(lrs[14:]))
    assert (set(lrs[15:]) == {2e-3}) == (shape == "constant")
    assert lrs == [schedule(step) for step in reversed(range(60))][::-1]


def test_a_cooldown_falls_linearly_over_the_last_fifth_to_the_last_rate() -> None:
    schedule = Schedule(scheduled(shape="cooldown", end_lr=4e-4))
    assert [schedule(step) for step in range(48)] == [2e-3] * 48
    assert [schedule(step) for step in range(48, 60)] == pytest.approx([2e-3 - 1.6e-3 * n / 12 for n in range(1, 13)])


@pytest.mark.parametrize(
    ("name", "epochs", "end", "steps", "peak", "warmup"),
    [
        ("base", 10, 0.0, 10_240, 2e-4, 0),
        ("bs512_test", 10, 1e-5, 1280, 2e-4 * math.sqrt(8), 128),
        ("bs2048_opt", 3, 0.0, 96, 2e-4 * math.sqrt(32), 128),  # the warm-up is longer than the run
    ],
)
def test_the_learning_rate_is_the_tutorials_at_every_step(
    name: str, epochs: int, end: float, steps: int, peak: float, warmup: int
) -> None:
    """Its iteration n counts from 1. The cosine, here in its half-angle form, spans all steps also after a warm-up."""
    config = configs.load(YAML, name, {"num_epochs": epochs, "lr_schedule.end_lr": end}).for_world(1)
    expected = [
        peak * n / warmup if n < warmup else end + (peak - end) * math.cos(math.pi * (n - warmup) / steps / 2) ** 2
        for n in range(1, steps + 1)
    ]
    schedule = Schedule(config)
    assert config.total_steps == steps
    assert [schedule(step) for step in range(steps)] == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("command", "ranks", "warns"),
    [
        ("--config=bs64_opt --local_batch_size 64 --enable_benchy --num_epochs 15", 128, False),
        ("--config=short_opt --local_batch_size 64", 8, True),
    ],
)
def test_a_warmup_longer_than_the_run_is_a_warning(command: str, ranks: int, warns: bool, caplog: Any) -> None:
    """Fixed bug: commands of the tutorial, and benchmarks, which do not follow the schedule, were refused."""
    options = cli.parse([f"--yaml_config={YAML}", *command.split()])
    warn_of_long_warmup(configs.load(options.yaml_config, options.config, options.overrides).for_world(ranks))
    assert ("the run of 32 steps ends within the warm-up of 128 steps" in caplog.text) == warns
    assert len(caplog.records) == warns
