"""Example runs: each condition is a config that trains, and what is told of a run is what its records say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import example_runs
from benchmarks.convergence import Condition, Training
from benchmarks.example_runs import SETS, keep, summarise, table
from utils.config import Config

LOSSES = (0.14, 0.05, 0.03, 0.02, 0.01)  # before training, and after each of four epochs


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """A demo training of four epochs of 10 steps, ten seconds each, that has been."""
    changes = {"Nsamples": 80, "num_epochs": 4}
    training = Training("made_up", Condition("made_up", "demo", 1, changes), 0, tmp_path / "runs", {})
    (training.directory / "logs").mkdir(parents=True)
    (training.directory / "logs" / "events.out.tfevents.1.host.1.0").write_bytes(b"events")
    (training.directory / "checkpoints").mkdir()
    (training.directory / "config.yaml").write_text("config")
    records = [{"step": 0, "seconds": 5.0, "Loss/valid": LOSSES[0]}]
    for epoch, loss in enumerate(LOSSES[1:], start=1):
        speed = {"step": 10 * epoch, "seconds": 5.0 + 10 * epoch, "Avg iters per sec": 1.0 + epoch / 10}
        records += [speed, {"step": 10 * epoch, "seconds": 5.0 + 10 * epoch, "Loss/valid": loss}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (training.directory / "metrics.jsonl").write_text(lines)
    return training


@pytest.mark.parametrize("name", SETS)
def test_each_run_of_a_set_has_a_config_that_holds(name: str, tmp_path: Path) -> None:
    for condition in SETS[name]().runs:
        config = Training(condition.name, condition, 0, tmp_path, {}).config
        assert isinstance(config, Config)
        assert config.total_steps > 0


def test_sets_begin_with_the_originals_recipe(tmp_path: Path) -> None:
    for name in SETS:
        condition = SETS[name]().runs[0]
        config = Training(condition.name, condition, 0, tmp_path, {}).config
        assert (config.ema_decay, config.loss_weights, config.network.norm) == (None, None, "none")
        assert (config.weight_init.conv_init, config.lr_schedule.shape) == ("normal", "cosine")


def test_a_run_is_told_from_its_records(training: Training) -> None:
    found = summarise(training, goal=0.03)
    assert (found["batch"], found["epochs"], found["steps"], found["samples"]) == (8, 4, 40, 320)
    assert (found["initial loss"], found["final loss"], found["seconds"]) == (0.14, 0.01, 40.0)
    assert found["to the goal"] == {"samples": 160, "step": 20, "seconds": 20.0}
    assert found["samples per second"] == pytest.approx(8 * 1.3)
    assert summarise(training, goal=0.001)["to the goal"] is None


def test_the_table_says_when_a_run_was_as_good_as_the_first(training: Training) -> None:
    lines = table([summarise(training, goal) for goal in (0.03, 0.001)], "the first")
    assert lines[2].endswith("| 0.010000 | 160 | 0:20 |")
    assert lines[3].endswith("| 0.010000 | never |  |")
    assert len({line.count("|") for line in lines}) == 1


def test_what_is_kept_has_no_checkpoints_and_replaces_what_was_there(training: Training, tmp_path: Path) -> None:
    old = tmp_path / "logs" / "made_up" / "logs"
    old.mkdir(parents=True)
    (old / "events.out.tfevents.0.host.0.0").write_bytes(b"old")
    keep(training, tmp_path / "logs")
    kept = sorted(str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*") if path.is_file())
    events = "made_up/logs/events.out.tfevents.1.host.1.0"
    assert kept == ["made_up/config.yaml", events, "made_up/metrics.jsonl"]


def test_the_picture_is_drawn(training: Training, tmp_path: Path) -> None:
    example_runs.draw([summarise(training, 0.03)], 0.03, tmp_path / "runs.png")
    assert (tmp_path / "runs.png").read_bytes()[:4] == b"\x89PNG"
