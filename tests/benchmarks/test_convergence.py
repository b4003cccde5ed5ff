"""The convergence study: what it makes of trainings, and that it makes them once."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import convergence
from benchmarks.convergence import (
    STUDIES,
    Condition,
    Study,
    Training,
    draw,
    draw_samples,
    reach,
    samples_table,
    spread,
    summarise,
    table,
    with_ranks,
)
from utils import config as configs
from utils.errors import UserError
from utils.logs import provenance

STUDY = Study((Condition("one", "digits_naive", 1), Condition("two", "digits_bn", 1)), "Accuracy/valid", "y", True)


def result(seed: int, accuracies: list[float], seconds: float = 1.0) -> dict[str, Any]:
    curve = [
        {
            "epoch": float(epoch),
            "samples": 100 * epoch,
            "step": 10 * epoch,
            "seconds": seconds * epoch,
            "Loss/valid": 1 - value,
            "Loss/train": 0.5,
            "Accuracy/valid": value,
        }
        for epoch, value in enumerate(accuracies)
    ]
    return {"seed": seed, "curve": curve, "seconds": curve[-1]["seconds"], "training accuracy": accuracies[-1] / 2}


def summaries() -> list[dict[str, Any]]:
    config = configs.load(convergence.YAML, "digits_naive").for_world(1)
    first = [result(0, [0.1, 0.5, 0.8]), result(1, [0.1, 0.7, 0.9], seconds=3.0)]
    second = [result(0, [0.1, 0.9, 0.9]), result(1, [0.1, 0.9, 0.95])]
    return [
        summarise(STUDY, condition, config, results)
        for condition, results in zip(STUDY.conditions, (first, second), strict=True)
    ]


def test_mean_and_spread_are_over_seeds() -> None:
    first, _ = summaries()
    assert first["Accuracy/valid"] == spread([0.8, 0.9])
    assert first["Accuracy/valid"]["mean"] == pytest.approx(0.85)
    assert first["Accuracy/valid"]["stdev"] == pytest.approx(statistics.stdev([0.8, 0.9]))
    assert [point["mean"] for point in first["curve"]] == pytest.approx([0.1, 0.6, 0.85])
    assert [point["seconds"] for point in first["curve"]] == [0, 2, 4]
    assert first["training accuracy"]["values"] == [0.4, 0.45]


def test_where_a_condition_is_as_good_as_another() -> None:
    first, second = summaries()
    assert reach(second, first["Accuracy/valid"]["mean"], rises=True) == {
        "epoch": 1.0,
        "samples": 100,
        "step": 10,
        "seconds": 1.0,
    }
    assert reach(first, second["Accuracy/valid"]["mean"], rises=True) is None
    falling = {"curve": [{**point, "mean": 1 - point["mean"]} for point in first["curve"]]}
    found = reach(falling, 0.4, rises=False)
    assert found is not None
    assert found["epoch"] == 1


def test_between_validations_it_is_read_off_the_straight_line() -> None:
    first, second = summaries()  # their means are 0.1, 0.6, 0.85 and 0.1, 0.9, 0.925
    assert reach(first, 0.7, rises=True, between=True) == pytest.approx(
        {"epoch": 1.4, "samples": 140, "step": 14, "seconds": 2.8}
    )
    assert reach(second, 0.5, rises=True, between=True) == pytest.approx(
        {"epoch": 0.5, "samples": 50, "step": 5, "seconds": 0.5}
    )
    assert reach(first, 0.6, rises=True, between=True) == reach(first, 0.6, rises=True)
    assert reach(first, 0.05, rises=True, between=True) == reach(first, 0.05, rises=True), "nothing is before it"
    assert reach(first, 0.9, rises=True, between=True) is None
    falling = {"curve": [{**point, "mean": 1 - point["mean"]} for point in first["curve"]]}
    assert reach(falling, 0.3, rises=False, between=True) == pytest.approx(reach(first, 0.7, rises=True, between=True))


def test_the_table_of_samples_holds_them_against_the_first() -> None:
    study = Study(STUDY.conditions, "Loss/valid", "y", rises=False, per_sample=True)
    config = configs.load(convergence.YAML, "digits_naive").for_world(1)
    runs = ([0.1, 0.5, 0.8], [0.1, 0.9, 0.9], [0.1, 0.2, 0.3])  # losses are one less these
    conditions = (*study.conditions, Condition("three", "digits_bn", 1))
    found = [
        summarise(study, condition, config, [result(0, run), result(1, run)])
        for condition, run in zip(conditions, runs, strict=True)
    ]
    assert samples_table(study, found)[2:] == [
        "| one | 200 | 0.20000 ± 0.00000 | 1.00 | 200 samples | 100 % |",
        "| two | 200 | 0.10000 ± 0.00000 | 0.50 | 88 samples | 44 % |",
        "| three | 200 | 0.70000 ± 0.00000 | 3.50 | never |  |",
    ]


def test_the_table_tells_all_of_them() -> None:
    lines = table(STUDY, summaries())
    assert lines[2].startswith("| one | 32 | 12 | 528 | 85.0 ± 7.1 % | 42.5 ± 3.5 % | 4 | 200 samples, 20 steps |")
    assert lines[3].startswith("| two | 32 | 12 | 528 | 92.5 ± 3.5 % | 46.2 ± 1.8 % | 2 | 100 samples, 10 steps |")
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("drawn", [draw, draw_samples])
def test_the_picture_is_drawn_whole(tmp_path: Path, drawn: Callable[..., None]) -> None:
    drawn(STUDY, summaries(), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


@pytest.mark.parametrize("name", STUDIES)
def test_conditions_are_configs_that_hold_and_differ(name: str, tmp_path: Path) -> None:
    conditions = STUDIES[name].conditions
    trainings = [Training(f"{name}-{n}", condition, 3, tmp_path, {}) for n, condition in enumerate(conditions)]
    assert len({training.directory for training in trainings}) == len(trainings)
    for training in trainings:
        assert training.config.seed == 3
        assert f"--set=expdir={json.dumps(str(tmp_path))}" in training.command()
        assert not training.complete()
    batches = {training.config.global_batch_size for training in trainings}
    assert max(batches) == (1 if STUDIES[name].per_sample else 8) * min(batches)
    configurations = {(training.condition.ranks, configs.to_yaml(training.config, "it")) for training in trainings}
    assert len(configurations) == len(trainings)
    assert len({condition.name for condition in conditions}) == len(conditions)


def test_conditions_may_be_had_on_other_numbers_of_ranks() -> None:
    found = [(condition.name, condition.ranks) for condition in with_ranks(STUDIES["digits"], [2, 4]).conditions]
    assert found[:4] == [
        ("1 rank", 1),
        ("2 ranks, naive", 2),
        ("4 ranks, naive", 4),
        ("2 ranks, + batch norm of each rank", 2),
    ]
    assert len(found) == 1 + 2 * 5


@pytest.mark.slow
def test_trainings_are_made_once_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(STUDIES, "digits", STUDY)
    arguments = ["digits", "--seeds=1", f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'out'}"]
    small = ["--set=num_epochs=2", "--set=Nsamples=320", "--set=Nsamples_val=40"]
    convergence.main([*arguments, *small])
    told = capsys.readouterr()
    assert "2/2: two, seed 0" in told.err
    found = json.loads((tmp_path / "out" / "convergence_digits.json").read_text())
    assert [condition["steps"] for condition in found["conditions"]] == [20, 20]
    curve = found["conditions"][1]["curve"]
    assert [(point["epoch"], point["samples"], point["step"]) for point in curve] == [
        (0, 0, 0),
        (1, 320, 10),
        (2, 640, 20),
    ]
    assert 0 < found["conditions"][0]["training accuracy"]["mean"] <= 1
    assert (tmp_path / "out" / "convergence_digits.md").read_text() in told.out
    monkeypatch.setattr(Training, "run", lambda *_: pytest.fail("it is there already"))
    convergence.main([*arguments, *small])
    with pytest.raises(pytest.fail.Exception):
        convergence.main([*arguments, "--set=num_epochs=1"])


def test_a_training_that_fails_is_one_line(tmp_path: Path) -> None:
    training = Training("digits", STUDIES["digits"].conditions[0], 0, tmp_path, {})
    training._changes["network.name"] = "unet"
    with pytest.raises(UserError, match="the training 1 rank, seed 0, failed: network unet does not take labelled"):
        training.run(60)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gas"], "invalid choice: 'gas'"),
        (["digits", "--seeds=0"], "is no whole number above zero"),
        (["digits", "--set=seed"], "expected key=value"),
        (["digits", "--set=num_epoch=3"], "did you mean num_epochs"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        convergence.main(arguments)


def test_a_run_of_another_commit_is_made_again(tmp_path: Path) -> None:
    training = Training("digits", STUDIES["digits"].conditions[0], 0, tmp_path, {})
    training.directory.mkdir(parents=True)
    (training.directory / "config.yaml").write_text(configs.to_yaml(training.config, "digits_naive"))
    (training.directory / "checkpoints" / f"step_{training.config.total_steps:08d}").mkdir(parents=True)
    for commit, there in ((provenance(convergence.this_machine())["git_commit"], True), ("another", False)):
        (training.directory / "provenance.json").write_text(json.dumps({"git_commit": commit}))
        assert training.complete() is there
