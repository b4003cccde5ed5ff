"""The learning rate: warm-up, peak, half a cosine, and its end."""

from __future__ import annotations

import math

import pytest

from utils.config import Config, LrSchedule
from utils.schedule import CosineSchedule, build_schedule, rate_scale


def config(batch: int, scaling: str = "sqrt", warmup: int = 10, base: int = 64, end: float = 0.0) -> Config:
    """Forty steps."""
    schedule = LrSchedule(scaling=scaling, start_lr=2e-4, end_lr=end, warmup_steps=warmup)
    return Config(
        global_batch_size=batch, base_batch_size=base, Nsamples=10 * batch, num_epochs=4, lr_schedule=schedule
    )


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 8.0), ("sqrt", math.sqrt(8))])
def test_peak_is_the_start_rate_scaled_by_the_batch(scaling: str, factor: float) -> None:
    assert rate_scale(scaling, 512, 64) == pytest.approx(factor)
    schedule = build_schedule(config(512, scaling))
    assert schedule.peak == pytest.approx(2e-4 * factor)
    assert max(schedule(step) for step in range(40)) == schedule.peak


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 0.25), ("sqrt", 0.5)])
def test_batch_below_the_base_one_lowers_the_peak_and_needs_no_warm_up(scaling: str, factor: float) -> None:
    schedule = build_schedule(config(16, scaling))
    assert schedule(0) == schedule.peak == pytest.approx(2e-4 * factor)


@pytest.mark.parametrize(
    ("batch", "scaling", "warm"),
    [(128, "sqrt", True), (128, "linear", True), (64, "sqrt", False), (32, "linear", False), (128, "none", False)],
)
def test_warm_up_only_for_a_batch_beyond_the_base_one_with_a_scaled_rate(batch: int, scaling: str, warm: bool) -> None:
    schedule = build_schedule(config(batch, scaling))
    assert schedule.warmup_steps == (10 if warm else 0)
    assert (schedule(0) < schedule.peak) == warm


def test_warm_up_rises_in_equal_parts_to_the_peak() -> None:
    schedule = build_schedule(config(256))
    rates = [schedule(step) for step in range(11)]
    assert rates[:10] == pytest.approx([schedule.peak * (step + 1) / 10 for step in range(10)])
    assert rates[9] == rates[10] == schedule.peak


@pytest.mark.parametrize("batch", [64, 256])
@pytest.mark.parametrize("end", [0.0, 1e-6])
def test_last_step_has_the_end_rate_exactly_with_and_without_warm_up(batch: int, end: float) -> None:
    schedule = build_schedule(config(batch, end=end))
    assert schedule(39) == end
    assert schedule(38) > end


def test_half_a_cosine_between_peak_and_end() -> None:
    schedule = CosineSchedule(peak=1.0, end=0.2, warmup_steps=4, total_steps=25)
    assert schedule(4) == 1.0
    assert schedule(9) == pytest.approx(0.6 + 0.4 * math.cos(math.pi / 4))
    assert schedule(14) == pytest.approx(0.6)
    assert schedule(19) == pytest.approx(0.6 - 0.4 * math.cos(math.pi / 4))
    falling = [schedule(step) for step in range(4, 25)]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == 21


def test_rate_is_a_pure_function_of_the_step() -> None:
    """Asked in any order, again, and of another instance: a run that resumes needs nothing but the step."""
    schedule = build_schedule(config(256))
    forwards = [schedule(step) for step in range(40)]
    backwards = [schedule(step) for step in reversed(range(40))]
    assert forwards == backwards[::-1] == [build_schedule(config(256))(step) for step in range(40)]


def test_run_of_a_single_step_trains_at_its_peak() -> None:
    assert CosineSchedule(peak=1.0, end=0.0, warmup_steps=0, total_steps=1)(0) == 1.0
