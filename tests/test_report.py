"""The predictors that a trained network is held against, and the closing table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_ranks

from utils.data.native import NativeLoader
from utils.data.plan import SamplePlan
from utils.data.volumes import open_volume
from utils.distributed import Launch, World
from utils.report import baseline_losses, closing_table
from utils.trainer import FitResult

ALONE = World(Launch("test"), torch.device("cpu"))
SAMPLES = 5


def baselines(world: World, path: str) -> dict[str, float]:
    plan = SamplePlan(SAMPLES, 16, 8, split="valid")
    volume = open_volume(path, (4, 5))
    return baseline_losses(
        NativeLoader(volume, plan, batch_size=2, rank=world.rank, world_size=world.size, threads=0), world
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, volume_file) -> str:
    return str(volume_file(tmp_path_factory.mktemp("report") / "box.h5"))


def test_baselines_are_those_of_numpy(path: str) -> None:
    volume, plan = open_volume(path, (4, 5)), SamplePlan(SAMPLES, 16, 8, split="valid").epoch(0)
    crops = [tuple(slice(int(start), int(start) + 8) for start in origin) for origin in plan.origins]
    inputs = np.stack([volume.inputs[(slice(None), *crop)] for crop in crops]).astype(np.float64)
    targets = np.stack([volume.targets[(slice(None), *crop)] for crop in crops]).astype(np.float64)
    medians = np.median(targets, axis=(0, 2, 3, 4), keepdims=True)
    copy = np.concatenate([inputs, np.broadcast_to(medians[:, 4:], targets[:, 4:].shape)], axis=1)
    found = baselines(ALONE, path)
    assert found["constant"] == pytest.approx(np.abs(targets - medians).mean(), rel=1e-4)
    assert found["copy"] == pytest.approx(np.abs(targets - copy).mean(), rel=1e-4)


def test_ranks_share_the_work_and_agree(path: str) -> None:
    """More ranks than fill the last batch: one of them has fewer crops than the other."""
    alone = baselines(ALONE, path)
    for rank in run_ranks(baselines, 2, path):
        assert rank == pytest.approx(alone, rel=1e-9)


def test_table_tells_what_part_the_trained_loss_is() -> None:
    result = FitResult(400, 0.2, 0.01, 0.01, 50.0, 65.0)
    table = "\n".join(closing_table(result, {"constant": 0.08, "copy": 0.04}, Path("runs/x")))
    for expected in ("0.200000   0.050 of it", "0.080000   0.125 of it", "0.040000   0.250 of it", "50.0", "1:05"):
        assert expected in table
