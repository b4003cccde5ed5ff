"""--resume=no removes all that an earlier run has written, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainings import YAML, NoWaiting, directory
from utils.training.removal import is_incomplete, remove_run
from utils.training.summary import begin_run

import train
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError
from utils.training import removal
from utils.training.checkpoint import BEST, FOLDER
from utils.training.resume import Start

ALONE = World(Launch("test"), torch.device("cpu"))
OWN = ["checkpoints/mine.pt", "evaluation/plot.pdf", "logs/mine.txt", "notes.txt", "trace_mine.json.gz"]


class Killed(BaseException):
    """Ends a removal at once, as a signal would."""


def names(run: Path) -> set[str]:
    paths = (path for path in run.rglob("*") if path.is_symlink() or not path.is_dir())
    return {str(path.relative_to(run)) for path in paths if path.name != ".lock"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    """The directory of a training, which tests must not change."""
    expdir = tmp_path_factory.mktemp("whole")
    flags = [f"--yaml_config={YAML}", "--config=test", *data_flags, f"--set=expdir={expdir}", "--num_epochs=1"]
    flags += ["--set=report_baselines=false"]
    with pytest.MonkeyPatch.context() as patched:
        NoWaiting().install(patched.setattr)
        train.main(flags)
    return directory(expdir)


@pytest.fixture
def run(tmp_path: Path, whole: Path) -> Path:
    """A copy of it with files of others, and with those that only options, hangs, several ranks or W&B leave."""
    run = shutil.copytree(whole, tmp_path / "00", symlinks=True)
    left = [
        "report.html",
        "loss_curves.png",
        "slices.png",
        "evaluation/step_00000008.npz",
        "trace.json.gz",
        "top_operations.txt",
    ]
    left += ["flight_recorder_rank1.json", "trace_rank1.json.gz", "top_operations_rank1.txt", ".profile-ab/trace.json"]
    left += ["checkpoints/.step_00000009.12.partial/weights.pt", "checkpoints/step_00000004/weights.pt"]
    left += ["wandb/id", "wandb/offline-run-1/run.wandb", "wandb/debug.log"]
    for name in (*left, *OWN):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    return run


def test_everything_that_a_run_has_written_is_removed_and_nothing_else(run: Path) -> None:
    """Report, traces and old event files stayed; TensorBoard showed old hyperparameters with the new loss."""
    written = names(run) - set(OWN) - {"checkpoints/.step_00000009.12.partial/weights.pt"}
    size = sum((run / name).lstat().st_size for name in written) / 1e6
    (line,) = remove_run(run)
    assert line.startswith(f"Removed the earlier run: {len(written)} files, {size:.1f} MB (.profile-ab, checkpoints, ")
    assert "report.html" in line
    assert names(run) == set(OWN)
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["checkpoints", "evaluation", "logs"]
    assert remove_run(run) == []


def test_a_removal_that_was_interrupted_leaves_no_training_with_a_part_of_its_records(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a checkpoint is left, so are all records; then config.yaml is gone, and the next start removes the rest."""
    real: Callable[[Path], None] = removal._remove
    first = {"summary.json", "config.yaml"} | {name for name in names(run) if name.startswith(f"{FOLDER}/")}
    records = names(run) - first - {f"{FOLDER}/{BEST}"}
    for count in range(len(records) + 10):
        copy, calls = shutil.copytree(run, tmp_path / str(count), symlinks=True), []

        def kill(path: Path, count: int = count, calls: list[Path] = calls) -> None:
            if len(calls) == count:
                raise Killed
            calls.append(path)
            real(path)

        monkeypatch.setattr(removal, "_remove", kill)
        try:
            remove_run(copy)
        except Killed:
            has_checkpoint = any((copy / FOLDER).glob("step_*"))
            assert records <= names(copy) if has_checkpoint else is_incomplete(copy), count
        else:
            break
        monkeypatch.setattr(removal, "_remove", real)
        remove_run(copy)
        assert names(copy) == set(OWN)
    assert count > 15, "killed before each removal"


@pytest.mark.parametrize("resume", [None, "auto", "no"])
def test_a_start_from_scratch_removes_what_an_interrupted_removal_has_left(run: Path, resume: str | None) -> None:
    """A run that was stopped before its first checkpoint keeps its records, which tell why, unless --resume=no."""
    (run / "summary.json").unlink()
    shutil.rmtree(run / FOLDER)
    before = names(run)
    evaluations = {name for name in before if name.endswith(".npz")}
    if resume != "no":
        assert begin_run(run, resume, Start({}, None), ALONE) == []
        assert names(run) == before - evaluations
        (run / "config.yaml").unlink()
    (line,) = begin_run(run, resume, Start({}, None), ALONE)
    assert line.startswith("Removed the earlier run: ")
    assert names(run) == {name for name in OWN if not name.startswith(FOLDER)}


def test_a_directory_with_the_name_of_a_file_is_refused_before_anything_is_removed(run: Path) -> None:
    (run / "summary.json").unlink()
    (run / "summary.json").mkdir()
    before = names(run) - {"checkpoints/.step_00000009.12.partial/weights.pt"}
    with pytest.raises(
        UserError, match=r"^cannot remove the earlier run in .*: Is a directory; remove it by hand, or "
    ):
        remove_run(run)
    assert names(run) == before
