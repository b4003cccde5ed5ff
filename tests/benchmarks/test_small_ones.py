"""Small runs of some benchmarks write their results; the gas of the boxes of `flux`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoints, common, flux, loaders, symmetries


@pytest.mark.parametrize(
    ("benchmark", "flags"),
    [
        (checkpoints, ["--width=2", "--scales=2", "--crop=8", "--batch=1", "--trials=2", "--steps=1"]),
        (flux, ["--side=8", "--large=12", "--trials=2", "--threads=1"]),
        (
            loaders,
            ["--box=16", "--crop=8", "--batch=1", "--trials=1", "--starts=1", "--batches=2", "--epoch_batches=2"],
        ),
    ],
    ids=["checkpoints", "flux", "loaders"],
)
def test_a_small_run_writes_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, benchmark: Any, flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flux, "GROUP", 100)  # 12² lines: the last group is smaller
    extra = ["--settle=0", "--workers=1"] if benchmark is loaders else []
    benchmark.main([*flags, *extra, f"--output={tmp_path}"])
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert result["provenance"]["command"]
    assert path.with_suffix(".md").read_text() in capsys.readouterr().out
    if benchmark is flux:
        assert {case["seconds"]["n"] for case in result["cases"].values()} == {2}
    if benchmark is loaders:
        assert {"lowmem", "inmem", "memory copy (bound)"} <= set(result["results"])
        assert result["starts"]["lowmem"]["first epoch seconds"] > 0


def test_symmetries_are_compared_on_each_pair_of_a_network_and_a_volume(
    trained_run: Path, volume_file: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(volume_file(tmp_path / f"{seed}.h5", box=8, seed=seed)) for seed in (3, 4)]
    symmetries.main([f"--checkpoint={trained_run}", "--input", *files, f"--output={tmp_path}"])
    error = json.loads((tmp_path / "symmetries.json").read_text())["measures"]["L1"]
    one, many = error["1"], error["48"]
    assert (one["n"], one["ratio"]["values"]) == (2, [1, 1])
    assert many["ratio"]["values"] == pytest.approx([b / a for a, b in zip(one["values"], many["values"], strict=True)])
    assert "n = 1 networks × 2 volumes" in capsys.readouterr().out


def test_gas_is_like_that_of_the_forest() -> None:
    density, velocity, temperature = flux.make_lines(4000, 128, 0.04, torch.Generator().manual_seed(0))
    assert float(density.mean()) == pytest.approx(1, rel=0.05)
    assert float(velocity.std()) == pytest.approx(flux.VELOCITY_SPREAD, rel=1e-3)
    assert 0.04 < float((temperature > 1e5).double().mean()) < 0.07


def test_settings_name_no_directory_of_this_machine() -> None:
    parser = common.Parser("")
    parser.add_argument("--runs", type=Path, default=common.REPOSITORY / "runs" / "it")
    assert common.settings(parser.parse_args([])) == {"runs": "runs/it"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["benchmarks.scaling", "--control", "4", "--output", "{}/scaling"], "control"),
        (
            [
                "benchmarks.volumes",
                "--grid=64",
                "--crop=16",
                "--width=2",
                "--ranks=2",
                "--folder={0}/files",
                "--output={0}",
            ],
            "volumes_64",
        ),
    ],
    ids=["control", "volumes"],
)
def test_a_small_run_with_several_ranks_writes_its_result(tmp_path: Path, words: list[str], name: str) -> None:
    command = [sys.executable, "-m", *(word.format(tmp_path) for word in words)]
    subprocess.run(command, cwd=common.REPOSITORY, check=True, timeout=300)
    result = json.loads((tmp_path / f"{name}.json").read_text())
    if name == "control":
        (row,), (start,) = result["heartbeats"], result["starts"]
        assert row["messages/s at the store"] == pytest.approx(48, rel=0.2), "three per report"
        assert 28 < row["s until noticed: silence"] < 40
        assert start["sockets, lazy"] <= start["sockets, mesh"]
    else:
        assert [one["program"] for one in result["results"]] == ["predict", "evaluate"]
        assert all(one["peak GB"] > 0.1 for one in result["results"])
