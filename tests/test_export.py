"""An exported file computes what the network does, in physical units, without this project."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from log_lines import refusal
from processes import TOP
from torch import nn

import export
from analysis.inference.export import METADATA, ExportedNetwork, PhysicalNetwork, without_directories
from analysis.inference.trained_network import TrainedNetwork
from simulation import simulate as simulated
from utils import config as configs
from utils.config import Config
from utils.config.channels import SIDES, TRANSFORM, known_channels
from utils.run import checkpoint
from utils.steps import build
from utils.volumes.attributes import DENSITY_FLOOR, simulation_of

PAGE = TOP / "docs" / "inference.md"
# [N, X, Y, Z]; the example that a file is made with is [2, 8, 8, 8].
SIZES = [(1, 4, 4, 4), (2, 4, 8, 12), (3, 16, 4, 4), (1, 12, 12, 12)]
STATISTICS = {"crop": 8, "channels": {"dark-matter density": {"mean": [-0.1, -0.1, 0.02]}}}
FLOOR = 1e-6  # of the training files; imported volumes have another one than simulated ones
SIMULATION = simulation_of({"density_floor_of_mean": np.float64(FLOOR)}, 1, "")[1] | {"cell size (Mpc/h)": 0.16}
KNOWN = {"simulation": SIMULATION, "input_statistics": STATISTICS, "code": {"mine/net.py": "ab12"}}
PATHS = {"train_path": ["/data/author/a.h5", "/data/author/b.h5"], "expdir": f"{Path.home()}/runs/"}


def config_of(**values: Any) -> Config:
    """A small network's config; `network` is merged."""
    network = {"width": 4, "scales": 2, **values.pop("network", {})}
    return configs.validate({"data_size": 8, "box_size": [16, 16], **values, "network": network}, "small")


def channels_of(**transform: float | None) -> dict[str, Any]:
    """The key `channels` with the published channels, and other values of their transform."""
    sides = (known_channels(side, 4 + place, {**TRANSFORM, **transform}) for place, side in enumerate(SIDES))
    return {"channels": dict(zip(SIDES, ([*map(asdict, side)] for side in sides), strict=True))}


def network_of(config: Config) -> nn.Module:
    """Random weights and normalization statistics, in evaluation mode."""
    torch.manual_seed(1)
    network = build.network(config).eval()
    for name, buffer in network.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 2.0)
    return network


def save(folder: Path, config: Config, network: nn.Module | None = None, **record: Any) -> Path:
    state = (network or network_of(config)).state_dict()
    checkpoint.write(folder, {"network": state, "config": checkpoint.stored_config(config.model_dump()), **record}, {})
    return folder


def exported(folder: Path, *flags: str) -> Path:
    """The file that the command makes of the checkpoint <folder>/run."""
    export.main([f"--checkpoint={folder / 'run'}", f"--output={folder / 'gas.pt2'}", *flags])
    return folder / "gas.pt2"


def dark_matter(samples: int, *sides: int) -> torch.Tensor:
    """[N, 4, X, Y, Z] in physical units; some cells are empty."""
    generator = torch.Generator().manual_seed(sum(sides))
    density = torch.exp(2 * torch.randn(samples, 1, *sides, generator=generator))
    density[:, :, 0, 0] = 0.0
    return torch.cat([density, 400 * torch.randn(samples, 3, *sides, generator=generator)], dim=1)


def assert_physical(result: Any, network: nn.Module, config: Config, fields: torch.Tensor, floor: float) -> None:
    """float32 rounds a channel's value by up to 6e-8, relatively 14 times as much after exp(14 x)."""
    with torch.no_grad():
        expected = PhysicalNetwork(network, *config.volume_channels, [floor, None, None, None])(fields)
    assert result.shape == expected.shape
    difference = (result - expected).abs().amax((0, 2, 3, 4)) / expected.abs().amax((0, 2, 3, 4))
    assert difference.max() <= 5e-6, difference


