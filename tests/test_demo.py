"""Test of the demo on smaller volumes and with fewer steps: the network is better than simple predictors."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import train

TOP = Path(__file__).parent.parent


def test_the_demo_keeps_earlier_runs_and_resumes_an_interrupted_one() -> None:
    """It had --resume=no, which removed the earlier run; tests/training/test_run.py tests the rule without it."""
    done = subprocess.run(["make", "--dry-run", "demo"], cwd=TOP, capture_output=True, text=True, timeout=60)
    (command,) = re.findall(r"-m torch.distributed.run .* train.py (.*)", done.stdout)
    assert command == "--config=demo"


@pytest.mark.slow
def test_training_on_simulated_boxes_beats_simple_predictors(tmp_path, monkeypatch, capfd) -> None:
    pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")
    from utils.simulation.simulate import main as simulate

    monkeypatch.chdir(TOP)
    for name, seed in (("train", 1), ("val", 2)):
        simulate(["--output", str(tmp_path / f"{name}.h5"), "--grid", "64", "--seed", str(seed)])
    settings = {
        "train_path": tmp_path / "train.h5",
        "val_path": tmp_path / "val.h5",
        "box_size": "[64, 64]",
        "Nsamples": 1200,
        "Nsamples_val": 64,
        "expdir": tmp_path / "runs",
    }
    train.main(["--config=demo", "--num_epochs=2", *(f"--set={key}={value}" for key, value in settings.items())])
    output = capfd.readouterr().err
    ratios = {
        name: float(re.search(rf"{name}\s+\d\.\d+\s+(\d+\.\d+) times the trained", output)[1])
        for name in ("untrained network", "best constant per channel", "copying density and velocities")
    }
    assert ratios["untrained network"] > 6
    assert ratios["best constant per channel"] > 4
    assert ratios["copying density and velocities"] > 1
    for picture in ("loss_curves.png", "slices.png"):
        assert next(tmp_path.glob(f"runs/demo/1*/00/{picture}")).stat().st_size > 10_000
