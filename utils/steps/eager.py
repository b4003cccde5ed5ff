"""The step as PyTorch runs it by default: forward, loss, backward, clip, update.

A step whose loss or gradients are no numbers leaves its update out, on every rank and without asking the host.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from utils.distributed.world import World
from utils.optim.ema import EMA, NullEMA, trained_weights
from utils.optim.optimizers import load_state, saved_state, update
from utils.pending_work import PendingWork
from utils.profiling.profiler import annotate
from utils.steps.compile import Compiled, Traced
from utils.steps.manual import ManualDataParallel
from utils.steps.probe import GradientNormProbe

# torch 2.13 gives the option a new name.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"


Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepOptions:
    """How a step computes; the names are the config's."""

    enable_amp: bool = False
    precision: str = "bfloat16"
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    enable_jit: bool = False
    compiler: str = "inductor"
    noddp: bool = False
    ddp: str = "torch"
    log_noise_scale: bool = False
    bucket_cap_mb: float = 25.0
    disable_broadcast_buffers: bool = False
    static_graph: bool = False
    gradient_compression: str = "none"
    ema_decay: float | None = None


class NetworkWithLoss(nn.Module):
    """Network and loss as one module: DDP and the compiler see the whole forward pass."""

    def __init__(self, network: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.network(inputs), targets)


