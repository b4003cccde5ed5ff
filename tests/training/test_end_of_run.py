"""A run is finished once its summary is written: hyperparameters with the final losses, pictures, summary.json."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
from log_lines import messages
from training_that_dies import MOMENTS
from trainings import CLOCKS, YAML, curves

import train
from utils.evaluation import figures
from utils.profiling.benchmark import Benchmark
from utils.training import run as runs
from utils.training.checkpoint import NO_BEST
from utils.training.choice import SUMMARY
from utils.training.evaluations import FOLDER
from utils.training.trainer import Trainer

PICTURES = ["loss_curves.png", "slices.png", "slices_largest_error.png"]
FAST = "while summary.json is written"
WITH_PICTURES = "--set=report_pictures=true"


class Killed(BaseException):
    """Ends a run at once, as a signal would."""


def flags(expdir: Path) -> list[str]:
    return [f"--yaml_config={YAML}", "--config=test", f"--set=expdir={expdir}"]


@pytest.fixture
def start(tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Path, str]]:
    """start(name, *flags): one start of a run of config 'test' -> (its run directory, its log lines)."""

    def run(name: str, *more: str) -> tuple[Path, str]:
        train.main([*flags(tmp_path), *data_flags, f"--run_num={name}", *more])
        return tmp_path / "test" / "1ranks" / name, capsys.readouterr().err

    return run


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's curves, except those that measure time."""
    return {tag: points for tag, points in curves(run).items() if tag not in CLOCKS}


def hyperparameters(run: Path) -> dict[str, Any]:
    """Those of TensorBoard's HPARAMS page."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = EventAccumulator(str(run / "logs")).Reload().PluginTagToContent("hparams")
    found = HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info.hparams
    return {key: value.number_value for key, value in found.items() if value.HasField("number_value")}


def test_tensorboard_shows_learning_rate_optimizer_and_width_at_once(whole: Path) -> None:
    """A page of 113 keys showed the first five by name. TensorBoard's sorting is applied here."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = EventAccumulator(str(whole / "logs")).Reload().PluginTagToContent("hparams")
    experiment = HParamsPluginData.FromString(content["_hparams_/experiment"]).experiment
    infos = sorted(experiment.hparam_infos, key=lambda info: (not info.differs, info.name))
    assert {info.name for info in infos[:5]} == {
        "lr_schedule.start_lr",
        "optimizer.name",
        "network.width",
        "global_batch_size",
        "num_epochs",
    }
    assert len(infos) > 5
    assert [metric.name.tag for metric in experiment.metric_infos] == ["hparam/final loss", "hparam/best loss"]


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / SUMMARY).read_text())


TRAIN_EPOCH = Trainer._train_epoch


def die_in_second_epoch(trainer: Trainer) -> None:
    if trainer.state.epoch == 1:
        raise Killed
    TRAIN_EPOCH(trainer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """The directory of a run that was not interrupted."""
    expdir = tmp_path_factory.mktemp("whole")
    train.main([*flags(expdir), *data_flags, "--run_num=whole", WITH_PICTURES])
    return expdir / "test" / "1ranks" / "whole"


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in MOMENTS]
)
def test_a_restart_writes_the_summary_that_a_kill_prevented(
    moment: str, tmp_path: Path, start: Any, whole: Path, data_flags: list[str]
) -> None:
    """A run killed between its last checkpoint and its end once never got its hparam scalars."""
    script = Path(__file__).with_name("training_that_dies.py")
    own = [*flags(tmp_path), *data_flags, "--run_num=killed", WITH_PICTURES]
    ended = processes.run([script, moment, *own], tmp_path / "output")
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    run = tmp_path / "test" / "1ranks" / "killed"
    assert not (run / SUMMARY).exists()
    before = contents(run)
    _, printed = start("killed", WITH_PICTURES)
    assert "The summary of this run is missing" in printed
    assert "trained network" in printed, "the table of results"
    assert scalars(run) == scalars(whole), "each value once"
    assert all((run / name).exists() for name in PICTURES)
    assert not list(run.glob(".*.partial"))
    assert (summary(run)["steps"], summary(run)["final_loss"]) == (16, summary(whole)["final_loss"])
    assert scalars(run)["Loss/valid"][-1] == (16, pytest.approx(summary(run)["final_loss"], rel=1e-6)), "as float32"
    after = contents(run)
    for name in ("config.yaml", "provenance.json", "metrics.jsonl"):
        assert after[str(run / name)] == before[str(run / name)], f"{name} is that of the process that trained"


def test_all_log_lines_are_in_the_log_file_with_those_before_it_was_open(start: Any) -> None:
    run, printed = start("00")
    lines = messages((run / "out.log").read_text())
    assert lines == messages(printed)
    first = next(number for number, line in enumerate(lines) if line.startswith("Run directory: "))
    assert "train.h5" in lines[0], "of the loader, which reads before anything is written"
    assert first > 0
    _, printed = start("00", "--resume", "--num_epochs=3")
    assert messages((run / "out.log").read_text()) == [*lines, *messages(printed)], "a resumed run appends"


