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
from trainings import CLOCKS, YAML, NoWaiting, curves
from utils.training.removal import remove_run

import train
from utils.profiling.benchmark import Benchmark
from utils.training import summary
from utils.training.checkpoint import NO_BEST
from utils.training.trainer import Trainer

PICTURES = ["loss_curves.png", "slices.png"]


FAST = {"while summary.json is written"}


MARKS: tuple[Any, Any] = (pytest.mark.slow, ())


class Killed(BaseException):
    """Ends a training at once, as a signal would."""


def flags(expdir: Path) -> list[str]:
    return [f"--yaml_config={YAML}", "--config=test", f"--set=expdir={expdir}", "--set=report_pictures=true"]


@pytest.fixture
def start(
    tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Path, str]]:
    """start(name, *flags): one start of a training of config 'test' -> (its run directory, its log lines)."""

    NoWaiting().install(monkeypatch.setattr)

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


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """The directory of a training that was not interrupted."""
    expdir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        NoWaiting().install(patched.setattr)
        train.main([*flags(expdir), *data_flags, "--run_num=whole"])
    return expdir / "test" / "1ranks" / "whole"


@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MOMENTS]
)
def test_a_restart_writes_the_summary_that_a_kill_prevented(
    moment: str, tmp_path: Path, start: Any, whole: Path, data_flags: list[str]
) -> None:
    """A run killed between its last checkpoint and its end once never got its hparam scalars."""
    script = Path(__file__).with_name("training_that_dies.py")
    ended = processes.run([script, moment, *flags(tmp_path), *data_flags, "--run_num=killed"], tmp_path / "output")
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    run = tmp_path / "test" / "1ranks" / "killed"
    assert not (run / summary.SUMMARY).exists()
    before = contents(run)
    _, printed = start("killed")
    assert "The summary of this training is missing" in printed
    assert "trained network" in printed, "the table of results"
    assert messages(printed)[-2].startswith("Nothing was trained: ")
    assert scalars(run) == scalars(whole), "each value once"
    assert all((run / name).exists() for name in PICTURES)
    assert not list(run.glob(".*.partial"))
    summaries = [json.loads((path / summary.SUMMARY).read_text()) for path in (run, whole)]
    assert summaries[0]["steps"] == 16
    assert summaries[0]["final_loss"] == summaries[1]["final_loss"]
    assert scalars(run)["Loss/valid"][-1] == (16, pytest.approx(summaries[0]["final_loss"], rel=1e-6)), "as float32"
    after = contents(run)
    for name in ("config.yaml", "provenance.json", "metrics.jsonl"):
        assert after[str(run / name)] == before[str(run / name)], f"{name} is the training's"


def test_a_run_that_never_beat_the_untrained_network_warns_at_its_end(start: Any) -> None:
    """Fixed: only predict.py and export.py reported it, as a run that had no best checkpoint yet."""
    flags = ("--set=lr_schedule.start_lr=1e-30", "--num_epochs=1", "--set=report_pictures=False")
    run, printed = start("00", *flags)
    assert f"WARNING - This run has no best checkpoint: {NO_BEST}; " in printed
    assert f"; --checkpoint {run}/checkpoints/step_00000008 uses the last one\n" in printed


def test_a_finished_run_is_left_unchanged(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command trains again, in a directory of its own; with --resume it has nothing to do."""
    run, printed = start("00")
    assert "WARNING - This run has no best checkpoint" not in printed
    before = contents(run)
    _, printed = start("00", "--set=log_interval=3")
    assert f"Run directory: {run}-2 (00 is finished; --resume with more epochs would extend it)" in printed
    assert "Resuming" not in printed
    assert json.loads((run.with_name("00-2") / summary.SUMMARY).read_text())["steps"] == 16
    shutil.rmtree(run.with_name("00-2"))
    _, printed = start("00", "--set=log_interval=3", "--resume")
    assert messages(printed)[-2].startswith("Nothing was trained: ")
    assert printed.rstrip().endswith("DONE ---- rank 0")
    assert "Result:" not in printed
    assert contents(run) == before
    monkeypatch.setattr(Benchmark, "run", lambda benchmark: None)
    start("00", "--resume", "--enable_benchy")
    assert contents(run) == before, "a benchmark writes to no run directory"


def test_resume_no_removes_a_finished_run_with_its_pictures(whole: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(whole, tmp_path / "00", symlinks=True)
    (line,) = remove_run(copy)
    assert all(name in line for name in (*PICTURES, "logs", "out.log"))
    assert [path.name for path in copy.rglob("*")] == [".lock"]


def test_a_summary_that_cannot_be_written_is_no_success(
    start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ended with exit code 0 and a warning."""
    with monkeypatch.context() as patch:
        patch.setattr(summary, "SUMMARY", "nowhere/summary.json")
        with pytest.raises(SystemExit) as ended:
            start("00")
    assert ended.value.code == 2
    assert "summary.json: No such file or directory; the network is saved; the same command writes it" in (
        capsys.readouterr().err
    )
    run, printed = start("00")
    assert "The summary of this training is missing" in printed
    (run / summary.SUMMARY).unlink()
    (run / summary.SUMMARY).mkdir()
    with pytest.raises(SystemExit) as ended:
        start("00")
    assert ended.value.code == 2
    assert f"error: cannot prepare the run directory {run}: Is a directory" in capsys.readouterr().err


def test_an_interrupted_run_is_not_finished_by_fewer_epochs(
    tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, train_step = tmp_path / "test" / "1ranks" / "00", Trainer._train_step

    def die_in_second_epoch(trainer: Trainer, *arguments: Any) -> None:
        if trainer.state.step == 12:
            raise Killed
        train_step(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", die_in_second_epoch)
        with pytest.raises(Killed):
            start("00")
    before = contents(run)
    _, printed = start("00", "--num_epochs=1", "--resume")
    assert "is the end of epoch 1, and num_epochs is 1; " in printed
    assert contents(run) == before
    start("00")
    assert json.loads((run / summary.SUMMARY).read_text())["steps"] == 16


def test_more_epochs_replace_the_summary(start: Any) -> None:
    run, _ = start("00")
    start("00", "--num_epochs=3", "--resume")
    found = scalars(run)
    assert json.loads((run / summary.SUMMARY).read_text())["steps"] == 24
    assert found["hparam/final loss"] == [(25, found["Loss/valid"][-1][1])], "of the longer training alone"
    assert hyperparameters(run)["num_epochs"] == 3, "those of the shorter training were shown with the new loss"


def test_without_matplotlib_only_the_pictures_are_missing(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that draw are imported again, as in a new process."""
    from utils import evaluation

    for name in ("figures", "training_figures", "report"):
        monkeypatch.delitem(sys.modules, f"utils.evaluation.{name}", raising=False)
        monkeypatch.delattr(evaluation, name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run, printed = start("00")
    assert "Cannot draw pictures" in printed
    assert (run / summary.SUMMARY).exists()
    assert not (run / "loss_curves.png").exists()
