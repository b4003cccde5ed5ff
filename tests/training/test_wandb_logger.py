"""The logger `wandb`: one run over all restarts, each point once; its faults cost a warning."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from log_lines import refusal
from processes import Program
from trainings import YAML, directory

import train
from utils.errors import Stopped
from utils.training.loggers import build_loggers
from utils.training.loggers.base import LoggedRun, Resumed, RunRecords
from utils.training.loggers.wandb import SETTINGS


def stand_in(first_row: int | None = None, **faults: Any) -> mock.Mock:
    """The module wandb, offline, or online if the server has received the rows before the first one; raises faults."""
    wandb = mock.Mock()
    wandb.setup.return_value.settings.mode = "offline" if first_row is None else "online"
    wandb.init.return_value = wandb.run
    wandb.run.starting_step, wandb.run.disabled = first_row or 0, False
    wandb.configure_mock(**{f"{name}.side_effect": error for name, error in faults.items()})
    return wandb


def rows(wandb: mock.Mock) -> list[int]:
    return [call.kwargs["step"] for call in wandb.run.log.call_args_list]


def points(records: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """All points as (name, step, value)."""
    items = ((name, record["step"], value) for record in records for name, value in record.items())
    return sorted(item for item in items if item[0] not in ("step", "seconds"))


def record(wandb: mock.Mock, path: Path, steps: range, resumed: Resumed) -> RunRecords:
    """Records intervals of two steps and epochs of four, from a process that resumes; leaves the logger open."""
    sys.modules["wandb"] = wandb
    run = LoggedRun(path, resumed, {"optimizer": {"name": "adam"}}, {"git_commit": "0123abc"})
    logger = RunRecords(run, build_loggers(["wandb"], run))
    for step in steps:
        if step % 2 == 0 and step > resumed.step:
            logger.scalars({"Step/loss": step / 7, "Step/learning rate": 1.0}, step)
        if step % 4 == 0:
            logger.scalars({"Learning Rate": 1.0}, step)
            logger.scalars({"Loss/valid": step / 3}, step)
    return logger


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "wandb", None)  # restores it
    path = tmp_path / "test" / "1GPU" / "00"
    path.mkdir(parents=True)
    return path


def test_each_offline_process_records_the_run_from_its_first_step(run: Path) -> None:
    """The second process is killed after its last checkpoint. The third is stopped before the end of its epoch."""
    ids = []
    for steps, resumed in (
        (range(0, 6), Resumed(-1)),
        (range(6, 14), Resumed(5)),
        (range(10, 12), Resumed(9)),
        (range(12, 17), Resumed(12, in_epoch=True)),
        (range(0, 3), Resumed(-1)),  # --resume=no
    ):
        wandb = stand_in()
        record(wandb, run, steps, resumed).close(Stopped())
        stored = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert points([call.args[0] for call in wandb.run.log.call_args_list]) == points(stored)
        assert rows(wandb) == sorted(rows(wandb))
        wandb.run.finish.assert_called_once_with(exit_code=75)
        wandb.run.mark_preempting.assert_called_once_with()
        start = wandb.init.call_args.kwargs
        assert (start["name"], start["group"], start["resume"]) == ("test/1GPU/00", "test", None)
        assert start["config"]["optimizer"]["name"] == "adam"
        assert start["config"]["provenance"]["git_commit"] == "0123abc"
        assert wandb.Settings.call_args.kwargs == SETTINGS, "no code, console, host or metrics is uploaded"
        ids.append(start["id"])
    assert len(set(ids[:4])) == 1
    assert ids[4] != ids[0], "a training run from scratch is another run"


def test_rows_that_the_server_has_are_skipped_and_missing_ones_are_added(run: Path) -> None:
    """The first process was killed after step 9; its last checkpoint is of step 8, the last uploaded row of step 6."""
    record(stand_in(), run, range(0, 10), Resumed(-1))
    server = stand_in(first_row=13)
    record(server, run, range(9, 15), Resumed(8)).close()
    assert sorted(set(rows(server))) == [16, 17, 20, 24, 25, 28], "two rows per step; the second ends an epoch"
    assert server.init.call_args.kwargs["resume"] == "allow"


@pytest.mark.slow
def test_a_stopped_training_resumes_its_offline_run(tmp_path: Path, data_flags: list[str]) -> None:
    """With wandb itself."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    flags = [*data_flags, f"--set=expdir={tmp_path}", "--set=loggers=[wandb]", "--set=report_pictures=false"]
    environment = {**os.environ, "WANDB_MODE": "offline"}
    first = Program(["train.py", "--config=test", *flags], tmp_path / "first", environment=environment)
    first.wait_for("Weights & Biases: offline; upload with: wandb sync")
    first.signal(signal.SIGTERM)
    ends = [first.end(), Program(["train.py", "--config=test", *flags], tmp_path / "2", environment=environment).end()]
    assert [end.returncode for end in ends] == [75, 0], ends
    assert not any(text in end.stdout + end.stderr for end in ends for text in ("wandb:", "Cannot record"))
    folder = directory(tmp_path) / "wandb"
    assert len(list(folder.glob(f"offline-run-*-{(folder / 'id').read_text().strip()}/*.wandb"))) == 2
    assert not (directory(tmp_path) / "logs").exists(), "TensorBoard was not asked for"


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        ("init", RuntimeError("no network\nat all"), "no network at all"),
        ("run.log", OSError(28, "No space left on device"), "No space left on device"),
        ("run.finish", TimeoutError(), "TimeoutError"),
    ],
)
def test_a_fault_is_one_warning_and_the_training_continues(
    run: Path, caplog: pytest.LogCaptureFixture, fault: str, error: Exception, reason: str
) -> None:
    wandb = stand_in(**{fault: error})
    logger = record(wandb, run, range(0, 9), Resumed(-1))
    logger.hparams(None, {"hparam/final loss": 0.5}, 9)  # type: ignore[arg-type]
    logger.close()
    (warning,) = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert warning.startswith(f"Cannot record scalars in {run}: {reason}")
    assert wandb.init.call_count == 1, "each attempt may last 30 s"
    assert wandb.mock_calls[-1] == mock.call.teardown()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 11


@pytest.mark.parametrize(
    ("wandb", "loggers", "says"),
    [
        (None, "[wandb]", "needs the package wandb; pip install -e '.[wandb]'"),
        (stand_in(0, login=[False]), "[tensorboard, wandb]", "no API key; run `wandb login`"),
        (stand_in(0, login=ValueError("key: too\nshort")), "[wandb]", "refuses its settings: key: too short"),
        (None, "[tensorbord]", "unknown logger tensorbord; known: tensorboard, wandb; did you mean tensorboard?"),
    ],
)
def test_a_logger_that_cannot_be_used_is_one_line(
    tmp_path: Path, data_flags: list[str], monkeypatch: Any, capsys: Any, wandb: Any, loggers: str, says: str
) -> None:
    """Before training, and without a run directory."""
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = ["--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}", f"--set=loggers={loggers}"]
    assert says in refusal(train.main, [f"--yaml_config={YAML}", *flags], capsys)
    assert not (tmp_path / "runs").exists()
