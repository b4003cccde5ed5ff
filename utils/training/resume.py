"""Determines the starting point of a training run: a checkpoint of this or another run, given weights, or from scratch.

The run directory is locked when these functions are called. Its checkpoints stay until everything has been checked.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from utils import config as configs
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import recover
from utils.steps.eager import EagerStep
from utils.training import checkpoint
from utils.training.checkpoint import (
    FOLDER,
    WEIGHTS,
    Checkpoint,
    DamagedCheckpoint,
    damage_for_users,
    read_weights,
    resolve_weights,
    stored_config,
    verify,
)
from utils.training.loggers.base import Resumed
from utils.training.state import TrainState

# Config keys that decide which samples a step gets: with other values the saved position would be meaningless.
ORDER_KEYS = ("seed", "Nsamples", "global_batch_size", "data_size", "box_size", "symmetries", "dataset")

# Keys and sections that decide the learning rate of a step, in addition to these.
SCHEDULE_KEYS = ("num_epochs", "base_batch_size", "lr_schedule")

REMEDY = "omit --resume, or give this run another --run_num"


class Start:
    """The start of one training run, equal on every rank."""

    def __init__(
        self,
        config: Mapping[str, Any],
        init_from: str | None,
        saved: Checkpoint | None = None,
        overridden: bool = False,
        is_elsewhere: bool = False,
    ) -> None:
        """Starts from the checkpoint `saved`; without one, from the weights `init_from` or from scratch.

        `overridden`: `init_from` has no effect because --resume found a checkpoint.
        `is_elsewhere`: the checkpoint is that of a run in another directory.
        Raises UserError if the checkpoint's run saw other samples.
        """
        self._init_from, self._checkpoint, self._overridden = init_from, saved, overridden
        self.is_elsewhere = is_elsewhere
        self._path = saved.path if saved else None
        self.state = saved.state if saved else TrainState()
        self._changes = _changes(saved, config) if saved else []
        # No epoch is left to train.
        self.is_complete = saved is not None and _is_complete(saved.state, config)
        # Without a checkpoint the run starts from scratch or from weights.
        self.resumed = Resumed(saved.state.step, saved.state.batch > 0, self.is_complete) if saved else None
        # All epochs of the run in this directory are trained, but a kill may have prevented its summary.
        self.may_lack_summary = (
            saved is not None
            and self.is_complete
            and not self.is_elsewhere
            and _is_complete(saved.state, saved.weights["config"])
        )
        self._num_epochs = config["num_epochs"] if saved else 0
        # The network that the first validation measures.
        self.initial_network = "weights of --init_from" if init_from and not saved else "untrained network"

    def restore(self, step: EagerStep, world: World) -> TrainState:
        """Loads the checkpoint or the weights into the step and frees them; returns the training state.

        Raises UserError if they do not fit.
        """
        saved, self._checkpoint = self._checkpoint, None
        if saved is not None:
            with _must_fit(str(saved.path), REMEDY):
                step.load_state({"network": saved.weights["network"], **saved.training})
                _restore_random(saved, world)
        elif self._init_from is not None:
            weights = resolve_weights(self._init_from, world)  # the same on all ranks, even if that run saves meanwhile
            with world.raise_together(), _must_fit(self._init_from, "use a checkpoint with the same network config"):
                step.load_weights(read_weights(weights)["network"])
        return self.state

    def describe(self) -> list[str]:
        """Log lines about the starting point."""
        if self._path is None:
            return [f"Weights of {self._init_from}"] if self._init_from else []
        lines = [f"Resuming from {self._path}, after step {self.state.step}"]
        if self._changes:
            is_rescheduled = any(change.split()[0].split(".")[0] in SCHEDULE_KEYS for change in self._changes)
            schedule = "; the learning rate follows the new schedule" if is_rescheduled else ""
            lines.append(f"Changed config keys: {', '.join(self._changes)}{schedule}")
        if self._overridden:
            lines.append("--init_from has no effect, because --resume has found a checkpoint; omit --resume")
        return lines

    @property
    def nothing_to_train(self) -> str:
        """A log line about a complete run."""
        epochs, reason, key = self.state.epoch, f"num_epochs is {self._num_epochs}", "num_epochs"
        if epochs < self._num_epochs:
            reason, key = "early_stopping ended it", "early_stopping.patience"
        return (
            f"Nothing was trained: {self._path} is the end of epoch {epochs}, and {reason}; raise {key} to extend that "
            f"run, or omit --resume to start a new one"
        )


def find_start(
    directory: Path,
    resume: str | None,
    init_from: str | None,
    config: Mapping[str, Any],
    world: World,
    clean_up: bool = True,
) -> Start:
    """The start of a training run in a run directory; every rank calls it.

    `resume` is None, auto, no, or the directory of another run or of a checkpoint. The checkpoints in the run directory
    take precedence, except with no. `clean_up`: complete or remove what a killed process left, which needs the lock.
    """
    saved: Checkpoint | None = None
    with world.raise_together():
        if world.is_root:
            saved = _find_checkpoint(directory, resume, clean_up)
    path = world.gather_json(str(saved.path) if saved else None)[0]
    with world.raise_together():
        if path is not None and saved is None:
            try:
                saved = checkpoint.load(Path(path))
            except DamagedCheckpoint as damage:
                raise UserError(
                    f"{path} is intact on rank 0 but not on this rank: {damage}; set expdir to a directory that all "
                    f"nodes share"
                ) from None
    elsewhere = saved is not None and saved.path.parent.resolve() != (directory / FOLDER).resolve()
    if saved is not None and elsewhere:
        saved.state.best_loss, saved.state.best_step = math.inf, 0  # the other run's best checkpoint stays there
    overridden = init_from is not None and resume is not None and saved is not None
    with _must_fit(str(saved and saved.path), REMEDY):
        return Start(config, init_from, saved, overridden, elsewhere)


def random_states(world: World) -> list[list[torch.Tensor]]:
    """`random_state` of each rank; every rank calls it."""
    gathered = [world.gather(state) for state in random_state(world.device)]
    return [[state.clone() for state in states] for states in zip(*gathered, strict=True)]


def random_state(device: torch.device) -> list[torch.Tensor]:
    """State of torch's generators on the host and on the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _find_checkpoint(directory: Path, resume: str | None, clean_up: bool) -> Checkpoint | None:
    """The newest checkpoint in a run directory, or else in another run's."""
    folder = directory / FOLDER
    if resume == "no":
        return None
    if clean_up and folder.is_dir():
        with contextlib.suppress(OSError):  # a folder that cannot be written is reported at the first save
            recover(folder)
    saved = checkpoint.load_newest(folder)
    if saved is None and resume not in (None, "auto"):
        return _checkpoint_of_flag(resume)
    return saved


