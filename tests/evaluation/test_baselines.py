"""Losses of predictors that learn nothing, and the table that compares a trained network with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_ranks

from utils.data.files.hdf5 import open_volume
from utils.data.loaders.crops import CropOptions
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import SamplePlan
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.evaluation.baselines import volume_losses
from utils.runs.summary import result_table
from utils.training.trainer import FitResult

ALONE = World(Launch("test"), torch.device("cpu"))
SAMPLES = 5


def baselines(world: World, path: str) -> dict[str, float]:
    plan = SamplePlan(SAMPLES, 16, 8, split="valid")
    volume = open_volume(path, (4, 5))
    options = CropOptions(plan, batch_size=2, rank=world.rank, world_size=world.size, threads=0)
    return volume_losses(ThreadedCropLoader(volume, options), world)


def test_baselines_agree_with_numpy_on_one_rank_and_on_two(tmp_path: Path, volume_file) -> None:
    """The second of two ranks has fewer crops than the first."""
    path = str(volume_file(tmp_path / "box.h5"))
    volume, plan = open_volume(path, (4, 5)), SamplePlan(SAMPLES, 16, 8, split="valid").epoch(0)
    crops = [tuple(slice(int(start), int(start) + 8) for start in origin) for origin in plan.origins]
    inputs = np.stack([volume.inputs[(slice(None), *crop)] for crop in crops]).astype(np.float64)
    targets = np.stack([volume.targets[(slice(None), *crop)] for crop in crops]).astype(np.float64)
    medians = np.median(targets, axis=(0, 2, 3, 4), keepdims=True)
    copy = np.concatenate([inputs, np.broadcast_to(medians[:, 4:], targets[:, 4:].shape)], axis=1)
    alone = baselines(ALONE, path)
    assert alone["best constant per channel"] == pytest.approx(np.abs(targets - medians).mean(), rel=1e-4)
    assert alone["copying density and velocities"] == pytest.approx(np.abs(targets - copy).mean(), rel=1e-4)
    for rank in run_ranks(baselines, 2, path):
        assert rank == pytest.approx(alone, rel=1e-9)


def test_the_result_table_compares_the_trained_loss_with_the_others() -> None:
    result = FitResult(400, 0.2, 0.01, 0.01, 50.0, 65.0)
    table = "\n".join(result_table(result, {"untrained network": 0.2, "constant": 0.08, "copy": 0.04}, Path("runs/x")))
    for expected in ("0.200000   0.050 of it", "0.080000   0.125 of it", "0.040000   0.250 of it", "50.0", "1:05"):
        assert expected in table
