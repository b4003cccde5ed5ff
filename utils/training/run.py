"""One training run: its directory, from which checkpoint it starts, what it records, and how it ends.

utils/training/choice.py holds the rule by which a command uses a new directory or continues an earlier run. Rank 0
holds the directory's lock while the run is open, so that one process at a time writes to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from utils import config as configs
from utils.cli import Options
from utils.config import Config
from utils.data import get_loader
from utils.data.volumes import training_simulation
from utils.distributed.locks import open_locked
from utils.distributed.rendezvous import digest
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.files import atomic_write, recover
from utils.log import log_file
from utils.provenance import provenance, read_provenance
from utils.steps.eager import EagerStep
from utils.training import tags
from utils.training.checkpoint import FOLDER, NO_BEST, saved_steps, step_directory
from utils.training.checkpointer import AsyncCheckpointer, Checkpointer
from utils.training.choice import CONFIG, LOCK, PROVENANCE, SUMMARY, Choice, Request, choose, finished_steps, is_free
from utils.training.data_record import data_changes, data_record
from utils.training.evaluations import FOLDER as EVALUATIONS
from utils.training.evaluations import remove_after
from utils.training.loggers import build_loggers, check_loggers
from utils.training.loggers.base import LoggedRun, Logger, Resumed, RunLogger
from utils.training.resume import Start, find_start
from utils.training.state import FitResult, TrainState

log = logging.getLogger(__name__)

RESTART_SECONDS = 60.0  # for which a restarted job waits until the processes of its predecessor have ended
# All that a run writes; --resume=no removes it, and nothing else. Without its config a run cannot be continued, so the
# config goes first and a removal that was interrupted is completed by the next start.
WRITTEN = [SUMMARY, CONFIG, FOLDER, "metrics.jsonl", "logs", "out.log", EVALUATIONS, "report.html", "wandb"]
WRITTEN += ["loss_curves.png", "slices.png", "trace*.json.gz", "top_operations*.txt"]
WRITTEN += ["flight_recorder_rank*.json", PROVENANCE]


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

        Nothing else is written before `restore`. A directory in which nothing was written is removed again, so that bad
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
        self._lock: io.FileIO | None = None
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
            self._lock = open_locked(choice.path / LOCK, fault, RESTART_SECONDS if self._request.restarted else 0.0)
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


def identity(config: Config, options: Options) -> dict[str, str]:
    """Distinguishes a run from others. All of its ranks have the same, and compare it when they connect."""
    directory = Path(config.expdir, options.config, options.run_num)  # without the device, which may differ
    return {"config": digest(configs.to_yaml(config, options.config)), "run directory": str(directory.absolute())}


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
