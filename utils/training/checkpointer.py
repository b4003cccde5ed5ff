"""Saves checkpoints of a run: in the background, keeping the last ones and the best one."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from utils.config import Config
from utils.distributed.world import World
from utils.errors import UserError
from utils.training.checkpoint import BEST, reason_of, saved_steps, step_directory, stored_config, update_symlink, write
from utils.training.host_copy import HostCopy
from utils.training.state import TrainState

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves nothing: for ranks other than 0, and for measurements."""

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, wait: bool) -> None:
        """Copies `tensors`, which has the network's under "network", and writes them in the background.

        It is the best checkpoint if `state.best_step` is its step. `wait`, for the last save of a process, returns when
        it is written.
        """

    def close(self) -> None:
        """Waits until the last checkpoint is written."""

    def check(self) -> None:
        """Raises UserError unless the most recent requested checkpoint is on the disk."""


class AsyncCheckpointer(Checkpointer):
    """Writes checkpoints in a thread, from a copy in host memory; keeps the last ones and the best one.

    If the disk is full, read-only or gone, it logs a warning and skips that checkpoint: the run continues, earlier
    checkpoints stay, and the next save is tried. If the disk is slow, saves wait for it, within limits.
    """

    # Limit of the total time that saves may wait for the one before them: seconds, plus a fraction of the time so far.
    WAIT_SECONDS, WAIT_FRACTION = 10.0, 0.02
    BEST_WAIT_SECONDS = 60.0  # additional limit for the best checkpoint, which cannot be saved later
    CLOSE_SECONDS = 300.0

    def __init__(self, folder: Path, config: Config, simulation: Mapping[str, Any]) -> None:
        """`simulation` is what the training data state about their origin; predictions compare it with their input."""
        self._folder, self._keep_last = folder, config.checkpoint.keep_last
        self._record = {"config": stored_config(config.model_dump()), "simulation": dict(simulation)}
        self._copy = HostCopy()
        self._writer: threading.Thread | None = None
        self._step = self._requested_step = 0  # of the last write begun, and of the last save requested
        self._waited = 0.0
        self._write_started = self._created = time.monotonic()
        self._outcome = ""  # part of the warning if a save fails
        self._fault: str | None = None  # why the most recent requested checkpoint is not on the disk

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, wait: bool) -> None:
        self._requested_step, self._outcome = state.step, "" if wait else "the run continues, "
        if not self._await_writer(self.CLOSE_SECONDS if wait else self._max_wait(state.best_step == state.step)):
            seconds = time.monotonic() - self._write_started
            self._skip(f"step {self._step} is still being written after {seconds:.0f} s")
            return
        self._step, self._write_started, self._fault = state.step, time.monotonic(), None
        try:
            content = self._copy.take(tensors)
        except (RuntimeError, MemoryError) as error:
            self._skip(f"no memory for a copy ({reason_of(error)})")
            return
        if content is None:
            self._skip("the weights are not finite")
            return
        content["state"] = record = asdict(state)
        weights = {"network": content.pop("network"), **self._record}
        weights |= {key: record[key] for key in ("epoch", "step", "final_loss", "best_step")}
        self._writer = threading.Thread(target=self._write, args=(weights, content), name="checkpoint", daemon=True)
        self._writer.start()
        if wait:
            self.close()

    def close(self) -> None:
        if not self._await_writer(self.CLOSE_SECONDS):
            self._fault = "it is still being written"
            log.warning("The checkpoint of step %d was not written in time; earlier ones are kept", self._step)

    def check(self) -> None:
        self.close()
        step, fault = self._requested_step, self._fault
        if fault is None and step and not step_directory(self._folder, step).is_dir():
            fault = "its checkpoint was removed"
        if fault is not None:
            raise UserError(f"the checkpoint of step {step} is not in {self._folder}: {fault}; run the command again")

    def _skip(self, reason: str) -> None:
        """Logs why the requested checkpoint is not written."""
        self._fault = reason
        log.warning(
            "No checkpoint at step %d: %s; %searlier ones are kept", self._requested_step, reason, self._outcome
        )

    def _max_wait(self, is_best: bool) -> float:
        """Seconds that a save may wait now."""
        total = self.WAIT_SECONDS + self.WAIT_FRACTION * (time.monotonic() - self._created)
        return max(0.0, total - self._waited) + (self.BEST_WAIT_SECONDS if is_best else 0.0)

    def _await_writer(self, seconds: float) -> bool:
        """Waits for the checkpoint that is being written; returns False if it is not written in time."""
        if self._writer is not None:
            started = time.monotonic()
            self._writer.join(seconds)
            self._waited += time.monotonic() - started
            if self._writer.is_alive():
                return False
            self._writer = None
        return True

    def _write(self, weights: Mapping[str, Any], training: Mapping[str, Any]) -> None:
        """Writes one checkpoint, points the link to the best one, and removes old ones.

        The checkpoint is of use even if there can be no link, as on FAT or in a copy whose links became directories.
        """
        step, best_step = weights["step"], weights["best_step"]
        target, started = step_directory(self._folder, step), time.perf_counter()
        try:
            self._copy.wait()
            write(target, weights, training)
        except Exception as error:  # no error of a checkpoint ends a run
            reason = reason_of(error)
            if not target.is_dir():
                self._fault = reason
            log.warning("Cannot write checkpoint %s: %s; %searlier ones are kept", target, reason, self._outcome)
            return
        log.info("Checkpoint %s written in %.2f s", target, time.perf_counter() - started)
        with _errors_logged(f"Cannot point {self._folder / BEST} to the best checkpoint"):
            update_best(self._folder, best_step)
        with _errors_logged(f"Cannot remove an old checkpoint in {self._folder}"):
            prune(self._folder, self._keep_last, step, best_step)


@contextlib.contextmanager
def _errors_logged(action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("%s: %s", action, reason_of(error))


def update_best(folder: Path, best_step: int) -> None:
    """Points the link `best` to the checkpoint of that step; without such a checkpoint the link stays."""
    best = step_directory(folder, best_step)
    if best.is_dir():
        update_symlink(folder / BEST, best.name)


def prune(folder: Path, keep_last: int, last: int, best_step: int) -> None:
    """Removes all but the last and the best checkpoints.

    Checkpoints of steps after `last` stay: they were skipped as damaged, and this run has not resumed there.
    """
    kept = {step_directory(folder, best_step), (folder / BEST).resolve()}
    for step in [step for step in saved_steps(folder) if step <= last][keep_last:]:
        if step_directory(folder, step) not in kept and step_directory(folder, step).resolve() not in kept:
            shutil.rmtree(step_directory(folder, step))


class SaveTimer:
    """Returns True from `is_due` once `every_minutes` have passed since the last save, by the clock of rank 0."""

    def __init__(self, every_minutes: float | None, world: World) -> None:
        self._seconds = 60 * every_minutes if every_minutes is not None and world.is_root else None
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()

    def is_due(self) -> bool:
        return self._seconds is not None and time.perf_counter() - self._started > self._seconds
