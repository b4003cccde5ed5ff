"""The records of a run, also those of W&B: each point once; no fault ends a run; how to add a logger."""

import json
import logging
import math
import os
import re
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from log_lines import messages, refusal
from processes import Program
from trainings import TOP, YAML, curves, directory, metrics

import train
from utils import cli
from utils.config import load
from utils.distributed.devices import out_of_memory_for_users
from utils.errors import Stopped, UserError
from utils.log import configure_logging, log_file, once_per_job
from utils.optim.schedules import Schedule
from utils.run import loggers
from utils.run.directory import RunDirectory
from utils.run.loggers import LOGGERS, build_loggers
from utils.run.loggers.base import LoggedRun, RunRecords
from utils.run.loggers.tensorboard import TensorBoardLogger
from utils.run.loggers.wandb import SETTINGS


def start(path: Path, resumed: int = -1) -> RunRecords:
    run = LoggedRun(RunDirectory(path), resumed)
    return RunRecords(run, [TensorBoardLogger(run)], time.perf_counter)


def test_an_interrupted_allocation_is_no_full_memory() -> None:
    """Two Ctrl-C in a row printed that no memory is left."""
    interrupted = MemoryError()
    interrupted.__context__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), out_of_memory_for_users():
        raise interrupted


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_logs_everything_and_the_others_their_own_warnings(rank: int, tmp_path: Path, capsys: Any) -> None:
    """Lines that are equal on all ranks are logged once. The file gets those from before it was open, once."""
    loop, data = once_per_job("utils.training.trainer"), logging.getLogger("utils.data")
    configure_logging(rank)
    try:
        loop.info("early")
        for name in ("first", "second"):
            with log_file(tmp_path / name):
                loop.info(f"{name} line")
                loop.warning(f"{name} skipped update")
                data.warning(f"{name} slow disk")
    finally:
        configure_logging(0)
    printed = messages(capsys.readouterr().err)
    if rank == 0:
        lines = [[f"{name} line", f"{name} skipped update", f"{name} slow disk"] for name in ("first", "second")]
        assert printed == ["early", *lines[0], *lines[1]]
        assert messages((tmp_path / "first").read_text()) == ["early", *lines[0]]
        assert messages((tmp_path / "second").read_text()) == lines[1]
    else:
        assert printed == ["first slow disk", "second slow disk"]


def test_a_line_of_the_log_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed: an interrupt between a line and its end put the program's last line behind it."""
    configure_logging(0)
    monkeypatch.setattr(sys, "stderr", stream := mock.Mock(**{"isatty.return_value": False}))
    logging.getLogger("project").warning("one line")
    (text,) = (call.args[0] for call in stream.write.mock_calls)
    assert text.endswith("one line\n")


def test_the_log_file_ends_with_what_ended_the_run(tmp_path: Path) -> None:
    """Fixed: the run directory did not say why the run had ended."""
    for error in (UserError("stopped: \n the disk is full"), KeyboardInterrupt("the checkpoint is kept"), Stopped()):
        with pytest.raises(type(error)), log_file(tmp_path / "out.log"):
            raise error
    lines = ["stopped: the disk is full", "KeyboardInterrupt: the checkpoint is kept"]
    assert messages((tmp_path / "out.log").read_text(), "ERROR") == lines


