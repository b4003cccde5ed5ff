"""Estimates a training run's memory per rank before it starts, from a network on torch's meta device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from utils.config import Config
from utils.data.loaders.base import meta_batch
from utils.distributed.devices import uses_gpus
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import GIB
from utils.optim.optimizers import state_bytes
from utils.steps import build, own_network
from utils.volumes.page_cache import memory_limit

log = logging.getLogger(__name__)

# A loader fills one batch while another is in use; on a GPU, kernels may still read a third.
BATCHES = 3


@dataclass(frozen=True)
class TrainingMemory:
    """Estimates, in bytes per rank."""

    parameters: int  # their number, not bytes
    state: int  # weights, gradients, optimizer
    activations: int
    batches: int

    @property
    def total(self) -> int:
        return self.state + self.activations + self.batches

    @property
    def reserve(self) -> int:
        """Device memory to keep free for training: the total plus workspaces of libraries and fragmentation."""
        return self.total + self.total // 5 + GIB


def reserved_bytes(config: Config, world: World) -> int:
    """Device memory that a loader which keeps volumes there must leave free; 0 on a CPU."""
    return training_memory(config).reserve if world.device.type == "cuda" else 0


def training_memory(config: Config) -> TrainingMemory:
    """The memory of a training run with this config, whose batch sizes are resolved (`Config.for_world`)."""
    assert config.local_batch_size is not None
    network = build.network_without_values(config)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    micro_batch = meta_batch(config, config.local_batch_size // config.accumulation_steps)
    try:
        activations = activation_bytes(network, *micro_batch.network_inputs)
    except Exception:
        if not own_network.is_checked(config):
            raise
        activations = 0  # not every network works without values; a faulty one is reported when it is called
    return TrainingMemory(
        parameters,
        # fp32 weights, gradients and the average of the weights
        state=(8 if config.ema_decay is None else 12) * parameters
        + state_bytes(config.optimizer, network.named_parameters()),
        activations=activations // 2 if config.enable_amp else activations,
        batches=BATCHES * config.accumulation_steps * sum(part.nbytes for part in micro_batch),
    )


def activation_bytes(network: nn.Module, *inputs: torch.Tensor) -> int:
    """Bytes of float32 activations that the forward pass saves for the backward pass; all on torch's meta device."""
    kept: dict[Any, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    for parameter in network.parameters():
        keep(parameter.data)
    parameters = set(kept)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(*inputs)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in parameters)


# --- comparison with this machine ------------------------------------------------------------------------------------


def check_memory(config: Config, ranks: int) -> None:
    """Logs the size of the network and its memory in training; UserError if one rank would not fit on this machine."""
    memory, shape = training_memory(config), " × ".join(map(str, meta_batch(config, 1).inputs.shape[1:]))
    name = config.network.name
    log.info(f"network: {name}, {memory.parameters:,} parameters, accepts samples of shape {shape}")
    line = (
        f"memory per rank: about {memory.total / GIB:.2f} GiB (weights, gradients, optimizer {memory.state / GIB:.2f}; "
        f"activations {memory.activations / GIB:.2f}; batches {memory.batches / GIB:.2f})"
    )
    on_gpus = uses_gpus(config.device)
    if on_gpus and not torch.cuda.is_available():
        log.info(line)
        log.warning("memory is not compared, because this machine has no GPU; compare it with that of the GPUs")
        return
    limit, place = memory_limit(), "on this machine"
    if on_gpus:
        limit, place = torch.cuda.get_device_properties(0).total_memory, f"on {torch.cuda.get_device_name(0)}"
    line += f" of {limit / GIB:.2f} GiB {place}"
    if memory.state > limit:  # with any batch
        raise UserError(f"{line}: it does not fit; lower network.width, or choose a smaller network")
    if memory.total > limit:
        elsewhere = "" if on_gpus else ", or, if the run is for GPUs of other machines, use --set device=cuda"
        raise UserError(f"{line}: it does not fit; lower local_batch_size or raise accumulation_steps{elsewhere}")
    log.info(line)
    if not on_gpus and ranks * memory.total > limit:
        needed = f"{ranks * memory.total / GIB:.2f} GiB together"
        log.warning("%d ranks on one such machine do not fit, because they need %s; use several", ranks, needed)


def fits_one_step(config: Config, world: World) -> bool:
    """True if training with this config needs at most half of the memory here; logs it if not."""
    needed = training_memory(config).total
    limit = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else memory_limit()
    if needed > limit // 2:
        log.info(f"one step on {world.device}: not tried, it needs about {needed / GIB:.2f} GiB")
    return needed <= limit // 2
