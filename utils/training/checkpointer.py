"""Saves checkpoints of a training: in the background, keeping the last ones and the best one."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from utils.distributed.world import World
from utils.errors import UserError
from utils.training.checkpoint import BEST, reason_of, saved_steps, step_directory, stored_config, update_symlink, write
from utils.training.host_copy import HostCopy
from utils.training.state import TrainState

log = logging.getLogger(__name__)

REPLACED = "the run directory was replaced, and another run uses it"


class Checkpointer(Protocol):
    """Saves checkpoints of a training."""

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, wait: bool) -> None:
        """Copies `tensors`, which has the network's under "network", and writes them in the background.

        It is the best checkpoint if `state.best_step` is its step. `wait`, for the last save of a process, returns when
        it is written.
        """

    def close(self) -> None:
        """Waits until the last checkpoint is written."""

    def check(self) -> None:
        """Raises UserError unless the most recent requested checkpoint is on the disk."""


class NullCheckpointer:
    """Saves nothing: for ranks other than 0, and for measurements."""

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, wait: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def check(self) -> None:
        pass


def build_checkpointer(
    folder: Path, config: Mapping[str, Any], simulation: Mapping[str, Any], keep_last: int, world: World, lock: Path
) -> Checkpointer:
    """The checkpointer of this rank: rank 0, which holds the lock, writes; other ranks do nothing."""
    if not world.is_root:
        return NullCheckpointer()
    return AsyncCheckpointer(folder, stored_config(config), keep_last, lock, simulation)


class AsyncCheckpointer:
    """Writes checkpoints in a thread, from a copy in host memory; keeps the last ones and the best one.

    If the disk is full, read-only or gone, it logs a warning and skips that checkpoint: training continues, earlier
    checkpoints stay, and the next save is tried. If the disk is slow, saves wait for it, within limits. A run directory
    that was removed is created again, unless another run has created it.
    """

    # Limit of the total time that saves may wait for the one before them: seconds, plus a fraction of the time so far.
    WAIT_SECONDS, WAIT_FRACTION = 10.0, 0.02
    BEST_WAIT_SECONDS = 60.0  # additional limit for the best checkpoint, which cannot be saved later
    CLOSE_SECONDS = 300.0

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        keep_last: int,
        lock: Path | None = None,
        simulation: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`simulation` is what the training data state about their origin; predictions compare it with their input."""
        self._folder, self._keep_last = folder, keep_last
        self._about = {"config": dict(config), "simulation": dict(simulation)}
        self._lock = lock
        self._lock_inode = _inode(lock)
        self._copy = HostCopy()
        self._writer: threading.Thread | None = None
        self._step = self._requested_step = 0  # of the last write begun, and of the last save requested
        self._waited = 0.0
        self._write_started = self._created = time.monotonic()
        self._outcome = ""  # part of the warning if a save fails
        self._fault: str | None = None  # why the most recent requested checkpoint is not on the disk

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, wait: bool) -> None:
        self._requested_step, self._outcome = state.step, "" if wait else "training continues, "
        if not self._await_writer(self.CLOSE_SECONDS if wait else self._max_wait(state.best_step == state.step)):
            seconds = time.monotonic() - self._write_started
            self._skip(f"step {self._step} is still being written after {seconds:.0f} s")
            return
        self._step, self._write_started, self._fault = state.step, time.monotonic(), None
        content = self._take_copy(tensors)
        if content is None:
            return
        content["state"] = record = asdict(state)
        weights = {
            "network": content.pop("network"),
            **self._about,
            **{key: record[key] for key in ("epoch", "step", "final_loss", "best_step")},
        }
        writer = threading.Thread(
            target=self._write, args=(weights, content, self._outcome), name="checkpoint", daemon=True
        )
        try:
            writer.start()
        except RuntimeError as error:  # the limit of threads
            self._skip(reason_of(error))
            return
        self._writer = writer
        if wait:
            self.close()

    def close(self) -> None:
        if not self._await_writer(self.CLOSE_SECONDS):
            self._fault = "it is still being written"
            log.warning("The checkpoint of step %d was not written in time; earlier ones stay", self._step)

    def check(self) -> None:
        if self._fault is None:  # the writer may be replacing the checkpoint of the same step
            self.close()
        fault, step = self._fault, self._requested_step
        if fault is None and step and not self._owns_directory():
            fault = REPLACED
        elif fault is None and step and not step_directory(self._folder, step).is_dir():
            fault = "its checkpoint was removed"
        if fault is not None:
            restart = "resumes from the newest checkpoint there" if saved_steps(self._folder) else "starts again"
            raise UserError(
                f"the network after step {step} is not in {self._folder}: {fault}; fix that, and the same command "
                f"{restart}"
            )

    def _take_copy(self, tensors: Mapping[str, Any]) -> dict[str, Any] | None:
        """A copy of the tensors; None, with a warning, if memory is short or the network is not finite."""
        try:
            content = self._copy.take(tensors)
        except (RuntimeError, MemoryError) as error:
            self._skip(f"no memory for a copy ({reason_of(error)})")
            return None
        if content is None:
            self._skip("the weights are not finite")
        return content

    def _skip(self, reason: str) -> None:
        """Logs why the requested checkpoint is not written."""
        self._fault = reason
        log.warning("No checkpoint at step %d: %s; %searlier ones stay", self._requested_step, reason, self._outcome)

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

    def _write(self, weights: Mapping[str, Any], training: Mapping[str, Any], outcome: str) -> None:
        """Writes one checkpoint; `outcome` is part of the log line if that fails."""
        step, best_step = weights["step"], weights["best_step"]
        target, started = step_directory(self._folder, step), time.perf_counter()
        try:
            self._copy.wait()
            if not self._owns_directory():
                raise FileNotFoundError(REPLACED)
            write(target, weights, training)
        except Exception as error:  # no error of a checkpoint ends a training
            self._fault = reason = reason_of(error)
            log.warning("Cannot write checkpoint %s: %s; %searlier ones stay", target, reason, outcome)
            return
        self._fault = None if step == self._requested_step else self._fault
        if best_step == step:
            link = self._folder / BEST
            with _errors_logged(f"Cannot point {link} to {target.name}"):
                update_symlink(link, target.name)
        with _errors_logged(f"Cannot remove an old checkpoint in {self._folder}"):
            if self._owns_directory():
                self._prune(step, best_step)
        log.info("Checkpoint %s written in %.2f s", target, time.perf_counter() - started)

    def _owns_directory(self) -> bool:
        """False if another run has created its own lock file there, after the run directory was removed.

        A new file cannot get the inode number of one that is open.
        """
        return _inode(self._lock) in (None, self._lock_inode)

    def _prune(self, last: int, best_step: int) -> None:
        prune(self._folder, self._keep_last, last, best_step)


def prune(folder: Path, keep_last: int, last: int, best_step: int) -> None:
    """Removes all but the last and the best checkpoints.

    Checkpoints of steps after `last` stay: they were skipped as damaged, and this training has not resumed there.
    """
    best, link = step_directory(folder, best_step), folder / BEST
    if not best.exists() and link.is_symlink():  # its save failed: keep the best one before it
        best = folder / os.readlink(link)
    for step in [step for step in saved_steps(folder) if step <= last][keep_last:]:
        old = step_directory(folder, step)
        if old != best:
            shutil.rmtree(old)


def _inode(path: Path | None) -> tuple[int, int] | None:
    """Device and inode number of a file; None if it does not exist."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _errors_logged(action: str) -> Iterator[None]:
    """Logs an error as a warning; the new checkpoint is on the disk already."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", action, reason_of(error))


class SaveTimer:
    """Tells when `every_minutes` have passed since the last save. Rank 0's clock decides, since clocks differ."""

    def __init__(self, every_minutes: float | None, world: World) -> None:
        self._seconds = 60 * every_minutes if every_minutes is not None and world.is_root else None
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()

    def is_due(self) -> bool:
        return self._seconds is not None and time.perf_counter() - self._started > self._seconds
