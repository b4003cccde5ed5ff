"""How much memory a training takes on each rank, before it is run: what a network keeps on torch's meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from utils.config import Config
from utils.errors import LocalError

GIB = 2**30
# A loader hands out one batch while it fills the next; on a GPU kernels of a third may still run.
BATCHES = 3
TRAINING_REMEDY = (
    "lower local_batch_size, raise accumulation_steps, or, if the volume is kept there, use --data_loader_config=lowmem"
)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes a rank, each an estimate."""

    parameters: int  # a number, not bytes
    state: int
    activations: int
    batches: int

    @property
    def total(self) -> int:
        return self.state + self.activations + self.batches

    @property
    def reserve(self) -> int:
        """What to leave for it on a device: libraries' workspaces and memory lost between allocations come on top."""
        return self.total + self.total // 5 + GIB


def training_memory(
    config: Config, build: Callable[[], nn.Module], batch_like: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
) -> TrainingMemory:
    """What the config's training takes; `config` has its batch sizes settled (`Config.for_world`).

    `batch_like` gives so many samples' inputs and targets on torch's meta device.
    """
    assert config.local_batch_size is not None
    with torch.device("meta"):
        network = build()
    parameters = sum(parameter.numel() for parameter in network.parameters())
    micro = config.local_batch_size // config.accumulation_steps
    activations = activation_bytes(network, batch_like(micro)[0])
    return TrainingMemory(
        parameters,
        # fp32 weights, gradients and Adam's two moments, and the weights' mean
        state=(16 if config.ema_decay is None else 20) * parameters,
        activations=activations // 2 if config.enable_amp else activations,
        batches=BATCHES * sum(part.nbytes for part in batch_like(config.local_batch_size)),
    )


def activation_bytes(network: nn.Module, inputs: torch.Tensor) -> int:
    """fp32 bytes that the forward pass of a network keeps for the backward pass, both on torch's meta device."""
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
    """A device that is full is the user's to mend; PyTorch's own account of it is a paragraph."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        account = str(error).split(". ")[0].strip()
        raise LocalError(f"no device memory left ({account}); {remedy}") from error
