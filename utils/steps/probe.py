"""Looks at the gradient of a part of the batch in passing: what the gradient noise scale is estimated from."""

from __future__ import annotations

import torch


class GradientNormProbe:
    """The squared norm of a part's gradient, in one tensor on the device, the same one in every step."""

    def __init__(self, parts: int, device: torch.device) -> None:
        self.parts = parts  # of which a global batch consists
        self.square = torch.zeros((), device=device)
        self._factor: torch.Tensor | float = 1.0

    def begin(self, factor: torch.Tensor | float) -> None:
        """Before each step's first gradient; they all come multiplied by `factor` (loss scale, share of the mean)."""
        self._factor = factor
        self.square.zero_()

    @torch.no_grad()
    def add(self, *gradients: torch.Tensor) -> None:
        """Some of the part's gradients; all of them in the course of a step."""
        norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
        self.square += (norms / self._factor).square().sum()
