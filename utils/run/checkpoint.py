"""Checkpoint files (docs/reliability.md): what an exact resumption needs; written atomically, verified when read."""

import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from utils.config import retired
from utils.distributed.world import World
from utils.errors import UserError, os_reason
from utils.files import atomic_directory, remove
from utils.log import once_per_job
from utils.run.directory import RunDirectory
from utils.run.state import TrainState

log = once_per_job(__name__)

FORMAT = 2
WEIGHTS, TRAINING, CHECKSUMS = "weights.pt", "training.pt", "SHA256SUMS"
BEST, DOUBTFUL = "best", "doubtful_"
NO_BEST = "no saved epoch so far has lowered the validation loss below that of the initial network"
ANY_CHECKPOINT = f"a run directory, a checkpoint directory, or a {WEIGHTS}"


class DamagedCheckpoint(UserError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"cannot read {path}: {reason}; recopy it, or give another checkpoint")
        self.reason = reason


@dataclass(frozen=True)
class Weights:
    """The content of a weights.pt, by name: what a prediction needs. Files of earlier versions lack some."""

    network: Mapping[str, torch.Tensor]  # the state of the network, averaged if ema_decay is set
    config: Mapping[str, Any]  # that of the run, with the channels of its volumes
    epoch: int = 0
    step: int = 0
    final_loss: float | None = None  # validation losses: of this checkpoint, and the step with the lowest so far
    best_step: int | None = None
    density_filter: list[float] | None = None  # the Calibration of the gas density
    density_factor: float | None = None
    simulation: Mapping[str, Any] = field(default_factory=dict)  # what all training files state alike
    input_statistics: Mapping[str, Any] | None = None  # of the training inputs
    data: Mapping[str, str] = field(default_factory=dict)  # digests of samples of the files, by config key
    code: Mapping[str, str] | None = None  # SHA-256 of the files of the user's own classes

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Weights":
        return cls(**{name: content[name] for name in cls.__dataclass_fields__ if name in content})


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    weights: dict[str, Any]
    training: dict[str, Any]

    @cached_property
    def state(self) -> TrainState:
        stored = self.training["state"]
        return TrainState(**{name: stored[name] for name in TrainState.__dataclass_fields__ if name in stored})


def write(target: Path, weights: Mapping[str, Any], training: Mapping[str, Any]) -> None:
    """Writes both files and their digests atomically; raises OSError if the disk fails."""
    with atomic_directory(target) as partial:
        digests = ""
        for name, content in ((WEIGHTS, weights), (TRAINING, training)):
            with open(partial / name, "wb") as file:
                try:
                    torch.save({"format": FORMAT, **content}, file)
                except RuntimeError as error:  # PyTorch's writer replaces the OSError of a full disk
                    raise (error.__context__ or error) from None
            digests += f"{file_digest(partial / name)}  {name}\n"
        (partial / CHECKSUMS).write_text(digests, encoding="ascii")


def stored_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as checkpoints store it: without the local batch size, which depends on the number of ranks."""
    return {**config, "local_batch_size": None}


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, intact or damaged, newest first."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name[5:]) for name in names if re.fullmatch(r"step_\d{8,}", name)), reverse=True)


def step_directory(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def set_aside(folder: Path, last: int) -> None:
    """Renames the checkpoints after the step `last`, so that no run resumes from them."""
    for step in saved_steps(folder):
        if step > last:
            path = step_directory(folder, step)
            doubtful = path.with_name(DOUBTFUL + path.name)
            remove(doubtful)
            path.rename(doubtful)


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest intact checkpoint, None without any; logs damaged ones; UserError if all are damaged."""
    skipped = []
    for step in saved_steps(folder):
        path = step_directory(folder, step)
        try:
            return load(path)
        except DamagedCheckpoint as damage:
            skipped.append(f"{path.name} ({damage.reason})")
            log.warning("Checkpoint %s is skipped: %s", path, damage.reason)
    if skipped:
        raise UserError(
            f"no usable checkpoint in {folder}: {', '.join(skipped)}; recopy one, or start from scratch with another "
            f"--run_num and without --resume"
        )
    return None


def load(path: Path) -> Checkpoint:
    """Verifies a checkpoint and loads it to the CPU; raises DamagedCheckpoint if it cannot be used."""
    verify(path)
    return Checkpoint(path, read(path / WEIGHTS), read(path / TRAINING))


