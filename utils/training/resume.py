"""Decides where a training starts: at a checkpoint of its own or of another run, with given weights, or from scratch.

Nothing on the disk changes before everything has been checked, except for the marker DISCARD.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from utils.distributed.launch import restarted
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import recover
from utils.runs.directory import lock
from utils.steps import Step
from utils.training import checkpoint
from utils.training.checkpoint import FOLDER, Checkpoint, DamagedCheckpoint, read_weights, stored_config
from utils.training.state import TrainState

# Config keys that decide which samples a step gets: a position in another order of samples means nothing.
ORDER_KEYS = ("seed", "Nsamples", "global_batch_size", "data_size", "box_size", "symmetries", "dataset")

# File among the checkpoints while --resume=no is requested and not yet carried out: a job that is restarted in between
# must not resume from the checkpoints that it was to replace.
DISCARD = ".discard"


def starts_from_scratch(resume: str) -> bool:
    """True for --resume=no, unless the launcher restarted the job: then it resumes whatever its command line says."""
    return resume == "no" and not restarted()


class Start:
    """The start of one training, equal on every rank."""

    def __init__(self, config: Mapping[str, Any], init_from: str | None, found: Checkpoint | None = None) -> None:
        """Starts from the checkpoint `found`; without one, from the weights `init_from` or from scratch.

        Raises UserError if the checkpoint's training saw other samples.
        """
        self._config, self._init_from, self._checkpoint = config, init_from, found
        self.path = found.path if found else None
        self.state = found.state if found else TrainState()
        self._changes = _changes(found, config) if found else []
        self._planned_epochs = found.weights["config"]["num_epochs"] if found else 0  # before it was interrupted

    @property
    def is_resumed(self) -> bool:
        return self.path is not None

    @property
    def resumed_step(self) -> int | None:
        """The step after which the training resumes; None if it starts from scratch or from weights."""
        return self.state.step if self.is_resumed else None

    @property
    def is_complete(self) -> bool:
        """True if no epoch is left to train."""
        return self.is_resumed and self.state.epoch >= self._config["num_epochs"]

    @property
    def was_interrupted(self) -> bool:
        """True if the checkpoint is not the last one of its training."""
        return self.is_resumed and self.state.epoch < self._planned_epochs

    @property
    def initial_network(self) -> str:
        """Description of the network that the first validation measures."""
        return "weights of --init_from" if self._init_from and not self.is_resumed else "untrained network"

    def restore(self, step: Step, world: World) -> TrainState:
        """Loads the checkpoint or the weights into the step and frees them; returns the training state.

        Raises UserError if they do not fit.
        """
        found, self._checkpoint = self._checkpoint, None
        try:
            if found is not None:
                step.load_state({"network": found.weights["network"], **found.training})
                _restore_random(found, world)
            elif self._init_from is not None:
                with world.raise_together():
                    step.load_weights(read_weights(Path(self._init_from))["network"])
        except UserError:
            raise
        except ValueError as error:
            source, remedy = self._init_from, "give the run of a network with the same config"
            if found is not None:
                source, remedy = str(found.path), "give this training another --run_num"
            raise UserError(f"{source} does not fit this training: {error}; {remedy}") from None
        return self.state

    def describe(self) -> list[str]:
        """Log lines on where the training starts."""
        if self.path is None:
            return [f"Weights of {self._init_from}"] if self._init_from else []
        lines = [f"Resuming from {self.path}, after step {self.state.step}"]
        if self._changes:
            lines.append(f"Changed config keys: {', '.join(self._changes)}; the learning rate follows the new schedule")
        if self._init_from:
            lines.append("--init_from has no effect: this run has a checkpoint; give another --run_num")
        if self.is_complete:
            lines.append(
                "This training is complete; raise num_epochs, start from scratch with --resume=no, or give another "
                "--run_num"
            )
        return lines


def find_start(directory: Path, resume: str, init_from: str | None, config: Mapping[str, Any], world: World) -> Start:
    """The start of a training in a run directory; every rank calls it.

    `resume` is auto, no or another run's directory. A run's own checkpoint comes before another run's.
    """
    found: Checkpoint | None = None
    with world.raise_together():
        if world.is_root:
            found = _find_checkpoint(directory, resume)
    path = world.gather_objects(found and str(found.path))[0]
    with world.raise_together():
        if path is not None and found is None:
            found = _load_verified(Path(path))
    if found is not None and found.path.parent.resolve() != (directory / FOLDER).resolve():
        found.state.best_loss = math.inf  # the other run's best checkpoint stays there
    return Start(config, init_from, found)


def discard_replaced(directory: Path, resume: str, start: Start, world: World) -> None:
    """Removes the checkpoints that a training with --resume=no replaces; every rank calls it."""
    with world.raise_together():
        if world.is_root and resume == "no" and not start.is_resumed:
            _discard(directory / FOLDER)


def random_state(device: torch.device) -> list[torch.Tensor]:
    """State of torch's generators on the host and on the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _find_checkpoint(directory: Path, resume: str) -> Checkpoint | None:
    marker = directory / FOLDER / DISCARD
    if starts_from_scratch(resume):
        with contextlib.suppress(OSError):
            marker.touch()
        return None
    if resume == "no" and marker.exists():
        return None
    return _newest(directory, None if resume in ("auto", "no") else Path(resume))


