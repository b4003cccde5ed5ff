"""Training steps with Triton kernels, in Triton's interpreter, equal those with PyTorch's operations."""

from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks
from small_steps import ALONE, flat_parameters, make_step
from triton_interpreter import small_kernels, use_small_blocks

from networks import build_loss, build_network, initialize
from networks.ops import plan
from utils.data.loaders import Batch
from utils.distributed.world import World

BATCH, LR = 4, 0.1
OPTIONS: list[dict[str, Any]] = [{}, {"ddp": "manual", "accumulation_steps": 2}]


def train(world: World, kernels: str, dtype: str = "float16", **options: Any) -> tuple[float, np.ndarray]:
    """The loss of one step, each rank on its part of the batch, and the change of the parameters."""
    network, loss = build_network("unet", crop=8, width=16, scales=2), build_loss("l1")
    initialize(network, torch.Generator().manual_seed(0), scale=0.1)
    network.to(memory_format=torch.channels_last_3d)
    setting = plan.Setting(kernels, 8, getattr(torch, dtype), torch.device("cuda"))
    plan.apply(network, plan.make(network, setting, loss), setting.dtype, loss)
    half = {"enable_amp": True, "channels_last": True, "precision": dtype} if dtype != "float32" else {}
    step = make_step(world=world, network=network, loss=loss, bucket_cap_mb=0.01, **half, **options)
    generator, before = torch.Generator().manual_seed(1), flat_parameters(step).clone()
    inputs, targets = (torch.rand(BATCH, channels, 8, 8, 8, generator=generator) - 0.5 for channels in (4, 5))
    parts = (x[world.rank :: world.size].contiguous(memory_format=torch.channels_last_3d) for x in (inputs, targets))
    return float(step(Batch(*parts), LR)), (flat_parameters(step) - before).numpy()


def train_all(world: World, kinds: list[dict[str, Any]] = OPTIONS) -> list[tuple[float, np.ndarray]]:
    with pytest.MonkeyPatch.context() as patch, small_kernels(patch):
        use_small_blocks(patch)
        return [train(world, "auto", **options) for options in kinds]


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


def test_a_step_with_own_kernels_equals_the_plain_one() -> None:
    """Alone with micro-batches, and on two ranks with either exchange, whose ranks end with the same bits."""
    exact_loss, exact = train(ALONE, "torch", "float32")
    error = distance(train(ALONE, "torch")[1], exact)
    results = train_all(ALONE, OPTIONS[1:])
    for (first_loss, first), (second_loss, second) in zip(*run_ranks(train_all, 2), strict=True):
        assert np.array_equal(first, second)
        results.append(((first_loss + second_loss) / 2, first))
    for loss, change in results:
        assert loss == pytest.approx(exact_loss, rel=1e-4)
        assert distance(change, exact) < 2 * error
