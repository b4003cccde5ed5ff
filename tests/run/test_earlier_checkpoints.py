"""Checkpoints of earlier versions, named by the commit that trained them, still predict, evaluate, export and resume.

config test with network.width 1, 16 samples per epoch, start_lr 0.1, shape constant, and retired keys; after one epoch.
"""

import math
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from sample_results import draw_nothing
from trainings import YAML, directory, last

import evaluate
import export
import predict
import train
from analysis.evaluation import report, results
from analysis.inference.trained_network import TrainedNetwork
from utils import config as configs
from utils.config import retired
from utils.config.channels import TRANSFORM, known_channels
from utils.config.retired import REPLACED
from utils.run.checkpoint import WEIGHTS

STORED = Path(__file__).with_name("checkpoints")
COMMITS = ["1b3d3556", "33ad6d92"]
LOSSES = 0.101770, 0.188339  # of the first and the second epoch, as logged by these commits
# Means of the channels that these commits predict; the later one calibrates the density.
DENSITY = {"1b3d3556": -0.0763996, "33ad6d92": 0.0509049}
OTHERS = [0.0224962, 0.0083233, -0.0174392, -0.0932693]


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any, volume_file: Any) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("volumes")
    return {name: volume_file(folder / f"{name}.h5", seed=seed) for seed, name in enumerate(("train", "val"), 1)}


def trained(files: dict[str, Path], expdir: Path, start: str) -> Any:
    """The last checkpoint of a run of two epochs that starts from a stored checkpoint."""
    changes = {"network.width": 1, "Nsamples": 16, "lr_schedule.start_lr": 0.1, "lr_schedule.shape": "constant"}
    changes |= {"expdir": expdir, "device": "cpu", "report_baselines": False, "loggers": []}
    changes |= {f"{name}_path": path for name, path in files.items()}
    train.main([f"--yaml_config={YAML}", "--config=test", start, *(f"--set={k}={v}" for k, v in changes.items())])
    return last(directory(expdir))


@pytest.mark.parametrize("commit", COMMITS)
def test_earlier_checkpoints_predict_the_same_gas(commit: str, files: Any, tmp_path: Path, monkeypatch: Any) -> None:
    draw_nothing(monkeypatch)
    monkeypatch.setattr(report, "page", lambda *_: "a page")
    common = [f"--checkpoint={STORED / commit}", f"--input={files['val']}", "--device=cpu"]
    predict.main([*common, f"--output={tmp_path / 'gas.h5'}"])
    with h5py.File(tmp_path / "gas.h5") as file, h5py.File(files["val"]) as true:
        gas, errors = file["Hydro"][:], abs(file["Hydro"][:] - true["Hydro"][:])
    assert gas.mean((1, 2, 3)) == pytest.approx([DENSITY[commit], *OTHERS], rel=1e-3)
    evaluate.main([*common, f"--output={tmp_path / 'evaluation'}"])
    evaluated = results.load(tmp_path / "evaluation" / "evaluation.npz")
    assert evaluated.l1 == pytest.approx(errors.mean((1, 2, 3)), rel=1e-4)


@pytest.mark.parametrize("commit", COMMITS)
def test_earlier_checkpoints_are_exported_trained_further_and_resumed(commit: str, files: Any, tmp_path: Path) -> None:
    export.main([f"--checkpoint={STORED / commit}", f"--output={tmp_path / 'gas.pt2'}"])
    assert (tmp_path / "gas.pt2").exists()
    end = trained(files, tmp_path / "further", f"--init_from={STORED / commit}")
    assert end.state.initial_loss == pytest.approx(LOSSES[0], rel=1e-4)

    end = trained(files, tmp_path / "resumed", f"--resume={STORED / commit}")
    assert end.state.final_loss == pytest.approx(LOSSES[1], rel=1e-4)


def test_retired_keys_of_a_checkpoint_become_present_ones(monkeypatch: Any) -> None:
    for stored, schedule in (("step", "constant"), ("cosine", "cosine")):
        lr_schedule = {"shape": stored, "drop_epochs": [3], "start_lr": 0.1}
        expected = {"lr_schedule": {"shape": schedule, "start_lr": 0.1}}
        assert retired.update({"lr_schedule": lr_schedule}, "run") == expected
    for stored, present in ((False, {}), (True, {"network": {"adds_inputs": True}})):  # the latter is an unknown key
        assert retired.update({"network": {"adds_inputs": stored}}, "run") == present
    monkeypatch.setitem(REPLACED, "network.kind", lambda value: {"network.name": value, "seed": 3})
    config = {"network": {"kind": "lenet", "options": {"kind": 1}, "space_to_depth": []}}
    expected = {"network": {"name": "lenet", "options": {"kind": 1}}, "seed": 3}
    assert retired.update(config, "run") == expected


@pytest.mark.parametrize("commit", COMMITS)
def test_the_channels_of_checkpoints_of_earlier_versions_have_the_same_physical_values(commit: str) -> None:
    """Bit for bit those of the transform that they state."""
    stored = torch.load(STORED / commit / WEIGHTS, weights_only=True)["config"]["transform"]
    trained = TrainedNetwork.load(STORED / commit, torch.device("cpu"))
    density, velocity, center, scale = (stored[name] for name in TRANSFORM)
    ten, values = math.log(10.0), torch.linspace(-1.5, 1.5, 301)
    physical = [(density * values).exp(), *[velocity * values] * 3, (values * (scale * ten) + center * ten).exp()]
    for channels, expected in zip(trained.channels, (physical[:4], physical), strict=True):
        for channel, wanted in zip(channels, expected, strict=True):
            assert torch.equal(channel.to_physical(values), wanted), channel
    assert trained.config.vectors == ([[1, 2, 3]], [[1, 2, 3]])


@pytest.mark.parametrize("vectors", [[[1, 2, 3]], [[2, 3, 1]], [[3, 2, 1]], [], None, [[1, 2, 3], [4, 0, 5]]], ids=str)
@pytest.mark.parametrize("transform", [{}, {"velocity_scale_km_s": 500.0, "temperature_log10_scale": None}], ids=str)
def test_stored_transforms_and_vectors_become_channels(vectors: Any, transform: dict[str, float | None]) -> None:
    """Other vectors than the published ones had no names; they still are vectors of the same channels."""
    count = 6 if vectors and len(vectors) > 1 else 5
    stored = {"inputs": [] if vectors is None else vectors[:1], "targets": vectors}
    config = {"N_in_channels": 4, "N_out_channels": count, "seed": 3, "transform": {**TRANSFORM, **transform}}
    updated = retired.update({**config, "vector_channels": stored}, "run")
    assert updated.keys() == {"N_in_channels", "N_out_channels", "seed", "channels"}
    config = configs.validate(updated, "run")
    changed = {**TRANSFORM, **transform}
    expected = [known_channels("inputs", 4, changed, stored["inputs"])]
    expected.append(known_channels("targets", count, changed, vectors))
    assert [config.channels.inputs, config.channels.targets] == expected
    assert config.vectors == (stored["inputs"], [[1, 2, 3]] if vectors is None else sorted(vectors, reverse=True))
    is_known = vectors in (None, [[1, 2, 3]])
    assert [channel.unit for channel in expected[1]].count("km/s") == (3 if is_known else 0)
