"""The rungs are fixed sets of options, their commands have these options, and a failed rung does not end the ladder."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import ladder
from benchmarks.common import YAML
from benchmarks.ladder import command, measure_rung
from benchmarks.ladder_report import markdown
from benchmarks.rungs import CPU_RUNGS, GPU_RUNGS, Rung, best_of, predicted, state_of
from utils import cli
from utils import config as configs


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


def entry(key: str, synthetic: float, full: float, changes: dict[str, Any], graph: bool = False) -> dict[str, Any]:
    return {"name": f"{key}: text", "state": {"changes": changes, "graph": graph}, **rates(synthetic, full)}


class FakeMachine:
    """Cannot be used after a failure, as a GPU after an illegal address."""

    options = argparse.Namespace(batch=64)
    world = SimpleNamespace(device=torch.device("cpu"))

    def close(self) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    free = close


def test_a_rung_starts_from_the_fastest_of_those_it_names() -> None:
    """Loading and computing both count. Without a measurement it starts from the first one."""
    entries = [
        entry("A", 100, 90, {"channels_last": True}),
        entry("B", 120, 110, {"channels_last": True}, graph=True),
        entry("C", 130, 50, {"enable_jit": True}),
        {"name": "G: text", "failed": "no memory"},
    ]
    larger = GPU_RUNGS["D"]
    assert state_of(larger, entries) == {"changes": {"channels_last": True, "local_batch_size": 128}, "graph": True}
    assert state_of(larger)["changes"] == {**GPU_RUNGS["A"].changes, "local_batch_size": 128}
    assert state_of(GPU_RUNGS["EMA"], entries)["graph"]  # through `base`, which is not measured
    assert best_of(entries, ["G"]) is None


@pytest.mark.parametrize("rung", [*GPU_RUNGS.values(), *CPU_RUNGS], ids=lambda rung: rung.key)
def test_a_printed_command_is_the_training_that_was_measured(rung: Rung) -> None:
    """Its command line leads to the same config as the rung's changes, and every key and value exists."""
    state = state_of(rung)
    words = shlex.split(command(**state))
    assert words[:3] == ["python", "train_graph.py" if state["graph"] else "train.py", "--config=base"]
    typed = cli.parse([f"--yaml_config={YAML}", *words[2:]])
    ours = configs.load(YAML, "base", state["changes"])
    assert configs.load(typed.yaml_config, typed.config, typed.overrides) == ours


def test_a_prediction_adds_the_time_of_all_bytes_to_that_of_the_convolutions() -> None:
    """The audit's first line: 22.7 GB outside the convolutions, at about half of the copy's rate."""
    assert predicted(0, 64) == pytest.approx([4909, 6382, 7855], rel=1e-3)
    assert predicted(2 * 22.7, 64) == pytest.approx([2780, 3200, 3550], rel=0.04)


def test_a_rung_that_fails_or_lacks_its_package_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(machine: FakeMachine, changes: dict[str, Any], graph: bool) -> dict[str, Any]:
        if "tf32" in changes:
            raise RuntimeError("no memory\nmore about it")
        return rates(100, 90)

    monkeypatch.setattr(ladder, "measure", measure)
    machine: Any = FakeMachine()
    tried = [Rung("first"), Rung("failing", {"tf32": False}), Rung("odd", package="no_such.package")]
    results = [measure_rung(machine, rung) for rung in tried]
    assert results[1]["failed"] == "no memory"
    text = markdown(results, {"float32": 2.0, "tf32": 4.0})
    assert "| first | 100 (90 – 110) | 1.000 | 90 (81 – 99) |" in text
    assert "| odd | no_such.package is not installed |" in text


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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
    monkeypatch.setattr(ladder, "CPU_RUNGS", [Rung("a"), Rung("b")])
    measured: dict[str, Any] = {"a": {"failed": "no memory"}, "b": {"failed": "no memory"}}
    monkeypatch.setattr(ladder, "measure_rung", lambda _, rung: {"name": rung.name, **measured[rung.name]})
    with pytest.raises(SystemExit):
        ladder.main()
    assert capsys.readouterr().err == "error: no rung could be measured: no memory\n"
    assert (tmp_path / "ladder.json").read_text() == "earlier"
    measured["b"] = {"state": {"changes": {}}, **rates(100, 90)}
    ladder.main()
    assert [each["name"] for each in json.loads((tmp_path / "ladder.json").read_text())["ladder"]] == ["a", "b"]
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert "| b | 100 (90 – 110) |" in capsys.readouterr().out
