"""One training step, owned whole: the trainer calls it and never asks which kind it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from utils.steps.probe import GradientNormProbe


class Step(Protocol):
    """What the trainer needs of a step."""

    network: nn.Module  # the bare network as it is used: validated and saved, with averaged weights where that is asked
    gradient_norm: torch.Tensor  # of the last step, before clipping; a scalar on the device
    probe: GradientNormProbe | None  # the gradient of a part of the batch, where that is measured

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        """Trains on one local batch at the given learning rate; returns its loss, on the device, detached."""

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Pays what a first step costs once (compiling, cuDNN's search), and waits for it; training goes as without it.

        Every rank calls it, with a batch like those it will train on.
        """

    def state(self) -> dict[str, Any]:
        """All that changes from step to step, "network" among it, by the tensors themselves."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave; before the first step."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, ranks keep their gradients to themselves."""

    def describe(self) -> list[str]:
        """Lines for the log, once a step has been made: how it computes."""

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss without training."""

    def measure(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss and the metrics, without training: [1 + metrics]."""

    def broadcast_buffers(self) -> None:
        """Before ranks measure together: all have the same running statistics. Every rank calls it."""

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """The network's outputs, in evaluation mode."""
