"""Data parallelism: PyTorch's DistributedDataParallel, or the same by hand, and the probe of a part's gradients."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
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


def gradients_of(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    return {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}


class GradientNormProbe:
    """The squared gradient norm of one part of the global batch, for the gradient noise scale.

    It is in one tensor on the device, `square`, which every step reuses. It does not depend on the buckets in which
    gradients arrive, which differ between the first exchange and later ones: norms are summed in a fixed order.
    """

    def __init__(self, parts: int, parameters: Sequence[nn.Parameter]) -> None:
        self.parts = parts  # in a global batch
        norms = torch.zeros(len(parameters), device=parameters[0].device)
        self.square = torch.zeros_like(norms[0])
        self._norms, self._norm_of = norms, dict(zip(parameters, norms.unbind(), strict=True))
        self._factor: torch.Tensor | float = 1.0

    def reset(self, factor: torch.Tensor | float) -> None:
        """Starts a step whose gradients all come multiplied by `factor`, the loss scale / number of micro-batches."""
        self._factor = factor
        self._norms.zero_()

    @torch.no_grad()
    def add(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Adds the part's gradients of some parameters. A step adds each parameter once."""
        norms = torch._foreach_norm(list(gradients.values()), dtype=torch.float32)
        torch._foreach_copy_([self._norm_of[parameter] for parameter in gradients], norms)
        self.square.copy_((self._norms / self._factor).square().sum())


class ManualDataParallel(nn.Module):
    """Data parallelism by hand (`ddp: manual`): the algorithm of DistributedDataParallel.

    Every rank starts with rank 0's parameters, computes gradients of its own part of the batch, and updates with the
    mean of all ranks' gradients (`all_reduce`), so that the parameters stay equal. DistributedDataParallel gives the
    same results, but overlaps the exchange with the backward pass. `probe` measures the rank's own gradients first.
    """

    def __init__(self, module: nn.Module, probe: GradientNormProbe | None, broadcast_buffers: bool) -> None:
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
        """Averages the gradients over all ranks; one that a rank lacks counts as 0. Call it after the backward pass."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter)
        gradients = gradients_of(self.module.parameters())
        if self._probe is not None:
            self._probe.add(gradients)
        flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
        flat.div_(dist.get_world_size())  # before the sum, which might overflow
        dist.all_reduce(flat)
        means = flat.split([parameter.numel() for parameter in gradients])
        for gradient, mean in zip(gradients.values(), means, strict=True):
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
    )
    if probe is not None:

        def measure_and_reduce(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            parameters: Any = bucket.parameters()
            probe.add(dict(zip(parameters, bucket.gradients(), strict=True)))
            return default_hooks.allreduce_hook(group, bucket)

        parallel.register_comm_hook(None, measure_and_reduce)
    return parallel
