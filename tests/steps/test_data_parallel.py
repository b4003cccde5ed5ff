"""N ranks compute what one rank computes at the same global batch size: the same parameters.

`pytest -m gpu` runs the same tests with all ranks on one GPU.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from devices import ON_GPU
from processes import run_ranks
from small_steps import flat_parameters, make_step, small_network, world_on

from networks import build_loss
from utils.distributed.world import World
from utils.steps.eager import EagerStep

GLOBAL_BATCH, STEPS = 8, 20
DETERMINISTIC = functools.partial(
    torch.backends.cudnn.flags, enabled=True, benchmark=False, deterministic=True, allow_tf32=False
)


def build_step(world: World, optimizer: str, dtype: torch.dtype, conditioned: bool = False, **options) -> EagerStep:
    # Longer sides have fewer gradients than cells; rounding then decides on a part of the eigenbasis.
    settings = {"name": optimizer, "momentum": 0.9, "max_precondition_dim": 16}
    # A bucket cap far below the network's size, so that there are several buckets.
    options = {"bucket_cap_mb": 0.005, **options}
    loss = build_loss("l1", lambda_rho=0.01)
    network = small_network()
    if conditioned:
        torch.manual_seed(1)  # of the embedding
        network.condition_on([[0.0, 8.0]])
    return make_step(settings, world=world, network=network.to(dtype), loss=loss, **options)


def train(world: World, optimizer: str, dtype: torch.dtype, conditioned: bool = False, **options) -> dict:
    """Trains twenty steps, each rank on its part of the batch; returns losses, parameters and SOAP's statistics."""
    step = build_step(world, optimizer, dtype, conditioned, **options)
    losses = []
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.rand(GLOBAL_BATCH, 4, 8, 8, 8, generator=generator) - 0.5
        targets = 0.2 * torch.cat([inputs, inputs[:, :1] ** 2], 1)
        batch = (inputs, targets, torch.arange(8.0)[:, None]) if conditioned else (inputs, targets)
        part = [tensor[world.rank :: world.size].to(world.device, dtype) for tensor in batch]
        loss = step(*part[:2], 0.02 if optimizer == "sgd" else 1e-3, *part[2:])
        losses.append(float(world.sum(loss)) / world.size)
    state = step.state()["optimizer"]["state"].values()
    statistics = [entry[key].cpu().numpy() for entry in state for key in entry if key.startswith("statistics")]
    return {"parameters": flat_parameters(step).cpu().numpy(), "statistics": statistics, "losses": losses}


CASES: dict[str, dict] = {
    "sgd float32": {"optimizer": "sgd", "dtype": torch.float32},
    "sgd float64": {"optimizer": "sgd", "dtype": torch.float64},
    "sgd float32, 2 micro-batches": {"optimizer": "sgd", "dtype": torch.float32, "accumulation_steps": 2},
    "sgd float32, static graph": {"optimizer": "sgd", "dtype": torch.float32, "static_graph": True},
    "sgd float32, no buffers": {"optimizer": "sgd", "dtype": torch.float32, "disable_broadcast_buffers": True},
    "sgd float32, manual": {"optimizer": "sgd", "dtype": torch.float32, "ddp": "manual"},
    "sgd float64, manual": {"optimizer": "sgd", "dtype": torch.float64, "ddp": "manual"},
    "manual, 2 micro-batches": {"optimizer": "sgd", "dtype": torch.float32, "ddp": "manual", "accumulation_steps": 2},
    "sgd float32, noise scale": {"optimizer": "sgd", "dtype": torch.float32, "log_noise_scale": True},
    "conditions, static graph": {
        "optimizer": "sgd",
        "dtype": torch.float64,
        "conditioned": True,
        "static_graph": True,
    },
    "conditions, manual, 2 micro-batches": {
        "optimizer": "sgd",
        "dtype": torch.float64,
        "conditioned": True,
        "ddp": "manual",
        "accumulation_steps": 2,
    },
    "soap float64": {"optimizer": "soap", "dtype": torch.float64},
    "adam float32": {"optimizer": "adam", "dtype": torch.float32},
}


