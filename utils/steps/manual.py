"""Data parallelism by hand (`ddp: manual`): the algorithm of DistributedDataParallel on one page.

Every rank starts with rank 0's parameters, computes gradients of its own part of the batch, and updates with the mean
of all ranks' gradients, so that the parameters stay equal. DistributedDataParallel gives the same results, but overlaps
the gradient exchange with the backward pass; this module does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from utils.steps.probe import GradientNormProbe


class ManualDataParallel(nn.Module):
    """A module whose gradients `all_reduce` replaces by their mean over all ranks.

    `probe`, if given, measures the rank's own gradients first.
    """

    def __init__(
        self, module: nn.Module, probe: GradientNormProbe | None = None, broadcast_buffers: bool = True
    ) -> None:
        super().__init__()
        self.module, self._probe, self._broadcast_buffers = module, probe, broadcast_buffers
        self._sync = True
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        if self._broadcast_buffers and self._sync and self.training:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)
        return self.module(*arguments)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for all micro-batches of a step but the last: no buffers are broadcast."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def all_reduce(self) -> None:
        """Averages the gradients over all ranks. Call it after the backward pass."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if self._probe is not None:
            self._probe.add(flat)
        flat.div_(dist.get_world_size())  # before the sum, which might overflow
        dist.all_reduce(flat)
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
