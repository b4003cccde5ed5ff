"""Damaged run directories through the real scripts: exit code 0 with a warning, or exit code 2 with one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from log_lines import other_lines
from processes import Completed
from processes import run as run_script
from trainings import YAML, curves, metrics
from volume_files import write_volume

from utils.training.checkpoint import FOLDER

FLAGS = [f"--yaml_config={YAML}", "--config=test", "--set=report_baselines=false", "--set=report_pictures=false"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """The parent directory of a finished run."""
    expdir = tmp_path_factory.mktemp("trained")
    ended = run_script(["train.py", *FLAGS, *data_flags, f"--set=expdir={expdir}"], expdir / "output")
    assert ended.returncode == 0, ended.stderr
    return expdir


@pytest.fixture
def expdir(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "runs", symlinks=True)


def run_of(expdir: Path) -> Path:
    return expdir / "test" / "1ranks" / "00"


def train(expdir: Path, data_flags: list[str], *more: str) -> Completed:
    flags = [*FLAGS, *data_flags, f"--set=expdir={expdir}", *more]
    return run_script(["train.py", *flags], expdir / "again")


def damage_records(run: Path) -> None:
    (run / "provenance.json").write_text("[1]")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": null}\n[1]\n{"step": "3"}\n' + "[" * 100_000 + "\n")
    (run / "summary.json").write_text('{"a":' * 100_000)
    (run / "config.yaml").write_bytes(b"\xff\x00")


def test_a_training_resumes_with_damaged_records(expdir: Path, data_flags: list[str]) -> None:
    """provenance.json with `[1]`, and a metrics line with a null step, once ended it with a traceback."""
    damage_records(run_of(expdir))
    ended = train(expdir, data_flags, "--resume", "--num_epochs=3")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "provenance.json: it is not a mapping; the earlier provenance is lost" in ended.stderr
    steps = [record["step"] for record in metrics(run_of(expdir))]
    assert steps == sorted(steps)
    assert set(steps) == set(range(0, 25, 4)), "every logging interval, before and after"
    assert len(curves(run_of(expdir))["Loss/valid"]) == 4


def test_a_training_warns_about_a_data_file_that_has_changed(
    expdir: Path, data_flags: list[str], tmp_path: Path
) -> None:
    changed = write_volume(tmp_path / "other.h5", seed=9)
    flags = [flag for flag in data_flags if "val_path" not in flag]
    ended = train(expdir, [*flags, f"--set=val_path={changed}"], "--resume", "--num_epochs=3")
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if " WARNING - " in line]
    assert len(lines) == 1
    assert f"val_path {changed} differs from the data of the training that resumes: other content of " in lines[0]
    assert lines[0] in (run_of(expdir) / "out.log").read_text()


def damage_all_weights(expdir: Path) -> None:
    for path in (run_of(expdir) / FOLDER).glob("step_*/weights.pt"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def replace_directory(expdir: Path) -> None:
    """The directory of all runs of the config."""
    shutil.rmtree(expdir / "test")
    (expdir / "test").write_text("x")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_all_weights, "weights.pt is damaged: its digest does not match"),
        (replace_directory, "cannot write to the run directory"),
    ],
)
def test_a_training_that_cannot_resume_ends_with_one_line(
    expdir: Path, data_flags: list[str], damage: Callable[[Path], None], says: str
) -> None:
    damage(expdir)
    ended = train(expdir, data_flags, "--resume", "--num_epochs=3")
    assert ended.returncode == 2, ended.stderr
    assert [line for line in other_lines(ended.stderr) if not line.startswith("error: ")] == []
    assert says in ended.stderr.splitlines()[-1]


def damage_input(expdir: Path) -> None:
    path = expdir / "input.h5"
    content = bytearray(path.read_bytes())
    content[100:400] = bytes(300)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_all_weights, "weights.pt is damaged: its digest does not match"),
        (damage_input, "input.h5: Unable to synchronously open file ("),
    ],
)
def test_a_prediction_from_damaged_files_ends_with_one_line(
    expdir: Path, damage: Callable[[Path], None], says: str
) -> None:
    write_volume(expdir / "input.h5")
    output = expdir / "gas.h5"
    damage(expdir)
    flags = ["--checkpoint", run_of(expdir) / FOLDER / "step_00000016", "--input", expdir / "input.h5"]
    ended = run_script(["predict.py", *flags, "--output", output], expdir / "predicted")
    assert ended.returncode == 2, ended.stderr
    (line,) = [line for line in other_lines(ended.stderr) if line]
    assert line.startswith("error: ")
    assert says in line
    assert not output.exists()


def test_records_name_the_data_and_the_earlier_process(expdir: Path, data_flags: list[str]) -> None:
    assert train(expdir, data_flags, "--resume", "--num_epochs=3").returncode == 0
    record = json.loads((run_of(expdir) / "provenance.json").read_text())
    (before,) = record["earlier"]
    assert before["data"] == record["data"]
    assert record["data"].keys() == {"train_path", "val_path"}
