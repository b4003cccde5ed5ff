"""The contracts of the objects that the training loop calls, and the bundle in which it receives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from utils.runs.logger import Logger, NullLogger
from utils.training.checkpointer import Checkpointer, NullCheckpointer


class Evaluation(Protocol):
    """An evaluation that runs during training, after the validation of each epoch."""

    def after_epoch(
        self, epoch: int, step: int, is_last: bool, stop_if_requested: Callable[[], None]
    ) -> dict[str, float]:
        """Evaluates the network and returns scalars to log; every rank calls it.

        `epoch` is the number of the epoch that ends, counted from 1; `is_last`: no other follows. A long evaluation
        calls `stop_if_requested` from time to time, on every rank at the same points; it raises Stopped after a stop
        signal.
        """


class NullEvaluation:
    """Evaluates nothing."""

    def after_epoch(
        self, epoch: int, step: int, is_last: bool, stop_if_requested: Callable[[], None]
    ) -> dict[str, float]:
        return {}


class Profiler:
    """Profiles nothing; the profilers of utils/profiling derive from it."""

    def before_step(self, step: int) -> None:
        """Called before each step with its number, counted from 0."""

    def close(self) -> None:
        """Called after the last step."""


@dataclass(frozen=True)
class Callbacks:
    """The objects that log, save, profile and evaluate a training. The defaults do nothing."""

    logger: Logger = field(default_factory=NullLogger)
    checkpointer: Checkpointer = field(default_factory=NullCheckpointer)
    profiler: Profiler = field(default_factory=Profiler)
    evaluation: Evaluation = field(default_factory=NullEvaluation)
