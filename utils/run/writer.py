"""Writes checkpoints of a run: in the background, from copies in host memory, keeping the last and the best ones."""

import functools
import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from utils.config import Config
from utils.errors import UserError, os_reason
from utils.files import remove
from utils.log import errors_as_warnings, once_per_job
from utils.run.checkpoint import BEST, Weights, saved_steps, step_directory, stored_config, write
from utils.run.state import TrainState
from utils.steps.size import ModelSize

log = once_per_job(__name__)


def host_copy(value: Any) -> Any:
    """A copy of nested dictionaries and lists of tensors in host memory; of tensors on a GPU, it is only queued."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True, non_blocking=True)  # from a GPU to pinned memory
    if isinstance(value, Mapping):
        return {key: host_copy(item) for key, item in value.items()}
    return [*map(host_copy, value)] if isinstance(value, list | tuple) else value


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    # NaN and infinity are always among the extremes; on a CPU isfinite() takes twenty times as long.
    real = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    finite = [torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in real]
    return not finite or bool(torch.stack(finite).all())


class CheckpointWriter:
    """Writes nothing: for ranks other than 0, and for measurements."""

    seconds_between_saves = math.inf  # the clock of rank 0 decides for all

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, wait: bool) -> None:
        """Copies `tensors`, which has the network's under "network", and writes them in the background.

        It is the best checkpoint if `state.best_step` is its step. With `wait` it is written when this returns.
        """

    def close(self) -> None:
        """Waits until the last checkpoint is written."""

    def check(self) -> None:
        """Raises UserError unless the most recent requested checkpoint is on the disk."""


class BackgroundWriter(CheckpointWriter):
    """Writes checkpoints in a thread; keeps the last and the best ones. A failure of the disk is a warning."""

    WAIT_SECONDS, CLOSE_SECONDS = 60.0, 300.0

    def __init__(self, folder: Path, config: Config, known: Mapping[str, Any]) -> None:
        """`known` is stored with the weights: what a prediction needs to know about the training, by name."""
        self._folder, self._keep_last = folder, config.checkpoint.keep_last
        self.seconds_between_saves = 60 * (config.checkpoint.every_minutes or math.inf)
        self._record = {"config": stored_config(config.model_dump()), **known}
        self._thread: threading.Thread | None = None
        self._step = 0  # of the most recent requested checkpoint
        self._fault: str | None = None  # the reason why it is not on the disk

    def save(self, tensors: Mapping[str, Any], state: TrainState, *, wait: bool) -> None:
        self._step = state.step
        if not self._is_idle(self.CLOSE_SECONDS if wait else self.WAIT_SECONDS):
            self._skip("the one before it is still being written")
            return
        self._fault = None
        if not are_finite(tensors["network"].values()):  # read first, so that the host waits for training alone
            self._skip("the weights are not finite")
            return
        content = {**host_copy(tensors), "state": (record := asdict(state))}
        copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        reached = {key: record[key] for key in ("epoch", "step", "final_loss", "best_step")}
        if not state.batch:  # in an epoch, the calibration is of earlier weights
            reached |= record["calibration"]
        weights = vars(Weights(content.pop("network"), **self._record, **reached))
        write_all = functools.partial(self._write, weights, content, copied)
        self._thread = threading.Thread(target=write_all, name="checkpoint", daemon=True)
        self._thread.start()
        if wait:
            self.close()

    def close(self) -> None:
        if not self._is_idle(self.CLOSE_SECONDS):
            self._skip("it is still being written")

    def check(self) -> None:
        self.close()
        if self._fault is not None:
            missing = f"the checkpoint of step {self._step} is not in {self._folder}"
            raise UserError(f"{missing}: {self._fault}; run the command again")

    def link_best(self, step: int) -> None:
        """Points the link to the best checkpoint, if that exists. In copies it may be a directory; FAT has no links."""
        best, link = step_directory(self._folder, step), self._folder / BEST
        with errors_as_warnings(f"Cannot point {link} to the best checkpoint"):
            if best.is_dir():
                fresh = link.with_name(f".{BEST}.partial")
                fresh.unlink(missing_ok=True)
                fresh.symlink_to(best.name)
                if link.is_dir() and not link.is_symlink():
                    remove(link)
                os.replace(fresh, link)

    def _skip(self, reason: str) -> None:
        self._fault = reason
        log.warning("No checkpoint at step %d: %s; earlier ones are kept", self._step, reason)

    def _is_idle(self, seconds: float) -> bool:
        """Waits for the checkpoint that is being written; returns False if it is not written in time."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _write(self, weights: Mapping[str, Any], training: Mapping[str, Any], copied: Any) -> None:
        step, best_step, checked = weights["step"], weights["best_step"], training["state"]["checked"]
        target, started = step_directory(self._folder, step), time.perf_counter()
        try:
            if copied is not None:
                copied.synchronize()
            write(target, weights, training)
        except Exception as error:  # no error of a checkpoint ends a run
            self._fault = os_reason(error) if isinstance(error, OSError) else repr(error)
            log.warning("Cannot write checkpoint %s: %s; earlier ones are kept", target, self._fault)
            return
        log.info("Checkpoint %s written in %.2f s", target, time.perf_counter() - started)
        self.link_best(best_step)
        with errors_as_warnings(f"Cannot remove an old checkpoint in {self._folder}"):
            prune(self._folder, self._keep_last, step, best_step, checked)


def prune(folder: Path, keep_last: int, last: int, best_step: int, checked: int = 0) -> None:
    """Removes all but the last and the best checkpoints, and the newest one up to the step `checked`.

    Checkpoints of steps after `last` stay: they were skipped as damaged, and this run has not resumed there. So does
    the checkpoint that the link names, if the save of a better one has failed.
    """
    best = (folder / BEST).resolve().name
    steps = [step for step in saved_steps(folder) if step <= last]  # the newest one first
    kept = {best_step, next((step for step in steps if step <= checked), best_step)}
    for step in steps[keep_last:]:
        if step not in kept and step_directory(folder, step).name != best:
            shutil.rmtree(step_directory(folder, step))


def check_space(folder: Path, size: ModelSize, resumes: bool) -> str:
    """A line about the free space; UserError if one checkpoint does not fit, a warning if not all of them do."""
    needed, keep_last = size.checkpoint, size.config.checkpoint.keep_last
    count = keep_last + 2 + (size.config.integrity.every > 0)  # the best, the one that is being written, the checked
    existing = sum(file.stat().st_size for file in folder.glob("step_*/*"))
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    have, remedy = f"{folder} has {_megabytes(free)} free", "free some space, or choose another place with expdir"
    if needed > (free if resumes else free + existing):
        raise UserError(f"a checkpoint needs about {_megabytes(needed)}, and the file system of {have}; {remedy}")
    line = f"checkpoints: about {_megabytes(needed)} each, up to {count} at once; the file system of {have}"
    if count * needed > free + existing:
        log.warning("%s, too little for all of them; lower checkpoint.keep_last (%d), %s", line, keep_last, remedy)
    return line


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
