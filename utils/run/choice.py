"""Chooses the directory of a run, a new or an earlier one; docs/reliability.md has a table of the rules, in order."""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from utils import config as configs
from utils.cli import Options
from utils.config import Config
from utils.distributed.devices import uses_gpus
from utils.distributed.launch import lasting_jobs
from utils.distributed.rendezvous import text_digest
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import is_locked
from utils.run.checkpoint import saved_steps
from utils.run.directory import RunDirectory
from utils.run.provenance import DIGEST, command, data_record
from utils.volumes.opened import Volumes


@dataclass(frozen=True)
class RunRequest:
    """A command that needs a run directory.

    directory: the first one of the run number.
    resume: None, auto, no, or the directory of another run or of a checkpoint.
    jobs, restarted: the launchers' names for this job, and those of the launchers that have restarted it.
    data: the record of the data files, see `data_record`.
    """

    config: Config
    name: str
    directory: RunDirectory
    resume: str | None = None
    init_from: str | None = None
    jobs: tuple[str, ...] = ()
    restarted: tuple[str, ...] = ()
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def origin(self) -> str | None:
        """The checkpoint or weights that a new run starts from; None: from scratch."""
        if self.resume not in (None, "auto", "no"):
            return f"--resume={os.path.abspath(self.resume)}"
        return f"--init_from={os.path.abspath(self.init_from)}" if self.init_from else None


@dataclass(frozen=True)
class Choice:
    """The directory that a command uses, the value of --resume that counts there, and the reason for the log."""

    directory: RunDirectory
    resume: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.directory} ({self.reason})" if self.reason else str(self.directory)


class EarlierRun:
    def __init__(self, directory: RunDirectory, number: int) -> None:
        self.directory, self.number, self.is_finished = directory, number, directory.summary.exists()

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The records of the processes that have trained it, latest first; some may lack keys."""
        latest = self.directory.read_provenance()
        return [latest, *reversed(latest.get("earlier", []))]

    def changes(self, request: RunRequest) -> list[str]:
        """Keys, files and flags that make it another run, or an invalid config's name; UserError if reading fails."""
        try:
            before = configs.load(str(self.directory.config), request.name)
        except UserError as error:
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                raise
            return [self.directory.config.name]
        changes, moved = configs.run_changes(before, request.config), configs.differences(request.config, before)
        data = self.records[0].get("data", {})
        for name, record in request.data.items():
            if re.split(r"[\[:]", name)[0] in moved and data.get(name, {}).get(DIGEST) != record[DIGEST]:
                changes.append(name)
        origin = self.records[0].get("origin")
        return changes if origin == request.origin else [*changes, str(origin or request.origin).split("=")[0]]

    def why_not_continued(self, request: RunRequest) -> str:
        name = self.directory.path.name
        if is_locked(self.directory.lock):
            return f"{name} is being trained by another process"
        changes = self.changes(request)
        facts = ["is finished"] * self.is_finished + [f"differs in {', '.join(changes)}"] * bool(changes)
        return f"{name} {' and '.join(facts)}; --resume would use it"


def choose(request: RunRequest) -> Choice:
    """The directory that the command uses; changes nothing."""
    first, runs = request.directory, _earlier_runs(request.directory)
    for run in runs:
        same_command = [record for record in run.records if record.get("command") == command()]  # a job may have others
        if any({*request.restarted} & {*record.get("jobs", ())} for record in same_command):
            return Choice(run.directory, None if request.resume == "no" else request.resume)
    if request.resume == "no" and (first.is_free or any(run.number == 1 for run in runs)):
        return Choice(first, "no")
    if request.resume == "auto":
        _refuse_other_ranks(request)
    named = Path(request.resume).resolve() if request.resume else None
    asked = (run for run in runs if request.resume == "auto" or run.directory.path.resolve() == named)
    idle = (run for run in runs if not (run.is_finished or run.changes(request) or is_locked(run.directory.lock)))
    if used := next(chain(asked, idle), None):
        return Choice(used.directory, request.resume)
    reason = runs[0].why_not_continued(request) if runs else ""
    if request.resume == "auto":  # no error: a job script may always give --resume, also for its first start
        reason = "--resume has found no run to resume"
    numbers = range(runs[0].number + 1 if runs else 1, 1_000_000)
    directory = next(free for n in numbers if (free := _numbered(first, n)).is_free and not is_locked(free.lock))
    if directory.path != first.path and not reason:
        held = is_locked(first.lock)
        reason = f"{first.path.name} {'is being trained by another process' if held else 'belongs to another run'}"
    return Choice(directory, request.resume, reason)


