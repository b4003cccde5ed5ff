"""The progress of a run, which a checkpoint stores in addition to tensors, and its result."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from utils.progress import format_duration


@dataclass
class TrainState:
    """The trainer's mutable state: plain numbers, equal on every rank."""

    epoch: int = 0  # completed epochs
    batch: int = 0  # completed steps of the current epoch
    step: int = 0  # completed steps in total
    losses: list[float] = field(default_factory=list)  # logged losses of the current epoch's steps
    # Loss and gradient norm of the steps that were read from the device but not logged yet.
    unlogged: list[tuple[float, float]] = field(default_factory=list)
    noise: dict[str, float] = field(default_factory=dict)  # sums of the gradient noise scale, if it is measured
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the last validation
    calibration: dict[str, Any] = field(default_factory=dict)  # its Calibration of the gas density, if there is one
    skipped: int = 0  # steps whose update was skipped, in total
    skipped_in_a_row: int = 0
    checked: int = 0  # the last step whose integrity check found no difference
    initial_loss: float = float("nan")  # validation losses
    final_loss: float = float("nan")
    best_loss: float = float("inf")  # the lowest at the end of an epoch that is saved (checkpoint.every_epochs)
    best_step: int = 0
    samples_per_second: float = 0.0  # in the last epoch
    epoch_seconds: float = 0.0  # training time of the current epoch, over all processes that trained it
    seconds: float = 0.0  # time since the run started, summed over all its processes
    process_seconds: float = 0.0  # time of all processes, from their start
    step_seconds: float = 0.0  # training time of all steps, without waits for data and saves

    def after_epoch(self, validation_loss: float) -> "TrainState":
        """The state with which the next epoch starts; this one stays."""
        return replace(self, final_loss=validation_loss, epoch=self.epoch + 1, batch=0, losses=[], epoch_seconds=0.0)


@dataclass(frozen=True)
class FitResult:
    """The result of a run; all losses are validation losses."""

    steps: int
    initial_loss: float
    final_loss: float
    best_loss: float
    samples_per_second: float  # all ranks, last epoch, without validation
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)  # validation metrics after the last epoch
    noise_scale: float | None = None  # in samples; None if it was not measured, or could not be
    skipped_updates: int = 0
    goodput: float | None = None  # share of the processes' time that was spent on the run's steps
    best_step: int = 0  # of the best checkpoint, which has best_loss; 0: no saved epoch has lowered the loss

    def table(self, losses: Mapping[str, float]) -> list[str]:
        """The table that ends the log; `losses` are those of other predictors, by name."""
        lines = ["validation loss (lower is better)", f"  {'trained network':<30}{self.final_loss:>10.6f}"]
        if self.best_step:
            lines.append(f"  {f'best checkpoint, step {self.best_step}':<30}{self.best_loss:>10.6f}")
        for name, loss in losses.items():
            ratio = loss / self.final_loss if self.final_loss else math.inf
            lines.append(f"  {name:<30}{loss:>10.6f} {ratio:>9.2f} times the trained network's")
        better = [name for name, loss in losses.items() if loss < self.final_loss]
        if better:
            advice = "train longer, or check the data and the learning rate"
            lines.append(f"the trained network is worse than: {', '.join(better)}; {advice}")
        lines += [f"{f'validation {name}'.replace('_', ' '):<32}{value:>10.4f}" for name, value in self.metrics.items()]
        lines.append(f"{'throughput, last epoch':<32}{self.samples_per_second:>10.1f}   samples/s")
        lines.append(f"{'training and validation':<32}{format_duration(self.seconds):>10}   {self.steps} steps")
        if self.goodput is not None:
            lines.append(f"{'goodput':<32}{self.goodput:>10.1%}   time in steps / time of all processes of this run")
        if self.skipped_updates:
            lines.append(f"{'skipped updates':<32}{self.skipped_updates:>10}   see the warnings above")
        if self.skipped_updates > self.steps / 10:
            lines.append("warning: more than a tenth of the updates were skipped; check the data with --preflight")
        return lines
