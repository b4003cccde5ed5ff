"""The table of loggers; docs/logging.md says how to add one, and how to start a sweep, and these tests follow it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import train
from utils.training import loggers
from utils.training.loggers import LOGGERS, build_loggers
from utils.training.loggers.base import LoggedRun, Resumed, RunLogger

TOP = Path(__file__).parent.parent.parent
SECTIONS = re.split(r"^## ", (TOP / "docs/logging.md").read_text(encoding="utf-8"), flags=re.MULTILINE)


def code(title: str) -> list[str]:
    """The Python blocks of a section."""
    (section,) = (section for section in SECTIONS if section.startswith(f"{title}\n"))
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_without_loggers_a_run_has_its_log_and_metrics(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path)
    with RunLogger(run, build_loggers([], run)) as logger:
        logger.scalars({"Loss/train": 1.0}, 0)
        logger.figure("Slices", None, 0)
        logger.flush()
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "out.log"]


def test_a_logger_that_is_named_twice_is_built_once(tmp_path: Path) -> None:
    built = build_loggers(["wandb", "tensorboard", "wandb"], LoggedRun(tmp_path))
    assert list(map(type, built)) == [LOGGERS["wandb"].build, LOGGERS["tensorboard"].build]


@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_that_records_nothing_creates_nothing(name: str, tmp_path: Path) -> None:
    run = LoggedRun(tmp_path)
    with RunLogger(run, build_loggers([name], run)) as logger:
        logger.flush()
    assert os.listdir(tmp_path) == ["out.log"]


def test_a_logger_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, line = code("How to add a logger")
    module = ModuleType("utils.runs.csv_logger")
    exec(compile(source, "docs/logging.md", "exec", dont_inherit=True), vars(module))
    monkeypatch.setattr(loggers, "LOGGERS", LOGGERS | eval(f"{{{line}}}", vars(loggers) | vars(module)))
    for resumed, steps in ((-1, range(3)), (1, range(2, 4))):
        run = LoggedRun(tmp_path, Resumed(resumed))
        with RunLogger(run, build_loggers(["csv"], run)) as logger:
            for step in steps:
                logger.scalars({"a, b": step / 2}, step)
    assert (tmp_path / "scalars.csv").read_text().splitlines() == [f'{step},"a, b",{step / 2}' for step in range(4)]


def test_each_task_of_a_sweep_has_values_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real job array is in tests/slurm/test_submit.py."""
    (source,) = code("A sweep as a job array")
    given: list[list[str]] = []
    monkeypatch.setattr(train, "main", given.append)
    monkeypatch.setattr(sys, "argv", ["train_sweep.py", "--config=short"])
    for task in range(6):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        with pytest.raises(SystemExit):
            exec(compile(source, "docs/logging.md", "exec", dont_inherit=True), {})
    assert given[3] == ["--config=short", "--set=lr_schedule.start_lr=2e-4", "--set=seed=1"]
    assert len(set(map(tuple, given))) == 6
