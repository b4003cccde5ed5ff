"""Checkpoints: everything that a training needs to resume exactly; written in the background, verified when read.

<run>/checkpoints/step_00000400/ holds weights.pt (network and config, for predictions), training.pt (optimizer, scaler,
random number generators, training state) and SHA256SUMS, which `sha256sum -c` can read. A directory gets its name once
it is complete. The link `best` points to the checkpoint with the lowest validation loss.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_directory
from utils.training.host_copy import HostCopy
from utils.training.state import TrainState

log = logging.getLogger(__name__)

FORMAT = 2
WEIGHTS, TRAINING, CHECKSUMS = "weights.pt", "training.pt", "SHA256SUMS"
WEIGHTS_KEYS, TRAINING_KEYS = ("network", "config"), ("optimizer", "scaler", "random", "state")
FOLDER, BEST = "checkpoints", "best"
ANY_CHECKPOINT = f"a run directory, a checkpoint directory, or a {WEIGHTS}"


class DamagedCheckpoint(Exception):
    """A checkpoint that differs from what was written; the message gives the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    path: Path
    weights: dict[str, Any]
    training: dict[str, Any]
    state: TrainState


# --- files ---------------------------------------------------------------------------------------------------------


def write(target: Path, weights: Mapping[str, Any], training: Mapping[str, Any]) -> None:
    """Writes both files and their digests atomically; raises OSError if the disk fails."""
    with atomic_directory(target) as partial:
        digests = ""
        for name, content in ((WEIGHTS, weights), (TRAINING, training)):
            with _HashingFile(io.FileIO(partial / name, "w")) as file:
                try:
                    torch.save({"format": FORMAT, **content}, file)
                except RuntimeError:
                    # PyTorch's writer replaces the OSError of a full disk with an error of its own.
                    raise file.error or OSError("PyTorch could not write it") from None
            digests += f"{file.hash.hexdigest()}  {name}\n"
        (partial / CHECKSUMS).write_text(digests, encoding="ascii")


class _HashingFile(io.BufferedWriter):
    """A file opened for writing that computes the SHA-256 of its content, and keeps an error of the disk."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self.hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        return count


def verify(directory: Path, names: Sequence[str] = (WEIGHTS, TRAINING)) -> None:
    """Raises DamagedCheckpoint unless the files match SHA256SUMS and, if both are checked, it lists nothing else."""
    try:
        listed = (directory / CHECKSUMS).read_text(encoding="ascii", errors="replace").splitlines(keepends=True)
        found = {name: f"{digest(directory / name)}  {name}\n" for name in names}
    except OSError as error:
        raise DamagedCheckpoint(f"{Path(error.filename or directory).name}: {_reason(error)}") from None
    damaged = [name for name, line in found.items() if line not in listed]
    if len(names) > 1 and listed != list(found.values()):
        damaged.append(CHECKSUMS)
    if damaged:
        raise DamagedCheckpoint(f"{damaged[0]} is damaged: its digest does not match")


def _reason(error: Exception) -> str:
    """The reason of an error, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or repr(error)).splitlines()[0]


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            found.update(block)
    return found.hexdigest()


