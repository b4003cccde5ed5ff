"""Saves checkpoints of a training: in the background, keeping the last ones and the best one."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from utils.distributed.world import World
from utils.errors import UserError
from utils.training.checkpoint import BEST, reason_of, saved_steps, step_directory, stored_config, update_symlink, write
from utils.training.host_copy import HostCopy
from utils.training.state import TrainState

log = logging.getLogger(__name__)


class Checkpointer(Protocol):
    """Saves checkpoints of a training."""

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, is_best: bool, wait: bool) -> None:
        """Copies `tensors`, which has the network's under "network", and writes them in the background.

        With `wait` it returns when they are written.
        """

    def close(self) -> None:
        """Waits until the last checkpoint is written."""

    def check(self) -> None:
        """Raises UserError unless the most recent requested checkpoint is on the disk."""


class NullCheckpointer:
    """Saves nothing: for ranks other than 0, and for measurements."""

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, is_best: bool, wait: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def check(self) -> None:
        pass


def build_checkpointer(folder: Path, config: Mapping[str, Any], keep_last: int, world: World) -> Checkpointer:
    """The checkpointer of this rank: rank 0 writes, other ranks do nothing."""
    return AsyncCheckpointer(folder, stored_config(config), keep_last) if world.is_root else NullCheckpointer()


class AsyncCheckpointer:
    """Writes checkpoints in a thread, from a copy in host memory; keeps the last ones and the best one.

    If the disk is full, read-only or gone, it logs a warning and skips that checkpoint: training continues, earlier
    checkpoints stay, and the next save is tried. If the disk is slow, saves wait for it, within limits.
    """

    # Limit of the total time that saves may wait for the one before them: seconds, plus a fraction of the time so far.
    WAIT_SECONDS, WAIT_FRACTION = 10.0, 0.02
    BEST_WAIT_SECONDS = 60.0  # additional limit for the best checkpoint, which cannot be saved later
    CLOSE_SECONDS = 300.0

    def __init__(self, folder: Path, config: Mapping[str, Any], keep_last: int) -> None:
        self._folder, self._config, self._keep_last = folder, dict(config), keep_last
        self._copy = HostCopy()
        self._writer: threading.Thread | None = None
        self._step = self._requested_step = 0  # of the last write begun, and of the last save requested
        self._waited = 0.0
        self._write_started = self._created = time.monotonic()
        self._fault: str | None = None  # why the most recent requested checkpoint is not on the disk

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, is_best: bool, wait: bool) -> None:
        self._requested_step = state.step
        if not self._await_writer(self.CLOSE_SECONDS if wait else self._max_wait(is_best)):
            self._fault = "the previous checkpoint is still being written"
            log.warning(
                "No checkpoint at step %d: step %d is still being written after %.0f s; training continues",
                state.step,
                self._step,
                time.monotonic() - self._write_started,
            )
            return
        self._step, self._write_started = state.step, time.monotonic()
        content = self._take_copy(tensors, state.step)
        if content is None:
            return
        content["state"] = record = asdict(state)
        weights = {
            "network": content.pop("network"),
            "config": self._config,
            **{key: record[key] for key in ("epoch", "step", "final_loss")},
        }
        self._writer = threading.Thread(
            target=self._write, args=(state.step, weights, content, is_best), name="checkpoint", daemon=True
        )
        self._writer.start()
        if wait:
            self.close()

    def close(self) -> None:
        if not self._await_writer(self.CLOSE_SECONDS):
            self._fault = "it is still being written"
            log.warning("The checkpoint of step %d was not written in time; earlier ones stay", self._step)

    def check(self) -> None:
        if self._fault is not None:
            raise UserError(
                f"the trained network is not in {self._folder}: {self._fault}; fix that, and the same command resumes "
                f"from the newest checkpoint there"
            )

    def _take_copy(self, tensors: Mapping[str, Any], step: int) -> dict[str, Any] | None:
        """A copy of the tensors; None, with a warning, if memory is short or the network is not finite."""
        try:
            finite, content = self._copy.take(tensors)
        except (RuntimeError, MemoryError) as error:
            self._fault = reason = reason_of(error)
            log.warning("No checkpoint at step %d: no memory for a copy (%s); training continues", step, reason)
            return None
        if not finite:
            self._fault = "the weights are not finite"
            log.warning("No checkpoint at step %d: the network's weights are not finite", step)
            return None
        return content

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

    def _write(self, step: int, weights: Mapping[str, Any], training: Mapping[str, Any], is_best: bool) -> None:
        target, started = step_directory(self._folder, step), time.perf_counter()
        try:
            self._copy.wait()
            write(target, weights, training)
            if is_best:
                update_symlink(self._folder / BEST, target.name)
            self._prune(step)
        except Exception as error:  # no error of a checkpoint ends a training
            self._fault = reason = reason_of(error)
            log.warning("Cannot write checkpoint %s: %s; training continues, earlier ones stay", target, reason)
        else:
            self._fault = None if step == self._requested_step else self._fault
            log.info("Checkpoint %s written in %.2f s", target, time.perf_counter() - started)

    def _prune(self, last: int) -> None:
        """Removes all but the last and the best checkpoints.

        Checkpoints of steps after `last` stay: they were skipped as damaged, and this training has not resumed there.
        """
        best = self._folder / BEST
        for step in [step for step in saved_steps(self._folder) if step <= last][self._keep_last :]:
            old = step_directory(self._folder, step)
            if not (best.is_symlink() and os.readlink(best) == old.name):
                shutil.rmtree(old)


class SaveTimer:
    """Tells when `every_minutes` have passed since the last save. Rank 0's clock decides, since clocks differ."""

    def __init__(self, every_minutes: float | None, world: World) -> None:
        self._seconds = 60 * every_minutes if every_minutes is not None and world.is_root else None
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()

    def is_due(self) -> bool:
        return self._seconds is not None and time.perf_counter() - self._started > self._seconds
