"""Measures the gradient norm of a part of the batch during a step, for the gradient noise scale."""

from __future__ import annotations

import torch


class GradientNormProbe:
    """The squared gradient norm of one part of the global batch, in one tensor on the device, reused by every step."""

    def __init__(self, parts: int, device: torch.device) -> None:
        self.parts = parts  # in a global batch
        self.square = torch.zeros((), device=device)
        self._factor: torch.Tensor | float = 1.0

    def reset(self, factor: torch.Tensor | float) -> None:
        """Starts a step whose gradients all come multiplied by `factor`, the loss scale / number of micro-batches."""
        self._factor = factor
        self.square.zero_()

    @torch.no_grad()
    def add(self, *gradients: torch.Tensor) -> None:
        """Adds some of the part's gradients. A step adds each gradient once."""
        norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
        self.square += (norms / self._factor).square().sum()