def train_all(world: World) -> dict[str, dict]:
    with DETERMINISTIC():
        return {name: train(world, **case) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(device: str) -> dict[str, dict]:
    return train_all(world_on(device))


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def together(request: pytest.FixtureRequest, device: str) -> list[dict[str, dict]]:
    return run_ranks(train_all, request.param, device=device)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """‖Δ‖ / ‖θ‖"""
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


def test_ranks_end_with_the_parameters_of_one_rank(together, alone) -> None:
    """All ranks end with the same bits, and within rounding with the parameters of one rank."""
    for case, settings in CASES.items():
        first = together[0][case]["parameters"]
        for rank in together[1:]:
            assert np.array_equal(rank[case]["parameters"], first), case
        if case == "adam float32":
            continue  # see test_adam_losses_agree
        start = build_step(world_on("cpu"), "sgd", settings["dtype"], settings.get("conditioned", False))
        before = flat_parameters(start).numpy()
        assert distance(alone[case]["parameters"], before) > 1e-2, f"{case}: training must have changed the parameters"
        tolerance = 1e-10 if settings["dtype"] is torch.float64 else 1e-5
        assert distance(first, alone[case]["parameters"]) <= tolerance, case


def test_saved_statistics_of_soap_are_complete_on_each_rank(together, alone) -> None:
    """Each rank follows some of them. A save between two renewals collects them from the others."""
    expected = alone["soap float64"]["statistics"]
    assert len(expected) > 4
    for rank in together:
        for found, value in zip(rank["soap float64"]["statistics"], expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-9, atol=1e-9 * np.abs(value).max())


def test_adam_losses_agree(together, alone) -> None:
    """Compares losses: Adam divides by gradients near zero, which magnifies rounding errors in the parameters."""
    ours, theirs = np.array(together[0]["adam float32"]["losses"]), np.array(alone["adam float32"]["losses"])
    assert np.abs(ours / theirs - 1).max() <= 1e-4


@pytest.mark.parametrize(
    ("case", "manual", "tolerance"),
    [
        ("sgd float32", "sgd float32, manual", 1e-6),
        ("sgd float64", "sgd float64, manual", 1e-14),
        ("sgd float32, 2 micro-batches", "manual, 2 micro-batches", 1e-6),
    ],
)
def test_distributed_data_parallel_equals_manual_data_parallel(
    together, case: str, manual: str, tolerance: float
) -> None:
    assert distance(together[0][case]["parameters"], together[0][manual]["parameters"]) <= tolerance


def same_step_twice(world: World) -> list[np.ndarray]:
    """The gradients of the first and of the second step after the warm-up, of one batch and without updates."""
    step = build_step(world, "sgd", torch.float32, static_graph=True)
    generator = torch.Generator().manual_seed(world.rank)
    batch = [torch.rand(2, channels, 8, 8, 8, generator=generator) - 0.5 for channels in (4, 5)]
    step.warm_up(*batch)
    gradients = []
    for _ in range(2):
        step(*batch, 0.0)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in step.network.parameters()]).numpy())
    return gradients


def test_a_static_graph_exchanges_the_first_gradients_as_all_others() -> None:
    """A fixed bug: DistributedDataParallel ordered the buckets one step late, and several ranks added in another order.

    A resumed run thus differed from an uninterrupted one in the last bits.
    """
    for first, second in run_ranks(same_step_twice, 4):
        assert np.array_equal(first, second)


def test_measuring_the_noise_scale_changes_no_bit(together) -> None:
    for rank in together:
        assert rank["sgd float32, noise scale"]["losses"] == rank["sgd float32"]["losses"]
        assert np.array_equal(rank["sgd float32, noise scale"]["parameters"], rank["sgd float32"]["parameters"])


def test_micro_batches_give_the_gradients_of_the_full_batch(alone) -> None:
    whole, parts = alone["sgd float32"], alone["sgd float32, 2 micro-batches"]
    assert distance(parts["parameters"], whole["parameters"]) <= 1e-5


def test_the_same_seed_twice_gives_bit_identical_losses(device: str, alone) -> None:
    with DETERMINISTIC():
        again = train(world_on(device), "adam", torch.float32)
    assert again["losses"] == alone["adam float32"]["losses"]
    assert np.array_equal(again["parameters"], alone["adam float32"]["parameters"])
