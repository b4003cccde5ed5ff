"""Chooses the run directory of a training: that of the interrupted run that it continues, or the next free one.

The directories of a run number are <run_num>, <run_num>-2, <run_num>-3, …; the highest number is the newest. A
directory belongs to the run number in its provenance.json, because 00-2 is also the name for task 2 of a job array.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from utils import config as configs
from utils.config import Config
from utils.errors import UserError, os_errors_for_users
from utils.files import read_json
from utils.provenance import command
from utils.runs.summary import finished_steps
from utils.training.checkpoint import FOLDER, saved_steps

LOCK = ".lock"
LOCK_FILES = {LOCK}  # left by a process that was killed before it trained


@dataclass(frozen=True)
class Request:
    """A training that needs a directory.

    directory: the first one of the run number, see run_directory.
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
    def source(self) -> str | None:
        """The run or checkpoint that --resume names."""
        return None if self.resume in ("auto", "no") else self.resume

    @property
    def origin(self) -> str | None:
        """The checkpoint or weights that a new run starts from; None: from scratch."""
        flag, path = ("resume", self.source) if self.source else ("init_from", self.init_from)
        return f"--{flag}={os.path.abspath(path)}" if path else None


@dataclass(frozen=True)
class Choice:
    """The chosen directory.

    resume: no if its checkpoints are to be replaced, else as in Request: its own checkpoints take precedence.
    reason: why the newest run is not continued, for the log.
    newest: a run that is not continued, but must not be locked.
    record: entries of provenance.json by which later processes choose.
    """

    path: Path
    resume: str | None = None
    reason: str = ""
    newest: Path | None = None
    warnings: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})" if self.reason else str(self.path)


def choose(request: Request) -> Choice:
    """The directory that the training belongs in; changes nothing."""
    with run_directory_errors(request.directory):
        choice = _choose(request, _runs(request.directory))
    record = {"run_num": request.directory.name, "jobs": request.jobs, "origin": request.origin}
    return replace(choice, record=record)


def _choose(request: Request, runs: list[_Run]) -> Choice:
    """`runs` are all of the run number, newest first."""
    for run in runs:
        if run.was_started_by(request.restarted):
            return Choice(run.path, None if request.resume == "no" else request.resume)
    if request.resume == "no":
        first = any(run.number == 1 for run in runs) or is_free(request.directory)
        return Choice(request.directory if first else _next_free(request.directory, runs), "no")
    for run in runs:
        if request.resume == "auto" or (request.source and os.path.realpath(request.source) == str(run.path.resolve())):
            return Choice(run.path, request.resume)
    warnings: list[str] = []
    if request.resume == "auto":  # no error: a job script may always give --resume, also for its first start
        warnings.append(f"--resume: no run to resume in {request.directory}; a new training starts")
    for run in runs:
        try:
            if not run.is_finished and not run.changes(request):
                return Choice(run.path, request.resume, warnings=tuple(warnings))
        except UserError as error:
            warnings.append(f"{run.path} is not resumed: {error}")
    path, newest = _next_free(request.directory, runs), runs[0].path if runs else None
    reason = f"{request.directory.name} belongs to another run" if path != request.directory else ""
    if newest is not None:
        reason = f"{newest.name} {runs[0].why_not_continued(request)}"
    return Choice(path, request.resume, reason, newest, tuple(warnings))


class _Run:
    """The records and the state of a run in its directory."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self._steps = finished_steps(path)
        self.is_finished = self._steps is not None

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records of the processes that have trained it, latest first; empty if they cannot be read."""
        try:
            latest = read_json(self.path / "provenance.json")
        except (OSError, ValueError):
            return []
        earlier = latest.get("earlier") if isinstance(latest, dict) else None
        return [each for each in (latest, *(earlier if isinstance(earlier, list) else [])) if isinstance(each, dict)]

    def belongs_to(self, run_num: str) -> bool:
        """A directory whose records are missing or damaged belongs to the run number that is its name."""
        recorded = self.records[0].get("run_num") if self.records else None
        return run_num == (self.path.name if recorded is None else recorded)

    def was_started_by(self, jobs: tuple[str, ...]) -> bool:
        """True if one of these jobs has trained it with the command of this process: a job may have several."""
        return any(
            record.get("command") == command() and set(jobs) & set(map(str, record["jobs"]))
            for record in self.records
            if isinstance(record.get("jobs"), list)
        )

    def changes(self, request: Request) -> list[str]:
        """The keys and flags that give the requested training another result; UserError without a readable config."""
        before = configs.load(str(self.path / "config.yaml"), request.name)
        changes = configs.result_changes(before, request.config)
        origin = self.records[0].get("origin") if self.records else None
        return changes if origin == request.origin else [*changes, str(origin or request.origin).split("=")[0]]

    def why_not_continued(self, request: Request) -> str:
        """The reason, and what --resume would do as far as that is certain."""
        facts, changes = ["is finished"] * self.is_finished, []
        try:
            changes = self.changes(request)
        except UserError:
            facts.append("has no readable config")
        is_longer = changes == ["num_epochs"] and request.config.total_steps > (self._steps or 0)
        if self.is_finished and is_longer:
            advice = f"--resume would extend it to {request.config.num_epochs} epochs"
        elif self.is_finished and len(facts) == 1 and set(changes) <= {"num_epochs"}:
            advice = "--resume with more epochs would extend it"
        else:
            facts += [f"differs in {', '.join(changes)}"] if changes else []
            advice = "--resume continues such a run only if its checkpoint fits"
        if not saved_steps(self.path / FOLDER):
            return f"{' and '.join(facts)} and has no checkpoint"
        may_have_stopped_early = self.is_finished and request.config.early_stopping.patience is not None
        return " and ".join(facts) + ("" if may_have_stopped_early else f"; {advice}")


def _runs(directory: Path) -> list[_Run]:
    """The runs of a run number, newest first."""
    numbered = re.compile(re.escape(directory.name) + r"(?:-([2-9]|[1-9]\d+))?", re.ASCII)
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory.parent):
            match, path = numbered.fullmatch(name), directory.with_name(name)
            if match is not None and path.is_dir() and not is_free(path):
                found.append(_Run(path, int(match[1] or 1)))
    own = [run for run in found if run.belongs_to(directory.name)]
    return sorted(own, key=lambda run: run.number, reverse=True)


def _next_free(directory: Path, runs: list[_Run]) -> Path:
    """The first free name after the newest run; other run numbers may have taken some."""
    number = runs[0].number if runs else 0
    while True:
        number += 1
        path = directory if number == 1 else directory.with_name(f"{directory.name}-{number}")
        if is_free(path):
            return path


def is_free(path: Path) -> bool:
    """True if no run has begun there."""
    return not os.path.lexists(path) or (path.is_dir() and set(os.listdir(path)) <= LOCK_FILES)


def run_directory_errors(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Converts OSErrors to UserErrors."""
    return os_errors_for_users(f"cannot write to the run directory {directory}", "choose another with --set expdir=DIR")
