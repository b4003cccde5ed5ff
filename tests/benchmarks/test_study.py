"""Studies: how training runs are evaluated, that each of them runs once, and what is reported and kept."""

import json
import os
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis.evaluation import results
from benchmarks import boxes, common, study
from benchmarks.study import LOSS, STUDIES, Condition, Study, Training, result_table, to_goal
from utils import config as configs
from utils.errors import UserError

CONDITIONS = tuple(Condition(name, "digits_naive") for name in ("one", "two"))
STUDY = Study(CONDITIONS, "Accuracy/valid", "y", rises=True)


def result(accuracies: list[float], seed: int = 0, seconds: float = 1.0) -> dict[str, Any]:
    """A training run of 100 samples per epoch; its losses are one less the accuracies."""
    curve = [
        {"epoch": float(epoch), "samples": 100 * epoch, "step": 10 * epoch, "seconds": seconds * epoch}
        | {LOSS: 1 - value, "Loss/train": 0.5, "Accuracy/valid": value}
        for epoch, value in enumerate(accuracies)
    ]
    return {"seed": seed, "commit": "abc", "curve": curve, "training accuracy": accuracies[-1] / 2}


def summaries(chosen: Study, *written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    config = configs.load(common.YAML, "digits_naive").for_world(1)
    runs = [SimpleNamespace(condition=condition, config=config) for condition in chosen.conditions]
    return [study.summarize(chosen, [run], made, written[0]) for run, made in zip(runs, written, strict=True)]


def test_mean_and_standard_deviation_are_over_seeds() -> None:
    first = [result([0.1, 0.5, 0.8]), result([0.1, 0.7, 0.9], seed=1, seconds=3.0)]
    both = summaries(STUDY, first, [result([0.1, 0.9, 0.9]), result([0.1, 0.9, 0.95], seed=1)])
    assert both[0]["Accuracy/valid"]["values"] == [0.8, 0.9]
    assert [point["mean"] for point in both[0]["curve"]] == pytest.approx([0.1, 0.6, 0.85])
    assert [point["seconds"] for point in both[0]["curve"]] == [0, 2, 4]
    lines = result_table(STUDY, both).splitlines()[2:]
    assert lines[0].startswith("| one | 32 | 12 | 528 | 4 | 85.0 ± 7.1 % | 42.5 ± 3.5 % | 2 of 2 | 200 ± 0 | 100.0 ")
    assert "| 2 of 2 | 100 ± 0 | 50.0 ± 0.0 | 1.0 ± 0.0 | 33.3 ± 23.6 |" in lines[1]
    single = result_table(STUDY, summaries(STUDY, [result([0.1, 0.8])], [result([0.1, 0.3])]))
    assert "| 30.0 % | 15.0 % | 0 of 1 |  |  |  |  |" in single


def test_shares_compare_with_the_whole_reference_of_the_same_seed() -> None:
    """A reference counts as a whole, although one of its seeds is at the mean of their final losses before its end."""
    losses = Study(CONDITIONS)
    reference = [result([0, 0.7, 0.9]), result([0, 0.5, 0.7], seed=1, seconds=2)]
    of_reference = to_goal(losses, reference, reference)
    assert of_reference["samples"]["values"] == [200, 200]
    assert of_reference["share of seconds"]["values"] == [1, 1]
    written = to_goal(losses, [result([0, 0.79, 0.8]), result([0, 0.8], seed=1)], reference)
    assert (written["samples"]["values"], written["seconds"]["values"]) == ([200, 100], [2, 1])
    assert written["share of seconds"]["values"] == pytest.approx([1, 1 / 4])
    assert to_goal(losses, [result([0, 0.9]), result([0, 0.7], seed=1)], reference) == {"reached": 1}


@pytest.mark.parametrize("name", STUDIES)
def test_conditions_are_valid_configs_that_differ(name: str, tmp_path: Path) -> None:
    chosen = STUDIES[name]
    different = set()
    for number, condition in enumerate(chosen.conditions):
        training = Training(f"{name}-{number}", condition, 3, tmp_path, {})
        different.add((*condition.script, condition.ranks, *condition.boxes, configs.to_yaml(training.config, "it")))
        assert set(condition.boxes) <= chosen.evaluate.keys()
    assert len(different) == len(chosen.conditions)


def test_trainings_run_once_and_are_compared(tmp_path: Path, monkeypatch: Any, capsys: Any, run_forked: Any) -> None:
    """Finished runs are kept, regardless of their commit. Their logs are copied without checkpoints and evaluations."""
    monkeypatch.setitem(STUDIES, "digits", STUDY)
    arguments = ["digits", "--seeds=1", f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'out'}"]
    settings = ("num_epochs=2", "Nsamples=320", "Nsamples_val=40", "report_pictures=false")
    arguments += [f"--set={setting}" for setting in settings]
    study.main(arguments)
    assert (tmp_path / "out/study_digits.md").read_text() in capsys.readouterr().out
    curve = json.loads((tmp_path / "out/study_digits.json").read_text())["conditions"][1]["curve"]
    assert [(p["epoch"], p["samples"], p["step"]) for p in curve] == [(0, 0, 0), (1, 320, 10), (2, 640, 20)]
    assert curve[0]["seconds"] == 0 < curve[1]["seconds"] < curve[2]["seconds"]
    assert (tmp_path / "out/study_digits.png").read_bytes().startswith(b"\x89PNG")
    started: list[str] = []
    path = next((tmp_path / "runs").glob("**/digits-0-seed0/provenance.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "git_commit": "another"}))
    monkeypatch.setattr(Training, "run", lambda training: started.append(training.condition.name))
    (path.parent / "evaluation").mkdir()
    study.main([*arguments, f"--logs={tmp_path / 'logs'}"])
    assert started == []
    kept = set(os.listdir(tmp_path / "logs/one"))
    assert {"config.yaml", "logs", "metrics.jsonl"} <= kept - {"checkpoints", "evaluation"} == kept
    written = json.loads((tmp_path / "out/study_digits.json").read_text())
    assert written["conditions"][0]["commits"] == ["another"]
    with pytest.raises(UserError, match="no training run of one is finished"):
        study.main([*arguments, "--set=num_epochs=1"])
    assert started == ["one", "two"]


def test_a_diverged_training_does_not_end_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, run_forked: Any
) -> None:
    """The others are trained and reported, and the study ends with the reason."""
    monkeypatch.setitem(STUDIES, "digits", STUDY)
    finished: list[tuple[str, int]] = []
    run = Training.run

    def run_or_fail(training: Training) -> None:
        if (training.condition.name, training.seed) == ("two", 0):
            training.changes["network.name"] = "unet"
            run(training)
        finished.append((training.condition.name, training.seed))

    monkeypatch.setattr(Training, "run", run_or_fail)
    monkeypatch.setattr(Training, "is_trained", lambda training: (training.condition.name, training.seed) in finished)
    monkeypatch.setattr(Training, "result", lambda training: result([0.1, 0.5], seed=training.seed))
    reason = "1 of 4 training runs failed; the run two, seed 0, failed: network unet cannot be used with labeled"
    with pytest.raises(UserError, match=reason):
        study.main(["digits", "--seeds=2", f"--runs={tmp_path / 'runs'}", f"--output={tmp_path}"])
    assert finished == [("one", 0), ("one", 1), ("two", 1)]
    assert "Missing: two, seed 0." in capsys.readouterr().out
    written = json.loads((tmp_path / "study_digits.json").read_text())["conditions"]
    assert [condition["seeds"] for condition in written] == [[0, 1], [1]]


def test_networks_are_evaluated_on_every_box_and_nothing_is_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_or_draw: Any
) -> None:
    changes = {"num_epochs": 1, "report_baselines": False, "report_pictures": False, "log_noise_scale": False}
    trained_on = {"near": ["a"], "both": ["a", "b"], "far": ["b"]}
    seeds = {"train": [1], "valid": [2], "held_out": [11, 12]}
    simulation = {part: {"grid": 16, "seeds": numbers} for part, numbers in seeds.items()}
    toy = Study(
        [Condition(name, "test", changes=changes, boxes=files) for name, files in trained_on.items()],
        simulation={**simulation, "redshift": 2.0, "cosmology": "planck18", "cell": 0.5},
        evaluate={"a": {}, "b": {"redshift": 4.0, "cell": 1.0}},
    )
    monkeypatch.setitem(STUDIES, "generalization", toy)
    monkeypatch.setattr(boxes, "SIGHTLINES", 4)
    arguments = ["generalization", "--seeds=1", f"--runs={tmp_path}", f"--output={tmp_path}", "--set=device=cpu"]
    study.main(arguments)
    path = tmp_path / "study_generalization.json"
    written = json.loads(path.read_text())["evaluations"]
    kept = list((tmp_path / "evaluations/generalization-1-seed0").glob("*redshift=4.0*.npz"))
    errors = [float(results.load(file).l1.mean()) for file in kept]
    assert written["b"]["both"]["L1"]["mean"] == pytest.approx(statistics.fmean(errors))
    assert written["b"]["both"]["L1"]["n"] == 2
    assert written["a"].keys() == written["b"].keys() == {"near", "both", boxes.SPECIALIST, boxes.COPYING}
    assert written["a"][boxes.SPECIALIST] == written["a"]["near"]
    assert not list((tmp_path / "evaluations/generalization-2-seed0").glob("*redshift=2.0*")), "far is evaluated on b"
    assert "| L1 | near | both |" in (tmp_path / "study_generalization.md").read_text()
    monkeypatch.setattr(common, "failure_of", lambda *_, **__: pytest.fail("made twice"))
    monkeypatch.setattr(results, "save", lambda *_: pytest.fail("evaluated twice"))
    study.main(arguments)
    assert json.loads(path.read_text())["evaluations"] == written
