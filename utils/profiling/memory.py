"""Estimates a training run's memory per rank before it starts, from a network on torch's meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from utils.config import Config
from utils.data import get_loader
from utils.data.loaders.build import meta_batch
from utils.distributed.world import World
from utils.files import GIB
from utils.optim.optimizers import state_bytes
from utils.steps import build

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
    """Device memory that a loader which keeps volumes there must leave free; 0 for other loaders and on a CPU."""
    keeps_volumes = get_loader(config.data_loader_config).on_device and world.device.type == "cuda"
    return training_memory(config).reserve if keeps_volumes else 0


def training_memory(config: Config) -> TrainingMemory:
    """The memory of a training run with this config, whose batch sizes are resolved (`Config.for_world`)."""
    assert config.local_batch_size is not None
    with torch.device("meta"):
        network = build.network(config)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    micro_batch = meta_batch(config, config.local_batch_size // config.accumulation_steps)
    activations = activation_bytes(network, micro_batch[0])
    return TrainingMemory(
        parameters,
        # fp32 weights, gradients and the average of the weights
        state=(8 if config.ema_decay is None else 12) * parameters
        + state_bytes(config.optimizer, network.named_parameters()),
        activations=activations // 2 if config.enable_amp else activations,
        batches=BATCHES * config.accumulation_steps * sum(part.nbytes for part in micro_batch),
    )


def activation_bytes(network: nn.Module, inputs: torch.Tensor) -> int:
    """Bytes of float32 activations that the forward pass saves for the backward pass; both on torch's meta device."""
    kept: dict[Any, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    for parameter in network.parameters():
        keep(parameter.data)
    parameters = set(kept)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(inputs)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in parameters)
