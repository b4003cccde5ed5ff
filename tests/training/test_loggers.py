"""The records of a run: each point once across restarts; a full disk ends no run; how to add a logger."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from disks import fill, small_disk
from log_lines import messages
from trainings import TOP, curves, metrics

from utils.distributed.devices import out_of_memory_for_users
from utils.errors import Stopped, UserError
from utils.log import configure_logging, log_file
from utils.training import loggers
from utils.training.loggers import LOGGERS, build_loggers
from utils.training.loggers.base import LoggedRun, Logger, Resumed, RunRecords
from utils.training.loggers.tensorboard import TensorBoardLogger


def record(logger: Logger, steps: Iterable[int]) -> None:
    for step in steps:
        logger.scalars({"Loss/train": float(step)}, step)


def recorded(run: Path) -> list[int]:
    """The steps in metrics.jsonl, all of whose lines are complete, valid JSON, and those of TensorBoard's curve."""
    text = (run / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    steps = [json.loads(line, parse_constant=pytest.fail)["step"] for line in text.splitlines()]
    assert curves(run)["Loss/train"] == [(step, step) for step in steps]
    return steps


def start(path: Path, resumed: int | None = None) -> RunRecords:
    run = LoggedRun(path) if resumed is None else LoggedRun(path, Resumed(resumed))
    return RunRecords(run, [TensorBoardLogger(run)])


def test_lines_on_a_terminal_are_short(monkeypatch: Any) -> None:
    terminal, long = io.StringIO(), ", ".join(f"key_{number} value-{number}" for number in range(30))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    configure_logging(0)
    logging.getLogger("utils.training.trainer").info(f"Table:\n  a  b\n{long}")
    assert re.match(r"\d\d:\d\d:\d\d INFO Table:\n  a  b\n", terminal.getvalue())
    assert max(map(len, terminal.getvalue().splitlines())) <= 140
    assert long in " ".join(terminal.getvalue().split())


def test_an_interrupted_allocation_is_no_full_memory() -> None:
    """Two Ctrl-C in a row printed that no memory is left."""
    interrupted = MemoryError()
    interrupted.__context__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt), out_of_memory_for_users():
        raise interrupted


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_logs_everything_and_the_others_their_own_warnings(rank: int, tmp_path: Path, capsys: Any) -> None:
    """The lines of utils.training are equal on all ranks. The file gets those from before it was open, once."""
    loop, data = logging.getLogger("utils.training.trainer"), logging.getLogger("utils.data")
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


def test_the_log_file_ends_with_what_ended_the_run(tmp_path: Path) -> None:
    """Fixed: the run directory did not say why the run had ended."""
    for error in (UserError("stopped: \n the disk is full"), KeyboardInterrupt("the checkpoint is kept"), Stopped()):
        with pytest.raises(type(error)), log_file(tmp_path / "out.log"):
            raise error
    lines = ["stopped: the disk is full", "KeyboardInterrupt: the checkpoint is kept"]
    assert messages((tmp_path / "out.log").read_text(), "ERROR") == lines


def test_a_new_run_replaces_the_records_and_a_resumed_one_continues_them(tmp_path: Path) -> None:
    for resumed, steps, kept in (
        (None, range(0, 10), range(0, 10)),
        (6, range(7, 12), range(0, 12)),  # 7 to 9 were made by a process that was killed before it saved
        (6, range(7, 9), range(0, 9)),
        (8, range(9, 9), range(0, 9)),  # complete: nothing more is recorded
        (0, range(1, 4), range(0, 4)),
        (None, range(0, 2), range(0, 2)),
    ):
        with closing(start(tmp_path, resumed)) as run:
            record(run, steps)
        assert recorded(tmp_path) == list(kept)


def test_a_half_written_line_is_removed(tmp_path: Path) -> None:
    """A line that lacks its line end, to which the next record would be appended."""
    with closing(start(tmp_path)) as run:
        record(run, range(4))
    lines = (tmp_path / "metrics.jsonl").read_text()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4')
    with closing(start(tmp_path, 3)) as again:
        record(again, range(4, 6))
    assert recorded(tmp_path) == list(range(6))
    assert (tmp_path / "metrics.jsonl").read_text().startswith(lines), "kept lines are unchanged"


def test_non_finite_values_are_not_recorded(tmp_path: Path) -> None:
    with closing(start(tmp_path)) as run:
        run.scalars({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": 2}, 3)
        run.scalars({"a": math.nan}, 4)
    assert metrics(tmp_path) == [{"step": 3, "d": 1.5, "e": 2}, {"step": 4}]
    assert sorted(curves(tmp_path)) == ["d", "e"]


def test_flushed_points_survive_a_kill(tmp_path: Path) -> None:
    with closing(start(tmp_path)) as run:
        record(run, range(5))
        run.flush()
        assert recorded(tmp_path) == list(range(5))


def test_points_after_the_clock_was_set_back_are_shown(tmp_path: Path) -> None:
    """A fixed bug: the new file came before the earlier one, whose process then hid the new points."""
    with closing(start(tmp_path)) as run:
        record(run, range(5))
    (file,) = (tmp_path / "logs").iterdir()
    file.rename(file.with_name(f"events.out.tfevents.{int(time.time()) + 10_000}.host"))
    with closing(start(tmp_path, 2)) as run:
        record(run, range(3, 7))
    assert recorded(tmp_path) == list(range(7))


def test_a_full_disk_when_tensorboard_creates_its_file_is_one_warning(tmp_path: Path, caplog: Any, capfd: Any) -> None:
    """A fixed bug: each scalar created another file, after a pause, and printed a traceback."""
    with small_disk(tmp_path / "run", "200k") as disk:
        filler = fill(disk)
        with closing(start(disk)) as run:
            record(run, range(5))
            run.flush()
            os.remove(filler)
            record(run, range(5, 10))
        assert caplog.messages == [f"Cannot record scalars in {disk}: No space left on device; the run continues"]
        assert len(os.listdir(disk / "logs")) <= 1
        assert [record["step"] for record in metrics(disk)][-5:] == list(range(5, 10))
    assert "Traceback" not in capfd.readouterr().err


def test_a_logger_that_records_nothing_creates_nothing(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path)
    with closing(RunRecords(run, build_loggers([*LOGGERS], run))) as logger:
        logger.flush()
    assert os.listdir(tmp_path) == []


def test_a_logger_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/logging.md adds it."""
    section = (TOP / "docs/logging.md").read_text(encoding="utf-8").partition("\n## How to add a logger\n")[2]
    source, line = re.findall(r"^```python\n(.*?)^```", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    module = ModuleType("utils.training.loggers.csv")
    exec(compile(source, "docs/logging.md", "exec", dont_inherit=True), vars(module))
    monkeypatch.setattr(loggers, "LOGGERS", LOGGERS | eval(f"{{{line}}}", vars(loggers) | vars(module)))
    for resumed, steps in ((-1, range(3)), (1, range(2, 4))):
        run = LoggedRun(tmp_path, Resumed(resumed))
        with closing(RunRecords(run, build_loggers(["csv"], run))) as logger:
            for step in steps:
                logger.scalars({"a, b": step / 2}, step)
    assert (tmp_path / "scalars.csv").read_text().splitlines() == [f'{step},"a, b",{step / 2}' for step in range(4)]
