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
from trainings import YAML, assert_equal, curves, directory, last, metrics
from volume_files import write_volume

from utils.training import checkpoint
from utils.training.checkpoint import BEST, FOLDER, TRAINING, WEIGHTS, step_directory, weights_file
from utils.training.choice import finished_steps

STEP = 16
FLAGS = [f"--yaml_config={YAML}", "--config=test", "--set=report_baselines=false", "--set=report_pictures=false"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": cut,
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),  # after a power cut
    "missing": Path.unlink,
}
damages = pytest.mark.parametrize("damage", DAMAGES)


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


@damages
def test_a_run_resumes_with_damaged_records(run: Path, expdir: Path, data_flags: list[str], damage: str) -> None:
    """All four files at once. provenance.json and a metrics line once ended it with a traceback."""
    for name in ("provenance.json", "summary.json", "config.yaml"):
        DAMAGES[damage](run / name)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "Loss/va')
    ended = train(expdir, data_flags, "--resume", "--num_epochs=3")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert finished_steps(run) == 24
    assert json.loads((run / "provenance.json").read_text())["run_num"] == "00"
    steps = [record["step"] for record in metrics(run)]
    assert steps == sorted(steps)
    assert set(steps) == set(range(0, 25, 4)), "every logging interval, before and after"
    assert len(curves(run)["Loss/valid"]) == 4


@damages
def test_a_damaged_summary_is_that_of_an_unfinished_run(run: Path, damage: str) -> None:
    assert finished_steps(run) == STEP
    DAMAGES[damage](run / "summary.json")
    assert finished_steps(run) in ((None, STEP) if damage == "flipped" else (None,))


def test_a_copied_or_moved_run_resumes(expdir: Path, run: Path, data_flags: list[str], tmp_path: Path) -> None:
    """Links become directories if they are followed; the link to the best checkpoint is made again."""
    copy = shutil.copytree(expdir, tmp_path / "copy")
    assert (directory(copy) / FOLDER / BEST).is_dir()
    assert not (directory(copy) / FOLDER / BEST).is_symlink()
    (run / FOLDER / BEST).unlink()
    for place in (copy, expdir.rename(tmp_path / "moved")):
        ended = train(place, data_flags, "--resume", "--num_epochs=3")
        assert ended.returncode == 0, ended.stderr
        assert finished_steps(directory(place)) == 24
        best = last(directory(place)).state.best_step
        assert weights_file(directory(place)) == step_directory(directory(place) / FOLDER, best) / WEIGHTS


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


@pytest.mark.parametrize("name", [WEIGHTS, TRAINING])
def test_a_run_without_an_intact_checkpoint_ends_with_one_line(
    run: Path, expdir: Path, data_flags: list[str], name: str
) -> None:
    for path in (run / FOLDER).glob(f"step_*/{name}"):
        flip(path)
    line = error_line(train(expdir, data_flags, "--resume", "--num_epochs=3"))
    assert f"{name} is damaged: its digest does not match" in line
    assert "--resume=no" in line


def test_a_file_in_place_of_the_directory_is_one_line(expdir: Path, data_flags: list[str]) -> None:
    shutil.rmtree(expdir / "test")
    (expdir / "test").touch()
    assert "cannot write to the run directory" in error_line(train(expdir, data_flags, "--resume"))


# --- readers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", ["weights", "input"])
def test_a_prediction_from_damaged_files_ends_with_one_line(run: Path, tmp_path: Path, damaged: str) -> None:
    weights, volume = step_directory(run / FOLDER, STEP) / WEIGHTS, write_volume(tmp_path / "input.h5")
    cut({"weights": weights, "input": volume}[damaged])
    flags = ["--checkpoint", weights.parent, "--input", volume, "--output", tmp_path / "gas.h5"]
    line = error_line(run_script(["predict.py", *flags], tmp_path / "predicted"))
    assert {"weights": "weights.pt is damaged", "input": str(volume)}[damaged] in line
    assert not (tmp_path / "gas.h5").exists()


def test_the_link_to_the_best_checkpoint_may_be_wrong(run: Path) -> None:
    """Each checkpoint records the step of the best one."""
    link, best = run / FOLDER / BEST, weights_file(run)
    for target in ("nowhere", BEST, "step_00000008", "."):
        link.unlink()
        link.symlink_to(target)
        assert weights_file(run) == best
    assert_equal(checkpoint.read_weights(run)["network"], checkpoint.read(best)["network"])
