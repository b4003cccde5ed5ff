"""The size of a network in training: its parameters, memory, checkpoint and floating-point operations."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from utils.config import Config
from utils.data.loaders.base import meta_batch
from utils.distributed.devices import uses_gpus
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import GIB
from utils.optim.optimizers import state_bytes
from utils.steps import own_network
from utils.volumes.page_cache import memory_limit

log = logging.getLogger(__name__)

# A loader fills one batch while another is in use; on a GPU, kernels may still read a third.
BATCHES = 3
# What a process on an H200 allocated beyond the tensors of its step, 1.7 GiB: workspaces and what graphs keep.
UNLISTED = 7 * GIB // 4


class ModelSize:
    """Sizes of a run, memory in bytes per rank, from its network on torch's meta device and a config for its world."""

    def __init__(self, config: Config, network: nn.Module) -> None:
        assert config.local_batch_size is not None
        self.config, self._network = config, network
        self.parameters = sum(parameter.numel() for parameter in network.parameters())  # their number
        copies = 1 if config.ema_decay is None else 2  # weights, and their average
        optimizer = state_bytes(config.optimizer, dict(network.named_parameters()))
        self.checkpoint = copies * sum(tensor.nbytes for tensor in network.state_dict().values()) + optimizer
        halves = 2 * self.parameters if config.enable_amp else 0  # the weights in half precision
        self.state = 4 * (copies + 1) * self.parameters + halves + optimizer  # with float32 gradients
        self.unlisted = UNLISTED if uses_gpus(config.device) else 0
        self._batch = meta_batch(config, config.local_batch_size // config.accumulation_steps)
        self.batches = BATCHES * config.accumulation_steps * sum(part.nbytes for part in self._batch)

    @functools.cached_property
    def activations(self) -> int:
        size = self._measure(activation_bytes)
        return size // 2 if self.config.enable_amp else size

    @functools.cached_property
    def flops(self) -> int:
        """Floating-point operations of a training step per sample; see `training_flops`."""
        return self._measure(training_flops)

    @property
    def total(self) -> int:
        return self.state + self.activations + self.batches + self.unlisted

    def reserve(self, device: torch.device) -> int:
        """Device memory that a loader which keeps volumes there must leave free; 0 on a CPU."""
        return self.total + self.total // 5 if device.type == "cuda" else 0  # for fragmentation

    def _measure(self, count: Callable[..., int]) -> int:
        try:
            return count(self._network, *self._batch.network_inputs)
        except Exception:
            if not own_network.is_checked(self.config):
                raise
            return 0  # not every network works without values; a faulty one is reported when it is called


def activation_bytes(network: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes of float32 activations that the forward pass saves for the backward pass; all on torch's meta device."""
    kept: dict[Any, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(*inputs)
    parameters = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in parameters)


def training_flops(network: nn.Module, *inputs: torch.Tensor) -> int:
    """Floating-point operations of forward and backward pass for one sample of the network's `inputs`, each [N, ...].

    Counts convolutions and linear layers, a multiply-add as two operations. All tensors are on torch's meta device.
    """
    plain = copy.deepcopy(network).eval()
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        plain(*(part[:1] for part in inputs)).sum().backward()
    return counter.get_total_flops()


def check_memory(size: ModelSize, ranks: int, gpu_memory: int | None = None) -> None:
    """Logs the size of the network and its memory in training, in GiB; UserError if one rank would not fit."""
    name, shape = size.config.network.name, " × ".join(map(str, meta_batch(size.config, 1).inputs.shape[1:]))
    log.info(f"network: {name}, {size.parameters:,} parameters, accepts samples of shape {shape}")
    line = (
        f"memory per rank: about {size.total / GIB:.2f} GiB (weights, gradients, optimizer {size.state / GIB:.2f}; "
        f"activations {size.activations / GIB:.2f}; batches {size.batches / GIB:.2f}; "
        f"libraries {size.unlisted / GIB:.2f})"
    )
    on_gpus, limit, place = uses_gpus(size.config.device), memory_limit(), "on this machine"
    if gpu_memory:
        limit, place = gpu_memory * GIB, "on each GPU"
    elif torch.cuda.is_available() and on_gpus:
        limit, place = torch.cuda.get_device_properties(0).total_memory, f"on {torch.cuda.get_device_name(0)}"
    elif size.config.device != "cpu":
        text = "GPU memory was not checked, because this machine has no GPU; for GPUs of 40 GiB add --gpu_memory 40"
        log.log(logging.WARNING if on_gpus else logging.INFO, text)
        if on_gpus:
            log.info(line)
            return
    line += f" of {limit / GIB:.2f} GiB {place}"
    if size.state > limit:  # with any batch
        raise UserError(f"{line}: it does not fit; lower network.width, or choose a smaller network")
    if size.total > limit:
        elsewhere = "" if on_gpus else ", or, if the run is for GPUs of other machines, add --gpu_memory GIB"
        raise UserError(f"{line}: it does not fit; lower local_batch_size or raise accumulation_steps{elsewhere}")
    log.info(line)
    if not on_gpus and ranks * size.total > limit:
        needed = f"{ranks * size.total / GIB:.2f} GiB together"
        log.warning("%d ranks on one such machine do not fit, because they need %s; use several", ranks, needed)


def fits_one_step(size: ModelSize, world: World) -> bool:
    """True if training needs at most half of the memory here; logs it if not."""
    limit = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else memory_limit()
    fits = size.total <= limit // 2
    if not fits:
        log.info(f"one step on {world.device}: not tried, it needs about {size.total / GIB:.2f} GiB")
    return fits
