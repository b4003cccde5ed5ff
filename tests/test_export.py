"""An exported file computes what the network does, in physical units, where nothing of this project is."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from disks import small_disk
from torch import nn

import export
import train
from networks import build_network
from networks.physical import DENSITY_FLOOR, PhysicalNetwork
from predict import Trained
from train import build_model
from utils import checkpoint
from utils import config as configs
from utils.channels import input_channels, target_channels
from utils.config import Config
from utils.data import gas
from utils.resume import comparable

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # one of the formats is

TOP = Path(__file__).parent.parent
SMALL = {"network": {"width": 4, "scales": 2}, "data_size": 8, "box_size": [16, 16]}
NORMS = ["none", "batch", "sync_batch", "ghost(2)", "group"]
SUFFIXES = {"export": ".pt2", "torchscript": ".pt"}
FORMATS = list(SUFFIXES)
# [N, X, Y, Z]; the examples that files are made with are [2, 8, 8, 8] and [2, 4, 4, 4].
SIZES = [(1, 4, 4, 4), (2, 4, 8, 12), (3, 16, 4, 4), (1, 12, 12, 12)]
# float32 rounds a channel's value by up to 6e-8, which exp(14 x) makes 14 times as much, relatively.
ROUNDING = 5e-6


def config_of(**values: Any) -> Config:
    """A small network's; `network` is merged."""
    network = {**SMALL["network"], **values.pop("network", {})}
    return configs.validate({**SMALL, **values, "network": network}, "small")


def network_of(config: Config) -> nn.Module:
    """With random weights, and random statistics in its norms, in evaluation mode."""
    torch.manual_seed(1)
    network = build_model(config).eval()
    for name, buffer in network.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 2.0)
    return network


def save(folder: Path, config: Config, network: nn.Module | None = None, **record: float) -> Path:
    """A checkpoint, as training writes it."""
    network = network or network_of(config)
    weights = {"network": network.state_dict(), "config": comparable(config), **record}
    checkpoint.write(folder, weights, {})
    return folder


def dark_matter(samples: int, *sides: int) -> torch.Tensor:
    """[N, 4, X, Y, Z] in physical units; some cells are empty."""
    generator = torch.Generator().manual_seed(sum(sides))
    density = torch.exp(2 * torch.randn(samples, 1, *sides, generator=generator))
    density[:, :, 0, 0] = 0.0
    return torch.cat([density, 400 * torch.randn(samples, 3, *sides, generator=generator)], dim=1)


def by_channels(network: nn.Module, config: Config, fields: torch.Tensor) -> torch.Tensor:
    """What a file must compute."""
    inputs = input_channels(config.N_in_channels, config.transform)
    targets = target_channels(config.N_out_channels, config.transform)
    fields = torch.cat([fields[:, :1].clamp(min=1e-3), fields[:, 1:]], dim=1)
    with torch.no_grad():
        x = network(torch.stack([inputs[i].from_physical(fields[:, i]) for i in range(len(inputs))], dim=1))
    return torch.stack([targets[i].to_physical(x[:, i]) for i in range(len(targets))], dim=1)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = ROUNDING) -> None:
    """Within the tolerance of each channel's largest value."""
    assert found.shape == expected.shape
    difference = (found - expected).abs().amax((0, 2, 3, 4)) / expected.abs().amax((0, 2, 3, 4))
    assert difference.max() <= tolerance, difference


def load(path: Path, kind: str = "export") -> Callable[[torch.Tensor], torch.Tensor]:
    with open(path, "rb") as file:
        return export.FORMATS[kind].load(file)


def metadata(path: Path, kind: str = "export") -> dict[str, Any]:
    found: dict[str, Any] = {export.METADATA: ""}
    if kind == "export":
        torch.export.load(str(path), extra_files=found)
    else:
        torch.jit.load(str(path), _extra_files=found)
    return json.loads(found[export.METADATA])


# --- the network with the transforms inside --------------------------------------------------------------------------