def read(path: Path) -> dict[str, Any]:
    """Content of one file, read without running code in it; raises DamagedCheckpoint if it cannot be read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # PyTorch's own messages are paragraphs, and advise the user to run the code in the file.
        is_short = isinstance(error, OSError | MemoryError) or "allocate" in str(error)
        reason = f": {_reason(error)}" if is_short else " is damaged or not a PyTorch checkpoint"
        raise DamagedCheckpoint(f"{path.name}{reason}") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise DamagedCheckpoint(f"{path.name} has format {found}, this program reads format {FORMAT}")
    return content


def weights_file(path: Path) -> Path:
    """The weights file for a path: the file itself, the one in a checkpoint's directory, or a run's best one."""
    best = path / FOLDER / BEST  # if the path is a run's directory
    path = best if best.is_dir() else path
    file = path / WEIGHTS if path.is_dir() else path
    if not file.exists():
        raise UserError(f"no such file: {file}; give {ANY_CHECKPOINT}")
    return file


def read_weights(path: Path) -> dict[str, Any]:
    """Content of `weights_file(path)`; raises UserError if it is damaged."""
    file = weights_file(path)
    with damage_for_users(file):
        if (file.parent / CHECKSUMS).exists():
            verify(file.parent, (file.name,))
        content = read(file)
    if "network" not in content:
        raise UserError(f"{file} holds no network; give {WEIGHTS} in the same directory")
    return content


@contextlib.contextmanager
def damage_for_users(path: Path) -> Iterator[None]:
    """Converts DamagedCheckpoint to UserError; `path` is the file or the directory that the user has chosen."""
    try:
        yield
    except DamagedCheckpoint as damage:
        chosen = path.resolve().parent if path.is_file() else path.resolve()
        folder = chosen.parent
        steps = saved_steps(folder) if folder.name == FOLDER else []
        others = [str(step_directory(folder, step)) for step in steps if step_directory(folder, step) != chosen]
        example = f"for example {others[0]}" if others else ANY_CHECKPOINT
        raise UserError(f"cannot read {path}: {damage}; recopy it, or give another checkpoint: {example}") from None


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, intact or damaged, newest first."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name[5:]) for name in names if re.fullmatch(r"step_\d{8,}", name)), reverse=True)


def step_directory(folder: Path, step: int) -> Path:
    """Directory of the checkpoint of a step."""
    return folder / f"step_{step:08d}"


def load(path: Path) -> Checkpoint:
    """Loads a checkpoint to the CPU without verifying its digests; raises DamagedCheckpoint if it cannot be read."""
    weights, training = read(path / WEIGHTS), read(path / TRAINING)
    for name, content, keys in ((WEIGHTS, weights, WEIGHTS_KEYS), (TRAINING, training, TRAINING_KEYS)):
        missing = [key for key in keys if key not in content]
        if missing:
            raise DamagedCheckpoint(f"{name} has no {missing[0]}")
    try:
        return Checkpoint(path, weights, training, TrainState(**training["state"]))
    except TypeError as error:
        raise DamagedCheckpoint(f"{TRAINING}: {error}") from None


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest intact checkpoint, None if there are none; logs damaged ones.

    Raises UserError if all checkpoints are damaged.
    """
    skipped = []
    for step in saved_steps(folder):
        path = step_directory(folder, step)
        try:
            verify(path)
            return load(path)
        except DamagedCheckpoint as damage:
            skipped.append(f"{path.name} ({damage})")
            log.warning("Checkpoint %s is skipped: %s", path, damage)
    if skipped:
        raise UserError(
            f"no usable checkpoint in {folder}: {', '.join(skipped)}; start from scratch with --resume=no, which "
            f"removes them, or with another --run_num"
        )
    return None


# --- saving --------------------------------------------------------------------------------------------------------


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


def stored_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as checkpoints store it: without the local batch size, which depends on the number of ranks."""
    return {**config, "local_batch_size": None}


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
            self._fault = reason = _reason(error)
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
            self._fault = reason = _reason(error)
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


def update_symlink(link: Path, name: str) -> None:
    """Creates a symbolic link or replaces it atomically."""
    fresh = link.with_name(f".{link.name}.{os.urandom(8).hex()}.partial")
    try:
        fresh.symlink_to(name)
        os.replace(fresh, link)
    finally:
        fresh.unlink(missing_ok=True)


class SaveTimer:
    """Tells when `every_minutes` have passed since the last save. Rank 0's clock decides, since clocks differ."""

    def __init__(self, every_minutes: float | None, world: World) -> None:
        self._seconds = 60 * every_minutes if every_minutes is not None and world.is_root else None
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()

    def is_due(self) -> bool:
        return self._seconds is not None and time.perf_counter() - self._started > self._seconds
