"""The convergence study: how it evaluates training runs, and that it runs each of them once."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import h5py
import pytest

from benchmarks import convergence, processes
from benchmarks.common import YAML
from benchmarks.convergence import STUDIES, Condition, Study, Training, expand, reach, result_table, summarize
from utils import config as configs
from utils.cli import read_changes
from utils.data.volumes import with_file_values
from utils.errors import UserError

CONDITIONS = tuple(Condition(name, "digits_naive", 1) for name in ("one", "two"))
VARY = {"lr_schedule.start_lr": [0.01, 0.1], "num_epochs": [3]}
STUDY = Study(CONDITIONS, "Accuracy/valid", "y", rises=True)


def result(accuracies: list[float], seconds: float = 1.0) -> dict[str, Any]:
    """A training run of 100 samples per epoch; its losses are one less the accuracies."""
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
    made = {"seed": 0, "commit": "abc"}
    return {**made, "curve": curve, "seconds": curve[-1]["seconds"], "training accuracy": accuracies[-1] / 2}


def summaries(study: Study, *results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    config = configs.load(YAML, "digits_naive").for_world(1)
    return [
        summarize(study, condition, config, made) for condition, made in zip(study.conditions, results, strict=True)
    ]


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    """Two conditions with two seeds each; their mean curves are 0.1, 0.6, 0.85 and 0.1, 0.9, 0.925."""
    first = [result([0.1, 0.5, 0.8]), result([0.1, 0.7, 0.9], seconds=3.0)]
    return summaries(STUDY, first, [result([0.1, 0.9, 0.9]), result([0.1, 0.9, 0.95])])


def test_mean_and_standard_deviation_are_over_seeds(both: list[dict[str, Any]]) -> None:
    first, _ = both
    accuracy = first["Accuracy/valid"]
    assert accuracy["values"] == [0.8, 0.9]
    assert (accuracy["mean"], accuracy["stdev"]) == pytest.approx((0.85, statistics.stdev([0.8, 0.9])))
    assert [point["mean"] for point in first["curve"]] == pytest.approx([0.1, 0.6, 0.85])
    assert [point["seconds"] for point in first["curve"]] == [0, 2, 4]
    assert first["training accuracy"]["values"] == [0.4, 0.45]


def test_a_goal_is_reached_at_a_validation_or_between_two(both: list[dict[str, Any]]) -> None:
    first, second = (summary["curve"] for summary in both)
    assert reach(second, 0.85, rises=True) == {"epoch": 1.0, "samples": 100, "step": 10, "seconds": 1.0}
    between = {"epoch": 1.4, "samples": 140, "step": 14, "seconds": 2.8}
    assert reach(first, 0.7, rises=True, interpolate=True) == pytest.approx(between)
    for goal in (0.6, 0.05):  # at a validation, and before the first one
        assert reach(first, goal, rises=True, interpolate=True) == reach(first, goal, rises=True)
    assert reach(first, 0.925, rises=True) is reach(first, 0.925, rises=True, interpolate=True) is None
    falling = [{**point, "mean": 1 - point["mean"]} for point in first]
    assert reach(falling, 0.3, rises=False, interpolate=True) == pytest.approx(between)


def test_tables_and_plots_compare_with_the_first_condition(tmp_path: Path, both: list[dict[str, Any]]) -> None:
    line = result_table(STUDY, both).splitlines()[2]
    assert line == "| one | 32 | 12 | 528 | 85.0 ± 7.1 % | 42.5 ± 3.5 % | 4 | 200 samples, 20 steps | 100 % |"
    losses = Study(CONDITIONS, "Loss/valid", "y", rises=False, per_sample=True)
    found = summaries(losses, [result([0.1, 0.5, 0.8])] * 2, [result([0.1, 0.2, 0.3])] * 2)
    assert result_table(losses, found).splitlines()[2:] == [
        "| one | 32 | 12 | 528 | 0.20000 ± 0.00000 | 40.0 ± 0.0 % | 2 | 200 samples, 20 steps | 100 % |",
        "| two | 32 | 12 | 528 | 0.70000 ± 0.00000 | 15.0 ± 0.0 % | 2 | never |  |",
    ]
    single = result_table(STUDY, summaries(STUDY, [result([0.1, 0.5, 0.8])], [result([0.1, 0.2, 0.3])]))
    assert "| 528 | 80.0 % | 40.0 % |" in single.splitlines()[2]
    convergence.draw(STUDY, both, tmp_path / "curves.png")
    convergence.draw(losses, found, tmp_path / "samples.png")
    for name in ("curves.png", "samples.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", STUDIES)
def test_conditions_are_valid_configs_that_differ(name: str, tmp_path: Path) -> None:
    conditions = STUDIES[name].conditions
    training_runs = [Training(f"{name}-{n}", condition, 3, tmp_path, {}) for n, condition in enumerate(conditions)]
    assert all(training.config.seed == 3 and not training.is_trained() for training in training_runs)
    batches = {training.config.global_batch_size for training in training_runs}
    assert max(batches) == {"digits": 8, "cifar10": 8, "unet": 8, "scale": 16, "demo": 4}.get(name, 1) * min(batches)
    assert len({training.directory for training in training_runs}) == len(training_runs)
    different = {(training.condition.ranks, configs.to_yaml(training.config, "it")) for training in training_runs}
    assert len(different) == len(training_runs)


def test_trainings_run_once_and_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_forked: Any
) -> None:
    """Finished runs are kept, regardless of their commit; those of another config repeated. A failure is one line."""
    monkeypatch.setitem(STUDIES, "digits", STUDY)
    monkeypatch.setattr(processes, "run_group", run_forked)
    arguments = ["digits", "--seeds=1", f"--runs={tmp_path / 'runs'}", f"--output={tmp_path / 'out'}"]
    small = ["--set=num_epochs=2", "--set=Nsamples=320", "--set=Nsamples_val=40", "--set=report_pictures=false"]
    convergence.main([*arguments, *small])
    printed = capsys.readouterr()
    assert "2/2: two, seed 0" in printed.err
    found = json.loads((tmp_path / "out" / "convergence_digits.json").read_text())
    assert [condition["steps"] for condition in found["conditions"]] == [20, 20]
    curve = [(point["epoch"], point["samples"], point["step"]) for point in found["conditions"][1]["curve"]]
    assert curve == [(0, 0, 0), (1, 320, 10), (2, 640, 20)]
    assert (tmp_path / "out" / "convergence_digits.md").read_text() in printed.out
    (trained,) = convergence.training_runs_of(
        "digits", 1, tmp_path / "runs", read_changes([each.partition("=")[2] for each in small])
    )[:1]
    start, first, last = trained.curve()
    assert start["training seconds"] == 0 < first["training seconds"] < last["training seconds"] < last["seconds"]

    started: list[str] = []
    path = next((tmp_path / "runs").glob("**/digits-0-seed0/provenance.json"))
    made = json.loads(path.read_text())
    path.write_text(json.dumps({**made, "git_commit": "another"}))
    with monkeypatch.context() as patched:
        patched.setattr(Training, "run", lambda training, limit: started.append(training.condition.name))
        convergence.main([*arguments, *small])
        assert started == []
        found = json.loads((tmp_path / "out" / "convergence_digits.json").read_text())
        assert found["conditions"][0]["commits"] == ["another"]
        with pytest.raises(UserError, match="no training run of one is finished"):
            convergence.main([*arguments, *small, "--set=num_epochs=1"])
        assert started == ["one", "two"]

    wrong = Training("wrong", CONDITIONS[0], 0, tmp_path / "runs", {})
    wrong._changes["network.name"] = "unet"
    with pytest.raises(UserError, match="the run one, seed 0, failed: network unet cannot be used with labeled"):
        wrong.run(60)


def test_a_training_on_files_that_state_their_transform_runs_once(tmp_path: Path, volume_file: Any) -> None:
    """Its config.yaml has the transform of the files, not the default."""
    paths = {key: str(volume_file(tmp_path / f"{key}.h5")) for key in ("train_path", "val_path")}
    with h5py.File(paths["train_path"], "r+") as file:
        file.attrs["velocity_scale_km_s"] = 500.0
    training = Training("it", Condition("it", "test", 1), 0, tmp_path / "runs", paths)
    config = with_file_values(training.config, "hdf5")
    (training.directory / "checkpoints" / f"step_{config.total_steps:08d}").mkdir(parents=True)
    (training.directory / "config.yaml").write_text(configs.to_yaml(config, "test"))
    assert training.is_trained()
    (training.directory / "config.yaml").write_text(configs.to_yaml(training.config, "test"))
    assert not training.is_trained()


def test_a_diverged_training_does_not_end_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are trained and reported, and the study ends with the reason. A budget of time ends it early, too."""
    conditions = list(expand({"name": "it", "config": "digits_naive", "ranks": 1, "vary": VARY}, {"num_epochs": 2}))
    monkeypatch.setitem(STUDIES, "digits", Study(conditions, "Accuracy/valid", "y", rises=True, first_seed=100))
    finished: list[tuple[str, int]] = []

    def run(training: Training, limit: float) -> None:
        if training.condition is conditions[1] and training.seed == 101:
            raise UserError("it diverged")
        finished.append((training.condition.name, training.seed))

    def is_trained(training: Training) -> bool:
        return (training.condition.name, training.seed) in finished

    monkeypatch.setattr(Training, "run", run)
    monkeypatch.setattr(Training, "is_trained", is_trained)
    monkeypatch.setattr(Training, "result", lambda training: {**result([0.1, 0.5]), "seed": training.seed})
    arguments = ["digits", "--seeds=2", f"--runs={tmp_path / 'runs'}", f"--output={tmp_path}"]
    with pytest.raises(UserError, match=r"no training run of it, start_lr 0\.01 is finished; give more --hours"):
        convergence.main([*arguments, "--hours=1e-12"])
    with pytest.raises(UserError, match="1 of 6 training runs failed; it diverged"):
        convergence.main(arguments)
    assert finished == [
        (each.name, seed) for seed in (100, 101) for each in conditions if (each, seed) != (conditions[1], 101)
    ]
    assert "5 training runs, 0.00 hours in all. Missing: it, start_lr 0.1 (1 of 2)." in capsys.readouterr().out
    found = json.loads((tmp_path / "convergence_digits.json").read_text())["conditions"]
    assert [condition["seeds"] for condition in found] == [[100, 101], [100], [100, 101]]


def test_a_varied_condition_changes_one_key_at_a_time() -> None:
    made = expand({"name": "it", "config": "digits_naive", "ranks": 1, "vary": VARY}, {"num_epochs": 2})
    assert [(each.name, each.changes) for each in made] == [
        ("it, start_lr 0.01", {"num_epochs": 2, "lr_schedule.start_lr": 0.01}),
        ("it, start_lr 0.1", {"num_epochs": 2, "lr_schedule.start_lr": 0.1}),
        ("it, num_epochs 3", {"num_epochs": 3}),
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["digits", "--seeds=0"], "is not a positive integer"),
        (["digits", "--set=num_epoch=3"], "did you mean num_epochs"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        convergence.main(arguments)
