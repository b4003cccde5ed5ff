"""Losses: (outputs, targets) -> scalar, for fields [N, C, D, D, D], or for logits [N, classes] and classes [N]."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from networks.fused import l1

LOG_DENSITY_SCALE = 14.0  # density channels hold ln(density / mean) / 14
HUBER_DELTA = 0.1  # about the mean error of the best constant


class Loss(nn.Module):
    """A loss. All have the same options; a constructor raises ValueError for those it does not support."""

    is_classification: ClassVar[bool]  # True if targets are classes, False if they are fields


class FieldLoss(Loss, ABC):
    """Mean of `cellwise`, plus lambda_rho × mean |difference of the densities| (channel 0) if lambda_rho > 0.

    The density exp(14 x) spans many decades, so the densest cells dominate its term; squares of it would leave nothing
    else. `fused` computes the loss in one kernel, if the class has one and there is no density term.

    `weights`, one per channel, weight the channels in the first term, normalized to mean 1. They apply in training mode
    only: in evaluation mode losses stay comparable.
    """

    is_classification = False

    def __init__(self, lambda_rho: float = 0.0, fused: bool = False, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        self.lambda_rho = lambda_rho
        self.fused = fused
        # Python numbers, because a tensor would have to be on the device. Equal weights have no effect.
        self.weights = None
        if weights is not None and len(set(weights)) > 1:
            self.weights = [weight / sum(weights) for weight in weights]

    @abstractmethod
    def cellwise(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of each cell, in the shape of the fields."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Half precision would round differences by about a tenth of the loss of a trained network.
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        cells = self.cellwise(outputs, targets)
        if self.weights is not None and self.training:
            means = cells.mean(dim=(0, 2, 3, 4)).unbind()
            loss = torch.stack([weight * mean for weight, mean in zip(self.weights, means, strict=True)]).sum()
        else:
            loss = cells.mean()
        if self.lambda_rho > 0:
            density, target = (torch.exp(LOG_DENSITY_SCALE * field[:, 0]) for field in (outputs, targets))
            loss = loss + self.lambda_rho * (density - target).abs().mean()
        return loss


class L1Loss(FieldLoss):
    """|outputs - targets|."""

    def __init__(self, lambda_rho: float = 0.0, fused: bool = False, weights: Sequence[float] | None = None) -> None:
        super().__init__(lambda_rho, fused, weights)
        if fused and weights is not None:
            raise ValueError("fused_pointwise does not support channel_weights; turn one of them off")

    def cellwise(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).abs()

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.fused and self.lambda_rho <= 0:
            return l1(outputs, targets)
        return super().forward(outputs, targets)


class MSELoss(FieldLoss):
    """(outputs - targets)²."""

    def cellwise(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square()


class HuberLoss(FieldLoss):
    """d²/2 for d = |outputs - targets| up to HUBER_DELTA, beyond it the line with the same slope (Huber 1964)."""

    def cellwise(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.huber_loss(outputs, targets, reduction="none", delta=HUBER_DELTA)


class CrossEntropyLoss(Loss):
    """Mean cross-entropy of logits [N, classes] against classes [N], int64."""

    is_classification = True

    def __init__(self, lambda_rho: float = 0.0, fused: bool = False, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if lambda_rho > 0 or fused or weights is not None:
            raise ValueError("loss cross_entropy has no lambda_rho, fused_pointwise or channel_weights; remove them")

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if targets.is_floating_point():
            raise ValueError("the targets of loss cross_entropy must be classes, not fields; use loss l1 for volumes")
        # Half precision would round the loss to 2 or 3 digits.
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        return F.cross_entropy(outputs, targets)