def metadata(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = {METADATA: ""}
    torch.export.load(str(path), extra_files=result)
    return json.loads(result[METADATA])


def test_the_transforms_are_those_that_made_the_training_data() -> None:
    """Compared with numpy's functions. Gradients are finite, though exp(velocity) would overflow."""
    assert DENSITY_FLOOR == simulated.DENSITY_FLOOR
    fields, seen = dark_matter(2, 6, 5, 4).requires_grad_(), []

    def five_channels(x: torch.Tensor) -> torch.Tensor:
        seen.extend([x, torch.tanh(torch.cat([x, x[:, :1]], dim=1))])
        return seen[-1]

    physical = PhysicalNetwork(five_channels, *simulated.CHANNELS, [DENSITY_FLOOR, None, None, None])(fields)
    for x, values, channels in zip(seen, (fields, physical), simulated.CHANNELS, strict=True):
        density, velocity, kelvin = np.split(values.detach().numpy(), (1, 4), axis=1)
        logarithms = np.log(np.maximum(density, DENSITY_FLOOR)) / 14, (np.log10(kelvin) - 5) / 2.5
        expected = np.concatenate([logarithms[0], velocity / 1000, logarithms[1]], axis=1)
        np.testing.assert_allclose(x.detach(), expected, atol=1e-6)
        stored = [simulated.to_channels(sample.copy(), channels) for sample in values.detach().numpy()]
        np.testing.assert_allclose(np.stack(stored), expected, atol=1e-6)
    physical.sum().backward()
    assert fields.grad.isfinite().all()
    assert (fields.grad[:, 1:] != 0).all()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `run` and gas.pt2, exported from it over an older file."""
    folder = tmp_path_factory.mktemp("export")
    record = {"epoch": 3, "step": 24, "final_loss": 0.125, "data": {"train_path[0]": "digest"}}
    save(folder / "run", config_of(**PATHS), **record, **KNOWN)
    (folder / "gas.pt2").write_text("older")
    exported(folder, "--overwrite")
    return folder


def test_a_file_computes_what_the_network_does_for_any_batch_and_size(files: Path) -> None:
    """Also for one block. Fixed: predict.py's results differed in empty cells, which have the training's floor."""
    predict, network = torch.export.load(files / "gas.pt2").module(), network_of(config_of())
    for size in SIZES:
        fields = dark_matter(*size)
        assert_physical(predict(fields), network, config_of(), fields, FLOOR)
    for refused in ((1, 4, 6, 8, 8), (1, 5, 8, 8, 8)):
        with pytest.raises(RuntimeError):
            predict(torch.ones(refused))
    fields = dark_matter(1, 4, 4, 4)
    assert not predict(fields).requires_grad, "parameters need no gradients, so no activations are kept"
    assert predict(fields.requires_grad_()).requires_grad
    assert predict.to("meta")(fields.to("meta")).device.type == "meta", "the file moves to other devices"


def test_norms_and_other_transforms_are_exported_as_plain_operations(tmp_path: Path) -> None:
    common = {"local_batch_size": 2, **channels_of(density_log_scale=10.0, temperature_log10_center=4.0)}
    config = config_of(network={"norm": "ghost(2)"}, **common)
    calibration = {"density_filter": [0.4, -0.02, -0.06, 0.05, 0.01, 0.02, -0.2], "density_factor": 1.05}
    save(tmp_path / "run", config.model_copy(update={"channels_last": True}), network_of(config), **calibration)
    target, trained = exported(tmp_path), TrainedNetwork.load(tmp_path / "run", torch.device("cpu"))
    assert metadata(target)["checkpoint"] == calibration
    for size in SIZES:
        fields = dark_matter(*size)
        assert_physical(torch.export.load(target).module()(fields), trained.network, config, fields, DENSITY_FLOOR)
    nodes = torch.export.load(str(target)).graph.nodes
    called = {str(node.target) for node in nodes if node.op == "call_function"}
    assert {name.split(".")[0] for name in called if "getitem" not in name} == {"aten"}


def test_channel_units_need_no_transform_and_conditions_are_an_argument(tmp_path: Path) -> None:
    """One row of conditions per sample; the file names them and their trained ranges."""
    conditioned = {"conditions": ["redshift", "cell"], "condition_ranges": [[2.0, 4.0], [0.1, 0.3]]}
    config = config_of(network=conditioned, **channels_of(density_log_scale=None))
    network = network_of(config)
    for parameter in network.get_submodule("film.layers").parameters():
        nn.init.normal_(parameter, std=0.2)
    save(tmp_path / "run", config, network, density_factor=1.05)
    target = exported(tmp_path, "--units=channel", "--no_calibration")
    predict = torch.export.load(target).module()
    for samples in (1, 3):
        fields, conditions = torch.randn(samples, 4, 4, 8, 4), torch.tensor([[2.5, 0.12]] * samples)
        conditions[0] = torch.tensor([3.5, 0.3])
        with torch.no_grad():
            torch.testing.assert_close(predict(fields, conditions), network(fields, conditions))
            assert not torch.allclose(predict(fields, conditions), predict(fields, conditions - 0.1), atol=1e-3)
    result = metadata(target)
    assert result["how_to_call"][-1].startswith("gas = predict(dark_matter, conditions)  # [N, 4, X, Y, Z], [N, 2] -> ")
    assert result["conditions"]["columns"][1] == {"name": "cell", "unit": "comoving Mpc/h", "trained_range": [0.1, 0.3]}
    assert result["output"]["channels"][0]["value"] == "unknown"


def test_a_file_works_without_this_project(files: Path, tmp_path: Path) -> None:
    """Runs the lines of the file's own metadata in another process and directory."""
    file, fields = files / "gas.pt2", dark_matter(3, 8, 4, 12)
    np.save(tmp_path / "dark_matter.npy", fields.numpy())
    code = """
import importlib.util, json, os, sys
sys.path[:] = [path for path in sys.path if not os.path.isdir(os.path.join(path, "networks"))]
import numpy, torch
for module in ("networks", "utils", "analysis", "train", "predict", "export"):
    assert importlib.util.find_spec(module) is None, module
names = {"dark_matter": torch.from_numpy(numpy.load("dark_matter.npy"))}
exec("\\n".join(json.loads(sys.argv[1])), names)
numpy.save("gas.npy", names["gas"].numpy())
"""
    (tmp_path / "gas.pt2").symlink_to(file)
    command = [sys.executable, "-c", code, json.dumps(metadata(file)["how_to_call"])]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, check=True)
    gas = torch.from_numpy(np.load(tmp_path / "gas.npy"))
    assert_physical(gas, network_of(config_of()), config_of(), fields, FLOOR)


