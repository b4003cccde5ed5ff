"""Determines the starting point of a training run: a checkpoint of this or another run, given weights, or from scratch.

The run directory is locked when these functions are called. Its checkpoints stay until everything has been checked.
"""

import contextlib
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from utils import config as configs
from utils.config.sections import ChannelsConfig
from utils.distributed.devices import random_state
from utils.distributed.world import World
from utils.errors import UserError, value_errors_for_users
from utils.lookup import warn_of_other_code
from utils.run import checkpoint
from utils.run.checkpoint import WEIGHTS, Checkpoint, load_weights, stored_config
from utils.run.choice import Choice
from utils.run.directory import RunDirectory
from utils.run.state import TrainState
from utils.steps.eager import EagerStep
from utils.volumes.attributes import channel_difference
from utils.volumes.input_statistics import compare
from utils.volumes.opened import Volumes

log = logging.getLogger(__name__)

# Config keys that decide which samples a step gets: with other values the saved position would be meaningless.
ORDER_KEYS = ("seed", "Nsamples", "global_batch_size", "data_size", "box_size", "symmetries", "dataset.name")
# Keys of the loss: with other values it is not compared with earlier ones.
LOSS_KEYS = {"loss", "loss_options", "lambda_rho", "channel_weights"}

REMEDY = "omit --resume to start from scratch; --init_from loads weights alone"


class Start:
    """The start of one training run, equal on every rank.

    path, state: the checkpoint from which it resumes; None and the initial state for weights or from scratch.
    is_complete: no epoch is left to train.
    lacks_only_summary: all epochs of the run in this directory are trained, but a kill may have prevented its summary.
    initial_network: the network that the first validation measures.
    """

    def __init__(
        self, config: Mapping[str, Any], init_from: str | None, saved: Checkpoint | None, is_elsewhere: bool
    ) -> None:
        """Starts from `saved`, else `init_from`, else from scratch; UserError if `saved` is of other samples."""
        self._init_from, self._checkpoint, self._config = init_from, saved, configs.flatten(config)
        self.path = saved.path if saved else None
        self.state = saved.state if saved else TrainState()
        self._changes = _changes(saved, config) if saved else []
        if saved and is_elsewhere:  # the other run's best checkpoint stays there
            saved.state.best_loss, saved.state.best_step = math.inf, 0
        if saved and LOSS_KEYS & {change.split()[0] for change in self._changes}:  # of another loss
            saved.state.best_loss, saved.state.best_step, saved.training["loss"] = math.inf, 0, {}
        self.is_complete = saved is not None and saved.state.epoch >= config["num_epochs"]
        trained = saved is not None and saved.state.epoch >= saved.weights["config"]["num_epochs"]
        self.lacks_only_summary = self.is_complete and trained and not is_elsewhere
        self.initial_network = "weights of --init_from" if init_from and not saved else "untrained network"

    def restore(self, step: EagerStep, volumes: Volumes, world: World) -> TrainState:
        """Loads checkpoint or weights into the step and compares the data; UserError if they do not fit."""
        saved, self._checkpoint = self._checkpoint, None
        if saved is not None:
            warn_of_other_code(str(saved.path), saved.weights)
            other = [change for change in self._changes if change.startswith(("network.", "N_out_", "channels."))]
            undo = f"undo {', '.join(other)}, or omit --resume to start from scratch"
            with _must_fit(str(saved.path), undo if other else REMEDY):
                step.load_state({"network": saved.weights["network"], **saved.training})
            _restore_random(saved, world)
        elif self._init_from is not None:
            _, weights = load_weights(self._init_from, world)
            warn_of_other_code(self._init_from, weights)
            with world.raise_together(), _must_fit(self._init_from, "use a checkpoint with the same network config"):
                _check_meaning(self._init_from, configs.flatten(weights.get("config", {})), self._config)
                step.load_weights(weights["network"])
                if world.is_root:
                    _compare(self._init_from, weights, volumes)
        return self.state

    def describe(self) -> list[str]:
        if self.path is None:
            return [f"Weights of {self._init_from}"] if self._init_from else []
        lines = [f"Resuming from {self.path}, after step {self.state.step}"]
        return [*lines, f"Changed config keys: {', '.join(self._changes)}"] if self._changes else lines

    @property
    def nothing_to_train(self) -> str:
        return (
            f"Nothing was trained: {self.path} is the end of epoch {self.state.epoch}, the last one; raise num_epochs "
            f"to extend that run, or omit --resume to start a new one"
        )