def test_non_finite_values_are_not_recorded(tmp_path: Path) -> None:
    with closing(start(tmp_path)) as run:
        run.scalars({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": 2}, 3)
        run.scalars({"a": math.nan}, 4)
    assert metrics(tmp_path) == [{"step": 3, "d": 1.5, "e": 2}, {"step": 4}]
    assert sorted(curves(tmp_path)) == ["d", "e"]


def test_points_after_the_clock_was_set_back_are_shown(tmp_path: Path) -> None:
    """A fixed bug: the new file came before the earlier one, whose process then hid the new points."""
    with closing(start(tmp_path)) as run:
        for step in range(5):
            run.scalars({"Loss/train": float(step)}, step)
    (file,) = (tmp_path / "logs").iterdir()
    file.rename(file.with_name(f"events.out.tfevents.{int(time.time()) + 10_000}.host"))
    with closing(start(tmp_path, 2)) as run:
        for step in range(3, 7):
            run.scalars({"Loss/train": float(step)}, step)
    assert curves(tmp_path)["Loss/train"] == [(step, step) for step in range(7)]


def test_training_records_the_curves_of_the_tutorial(tmp_path: Path, data_flags: list[str], monkeypatch: Any) -> None:
    """A page of 113 hyperparameters showed the first five by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    flags = ["--config=test", *data_flags, f"--set=expdir={tmp_path}", "--run_num=first"]
    flags += ["--set=use_cache=None", "--set=report_pictures=true"]
    monkeypatch.chdir(TOP)
    monkeypatch.setattr("sys.argv", ["train.py", *flags])
    train.main()
    directory = tmp_path / "test/1ranks/first"
    points = {tag: dict(points) for tag, points in curves(directory).items()}
    schedule = Schedule(load(YAML, "test", cli.parse(flags).overrides).for_world(1))
    assert list(points["Loss/train"]) == list(points["Loss/valid"]) == [0, 8, 16]
    assert points["Learning Rate"] == pytest.approx({step: schedule(max(step - 1, 0)) for step in (0, 8, 16)})
    assert list(points["Avg iters per sec"]) == [8, 16]
    log = (directory / "out.log").read_text()
    assert messages(log)[-1] == "DONE ---- rank 0"
    for name, word in (("Loss/train", "train loss="), ("Loss/valid", "val loss=")):
        line = rf"  Avg {word}(\d\.\d{{6}})" + r"  Total validation time: [\d.]+ sec" * word.startswith("val")
        logged = [float(value) for value in re.findall(f"{line}$", log, re.MULTILINE)]
        assert list(points[name].values())[-len(logged) :] == pytest.approx(logged, abs=1e-6)
    assert list(points["hparam/final loss"].values()) == pytest.approx([points["Loss/valid"][16]])
    events = EventAccumulator(str(directory / "logs")).Reload()
    assert events.Tags()["images"] == ["Slices", "Slices, largest error"]
    content = events.PluginTagToContent("hparams")["_hparams_/experiment"]
    shown = [(not info.differs, info.name) for info in HParamsPluginData.FromString(content).experiment.hparam_infos]
    first = {"lr_schedule.start_lr", "optimizer.name", "network.width", "global_batch_size", "num_epochs"}
    assert {name for _, name in sorted(shown)[:5]} == first
    assert not {"optimizer.eps", "train_path"} & {name for _, name in shown}, "a default, and no effect on results"


def test_a_logger_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (TOP / "docs/logging.md").read_text(encoding="utf-8").partition("\n## How to add a logger\n")[2]
    source, line = re.findall(r"^```python\n(.*?)^```", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    module = ModuleType("utils.run.loggers.csv")
    exec(compile(source, "docs/logging.md", "exec", dont_inherit=True), vars(module))
    monkeypatch.setattr(loggers, "LOGGERS", LOGGERS | eval(f"{{{line}}}", vars(loggers) | vars(module)))
    for resumed, steps in ((-1, range(3)), (1, range(2, 4))):
        run = LoggedRun(RunDirectory(tmp_path), resumed)
        with closing(RunRecords(run, build_loggers(["csv"], run), time.perf_counter)) as logger:
            for step in steps:
                logger.scalars({"a, b": step / 2}, step)
    assert (tmp_path / "scalars.csv").read_text().splitlines() == [f'{step},"a, b",{step / 2}' for step in range(4)]


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
    items = ((name, record["step"], value) for record in records for name, value in record.items())
    return sorted(item for item in items if item[0] not in ("step", "seconds"))


def record_with(wandb: mock.Mock, path: Path, steps: range, resumed: int = -1, in_epoch: bool = False) -> RunRecords:
    """Records intervals of two steps and epochs of four, from a process that resumes; leaves the logger open."""
    sys.modules["wandb"] = wandb
    run = LoggedRun(RunDirectory(path), resumed, in_epoch, {"optimizer": {"name": "adam"}}, {"git_commit": "0123abc"})
    logger = RunRecords(run, build_loggers(["wandb"], run), time.perf_counter)
    for step in steps:
        if step % 2 == 0 and step > resumed:
            logger.scalars({"Step/loss": step / 7, "Step/learning rate": 1.0}, step)
        if step % 4 == 0:
            logger.scalars({"Learning Rate": 1.0}, step)
            logger.scalars({"Loss/valid": step / 3}, step)
    return logger


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setitem(sys.modules, "wandb", None)  # restores it
    path = tmp_path / "test" / "1GPU" / "00"
    path.mkdir(parents=True)
    return path


def test_each_offline_process_records_the_run_from_its_first_step(run: Path) -> None:
    """The second process is killed after its last checkpoint. The third is stopped before the end of its epoch."""
    ids = []
    for steps, resumed in (
        (range(0, 6), -1),
        (range(6, 14), 5),
        (range(10, 12), 9),
        (range(12, 17), 12),
        (range(0, 3), -1),  # --resume=no
    ):
        wandb = stand_in()
        record_with(wandb, run, steps, resumed, resumed == 12).close(Stopped())
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
    record_with(stand_in(), run, range(0, 10))
    server = stand_in(first_row=13)
    record_with(server, run, range(9, 15), 8).close()
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
def test_a_fault_is_one_warning_and_no_end(run: Path, caplog: Any, fault: str, error: Any, reason: str) -> None:
    wandb = stand_in(**{fault: error})
    logger = record_with(wandb, run, range(0, 9))
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
        (None, "[tensorbord]", "unknown name tensorbord; known: tensorboard, wandb; did you mean tensorboard?"),
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
