"""Losses: callables (outputs, targets) -> scalar, of fields, both [N, C, D, D, D], or of logits and classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from networks import fused as pointwise

# Density channels hold ln(density / mean) / 14.
LOG_DENSITY_SCALE = 14.0


class L1Loss(nn.Module):
    """Mean |outputs − targets|, plus lambda_rho × mean |difference of the densities|, channel 0, when lambda_rho > 0.

    The density itself, exp(14 x), spans many decades: this term weighs the densest places. `fused` takes one kernel for
    the loss, where that is all of it.

    `weights`, one for each channel, weigh the first mean, as if their own mean were 1. They count in training alone: in
    evaluation mode the loss is the one without them, which can be compared.
    """

    def __init__(self, lambda_rho: float = 0.0, fused: bool = False, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if fused and weights is not None:
            raise ValueError("fused_pointwise has no kernel for a loss with channel_weights; leave one of them out")
        self.lambda_rho = lambda_rho
        self.fused = fused
        # Numbers, not a tensor, which would have to be on the device; equal ones are none.
        self.weights = None
        if weights is not None and len(set(weights)) > 1:
            self.weights = [weight / sum(weights) for weight in weights]

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.fused and self.lambda_rho <= 0:
            return pointwise.l1(outputs, targets)
        # Half precision would round the difference to about a tenth of the loss to be reached.
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


class CrossEntropyLoss(nn.Module):
    """Mean cross-entropy of logits [N, classes] against classes [N], int64; ValueError for options of other losses."""

    def __init__(self, lambda_rho: float = 0.0, fused: bool = False, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if lambda_rho > 0:
            raise ValueError(f"lambda_rho {lambda_rho} weighs a density, which loss cross_entropy has not; leave it 0")
        if fused:
            raise ValueError("loss cross_entropy has no kernel of its own; leave fused_pointwise off")
        if weights is not None:
            raise ValueError(
                "channel_weights are of fields' channels, which loss cross_entropy has not; leave them out"
            )

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if targets.is_floating_point():
            raise ValueError("loss cross_entropy compares with classes, not with fields; choose loss l1 for volumes")
        # Half precision would round the loss to 2 or 3 digits.
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        return F.cross_entropy(outputs, targets)