def test_metadata_says_how_to_use_the_file_and_names_no_directory_of_its_author(files: Path) -> None:
    """Neither of the code, in stack traces, nor of data and runs. What the checkpoint knows of the data is copied."""
    result, content = metadata(files / "gas.pt2"), (files / "gas.pt2").read_bytes()
    names = str(TOP), PATHS["expdir"], "/data/author", str(files), files.parent.name, "inference/export.py", "unet.py"
    for name in names:
        assert name.encode() not in content
    assert {key: result[key] for key in KNOWN} == KNOWN
    assert "data" not in result
    assert (result["format"], result["units"]) == (1, "physical")
    assert (result["input"]["multiple_of"], result["input"]["density_floor_of_mean"]) == (4, FLOOR)
    units = ["mean density", "km/s", "km/s", "km/s", "K"]
    for side, channels in (("input", units[:4]), ("output", units)):
        assert [channel["unit"] for channel in result[side]["channels"]] == channels
    assert result["checkpoint"] == {"epoch": 3, "step": 24, "final_loss": 0.125}
    assert result["weights_sha256"] == checkpoint.file_digest(checkpoint.weights_file(files / "run"))
    values = configs.parse_value(result["config"])["trained"]
    assert (values["train_path"], values["expdir"]) == (["a.h5", "b.h5"], "runs")
    assert values == without_directories(config_of(**PATHS).model_dump())


def test_windows_of_the_page_are_blended_to_a_periodic_box() -> None:
    """A network that is wrong at the faces of its input; the sides are no multiples of half a window."""
    (shown,) = re.findall(r"```python\n([^`]*def predict_box.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    faces = torch.ones(8, 8, 8)
    faces[1:-1, 1:-1, 1:-1] = 0

    def predict(fields: torch.Tensor) -> torch.Tensor:
        assert fields.shape == (1, 4, 8, 8, 8)
        return torch.cat([fields, fields[:, :1]], dim=1) + wrong * faces

    names: dict[str, Any] = {"torch": torch, "predict": predict}
    exec(shown, names)
    wrong, box = 0.0, torch.randn(4, 8, 14, 17, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([box, box[:1]])
    torch.testing.assert_close(names["predict_box"](box, window=8), expected)
    wrong = 1.0
    errors = names["predict_box"](box, window=8) - expected
    assert 0 < errors.max() < 0.25
    torch.testing.assert_close(errors[:, :4], errors[:, 4:])  # the faces of the box have no larger errors


def test_what_cannot_be_exported_is_one_line(files: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """A file that computes something else than the network is not written."""
    packed = ExportedNetwork.of(TrainedNetwork.load(files / "run", torch.device("cpu")), "physical")
    difference = packed.largest_difference(lambda fields: 1.001 * packed.module(fields))
    assert difference == pytest.approx(1e-3, rel=0.01)
    monkeypatch.setattr("analysis.inference.export.LARGEST_DIFFERENCE", -1.0)
    (tmp_path / "old.pt2").write_text("older")
    unknown = save(tmp_path / "unknown", config_of(**channels_of(velocity_scale_km_s=None)))
    for checkpoint_path, output, says, *more in (
        (files / "run", "gas.pt", "gas.pt does not end in .pt2"),
        (files / "run", "old.pt2", "exists; give --overwrite to replace it, or another --output"),
        (unknown, "gas.pt2", "values of dark-matter velocity x, "),
        (files / "run", "old.pt2", "is not written, because its max relative difference from the ", "--overwrite"),
    ):
        flags = [f"--checkpoint={checkpoint_path}", f"--output={tmp_path / output}", *more]
        assert says in refusal(export.main, flags, capsys)
    assert sorted(os.listdir(tmp_path)) == ["old.pt2", "unknown"]
    assert (tmp_path / "old.pt2").read_text() == "older"
