"""Options of the training loop; the names are the config's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class CheckpointOptions(Protocol):
    """Intervals of the saves in addition to those at the end of each epoch; None: no such saves."""

    @property
    def every_steps(self) -> int | None: ...

    @property
    def every_minutes(self) -> float | None: ...


class EarlyStoppingOptions(Protocol):
    """Condition for a stop because the validation loss does not improve; `patience` None: no such stop."""

    @property
    def patience(self) -> int | None: ...

    @property
    def min_delta(self) -> float: ...


@dataclass(frozen=True)
class TrainerOptions:
    num_epochs: int
    global_batch_size: int
    log_interval: int
    checkpoint: CheckpointOptions
    early_stopping: EarlyStoppingOptions
    max_consecutive_skips: int = 10
    metrics: Sequence[str] = ()  # names of the values that Step.evaluate returns after the loss
