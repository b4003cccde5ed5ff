"""Small runs of the benchmarks: each writes its result with the keys and the table heads of the stored one."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import checkpoints, common, convergence, cost, flux, last_layers, loaders, symmetries
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
    checkpoints: ["--width=2", "--scales=2", "--crop=8", "--batch=1", "--trials=2", "--steps=1"],
    flux: ["--side=8", "--large=12", "--trials=2", "--threads=1"],
    loaders: [*TINY_LOADERS, "--settle=0", "--workers=1"],
    convergence: ["--grids", "16", "32", "--box_size=5", "--threads=1"],
    cost: ["--sets=A", *(f"--set=network.{key}" for key in ("width=4", "scales=2")), "--set=data_size=16"],
}


@pytest.mark.parametrize("benchmark", COMMANDS, ids=lambda benchmark: benchmark.__name__.split(".")[1])
def test_a_small_run_writes_its_result(benchmark: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    if benchmark in (convergence, cost):
        pytest.importorskip("colossus" if benchmark is convergence else "triton")
    name = benchmark.__name__.split(".")[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flux, "GROUP", 100)  # 12² lines: the last group is smaller
    benchmark.main([*COMMANDS[benchmark], f"--output={tmp_path}"])
    result = check(tmp_path, name, tables=benchmark in (convergence, cost))
    assert (tmp_path / f"{name}.md").read_text() in capsys.readouterr().out
    if benchmark is flux:
        assert {case["seconds"]["n"] for case in result["cases"].values()} == {2}
    if benchmark is loaders:
        assert {"lowmem", "inmem", "memory copy (bound)", "plain DataLoader, 1 processes"} <= set(result["results"])
        assert result["starts"]["lowmem"]["first epoch / later"] > 0
        assert (tmp_path / "loaders.png").read_bytes().startswith(b"\x89PNG")
    if benchmark is checkpoints:
        assert result["extra seconds per save"]["n"] == result["seconds"]["pause"]["n"] == 2
    if benchmark is cost:
        (entry,) = result["sets"].values()
        slow, _, fast = entry["predicted samples/s"]
        moved = 1e9 * entry["gigabytes"]["total"] / cost.COPY
        assert 64 / slow - moved == pytest.approx(64 * entry["FLOP per sample"] / 0.5 / cost.MATMUL)
        assert slow < fast


def test_symmetries_are_compared_on_each_pair_of_a_network_and_a_volume(
    trained_run: Path, volume_file: Any, tmp_path: Path
) -> None:
    files = [str(volume_file(tmp_path / f"{seed}.h5", box=8, seed=seed)) for seed in (3, 4)]
    symmetries.main([f"--checkpoint={trained_run}", "--input", *files, f"--output={tmp_path}"])
    error = check(tmp_path, "symmetries", 1)["measures"]["L1"]
    one, many = error["1"], error["48"]
    assert (one["n"], one["ratio"]["values"]) == (2, [1, 1])
    assert many["ratio"]["values"] == pytest.approx([b / a for a, b in zip(one["values"], many["values"], strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("control", ["scaling", "--control", "4", "--output", "{}/scaling"]),
        (
            "volumes_64",
            ["volumes", "--grid=64", "--crop=16", "--width=2", "--ranks=2", "--folder={0}/f", "--output={0}"],
        ),
    ],
)
def test_a_small_run_with_several_ranks_writes_its_result(tmp_path: Path, name: str, words: list[str]) -> None:
    command = [sys.executable, "-m", *(word.format(tmp_path) for word in [f"benchmarks.{words[0]}", *words[1:]])]
    subprocess.run(command, cwd=common.REPOSITORY, check=True, timeout=300)
    if name == "control":
        result = check(tmp_path, name, 2)
        (row,), (start,) = result["heartbeats"], result["starts"]
        assert row["messages/s at the store"] == pytest.approx(48, rel=0.2), "three per report"
        assert 28 < row["s until noticed: silence"] < 40
        assert start["sockets, lazy"] <= start["sockets, mesh"]
    else:
        results = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        assert [one["program"] for one in results] == ["predict", "evaluate"]
        assert all(one["peak GB"] > 0.1 for one in results)


def test_a_sub_pixel_convolution_can_compute_the_strided_transposed_one() -> None:
    """Along an axis, cell 2i + p gets input i + t - 1 times the strided kernel's weight 3 - 2t + p."""
    strided, layer = nn.ConvTranspose3d(3, 2, 4, stride=2, padding=1), SubPixelConv3d(3, 16, 3, padding=1)
    assert strided.bias is not None
    assert layer.bias is not None
    with torch.no_grad():
        layer.bias.copy_(strided.bias.repeat_interleave(8))
        weight = layer.weight.zero_().view(2, 2, 2, 2, 3, 3, 3, 3)  # [C, parts, inputs, taps]
        for part in itertools.product(range(2), repeat=3):
            for taps in itertools.product(range(3), repeat=3):
                x, y, z = (3 - 2 * t + p for t, p in zip(taps, part, strict=True))
                if {x, y, z} <= set(range(4)):
                    weight[(slice(None), *part, slice(None), *taps)] = strided.weight[:, :, x, y, z].T
    inputs = torch.randn(1, 3, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(inputs), strided(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(inputs).dtype == torch.float32


@pytest.mark.parametrize("kind", [last_layers.SubPixelUNet, last_layers.InterpolatedUNet])
def test_a_config_names_the_network(kind: type[nn.Module]) -> None:
    name = f"benchmarks.last_layers.{kind.__name__}"
    config = configs.load(common.YAML, "test", {"network.name": name}).for_world(1)
    assert isinstance(build.network(config), kind)
    build.check_output(config)
