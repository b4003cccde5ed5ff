"""One training run: its directory, from which checkpoint it starts, what it records, and how it ends."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from networks.ops import plan
from utils import STARTED
from utils import config as configs
from utils.distributed.world import World
from utils.errors import CorruptionError, UserError, os_errors_for_users
from utils.files import atomic_write, open_locked, recover, remove, to_json
from utils.log import log_file, once_per_job
from utils.lookup import own_code
from utils.run import tags
from utils.run.checkpoint import NO_BEST, saved_steps, set_aside, step_directory
from utils.run.choice import Choice, RunRequest, choose
from utils.run.directory import RunDirectory
from utils.run.loggers import build_loggers, check_loggers
from utils.run.loggers.base import LoggedRun, Logger, RunRecords
from utils.run.provenance import DIGEST, data_changes, provenance
from utils.run.start import Start, find_start
from utils.run.state import FitResult, TrainState
from utils.run.writer import BackgroundWriter, CheckpointWriter, check_space
from utils.steps import build
from utils.volumes.opened import Volumes

log = once_per_job(__name__)

RESTART_SECONDS = 60.0  # for which a restarted job waits until the processes of its predecessor have ended


@dataclass
class Run:
    """An open run. Every rank has one; rank 0 holds the lock and writes."""

    request: RunRequest
    volumes: Volumes
    choice: Choice
    world: World
    start: Start
    _open_files: contextlib.ExitStack
    records: Logger = field(default_factory=Logger)
    checkpoint_writer: CheckpointWriter = field(default_factory=CheckpointWriter)
    earlier_seconds: float = 0.0  # of the processes of this run before this one, on rank 0

    @property
    def directory(self) -> RunDirectory:
        return self.choice.directory

    @classmethod
    @contextlib.contextmanager
    def open(cls, request: RunRequest, volumes: Volumes, world: World) -> "Iterator[Run | None]":
        """Chooses, creates and locks the directory, and reads the checkpoint to start from; every rank enters.

        None, with a warning, if another job has continued the run of a restarted job in the meantime. Nothing else is
        written before `restore`; a directory that stays empty is removed again, so that bad input leaves none.
        """
        check_loggers(request.config.loggers, world)
        with contextlib.ExitStack() as files:
            choice = None
            with world.raise_together():
                if world.is_root:
                    choice = files.enter_context(_claimed(request))
                    if choice and choice.directory.removal.exists():
                        _remove_run(choice.directory)
                    if choice and choice.resume != "no":
                        recover(choice.directory.checkpoints)
            place = world.gather_json([str(choice.directory), choice.resume] if choice else None)[0]
            if place is None:
                log.warning("Nothing to do: another job has continued the run of this one, and trains it now")
                yield None
                return
            choice = choice or Choice(RunDirectory(Path(place[0])), place[1])
            directory = choice.directory
            world.heartbeat.log = directory.log
            start = find_start(choice, request.init_from, request.config.model_dump(), world)
            run = cls(request, volumes, choice, world, start, files)
            try:
                yield run
            except BaseException as error:
                run.records.close(error)
                if isinstance(error, CorruptionError) and error.checked is not None and world.is_root:
                    set_aside(directory.checkpoints, error.checked)
                if isinstance(error, KeyboardInterrupt):
                    again = "the same command" + (" without --resume=no" if choice.resume == "no" else "")
                    kept = f"the last checkpoint is kept, and {again} continues from it"
                    if not saved_steps(directory.checkpoints):
                        kept = "nothing is kept, and the same command starts again"
                    raise KeyboardInterrupt(f"{kept} (kill -TERM saves first)") from error
                raise
            run.records.close()
            log.info("DONE ---- rank %d", world.rank)

    def is_finished(self) -> bool:
        """True, and logs the reason, if all epochs are trained and the summary is written; every rank calls it."""
        if not self.start.is_complete:
            return False
        has_summary = self.world.gather_json(self.directory.summary.exists())[0]
        if self.start.lacks_only_summary and not has_summary:
            return False
        log.info("Run directory: %s", self.directory)
        log.warning(self.start.nothing_to_train)
        return True

    def restore(self, parts: build.Parts) -> TrainState:
        """Loads checkpoint or weights into the step, then begins the records; every rank calls it, after all checks."""
        state = self.start.restore(parts.step, self.volumes, self.world)
        record = {**provenance(self.world), "run_num": self.request.directory.path.name}
        record |= {"jobs": self.request.jobs, "origin": self.request.origin}
        with self.world.raise_together():
            if self.world.is_root:
                self._begin(record, parts)
        return state

    def goodput(self, step_seconds: float) -> float | None:
        """The share of `step_seconds` in the time of all processes of the run, on rank 0; None without training."""
        return None if self.start.is_complete else step_seconds / self.process_seconds()

    def process_seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - STARTED

    def finish(self, result: FitResult, baselines: Mapping[str, float], lines: Sequence[str]) -> None:
        """Logs the result table, with `baselines` and `lines`; writes summary.json, the last file; on every rank."""
        final = {"final loss": result.final_loss, "best loss": result.best_loss, **result.metrics}
        results = {tags.HPARAM + name: value for name, value in final.items()}
        self.world.pulse.enter("end")
        self.records.hparams(self.request.config, results, result.steps + 1)
        losses = {self.start.initial_network: result.initial_loss, **baselines}
        log.info("\n  ".join(["Result:", *result.table(losses), f"run directory  {self.directory}", *lines]))
        with self.world.raise_together():
            self.checkpoint_writer.check()
            self.records.flush()
            if self.world.is_root:
                path, remedy = self.directory.summary, "the network is saved; the same command writes it"
                with os_errors_for_users(f"cannot write {path}", remedy), atomic_write([path]) as (partial,):
                    partial.write_text(to_json(asdict(result)), encoding="utf-8")
        if result.best_step == 0:
            last = step_directory(self.directory.checkpoints, result.steps)
            hint = "; it diverged: lower lr_schedule.start_lr" if result.final_loss > result.initial_loss else ""
            log.warning("This run has no best checkpoint: %s; --checkpoint %s uses the last one%s", NO_BEST, last, hint)

    def _begin(self, record: dict[str, Any], parts: build.Parts) -> None:
        """Checks the free space, removes what is replaced, writes the records, and opens out.log and the loggers."""
        directory, start, config = self.directory, self.start, self.request.config
        directory.path.mkdir(parents=True, exist_ok=True)
        if not start.is_complete:
            check_space(directory.checkpoints, parts.size, resumes=start.path is not None)
        if start.path is None and (self.choice.resume == "no" or not directory.config.exists()):
            _remove_run(directory)
        recover(directory.path)
        directory.remove_evaluations_after(start.state.step)
        record["code"] = own_code(config.model_dump())
        # The records of the process that trained a complete run stay.
        changes = [] if start.is_complete else self._write_records(record)
        directory.removal.unlink(missing_ok=True)
        directory.summary.unlink(missing_ok=True)
        self._open_files.enter_context(log_file(directory.log))
        log.info("Run directory: %s", self.choice)
        for line in start.describe():
            log.info(line)
        for line in changes:
            log.warning(line)
        if start.is_complete:
            log.info("The summary of this run is missing: writing it now, without training")
        # The records also have the time of steps that were lost, because a process ended before a save.
        recorded = [record["seconds"] for record in directory.read_metrics()]
        self.earlier_seconds = max([start.state.process_seconds, *recorded])
        resumed, in_epoch = (start.state.step, start.state.batch > 0) if start.path else (-1, False)
        logged = LoggedRun(directory, resumed, in_epoch, config.model_dump(), record)
        self.records = RunRecords(logged, build_loggers(config.loggers, logged), self.process_seconds)
        known: dict[str, Any] = {"simulation": dict(self.volumes.simulation), "code": record["code"]}
        known["data"] = {name: file[DIGEST] for name, file in self.request.data.items()}
        known["input_statistics"] = self.volumes.input_statistics()
        self.checkpoint_writer = writer = BackgroundWriter(directory.checkpoints, config, known)
        writer.link_best(start.state.best_step)  # a kill may have prevented it

    def _write_records(self, record: dict[str, Any]) -> list[str]:
        """Writes both files; returns lines about data files and layers that changed since the run that resumes."""
        # Only the global batch: with another number of ranks the local one would change it.
        portable = self.request.config.model_copy(update={"local_batch_size": None})
        path, changes = self.directory.provenance, list[str]()
        record["data"] = self.request.data
        record["kernels"] = build.kernel_plan(self.request.config, self.world.device)
        source = RunDirectory(self.start.path.resolve().parent.parent) if self.start.path else self.directory
        before = source.read_provenance() if self.start.path or path.exists() else {}
        if before and source.path.resolve() == path.resolve().parent:  # otherwise another run resumes here
            record["earlier"] = [*before.pop("earlier", []), before]
            record["origin"] = before.get("origin")
        if self.start.path is not None:
            changes = data_changes(before.get("data", {}), record["data"])
            changes += plan.changes(before.get("kernels", {}), record["kernels"])
        # The config comes last: without it, the directory is still free for the command that a kill has ended.
        with atomic_write([path, self.directory.config]) as (record_file, config_file):
            config_file.write_text(configs.to_yaml(portable, self.request.name))
            record_file.write_text(to_json(record))
        return changes


@contextlib.contextmanager
def _claimed(request: RunRequest) -> Iterator[Choice | None]:
    """Chooses, creates and locks a directory, which is removed if it stays empty; None: another job trains the run."""
    lock = None
    while lock is None:
        choice = choose(request)
        directory, path = choice.directory, choice.directory.path
        is_new = directory.is_free
        created = [folder for folder in (path, *path.parents) if not folder.exists()]  # innermost first
        fault = f"another run is writing to {path}; wait for its end, or give this one a --run_num of its own"
        with os_errors_for_users(f"cannot write to the run directory {path}", "choose another with --set expdir=DIR"):
            path.mkdir(parents=True, exist_ok=True)
            try:
                lock = open_locked(directory.lock, fault, RESTART_SECONDS if request.restarted else 0.0)
            except UserError:
                jobs = directory.read_provenance().get("jobs", [])  # of the process that trains it
                if jobs and request.restarted and not {*request.restarted} & {*jobs}:
                    yield None
                    return
                if choice.resume == "no" or not is_new:  # else another new run has just taken the directory
                    raise
    try:
        yield choice
    finally:
        if created and directory.is_free:
            directory.lock.unlink(missing_ok=True)
        lock.close()
        with contextlib.suppress(OSError):
            for folder in created:
                folder.rmdir()  # fails unless it is empty


def _remove_run(directory: RunDirectory) -> None:
    if paths := directory.written():
        directory.removal.touch()
        for path in paths:
            remove(path)
        log.info("Removed the earlier run in %s: %s", directory, ", ".join(path.name for path in paths))
