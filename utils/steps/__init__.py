"""The training step: forward, loss, backward, gradient exchange, clipping and update behind one call.

The trainer and the benchmark know a step by the protocol below, and treat eager steps and CUDA graphs alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from utils.steps.probe import GradientNormProbe


class Step(Protocol):
    """Trains and evaluates one network on one rank."""

    network: nn.Module  # the network to evaluate and save, without DDP; holds the averaged weights if ema_decay is set
    loss: nn.Module
    gradient_norm: torch.Tensor  # norm of the last step's gradients before clipping, a scalar on the device
    probe: GradientNormProbe | None  # gradient norm of a part of the batch; None unless it is measured

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, lr: float) -> torch.Tensor:
        """Trains on one local batch; returns its loss, detached, on the device."""

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Runs what only a first step has to do (compilation, cuDNN's algorithm search) and waits for it.

        The training does not change. Every rank calls it, with a batch like those it will train on.
        """

    def state(self) -> dict[str, Any]:
        """Everything that changes from step to step, including "network". Holds the tensors themselves, not copies."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from what `state` returned. Call it before the first step."""

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Loads the network's weights; ValueError if they belong to another network."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which ranks do not exchange gradients."""

    def describe(self) -> list[str]:
        """Lines for the log about how the step computes. Call it after the first step."""

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss and the metrics without training, shape [1 + metrics]."""

    def broadcast_buffers(self) -> None:
        """Gives all ranks the running statistics of rank 0. Every rank calls it before the ranks evaluate together."""

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        """The network's outputs in evaluation mode."""

    def close(self) -> None:
        """Releases what must not outlive the process group. No step may follow."""