def _checkpoint_of_flag(resume: str) -> Checkpoint:
    """The checkpoint in a directory, or the newest one of a run; raises UserError if there is none."""
    directory = Path(resume)
    if (directory / WEIGHTS).exists():
        with damage_for_users(directory):
            verify(directory)
            return checkpoint.load(directory.resolve())  # a run in progress may move its link `best`
    folder = directory / FOLDER
    saved = checkpoint.load_newest(folder if folder.is_dir() else directory)
    if saved is None:
        reason = "it holds no checkpoint" if directory.exists() else "no such directory"
        raise UserError(f"--resume={resume}: {reason}; give a run directory, a checkpoint directory, auto or no")
    return saved


@contextlib.contextmanager
def _must_fit(source: str, remedy: str) -> Iterator[None]:
    """Converts the errors of weights and state that belong to another run to UserErrors."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{source} does not fit this run: {error}; {remedy}") from error


def _changes(saved: Checkpoint, config: Mapping[str, Any]) -> list[str]:
    """Config keys that have changed since the checkpoint; UserError if a step would now get other samples."""
    before, now = saved.weights["config"], stored_config(config)
    for key in ORDER_KEYS:
        if before.get(key, now[key]) != now[key]:
            raise UserError(
                f"{saved.path} was written by a run with {key} {before[key]}, this one has {now[key]} and would see "
                f"other samples; {REMEDY} (--init_from loads weights alone)"
            )
    before, now = configs.flatten(before), configs.flatten(now)
    return [f"{key} {before[key]} -> {now[key]}" for key in now if before.get(key, now[key]) != now[key]]


def _is_complete(state: TrainState, config: Mapping[str, Any]) -> bool:
    """True if this config leaves no epoch to train."""
    return state.is_complete(config["num_epochs"], config["early_stopping"]["patience"])


def _restore_random(saved: Checkpoint, world: World) -> None:
    """Restores each rank's generators, unless the number of ranks or the kind of device has changed."""
    states = saved.training["random"]
    if len(states) != world.size or len(states[world.rank]) != len(random_state(world.device)):
        return
    host, *device = states[world.rank]
    torch.set_rng_state(host)
    if device:
        torch.cuda.set_rng_state(device[0], world.device)
