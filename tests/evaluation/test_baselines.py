"""Losses of predictors that learn nothing, and the table that compares a trained network with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from processes import run_ranks
from reference_samples import ALONE, cubes, loader_of

from networks import build_loss
from utils.data.files.hdf5 import open_volume
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import SamplePlan
from utils.distributed.world import World
from utils.evaluation.baselines import volume_losses
from utils.training.state import FitResult

SAMPLES = 5


# Loss of each cell for differences d, and lambda_rho of the config.
CELLWISE: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "l1": (np.abs, 0.0),
    "mse": (np.square, 0.0),
    "huber": (lambda d: np.where(np.abs(d) < 0.1, d**2 / 2, 0.1 * (np.abs(d) - 0.05)), 0.0),
    "mse with density term": (np.square, 1e-4),
}


def baselines(world: World, path: str, name: str, copied: int | None = None) -> dict[str, float]:
    plan = SamplePlan(SAMPLES, cubes(16), 8, split="valid")
    volume = open_volume(path, (4, 5))
    keys = {"local_batch_size": 2, "num_data_workers": 1}
    loader = loader_of(ThreadedCropLoader, [volume], plan, world.rank, world.size, **keys)
    # Channel weights have no effect on a validation.
    loss = build_loss(name.split()[0], lambda_rho=CELLWISE[name][1], weights=[1.0, 2.0, 3.0, 4.0, 5.0])
    return volume_losses(loader, loss, world, copied)


@pytest.mark.parametrize("name", CELLWISE)
def test_baselines_agree_with_numpy_on_one_rank_and_on_two(name: str, tmp_path: Path, volume_file) -> None:
    """The second of two ranks has fewer crops than the first."""
    path = str(volume_file(tmp_path / "box.h5"))
    volume, plan = open_volume(path, (4, 5)), SamplePlan(SAMPLES, cubes(16), 8, split="valid").epoch(0)
    crops = [tuple(slice(int(start), int(start) + 8) for start in origin) for origin in plan.origins]
    inputs = np.stack([volume.inputs[(slice(None), *crop)] for crop in crops]).astype(np.float64)
    targets = np.stack([volume.targets[(slice(None), *crop)] for crop in crops]).astype(np.float64)
    cellwise, lambda_rho = CELLWISE[name]

    def loss(channel: int, outputs: np.ndarray) -> float:
        right = targets[:, channel]
        density = np.abs(np.exp(14 * outputs) - np.exp(14 * right)).mean() if channel == 0 and lambda_rho else 0.0
        return float(cellwise(outputs - right).mean() + 5 * lambda_rho * density)

    candidates = [[loss(channel, value) for value in np.linspace(-1.5, 1.5, 3001)] for channel in range(5)]
    constants = np.min(candidates, axis=1)
    alone = baselines(ALONE, path, name)
    assert alone["best constant per channel"] == pytest.approx(constants.mean(), rel=1e-4)
    copy = [*(loss(channel, inputs[:, channel]) for channel in range(4)), constants[4]]
    assert alone["copying density and velocities"] == pytest.approx(np.mean(copy), rel=1e-4)
    if name == "l1":
        assert "copying the density" in baselines(ALONE, path, name, copied=1)
        for rank in run_ranks(baselines, 2, path, name):
            assert rank == pytest.approx(alone, rel=1e-6)


def test_the_result_table_compares_the_trained_loss_with_the_others() -> None:
    def table(losses: dict[str, float], *valid: float, **more: int) -> str:
        return "\n".join(FitResult(400, 0.2, *valid, 50.0, 65.0, **more).table(losses))

    good = table({"constant": 0.08}, 0.01, 0.009, best_step=300)
    assert "constant                        0.080000      8.00 times the trained network's" in good
    assert "best checkpoint, step 300       0.009000" in good
    assert "worse" not in good
    assert "the trained network is worse than: copy; train longer" in table({"a": 0.2, "copy": 0.04}, 0.05, 0.05)
    assert "0.200000       inf times the " in table({"untrained": 0.2}, 0.0, 0.0)
