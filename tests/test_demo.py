"""Test of the demo on smaller volumes and with fewer steps: the network is better than simple predictors."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import TOP

import train


@pytest.mark.slow
def test_training_on_simulated_boxes_beats_simple_predictors(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """The demo had --resume=no, which removed the earlier run."""
    pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")
    from utils.simulation.simulate import main as simulate

    monkeypatch.chdir(TOP)
    recipe = subprocess.run(["make", "--dry-run", "demo"], capture_output=True, text=True, check=True).stdout
    (command,) = re.findall(r"-m torch.distributed.run .* train.py (.*)", recipe)
    settings = {"box_size": "[64, 64]", "Nsamples": 1200, "Nsamples_val": 64, "expdir": tmp_path / "runs"}
    for name, seed in (("train", 1), ("val", 2)):
        settings[f"{name}_path"] = tmp_path / f"{name}.h5"
        simulate(["--output", f"{tmp_path / name}.h5", "--grid", "64", "--seed", str(seed)])
    assert command == "--config=demo"
    train.main([command, "--num_epochs=2", *(f"--set={key}={value}" for key, value in settings.items())])
    output = capfd.readouterr().err
    predictors = {"untrained network": 6, "best constant per channel": 4, "copying density and velocities": 1}
    for name, ratio in predictors.items():
        assert float(re.search(rf"{name}\s+\d\.\d+\s+(\d+\.\d+) times the trained", output)[1]) > ratio
    for picture in ("loss_curves.png", "slices.png"):
        assert next(tmp_path.glob(f"runs/demo/1*/00/{picture}")).stat().st_size > 10_000
