"""Data parallelism: PyTorch's DistributedDataParallel, or the same by hand, and the probe of a part's gradients."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from utils.config import Config
from utils.distributed.world import World

# torch 2.13 renames the option.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"


class GradientNormProbe:
    """The squared gradient norm of one part of the global batch, for the gradient noise scale.

    It is in one tensor on the device, `square`, which every step reuses.
    """

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


class ManualDataParallel(nn.Module):
    """Data parallelism by hand (`ddp: manual`): the algorithm of DistributedDataParallel.

    Every rank starts with rank 0's parameters, computes gradients of its own part of the batch, and updates with the
    mean of all ranks' gradients (`all_reduce`), so that the parameters stay equal. DistributedDataParallel gives the
    same results, but overlaps the gradient exchange with the backward pass. `probe`, if given, measures the rank's own
    gradients first.
    """

    def __init__(
        self, module: nn.Module, probe: GradientNormProbe | None = None, broadcast_buffers: bool = True
    ) -> None:
        super().__init__()
        self.module, self._probe, self._broadcast_buffers = module, probe, broadcast_buffers
        self.require_backward_grad_sync = True  # named like DistributedDataParallel's; False: no exchange in this pass
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        if self._broadcast_buffers and self.require_backward_grad_sync and self.training:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)
        return self.module(*arguments)

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


def data_parallel(
    module: nn.Module, config: Config, world: World, probe: GradientNormProbe | None
) -> DistributedDataParallel | ManualDataParallel:
    """The module with gradient exchange; `probe`, if given, measures the gradients before it."""
    if config.ddp == "manual":
        return ManualDataParallel(module, probe, not config.disable_broadcast_buffers)
    buffers: dict[str, Any] = {_BUFFERS: not config.disable_broadcast_buffers}
    parallel = DistributedDataParallel(
        module,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_cap_mb,
        **buffers,
        gradient_as_bucket_view=True,
        static_graph=config.static_graph,
    )
    # PyTorch refuses to register the bfloat16 hook itself without NCCL, although gloo can also add bfloat16 numbers.
    compressed = config.gradient_compression == "bfloat16"
    send = default_hooks.bf16_compress_hook if compressed else default_hooks.allreduce_hook

    # PyTorch checks a hook's annotations and does not accept strings, which all annotations in this file are.
    def all_reduce(group, bucket):  # type: ignore[no-untyped-def]
        if probe is not None:
            probe.add(bucket.buffer())
        return send(group, bucket)

    if compressed or probe is not None:
        parallel.register_comm_hook(None, all_reduce)
    return parallel
