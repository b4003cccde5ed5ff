"""Metrics of classifiers: (outputs [N, classes], targets [N]) -> mean over the batch, a float32 scalar."""

from __future__ import annotations

from collections.abc import Callable

import torch

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The fraction of samples whose class has the largest output."""
    return (outputs.argmax(1) == targets).float().mean()


def top5_accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The fraction of samples whose class is among the five largest outputs; 1 if there are at most five classes."""
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices  # [N, 5]
    return (best == targets[:, None]).any(1).float().mean()