def test_the_transforms_are_those_that_made_the_training_data() -> None:
    """Against the simulation's own code, numpy's: it must make the channels that the network sees and gives."""
    assert DENSITY_FLOOR == gas.DENSITY_FLOOR
    inputs, targets = input_channels(4, Config().transform), target_channels(5, Config().transform)
    fields = dark_matter(2, 6, 5, 4)
    seen: list[torch.Tensor] = []

    class Painter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(torch.cat([x, x[:, :1]], dim=1))
            seen.extend([x, y])
            return y

    physical = PhysicalNetwork(Painter(), inputs, targets)(fields)
    for x, values in zip(seen, (fields, physical), strict=True):
        for sample in range(2):
            expected = gas.to_channels(values[sample].numpy().copy())
            np.testing.assert_allclose(x[sample], expected, atol=1e-6)


def test_density_has_the_floor_that_is_asked_for() -> None:
    inputs, targets = input_channels(4, Config().transform), target_channels(5, Config().transform)
    network = network_of(config_of())
    fields = dark_matter(1, 4, 4, 4)
    for floor in (DENSITY_FLOOR, 0.1):
        physical = PhysicalNetwork(network, inputs, targets, floor)
        below, at = fields.clone(), fields.clone()
        below[0, 0, 1], at[0, 0, 1] = 0.9 * floor, floor
        assert torch.equal(physical(below), physical(at))
        at[0, 0, 1] = 1.1 * floor
        assert not torch.equal(physical(below), physical(at))
    for floor in (0.0, math.nan):
        with pytest.raises(ValueError, match="has no logarithm; give one above zero"):
            PhysicalNetwork(network, inputs, targets, floor)


def test_gradients_are_numbers_where_the_exponential_of_a_velocity_would_be_none() -> None:
    inputs, targets = input_channels(4, Config().transform), target_channels(5, Config().transform)

    class Fast(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x[:, :1]], dim=1)

    fields = dark_matter(1, 4, 4, 4).requires_grad_()
    PhysicalNetwork(Fast(), inputs, targets)(fields).sum().backward()
    assert fields.grad is not None
    assert fields.grad.isfinite().all()
    assert (fields.grad[:, 1:] != 0).all()


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_file_computes_what_the_network_does_for_any_batch_and_sizes(norm: str, kind: str) -> None:
    """Sizes of one block are what a crop of the whole network has, and what PyTorch does not take by itself."""
    # A group of a group norm has two channels: with one, a single cell could not be normalised.
    width = 40 if norm == "group" else 4
    config = config_of(network={"width": width, "norm": norm}, local_batch_size=2)
    network = network_of(config)
    wrapped = export.wrap(Trained(network, config, {}), "physical").requires_grad_(False)
    paint = export.FORMATS[kind].load(io.BytesIO(export.FORMATS[kind].pack(wrapped, config, "{}")))
    for size in SIZES:
        fields = dark_matter(*size)
        assert_close(paint(fields), by_channels(network, config, fields))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `run`, and gas.pt2, gas.pt of it."""
    folder = tmp_path_factory.mktemp("export")
    save(folder / "run", config_of(), epoch=3, step=24, final_loss=0.125)
    for kind, suffix in SUFFIXES.items():
        export.main([f"--checkpoint={folder / 'run'}", f"--output={folder / f'gas{suffix}'}", f"--format={kind}"])
    return folder


def test_it_works_where_nothing_of_this_project_is(files: Path, tmp_path: Path) -> None:
    """By the lines that stand in its own metadata, in another process and another directory."""
    fields = dark_matter(3, 8, 4, 12)
    np.save(tmp_path / "dark_matter.npy", fields.numpy())
    code = """
import importlib.util, json, sys, numpy, torch
for module in ("networks", "utils", "train", "predict", "export"):
    assert importlib.util.find_spec(module) is None, module
dark_matter = torch.from_numpy(numpy.load("dark_matter.npy"))
for number, lines in enumerate(json.loads(sys.argv[1])):
    names = {"dark_matter": dark_matter}
    exec("\\n".join(lines), names)
    numpy.save(f"gas{number}.npy", names["gas"].numpy())
