"""Training steps of a small U-Net, batches for them, and comparisons of their states."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from networks import build_loss, build_network, initialize
from networks.losses import NetworkWithLoss
from utils.config import Config
from utils.config.sections import OptimizerConfig
from utils.data.loaders import Batch
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.optim.optimizers import OPTIMIZERS, build_optimizer
from utils.steps.eager import EagerStep

LR = 0.01
ON_DEVICE = [name for name in OPTIMIZERS if name != "nadam"]  # they skip updates without waiting for the device


def world_on(device: str = "cpu", size: int = 1) -> World:
    """The only rank, or the first one of several, without a process group."""
    return World(Launch("test", world_size=size), torch.device(device, 0) if device == "cuda" else torch.device(device))


ALONE = world_on()


def small_network(norm: str = "none", scale: float = 0.1) -> nn.Module:
    network = build_network("unet", crop=8, width=4, scales=2, norm=norm)
    initialize(network, torch.Generator().manual_seed(0), scale=scale)
    return network


def make_step(
    optimizer: str | Mapping[str, Any] = "sgd",
    *,
    kind: type[EagerStep] = EagerStep,
    world: World = ALONE,
    network: nn.Module | None = None,
    loss: nn.Module | None = None,
    **options: Any,
) -> Any:
    """A step of class `kind`; `optimizer` is a name or the config's settings, `options` are keys of the config."""
    network = (network or small_network()).to(world.device)
    settings = OptimizerConfig(**({"name": optimizer} if isinstance(optimizer, str) else optimizer))
    built = build_optimizer(settings, dict(network.named_parameters()), LR, kind.capturable)
    return kind(NetworkWithLoss(network, loss or build_loss("l1")), built, Config(**options), world)


def batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(*(torch.rand(4, channels, 8, 8, 8, generator=generator) for channels in (4, 5)))


def bad_batch(how: str, seed: int = 50) -> Batch:
    """A batch with a bad value in one cell of one sample, or everywhere: `how` is "-inf in inputs", for example."""
    bad, (value, *_, place) = batch(seed), how.split()
    getattr(bad, place)[... if " all " in how else (1, 2, 3, 4, 5)] = float(value)
    return bad


def flat_parameters(step: EagerStep) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in step.network.parameters()])


def weights(step: EagerStep) -> dict[str, torch.Tensor]:
    """The network's tensors and, if the weights are averaged, the trained ones and the number of updates."""
    state = step.state()
    tensors = dict(state["network"])
    if "average" in state:
        tensors |= {f"trained {name}": value for name, value in state["average"]["trained"].items()}
        tensors["updates"] = state["average"]["updates"]
    return tensors


def snapshot(step: EagerStep) -> dict[str, torch.Tensor]:
    copies = {name: value.clone() for name, value in weights(step).items()}
    for number, parameter in enumerate(step._parameters):
        state = step.optimizer.state.get(parameter, {})
        copies |= {f"{key} of {number}": torch.as_tensor(value).clone() for key, value in state.items()}
    return copies


def differing(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the values that differ in any bit."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def step_that_skips(step: EagerStep, given: Batch) -> torch.Tensor:
    """The loss of a step; asserts that it changes no bit and that its norm shows the reason to all ranks."""
    before = snapshot(step)
    loss = step(given, LR)
    assert not step.gradient_norm.isfinite()
    after = snapshot(step)
    assert differing({name: after[name] for name in before}, before) == []
    assert all(not value.any() for name, value in after.items() if name not in before), "new state is zero"
    return loss


@contextlib.contextmanager
def refusing_to_wait(device: str) -> Iterator[None]:
    """On a GPU, an operation for which the host must wait raises RuntimeError."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
