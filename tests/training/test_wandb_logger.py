"""The logger `wandb`: one run over all restarts, each point once; its faults cost a warning."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import Program
from trainings import ALONE, directory

import train
from utils.errors import Stopped, UserError
from utils.training.loggers import build_loggers, check_loggers
from utils.training.loggers.base import LoggedRun, Resumed, RunRecords
from utils.training.loggers.wandb import SETTINGS

installed = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")


class StandIn(SimpleNamespace):
    """The module wandb; keeps the calls and their arguments, and raises `error` in the function named `fault`.

    `first_row`: the first one that the server has not received; None: offline.
    """

    def __init__(
        self, fault: str = "", error: Exception | None = None, key: bool = True, first_row: int | None = None
    ) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

        def function(name: str, result: Any = None) -> Callable[..., Any]:
            def call(*arguments: Any, **keywords: Any) -> Any:
                self.calls.append((name, arguments, keywords))
                if name == fault and error is not None:
                    raise error
                return result

            return call

        names = ("log", "finish", "define_metric", "mark_preempting")
        run = SimpleNamespace(**{name: function(name) for name in names}, summary=SimpleNamespace())
        run.summary.update = function("update")
        run.starting_step, run.disabled, run.url, run.sync_dir = first_row or 0, False, "https://example.org", "/run"
        super().__init__(
            Settings=lambda **_: SimpleNamespace(mode="offline" if first_row is None else "online"),
            setup=lambda settings: SimpleNamespace(settings=settings),
            login=function("login", key),
            init=function("init", run),
            teardown=function("teardown"),
        )

    def of(self, name: str) -> list[dict[str, Any]]:
        """The keywords of the calls of a function."""
        return [keywords for call, _, keywords in self.calls if call == name]

    def rows(self) -> list[int]:
        return [keywords["step"] for keywords in self.of("log")]

    def points(self) -> list[tuple[str, int, float]]:
        return points([values for name, arguments, _ in self.calls if name == "log" for values in arguments])


def points(records: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """All points as (name, step, value)."""
    items = ((name, record["step"], value) for record in records for name, value in record.items())
    return sorted(item for item in items if item[0] not in ("step", "seconds"))


def recorded(run: Path) -> list[tuple[str, int, float]]:
    """The points in metrics.jsonl."""
    return points([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])


def record(path: Path, steps: range, resumed: Resumed) -> RunRecords:
    """Records intervals of two steps and epochs of four, from a process that resumes; leaves the logger open."""
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
def run(tmp_path: Path) -> Path:
    path = tmp_path / "test" / "1GPU" / "00"
    path.mkdir(parents=True)
    return path


# --- one run over all restarts ---------------------------------------------------------------------------------------


def test_each_offline_process_records_the_run_from_its_first_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process is killed after its last checkpoint. The third is stopped before the end of its epoch."""
    ids = []
    for steps, resumed in (
        (range(0, 6), Resumed(-1)),
        (range(6, 14), Resumed(5)),
        (range(10, 12), Resumed(9)),
        (range(12, 17), Resumed(12, in_epoch=True)),
        (range(0, 3), Resumed(-1)),  # --resume=no
    ):
        wandb = StandIn()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        record(run, steps, resumed).close(Stopped())
        assert wandb.points() == recorded(run)
        assert wandb.rows() == sorted(wandb.rows())
        assert wandb.of("finish") == [{"exit_code": 75}]
        assert wandb.of("mark_preempting") == [{}]
        (start,) = wandb.of("init")
        assert (start["name"], start["group"], start["resume"]) == ("test/1GPU/00", "test", None)
        assert start["config"]["optimizer"]["name"] == "adam"
        assert start["config"]["provenance"]["git_commit"] == "0123abc"
        ids.append(start["id"])
    assert len(set(ids[:4])) == 1
    assert ids[4] != ids[0], "a training run from scratch is another run"