"""
    for suffix in SUFFIXES.values():
        (tmp_path / f"gas{suffix}").symlink_to(files / f"gas{suffix}")
    lines = [metadata(files / f"gas{suffix}", kind)["how_to_call"] for kind, suffix in SUFFIXES.items()]
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", code, json.dumps(lines)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = by_channels(network_of(config_of()), config_of(), fields)
    for number in range(len(lines)):
        assert_close(torch.from_numpy(np.load(tmp_path / f"gas{number}.npy")), expected)


def test_the_help_text_has_the_lines_that_a_file_has(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        export.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    lines = metadata(files / "gas.pt2")["how_to_call"]
    assert len(lines) == 3
    assert "\n".join(f"    {line}" for line in lines) in text
    assert lines[1] == 'paint = torch.export.load("gas.pt2").module()'


@pytest.mark.parametrize("kind", FORMATS)
def test_the_metadata_say_what_the_file_is(files: Path, kind: str) -> None:
    config = config_of()
    found = metadata(files / f"gas{SUFFIXES[kind]}", kind)
    assert (found["format"], found["units"]) == (kind, "physical")
    assert (found["input"]["shape"], found["output"]["shape"]) == ("[N, 4, X, Y, Z]", "[N, 5, X, Y, Z]")
    assert (found["input"]["multiple_of"], found["input"]["density_floor_of_mean"]) == (4, 1e-3)
    speeds = [f"velocity {axis}" for axis in "xyz"]
    assert {channel["name"]: channel["unit"] for channel in found["input"]["channels"]} == {
        "dark-matter density": "mean density",
        **{f"dark-matter {name}": "km/s" for name in speeds},
    }
    assert {channel["name"]: channel["unit"] for channel in found["output"]["channels"]} == {
        "gas density": "mean density",
        **{f"gas {name}": "km/s" for name in speeds},
        "temperature": "K",
    }
    assert found["checkpoint"] == {"epoch": 3, "step": 24, "final_loss": 0.125}
    assert found["versions"]["torch"] == torch.__version__
    assert found["git_commit"]
    assert re.fullmatch("[0-9a-f]{64}", found["weights_sha256"])
    assert configs.validate(configs.parse_value(found["config"])["trained"], "trained") == config


def test_a_loss_that_is_no_number_is_none_in_the_metadata() -> None:
    """JSON has no NaN."""
    trained = Trained(nn.Identity(), config_of(), {"epoch": 0, "final_loss": math.nan})
    found = export.describe(trained, export.Options("run", "gas.pt2"))
    assert found["checkpoint"] == {"epoch": 0, "final_loss": None}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(1, 4, 6, 8, 8), (1, 5, 8, 8, 8)])
def test_a_file_refuses_sizes_that_the_network_does_not_take(files: Path, kind: str, shape: tuple[int, ...]) -> None:
    paint = load(files / f"gas{SUFFIXES[kind]}", kind)
    with pytest.raises(RuntimeError):
        paint(torch.ones(shape))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_keeps_no_activations_for_gradients_that_nobody_wants(files: Path, kind: str) -> None:
    paint, fields = load(files / f"gas{SUFFIXES[kind]}", kind), dark_matter(1, 4, 4, 4)
    assert not paint(fields).requires_grad
    assert paint(fields.requires_grad_()).requires_grad


def test_a_file_moves_to_another_device(files: Path) -> None:
    """Nothing in it may insist on the CPU. The device without numbers, to move to, is on every machine."""
    paint: Any = load(files / "gas.pt2")
    assert paint.to("meta")(dark_matter(1, 4, 4, 4).to("meta")).device.type == "meta"
    script = torch.jit.load(str(files / "gas.pt"))
    assert "aten::_convolution" in str(script.inlined_graph)
    assert '"cpu"' not in str(script.inlined_graph)


def test_the_example_that_a_file_was_made_with_is_not_in_it(files: Path) -> None:
    """For a network of six scales it would be 64 MB."""
    assert torch.export.load(str(files / "gas.pt2")).example_inputs is None


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_trained_run_is_exported(tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--yaml_config={TOP / 'config' / 'UNet.yaml'}", "--config=test", *data_flags, "--num_epochs=1"]
    train.main([*flags, f"--set=expdir={tmp_path}", "--set=Nsamples=16", "--set=report_baselines=false"])
    run, target = tmp_path / "test" / "1GPU" / "00", tmp_path / "gas.pt"
    capsys.readouterr()
    export.main([f"--checkpoint={run}", f"--output={target}", "--format=torchscript"])
    assert capsys.readouterr().out.startswith(
        f"wrote {target}: [N, 4, X, Y, Z] -> [N, 5, X, Y, Z] in physical units, X, Y and Z multiples of 4; "
    )
    content = checkpoint.read_weights(run)
    config = configs.validate(content["config"], "test")
    network = build_network("unet", width=4, scales=2)
    network.load_state_dict(content["network"])
    fields = dark_matter(2, 4, 8, 12)
    assert_close(load(target, "torchscript")(fields), by_channels(network.eval(), config, fields))
    assert metadata(target, "torchscript")["checkpoint"] == {
        key: content[key] for key in ("epoch", "step", "final_loss")
    }


def test_layers_that_compute_otherwise_are_written_as_plain_ones(tmp_path: Path) -> None:
    config = config_of(network={"rewritten": ["down1", "last"]}, fused_pointwise=True, channels_last=True)
    plain = network_of(config_of())
    save(tmp_path / "run", config, plain)
    export.main([f"--checkpoint={tmp_path / 'run'}", f"--output={tmp_path / 'gas.pt2'}"])
    fields = dark_matter(1, 8, 4, 4)
    assert_close(load(tmp_path / "gas.pt2")(fields), by_channels(plain, config, fields))
    program = torch.export.load(str(tmp_path / "gas.pt2"))
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {name.split(".")[0] for name in called if "getitem" not in name} == {"aten"}


def test_channel_units_are_the_networks_own_and_need_no_transform(tmp_path: Path) -> None:
    config = config_of(transform={"density_log_scale": None}, N_out_channels=3, vector_channels={"targets": []})
    network = network_of(config)
    save(tmp_path / "run", config, network)
    flags = [f"--checkpoint={tmp_path / 'run'}", f"--output={tmp_path / 'gas.pt'}", "--format=torchscript"]
    export.main([*flags, "--units=channel"])
    fields = torch.randn(2, 4, 4, 8, 4)
    with torch.no_grad():
        assert_close(load(tmp_path / "gas.pt", "torchscript")(fields), network(fields), 1e-6)
    found = metadata(tmp_path / "gas.pt", "torchscript")
    assert [channel["value"] for channel in found["input"]["channels"]] == ["unknown", *["value / (1000 km/s)"] * 3]
    assert [channel["value"] for channel in found["output"]["channels"]] == ["unknown"] * 3
    assert "density_floor_of_mean" not in found["input"]


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """refuse(flags, *says): the command ends in one line that says so, and leaves the folder as it was."""

    def run(flags: list[str], *says: str) -> None:
        before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
        with pytest.raises(SystemExit) as stop:
            export.main(flags)
        assert stop.value.code == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("error: ")
        assert output.err.count("\n") == 1
        for part in says:
            assert part in output.err
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before

    return run


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--output=gas.pt2"], "the following arguments are required: --checkpoint; see --help"),
        (["--checkpoint=RUN"], "the following arguments are required: --output; see --help"),
        (["--checkpoint=RUN", "--output=HERE/gas.pt2", "--form=export"], "unrecognized arguments: --form=export"),
        (["--checkpoint=RUN", "--output=HERE/gas.pt2", "--format=onnx"], "--format: invalid choice: 'onnx'"),
        (["--checkpoint=RUN", "--output=HERE/gas.pt2", "--units=SI"], "--units: invalid choice: 'SI'"),
        (["--checkpoint=RUN", "--output=HERE/gas.pt"], "gas.pt does not end in .pt2"),
        (["--checkpoint=RUN", "--output=HERE/no/gas.pt2"], "no for the output; make it, or give another --output"),
        (["--checkpoint=RUN", "--output=HERE/run", "--format=torchscript"], "run is a directory"),
        (["--checkpoint=HERE/no", "--output=HERE/gas.pt2"], "no such file: "),
        (["--checkpoint=HERE/words.txt", "--output=HERE/gas.pt2"], "cannot read "),
    ],
)
def test_a_command_that_cannot_be_carried_out_is_one_line(
    refuse: Callable[..., None], files: Path, tmp_path: Path, flags: list[str], says: str
) -> None:
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / "run").mkdir()
    refuse([flag.replace("HERE", str(tmp_path)).replace("RUN", str(files / "run")) for flag in flags], says)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"transform": {"density_log_scale": None}}, "transform.density_log_scale of its config is None"),
        (
            {"transform": {"velocity_scale_km_s": None, "temperature_log10_scale": None}},
            "transform.velocity_scale_km_s, transform.temperature_log10_scale of its config is None",
        ),
        ({"N_in_channels": 6}, "N_in_channels 4 and N_out_channels 5, not of 6 and 5"),
        ({"N_out_channels": 4}, "N_in_channels 4 and N_out_channels 5, not of 4 and 4"),
    ],
)
def test_physical_units_that_nobody_knows_are_refused(
    refuse: Callable[..., None], tmp_path: Path, values: dict[str, Any], says: str
) -> None:
    run = save(tmp_path / "run", config_of(**values))
    refuse([f"--checkpoint={run}", f"--output={tmp_path / 'gas.pt2'}"], says, "; give --units channel")


def test_a_classifier_is_refused(refuse: Callable[..., None], tmp_path: Path) -> None:
    config = configs.validate(
        {"data_loader_config": "labelled", "dataset": {"name": "digits"}, "network": {"name": "mnist_cnn"}}, "digits"
    )
    run = save(tmp_path / "run", config)
    refuse([f"--checkpoint={run}", f"--output={tmp_path / 'gas.pt2'}"], "is of a classifier (mnist_cnn)")


def test_an_output_that_exists_is_replaced_only_when_that_is_asked_for(
    refuse: Callable[..., None], files: Path, tmp_path: Path
) -> None:
    target = tmp_path / "gas.pt"
    target.write_text("of value")
    flags = [f"--checkpoint={files / 'run'}", f"--output={target}", "--format=torchscript"]
    refuse(flags, "exists; give --overwrite to replace it, or another --output")
    export.main([*flags, "--overwrite"])
    fields = dark_matter(1, 4, 4, 4)
    assert_close(load(target, "torchscript")(fields), by_channels(network_of(config_of()), config_of(), fields))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_that_computes_something_else_never_takes_its_name(
    refuse: Callable[..., None],
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """It is read again and compared: here, one number of some thousand is off by a thousandth in it."""
    right = export.FORMATS[kind]

    def pack(network: nn.Module, config: Config, text: str) -> bytes:
        bias = network.get_parameter("network.last.bias")
        before = bias[0].item()
        bias[0] *= 1.001
        content = right.pack(network, config, text)
        bias[0] = before
        return content

    monkeypatch.setitem(export.FORMATS, kind, export.Format(pack, right.load, right.call))
    (tmp_path / "gas.pt2").write_text("of value")
    flags = [f"--checkpoint={files / 'run'}", f"--output={tmp_path / 'gas.pt2'}", f"--format={kind}", "--overwrite"]
    refuse(flags, "would compute differs from the network by ", "it is not written")


def test_a_network_whose_results_are_no_numbers_is_refused(refuse: Callable[..., None], tmp_path: Path) -> None:
    network = network_of(config_of())
    network.get_parameter("last.bias").data[4] = math.nan
    run = save(tmp_path / "run", config_of(), network)
    flags = [f"--checkpoint={run}", f"--output={tmp_path / 'gas.pt'}", "--format=torchscript"]
    refuse(flags, "differs from the network by nan")


def test_a_full_disk_is_one_line(refuse: Callable[..., None], files: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "20k") as disk:
        refuse([f"--checkpoint={files / 'run'}", f"--output={disk / 'gas.pt2'}"], "No space left on device; free some")
