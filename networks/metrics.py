"""What a classifier is judged by: (outputs [N, classes], targets [N]) -> a mean over the batch, a float32 scalar."""

from __future__ import annotations

from collections.abc import Callable

import torch

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many samples' targets have the largest output."""
    return (outputs.argmax(1) == targets).float().mean()


def top5_accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many samples' targets are among the five largest outputs; all, where there are no more than five classes."""
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices  # [N, 5]
    return (best == targets[:, None]).any(1).float().mean()


METRICS: dict[str, Metric] = {
    "accuracy": accuracy,
    "top5_accuracy": top5_accuracy,
}