def find_start(choice: Choice, init_from: str | None, config: Mapping[str, Any], world: World) -> Start:
    """The start of a run; every rank calls it. Checkpoints in its directory precede `choice.resume`, except with no."""
    directory, resume = choice.directory, choice.resume
    saved: Checkpoint | None = None
    with world.raise_together():
        if world.is_root and resume != "no":
            saved = checkpoint.load_newest(directory.checkpoints)
            if saved is None and resume not in (None, "auto"):
                saved = _checkpoint_of_flag(resume)
    saved = checkpoint.share(saved, world)
    is_elsewhere = saved is not None and saved.path.parent.resolve() != directory.checkpoints.resolve()
    if saved is not None and is_elsewhere:
        saved.state.step_seconds = saved.state.process_seconds = 0.0  # its time does not count here
    return Start(config, init_from, saved, is_elsewhere)


def _checkpoint_of_flag(resume: str) -> Checkpoint:
    """The checkpoint in a directory, or the newest one of a run; raises UserError if there is none."""
    directory = checkpoint.named_checkpoint(Path(resume))
    if (directory / WEIGHTS).exists():
        return checkpoint.load(directory.resolve())  # a run in progress may move its link `best`
    saved = checkpoint.load_newest(RunDirectory(directory).checkpoints)
    if saved is None:
        reason = "it holds no checkpoint" if directory.exists() else "no such directory"
        remedy = f"give a run directory, a checkpoint directory, auto or no{checkpoint.runs_below(directory)}"
        raise UserError(f"--resume={resume}: {reason}; {remedy}")
    return saved


def _must_fit(source: str, remedy: str) -> contextlib.AbstractContextManager[None]:
    """Context in which errors mean that weights or state belong to another run."""
    kinds = ValueError, LookupError, TypeError
    return value_errors_for_users(lambda error: f"{source} does not fit this run: {error}; {remedy}", kinds)


def _changes(saved: Checkpoint, config: Mapping[str, Any]) -> list[str]:
    """Config keys that have changed since the checkpoint; UserError if a step would now get other samples."""
    before, now = configs.flatten(saved.weights["config"]), configs.flatten(stored_config(config))
    for key in ORDER_KEYS:
        if before.get(key, now[key]) != now[key]:
            fault = f"{saved.path} was written by a run with {key} {before[key]}, this one has {now[key]}"
            raise UserError(f"{fault} and would see other samples; {REMEDY}")
    _check_meaning(str(saved.path), before, now)
    return [f"{key} {before[key]} -> {now[key]}" for key in now if before.get(key, now[key]) != now[key]]


def _compare(source: str, weights: Mapping[str, Any], volumes: Volumes) -> None:
    """Compares the training data with those on which given weights were trained."""
    before = ChannelsConfig.model_validate(weights.get("config", {}).get("channels", {}))
    now = volumes.config.channels
    for channels in (now.inputs, before.inputs), (now.targets, before.targets):
        if all(channels) and (difference := channel_difference(*channels)):
            log.warning(f"{source} was trained on other channels: this run has {difference}")
    for volume in volumes.split("train") if volumes.has_files and weights.get("input_statistics") else ():
        compare(weights["input_statistics"], volume.path, volume.inputs, volumes.config, source)


def _check_meaning(source: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError for weights trained with other conditions, ranges or added vectors: they mean something else."""
    for key in ("network.conditions", "network.condition_ranges", "network.adds_vectors"):
        trained, current = (config.get(key) or ([] if "condition" in key else False) for config in (before, now))
        if trained != current:
            remedy = f"to keep the former, --set {key}={str(trained).replace(' ', '')}"
            raise UserError(f"{source} was trained with {key} {trained}, this run has {current}; {remedy}")


def random_states(world: World) -> list[list[torch.Tensor]]:
    """`random_state` of each rank; every rank calls it."""
    gathered = [world.gather(state) for state in random_state(world.device)]
    return [[state.clone() for state in states] for states in zip(*gathered, strict=True)]


def _restore_random(saved: Checkpoint, world: World) -> None:
    """Restores each rank's generators, unless the number of ranks or the kind of device has changed."""
    states = saved.training["random"]
    if len(states) != world.size or len(states[world.rank]) != len(random_state(world.device)):
        return
    host, *device = states[world.rank]
    torch.set_rng_state(host)
    if device:
        torch.cuda.set_rng_state(device[0], world.device)
