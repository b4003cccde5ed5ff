"""The eager step: forward, loss, backward, clip, update, which all ranks skip if a loss or gradient is not finite."""

import contextlib
import copy
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from networks.losses import NetworkWithLoss
from utils.config import Config
from utils.data.loaders.base import Batch
from utils.distributed.devices import random_numbers, synchronize
from utils.distributed.world import World
from utils.errors import UserError
from utils.optim.ema import EMA, trained_weights
from utils.optim.optimizers import load_state, saved_state, tensors_of, update
from utils.optim.soap import Soap
from utils.steps.annotate import annotate
from utils.steps.compile import Compiled
from utils.steps.data_parallel import GradientNormProbe, ManualDataParallel, data_parallel, gradients_of


def load_network(network: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Loads weights into a network; ValueError with the first difference if they belong to another one."""
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        # All differences stand below a title; some errors are a title alone.
        first = str(error).splitlines()[:2][-1]
        raise ValueError(first.strip(" \t.")) from None


class EagerStep:
    """Trains and evaluates one network on one rank: step(batch, lr) -> loss.

    Owns DDP, autocast, the gradient scaler, accumulation, clipping and the update. Subclasses compute the same in
    another way, and callers do not ask which one they have.
    """

    # True if the optimizer must keep its whole state, including the learning rate, on the device.
    capturable: ClassVar[bool] = False
    network: nn.Module  # the network to evaluate and save, without DDP; holds the averaged weights if ema_decay is set
    gradient_norm: torch.Tensor  # norm of the last step's gradients before clipping, a scalar on the device
    # Entered by each step around its passes and their gradient exchange.
    exchange: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    sync = True  # False: ranks do not exchange gradients, to measure what the exchange costs
    probe: GradientNormProbe | None  # gradient norm of a part of the batch; None unless it is measured

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        """Raises UserError if this kind of step cannot run in this world. Called before anything is read or built."""

    def __init__(self, model: NetworkWithLoss, optimizer: torch.optim.Optimizer, config: Config, world: World) -> None:
        network, self.loss, self.metrics, self.optimizer = model.network, model.loss, model.metrics, optimizer
        self.calibration = model.calibration  # gets the outputs of `evaluate`
        self._trained, self._config, self._ranks, self._device = model, config, world.size, world.device
        self.gradient_norm = torch.zeros((), device=world.device)
        self.trained = {name: tensor for name, tensor in network.named_parameters() if tensor.requires_grad}
        self._parameters = [*self.trained.values()]
        self._autocast_dtype = getattr(torch, config.precision)
        # bfloat16 has the range of float32 and needs no scaler. A disabled scaler passes everything through.
        scaled = config.enable_amp and config.precision == "float16"
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=scaled)
        self._parallel: nn.parallel.DistributedDataParallel | ManualDataParallel | None = None
        distributed = world.size > 1 and not config.noddp
        parts = config.accumulation_steps * (world.size if distributed else 1)
        self.probe = GradientNormProbe(parts, self._parameters) if config.log_noise_scale and parts > 1 else None
        self._forward: nn.Module = model
        if distributed:
            # The probe measures the first micro-batch; without micro-batches, the rank's gradients before the exchange.
            probe = self.probe if config.accumulation_steps == 1 else None
            self._forward = self._parallel = data_parallel(model, config, world, probe)
            if isinstance(optimizer, Soap):
                optimizer.is_replicated = True
        if config.enable_jit:
            self._forward = Compiled(self._forward, world.rank)
        # After DistributedDataParallel, which gives all ranks the weights of rank 0.
        self._average = None if config.ema_decay is None else EMA(network, config.ema_decay)
        self.network = network if self._average is None else self._average.network

    def __call__(self, batch: Batch, lr: float) -> torch.Tensor:
        """Trains on one local batch; returns its loss, detached, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return self._train(batch)

    def _train(self, batch: Batch) -> torch.Tensor:
        """Gradients and update, at the learning rate that the optimizer holds."""
        self._trained.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self.exchange:
            loss = self._accumulate(batch)
        with annotate("optimizer"):
            self._scaler.unscale_(self.optimizer)
            self.gradient_norm = self._clip()
            finite = self.gradient_norm.isfinite()
            if self._scaler.is_enabled():
                self._scaler.step(self.optimizer)  # skips the update itself if a gradient is not finite
                self._scaler.update()
            else:
                update(self.optimizer, finite)
            if self._average is not None:
                self._average.update(finite)
        return loss

    def warm_up(self, batch: Batch) -> None:
        """Runs what only a first step has to do (compilation, cuDNN's algorithm search) and waits for it.

        Forward and backward as in a step, without an update. Restores buffers, gradients and random state, so that the
        training does not change. Every rank calls it, with a batch like those it will train on.
        """
        self._trained.train()
        before = [buffer.clone() for buffer in self._trained.buffers()]
        with random_numbers(self._device):
            self._accumulate(batch)  # after which DistributedDataParallel orders its buckets
        with torch.no_grad():
            for buffer, old in zip(self._trained.buffers(), before, strict=True):
                buffer.copy_(old)
        self.check_gradients(self._ranks)
        self._trained.zero_grad(set_to_none=True)
        synchronize(self._device)

    def model_copy(self) -> NetworkWithLoss:
        """A model with the same parameters, but buffers and attributes of its own."""
        copies = {id(buffer): buffer.clone() for buffer in self._trained.buffers()}
        return copy.deepcopy(self._trained, {**copies, **{id(shared): shared for shared in self._trained.parameters()}})

    def recompute(self, batch: Batch, model: NetworkWithLoss | None = None, seed: int = 0) -> torch.Tensor:
        """Loss and norm of the gradient [2], float32, of a micro-batch without exchange, by default of a new copy."""
        model = (model or self.model_copy()).train()
        with random_numbers(self._device, seed), self._autocast():
            loss = model(*batch)
        gradients = torch.autograd.grad(self._scaler.scale(loss), self._parameters, allow_unused=True)
        norm = nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
        return torch.stack([loss.detach().float(), norm.float()])

    def replicated(self) -> list[torch.Tensor]:
        """The tensors that are equal on all ranks: parameters, their averages and the optimizer's state."""
        averages = [] if self._average is None else self.network.parameters()
        return [*self._trained.network.parameters(), *averages, *tensors_of(self.optimizer)]

    def check_gradients(self, ranks: int) -> None:
        """Raises UserError if DistributedDataParallel on `ranks` would wait for gradients that the last pass lacks."""
        config, unused = self._config, [name for name, parameter in self.trained.items() if parameter.grad is None]
        if unused and ranks > 1 and not (config.noddp or config.ddp == "manual"):
            raise UserError(
                f"network {config.network.name}: the loss does not depend on {', '.join(unused)}, for whose gradients "
                "DistributedDataParallel would wait; remove these parameters, or set ddp=manual"
            )

    def state(self) -> dict[str, Any]:
        """Everything that changes from step to step. Holds the tensors themselves: copy them to keep them."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": saved_state(self.optimizer),
            "scaler": self._scaler.state_dict(),
            "loss": self.loss.state_dict(),  # buffers of a loss of one's own
        }
        return state if self._average is None else {**state, **self._average.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from what `state` returned. Call it before the first step. ValueError if the state does not fit."""
        self.load_weights(trained_weights(state))
        if self._average is not None:
            self._average.load_state(state)
        load_state(self.optimizer, state["optimizer"])
        self.loss.load_state_dict(state.get("loss", {}), strict=False)  # another loss, or an earlier checkpoint
        if state["scaler"] and self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(state["scaler"]))

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Loads the network's weights alone; ValueError if they belong to another network."""
        load_network(self._trained.network, weights)
        if self._average is not None:
            self._average.restart()

    @property
    def compiled(self) -> bool:
        """True if compilation is requested and has not failed."""
        return isinstance(self._forward, Compiled) and self._forward.works is not False

    def describe(self) -> list[str]:
        """Lines for the log about how the step computes. Call it after the first step."""
        parts = [f"{self._config.precision} autocast" if self._config.enable_amp else "no autocast"]
        if self._config.ema_decay is not None:
            parts.append(f"weights averaged with decay {self._config.ema_decay:g}")
        if self._config.enable_jit:
            parts.append("compiled by torch.compile" if self.compiled else "not compiled: torch.compile failed")
        lines = [f"Step: {', '.join(parts)}"]
        if isinstance(self._parallel, ManualDataParallel):
            lines.append("Gradients are exchanged after the backward pass (ddp: manual)")
        elif self._parallel is not None:
            # PyTorch rebuilds the buckets after the first exchange, in the order in which the gradients arrived.
            data: Any = self._parallel._get_ddp_logging_data()
            sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
            megabytes = ", ".join(f"{int(size) / 1e6:.3g}" for size in sizes.split(", "))
            lines.append(f"DistributedDataParallel: gradient buckets of {megabytes} MB")
        return lines

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """The loss and the metrics without training, shape [1 + metrics]."""
        self.network.eval()
        self.loss.eval()
        with self._autocast():
            outputs = self.network(*batch.network_inputs)
            loss = self.loss(outputs, batch.targets)
            metrics = (metric(outputs, batch.targets).to(loss.dtype) for metric in self.metrics.values())
            if self.calibration:
                self.calibration.add(outputs, batch.targets)
            return torch.stack([loss, *metrics])

    def broadcast_buffers(self) -> None:
        """Gives all ranks the running statistics of rank 0, as the next training step does. Every rank calls it."""
        if self._parallel is not None:
            for buffer in (*self.network.buffers(), *self.loss.buffers()):
                dist.broadcast(buffer, src=0)

    @torch.no_grad()
    def predict(self, inputs: torch.Tensor, *conditions: torch.Tensor) -> torch.Tensor:
        self.network.eval()
        if self._config.channels_last and self._device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last_3d)
        with self._autocast():
            return self.network(inputs, *conditions)

    def close(self) -> None:
        """Releases what depends on the process group. Do not call the step after this."""

    def _accumulate(self, batch: Batch) -> torch.Tensor:
        """Computes gradients of the mean loss over all micro-batches. Ranks exchange them in the last one only."""
        count = self._config.accumulation_steps
        if self.probe is not None:
            self.probe.reset(self._scaler.scale(torch.ones((), device=self._device)) / count)
        losses = []
        for index, micro_batch in enumerate(zip(*(part.chunk(count) for part in batch), strict=True)):
            sync = self.sync and index == count - 1
            if self._parallel is not None:
                self._parallel.require_backward_grad_sync = sync
            with annotate("forward"), self._autocast():
                loss = self._forward(*micro_batch) / count
            with annotate("backward"):
                # The factor is 1, or NaN if the loss is not finite: the gradients then show it to every rank. The loss
                # alone need not: under L1, a NaN in the targets has gradient 0.
                scaled = self._scaler.scale(loss)
                scaled.backward(scaled.detach() * 0 + 1)
            if sync and isinstance(self._parallel, ManualDataParallel):
                self._parallel.all_reduce()
            if index == 0 and count > 1 and self.probe is not None:
                self.probe.add(gradients_of(self._parameters))
            losses.append(loss.detach())
        return functools.reduce(torch.add, losses)

    def _clip(self) -> torch.Tensor:
        """Clips the gradients; returns the norm of all of them before clipping, on the device."""
        limit = self._config.clip_grad_norm
        if limit is not None:
            return nn.utils.clip_grad_norm_(self._parameters, limit).detach()
        return nn.utils.get_total_norm(gradients_of(self._parameters).values()).detach()

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        return torch.autocast(self._device.type, dtype=self._autocast_dtype, enabled=self._config.enable_amp)
