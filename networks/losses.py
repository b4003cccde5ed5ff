"""Losses: (outputs, targets) -> scalar, for fields [N, C, D, D, D], or for logits [N, classes] and classes [N]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from networks.fused import l1

LOG_DENSITY_SCALE = 14.0  # density channels hold ln(density / mean) / 14


class Loss(nn.Module):
    """A loss. All have the same options; a constructor raises ValueError for those it does not support."""

    is_classification: ClassVar[bool]  # True if targets are classes, False if they are fields


class L1Loss(Loss):
    """Mean |outputs - targets|, plus lambda_rho × mean |difference of the densities| (channel 0) if lambda_rho > 0.

    The density exp(14 x) spans many decades, so the densest cells dominate its term. `fused` computes the
    loss in one kernel if there is no density term.

    `weights`, one per channel, weight the channels in the first term, normalized to mean 1. They apply in training mode
    only: in evaluation mode losses stay comparable.
    """

    is_classification = False

    def __init__(self, lambda_rho: float = 0.0, fused: bool = False, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if fused and weights is not None:
            raise ValueError("fused_pointwise does not support channel_weights; turn one of them off")
        self.lambda_rho = lambda_rho
        self.fused = fused
        # Python numbers, because a tensor would have to be on the device. Equal weights have no effect.
        self.weights = None
        if weights is not None and len(set(weights)) > 1:
            self.weights = [weight / sum(weights) for weight in weights]

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.fused and self.lambda_rho <= 0:
            return l1(outputs, targets)
        # Half precision would round differences by about a tenth of the loss of a trained network.
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        difference = (outputs - targets).abs()
        if self.weights is not None and self.training:
            means = difference.mean(dim=(0, 2, 3, 4)).unbind()
            loss = torch.stack([weight * mean for weight, mean in zip(self.weights, means, strict=True)]).sum()
        else:
            loss = difference.mean()
        if self.lambda_rho > 0:
            density, target = (torch.exp(LOG_DENSITY_SCALE * field[:, 0]) for field in (outputs, targets))
            loss = loss + self.lambda_rho * (density - target).abs().mean()
        return loss


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