def read(path: Path) -> dict[str, Any]:
    """Content of one file, read without running code in it; raises DamagedCheckpoint if it cannot be used."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # PyTorch's own messages are paragraphs, and advise the user to run the code in the file.
        if isinstance(error, OSError | MemoryError) or "allocate" in str(error):
            raise
        raise DamagedCheckpoint(path, f"{path.name} is damaged or not a PyTorch checkpoint") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedCheckpoint(path, f"{path.name} was not written by this version of the program")
    if isinstance(config := content.get("config"), dict):
        content["config"] = retired.update(config, path)
    return content


def verify(directory: Path, names: Sequence[str] = (WEIGHTS, TRAINING)) -> None:
    """Raises DamagedCheckpoint unless the files match SHA256SUMS."""
    reading = CHECKSUMS
    try:
        listed = (directory / CHECKSUMS).read_text(encoding="utf-8", errors="replace").splitlines()
        for reading in names:
            if f"{file_digest(directory / reading)}  {reading}" not in listed:
                raise DamagedCheckpoint(directory, f"{reading} is damaged: its digest does not match")
    except OSError as error:
        raise DamagedCheckpoint(directory, f"{reading}: {os_reason(error)}") from None


def share(saved: Checkpoint | None, world: World) -> Checkpoint | None:
    """The checkpoint that rank 0 has read, on every rank; None if there is none."""
    content = world.broadcast((str(saved.path), saved.weights, saved.training) if saved else None)
    return saved if saved or content is None else Checkpoint(Path(content[0]), *content[1:])


def file_digest(path: Path) -> str:
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            sha256.update(block)
    return sha256.hexdigest()


def load_weights(checkpoint: str, world: World) -> tuple[Path, dict[str, Any]]:
    """The file that `checkpoint` names, resolved once (a run moves its link), and its content; every rank calls it."""
    content = None
    with world.raise_together():
        if world.is_root:
            path = weights_file(Path(checkpoint)).resolve()
            content = str(path), read_weights(path)
    name, content = world.broadcast(content)
    return Path(name), content


def weights_file(path: Path) -> Path:
    """The file itself, the one in a checkpoint's directory, or a run's best one; UserError if there is none."""
    folder = RunDirectory(path).checkpoints
    directory = best_checkpoint(folder) if folder.is_dir() else named_checkpoint(path)
    file = directory / WEIGHTS if directory.is_dir() else directory
    if not file.is_file():
        raise UserError(
            f"{'not a regular' if file.exists() else 'no such'} file: {file}; give {ANY_CHECKPOINT}{runs_below(path)}"
        )
    return file


def named_checkpoint(path: Path) -> Path:
    """The path, but for <run>/checkpoints/best the best checkpoint there."""
    return best_checkpoint(path.parent) if path.name == BEST and saved_steps(path.parent) else path


def best_checkpoint(folder: Path) -> Path:
    """The checkpoint with the lowest validation loss in the folder of a run's checkpoints; UserError if there is none.

    A copy may lack the link that names it: there, the newest checkpoint whose best one exists decides.
    """
    link, steps, reason = folder / BEST, saved_steps(folder), NO_BEST
    if link.exists():
        return link
    for step in steps:
        with contextlib.suppress(DamagedCheckpoint, FileNotFoundError):
            best_step = read(step_directory(folder, step) / WEIGHTS)["best_step"]
            best = step_directory(folder, best_step)
            if best.exists():
                return best
            reason = f"{best.name} is missing" if best_step else reason
    example = f"the last one, {step_directory(folder, steps[0])}" if steps else ANY_CHECKPOINT
    raise UserError(f"{folder} has no best checkpoint: {reason}; give another checkpoint, for example {example}")


def runs_below(path: Path) -> str:
    """The runs below a directory, for the error that it is none; empty if there are none."""
    runs = [str(folder.parent) for folder in sorted(path.glob("**/checkpoints"))] if path.is_dir() else []
    return f", for example {' or '.join(runs[:3])}" if runs else ""


def read_weights(path: Path) -> dict[str, Any]:
    """Content of `weights_file(path)`; raises UserError if it is damaged."""
    file = weights_file(path)
    if (file.parent / CHECKSUMS).exists():
        verify(file.parent, (file.name,))
    content = read(file)
    if not isinstance(content.get("network"), dict):
        raise UserError(f"{file} holds no network; give {WEIGHTS} in the same directory")
    return content
