"""The variants of the U-Net that benchmarks/networks.py compares, and its report."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import networks
from benchmarks.networks import VARIANTS, SubPixelConv3d
from networks.fused import NEGATIVE_SLOPE
from utils.errors import UserError
from utils.steps.flops import training_flops


def build(name: str) -> Any:
    return VARIANTS[name](in_channels=4, out_channels=5, width=4, scales=2, crop=8)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_predicts_fields_and_trains_all_its_weights(name: str) -> None:
    network = build(name)
    outputs = network(torch.randn(2, 4, 8, 8, 8))
    assert outputs.shape == (2, 5, 8, 8, 8)
    assert outputs.abs().max() < 1
    outputs.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_operations_of_each_variant_are_counted(name: str) -> None:
    """As at the start of a training run."""
    found = training_flops(build(name), torch.empty(1, 4, 8, 8, 8))
    plain = training_flops(build("unet"), torch.empty(1, 4, 8, 8, 8))
    assert (found == plain) == (name in ("unet", "residual"))


def test_the_residual_network_adds_to_density_and_velocity() -> None:
    network, fields = build("residual"), torch.randn(1, 4, 8, 8, 8)
    for parameter in network.last.parameters():
        nn.init.zeros_(parameter)
    outputs = network(fields)
    assert torch.equal(outputs[:, :4], fields.tanh())
    assert not outputs[:, 4].any()


def test_the_full_resolution_layer_reads_the_input_and_the_last_layer() -> None:
    network, fields = build("full-resolution skip"), torch.randn(1, 4, 8, 8, 8)
    cells = torch.zeros(5, 8, 3, 3, 3)
    cells[0, 0, 1, 1, 1] = cells[1, 4, 1, 1, 1] = 1
    with torch.no_grad():
        network.mix.weight.copy_(cells)
        network.mix.bias.zero_()
        nn.init.zeros_(network.last.weight)
        network.last.bias.fill_(-2.0)
    outputs = network(fields)
    assert torch.allclose(outputs[:, 0], torch.tanh(torch.full((1, 8, 8, 8), -2 * NEGATIVE_SLOPE)))
    assert torch.allclose(outputs[:, 1], fields[:, 0].tanh())


def test_a_sub_pixel_convolution_moves_channels_to_the_cells_of_a_block() -> None:
    layer = SubPixelConv3d(1, 16, 1)
    torch.nn.init.zeros_(layer.weight)
    with torch.no_grad():
        layer.bias.copy_(torch.arange(16.0))
        block = layer(torch.zeros(1, 1, 3, 3, 3))
    assert block.shape == (1, 2, 6, 6, 6)
    assert block[0, 1, 2:4, 4:6, :2].tolist() == [[[8, 9], [10, 11]], [[12, 13], [14, 15]]]


def test_an_output_that_cannot_be_written_is_refused_before_any_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "compare", lambda _: None)
    networks.main([f"--output={tmp_path / 'new' / 'results'}"])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for option, name in itertools.product(("--output", "--runs"), ("file", "file/results")):
        with pytest.raises(UserError, match=f"file is not a writable directory; choose another {option}"):
            networks.main([f"{option}={tmp_path / name}"])


def test_finished_trainings_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a network are those that take as long as the first one's."""
    runs = tmp_path / "runs"
    runs.mkdir()
    seconds = {name: 0.1 * (1 + number) for number, name in enumerate(VARIANTS)}
    (runs / "seconds_per_step.json").write_text(json.dumps(seconds))
    scalars = dict.fromkeys(networks.SCALARS.values(), 0.5)
    scalars["Evaluation/flux P1D ratio at k = 0.002, prediction"] = 0.9
    spectra = {field: {"k (h/Mpc)": [0.9, 2.1, 3.2], "P ratio": [1.0, 0.5, 0.25]} for field in networks.FIELDS}
    started = []

    def finish(command: list[str], log: Path, environment: object) -> str:
        name, steps, seed = command[-3:]
        started.append((name, int(steps)))
        result = {"loss": 0.01 * (1 + int(seed)), "scalars": scalars, "spectra": spectra}
        log.with_suffix(".json").write_text(json.dumps(result))
        return ""

    monkeypatch.setattr(networks, "failure_of", finish)
    arguments = ["--steps=60", f"--runs={runs}", f"--output={tmp_path}"]
    networks.main(arguments)
    networks.main(arguments)
    assert started == 2 * [(name, round(60 / (1 + number)) // 2 * 2) for number, name in enumerate(VARIANTS)]
    found = json.loads((tmp_path / "networks.json").read_text())["networks"]["residual"]
    assert (found["steps"], found["measures"]["validation loss"]["mean"]) == (10, pytest.approx(0.015))
    assert found["measures"]["P ratio of velocity, k = 2 h/Mpc"]["values"] == [0.5, 0.5]
    assert "| flux P1D ratio at k = 0.002 | 0.9 ± 0 |" in (tmp_path / "networks.md").read_text()
    # Other step counts are other training runs; with one seed there is no spread.
    networks.main([*arguments[1:], "--steps=12", "--seeds=1"])
    assert started[-6:] == list(zip(VARIANTS, (12, 6, 4, 2, 2, 2), strict=True))
    found = json.loads((tmp_path / "networks.json").read_text(), parse_constant=pytest.fail)["networks"]["residual"]
    assert found["measures"]["L1"] == {"mean": 0.5, "stdev": None, "n": 1, "values": [0.5]}
    assert "| L1 | 0.5 | 0.5 |" in (tmp_path / "networks.md").read_text()
    with pytest.raises(UserError, match="--steps 8 is less than 2 steps of the slowest network; raise it"):
        networks.main([*arguments[1:], "--steps=8"])
