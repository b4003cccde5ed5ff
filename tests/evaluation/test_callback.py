"""Evaluation during training: its outputs and its time budget, and training continues as if there were none."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from processes import wait_until

import train
from utils.distributed.signals import StopSignals
from utils.evaluation import callback as during
from utils.evaluation import figures
from utils.evaluation.statistics import VolumeStatistics
from utils.runs.logger import read_records
from utils.training.checkpoint import read_weights

EVERY_EPOCH = ["--set=evaluation.every_epochs=1", "--set=evaluation.budget=1.0"]


def run(flags: list[str], folder: Path, *more: str) -> Path:
    train.main(["--config=test", *flags, f"--set=expdir={folder}", *more])
    return folder / "test/1GPU/00"


def refused(capfd: pytest.CaptureFixture[str], flags: list[str], folder: Path, *more: str) -> str:
    """The line that a refused training prints last."""
    with pytest.raises(SystemExit) as stop:
        run(flags, folder, *more)
    assert stop.value.code == 2
    return capfd.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def trained(data_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs with an evaluation after each; the last one is always made, however long it takes.

    Its figures are empty: tests/evaluation/test_figures.py draws the real ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "PICTURES", dict.fromkeys(figures.PICTURES, lambda found: Figure(figsize=(1, 1))))
        patch.setattr(figures, "encoded", lambda figure: b"PNG")
        patch.setattr(figures, "encoded_movie", lambda history: b"GIF8")
        return run(data_flags, tmp_path_factory.mktemp("runs"), *EVERY_EPOCH, "--set=report_pictures=true")


def test_each_epoch_leaves_an_evaluation_its_scalars_and_pictures(trained: Path, tmp_path: Path) -> None:
    found = during.history(trained / during.FOLDER)
    assert [(each.about["epoch"], each.about["step"]) for each in found] == [(1, 8), (2, 16)]
    records = [record for record in read_records(trained / "metrics.jsonl") if "Evaluation/L1" in record]
    assert [record["step"] for record in records] == [8, 16]
    for record, each in zip(records, found, strict=True):
        assert {name: record[name] for name in each.scalars()} == pytest.approx(each.scalars())
        assert any(name.startswith("Evaluation/r at k = ") for name in record)
    events = b"".join(path.read_bytes() for path in (trained / "logs").glob("events.*"))
    for name in ("slices", "spectra", "distributions", "plane"):
        assert f"Evaluation/{name}".encode() in events
    report = (trained / "report.html").read_text()
    assert report.startswith("<!DOCTYPE html>")
    assert report.count("data:image/png;base64,") == 7
    assert (trained / "evaluation.gif").read_bytes()[:4] == b"GIF8"
    assert "gas density" in (trained / "out.log").read_text()
    whole = trained / during.FOLDER / "step_00000008.npz"
    (tmp_path / whole.name).write_bytes(whole.read_bytes())
    (tmp_path / "step_00000016.npz").write_bytes(whole.read_bytes()[:1000])
    assert [each.about["step"] for each in during.history(tmp_path)] == [8], "a damaged file is skipped"


def test_training_ends_with_the_same_bits_as_without_evaluation(
    trained: Path, data_flags: list[str], tmp_path: Path
) -> None:
    plain = run(data_flags, tmp_path)
    assert not (plain / during.FOLDER).exists()
    assert not (plain / "report.html").exists()
    weights = [read_weights(path)["network"] for path in (trained, plain)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_a_training_stopped_during_an_evaluation_makes_it_when_it_resumes(
    trained: Path, data_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(during.VolumeEvaluation, "_draw", lambda *_: None)
    add, enter, calls, signals = VolumeStatistics.add, StopSignals.__enter__, [], []

    def remember(self: StopSignals) -> StopSignals:
        signals.append(self)
        return enter(self)

    def stop_in_the_second(self: VolumeStatistics, *arguments: Any) -> None:
        calls.append(1)
        add(self, *arguments)
        if len(calls) == 6:  # slabs; an evaluation of the box has four
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: signals[-1].received, what=lambda: "the signal")

    monkeypatch.setattr(StopSignals, "__enter__", remember)
    monkeypatch.setattr(VolumeStatistics, "add", stop_in_the_second)
    with pytest.raises(SystemExit) as stop:
        run(data_flags, tmp_path, *EVERY_EPOCH)
    assert stop.value.code == 75
    directory = tmp_path / "test/1GPU/00"
    folder = directory / during.FOLDER
    assert [each.about["epoch"] for each in during.history(folder)] == [1]
    run(data_flags, tmp_path, *EVERY_EPOCH)
    assert [each.about["epoch"] for each in during.history(folder)] == [1, 2]
    weights = [read_weights(path)["network"] for path in (trained, directory)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    records = read_records(directory / "metrics.jsonl")
    assert [record["step"] for record in records if "Evaluation/L1" in record] == [8, 16]
    run(data_flags, tmp_path, "--resume=no", "--num_epochs=1", *EVERY_EPOCH)
    names = [path.name for path in folder.iterdir()]
    assert names == ["step_00000008.npz"], "a run from scratch removes the evaluations of the one it replaces"


def test_evaluations_beyond_the_time_budget_are_put_off_except_the_first_and_the_last(
    data_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(during.VolumeEvaluation, "_draw", lambda *_: None)
    flags = ["--set=evaluation.every_epochs=1", "--set=evaluation.budget=0.000000001", "--num_epochs=3"]
    directory = run(data_flags, tmp_path, *flags)
    assert [each.about["epoch"] for each in during.history(directory / during.FOLDER)] == [1, 3]
    assert "Evaluation put off: with it they would take " in (directory / "out.log").read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--data_loader_config=synthetic"],
            "evaluation.every_epochs: data_loader_config synthetic reads no volumes",
        ),
        (["--set=evaluation.tile=6"], "evaluation.tile 6 is not a multiple of 4"),
        (
            ["--set=evaluation.tile=8", "--set=evaluation.step=9", "--preflight"],
            "error: evaluation.tile, evaluation.step: step 9 does not suit a tile of 8 cells",
        ),
    ],
)
def test_an_evaluation_that_cannot_work_is_refused_before_anything_is_written(
    flags: list[str], says: str, data_flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    line = refused(capfd, data_flags, tmp_path / "runs", "--set=evaluation.every_epochs=1", *flags)
    assert says in line
    assert "--tile" not in line, "training has no such flag"
    assert not (tmp_path / "runs").exists()


def test_a_device_that_is_full_during_an_evaluation_is_reported_with_a_remedy(
    data_flags: list[str], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller batch, the remedy for a training, would not help."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")

    monkeypatch.setattr(VolumeStatistics, "add", full)
    with pytest.raises(SystemExit) as stop:
        run(data_flags, tmp_path, "--set=evaluation.every_epochs=1")
    assert stop.value.code != 0
    line = "no device memory left (CUDA out of memory); take more ranks, a smaller evaluation.tile, or go on with"
    assert line in capfd.readouterr().err


def test_a_training_without_volumes_is_not_changed_by_a_refused_evaluation(tmp_path: Path, capfd: Any) -> None:
    """The refusal once came so late that the run's config.yaml had already been replaced."""
    pytest.importorskip("sklearn")
    yaml = str(Path(train.__file__).parent / "config" / "classification.yaml")
    flags = [f"--yaml_config={yaml}", "--set=device=cpu", "--set=Nsamples=64", "--set=Nsamples_val=32"]
    train.main([*flags, "--config=digits_naive", f"--set=expdir={tmp_path}", "--num_epochs=1"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capfd.readouterr()
    line = refused(capfd, flags, tmp_path, "--config=digits_naive", "--set=evaluation.every_epochs=1")
    assert "data_loader_config classification reads no volumes to paint" in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
