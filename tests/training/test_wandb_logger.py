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
import torch
from processes import Program, context, run_ranks
from trainings import directory
from wandb_files import OfflineRun, read_offline_run
from wandb_server import WandbServer

import train
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import Stopped, UserError
from utils.training.loggers import build_loggers, check_loggers
from utils.training.loggers.base import LoggedRun, Resumed, RunLogger
from utils.training.loggers.wandb import SETTINGS, check_wandb

ALONE = World(Launch("test"), torch.device("cpu"))
installed = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
RUN = Path("test", "1GPU", "00")


def offline_runs(run: Path) -> list[OfflineRun]:
    """One for each process, oldest first."""
    return [read_offline_run(folder) for folder in sorted((run / "wandb").glob("offline-run-*"))]


def points(rows: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """All points as (name, step, value); names that W&B adds begin with an underscore."""
    return sorted(
        (name, row["step"], value)
        for row in rows
        for name, value in row.items()
        if name not in ("step", "seconds") and not name.startswith("_")
    )


def recorded(run: Path) -> list[tuple[str, int, float]]:
    """The points in metrics.jsonl."""
    found = points([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert len(set(found)) == len(found)
    return found


def record(path: Path, steps: range, resumed: Resumed, end: BaseException | None = None) -> RunLogger:
    """Records intervals of two steps and epochs of four, from a process that resumes; leaves the logger open."""
    run = LoggedRun(path, resumed, {"optimizer": {"name": "adam"}}, {"git_commit": "0123abc"})
    logger = RunLogger(run, build_loggers(["wandb"], run))
    for step in steps:
        if step % 2 == 0 and step > resumed.step:
            logger.scalars({"Step/loss": step / 7, "Step/learning rate": 1.0}, step)
        if step % 4 == 0:
            logger.scalars({"Learning Rate": 1.0}, step)
            logger.scalars({"Loss/valid": step / 3}, step)
    return logger


# --- offline, with wandb itself --------------------------------------------------------------------------------------


def offline_histories(_: World, path: str) -> list[tuple[str, list[Any], list[Any]]]:
    """After each of several processes: the id, and the points that the newest offline directory and metrics.jsonl hold.

    The first is stopped. The second is killed after its last checkpoint. The third is stopped before the validation
    that ends its epoch, which the fourth repeats.
    """
    os.environ["WANDB_MODE"] = "offline"
    run, found = Path(path), []
    run.mkdir(parents=True)
    processes = (
        (range(0, 6), Resumed(-1)),
        (range(6, 14), Resumed(5)),
        (range(10, 12), Resumed(9)),
        (range(12, 17), Resumed(12, in_epoch=True)),
        (range(0, 3), Resumed(-1)),  # --resume=no
    )
    for number, (steps, resumed) in enumerate(processes):
        logger = record(run, steps, resumed)
        if number == 2:
            logger.scalars({"Step/loss": 0.5, "Step/learning rate": 1.0}, 12)
        logger.close(Stopped())
        newest = {folder: folder.stat().st_mtime_ns for folder in (run / "wandb").glob("offline-run-*/*.wandb")}
        last = read_offline_run(max(newest, key=lambda file: newest[file]).parent)
        assert last.id == (run / "wandb" / "id").read_text().strip()
        assert ("preempting" in last.kinds, last.exit_code) == (True, 75)
        assert [row["_step"] for row in last.rows] == sorted({row["_step"] for row in last.rows})
        found.append((last.id, points(last.rows), recorded(run)))
    return found


@installed
def test_each_offline_directory_holds_the_run_from_its_first_step(tmp_path: Path) -> None:
    (histories,) = run_ranks(offline_histories, 1, str(tmp_path / RUN))
    for _, uploaded, written in histories:
        assert uploaded == written
    ids = [history[0] for history in histories]
    assert len(set(ids[:4])) == 1
    assert ids[4] != ids[0], "a training run from scratch is another run"


@installed
@pytest.mark.slow
def test_a_stopped_training_resumes_its_offline_run(tmp_path: Path, data_flags: list[str]) -> None:
    flags = [*data_flags, f"--set=expdir={tmp_path}", "--set=loggers=[wandb]", "--set=report_pictures=false"]
    command = ["train.py", "--config=test", *flags]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_PROJECT": "gas"}
    first = Program(command, tmp_path / "first", environment=environment)
    first.wait_for("Weights & Biases: offline; upload with: wandb sync")
    first.signal(signal.SIGTERM)
    stopped = first.end()
    assert stopped.returncode == 75, stopped.stderr
    resumed = Program(command, tmp_path / "second", environment=environment).end()
    assert resumed.returncode == 0, resumed.stderr
    assert "wandb:" not in stopped.stdout + stopped.stderr + resumed.stdout + resumed.stderr
    run = directory(tmp_path)
    before, after = offline_runs(run)
    assert (before.id, before.exit_code, after.exit_code) == (after.id, 75, 0)
    assert "preempting" in before.kinds
    assert points(after.rows) == recorded(run)
    assert (after.name, after.project, after.group) == ("/".join(run.parts[-3:]), "gas", "test")
    assert after.config["optimizer"]["name"] == "adam"
    assert after.config["provenance"]["command"] == command
    assert after.summary["hparam/final loss"] == json.loads((run / "summary.json").read_text())["final_loss"]
    assert after.kinds <= {"header", "run", "telemetry", "metric", "history", "summary", "config", "exit", None}
    assert not (run / "logs").exists(), "TensorBoard was not asked for"


# --- online, with wandb itself and a server of our own ---------------------------------------------------------------


def record_online(path: str, address: str, steps: range, resumed: Resumed, killed: bool) -> None:
    os.environ |= {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40}
    os.environ.pop("WANDB_MODE", None)
    check_wandb()
    logger = record(Path(path), steps, resumed)
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    logger.close()


@installed
@pytest.mark.slow
def test_the_server_gets_each_point_once_over_kills(tmp_path: Path) -> None:
    """Points that were uploaded after the last checkpoint are not repeated; those that were not are added."""
    path = tmp_path / RUN
    path.mkdir(parents=True)
    with WandbServer() as server:
        for steps, resumed, killed in (
            (range(0, 10), Resumed(-1), True),
            (range(3, 14), Resumed(2), True),
            (range(9, 15), Resumed(8), False),
            (range(11, 21), Resumed(10), False),
        ):
            process = context().Process(target=record_online, args=(str(path), server.address, steps, resumed, killed))
            process.start()
            process.join()
            assert process.exitcode == (-signal.SIGKILL if killed else 0)
        (history,) = server.histories.values()
    assert points(history) == recorded(path)
    assert server.received == len(history), "a resumed run uploads only what the server lacks"


# --- faults, with a stand-in for wandb -------------------------------------------------------------------------------


class StandIn(SimpleNamespace):
    """The module wandb; counts the calls, and raises `error` in the function named `fault`."""

    def __init__(self, fault: str, error: Exception, version: str = "0.31.0", key: bool = True) -> None:
        self.calls: list[str] = []

        def function(name: str, result: Any = None) -> Callable[..., Any]:
            def call(*_: Any, **__: Any) -> Any:
                self.calls.append(name)
                if name == fault:
                    raise error
                return result

            return call

        names = ("log", "finish", "define_metric", "mark_preempting")
        run = SimpleNamespace(**{name: function(name) for name in names}, summary=SimpleNamespace())
        run.summary.update = function("update")
        run.starting_step, run.disabled, run.url, run.sync_dir = 0, False, "https://example.org", "/run"
        super().__init__(
            __version__=version,
            Settings=lambda **_: SimpleNamespace(mode="online"),
            setup=lambda settings: SimpleNamespace(settings=settings),
            login=function("login", key),
            init=function("init", run),
            teardown=function("teardown"),
        )


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        ("init", RuntimeError("no network\nat all"), "no network at all"),
        ("log", OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        ("update", ConnectionResetError(), "ConnectionResetError"),
        ("finish", TimeoutError(), "no answer within 30 s; upload the rest with: wandb sync --include-online /run"),
    ],
)
def test_a_fault_is_one_warning_and_the_training_continues(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    error: Exception,
    reason: str,
) -> None:
    stand_in = StandIn(fault, error)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    path = tmp_path / RUN
    path.mkdir(parents=True)
    logger = record(path, range(0, 9), Resumed(-1))
    logger.hparams(None, {"hparam/final loss": 0.5}, 9)
    logger.close()
    warnings = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert warnings == [f"Cannot record scalars in {path}: Weights & Biases: {reason}; the run continues"]
    assert stand_in.calls.count("init") == 1, "each attempt may last 30 s"
    assert stand_in.calls[-1] == "teardown"
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 11


@pytest.mark.parametrize(
    ("wandb", "loggers", "line"),
    [
        (None, "[wandb]", "needs the package wandb; pip install -e '.[wandb]'"),
        (StandIn("", OSError(), version="0.30.2"), "[wandb]", "wandb 0.30.2 is too old; pip install -e '.[wandb]'"),
        (StandIn("", OSError(), key=False), "[tensorboard, wandb]", "no API key; run `wandb login`"),
        (
            StandIn("login", ValueError("key: too\nshort")),
            "[wandb]",
            "refuses its settings: key: too short; correct the",
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
    names = ("code", "git", "job_creation")
    switches |= {f"disable_{name}": True for name in names}
    switches |= {f"x_disable_{name}": True for name in ("machine_info", "meta", "stats")}
    assert switches.items() <= SETTINGS.items()
