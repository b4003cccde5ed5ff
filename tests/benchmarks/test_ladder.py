"""The ladder keeps what is faster, survives failures, ends in time, and its commands are the trainings it measured."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, ladder, loaders
from benchmarks.common import YAML
from benchmarks.ladder import CPU_STEPS, GPU_STEPS, LadderStep, climb, command, markdown
from utils import cli
from utils import config as configs
from utils.profiling import timing

SMALL = ["--batch=2", "--crop=8", "--width=4", "--box=16", "--valid_box=16", "--seconds=0.02", "--warmup_steps=3"]


def rates(synthetic: float, full: float) -> dict[str, Any]:
    def spread(value: float) -> dict[str, float]:
        return {"median": value, "min": 0.9 * value, "max": 1.1 * value}

    return {
        "SYNTHETIC": spread(synthetic),
        "FULL": spread(full),
        "FULL / SYNTHETIC": full / synthetic,
        "TFLOP/s": synthetic / 100,
        "loss of the warm-up steps": [0.5, 0.4, 0.3],
        "gradient norm of the warm-up steps": [3.0, 2.0, 1.0],
    }


class FakeMachine:
    options = argparse.Namespace(batch=64)

    def close(self) -> None:
        pass

    free = close


def test_a_faster_step_is_kept_and_the_next_starts_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        (LadderStep("base", {"tf32": False}), (100, 50)),
        (LadderStep("input", {"num_data_workers": 8}), (100, 90)),
        (LadderStep("slower", {"channels_last": True}), (80, 80)),
        (LadderStep("graph", graph=True), (150, 140)),
        (LadderStep("measured against", {"enable_amp": True}, always=True), (120, 120)),
    ]
    answers, seen = iter(speed for _, speed in steps), []

    def measure(machine: FakeMachine, changes: dict[str, Any], graph: bool) -> dict[str, Any]:
        seen.append((dict(changes), graph))
        return rates(*next(answers))

    monkeypatch.setattr(ladder, "measure", measure)
    missing = LadderStep("odd", package="no_such.package")
    results = climb(FakeMachine(), [*(step for step, _ in steps), missing], math.inf)
    assert [entry["kept"] for entry in results[:-1]] == [True, True, False, True, True]
    base, workers = {"tf32": False}, {"tf32": False, "num_data_workers": 8}
    assert seen == [
        (base, False),
        (workers, False),
        ({**workers, "channels_last": True}, False),
        (workers, True),
        ({**workers, "enable_amp": True}, True),
    ]
    assert "| odd | no_such.package is not installed |" in markdown(results, {"float32": 2.0, "tf32": 4.0})


@pytest.mark.parametrize("steps", [GPU_STEPS, CPU_STEPS])
def test_a_printed_command_is_the_training_that_was_measured(steps: tuple[LadderStep, ...]) -> None:
    """Its command line leads to the same config as the step's changes, and every key exists."""
    changes: dict[str, Any] = {}
    for step in steps:
        changes |= step.changes
        words = shlex.split(command(changes, bool(step.graph)))
        assert words[:3] == ["python", "train_graph.py" if step.graph else "train.py", "--config=base"]
        typed = cli.parse([f"--yaml_config={YAML}", *words[2:]])
        ours = configs.load(YAML, "base", changes)
        assert configs.load(typed.yaml_config, typed.config, typed.overrides) == ours, step.name


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--seconds=nan"], "argument --seconds: 'nan' is not a number above zero; see --help"),
        (["--crop=256"], "crops of 256 cells do not fit into boxes of 128 and 128"),
        (["--data=none.h5"], "no such file: none.h5; without --data, one is created"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, flags: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ladder", f"--output={tmp_path / 'out'}", "--box=128", *flags])
    with pytest.raises(SystemExit) as stop:
        ladder.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {says}\n"
    assert list(tmp_path.iterdir()) == []


def test_earlier_results_are_replaced_only_by_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "ladder.json").write_text("earlier")
    monkeypatch.setattr(ladder.peaks, "measure", lambda _: {"matmul_tflops": {"float32": {"median": 2.0}}})
    monkeypatch.setattr("sys.argv", ["ladder", "--box=16", "--valid_box=16", "--crop=8", "--output=."])
    entries = [{"name": "a", "failed": "no memory"}]
    monkeypatch.setattr(ladder, "climb", lambda *_: entries)
    with pytest.raises(SystemExit):
        ladder.main()
    assert capsys.readouterr().err == "error: no step of the ladder could be measured: no memory\n"
    assert (tmp_path / "ladder.json").read_text() == "earlier"
    entries += [{"name": "b", "kept": True, "state": {"changes": {}}, **rates(100, 90)}]
    ladder.main()
    assert [entry["name"] for entry in json.loads((tmp_path / "ladder.json").read_text())["ladder"]] == ["a", "b"]
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert "| b | 100 (90 – 110) |" in capsys.readouterr().out


def test_all_parts_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The report comes from real measurements and is drawn again from its file; failed parts do not end the run."""
    steps = (
        LadderStep("float32", always=True),
        LadderStep("channels last", {"channels_last": True}, always=True),
        LadderStep("graph", graph=True),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ladder, "CPU_STEPS", steps)
    monkeypatch.setattr(timing, "matmul_size", lambda device: 64)
    monkeypatch.setattr(ladder, "gc", SimpleNamespace(collect=lambda: None))
    measure_peaks, throughput = gpu.peaks.measure, loaders.throughput
    monkeypatch.setattr(gpu.peaks, "measure", lambda device, seconds: measure_peaks(device, 1e-3, copied_bytes=4096))

    def without_pauses(options: argparse.Namespace, with_plain: bool) -> dict[str, Any]:
        options.settle = 0.0
        return throughput(options, with_plain)

    def broken(*arguments: Any) -> None:
        raise RuntimeError("cuDNN failed")

    monkeypatch.setattr(loaders, "throughput", without_pauses)
    monkeypatch.setattr(gpu.Run, "convolutions", broken)
    flags = [*SMALL, "--rehearse", "--minutes=1e4", f"--output={tmp_path / 'out'}", "--loader_batches=2"]
    monkeypatch.setattr("sys.argv", ["gpu", *flags, "--tests=--version"])
    gpu.main()
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert set(results["skipped"]) == {"ladder: graph", "convolutions"}
    assert "only CUDA devices have graphs" in results["skipped"]["ladder: graph"]
    assert results["skipped"]["convolutions"] == "failed: cuDNN failed"
    for entry in results["ladder"][:2]:
        for name in ("SYNTHETIC", "FULL"):
            assert 0 < entry[name]["min"] <= entry[name]["median"] <= entry[name]["max"]
    # The same samples and weights: another memory format only changes the rounding.
    for name in ("loss", "gradient norm"):
        first, second = (entry[f"{name} of the warm-up steps"] for entry in results["ladder"][:2])
        assert second == pytest.approx(first, rel=1e-3)
    pair = results["comparisons"]["best and original's best"]
    ratios = [best / first for first, best in zip(pair["float32"]["trials"], pair["best"]["trials"], strict=True)]
    assert pair["best"]["ratio to the first"]["trials"] == ratios
    assert {"lowmem", "inmem", "memory copy (bound)"} <= set(results["loaders"])
    assert results["tests"]["ended"] == "exit code 0"
    page = capsys.readouterr().out
    assert "## Ladder" in page
    (tmp_path / "out/README.md").unlink()
    monkeypatch.setattr("sys.argv", ["gpu", f"--draw={tmp_path / 'out'}"])
    gpu.main()
    assert (tmp_path / "out/README.md").read_text() == page.split("written:")[0].rstrip("\n") + "\n"
