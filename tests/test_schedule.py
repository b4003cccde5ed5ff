"""The learning rate: warm-up, peak, what comes after it, and its picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import train
from utils import preflight
from utils.config import Config, LrSchedule
from utils.errors import UserError
from utils.schedule import SCHEDULES, CosineSchedule, build_schedule, rate_scale

TOP = Path(__file__).parent.parent


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


# --- other shapes ----------------------------------------------------------------------------------------------------


def shaped(batch: int = 256, **settings: Any) -> Config:
    """Six epochs of ten steps; the peak of batch 256 is 2e-3."""
    schedule = LrSchedule(**{"scaling": "linear", "start_lr": 5e-4, **settings})
    return Config(global_batch_size=batch, base_batch_size=64, Nsamples=10 * batch, num_epochs=6, lr_schedule=schedule)


def test_a_rate_in_steps_drops_at_the_beginning_of_epochs() -> None:
    schedule = build_schedule(shaped(shape="step", drop_epochs=[2, 5], drop_factor=0.25))
    assert [schedule(step) for step in range(60)] == [2e-3] * 20 + [5e-4] * 30 + [1.25e-4] * 10
    tenth = build_schedule(shaped(shape="step", drop_epochs=[1]))
    assert (tenth(9), tenth(10)) == (2e-3, pytest.approx(2e-4))


def test_a_constant_rate_is_constant() -> None:
    schedule = build_schedule(shaped(shape="constant"))
    assert {schedule(step) for step in range(60)} == {2e-3}


@pytest.mark.parametrize("shape", SCHEDULES)
@pytest.mark.parametrize("warmup", [{"warmup_steps": 15}, {"warmup_epochs": 1.5}], ids=str)
def test_every_shape_warms_up_the_same(shape: str, warmup: dict[str, Any]) -> None:
    """In steps or in epochs, by the same rule: not for the base batch, and not for a rate that is not scaled."""
    settings = {"shape": shape, "drop_epochs": [3, 4], **warmup}
    schedule = build_schedule(shaped(**settings))
    assert (schedule.warmup_steps, schedule.peak) == (15, 2e-3)
    rates = [schedule(step) for step in range(60)]
    assert rates[:16] == pytest.approx([2e-3 * (step + 1) / 15 for step in range(15)] + [2e-3])
    assert all(first >= second for first, second in pairwise(rates[15:]))
    assert rates == [schedule(step) for step in reversed(range(60))][::-1], "a function of the step alone"
    for other in (shaped(64, **settings), shaped(**settings, scaling="none")):
        cold = build_schedule(other)
        assert cold.warmup_steps == 0
        assert cold(0) == cold.peak == 5e-4


def test_warm_up_in_epochs_lasts_as_long_at_every_batch() -> None:
    """In steps it is the shorter, the larger the batch."""
    for batch, steps in ((128, 32), (256, 16), (512, 8)):
        schedule = LrSchedule(scaling="sqrt", warmup_epochs=0.5)
        config = Config(global_batch_size=batch, base_batch_size=64, Nsamples=8192, lr_schedule=schedule)
        assert build_schedule(config).warmup_steps == steps


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"warmup_steps": 3, "warmup_epochs": 0.5}, "warmup_steps 3 and warmup_epochs 0.5 are both given; set one"),
        ({"warmup_epochs": 6}, "warmup_epochs 6.0 leaves nothing of the run's 60 steps; lower it or raise num_epochs"),
        ({"warmup_steps": 60}, "warmup_steps 60 leaves nothing of the run's 60 steps; lower it or raise num_epochs"),
        ({"drop_epochs": [3, 2]}, "drop_epochs [3, 2] do not increase; put them in order"),
        ({"shape": "step", "drop_epochs": [2, 2]}, "drop_epochs [2, 2] do not increase; put them in order"),
        ({"shape": "step"}, "shape is step, but there are no lr_schedule.drop_epochs; say when"),
        ({"shape": "step", "drop_epochs": [2, 6]}, "after epoch 6 nothing is left of 6 epochs; leave it out or raise"),
        (
            {"shape": "step", "drop_epochs": [1], "warmup_epochs": 1},
            "does not come after the 10 steps of warm-up",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        shaped(**settings).for_world(1)
    assert says in str(caught.value)


def test_drops_do_not_matter_to_other_shapes() -> None:
    """A config may keep them while another shape is tried."""
    assert shaped(drop_epochs=[30, 60]).for_world(1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set=lr_schedule.shape=linear"], "lr_schedule.shape: Input should be 'cosine', 'step' or 'constant', not "),
        (
            ["--set=lr_schedule.warmup_epochs=-1"],
            "lr_schedule.warmup_epochs: Input should be greater than or equal ",
        ),
        (["--set=lr_schedule.drop_factor=1"], "lr_schedule.drop_factor: Input should be less than 1, not 1"),
        (["--set=lr_schedule={shape: step, drop_epochs: [0]}"], "lr_schedule.drop_epochs.0: Input should be greater "),
        (["--set=lr_schedule={shape: step, drop_epochs: [30, 60]}"], "after epoch 60 nothing is left of 2 epochs; "),
        (["--set=lr_schedule={warmup_epochs: 1, warmup_steps: 1}"], "are both given; set one of them to 0"),
        (
            ["--set=optimizer.name=lamb2"],
            "unknown optimizer lamb2; known: adam, fused_adam, ",
        ),
        (["--plot"], "--plot draws what a preflight finds; add --preflight"),
        (["--plot=rate.png"], "--plot draws what a preflight finds; add --preflight"),
    ],
)
def test_on_the_command_line_it_is_one_line(
    flags: list[str], says: str, data_flags: list[str], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    where = [f"--yaml_config={TOP / 'config' / 'UNet.yaml'}", "--config=test", f"--set=expdir={tmp_path / 'runs'}"]
    with pytest.raises(SystemExit) as stop:
        train.main([*where, *data_flags, *flags])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("*.png"))


# --- its picture -----------------------------------------------------------------------------------------------------


@pytest.fixture
def plotted(tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch):
    """plotted(*flags) -> (exit code, stdout, stderr) of a preflight of config 'test' in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> tuple[int, str, str]:
        code = 0
        where = [f"--yaml_config={TOP / 'config' / 'UNet.yaml'}", "--config=test", f"--set=expdir={tmp_path / 'runs'}"]
        try:
            train.main([*where, *data_flags, "--preflight", *flags])
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


