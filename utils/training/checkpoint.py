"""Checkpoint files: everything that a run needs to resume exactly; written atomically, verified when read.

<run>/checkpoints/step_00000400/ holds weights.pt (network and config, for predictions), training.pt (optimizer, scaler,
random number generators, training state) and SHA256SUMS, which `sha256sum -c` can read. A directory gets its name once
it is complete. Each one records the step with the lowest validation loss so far, to which the link `best` points.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users
from utils.files import atomic_directory
from utils.training.state import TrainState

log = logging.getLogger(__name__)

FORMAT = 2
WEIGHTS, TRAINING, CHECKSUMS = "weights.pt", "training.pt", "SHA256SUMS"
WEIGHTS_KEYS, TRAINING_KEYS = ("network", "config"), ("optimizer", "scaler", "random", "state")
FOLDER, BEST = "checkpoints", "best"
NO_BEST = "no epoch so far has lowered the validation loss below that of the initial network"
ANY_CHECKPOINT = f"a run directory, a checkpoint directory, or a {WEIGHTS}"


class DamagedCheckpoint(Exception):
    """A checkpoint that this program cannot use; the message gives the reason."""

    def __init__(self, reason: str, remedy: str = "recopy it, or give another checkpoint") -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    path: Path
    weights: dict[str, Any]
    training: dict[str, Any]
    state: TrainState


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
    lines, reading = {}, CHECKSUMS
    try:
        listed = (directory / CHECKSUMS).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        for reading in names:
            lines[reading] = f"{digest(directory / reading)}  {reading}\n"
    except OSError as error:
        raise DamagedCheckpoint(f"{reading}: {reason_of(error)}") from None
    damaged = [name for name, line in lines.items() if line not in listed]
    if len(names) > 1 and listed != list(lines.values()):
        damaged.append(CHECKSUMS)
    if damaged:
        raise DamagedCheckpoint(f"{damaged[0]} is damaged: its digest does not match")


def reason_of(error: Exception) -> str:
    """The reason of an error, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or repr(error)).splitlines()[0]


def digest(path: Path) -> str:
    """SHA-256 of a regular file."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            sha256.update(block)
    return sha256.hexdigest()


def read(path: Path) -> dict[str, Any]:
    """Content of one file, read without running code in it; raises DamagedCheckpoint if it cannot be read."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # PyTorch's own messages are paragraphs, and advise the user to run the code in the file.
        is_short = isinstance(error, OSError | MemoryError) or "allocate" in str(error)
        reason = f": {reason_of(error)}" if is_short else " is damaged or not a PyTorch checkpoint"
        raise DamagedCheckpoint(f"{path.name}{reason}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedCheckpoint(
            f"{path.name} was not written by this version of the program", "give another checkpoint"
        )
    return content


def weights_file(path: Path) -> Path:
    """The weights file for a path: the file itself, the one in a checkpoint's directory, or a run's best one.

    Raises UserError if there is none.
    """
    names_link = path.name == BEST and path.parent.name == FOLDER
    folder = path.parent if names_link else path / FOLDER  # if the path is a run's directory
    with os_errors_for_users(f"cannot read {path}", f"give {ANY_CHECKPOINT}"):
        path = best_checkpoint(folder) if folder.is_dir() else path
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
    if not isinstance(content.get("network"), dict):
        raise UserError(f"{file} holds no network; give {WEIGHTS} in the same directory")
    return content


def resolve_weights(checkpoint: str, world: World) -> Path:
    """The weights file that `checkpoint` names, the same on all ranks.

    A training run that is still running moves the link to its best checkpoint, so one rank resolves the link for all.
    """
    with world.raise_together():
        weights = str(weights_file(Path(checkpoint)).resolve()) if world.is_root else ""
    return Path(world.gather_json(weights)[0])


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
        raise UserError(f"cannot read {path}: {damage}; {damage.remedy}: {example}") from None


def best_checkpoint(folder: Path) -> Path:
    """The directory of a run's best checkpoint, which its newest intact one names; raises UserError if there is none.

    The link `best` is for users: a process can be killed after it wrote a checkpoint and before it moved the link.
    Where the save of the best checkpoint has failed, the link names the best one before it, which is used.
    """
    steps, link = saved_steps(folder), folder / BEST
    for step in steps:
        newest = step_directory(folder, step)
        try:
            verify(newest, (WEIGHTS,))
            best_step = read(newest / WEIGHTS)["best_step"]
        except DamagedCheckpoint as damage:
            log.warning("Checkpoint %s is skipped: %s", newest, damage)
            continue
        best = step_directory(folder, best_step)
        if best_step and best.is_dir():
            return best
        if best_step and link.is_dir():
            log.warning("The best checkpoint, %s, is missing; using %s", best, link.resolve())
            return link.resolve()
        why = f"{best} is missing" if best_step else NO_BEST
        remedy = f"give another checkpoint, for example the last one, {newest}"
        raise UserError(f"{folder.parent} has no best checkpoint: {why}; {remedy}")
    if link.is_dir() and not steps:  # a copy of the best checkpoint alone
        return link
    raise UserError(f"no usable checkpoint in {folder}; give {ANY_CHECKPOINT}")


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
        missing = [key for key in keys if not isinstance(content.get(key), dict | list)]
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


def stored_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as checkpoints store it: without the local batch size, which depends on the number of ranks."""
    return {**config, "local_batch_size": None}


def update_symlink(link: Path, name: str) -> None:
    """Creates a symbolic link or replaces it atomically."""
    fresh = link.with_name(f".{link.name}.{os.urandom(8).hex()}.partial")
    try:
        fresh.symlink_to(name)
        os.replace(fresh, link)
    finally:
        fresh.unlink(missing_ok=True)
