"""The generalization study: which networks are evaluated on which boxes, what is kept, and the table and plot."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")

from benchmarks import generalization, processes
from benchmarks.convergence import Training
from benchmarks.generalization import MIXTURE, NETWORK, REFERENCE
from utils.config.sections import EvaluationConfig
from utils.evaluation import results
from utils.simulation import simulate

PLAN = """
training:
  config: test
  changes: {num_epochs: 1, report_baselines: false, report_pictures: false, log_noise_scale: false}
  grid: [16, 16]
  seeds: [1, 2]
evaluation: {grid: 16, seeds: [11, 12]}
trained: {redshift: 2.0, cosmology: planck18, cell: 0.5}
panels:
  redshift:
    z = 2: {}
    z = 4: {redshift: 4.0, cell: 1.0}
  cell size:
    0.5 Mpc/h: {}
mixture: [z = 2, z = 4]
references: [z = 4]
"""
TRAINED, CHANGED = "planck18_z2_cell0.5", "planck18_z4_cell1"


@pytest.fixture
def study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, volume_file: Callable[..., Path], run_forked: Any
) -> Callable[[], dict[str, Any]]:
    """Runs a study of small random boxes in `tmp_path`; it returns the results."""

    def write_box(argv: Sequence[str]) -> None:
        options = simulate.parse(argv)
        path = volume_file(options.output, options.grid, seed=options.seed + round(100 * options.redshift))
        with h5py.File(path, "r+") as file:
            file.attrs.update(simulate.file_attributes(options))

    def run() -> dict[str, Any]:
        arguments = ["--seeds=1", f"--runs={tmp_path}", f"--output={tmp_path}", "--set=device=cpu"]
        generalization.main(arguments)
        return json.loads((tmp_path / "generalization.json").read_text())["panels"]

    (tmp_path / "boxes").mkdir()
    (tmp_path / "plan.yaml").write_text(PLAN)
    monkeypatch.setattr(generalization, "PLAN", tmp_path / "plan.yaml")
    monkeypatch.setattr(generalization, "FLUX", EvaluationConfig(sightlines=4))
    monkeypatch.setattr(simulate, "main", write_box)
    monkeypatch.setattr(processes, "run_group", run_forked)
    return run


def test_networks_are_evaluated_on_every_condition_and_nothing_is_done_twice(
    study: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panels = study()
    trained, changed = panels["redshift"].values()
    assert panels["cell size"] == {"0.5 Mpc/h": trained}
    assert [(each["redshift"], each["cell"]) for each in (trained, changed)] == [(2, 0.5), (4, 1)]
    with h5py.File(tmp_path / f"boxes/{CHANGED}_grid16_seed11.h5") as file:
        assert file.attrs["box_size_mpc_h"] == 16

    folder = tmp_path / "evaluations"
    for key, name in ((NETWORK, TRAINED), (REFERENCE, CHANGED), (MIXTURE, f"{TRAINED}+{CHANGED}")):
        kept = [results.load(folder / f"{name}-seed0/{CHANGED}_grid16_seed{box}.npz") for box in (11, 12)]
        errors = [float(each.l1.mean()) for each in kept]
        assert changed[key]["L1"] == {"mean": statistics.fmean(errors), "stdev": statistics.stdev(errors), "n": 2}
    assert REFERENCE not in trained
    errors = [each[NETWORK]["L1"]["mean"] for each in (changed, trained)]
    assert changed["L1 ratio"] == errors[0] / errors[1]
    constants = []
    for seed in (11, 12):
        with h5py.File(tmp_path / f"boxes/{CHANGED}_grid16_seed{seed}.h5") as file:
            target = file["Hydro"][:].reshape(5, -1)
        constants.append(np.abs(target - np.median(target, axis=1, keepdims=True)).mean())
    assert changed["best constant per channel"]["L1"]["mean"] == pytest.approx(np.mean(constants), rel=1e-3)
    assert len((tmp_path / "generalization.md").read_text().splitlines()) == 5
    assert (tmp_path / "generalization.png").read_bytes().startswith(b"\x89PNG")

    save = Mock(wraps=results.save)
    monkeypatch.setattr(results, "save", save)
    monkeypatch.setattr(generalization, "draw", lambda *all: None)
    monkeypatch.setattr(Training, "run", lambda training, limit: pytest.fail("trained twice"))
    monkeypatch.setattr(simulate, "main", lambda argv: pytest.fail("simulated twice"))
    newer = tmp_path / f"boxes/{TRAINED}_grid16_seed12.h5"
    os.utime(newer)  # as if it had been simulated again
    assert study() == panels
    assert {call.args[1] for call in save.call_args_list} == {*folder.glob(f"*/{newer.stem}.npz")}
