"""N ranks compute what one rank computes at the same global batch size: same samples, same parameters.

`pytest -m gpu` runs the same tests with all ranks on one GPU.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from processes import run_ranks
from reference_samples import cubes, loader_of

from networks import build_loss, build_network, initialize
from utils.config.sections import OptimizerConfig
from utils.data.files.hdf5 import open_volume
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import SamplePlan
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.optim.optimizers import build_optimizer
from utils.steps.eager import EagerStep, StepOptions, TrainingModules
from utils.training.metrics import WeightedMean

GLOBAL_BATCH, STEPS, VALIDATION_SAMPLES = 8, 20, 11
VECTORS = (((1, 2, 3),), ((1, 2, 3),))
DETERMINISTIC = functools.partial(
    torch.backends.cudnn.flags, enabled=True, benchmark=False, deterministic=True, allow_tf32=False
)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def single(device: str) -> World:
    return World(Launch("test"), torch.device(device))


def build_step(world: World, optimizer: str, dtype: torch.dtype, **options) -> EagerStep:
    network = build_network("unet", 8, width=4, scales=2)
    initialize(network, torch.Generator().manual_seed(3), scale=0.1)
    network.to(world.device, dtype)
    # Longer sides have fewer gradients than cells; rounding then decides on a part of the eigenbasis.
    settings = OptimizerConfig(name=optimizer, momentum=0.9, max_precondition_dim=16)
    lr = 0.02 if optimizer == "sgd" else 1e-3
    # A bucket cap far below the network's size, so that there are several buckets.
    step_options = StepOptions(bucket_cap_mb=0.005, **options)
    optimizer_object = build_optimizer(settings, network.named_parameters(), lr)
    modules = TrainingModules(network, build_loss("l1", lambda_rho=0.01))
    return EagerStep(modules, optimizer_object, world, step_options)


def train(world: World, path: str, optimizer: str, dtype: torch.dtype, **options) -> dict:
    """Trains twenty steps over more than one epoch; returns the rank's samples, losses and parameters."""
    step = build_step(world, optimizer, dtype, **options)
    volume = open_volume(path, (4, 5))
    part = {"rank": world.rank, "ranks": world.size, "local_batch_size": GLOBAL_BATCH // world.size}
    plan = SamplePlan(GLOBAL_BATCH * 12, cubes(16), 8, seed=5)
    loader = loader_of(ThreadedCropLoader, [volume], plan, **part)
    losses, crops = [], []
    lr = 0.02 if optimizer == "sgd" else 1e-3
    for number in range(STEPS):
        if number % len(loader) == 0:
            batches = loader.epoch(number // len(loader))
        inputs, targets = next(batches)
        crops += [part.numpy().tobytes() for part in inputs]
        loss = step(inputs.to(world.device, dtype), targets.to(world.device, dtype), lr)
        losses.append(float(world.sum(loss)) / world.size)
    batches.close()
    plan = SamplePlan(VALIDATION_SAMPLES, cubes(16), 8, split="valid")
    valid = loader_of(ThreadedCropLoader, [volume], plan, **part)
    mean, samples = WeightedMean(world), 0
    for inputs, targets in valid.epoch(0):
        mean.add(step.evaluate(inputs.to(world.device, dtype), targets.to(world.device, dtype)), len(inputs))
        samples += len(inputs)
    loader.close()
    valid.close()
    state = step.state()["optimizer"]["state"]
    statistics = [each[key].cpu().numpy() for each in state.values() for key in each if key.startswith("statistics")]
    return {
        "parameters": parameters(step),
        "statistics": statistics,
        "losses": losses,
        "crops": crops,
        "validation": mean.results()[0],
        "validation samples": samples,
    }


def parameters(step: EagerStep) -> np.ndarray:
    return np.concatenate([parameter.detach().cpu().numpy().ravel() for parameter in step.network.parameters()])


CASES: dict[str, dict] = {
    "sgd float32": {"optimizer": "sgd", "dtype": torch.float32},
    "sgd float64": {"optimizer": "sgd", "dtype": torch.float64},
    "sgd float32, 2 micro-batches": {"optimizer": "sgd", "dtype": torch.float32, "accumulation_steps": 2},
    "sgd float32, static graph": {"optimizer": "sgd", "dtype": torch.float32, "static_graph": True},
    "sgd float32, no buffers": {"optimizer": "sgd", "dtype": torch.float32, "disable_broadcast_buffers": True},
    "sgd float32, manual": {"optimizer": "sgd", "dtype": torch.float32, "ddp": "manual"},
    "sgd float64, manual": {"optimizer": "sgd", "dtype": torch.float64, "ddp": "manual"},
    "manual, 2 micro-batches": {
        "optimizer": "sgd",
        "dtype": torch.float32,
        "ddp": "manual",
        "accumulation_steps": 2,
    },
    "sgd float32, noise scale": {"optimizer": "sgd", "dtype": torch.float32, "log_noise_scale": True},
    "soap float64": {"optimizer": "soap", "dtype": torch.float64},
    "adam float32": {"optimizer": "adam", "dtype": torch.float32},
}
NO_EXCHANGE = {"optimizer": "sgd", "dtype": torch.float32, "noddp": True}


def train_all(world: World, path: str) -> dict[str, dict]:
    with DETERMINISTIC():
        results = {name: train(world, path, **case) for name, case in CASES.items()}
        return {**results, "no exchange": train(world, path, **NO_EXCHANGE)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, volume_file) -> str:
    return str(volume_file(tmp_path_factory.mktemp("parallel") / "box.h5"))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(path: str, device: str) -> dict[str, dict]:
    return train_all(single(device), path)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def together(request: pytest.FixtureRequest, path: str, device: str) -> list[dict[str, dict]]:
    return run_ranks(train_all, request.param, path, device=device)


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
        before = parameters(build_step(single("cpu"), "sgd", settings["dtype"]))
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


def test_measuring_the_noise_scale_changes_no_bit(together) -> None:
    for rank in together:
        assert rank["sgd float32, noise scale"]["losses"] == rank["sgd float32"]["losses"]
        assert np.array_equal(rank["sgd float32, noise scale"]["parameters"], rank["sgd float32"]["parameters"])


def test_without_gradient_exchange_the_ranks_parameters_differ(together) -> None:
    """--noddp measures the cost of the exchange, so no gradients may be exchanged."""
    first, second = (rank["no exchange"]["parameters"] for rank in together[:2])
    assert distance(first, second) > 1e-4


def test_ranks_together_read_the_samples_of_one_rank_and_no_crop_twice(together, alone) -> None:
    seen = [crop for rank in together for crop in rank["sgd float32"]["crops"]]
    assert sorted(seen) == sorted(alone["sgd float32"]["crops"])
    per_epoch = 12 * GLOBAL_BATCH // len(together)
    first_epoch = [crop for rank in together for crop in rank["sgd float32"]["crops"][:per_epoch]]
    assert len(set(first_epoch)) == len(first_epoch) == 12 * GLOBAL_BATCH


def test_validation_counts_every_crop_once(together, alone) -> None:
    assert sum(rank["sgd float64"]["validation samples"] for rank in together) == VALIDATION_SAMPLES
    for rank in together:
        assert rank["sgd float64"]["validation"] == pytest.approx(alone["sgd float64"]["validation"], rel=1e-9)


def test_micro_batches_give_the_gradients_of_the_full_batch(alone) -> None:
    whole, parts = alone["sgd float32"], alone["sgd float32, 2 micro-batches"]
    assert distance(parts["parameters"], whole["parameters"]) <= 1e-5


def test_the_same_seed_twice_gives_bit_identical_losses(path: str, device: str, alone) -> None:
    with DETERMINISTIC():
        again = train(single(device), path, "adam", torch.float32)
    assert again["losses"] == alone["adam float32"]["losses"]
    assert np.array_equal(again["parameters"], alone["adam float32"]["parameters"])
