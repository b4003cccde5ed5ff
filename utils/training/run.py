"""One training run: its directory, from which checkpoint it starts, what it records, and how it ends.

Which directory a command uses. The directories of a run number are <run_num>, <run_num>-2, <run_num>-3, …; the highest
number is the newest. The first row that applies decides:

| the command                                     | uses                                                              |
|-------------------------------------------------|-------------------------------------------------------------------|
| is restarted by its launcher (Slurm, torchrun)  | the run that this job has trained with the same command           |
| has --resume=no                                 | <run_num>, whose run is removed                                   |
| has --resume, or --resume=DIR of such a run     | the newest run, or DIR                                            |
| has the same config as an unfinished, idle run  | that run: it continues where it stopped                           |
| any other                                       | the next free directory, from scratch or from --resume=DIR        |

A run number belongs to the runs that record it in provenance.json, because 00-2 is also the name for task 2 of a job
array. Rank 0 holds the directory's lock while the run is open, so that one process at a time writes to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from utils import config as configs
from utils.cli import Options
from utils.config import Config
from utils.data import get_loader
from utils.data.volumes import training_simulation
from utils.distributed.devices import uses_gpus
from utils.distributed.launch import lasting_jobs, restarted
from utils.distributed.locks import LockedFile, is_locked, open_locked
from utils.distributed.rendezvous import digest
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.files import atomic_write, read_json, recover
from utils.log import log_file
from utils.provenance import command, provenance, read_provenance
from utils.steps.eager import EagerStep
from utils.training import tags
from utils.training.checkpoint import FOLDER, NO_BEST, saved_steps, step_directory
from utils.training.checkpointer import AsyncCheckpointer, Checkpointer
from utils.training.data_record import data_changes, data_record
from utils.training.evaluations import FOLDER as EVALUATIONS
from utils.training.evaluations import remove_after
from utils.training.loggers import build_loggers, check_loggers
from utils.training.loggers.base import LoggedRun, Logger, Resumed, RunLogger
from utils.training.resume import Start, find_start
from utils.training.state import FitResult, TrainState

log = logging.getLogger(__name__)

LOCK, CONFIG, PROVENANCE, SUMMARY = ".lock", "config.yaml", "provenance.json", "summary.json"
RESTART_SECONDS = 60.0  # for which a restarted job waits until the processes of its predecessor have ended
# All that a run writes; --resume=no removes it, and nothing else. Without its config a run cannot be continued, so the
# config goes first and a removal that was interrupted is completed by the next start.
WRITTEN = [SUMMARY, CONFIG, FOLDER, "metrics.jsonl", "logs", "out.log", EVALUATIONS, "report.html", "wandb"]
WRITTEN += ["loss_curves.png", "slices.png", "trace*.json.gz", "top_operations*.txt", ".profile-*"]
WRITTEN += ["flight_recorder_rank*.json", PROVENANCE]


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
        try:
            changes = self.changes(request)
        except UserError:
            return "has no readable config"
        facts = ["is finished"] * self.is_finished + ["is being trained"] * is_locked(self.path / LOCK)
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
    matching = [run for run in runs if run.belongs_to(directory.name)]
    return sorted(matching, key=lambda run: run.number, reverse=True)


def _numbered(directory: Path, number: int) -> Path:
    return directory if number == 1 else directory.with_name(f"{directory.name}-{number}")


class RunReport(NamedTuple):
    """Lines of the result table in addition to the result."""

    losses: dict[str, float]  # of the baselines, by name
    lines: list[str]  # the files that were written


@dataclass
class Run:
    """An open run. Every rank has one; rank 0 holds the lock and writes.

    start: the checkpoint, the weights or the scratch from which it starts.
    """

    config: Config
    request: Request
    choice: Choice
    world: World
    start: Start
    logger: Logger = field(default_factory=Logger)
    checkpointer: Checkpointer = field(default_factory=Checkpointer)
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def directory(self) -> Path:
        return self.choice.path

    @classmethod
    @contextlib.contextmanager
    def open(cls, request: Request, world: World) -> Iterator[Run]:
        """Chooses, creates and locks the directory, and reads the checkpoint to start from; every rank enters.

        Nothing else is written before `begin`. A directory in which nothing was written is removed again, so that bad
        input leaves none.
        """
        check_loggers(request.config.loggers, world)
        claim = _Claim(request)
        with world.raise_together():
            if world.is_root:
                claim.take()
        try:
            path, resume = world.gather_json([str(claim.choice.path), claim.choice.resume] if claim.choice else None)[0]
            choice = claim.choice or Choice(Path(path), resume)
            world.heartbeat.folder = choice.path
            start = find_start(choice.path, choice.resume, request.init_from, request.config.model_dump(), world)
            run = cls(request.config, request, choice, world, start)
            with run._closing():
                yield run
        finally:
            claim.release()

    def has_nothing_to_do(self) -> bool:
        """True, and logs the reason, if all epochs are trained and the summary is written; every rank calls it."""
        if not self.start.is_complete:
            return False
        is_written = self.world.gather_json(finished_steps(self.directory) == self.start.state.step)[0]
        if self.start.may_lack_summary and not is_written:
            return False
        log.info("Run directory: %s", self.directory)
        log.warning(self.start.nothing_to_train)
        return True

    def restore(self, step: EagerStep) -> TrainState:
        """Loads the checkpoint or the weights into the step. From then on the directory records this run.

        It replaces the summary and, with --resume=no, all that an earlier run has written. Every rank calls it, after
        all checks.
        """
        state = self.start.restore(step, self.world)
        record = {**provenance(self.world), "run_num": self.request.directory.name}
        record |= {"jobs": self.request.jobs, "origin": self.request.origin}
        with self.world.raise_together():
            if self.world.is_root:
                self._begin(record)
        return state

    def finish(self, result: FitResult, report: RunReport) -> None:
        """Logs the result table and writes summary.json, the last file of a run; every rank calls it."""
        final = {"final loss": result.final_loss, "best loss": result.best_loss, **result.metrics}
        self.logger.hparams(self.config, {tags.hparam(name): x for name, x in final.items()}, result.steps + 1)
        losses = {self.start.initial_network: result.initial_loss, **report.losses}
        table = [*result.table(losses), f"run directory  {self.directory}", *report.lines]
        log.info("\n  ".join(["Result:", *table]))
        with self.world.raise_together():
            self.checkpointer.check()
            self.logger.flush()
            if self.world.is_root:
                self._write_summary(result)
        if result.best_step == 0:
            last = step_directory(self.directory / FOLDER, result.steps)
            log.warning("This run has no best checkpoint: %s; --checkpoint %s uses the last one", NO_BEST, last)
        if self.start.is_complete:
            log.warning(self.start.nothing_to_train)

    def _write_summary(self, result: FitResult) -> None:
        remedy = "the network is saved; the same command writes it"
        path = self.directory / SUMMARY
        with os_errors_for_users(f"cannot write {path}", remedy), atomic_write([path]) as (partial,):
            partial.write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n", encoding="utf-8")

    def _begin(self, record: dict[str, Any]) -> None:
        """Removes what is replaced, writes config.yaml and provenance.json, and opens out.log and the loggers."""
        directory, start = self.directory, self.start
        with _errors_of(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if start.resumed is None and (self.choice.resume == "no" or not (directory / CONFIG).exists()):
                _remove_run(directory)
            recover(directory)
            remove_after(directory / EVALUATIONS, start.state.step)
            changes: list[str] = []
            if not start.is_complete:  # otherwise the records of the process that trained it stay
                changes = self._write_records(record)
            (directory / SUMMARY).unlink(missing_ok=True)
            self._files.enter_context(log_file(directory / "out.log"))
        log.info("Run directory: %s", self.choice)
        for line in start.describe():
            log.info(line)
        for line in changes:
            log.warning(line)
        if start.is_complete:
            log.info("The summary of this run is missing: writing it now, without training")
        logged = LoggedRun(directory, start.resumed or Resumed(-1), self.config.model_dump(), record)
        self.logger = RunLogger(logged, build_loggers(self.config.loggers, logged))
        simulation = training_simulation(self.config, get_loader(self.config.data_loader_config).reads)
        self.checkpointer = AsyncCheckpointer(directory / FOLDER, self.config, simulation)

    def _write_records(self, record: dict[str, Any]) -> list[str]:
        """Writes both files; returns a line for each data file that differs from that of the run that resumes."""
        # Only the global batch: with another number of ranks the local one would change it.
        portable = self.config.model_copy(update={"local_batch_size": None})
        path, changes = self.directory / PROVENANCE, []
        record["data"] = data_record(self.config)
        if self.start.resumed is not None and path.exists():
            before = read_provenance(path)
            record["earlier"] = [*before.pop("earlier", []), before]
            record["origin"] = before.get("origin")
            changes = data_changes(before.get("data"), record["data"])
        with atomic_write([self.directory / CONFIG, path]) as (config_file, record_file):
            config_file.write_text(configs.to_yaml(portable, self.request.name))
            record_file.write_text(json.dumps(record, indent=2) + "\n")
        return changes

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Closes the records at the end of the block, and passes the loggers the error that ends the run."""
        with self._files:
            try:
                yield
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) and saved_steps(self.directory / FOLDER):
                    again = "the same command" + (" without --resume=no" if self.choice.resume == "no" else "")
                    error.args = (
                        f"the last checkpoint is kept, and {again} continues from it (kill -TERM saves first)",
                    )
                self.logger.close(error)
                raise
            self.logger.close()
            log.info("DONE ---- rank %d", self.world.rank)


