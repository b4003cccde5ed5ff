"""A run is finished once its summary is written: hyperparameters with the final losses, pictures, summary.json."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from log_lines import messages
from processes import GENEROUS, context
from trainings import CLOCKS, YAML, curves, metrics

import train
from utils import evaluation
from utils.evaluation import baselines, figures
from utils.profiling.benchmark import Benchmark
from utils.training import run as runs
from utils.training.checkpoint import NO_BEST
from utils.training.choice import SUMMARY
from utils.training.evaluations import FOLDER
from utils.training.loggers.base import RunRecords

PICTURES = ["loss_curves.png", "slices.png", "slices_largest_error.png"]
WITH_PICTURES = "--set=report_pictures=true"


def flags(expdir: Path) -> list[str]:
    return [f"--yaml_config={YAML}", "--config=test", f"--set=expdir={expdir}"]


@pytest.fixture
def start(tmp_path: Path, data_flags: list[str], capsys: Any) -> Callable[..., tuple[Path, str]]:
    """start(*flags): one start of a run of config 'test' -> (its run directory, its log lines)."""

    def run(*more: str) -> tuple[Path, str]:
        train.main([*flags(tmp_path), *data_flags, *more])
        return tmp_path / "test" / "1ranks" / "00", capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """The directory of a run that was not interrupted."""
    expdir = tmp_path_factory.mktemp("whole")
    train.main([*flags(expdir), *data_flags, WITH_PICTURES])
    return expdir / "test" / "1ranks" / "00"


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's curves, except those that measure time."""
    return {tag: points for tag, points in curves(run).items() if tag not in CLOCKS}


def contents(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / SUMMARY).read_text())


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_summary(partial: Path, target: Path, replace: Any = os.replace) -> None:
    die() if target.name == SUMMARY else replace(partial, target)


MOMENTS = {
    "after the last checkpoint": (baselines, "volume_losses", die),
    "before the hyperparameters": (RunRecords, "hparams", die),
    "while summary.json is written": (os, "replace", die_in_summary),
}


def train_and_die(moment: str, argv: list[str]) -> None:
    setattr(*MOMENTS[moment])
    train.main(argv)


@pytest.mark.parametrize(
    "moment", [name if "summary" in name else pytest.param(name, marks=pytest.mark.slow) for name in MOMENTS]
)
def test_a_restart_writes_the_summary_that_a_kill_prevented(
    moment: str, tmp_path: Path, start: Any, whole: Path, data_flags: list[str]
) -> None:
    """A run killed between its last checkpoint and its end once never got its hparam scalars."""
    process = context().Process(target=train_and_die, args=(moment, [*flags(tmp_path), *data_flags, WITH_PICTURES]))
    process.start()
    process.join(GENEROUS)
    assert process.exitcode == -signal.SIGKILL
    run = tmp_path / "test" / "1ranks" / "00"
    assert not (run / SUMMARY).exists()
    before = contents(run)
    assert "The summary of this run is missing" in start(WITH_PICTURES)[1]
    assert scalars(run) == scalars(whole), "each value once"
    assert all((run / name).exists() for name in PICTURES)
    assert not list(run.glob(".*.partial"))
    assert (summary(run)["steps"], summary(run)["final_loss"]) == (16, summary(whole)["final_loss"])
    after = contents(run)
    for name in ("config.yaml", "provenance.json", "metrics.jsonl"):
        assert after[str(run / name)] == before[str(run / name)], f"{name} is that of the process that trained"


def test_a_run_that_never_beat_the_untrained_network_warns_at_its_end(start: Any) -> None:
    """Fixed: only predict.py and export.py reported it, as a run that had no best checkpoint yet."""
    run, printed = start("--set=lr_schedule.start_lr=1e-30", "--num_epochs=1")
    (warning,) = messages(printed, "WARNING")
    assert NO_BEST in warning
    assert f"--checkpoint {run}/checkpoints/step_00000008 uses the last one" in warning


