"""N ranks end with the parameters of one rank at the same global batch size; `pytest -m gpu`: on one GPU."""

import functools
from unittest import mock

import numpy as np
import pytest
import torch
from devices import ON_GPU
from processes import run_ranks
from small_steps import ALONE, flat_parameters, make_step, small_network, world_on
from small_steps import batch as small_batch
from torch import nn

from networks import build_loss
from utils.data.loaders import Batch
from utils.distributed.world import World
from utils.optim import soap
from utils.steps.eager import EagerStep

GLOBAL_BATCH, STEPS = 8, 20
DETERMINISTIC = functools.partial(
    torch.backends.cudnn.flags, enabled=True, benchmark=False, deterministic=True, allow_tf32=False
)
# Optimizer, dtype and network, and the options with which several ranks end with one rank's parameters.
CASES: dict[str, list[dict]] = {
    "sgd float32": [
        {},
        {"accumulation_steps": 2},
        {"disable_broadcast_buffers": True},
        {"ddp": "manual"},
        {"ddp": "manual", "accumulation_steps": 2},
        {"log_noise_scale": True},
    ],
    "sgd float64": [{}, {"ddp": "manual"}],
    "soap float64": [{}],
    "sgd float64 conditioned": [{}, {"ddp": "manual", "accumulation_steps": 2}],
}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches, self.used = nn.ModuleList(nn.Conv3d(4, 5, 1) for _ in range(2)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[self.used](x)


def gradients_of_branches(world: World, used: int | None = None) -> list[np.ndarray]:
    network = Branches()
    step = make_step(world=world, network=network, ddp="manual")
    network.used = world.rank if used is None else used
    step(small_batch(), 0.0)
    return [np.zeros(()) if x.grad is None else x.grad.numpy() for x in network.branches.parameters()]


def test_ranks_that_use_other_parameters_average_the_gradients_of_each() -> None:
    """Fixed: the first gradient of one rank was averaged with the first one of the other, of another parameter."""
    first, second = (gradients_of_branches(ALONE, used) for used in (0, 1))
    for found in run_ranks(gradients_of_branches, 2):
        for mean, *alone in zip(found, first, second, strict=True):
            np.testing.assert_allclose(mean, sum(alone) / 2, rtol=1e-6)


def build_step(world: World, name: str, **options) -> EagerStep:
    optimizer, dtype, *conditioned = name.split()
    # Longer sides have fewer gradients than cells; rounding then decides on a part of the eigenbasis.
    longest, settings = 16, {"name": optimizer, "momentum": 0.9}
    network = small_network()
    if conditioned:
        torch.manual_seed(1)  # of the embedding
        network.condition_on([[0.0, 8.0]])
    network, loss = network.to(getattr(torch, dtype)), build_loss("l1", lambda_rho=0.01, density_log_scale=14.0)
    # A bucket cap far below the network's size, so that there are several buckets.
    with mock.patch.object(soap, "LONGEST_SIDE", longest):
        return make_step(settings, world=world, network=network, loss=loss, bucket_cap_mb=0.005, **options)


def train(world: World, name: str, **options) -> list[np.ndarray]:
    """The parameters after twenty steps, and the statistics that SOAP would save, of which each rank follows some."""
    step = build_step(world, name, **options)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.rand(GLOBAL_BATCH, 4, 8, 8, 8, generator=generator) - 0.5
        targets = 0.2 * torch.cat([inputs, inputs[:, :1] ** 2], 1)
        batch = [inputs, targets, *([torch.arange(8.0)[:, None]] if "conditioned" in name else [])]
        part = Batch(*(tensor[world.rank :: world.size].to(flat_parameters(step)) for tensor in batch))
        step(part, 0.02 if "sgd" in name else 1e-3)
    state = step.state()["optimizer"]["state"].values()
    statistics = [entry[key] for entry in state for key in entry if key.startswith("statistics")]
    assert (len(statistics) > 4) == ("soap" in name)
    return [part.cpu().numpy() for part in (flat_parameters(step), *statistics)]


def train_all(world: World) -> dict[str, list]:
    with DETERMINISTIC():
        return {name: [train(world, name, **settings) for settings in options] for name, options in CASES.items()}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(device: str) -> dict[str, list]:
    with DETERMINISTIC():
        return {name: train(world_on(device), name) for name in CASES}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def together(request: pytest.FixtureRequest, device: str) -> list[dict[str, list]]:
    return run_ranks(train_all, request.param, device=device)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


def test_ranks_end_with_the_parameters_of_one_rank(together, alone) -> None:
    """All ranks end with the same bits, and within rounding with those of one rank. The noise scale changes no bit."""
    for name, several in CASES.items():
        before = flat_parameters(build_step(world_on("cpu"), name)).numpy()
        assert distance(alone[name][0], before) > 1e-2, f"{name}: training must have changed the parameters"
        for number, options in enumerate(several):
            for first, *others, expected in zip(*(rank[name][number] for rank in together), alone[name], strict=True):
                assert all(np.array_equal(result, first) for result in others), (name, options)
                tolerance = 1e-5 if "float32" in name else 1e-10 if first.ndim == 1 else 1e-9
                assert distance(first, expected) <= tolerance, (name, options)
            if "log_noise_scale" in options:
                assert np.array_equal(together[0][name][number][0], together[0][name][0][0])


def same_step_twice(world: World) -> list[np.ndarray]:
    """The gradients of the first and of the second step after the warm-up, of one batch and without updates."""
    step = build_step(world, "sgd float32")
    generator = torch.Generator().manual_seed(world.rank)
    batch = Batch(*(torch.rand(2, channels, 8, 8, 8, generator=generator) - 0.5 for channels in (4, 5)))
    step.warm_up(batch)
    gradients = []
    for _ in range(2):
        step(batch, 0.0)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in step.network.parameters()]).numpy())
    return gradients


def test_the_first_gradients_are_exchanged_as_all_others() -> None:
    """Fixed: DistributedDataParallel ordered the buckets one step late, so a resumed run differed in the last bits."""
    for first, second in run_ranks(same_step_twice, 4):
        assert np.array_equal(first, second)
