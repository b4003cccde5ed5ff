"""The learning rate: warm-up, peak, decay, and refused schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import train
from utils.config import Config
from utils.config.sections import LrScheduleConfig
from utils.errors import UserError
from utils.optim.optimizers import OPTIMIZERS
from utils.optim.schedules import SCHEDULES, CosineSchedule, build_schedule, lr_scale

YAML = Path(__file__).parent.parent.parent / "config" / "UNet.yaml"

Trained = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trained(tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch) -> Trained:
    """trained(*flags) -> (exit code, stdout, stderr) of train.py with config 'test' in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> tuple[int, str, str]:
        code = 0
        where = [f"--yaml_config={YAML}", "--config=test", f"--set=expdir={tmp_path / 'runs'}"]
        try:
            train.main([*where, *data_flags, *flags])
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def scheduled(batch: int = 256, epochs: int = 6, **settings: Any) -> Config:
    """A config with epochs of ten steps; at batch 256 the peak is 2e-3."""
    schedule = LrScheduleConfig(**{"scaling": "linear", "start_lr": 5e-4, **settings})
    return Config(
        global_batch_size=batch, base_batch_size=64, Nsamples=10 * batch, num_epochs=epochs, lr_schedule=schedule
    )


@pytest.mark.parametrize(
    ("batch", "scaling", "factor", "warm"),
    [
        (512, "none", 1.0, False),
        (512, "linear", 8.0, True),
        (512, "sqrt", math.sqrt(8), True),
        (64, "sqrt", 1.0, False),
        (16, "linear", 0.25, False),
        (16, "sqrt", 0.5, False),
    ],
)
def test_the_peak_is_scaled_by_the_batch_and_warmed_up_only_above_the_base_batch(
    batch: int, scaling: str, factor: float, warm: bool
) -> None:
    assert lr_scale(scaling, batch, 64) == pytest.approx(factor)
    schedule = build_schedule(scheduled(batch, scaling=scaling, warmup_steps=10))
    assert schedule.peak == pytest.approx(5e-4 * factor)
    assert max(schedule(step) for step in range(60)) == schedule.peak
    assert schedule.warmup_steps == (10 if warm else 0)
    assert (schedule(0) < schedule.peak) == warm


@pytest.mark.parametrize("shape", SCHEDULES)
@pytest.mark.parametrize("warmup", [{"warmup_steps": 15}, {"warmup_epochs": 1.5}], ids=str)
def test_every_shape_warms_up_linearly_and_is_a_function_of_the_step_alone(shape: str, warmup: dict[str, Any]) -> None:
    """Steps may be requested in any order and repeatedly: a resumed run needs nothing but the step."""
    settings = {"shape": shape, "drop_epochs": [3, 4], **warmup}
    schedule = build_schedule(scheduled(**settings))
    assert (schedule.warmup_steps, schedule.peak) == (15, 2e-3)
    lrs = [schedule(step) for step in range(60)]
    assert lrs[:16] == pytest.approx([2e-3 * (step + 1) / 15 for step in range(15)] + [2e-3])
    assert all(first >= second for first, second in pairwise(lrs[15:]))
    assert lrs == [schedule(step) for step in reversed(range(60))][::-1]
    assert lrs == [build_schedule(scheduled(**settings))(step) for step in range(60)]


def test_a_half_cosine_falls_from_the_peak_to_the_end_value_at_the_last_step() -> None:
    schedule = CosineSchedule(peak=1.0, end=0.2, warmup_steps=4, total_steps=25)
    assert schedule(4) == 1.0
    assert schedule(9) == pytest.approx(0.6 + 0.4 * math.cos(math.pi / 4))
    assert schedule(14) == pytest.approx(0.6)
    assert schedule(19) == pytest.approx(0.6 - 0.4 * math.cos(math.pi / 4))
    falling = [schedule(step) for step in range(4, 25)]
    assert falling == sorted(set(falling), reverse=True)
    assert len(falling) == 21
    whole = build_schedule(scheduled(end_lr=1e-6, warmup_steps=10))
    assert whole(58) > whole(59) == 1e-6
    assert CosineSchedule(peak=1.0, end=0.0, warmup_steps=0, total_steps=1)(0) == 1.0, "a run of a single step"


def test_a_step_schedule_drops_at_the_beginning_of_epochs_and_a_constant_one_never() -> None:
    schedule = build_schedule(scheduled(shape="step", drop_epochs=[2, 5], drop_factor=0.25))
    assert [schedule(step) for step in range(60)] == [2e-3] * 20 + [5e-4] * 30 + [1.25e-4] * 10
    tenth = build_schedule(scheduled(shape="step", drop_epochs=[1]))
    assert (tenth(9), tenth(10)) == (2e-3, pytest.approx(2e-4))
    constant = build_schedule(scheduled(shape="constant"))
    assert {constant(step) for step in range(60)} == {2e-3}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"warmup_steps": 3, "warmup_epochs": 0.5}, "warmup_steps 3 and warmup_epochs 0.5 are both set; set one"),
        ({"warmup_epochs": 6}, "warmup_epochs 6.0: the warm-up is not shorter than the run of 60 steps; lower it"),
        ({"warmup_steps": 60}, "warmup_steps 60: the warm-up is not shorter than the run of 60 steps; lower it"),
        ({"drop_epochs": [3, 2]}, "drop_epochs [3, 2] must increase; sort them"),
        ({"shape": "step", "drop_epochs": [2, 2]}, "drop_epochs [2, 2] must increase; sort them"),
        ({"shape": "step"}, "lr_schedule.shape step needs lr_schedule.drop_epochs; set"),
        ({"shape": "step", "drop_epochs": [2, 6]}, "epoch 6 must be less than num_epochs 6; remove it or raise"),
        (
            {"shape": "step", "drop_epochs": [1], "warmup_epochs": 1},
            "the first drop is within the 10 steps of warm-up",
        ),
    ],
)
def test_an_impossible_schedule_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        scheduled(**settings).for_world(1)
    assert says in str(caught.value)
    assert scheduled(drop_epochs=[30, 60]).for_world(1), "other shapes ignore drops that do not fit"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set=lr_schedule.shape=linear"], "lr_schedule.shape must be 'cosine', 'step' or 'constant', got "),
        (["--set=lr_schedule={shape: step, drop_epochs: [30, 60]}"], "epoch 60 must be less than num_epochs 2; "),
        (["--set=optimizer.name=lamb2"], f"unknown optimizer lamb2; known: {', '.join(OPTIMIZERS)}"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], says: str, trained: Trained, tmp_path: Path) -> None:
    code, _, errors = trained(*flags)
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert list(tmp_path.iterdir()) == []
