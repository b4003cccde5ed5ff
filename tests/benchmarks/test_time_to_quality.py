"""Time to quality: when a run reaches the goal, and the report of small runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, time_to_quality
from benchmarks.convergence import STUDIES, Condition, Study, Training
from benchmarks.time_to_quality import result_table, to_goal

LOSS = "Loss/valid"


def trained(losses: list[float], seconds: float = 1.0) -> dict[str, Any]:
    """A training run with a validation after every 10 samples."""
    curve = [
        {"epoch": number, "samples": 10 * number, "step": number, "seconds": seconds * number, LOSS: loss}
        for number, loss in enumerate(losses)
    ]
    return {"curve": curve}


def test_shares_compare_with_the_whole_reference_of_the_same_seed() -> None:
    """A reference counts as a whole, although one of its seeds is at the mean of their final losses before its end."""
    reference = [trained([9, 3, 2, 1], seconds=1), trained([9, 5, 4, 3], seconds=2)]
    own = to_goal(reference, reference, LOSS, 2)
    assert own["samples"]["values"] == [30, 30]
    assert own["share of seconds"]["values"] == [1, 1]
    found = to_goal([trained([9, 2.1, 2]), trained([9, 2])], reference, LOSS, 2)
    assert found["reached"] == 2
    assert (found["samples"]["values"], found["seconds"]["values"]) == ([20, 10], [2, 1])
    assert found["share of samples"]["values"] == pytest.approx([20 / 30, 10 / 30])
    assert found["share of seconds"]["values"] == pytest.approx([2 / 3, 1 / 6])


def test_a_recipe_that_misses_the_goal_with_one_seed_has_no_mean() -> None:
    reference = [trained([9, 2]), trained([9, 2])]
    assert to_goal([trained([9, 1]), trained([9, 3])], reference, LOSS, 2) == {"reached": 1}
    recipe = {"name": "it", "global batch": 8, "steps": 1, LOSS: {"mean": 2.0, "stdev": 1.0, "n": 2}, "seeds": [0, 1]}
    table = result_table([{**recipe, "to the goal": {"reached": 1}}], LOSS, "loss")
    assert table.splitlines()[2] == "| it | 8 | 1 | 2.00000 ± 1.00000 | 1 of 2 |  |  |  |  |"


def test_recipes_are_trained_in_turn_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds are those of the steps alone."""
    losses = {"slow": [9.0, 3.0, 2.0], "fast": [9.0, 2.0, 1.5]}
    recipes = [Condition(name, "digits_naive", 1) for name in losses]
    monkeypatch.setitem(STUDIES, "time_to_quality", Study(recipes, LOSS, "loss", rises=False))
    finished: list[tuple[str, int]] = []

    def name(training: Training) -> tuple[str, int]:
        return training.condition.name, training.seed

    def result(training: Training) -> dict[str, Any]:
        curve = trained(losses[training.condition.name], seconds=100.0)["curve"]
        points = [{**point, "training seconds": 4.0 * point["epoch"], "Loss/train": 1.0} for point in curve]
        return {"seed": training.seed, "commit": "abc", "curve": points, "seconds": 200.0}

    monkeypatch.setattr(Training, "run", lambda training, limit: finished.append(name(training)))
    monkeypatch.setattr(Training, "is_trained", lambda training: name(training) in finished)
    monkeypatch.setattr(Training, "result", result)
    time_to_quality.main(["--seeds=2", f"--runs={tmp_path / 'runs'}", f"--output={tmp_path}"])
    assert finished == [("slow", 0), ("fast", 0), ("slow", 1), ("fast", 1)]
    found = json.loads((tmp_path / "time_to_quality.json").read_text())
    assert found["goal"] == 2
    text = (tmp_path / "time_to_quality.md").read_text()
    assert "| 20 ± 0 | 100.0 ± 0.0 | 8.0 ± 0.0 | 100.0 ± 0.0 |" in text.splitlines()[2]
    assert "| 2 of 2 | 10 ± 0 | 50.0 ± 0.0 | 4.0 ± 0.0 | 50.0 ± 0.0 |" in text.splitlines()[3]
    assert "The goal is 2.00000." in text
    assert (tmp_path / "time_to_quality.png").read_bytes().startswith(b"\x89PNG")


def test_settings_name_no_directory_of_this_machine() -> None:
    options = argparse.Namespace(runs=common.REPOSITORY / "runs" / "it", data=Path("/scratch/it"), output=Path("there"))
    assert common.settings(options) == {"runs": "runs/it", "data": "/scratch/it"}
