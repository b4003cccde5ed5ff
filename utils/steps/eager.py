"""The step as PyTorch runs it by default: forward, loss, backward, clip, update."""

from __future__ import annotations

import contextlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.distributed import World
from utils.profiling import annotate

log = logging.getLogger(__name__)

# torch 2.13 gives the option a new name.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"


@dataclass(frozen=True)
class StepOptions:
    """How a step computes; the names are the config's."""

    enable_amp: bool = False
    precision: str = "bfloat16"
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    enable_jit: bool = False
    noddp: bool = False
    bucket_cap_mb: float = 25.0
    disable_broadcast_buffers: bool = False
    static_graph: bool = False


class Objective(nn.Module):
    """Network and loss as one module: DDP and the compiler see the whole forward pass."""

    def __init__(self, network: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.network(inputs), targets)


class EagerStep:
    """Owns DDP, autocast, the gradient scaler, accumulation, clipping and the update."""

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: StepOptions | None = None,
    ) -> None:
        self.network = network
        self.gradient_norm = torch.zeros((), device=world.device)
        self._options = options = options or StepOptions()
        self._device = world.device
        self._optimizer = optimizer
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._autocast_dtype = getattr(torch, options.precision)
        # bfloat16 has float32's range and needs no scaler; a disabled one passes everything through.
        scaled = options.enable_amp and options.precision == "float16"
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=scaled)
        self._bare = Objective(network, loss)
        self._objective: nn.Module = self._bare
        if world.size > 1 and not options.noddp:
            buffers: dict[str, Any] = {_BUFFERS: not options.disable_broadcast_buffers}
            self._objective = DistributedDataParallel(
                self._bare,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                bucket_cap_mb=options.bucket_cap_mb,
                **buffers,
                gradient_as_bucket_view=True,
                static_graph=options.static_graph,
            )
        self._forward = Compiled(self._objective) if options.enable_jit else self._objective

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.network.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(inputs, targets)
        with annotate("optimizer"):
            self._scaler.unscale_(self._optimizer)
            self.gradient_norm = self._clip()
            self._scaler.step(self._optimizer)
            self._scaler.update()
        return loss

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Forward and backward as in a step; what they leave behind is put back, and nothing is updated."""
        before = {name: buffer.clone() for name, buffer in self._bare.named_buffers()}
        on_gpu = self._device.type == "cuda"
        self.network.train()
        with torch.random.fork_rng(devices=[self._device] if on_gpu else []):
            self._accumulate(inputs, targets)
        with torch.no_grad():
            for name, buffer in self._bare.named_buffers():
                buffer.copy_(before[name])
        self._bare.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize(self._device)

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.network.eval()
        with self._autocast():
            return self._bare(inputs, targets)

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        self.network.eval()
        with self._autocast():
            return self.network(inputs)

    def _accumulate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Gradients of the mean loss over all micro-batches; ranks exchange them in the last one alone."""
        parts = self._options.accumulation_steps
        total: torch.Tensor | None = None
        for index, (part, goal) in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True)):
            with self._without_exchange() if index < parts - 1 else contextlib.nullcontext():
                with annotate("forward"), self._autocast():
                    loss = self._forward(part, goal) / parts
                with annotate("backward"):
                    self._scaler.scale(loss).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _without_exchange(self) -> contextlib.AbstractContextManager[None]:
        objective = self._objective
        return objective.no_sync() if isinstance(objective, DistributedDataParallel) else contextlib.nullcontext()

    def _clip(self) -> torch.Tensor:
        """The gradients' norm before clipping, over all parameters; stays on the device."""
        limit = self._options.clip_grad_norm
        if limit is not None:
            return nn.utils.clip_grad_norm_(self._parameters, limit).detach()
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return nn.utils.get_total_norm(gradients).detach()

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        return torch.autocast(self._device.type, dtype=self._autocast_dtype, enabled=self._options.enable_amp)


class Compiled(nn.Module):
    """torch.compile, or the module as it is where this machine's compiler fails."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._plain, self._compiled = module, torch.compile(module)
        self._works: bool | None = None

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._works is None:
            try:
                loss = self._compiled(inputs, targets)
                self._works = True
                return loss
            except Exception as error:
                if not type(error).__module__.startswith("torch._"):
                    raise
                self._works = False
                log.warning("torch.compile failed, going on without it: %s", str(error).strip().splitlines()[0])
        return self._compiled(inputs, targets) if self._works else self._plain(inputs, targets)