def _refuse_other_ranks(request: RunRequest) -> None:
    """Raises UserError if the newest run with a checkpoint has another number of ranks or kind of device."""
    here, kind = request.directory.path, re.compile(r"\d+(GPU|ranks)", re.ASCII)
    places = [RunDirectory(p / here.name) for p in here.parents[1].glob("*") if kind.fullmatch(p.name)]
    saved = [run.directory for p in places for run in _earlier_runs(p) if saved_steps(run.directory.checkpoints)]
    newest = max(saved, key=lambda run: run.checkpoints.stat().st_mtime, default=request.directory)
    if newest.path.parent != here.parent:
        remedy = f"to continue it in a new directory, give --resume={newest}"
        with contextlib.suppress(UserError):  # the config may be damaged
            batch = configs.load(str(newest.config), request.name).global_batch_size
            remedy += f" --set=global_batch_size={batch}" if batch != request.config.global_batch_size else ""
        raise UserError(f"--resume: the newest run is {newest}, on other ranks than {here.parent.name}; {remedy}")


def _earlier_runs(first: RunDirectory) -> list[EarlierRun]:
    """The runs of a run number, newest first."""
    parent = first.path.parent
    pattern = re.compile(re.escape(first.path.name) + r"(?:-([2-9]|[1-9]\d+))?", re.ASCII)
    names = os.listdir(parent) if parent.is_dir() else []
    numbers = sorted((int(match[1] or 1) for name in names if (match := pattern.fullmatch(name))), reverse=True)
    runs = [EarlierRun(_numbered(first, number), number) for number in numbers]
    begun = [run for run in runs if run.directory.path.is_dir() and not run.directory.is_free]
    return [run for run in begun if run.records[0].get("run_num", run.directory.path.name) == first.path.name]


def _numbered(first: RunDirectory, number: int) -> RunDirectory:
    return first if number == 1 else RunDirectory(first.path.with_name(f"{first.path.name}-{number}"))


def first_directory(config: Config, name: str, run_num: str, ranks: int) -> RunDirectory:
    """The first directory of a run number: <expdir>/<config>/<ranks>GPU/<run_num>, on CPUs <ranks>ranks."""
    kind = "GPU" if uses_gpus(config.device) else "ranks"
    return RunDirectory(Path(config.expdir) / name / f"{ranks}{kind}" / run_num)


def run_request(options: Options, volumes: Volumes, world: World) -> RunRequest:
    """The request of a command line; every rank calls it."""
    config = volumes.config
    directory = first_directory(config, options.config, options.run_num, world.size)
    everywhere = world.gather_json(lasting_jobs())
    jobs, restarts = (tuple(sorted({job for jobs in part for job in jobs})) for part in zip(*everywhere, strict=True))
    data = data_record(volumes, world)
    return RunRequest(config, options.config, directory, options.resume, options.init_from, jobs, restarts, data)


def identity(config: Config, options: Options) -> dict[str, str]:
    """Distinguishes a run from others. All of its ranks have the same, and compare it when they connect."""
    directory = Path(config.expdir, options.config, options.run_num)  # without the device, which may differ
    return {"config": text_digest(configs.to_yaml(config, options.config)), "run directory": str(directory.absolute())}
