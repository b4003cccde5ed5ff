"""Example runs: every run's config is valid, and what is reported and kept of a run comes from its records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.convergence import Condition, Training
from benchmarks.example_runs import SETS, conditions, keep, result_table, summarize


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """The records of a demo training of four epochs of 10 steps, ten seconds each."""
    changes = {"Nsamples": 80, "num_epochs": 4}
    training = Training("made_up", Condition("made_up", "demo", 1, changes), 0, tmp_path / "runs", {})
    (training.directory / "logs").mkdir(parents=True)
    (training.directory / "logs" / "events.out.tfevents.1.host.1.0").write_bytes(b"events")
    (training.directory / "checkpoints").mkdir()
    (training.directory / "config.yaml").write_text("config")
    records = [{"step": 0, "seconds": 5.0, "Loss/valid": 0.14}]
    for epoch, loss in enumerate((0.05, 0.03, 0.02, 0.01), start=1):
        now = {"step": 10 * epoch, "seconds": 5.0 + 10 * epoch}
        records += [{**now, "Avg iters per sec": 1.0 + epoch / 10}, {**now, "Loss/valid": loss}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (training.directory / "metrics.jsonl").write_text(lines)
    return training


@pytest.mark.parametrize("name", SETS)
def test_every_run_has_a_valid_config(name: str, tmp_path: Path) -> None:
    loaded = [Training(run.name, run, 0, tmp_path, {}).config for run in conditions(SETS[name])]
    assert all(config.total_steps > 0 for config in loaded)


def test_a_run_is_summarized_from_its_records(training: Training) -> None:
    runs = [summarize(training, goal) for goal in (0.03, 0.001)]
    found = runs[0]
    assert (found["batch"], found["epochs"], found["steps"], found["samples"]) == (8, 4, 40, 320)
    assert (found["initial loss"], found["final loss"], found["seconds"]) == (0.14, 0.01, 40.0)
    assert found["to the goal"] == {"epoch": 2, "samples": 160, "step": 20, "seconds": 20.0}
    assert found["samples per second"] == pytest.approx(8 * 1.3)
    lines = result_table(runs, "the first").splitlines()
    assert lines[2].endswith("| 0.010000 | 160 | 0:20 |")
    assert lines[3].endswith("| 0.010000 | never |  |")
    assert [point["mean"] for point in found["curve"]] == [0.14, 0.05, 0.03, 0.02, 0.01]


def test_kept_logs_replace_earlier_ones_and_have_no_checkpoints(training: Training, tmp_path: Path) -> None:
    old = tmp_path / "logs" / "made_up" / "logs"
    old.mkdir(parents=True)
    (old / "events.out.tfevents.0.host.0.0").write_bytes(b"old")
    keep(training, tmp_path / "logs")
    kept = sorted(str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*") if path.is_file())
    assert kept == ["made_up/config.yaml", "made_up/logs/events.out.tfevents.1.host.1.0", "made_up/metrics.jsonl"]