def test_a_finished_run_is_left_unchanged(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command trains again, in a directory of its own; with --resume it has nothing to do."""
    run, printed = start()
    assert messages(printed, "WARNING") == []
    before = contents(run)
    _, printed = start("--set=log_interval=3")
    assert f"Run directory: {run}-2 (00 is finished; " in printed
    assert "Resuming" not in printed
    assert summary(run.with_name("00-2"))["steps"] == 16
    shutil.rmtree(run.with_name("00-2"))
    _, printed = start("--set=log_interval=3", "--resume")
    assert messages(printed)[-2].startswith("Nothing was trained: ")
    monkeypatch.setattr(Benchmark, "run", lambda benchmark: None)
    start("--resume", "--enable_benchy")
    assert contents(run) == before, "a benchmark writes to no run directory"
    assert [path.name for path in run.parent.iterdir()] == ["00"]


def test_more_epochs_replace_the_summary_and_continue_the_records(start: Any) -> None:
    """All lines are in out.log, with those from before it was open."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run, first = start()
    records = metrics(run)
    assert "train.h5" in messages(first)[0], "of the loader, which reads before anything is written"
    _, second = start("--num_epochs=3", "--resume")
    assert messages((run / "out.log").read_text()) == messages(first) + messages(second)
    assert "num_epochs 2 -> 3" in second
    assert metrics(run)[: len(records)] == records
    found = scalars(run)
    assert [step for step, _ in found["Loss/valid"]] == [0, 8, 16, 24]
    assert summary(run)["steps"] == 24
    assert found["hparam/final loss"] == [(25, found["Loss/valid"][-1][1])], "of the longer run alone"
    content = EventAccumulator(str(run / "logs")).Reload().PluginTagToContent("hparams")
    shown = HParamsPluginData.FromString(content["_hparams_/session_start_info"]).session_start_info.hparams
    assert shown["num_epochs"].number_value == 3, "those of the shorter run were shown with the new loss"


def test_a_summary_that_cannot_be_written_is_no_success(start: Any, monkeypatch: Any, capsys: Any) -> None:
    """The run ended with exit code 0 and a warning."""
    with monkeypatch.context() as patch:
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr(runs, "dataclasses", mock.Mock(asdict=full))
        with pytest.raises(SystemExit) as ended:
            start()
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search("summary.json: No space left on device; .*the network is saved; the same command writes it", error)
    run, printed = start()
    assert "The summary of this run is missing" in printed
    assert summary(run)["steps"] == 16


def test_without_matplotlib_only_the_pictures_are_missing(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that draw are imported again, as in a new process."""
    for name in ("figures", "loss_curves", "training_figures", "report"):
        monkeypatch.delitem(sys.modules, f"utils.evaluation.{name}", raising=False)
        monkeypatch.delattr(evaluation, name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run, printed = start(WITH_PICTURES)
    assert "Cannot draw pictures" in printed
    assert (run / SUMMARY).exists()
    assert not (run / "loss_curves.png").exists()


def test_a_run_that_stopped_early_is_finished(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two epochs is the last one, and evaluated as such; nothing resumes the run unasked."""
    monkeypatch.setattr(figures, "PICTURES", {})
    common = ["--set=early_stopping.min_delta=9", "--set=evaluation.every_epochs=5", "--set=report_baselines=false"]
    command = [*common, "--set=early_stopping.patience=1"]
    run, printed = start(*command)
    before = summary(run)
    assert before["steps"] == 8
    assert f"Early stopping after epoch 1: {before['early_stop']}" in printed
    assert [path.name for path in (run / FOLDER).iterdir()] == ["step_00000008.npz"]
    _, printed = start(*command, "--resume")
    assert "is the end of epoch 1, the last one; raise num_epochs or early_stopping.patience to extend" in printed
    (run / SUMMARY).unlink()
    assert "The summary of this run is missing" in start(*command)[1]
    assert summary(run)["early_stop"] == before["early_stop"]
    start(*common, "--set=early_stopping.patience=2", "--resume")
    assert (summary(run)["steps"], summary(run)["early_stop"]) == (16, None)
