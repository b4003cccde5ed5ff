"""The learning rate: warm-up, peak, decay, refused schedules, and its plot."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import train
from utils import cli
from utils import config as configs
from utils.config import Config
from utils.config.sections import LrScheduleConfig
from utils.errors import UserError
from utils.optim.optimizers import OPTIMIZERS
from utils.optim.schedules import SCHEDULES, build_schedule, lr_scale
from utils.training.choice import is_free

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
    schedule = build_schedule(scheduled(end_lr=1e-3, warmup_steps=19))  # 40 steps from the peak, 2e-3, to the end
    assert schedule(19) == 2e-3
    for step, cosine in ((29, math.cos(math.pi / 4)), (39, 0.0), (49, -math.cos(math.pi / 4))):
        assert schedule(step) == pytest.approx(1.5e-3 + 0.5e-3 * cosine)
    falling = [schedule(step) for step in range(19, 60)]
    assert falling == sorted(set(falling), reverse=True)
    assert falling[-1] == 1e-3
    single = scheduled(epochs=1).model_copy(update={"Nsamples": 256})
    assert build_schedule(single)(0) == 2e-3, "a run of a single step"


def test_a_step_schedule_drops_at_the_beginning_of_epochs_and_a_constant_one_never() -> None:
    schedule = build_schedule(scheduled(shape="step", drop_epochs=[2, 5], drop_factor=0.25))
    assert [schedule(step) for step in range(60)] == [2e-3] * 20 + [5e-4] * 30 + [1.25e-4] * 10
    tenth = build_schedule(scheduled(shape="step", drop_epochs=[1]))
    assert (tenth(9), tenth(10)) == (2e-3, pytest.approx(2e-4))
    constant = build_schedule(scheduled(shape="constant"))
    assert {constant(step) for step in range(60)} == {2e-3}


def test_a_warmup_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(UserError, match="the warm-up of 60 steps is not shorter than the run of 60 steps; lower"):
        scheduled(warmup_epochs=6).for_world(1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set=lr_schedule.shape=linear"], "lr_schedule.shape must be 'cosine', 'step' or 'constant', got "),
        (["--set=optimizer.name=lamb2"], f"unknown optimizer lamb2; known: {', '.join(OPTIMIZERS)}"),
        (["--plot"], "--plot needs --preflight; add --preflight"),
        (["--preflight", "--plot=missing/rate.png"], "missing/rate.png: No such file"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], says: str, trained: Trained, tmp_path: Path) -> None:
    code, _, errors = trained(*flags)
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert list(tmp_path.iterdir()) == []


# --- the plot -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plot", "name", "settings"),
    [
        ("--plot", "{run}/learning_rate.png", ["base_batch_size=4", "lr_schedule.warmup_epochs=0.5"]),
        ("--plot=rate.png", "rate.png", ["lr_schedule={shape: step, drop_epochs: [1]}"]),
    ],
)
def test_the_preflight_plots_the_learning_rate_of_every_step(
    plot: str, name: str, settings: list[str], trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PNG without temporary files; also if a login node does not see the data. The directory stays free for the run.

    Fixed: without a name it was written to the current directory.
    """
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **b: (drawn.append(self), save(self, *a, **b))[1])
    flags = [f"--set={setting}" for setting in settings]
    code, printed, errors = trained("--preflight", plot, *flags, "--set=train_path=/nowhere.h5")
    assert code == 2
    assert "no such file: /nowhere.h5" in errors
    run = tmp_path / "runs" / "test" / "1ranks" / "00"
    name = name.format(run=run)
    assert f"preflight: learning rate plotted in {name}\n" in printed
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert is_free(run)
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    options = cli.parse([f"--yaml_config={YAML}", "--config=test", *flags])
    config = configs.load(options.yaml_config, options.config, options.overrides).for_world(1)
    schedule = build_schedule(config)
    (line,) = axes.get_lines()
    assert list(line.get_ydata()) == [schedule(step) for step in range(config.total_steps)]
