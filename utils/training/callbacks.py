"""The objects that the training loop calls. Those here do nothing; profiles and evaluations are subclasses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from utils.distributed.signals import Signals
from utils.training.checkpoint_writer import CheckpointWriter
from utils.training.loggers.base import Logger


class Profiler:
    """Profiles a window of steps."""

    def before_step(self, step: int) -> None:
        """Called before each step, counted from 0 over the whole run."""

    def close(self) -> None:
        """Called at the end of training."""


class Evaluation:
    """An evaluation that runs during training, after the validation of each epoch."""

    def after_epoch(
        self, epoch: int, step: int, is_last: bool, stop_if_requested: Callable[[], None]
    ) -> dict[str, float]:
        """Evaluates the network and returns scalars to log; every rank calls it.

        `epoch` is the number of the epoch that ends, counted from 1; `is_last`: no other follows. A long evaluation
        calls `stop_if_requested` from time to time, on every rank at the same points; it raises Stopped after a stop
        signal.
        """
        return {}


@dataclass(frozen=True)
class Callbacks:
    records: Logger = field(default_factory=Logger)
    checkpoint_writer: CheckpointWriter = field(default_factory=CheckpointWriter)
    profiler: Profiler = field(default_factory=Profiler)
    evaluation: Evaluation = field(default_factory=Evaluation)
    signals: Signals = field(default_factory=Signals)