Plotted = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(("flag", "name"), [("--plot", "learning_rate.png"), ("--plot=rate", "rate")])
def test_the_preflight_draws_a_picture(flag: str, name: str, plotted: Plotted, tmp_path: Path) -> None:
    """A PNG, whatever its name, that says nothing of a temporary one; and nothing without being asked."""
    from matplotlib import image

    assert plotted()[0] == 0
    assert list(tmp_path.iterdir()) == []
    code, printed, errors = plotted(flag)
    assert (code, errors) == (0, "")
    assert f"preflight: learning rate plotted in {name}\n" in printed
    assert printed.endswith("preflight: all checks passed\n")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with open(tmp_path / name, "rb") as file:
        pixels = image.imread(file, format="png")
    assert pixels.shape[0] > 400
    assert pixels.std() > 0.01, "something is drawn"


def test_the_picture_comes_before_the_data(plotted: Plotted, tmp_path: Path) -> None:
    """A login node may not see them."""
    code, printed, errors = plotted("--plot", "--set=train_path=/nowhere.h5")
    assert code == 2
    assert "no such file: /nowhere.h5" in errors
    assert "plotted in learning_rate.png" in printed
    assert (tmp_path / "learning_rate.png").exists()


@pytest.mark.parametrize("name", ["missing/rate.png", ".", ""])
def test_a_picture_that_cannot_be_written_is_one_line(name: str, plotted: Plotted, tmp_path: Path) -> None:
    code, _, errors = plotted(f"--plot={name}")
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("error: --plot=")
    assert "give a" in line
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_stays_if_drawing_fails(plotted: Plotted, tmp_path: Path, monkeypatch: Any) -> None:
    from matplotlib.figure import Figure

    def fails(self: Figure, target: Path, **options: Any) -> None:
        Path(target).write_bytes(b"half a picture")
        raise OSError(28, "No space left on device")

    (tmp_path / "learning_rate.png").write_text("precious")
    monkeypatch.setattr(Figure, "savefig", fails)
    code, _, errors = plotted("--plot")
    assert code == 2
    assert "No space left on device" in errors
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("settings", [{}, {"shape": "step", "drop_epochs": [2, 4]}, {"shape": "constant"}], ids=str)
def test_the_picture_shows_the_schedule(settings: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """Every step's rate, warm-up, peak and epochs, as the schedule has them."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **b: (drawn.append(self), save(self, *a, **b))[1])
    config = shaped(warmup_epochs=1.5, **settings).for_world(4)
    said = preflight.plot_rates(config, "large", tmp_path / "rate.png")
    assert said == f"learning rate plotted in {tmp_path / 'rate.png'}"
    (axes,) = drawn[0].axes
    line, peak = axes.get_lines()
    schedule = build_schedule(config)
    assert list(line.get_xdata()) == list(range(60))
    assert list(line.get_ydata()) == [schedule(step) for step in range(60)]
    assert (list(peak.get_xdata()), list(peak.get_ydata())) == ([15], [2e-3])
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["warm-up, 15 steps", "peak 2.000e-03"]
    assert axes.get_title() == f"large: global batch 256, linear scaling, shape {settings.get('shape', 'cosine')}"
    (epochs,) = axes.child_axes
    assert epochs.get_xlim() == pytest.approx([end / 10 for end in axes.get_xlim()])
    assert (axes.get_xlabel(), epochs.get_xlabel(), axes.get_ylabel()) == ("step", "epoch", "learning rate")