class EagerStep:
    """Owns DDP, autocast, the gradient scaler, accumulation, clipping and the update."""

    # Whether the optimizer must keep all it changes on the device, the learning rate too.
    capturable: ClassVar[bool] = False
    # Where the loader may leave work for the step to run alongside its own kernels.
    pending_work: PendingWork | None = None

    @classmethod
    def check(cls, world: World, noddp: bool) -> None:
        """Raises UserError where this kind of step cannot be, before anything is read or built."""

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        options: StepOptions | None = None,
        metrics: Sequence[Metric] = (),
    ) -> None:
        self.gradient_norm = torch.zeros((), device=world.device)
        self.probe: GradientNormProbe | None = None
        self._metrics = metrics
        self._options = options = options or StepOptions()
        self._device = world.device
        self._optimizer = optimizer
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._autocast_dtype = getattr(torch, options.precision)
        # bfloat16 has float32's range and needs no scaler; a disabled one passes everything through.
        scaled = options.enable_amp and options.precision == "float16"
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=scaled)
        self._exchanging = True
        self._bare = NetworkWithLoss(network, loss)
        compiler = options.compiler if options.enable_jit else "none"
        self._compiler: Compiled | Traced | None = None
        self._objective: nn.Module = self._bare
        if compiler == "torchscript":
            self._objective = self._compiler = Traced(self._bare)
        exchanges = world.size > 1 and not options.noddp
        parts = options.accumulation_steps * (world.size if exchanges else 1)
        if options.log_noise_scale and parts > 1:
            self.probe = GradientNormProbe(parts, world.device)
        # With micro-batches the first one is the part; else it is the rank's batch, seen on its way to the others.
        self._first_is_part = self.probe is not None and options.accumulation_steps > 1
        passing = None if self._first_is_part else self.probe
        self._buffers_differ = exchanges and any(True for _ in network.buffers())
        self._parallel: DistributedDataParallel | ManualDataParallel | None = None
        if exchanges:
            self._parallel = _data_parallel(self._objective, world, options, passing)
            self._objective = self._parallel
        self._forward: nn.Module = self._objective
        if compiler == "inductor":
            self._forward = self._compiler = Compiled(self._objective)
        # Last: DistributedDataParallel may have changed the weights.
        self._average = NullEMA(network) if options.ema_decay is None else EMA(network, options.ema_decay)
        self.network = self._average.network

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return self._train(inputs, targets)

    def _train(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Gradients and update, at the rate that the optimizer holds."""
        self._bare.train()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(inputs, targets)
        with annotate("optimizer"):
            self._scaler.unscale_(self._optimizer)
            self.gradient_norm = self._clip()
            finite = self.gradient_norm.isfinite()
            if self._scaler.is_enabled():
                self._scaler.step(self._optimizer)  # leaves the update out itself
                self._scaler.update()
            else:
                update(self._optimizer, finite)
            self._average.update(finite)
        return loss

    def warm_up(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Forward and backward as in a step; what they leave behind is put back, and nothing is updated."""
        before = {name: buffer.clone() for name, buffer in self._bare.named_buffers()}
        on_gpu = self._device.type == "cuda"
        self._bare.train()
        with torch.random.fork_rng(devices=[self._device] if on_gpu else []):
            self._accumulate(inputs, targets)
        with torch.no_grad():
            for name, buffer in self._bare.named_buffers():
                buffer.copy_(before[name])
        self._bare.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize(self._device)

    def state(self) -> dict[str, Any]:
        """All that changes from step to step, by the tensors themselves: who keeps it must copy them."""
        return {
            "network": self.network.state_dict(),
            "optimizer": saved_state(self._optimizer),
            "scaler": self._scaler.state_dict(),
            **self._average.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave; before the first step. ValueError where it does not fit."""
        self.load_weights(trained_weights(state))
        self._average.load_state(state)
        load_state(self._optimizer, state["optimizer"])
        if state["scaler"] and self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(state["scaler"]))

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """The network's alone; ValueError where they are of another network."""
        trained = self._bare.network
        own = trained.state_dict()
        for name in [*own, *weights]:
            here, there = (tuple(part[name].shape) if name in part else None for part in (own, weights))
            if here is None or there is None:
                raise ValueError(f"{'it' if there is None else 'this network'} has no {name}")
            if here != there:
                raise ValueError(f"its {name} has shape {there}, this network's has {here}")
        trained.load_state_dict(weights)
        self._average.restart()

    @property
    def compiled(self) -> bool:
        """Whether a compiler has been asked for, and has not failed."""
        return self._compiler is not None and self._compiler.works is not False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Each rank goes its own way meanwhile: to measure what the exchange of gradients costs."""
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = True

    def describe(self) -> list[str]:
        """Lines for the log, once a step has been made."""
        amp, name = self._options.enable_amp, self._options.compiler
        how = f"{self._options.precision} autocast" if amp else "no autocast"
        if self._options.ema_decay is not None:
            how += f", weights averaged with decay {self._options.ema_decay:g}"
        if self._options.enable_jit:
            how += f", {'compiled by' if self.compiled else 'not compiled:'} {name}{'' if self.compiled else ' failed'}"
        lines = [f"Step: {how}"]
        if isinstance(self._parallel, ManualDataParallel):
            return [*lines, "Gradients are exchanged by hand, after the backward pass (ddp: manual)"]
        if self._parallel is None:
            return lines
        # PyTorch forms the buckets anew, in the order in which gradients came, after the first exchange.
        data: Any = self._parallel._get_ddp_logging_data()
        listed = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
        sizes = [int(size) / 1e6 for size in listed.split(", ") if size]
        sent = "float32" if self._options.gradient_compression == "none" else self._options.gradient_compression
        noun = "bucket" if len(sizes) == 1 else "buckets"
        lines.append(
            f"DistributedDataParallel: {len(sizes)} {noun} of gradients, {sum(sizes):.3g} MB: "
            f"{', '.join(f'{size:.3g}' for size in sizes)} MB; sent as {sent}"
        )
        return lines

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss and the metrics without training, shape [1 + metrics]."""
        self.network.eval()
        self._bare.loss.eval()
        with self._autocast():
            outputs = self.network(inputs)
            loss = self._bare.loss(outputs, targets)
            return torch.stack([loss, *(metric(outputs, targets).to(loss.dtype) for metric in self._metrics)])

    def broadcast_buffers(self) -> None:
        """Every rank takes over rank 0's running statistics, as all do in the next step anyway. Every rank calls it."""
        if self._buffers_differ:
            for buffer in self.network.buffers():
                dist.broadcast(buffer, src=0)

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        self.network.eval()
        with self._autocast():
            return self.network(inputs)

    def _accumulate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Gradients of the mean loss over all micro-batches; ranks exchange them in the last one alone."""
        parts = self._options.accumulation_steps
        if self.probe is not None:
            self.probe.begin(self._scaler.scale(torch.ones((), device=self._device)) / parts)
        total: torch.Tensor | None = None
        for index, (part, goal) in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True)):
            exchanges = self._exchanging and index == parts - 1
            with contextlib.nullcontext() if exchanges else self._no_sync():
                with annotate("forward"), self._autocast():
                    loss = self._forward(part, goal) / parts
                with annotate("backward"):
                    # 1, or NaN: with the gradients a loss that is no number comes to every rank's knowledge. By itself
                    # it need not: that of a target which is NaN has gradient 0.
                    scaled = self._scaler.scale(loss)
                    scaled.backward(scaled.detach() * 0 + 1)
            if exchanges and isinstance(self._parallel, ManualDataParallel):
                self._parallel.all_reduce()
            if index == 0 and self._first_is_part and self.probe is not None:
                self.probe.add(*self._gradients())
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._parallel is None else self._parallel.no_sync()

    def _clip(self) -> torch.Tensor:
        """The gradients' norm before clipping, over all parameters; stays on the device."""
        limit = self._options.clip_grad_norm
        if limit is not None:
            return nn.utils.clip_grad_norm_(self._parameters, limit).detach()
        return nn.utils.get_total_norm(self._gradients()).detach()

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        return torch.autocast(self._device.type, dtype=self._autocast_dtype, enabled=self._options.enable_amp)


def _data_parallel(
    module: nn.Module, world: World, options: StepOptions, probe: GradientNormProbe | None
) -> DistributedDataParallel | ManualDataParallel:
    if options.ddp == "manual":
        return ManualDataParallel(module, probe, not options.disable_broadcast_buffers)
    buffers: dict[str, Any] = {_BUFFERS: not options.disable_broadcast_buffers}
    parallel = DistributedDataParallel(
        module,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=options.bucket_cap_mb,
        **buffers,
        gradient_as_bucket_view=True,
        static_graph=options.static_graph,
    )
    # Under its own name PyTorch refuses the hook that sends bfloat16 without NCCL, though gloo, too, adds such numbers.
    compressed = options.gradient_compression == "bfloat16"
    send = default_hooks.bf16_compress_hook if compressed else default_hooks.allreduce_hook

    # PyTorch reads the annotations of hooks, and not those that are strings, as all are in this file.
    def exchange(group, bucket):  # type: ignore[no-untyped-def]
        if probe is not None:
            probe.add(bucket.buffer())
        return send(group, bucket)

    if compressed or probe is not None:
        parallel.register_comm_hook(None, exchange)
    return parallel
