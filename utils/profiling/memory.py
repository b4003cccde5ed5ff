"""Estimates a training run's memory per rank before it starts, from a network on torch's meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from utils.config import Config
from utils.data.loaders.build import meta_batch
from utils.errors import LocalError
from utils.files import GIB
from utils.optim.optimizers import state_bytes

# A loader fills one batch while another is in use; on a GPU, kernels may still read a third.
BATCHES = 3
TRAINING_REMEDY = (
    "lower local_batch_size, raise accumulation_steps, or, if the loader is resident, use --data_loader_config=lowmem"
)


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
        """Device memory to keep free for the training: the total plus workspaces of libraries and fragmentation."""
        return self.total + self.total // 5 + GIB


def training_memory(config: Config, build_network: Callable[[Config], nn.Module]) -> TrainingMemory:
    """The memory of a training with this config, whose batch sizes are resolved (`Config.for_world`)."""
    assert config.local_batch_size is not None
    with torch.device("meta"):
        network = build_network(config)
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
    own = set(kept)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network(inputs)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in own)


@contextlib.contextmanager
def out_of_memory_for_users(remedy: str = TRAINING_REMEDY) -> Iterator[None]:
    """Converts PyTorch's out-of-memory error, which is a paragraph long, to a LocalError in one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0].strip()
        raise LocalError(f"no device memory left ({reason}); {remedy}") from error
    except (MemoryError, RuntimeError) as error:  # of numpy, and of torch on the CPU
        _, _, reason = str(error).partition("DefaultCPUAllocator: ")
        if not reason and not isinstance(error, MemoryError):
            raise
        raise LocalError(f"no memory left ({(reason or str(error)).split('. ')[0].strip()}); {remedy}") from error
