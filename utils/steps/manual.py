"""Data parallelism by hand (`ddp: manual`): what DistributedDataParallel does, in a page.

Every rank starts with rank 0's parameters, computes gradients of its own part of the batch, and updates with the mean
of all ranks' gradients: so all stay alike. DistributedDataParallel gives the same numbers; it hides the exchange behind
the backward pass, which this does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from utils.steps.probe import GradientNormProbe


class ManualDataParallel(nn.Module):
    """A module whose gradients `exchange` replaces by their mean over the ranks.

    `probe`, if given, is shown the rank's own gradients first.
    """

    def __init__(self, module: nn.Module, probe: GradientNormProbe | None = None, broadcast_buffers: bool = True) -> None:
        super().__init__()
        self.module, self._probe, self._shares_buffers = module, probe, broadcast_buffers
        self._exchanging = True
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        if self._shares_buffers and self._exchanging and self.training:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)
        return self.module(*arguments)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, nothing is exchanged: for all micro-batches of a step but the last."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    def all_reduce(self) -> None:
        """After the backward pass: one all-reduce of all gradients, laid out in a row."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if self._probe is not None:
            self._probe.add(flat)
        flat.div_(dist.get_world_size())  # first: a sum of many large ones might overflow
        dist.all_reduce(flat)
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
