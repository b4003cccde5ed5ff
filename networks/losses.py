"""Losses: callables (outputs, targets) -> scalar, both [N, C, D, D, D]."""

from __future__ import annotations

import torch
from torch import nn

from networks import pointwise

# Density channels hold ln(density / mean) / 14.
LOG_DENSITY_SCALE = 14.0


class L1Loss(nn.Module):
    """Mean |outputs − targets|, plus lambda_rho × mean |difference of the densities|, channel 0, when lambda_rho > 0.

    The density itself, exp(14 x), spans many decades: this term weighs the densest places. `fused` takes one kernel for
    the loss, where that is all of it.
    """

    def __init__(self, lambda_rho: float = 0.0, fused: bool = False) -> None:
        super().__init__()
        self.lambda_rho = lambda_rho
        self.fused = fused

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.fused and self.lambda_rho <= 0:
            return pointwise.l1(outputs, targets)
        # Half precision would round the difference to about a tenth of the loss to be reached.
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        loss = (outputs - targets).abs().mean()
        if self.lambda_rho > 0:
            density, target = (torch.exp(LOG_DENSITY_SCALE * field[:, 0]) for field in (outputs, targets))
            loss = loss + self.lambda_rho * (density - target).abs().mean()
        return loss