class _Claim:
    """Rank 0's hold on the chosen directory."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.choice: Choice | None = None
        self._lock: LockedFile | None = None
        self._created: list[Path] = []  # the directory and its parents, innermost first

    def take(self) -> None:
        """Chooses again under the lock, since the process that held it may have finished or begun the run."""
        with _errors_of(self._request.directory):
            while True:
                choice = choose(self._request)
                if self._locks(choice) and choose(self._request, choice.path) == choice:
                    self.choice = choice
                    return
                self.release()

    def _locks(self, choice: Choice) -> bool:
        """False if another new run has taken the directory; raises UserError if the chosen run is being trained."""
        self._created = [path for path in (choice.path, *choice.path.parents) if not path.exists()]
        choice.path.mkdir(parents=True, exist_ok=True)
        fault = f"another run is writing to {choice.path}; wait for its end, or give this one a --run_num of its own"
        try:
            self._lock = open_locked(choice.path / LOCK, fault, RESTART_SECONDS if restarted() else 0.0)
        except UserError:
            if choice.resume == "no" or not is_free(choice.path):  # without a choice of another directory
                raise
        return self._lock is not None

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self._lock is not None and self._created and is_free(self._created[0]):
                (self._created[0] / LOCK).unlink()
        if self._lock is not None:
            self._lock.close()
        with contextlib.suppress(OSError):
            for path in self._created:
                path.rmdir()  # fails unless it is empty
        self._lock, self._created = None, []


def run_directory(config: Config, name: str, run_num: str, ranks: int) -> Path:
    """The first directory of a run number: <expdir>/<config>/<ranks>GPU/<run_num>, as in the tutorial.

    On CPUs <ranks>ranks takes the place of <ranks>GPU.
    """
    return Path(config.expdir) / name / f"{ranks}{'GPU' if uses_gpus(config.device) else 'ranks'}" / run_num


def identity(config: Config, options: Options) -> dict[str, str]:
    """Distinguishes a run from others. All of its ranks have the same, and compare it when they connect."""
    directory = Path(config.expdir, options.config, options.run_num)  # without the device, which may differ
    return {"config": digest(configs.to_yaml(config, options.config)), "run directory": str(directory.absolute())}


def run_request(config: Config, options: Options, world: World) -> Request:
    """The request of a command line; every rank calls it."""
    directory = run_directory(config, options.config, options.run_num, world.size)
    everywhere = world.gather_json(lasting_jobs())
    jobs, restarts = (tuple(sorted({job for jobs in part for job in jobs})) for part in zip(*everywhere, strict=True))
    return Request(config, options.config, directory, options.resume, options.init_from, jobs, restarts)


def _remove_run(directory: Path) -> None:
    """Removes what an earlier run has written."""
    paths = [path for pattern in WRITTEN for path in sorted(directory.glob(pattern))]
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if paths:
        log.info("Removed the earlier run in %s: %s", directory, ", ".join(path.name for path in paths))


def _errors_of(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Converts OSErrors to UserErrors."""
    return os_errors_for_users(f"cannot write to the run directory {directory}", "choose another with --set expdir=DIR")
