"""The rule by which a command uses a new directory or continues an earlier run.

The directories of a run number are <run_num>, <run_num>-2, <run_num>-3, …; the highest
number is the newest. The first row that applies decides:

| the command                                     | uses                                                              |
|-------------------------------------------------|-------------------------------------------------------------------|
| is restarted by its launcher (Slurm, torchrun)  | the run that this job has trained with the same command           |
| has --resume=no                                 | <run_num>, whose run is removed                                   |
| has --resume, or --resume=DIR of such a run     | the newest run, or DIR                                            |
| has the same config as an unfinished, idle run  | that run: it continues where it stopped                           |
| any other                                       | the next free directory, from scratch or from --resume=DIR        |

A run number belongs to the runs that record it in provenance.json, because 00-2 is also the name for task 2 of a job
array.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from utils import config as configs
from utils.cli import Options
from utils.config import Config
from utils.distributed.devices import uses_gpus
from utils.distributed.launch import lasting_jobs
from utils.distributed.locks import is_locked
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import read_json
from utils.provenance import command
from utils.training.checkpoint import FOLDER, saved_steps

LOCK, CONFIG, PROVENANCE, SUMMARY = ".lock", "config.yaml", "provenance.json", "summary.json"


@dataclass(frozen=True)
class Request:
    """A command that needs a run directory.

    directory: the first one of the run number.
    resume: None, auto, no, or the directory of another run or of a checkpoint.
    jobs, restarted: the launchers' names for this job, and those of the launchers that have restarted it.
    """

    config: Config
    name: str
    directory: Path
    resume: str | None = None
    init_from: str | None = None
    jobs: tuple[str, ...] = ()
    restarted: tuple[str, ...] = ()

    @property
    def origin(self) -> str | None:
        """The checkpoint or weights that a new run starts from; None: from scratch."""
        flag, path = (
            ("resume", self.resume) if self.resume not in (None, "auto", "no") else ("init_from", self.init_from)
        )
        return f"--{flag}={os.path.abspath(path)}" if path else None


@dataclass(frozen=True)
class Choice:
    """The directory that a command uses, the value of --resume that counts there, and the reason for the log."""

    path: Path
    resume: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})" if self.reason else str(self.path)


class EarlierRun:
    """The state and the records of a run in its directory."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self.is_finished = finished_steps(path) is not None

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records of the processes that have trained it, latest first; empty if they cannot be read."""
        try:
            latest = read_json(self.path / PROVENANCE)
            return [latest, *reversed(latest.get("earlier", []))]
        except (OSError, ValueError, AttributeError):
            return []

    def belongs_to(self, run_num: str) -> bool:
        return run_num == (self.records[0].get("run_num") if self.records else self.path.name)

    def was_started_by(self, jobs: tuple[str, ...]) -> bool:
        """True if one of these jobs has trained it with the command of this process: a job may have several."""
        return any(
            record.get("command") == command() and set(jobs) & set(record.get("jobs", ())) for record in self.records
        )

    def changes(self, request: Request) -> list[str]:
        """The keys and flags that give the requested run another result; UserError without a readable config."""
        before = configs.load(str(self.path / CONFIG), request.name)
        changes = configs.result_changes(before, request.config)
        origin = self.records[0].get("origin") if self.records else None
        return changes if origin == request.origin else [*changes, str(origin or request.origin).split("=")[0]]

    def why_not_continued(self, request: Request) -> str:
        """The reason, and what --resume would do."""
        if is_locked(self.path / LOCK):
            return "is being trained by another process"
        try:
            changes = self.changes(request)
        except UserError:
            return "has no readable config"
        facts = ["is finished"] * self.is_finished
        facts += [f"differs in {', '.join(changes)}"] if changes else []
        if not saved_steps(self.path / FOLDER):
            return f"{' and '.join(facts)} and has no checkpoint"
        extends = self.is_finished and set(changes) <= {"num_epochs"}
        advice = "with more epochs would extend it" if extends else "continues such a run only if its checkpoint fits"
        return f"{' and '.join(facts)}; --resume {advice}"


def finished_steps(directory: Path) -> int | None:
    """The number of steps of the finished run in a directory; None if it is not finished."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return int(read_json(directory / SUMMARY)["steps"])
    return None


def is_free(path: Path) -> bool:
    """True if no run has begun there."""
    return not os.path.lexists(path) or (path.is_dir() and set(os.listdir(path)) <= {LOCK})


def choose(request: Request, held: Path | None = None) -> Choice:
    """The directory that the command uses, by the table above; changes nothing. `held`: locked by this process."""

    def is_busy(path: Path) -> bool:
        return path != held and is_locked(path / LOCK)

    first, runs = request.directory, _earlier_runs(request.directory)
    for run in runs:
        if run.was_started_by(request.restarted):
            return Choice(run.path, None if request.resume == "no" else request.resume)
    if request.resume == "no" and (is_free(first) or any(run.number == 1 for run in runs)):
        return Choice(first, "no")
    for run in runs:
        if request.resume == "auto" or (request.resume and Path(request.resume).resolve() == run.path.resolve()):
            return Choice(run.path, request.resume)
    for run in runs:
        with contextlib.suppress(UserError):  # no readable config
            if not run.is_finished and not run.changes(request) and not is_busy(run.path):
                return Choice(run.path, request.resume)
    reason = f"{runs[0].path.name} {runs[0].why_not_continued(request)}" if runs else ""
    if request.resume == "auto":  # no error: a job script may always give --resume, also for its first start
        reason = "--resume has found no run to resume"
    numbers = range(runs[0].number + 1 if runs else 1, 1_000_000)
    path = next(path for n in numbers if is_free(path := _numbered(first, n)) and not is_busy(path))
    if path != first and not reason:
        reason = f"{first.name} belongs to another run"
    return Choice(path, request.resume, reason)


def _earlier_runs(directory: Path) -> list[EarlierRun]:
    """The runs of a run number, newest first."""
    pattern = re.compile(re.escape(directory.name) + r"(?:-([2-9]|[1-9]\d+))?", re.ASCII)
    names = os.listdir(directory.parent) if directory.parent.is_dir() else []
    matches = [(match, directory.with_name(name)) for name in names if (match := pattern.fullmatch(name))]
    runs = [EarlierRun(path, int(match[1] or 1)) for match, path in matches if path.is_dir() and not is_free(path)]
    own = [run for run in runs if run.belongs_to(directory.name)]
    return sorted(own, key=lambda run: run.number, reverse=True)


def _numbered(directory: Path, number: int) -> Path:
    return directory if number == 1 else directory.with_name(f"{directory.name}-{number}")


def run_directory(config: Config, name: str, run_num: str, ranks: int) -> Path:
    """The first directory of a run number: <expdir>/<config>/<ranks>GPU/<run_num>, as in the tutorial.

    On CPUs <ranks>ranks takes the place of <ranks>GPU.
    """
    return Path(config.expdir) / name / f"{ranks}{'GPU' if uses_gpus(config.device) else 'ranks'}" / run_num


def run_request(config: Config, options: Options, world: World) -> Request:
    """The request of a command line; every rank calls it."""
    directory = run_directory(config, options.config, options.run_num, world.size)
    everywhere = world.gather_json(lasting_jobs())
    jobs, restarts = (tuple(sorted({job for jobs in part for job in jobs})) for part in zip(*everywhere, strict=True))
    return Request(config, options.config, directory, options.resume, options.init_from, jobs, restarts)
