"""torch.compile for network and loss (`enable_jit`); if it fails, the step logs a warning and runs without it."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

log = logging.getLogger(__name__)


class Compiled(nn.Module):
    """A module under torch.compile, or the module itself if the compiler fails on this machine.

    Wrap DistributedDataParallel in it, not the other way round: torch.compile then splits the graph at DDP's gradient
    buckets. Compiled as one graph, the backward pass would return all gradients at its end, and no computation would be
    left to overlap with their exchange.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._plain, self._compiled = module, torch.compile(module)
        self.works: bool | None = None  # None until the first call

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.works is None:
            try:
                loss = self._compiled(inputs, targets)
                self.works = True
                return loss
            except TorchDynamoException as error:
                self.works = False
                log.warning("torch.compile failed, the step runs without it: %s", str(error).strip().splitlines()[0])
        return self._compiled(inputs, targets) if self.works else self._plain(inputs, targets)
