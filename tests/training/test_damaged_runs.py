"""Run directories as kills, full disks, bad disks and copies leave them: resumed with a warning, or one error line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from log_lines import messages, other_lines
from processes import Completed
from processes import run as run_script
from trainings import YAML, curves, directory, last, metrics
from volume_files import write_volume

from utils.errors import UserError
from utils.evaluation import report, results
from utils.training import checkpoint, evaluations
from utils.training.checkpoint import BEST, FOLDER, TRAINING, WEIGHTS, step_directory

STEP = 16
FLAGS = [f"--yaml_config={YAML}", "--config=test", "--set=report_baselines=false", "--set=report_pictures=false"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """The parent directory of a finished run with an evaluation."""
    expdir = tmp_path_factory.mktemp("trained")
    flags = [*FLAGS, *data_flags, f"--set=expdir={expdir}", "--set=evaluation.every_epochs=2"]
    ended = run_script(["train.py", *flags], expdir / "output")
    assert ended.returncode == 0, ended.stderr
    return expdir


@pytest.fixture
def expdir(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, as users copy directories, to be damaged."""
    return shutil.copytree(trained, tmp_path / "runs", symlinks=True)


@pytest.fixture
def run(expdir: Path) -> Path:
    return directory(expdir)


def train(expdir: Path, data_flags: list[str], *more: str) -> Completed:
    flags = [*FLAGS, *data_flags, f"--set=expdir={expdir}", *more]
    return run_script(["train.py", *flags], expdir / "again")


def error_line(ended: Completed) -> str:
    """The only error line of a process that ends with exit code 2."""
    assert ended.returncode == 2, ended.stderr
    (line,) = [line for line in other_lines(ended.stderr) if line.startswith("error: ")]
    assert "Traceback" not in ended.stderr
    return line


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_run_resumes_with_damaged_records(
    run: Path, expdir: Path, data_flags: list[str], damage: Callable[[Path], object]
) -> None:
    """All four files at once. provenance.json and a metrics line once ended it with a traceback."""
    for name in ("provenance.json", "summary.json", "config.yaml"):
        damage(run / name)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "Loss/va')
    ended = train(expdir, data_flags, "--resume", "--num_epochs=3")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] == 24
    assert json.loads((run / "provenance.json").read_text())["run_num"] == "00"
    steps = [record["step"] for record in metrics(run)]
    assert steps == sorted(steps)
    assert set(steps) == set(range(0, 25, 4)), "every logging interval, before and after"
    assert len(curves(run)["Loss/valid"]) == 4
    ended = train(expdir, data_flags, "--resume", "--num_epochs=4")
    assert ended.returncode == 0, ended.stderr


def test_a_moved_run_resumes_without_its_link(expdir: Path, run: Path, data_flags: list[str], tmp_path: Path) -> None:
    (run / FOLDER / BEST).unlink()
    place = expdir.rename(tmp_path / "moved")
    ended = train(place, data_flags, "--resume", "--num_epochs=3")
    assert ended.returncode == 0, ended.stderr
    assert checkpoint.read_weights(directory(place))["step"] == last(directory(place)).state.best_step


def test_a_run_warns_about_a_data_file_that_has_changed(
    run: Path, expdir: Path, data_flags: list[str], tmp_path: Path
) -> None:
    changed = write_volume(tmp_path / "other.h5", seed=9)
    flags = [flag for flag in data_flags if "val_path" not in flag]
    ended = train(expdir, [*flags, f"--set=val_path={changed}"], "--resume", "--num_epochs=3")
    assert ended.returncode == 0, ended.stderr
    (warning,) = messages(ended.stderr, "WARNING")
    assert f"val_path {changed} differs from the data of the run that resumes: other content of " in warning
    assert warning in messages((run / "out.log").read_text(), "WARNING")


def test_a_run_without_an_intact_checkpoint_ends_with_one_line(run: Path, expdir: Path, data_flags: list[str]) -> None:
    for path in (run / FOLDER).glob(f"step_*/{TRAINING}"):
        cut(path)
    line = error_line(train(expdir, data_flags, "--resume", "--num_epochs=3"))
    assert f"{TRAINING} is damaged: its digest does not match" in line
    assert "--resume=no" in line


# --- readers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_damaged_evaluation_is_missing_in_the_report(
    run: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = evaluations.path_of_step(run / evaluations.FOLDER, STEP)
    damage(path)
    with pytest.raises(UserError, match=r"^[^\n]*$"):
        results.load(path)
    assert report.write_run_report(run) == []
    assert damage is Path.unlink or str(path) in caplog.text


@pytest.mark.parametrize("damaged", ["weights", "input"])
def test_a_prediction_from_damaged_files_ends_with_one_line(run: Path, tmp_path: Path, damaged: str) -> None:
    weights, volume = step_directory(run / FOLDER, STEP) / WEIGHTS, write_volume(tmp_path / "input.h5")
    cut({"weights": weights, "input": volume}[damaged])
    flags = ["--checkpoint", weights.parent, "--input", volume, "--output", tmp_path / "gas.h5"]
    line = error_line(run_script(["predict.py", *flags], tmp_path / "predicted"))
    assert {"weights": "weights.pt is damaged", "input": str(volume)}[damaged] in line
    assert not (tmp_path / "gas.h5").exists()
