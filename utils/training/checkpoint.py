"""Checkpoints: all that a training needs to go on as if it had never stopped, written beside it, read only if whole.

<run>/checkpoints/step_00000400/ holds weights.pt (network and config: what a prediction needs), training.pt
(optimizer, scaler, random numbers, position) and SHA256SUMS, which `sha256sum -c` reads, too. A directory takes its
name when all of it is on the disk. `best` is a link to the one with the lowest validation loss.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from utils.errors import UserError
from utils.files import atomic_directory

log = logging.getLogger(__name__)

FORMAT = 1
WEIGHTS, TRAINING, DIGESTS = "weights.pt", "training.pt", "SHA256SUMS"
TRAINING_KEYS = ("optimizer", "scaler", "random", "position")
FOLDER, BEST = "checkpoints", "best"
ANY_CHECKPOINT = f"a run's directory, such as runs/demo/2GPU/00, a checkpoint's, or its {WEIGHTS}"


@dataclass
class TrainState:
    """How far a training has come: plain numbers, the same on every rank."""

    epoch: int = 0  # epochs done
    batch: int = 0  # steps of the next one done
    step: int = 0  # steps in all
    losses: list[float] = field(default_factory=list)  # of this epoch's steps, as far as they have been logged
    # Of the steps since the last log line: loss and gradient norm, as far as they have been read.
    interval: list[tuple[float, float]] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)  # what the gradient noise scale has summed up
    metrics: dict[str, float] = field(default_factory=dict)  # of the last validation
    skipped: int = 0  # steps without an update, in all
    skipped_in_a_row: int = 0
    initial_loss: float = float("nan")  # of the validation crops, as are the next two
    final_loss: float = float("nan")
    best_loss: float = float("inf")
    best_step: int = 0
    samples_per_second: float = 0.0  # of the last epoch
    epoch_seconds: float = 0.0  # of training in this epoch, and of all of it, in all its processes
    seconds: float = 0.0
    evaluation_seconds: float = 0.0  # of all evaluations of the whole box, and of the last one
    last_evaluation_seconds: float = 0.0


class DamagedCheckpoint(Exception):
    """A checkpoint that is not what was written; the message says why."""


# --- files ---------------------------------------------------------------------------------------------------------


def write(target: Path, weights: Mapping[str, Any], training: Mapping[str, Any]) -> None:
    """Both files and their digests, whole or not at all; raises OSError where the disk does not take them."""
    with atomic_directory(target) as partial:
        digests = ""
        for name, content in ((WEIGHTS, weights), (TRAINING, training)):
            with open(partial / name, "wb") as file:
                hashing = _Hashing(file)
                try:
                    torch.save({"format": FORMAT, **content}, hashing)  # type: ignore[arg-type] # it only writes
                except RuntimeError:
                    # PyTorch's writer covers the OSError of a full disk with an error of its own.
                    raise hashing.error or OSError("PyTorch could not write it") from None
            digests += f"{hashing.digest()}  {name}\n"
        (partial / DIGESTS).write_text(digests, encoding="ascii")


class _Hashing:
    """A file to write to that knows the SHA-256 of what has been written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._hash.update(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> str:
        return self._hash.hexdigest()


def verify(directory: Path, names: Sequence[str] = (WEIGHTS, TRAINING)) -> None:
    """Raises DamagedCheckpoint unless those files, and if they are all of them the list of digests, are as written."""
    try:
        listed = (directory / DIGESTS).read_bytes()
        found = [f"{digest(directory / name)}  {name}\n" for name in names]
    except OSError as error:
        raise DamagedCheckpoint(f"{Path(error.filename or directory).name}: {error.strerror or error}") from None
    good = listed.decode("ascii", "replace").splitlines(keepends=True)
    bad = next((name for name, line in zip(names, found, strict=True) if line not in good), None)
    if bad is None and len(names) > 1 and listed != "".join(found).encode():
        bad = DIGESTS
    if bad is not None:
        raise DamagedCheckpoint(f"{bad} is not what was written")


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        found = hashlib.sha256()
        while block := file.read(2**22):
            found.update(block)
    return found.hexdigest()


def read(path: Path) -> dict[str, Any]:
    """One file's content, without running code in it; raises DamagedCheckpoint for what is no such file."""
    if path.is_file() and not zipfile.is_zipfile(path):  # torch's own words for these are about its insides
        raise DamagedCheckpoint(f"{path.name} is cut off, or no checkpoint of PyTorch's")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: {error.strerror or error}") from None
    except Exception as error:
        raise DamagedCheckpoint(f"{path.name}: {(str(error) or repr(error)).splitlines()[0]}") from None
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise DamagedCheckpoint(f"{path.name} is of format {found}, this program reads format {FORMAT}")
    return content


def weights_file(path: Path) -> Path:
    """The weights file that `path` means: itself, the one in a checkpoint's directory, or a run's best one."""
    best = path / FOLDER / BEST  # of a run's directory
    path = best if best.is_dir() else path
    file = path / WEIGHTS if path.is_dir() else path
    if not file.exists():
        raise UserError(f"no such file: {file}; give {ANY_CHECKPOINT}")
    return file


def read_weights(path: Path) -> dict[str, Any]:
    """The content of the weights file that `path` means, for --init_from and predictions."""
    file = weights_file(path)
    try:
        content = read(file)
        if "network" not in content:
            raise DamagedCheckpoint(f"{file.name} holds no network; {WEIGHTS} beside it does")
        if (file.parent / DIGESTS).exists():
            verify(file.parent, (file.name,))
    except DamagedCheckpoint as damage:
        raise UserError(f"cannot read {file}: {damage}; give {ANY_CHECKPOINT}") from None
    return content


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, whole or damaged, newest first."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name[5:]) for name in names if re.fullmatch(r"step_\d{8,}", name)), reverse=True)


def place(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been found whole."""

    path: Path
    weights: dict[str, Any]
    training: dict[str, Any]
    position: TrainState


def load(path: Path, digests: bool = True) -> Checkpoint:
    """A checkpoint's content, on the CPU; raises DamagedCheckpoint unless it is what was written.

    Without `digests` that is only looked at as far as it shows: another rank has made sure.
    """
    if digests:
        verify(path)
    weights, training = read(path / WEIGHTS), read(path / TRAINING)
    for name, content, keys in ((WEIGHTS, weights, ("network", "config")), (TRAINING, training, TRAINING_KEYS)):
        missing = [key for key in keys if key not in content]
        if missing:
            raise DamagedCheckpoint(f"{name} has no {missing[0]}")
    try:
        position = TrainState(**training["position"])
    except TypeError as error:
        raise DamagedCheckpoint(f"{TRAINING}: {error}") from None
    return Checkpoint(path, weights, training, position)


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; those skipped are named; UserError where there are only others."""
    skipped = []
    for step in saved_steps(folder):
        path = place(folder, step)
        try:
            return load(path)
        except DamagedCheckpoint as damage:
            skipped.append(f"{path.name} ({damage})")
            log.warning("Checkpoint %s is skipped: %s", path, damage)
    if skipped:
        raise UserError(
            f"no usable checkpoint in {folder}: {', '.join(skipped)}; start anew with --resume=no, which removes them, "
            f"or with another --run_num"
        )
    return None


# --- saving --------------------------------------------------------------------------------------------------------


class NullCheckpointer:
    """Saves nothing: for ranks other than 0, and for measurements."""

    fault: str | None = None  # why the newest state of all that were to be saved is not on the disk

    def save(self, state: Mapping[str, Any], position: TrainState, *, is_best: bool, last_chance: bool) -> None:
        """Takes a copy of the state's tensors, and has it written."""

    def close(self) -> None:
        """Waits for what is being written."""


class Checkpointer(NullCheckpointer):
    """Writes checkpoints in a thread of its own, from a copy in host memory; keeps the last ones and the best.

    A disk that is full, read-only or gone costs a warning and the one checkpoint: training goes on, what has been saved
    stays, and the next save is tried. For a slow one it waits now and then, but not long.
    """

    # How long saves may wait, all together, for the one before to be written: seconds, and a part of the time so far.
    PATIENCE_SECONDS, PATIENCE = 10.0, 0.02
    BEST_SECONDS = 60.0  # and these more for the best one, which does not come again
    CLOSING_SECONDS = 300.0

    def __init__(self, folder: Path, config: Mapping[str, Any], keep_last: int) -> None:
        self._folder, self._config, self._keep_last = folder, dict(config), keep_last
        self._copy = HostCopy()
        self._writing: threading.Thread | None = None
        self._step, self._asked, self._waited = 0, 0, 0.0  # steps of the last one begun, and of the last one asked for
        self._began = self._started = time.monotonic()

    def save(self, state: Mapping[str, Any], position: TrainState, *, is_best: bool, last_chance: bool) -> None:
        """`state` has the network's under "network"; with `last_chance` it waits until all of it is written."""
        self._asked = position.step
        patience = self.PATIENCE_SECONDS + self.PATIENCE * (time.monotonic() - self._started) - self._waited
        patience = max(0.0, patience) + (self.BEST_SECONDS if is_best else 0.0)
        if not self._idle(self.CLOSING_SECONDS if last_chance else patience):
            self.fault = "the one before is still being written"
            log.warning(
                "No checkpoint at step %d: that of step %d is still being written, for %.0f s; training goes on",
                position.step,
                self._step,
                time.monotonic() - self._began,
            )
            return
        self._step, self._began = position.step, time.monotonic()
        try:
            finite, content = self._copy.take(state)
        except (RuntimeError, MemoryError) as error:
            self.fault = reason = (str(error) or repr(error)).splitlines()[0]
            log.warning("No checkpoint at step %d: no memory for a copy (%s); training goes on", position.step, reason)
            return
        if not finite:
            self.fault = "the weights are not all numbers"
            log.warning("No checkpoint at step %d: the network's weights are not all numbers", position.step)
            return
        content["position"] = record = asdict(position)
        weights = {
            "network": content.pop("network"),
            "config": self._config,
            **{key: record[key] for key in ("epoch", "step", "final_loss")},
        }
        self._writing = threading.Thread(
            target=self._write, args=(position.step, weights, content, is_best), name="checkpoint", daemon=True
        )
        self._writing.start()
        if last_chance:
            self.close()

    def close(self) -> None:
        if not self._idle(self.CLOSING_SECONDS):
            self.fault = "it is still being written"
            log.warning("The checkpoint of step %d was not written in time; earlier ones stay", self._step)

    def _idle(self, patience: float) -> bool:
        if self._writing is not None:
            asked = time.monotonic()
            self._writing.join(patience)
            self._waited += time.monotonic() - asked
            if self._writing.is_alive():
                return False
            self._writing = None
        return True

    def _write(self, step: int, weights: Mapping[str, Any], training: Mapping[str, Any], is_best: bool) -> None:
        target, started = place(self._folder, step), time.perf_counter()
        try:
            self._copy.wait()
            write(target, weights, training)
            if is_best:
                point_to(self._folder / BEST, target.name)
            self._prune(step)
        except Exception as error:  # whatever it is, no training ends for it
            self.fault = reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            log.warning("Cannot write checkpoint %s: %s; training goes on, earlier ones stay", target, reason)
        else:
            self.fault = None if step == self._asked else self.fault
            log.info("Checkpoint %s written in %.2f s", target, time.perf_counter() - started)

    def _prune(self, last: int) -> None:
        """Later ones were skipped as damaged, and this training has not come from them."""
        best = self._folder / BEST
        for step in [step for step in saved_steps(self._folder) if step <= last][self._keep_last :]:
            old = place(self._folder, step)
            if not (best.is_symlink() and os.readlink(best) == old.name):
                shutil.rmtree(old)


def point_to(link: Path, name: str) -> None:
    """Makes or moves a symbolic link, in one go."""
    fresh = link.with_name(f".{link.name}.{os.urandom(8).hex()}.partial")
    try:
        fresh.symlink_to(name)
        os.replace(fresh, link)
    finally:
        fresh.unlink(missing_ok=True)


class HostCopy:
    """Copies of a state's tensors in host memory, which the next copy uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, state: Any) -> tuple[bool, Any]:
        """Whether all of the network's tensors are finite, and the state with copies for tensors.

        On a GPU the copies are made in the order of the current stream, and are there after `wait`.
        """
        tensors = list(state["network"].values())
        # NaN and infinity are always among the extremes; on a CPU isfinite() takes twenty times as long.
        real = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        finite = [torch.stack(torch.aminmax(tensor)).isfinite().all() for tensor in real]
        copied = self._map(state, "")
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return bool(torch.stack(finite).all()) if finite else True, copied

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def _map(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy(value.detach(), name)
        if isinstance(value, Mapping):
            return {key: self._map(item, f"{name}/{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._map(item, f"{name}/{index}") for index, item in enumerate(value)]
        return value

    def _copy(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or _layout(buffer) != _layout(tensor):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.stride()