def _newest(directory: Path, other_run: Path | None) -> Checkpoint | None:
    """The newest checkpoint in a run directory, or else in another run's."""
    if (directory / FOLDER).is_dir():
        with contextlib.suppress(OSError), lock(directory):  # an unwritable directory is reported later
            recover(directory / FOLDER)
        found = checkpoint.newest(directory / FOLDER)
        if found is not None:
            return found
    if other_run is None:
        return None
    folder = other_run / FOLDER if (other_run / FOLDER).is_dir() else other_run
    found = checkpoint.newest(folder)
    if found is None:
        raise UserError(f"--resume={other_run}: it holds no checkpoint; give a run's directory, auto or no")
    return found


def _load_verified(path: Path) -> Checkpoint:
    """Loads a checkpoint that rank 0 has verified."""
    try:
        return checkpoint.load(path, verify_digests=False)
    except DamagedCheckpoint as damage:
        raise UserError(
            f"{path} is intact on rank 0 but not on this rank: {damage}; set expdir to a directory that all nodes share"
        ) from None


def _changes(found: Checkpoint, config: Mapping[str, Any]) -> list[str]:
    """Config keys that have changed since the checkpoint; UserError if a step would now get other samples."""
    before, now = found.weights["config"], stored_config(config)
    for key in ORDER_KEYS:
        if before.get(key, now[key]) != now[key]:
            raise UserError(
                f"{found.path} belongs to a training with {key} {before[key]}, this one has {now[key]} and would see "
                f"other samples; give this one another --run_num (--init_from loads weights alone)"
            )
    return [f"{key} {before[key]} -> {value}" for key, value in now.items() if before.get(key, value) != value]


def _restore_random(found: Checkpoint, world: World) -> None:
    """Restores each rank's generators, unless the number of ranks or the kind of device has changed."""
    states = found.training["random"]
    if len(states) != world.size or len(states[world.rank]) != len(random_state(world.device)):
        return
    host, *device = states[world.rank]
    torch.set_rng_state(host)
    if device:
        torch.cuda.set_rng_state(device[0], world.device)


def _discard(folder: Path) -> None:
    """Removes all checkpoints in a folder, which may be a link to another file system."""
    try:
        for step in checkpoint.saved_steps(folder):
            shutil.rmtree(checkpoint.place(folder, step))
        for name in (checkpoint.BEST, DISCARD):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"--resume=no: cannot remove {error.filename}: {error.strerror}; remove it by hand, or give another "
            f"--run_num"
        ) from None