def test_a_run_that_never_beat_the_untrained_network_warns_at_its_end(start: Any) -> None:
    """Fixed: only predict.py and export.py reported it, as a run that had no best checkpoint yet."""
    run, printed = start("00", "--set=lr_schedule.start_lr=1e-30", "--num_epochs=1")
    (warning,) = messages(printed, "WARNING")
    assert NO_BEST in warning
    assert f"--checkpoint {run}/checkpoints/step_00000008 uses the last one" in warning


def test_a_finished_run_is_left_unchanged(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command trains again, in a directory of its own; with --resume it has nothing to do."""
    run, printed = start("00")
    assert messages(printed, "WARNING") == []
    before = contents(run)
    _, printed = start("00", "--set=log_interval=3")
    assert f"Run directory: {run}-2 (00 is finished; " in printed
    assert "Resuming" not in printed
    assert summary(run.with_name("00-2"))["steps"] == 16
    shutil.rmtree(run.with_name("00-2"))
    _, printed = start("00", "--set=log_interval=3", "--resume")
    assert messages(printed)[-2].startswith("Nothing was trained: ")
    assert messages(printed)[-1] == "DONE ---- rank 0"
    monkeypatch.setattr(Benchmark, "run", lambda benchmark: None)
    start("00", "--resume", "--enable_benchy")
    assert contents(run) == before, "a benchmark writes to no run directory"
    assert [path.name for path in run.parent.iterdir()] == ["00"]


def test_a_summary_that_cannot_be_written_is_no_success(
    start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ended with exit code 0 and a warning."""
    write = runs.atomic_write

    def fail(paths: list[Path]) -> Any:
        if paths[0].name == SUMMARY:
            raise OSError(28, "No space left on device")
        return write(paths)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "atomic_write", fail)
        with pytest.raises(SystemExit) as ended:
            start("00")
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "summary.json: No space left on device; " in error
    assert "the network is saved; the same command writes it" in error
    run, printed = start("00")
    assert "The summary of this run is missing" in printed
    assert summary(run)["steps"] == 16


def test_an_interrupted_run_is_not_finished_by_fewer_epochs(
    tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "test" / "1ranks" / "00"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_epoch", die_in_second_epoch)
        with pytest.raises(Killed):
            start("00")
    before = contents(run)
    _, printed = start("00", "--num_epochs=1", "--resume")
    assert "is the end of epoch 1, the last one; " in printed
    assert contents(run) == before
    start("00")
    assert summary(run)["steps"] == 16


def test_more_epochs_replace_the_summary(start: Any) -> None:
    run, _ = start("00")
    start("00", "--num_epochs=3", "--resume")
    found = scalars(run)
    assert summary(run)["steps"] == 24
    assert found["hparam/final loss"] == [(25, found["Loss/valid"][-1][1])], "of the longer run alone"
    assert hyperparameters(run)["num_epochs"] == 3, "those of the shorter run were shown with the new loss"


def test_without_matplotlib_only_the_pictures_are_missing(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that draw are imported again, as in a new process."""
    from utils import evaluation

    for name in ("figures", "loss_curves", "training_figures", "report"):
        monkeypatch.delitem(sys.modules, f"utils.evaluation.{name}", raising=False)
        monkeypatch.delattr(evaluation, name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run, printed = start("00", WITH_PICTURES)
    assert "Cannot draw pictures" in printed
    assert (run / SUMMARY).exists()
    assert not (run / "loss_curves.png").exists()


def test_a_run_that_stopped_early_is_finished(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two epochs is the last one, and evaluated as such; nothing resumes the run unasked."""
    monkeypatch.setattr(figures, "PICTURES", {})
    common = ["--set=early_stopping.min_delta=9", "--set=evaluation.every_epochs=5"]
    common += ["--set=report_baselines=false"]
    run, printed = start("00", *common, "--set=early_stopping.patience=1")
    reason = "the validation loss has not improved by more than 9 for 1 epoch; the best was "
    assert f"Early stopping after epoch 1: {reason}" in printed
    before = summary(run)
    assert before["steps"] == 8
    assert before["early_stop"].startswith(reason)
    assert [path.name for path in (run / FOLDER).iterdir()] == ["step_00000008.npz"]
    _, printed = start("00", *common, "--set=early_stopping.patience=1", "--resume")
    assert "is the end of epoch 1, the last one; raise num_epochs or early_stopping.patience to extend" in printed
    (run / SUMMARY).unlink()
    assert "The summary of this run is missing" in start("00", *common, "--set=early_stopping.patience=1")[1]
    assert summary(run)["early_stop"] == before["early_stop"]
    assert "Early stopping after" not in start("00", *common, "--set=early_stopping.patience=2", "--resume")[1]
    assert (summary(run)["steps"], summary(run)["early_stop"]) == (16, None)