def test_rows_that_the_server_has_are_skipped_and_missing_ones_are_added(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process was killed after step 9; its last checkpoint is of step 8, the last uploaded row of step 6."""
    monkeypatch.setitem(sys.modules, "wandb", StandIn())
    record(run, range(0, 10), Resumed(-1))
    server = StandIn(first_row=13)
    monkeypatch.setitem(sys.modules, "wandb", server)
    record(run, range(9, 15), Resumed(8)).close()
    assert sorted(set(server.rows())) == [16, 17, 20, 24, 25, 28], "two rows per step; the second ends an epoch"
    assert server.of("init")[0]["resume"] == "allow"


@installed
@pytest.mark.slow
def test_a_stopped_training_resumes_its_offline_run(tmp_path: Path, data_flags: list[str]) -> None:
    """With wandb itself."""
    flags = [*data_flags, f"--set=expdir={tmp_path}", "--set=loggers=[wandb]", "--set=report_pictures=false"]
    environment = {**os.environ, "WANDB_MODE": "offline"}
    first = Program(["train.py", "--config=test", *flags], tmp_path / "first", environment=environment)
    first.wait_for("Weights & Biases: offline; upload with: wandb sync")
    first.signal(signal.SIGTERM)
    stopped = first.end()
    assert stopped.returncode == 75, stopped.stderr
    resumed = Program(["train.py", "--config=test", *flags], tmp_path / "second", environment=environment).end()
    assert resumed.returncode == 0, resumed.stderr
    assert "wandb:" not in stopped.stdout + stopped.stderr + resumed.stdout + resumed.stderr
    assert "Cannot record" not in stopped.stderr + resumed.stderr
    folder = directory(tmp_path) / "wandb"
    assert len(list(folder.glob(f"offline-run-*-{(folder / 'id').read_text().strip()}/*.wandb"))) == 2
    assert not (directory(tmp_path) / "logs").exists(), "TensorBoard was not asked for"


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        ("init", RuntimeError("no network\nat all"), "no network at all"),
        ("log", OSError(28, "No space left on device"), "No space left on device"),
        ("update", ConnectionResetError(), "ConnectionResetError"),
        ("finish", TimeoutError(), "TimeoutError"),
    ],
)
def test_a_fault_is_one_warning_and_the_training_continues(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, error: Any, reason: str
) -> None:
    wandb = StandIn(fault, error)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    logger = record(run, range(0, 9), Resumed(-1))
    logger.hparams(None, {"hparam/final loss": 0.5}, 9)  # type: ignore[arg-type]
    logger.close()
    (warning,) = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert warning.startswith(f"Cannot record scalars in {run}: {reason}")
    assert len(wandb.of("init")) == 1, "each attempt may last 30 s"
    assert wandb.calls[-1][0] == "teardown"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 11


@pytest.mark.parametrize(
    ("wandb", "loggers", "line"),
    [
        (None, "[wandb]", "needs the package wandb; pip install -e '.[wandb]'"),
        (StandIn(key=False, first_row=0), "[tensorboard, wandb]", "no API key; run `wandb login`"),
        (
            StandIn("login", ValueError("key: too\nshort"), first_row=0),
            "[wandb]",
            "refuses its settings: key: too short",
        ),
        (None, "[tensorbord]", "unknown logger tensorbord; known: tensorboard, wandb; did you mean tensorboard?"),
    ],
)
def test_a_logger_that_cannot_be_used_is_one_line(
    tmp_path: Path,
    data_flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wandb: Any,
    loggers: str,
    line: str,
) -> None:
    """Before training, and without a run directory."""
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(Path(train.__file__).parent)
    flags = ["--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}", f"--set=loggers={loggers}"]
    with pytest.raises(SystemExit) as ended:
        train.main(flags)
    (last,) = capsys.readouterr().err.splitlines()[-1:]
    assert (ended.value.code, last.startswith("error: "), line in last) == (2, True, True), last
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError) as refused:
        check_loggers(loggers.strip("[]").split(", "), ALONE)
    assert line in str(refused.value)


def test_nothing_is_uploaded_but_what_is_logged() -> None:
    """No code, console, host, requirements, git remote or system metrics."""
    switches = {"save_code": False, "x_save_requirements": False, "console": "off"}
    switches |= {f"disable_{name}": True for name in ("code", "git", "job_creation")}
    switches |= {f"x_disable_{name}": True for name in ("machine_info", "meta", "stats")}
    assert switches.items() <= SETTINGS.items()
