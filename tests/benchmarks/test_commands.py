"""Small runs of the benchmarks: each writes its result with the keys and the table heads of the stored one."""

import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import (
    checkpoints,
    common,
    convergence,
    flux,
    integrity,
    last_layers,
    loaders,
    published_logs,
)
from benchmarks.last_layers import SubPixelConv3d
from utils import config as configs
from utils.steps import build


def heads(text: str) -> list[str]:
    return [head for head, rule in itertools.pairwise(text.splitlines()) if rule.startswith("| ---")]


def check(directory: Path, name: str, tables: int = 0) -> dict[str, Any]:
    """The result; `tables` of the report have the heads that docs/*.md copy from the stored one."""
    result, stored = (json.loads((folder / f"{name}.json").read_text()) for folder in (directory, common.RESULTS))
    assert stored.keys() - result.keys() <= {"load average at the start"}
    assert result["provenance"]["command"]
    if tables:
        texts = [(folder / f"{name}.md").read_text() for folder in (directory, common.RESULTS)]
        assert heads(texts[0])[:tables] == heads(texts[1])[:tables]
    return result


TINY_LOADERS = ["--box=16", "--crop=8", "--batch=1", "--trials=1", "--starts=1", "--batches=2", "--epoch_batches=2"]
COMMANDS: dict[Any, list[str]] = {
    integrity: ["--width=2", "--scales=2", "--crop=8", "--batch=1", "--trials=2", "--steps=1"],
    checkpoints: ["--width=2", "--scales=2", "--crop=8", "--batch=1", "--trials=2", "--steps=1"],
    flux: ["--side=8", "--large=12", "--trials=2", "--threads=1"],
    loaders: [*TINY_LOADERS, "--settle=0", "--workers=1"],
    convergence: ["--grids", "16", "32", "--box_size=5", "--threads=1"],
    published_logs: [],
}


@pytest.mark.parametrize("benchmark", COMMANDS, ids=lambda benchmark: benchmark.__name__.split(".")[1])
def test_a_small_run_writes_its_result(benchmark: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    if benchmark is convergence:
        pytest.importorskip("colossus")
        from simulation import simulate

        monkeypatch.setattr(simulate, "SimulationOptions", partial(simulate.SimulationOptions, n_steps=4))
    name = benchmark.__name__.split(".")[1]
    monkeypatch.setattr(loaders, "available", lambda device: ["lowmem", "inmem"])
    monkeypatch.chdir(tmp_path)
    benchmark.main([*COMMANDS[benchmark], f"--output={tmp_path}"])
    result = check(tmp_path, name, tables={convergence: 1, published_logs: 2}.get(benchmark, 0))
    assert (tmp_path / f"{name}.md").read_text() in capsys.readouterr().out
    if benchmark is loaders:
        assert {"lowmem", "inmem", "memory copy (bound)", "plain DataLoader, 1 processes"} <= set(result["results"])


def run(*words: str) -> None:
    subprocess.run([sys.executable, "-m", *words], cwd=common.REPOSITORY, check=True, timeout=300)


@pytest.mark.slow
def test_the_control_messages_of_several_ranks_are_measured(tmp_path: Path) -> None:
    run("benchmarks.scaling", "--control", "4", f"--output={tmp_path / 'scaling'}")
    result = check(tmp_path, "control", 2)
    (row,), (start,) = result["heartbeats"], result["starts"]
    assert row["messages/s at the store"] == pytest.approx(48, rel=0.2), "three per report"
    assert 28 < row["s until noticed: silence"] < 40
    assert start["sockets, lazy"] <= start["sockets, mesh"]


@pytest.mark.slow
def test_the_programs_for_whole_volumes_are_measured(tmp_path: Path) -> None:
    sizes = ["--grid=64", "--crop=16", "--width=2", "--ranks=2"]
    run("benchmarks.volumes", *sizes, f"--folder={tmp_path / 'f'}", f"--output={tmp_path}")
    results = json.loads((tmp_path / "volumes_64.json").read_text())["results"]
    assert [measured["program"] for measured in results] == ["predict", "evaluate"]
    assert all(measured["peak GB"] > 0.1 for measured in results)


def test_a_sub_pixel_convolution_makes_blocks_of_its_channels() -> None:
    """Cell 2i + p, 2j + q, 2k + r of channel c has the input i, j, k times the weight of channel 8c + 4p + 2q + r."""
    layer, inputs = SubPixelConv3d(1, 16, 3, padding=1, bias=False), torch.rand(1, 1, 2, 3, 4)
    layer.weight.data.zero_()[:, 0, 1, 1, 1] = torch.arange(16.0)
    for c, p, q, r in itertools.product(range(2), repeat=4):
        part = layer(inputs)[:, [c], p::2, q::2, r::2]
        torch.testing.assert_close(part, inputs * (8 * c + 4 * p + 2 * q + r))


@pytest.mark.parametrize("kind", [last_layers.SubPixelUNet, last_layers.InterpolatedUNet])
def test_a_config_names_the_network(kind: type[nn.Module]) -> None:
    name = f"benchmarks.last_layers.{kind.__name__}"
    config = configs.load(common.YAML, "test", {"network.name": name}).for_world(1)
    assert isinstance(build.network(config), kind)
    build.check_output(config)
