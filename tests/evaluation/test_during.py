"""Evaluation in the midst of training: what it leaves, what it may cost, and that training goes on as without it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_ranks

import train
from networks import build_network, initialise
from utils.channels import input_channels, target_channels
from utils.checkpoint import Position, read_weights
from utils.config import Transform
from utils.data.volumes import open_volume
from utils.distributed import Launch, World
from utils.evaluation import during
from utils.evaluation.results import Results
from utils.evaluation.statistics import Evaluation
from utils.logs import SilentLogs, read_records
from utils.prediction import Painter
from utils.tiling import tile_volume

ALONE = World(Launch("test"), torch.device("cpu"))


def run(flags: list[str], folder: Path, *more: str) -> Path:
    train.main(["--config=test", *flags, f"--set=expdir={folder}", *more])
    return folder / "test/1GPU/00"


@pytest.fixture(scope="module")
def trained(data_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs with an evaluation after each."""
    every = ["--set=evaluation.every_epochs=1", "--set=evaluation.budget=1.0"]
    # The second may take longer than the training has: it is the last one, which is always made.
    return run(data_flags, tmp_path_factory.mktemp("runs"), *every, "--set=report_pictures=true")


def test_each_epoch_leaves_an_evaluation_its_scalars_and_pictures(trained: Path) -> None:
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
    assert (trained / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert (trained / "evaluation.gif").read_bytes()[:4] == b"GIF8"
    assert "gas density" in (trained / "out.log").read_text()


def test_training_ends_with_the_same_bits_as_without_evaluation(
    trained: Path, data_flags: list[str], tmp_path: Path
) -> None:
    plain = run(data_flags, tmp_path)
    assert not (plain / during.FOLDER).exists()
    assert not (plain / "report.html").exists()
    weights = [read_weights(path)["network"] for path in (trained, plain)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_a_training_that_is_stopped_in_an_evaluation_makes_it_when_it_goes_on(
    trained: Path, data_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(during.BoxEvaluation, "_draw", lambda *_: None)
    every = ["--set=evaluation.every_epochs=1", "--set=evaluation.budget=1.0"]
    add, calls = Evaluation.add, []

    def stop_in_the_second(self: Evaluation, *arguments: Any) -> None:
        calls.append(1)
        add(self, *arguments)
        if len(calls) == 6:  # slabs; an evaluation of the box has four
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # for the thread that hears it

    monkeypatch.setattr(Evaluation, "add", stop_in_the_second)
    with pytest.raises(SystemExit) as stop:
        run(data_flags, tmp_path, *every)
    assert stop.value.code == 75
    directory = tmp_path / "test/1GPU/00"
    assert [each.about["epoch"] for each in during.history(directory / during.FOLDER)] == [1]
    run(data_flags, tmp_path, *every)
    assert [each.about["epoch"] for each in during.history(directory / during.FOLDER)] == [1, 2]
    weights = [read_weights(path)["network"] for path in (trained, directory)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    records = read_records(directory / "metrics.jsonl")
    assert [record["step"] for record in records if "Evaluation/L1" in record] == [8, 16]


def test_a_run_anew_forgets_evaluations_of_the_one_it_replaces(
    data_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ["--set=evaluation.every_epochs=1", "--set=evaluation.budget=1.0"]
    monkeypatch.setattr(during.BoxEvaluation, "_draw", lambda *_: None)
    folder = run(data_flags, tmp_path, *every) / during.FOLDER
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    run(data_flags, tmp_path, "--resume=no", "--num_epochs=1", *every)
    assert [path.name for path in folder.iterdir()] == ["step_00000008.npz"]
    assert (folder / "step_00000008.npz").stat().st_mtime_ns != before["step_00000008.npz"]


# --- the numbers ---------------------------------------------------------------------------------------------------


def judged(world: World, path: str) -> tuple[Results, dict[str, float]]:
    """An untrained network's prediction of a box."""
    volume = open_volume(path, (4, 5))
    network = build_network("unet", width=4, scales=2)
    initialise(network, torch.Generator().manual_seed(0), "default")
    network.eval()
    read, target = during.volume_planes(volume)
    shape = (volume.box,) * 3
    painter = Painter(torch.no_grad()(network), read, tile_volume(shape, 8), (4, 5), 4, world)
    transform = Transform()
    evaluation = Evaluation(target_channels(5, transform), input_channels(4, transform), shape, 0.5, world)
    found = during.judge(painter.slabs(), target, evaluation, {"epoch": 1}, world)
    whole = np.concatenate([slab.predicted.numpy().copy() for slab in painter.slabs()], axis=1)
    return found, {"L1": float(np.abs(whole - volume.targets).mean())}


def judged_scalars(world: World, path: str) -> dict[str, float]:
    return judged(world, path)[0].scalars()


def test_what_is_judged_is_the_painted_box(tmp_path: Path, volume_file: Any) -> None:
    found, by_hand = judged(ALONE, str(volume_file(tmp_path / "box.h5")))
    assert found.scalars()["Evaluation/L1"] == pytest.approx(by_hand["L1"], rel=1e-6)


def test_ranks_share_the_work_and_find_the_same(tmp_path: Path, volume_file: Any) -> None:
    path = str(volume_file(tmp_path / "box.h5"))
    alone = judged_scalars(ALONE, path)
    for rank in run_ranks(judged_scalars, 3, path):
        assert rank == pytest.approx(alone, rel=1e-4, abs=1e-6)


# --- the budget ----------------------------------------------------------------------------------------------------


class Lines(SilentLogs):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> during.BoxEvaluation:
    """One that finds nothing, in ten seconds; its log is `box.lines`."""
    clock = SimpleNamespace(now=0.0)

    def judge(*_: Any) -> Any:
        clock.now += 10.0
        return SimpleNamespace(scalars=lambda: {"Evaluation/L1": 1.0})

    monkeypatch.setattr(during.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(during, "judge", judge)
    monkeypatch.setattr(during, "in_words", lambda found: [])
    monkeypatch.setattr(during.BoxEvaluation, "_show", lambda *_: None)
    painter = SimpleNamespace(slabs=lambda: [], tiling=SimpleNamespace(count=8, about=lambda: "tiles"))
    options = {"every_epochs": 2, "budget": 0.1, "num_epochs": 9, "folder": tmp_path, "world": ALONE, "about": {}}
    return during.BoxEvaluation(painter, lambda a, b: np.zeros(1), lambda: None, logs=Lines(), **options)  # type: ignore[arg-type]


def evaluated(box: during.BoxEvaluation, seconds_an_epoch: float) -> list[int]:
    """The epochs of nine that were, each of so many seconds of training."""
    at, found = Position(), []
    for epoch in range(9):
        at.epoch = epoch
        if box.after_epoch(at, seconds_an_epoch * (epoch + 1) + at.evaluation_seconds, lambda: None):
            found.append(epoch + 1)
    return found


def test_every_so_many_epochs_and_the_last_one(box: during.BoxEvaluation) -> None:
    assert evaluated(box, 1000.0) == [2, 4, 6, 8, 9]


def test_what_would_exceed_the_budget_is_put_off(box: during.BoxEvaluation) -> None:
    """Ten seconds each, a tenth of the time: one in 100 s, so of epochs of 30 s the second is due after 200 s."""
    assert evaluated(box, 30.0) == [2, 8, 9]
    lines: list[str] = box._logs.lines  # type: ignore[attr-defined]
    assert sum("Evaluation put off: with it they would take 20.0 sec" in line for line in lines) == 2


# --- bad input -----------------------------------------------------------------------------------------------------


def test_a_loader_without_volumes_has_nothing_to_paint(data_flags: list[str], tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        run(data_flags, tmp_path, "--set=evaluation.every_epochs=1", "--data_loader_config=synthetic")
    assert stop.value.code == 2
    assert "evaluation.every_epochs: data_loader_config synthetic reads no volumes" in capfd.readouterr().err


def test_a_tile_that_the_network_cannot_halve_is_refused(data_flags: list[str], tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        run(data_flags, tmp_path, "--set=evaluation.every_epochs=1", "--set=evaluation.tile=6")
    assert stop.value.code == 2
    assert "evaluation.tile 6 is not a multiple of 4" in capfd.readouterr().err


@pytest.mark.parametrize("more", [["--preflight"], []], ids=["preflight", "training"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["tile=8", "step=9"], "error: evaluation.tile, evaluation.step: step 9 does not suit a tile of 8 cells"),
        (["tile=64"], "error: evaluation.tile, evaluation.step: the box has 16 cells a side, fewer than a tile's 64"),
    ],
)
def test_tiles_that_do_not_fit_are_found_before_anything_is_written(
    data_flags: list[str], tmp_path: Path, capfd: Any, flags: list[str], says: str, more: list[str]
) -> None:
    keys = [f"--set=evaluation.{flag}" for flag in ("every_epochs=1", *flags)]
    with pytest.raises(SystemExit) as stop:
        run(data_flags, tmp_path / "runs", *keys, *more)
    assert stop.value.code == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith(says)
    assert "--tile" not in line, "no flag of a training's"
    assert not (tmp_path / "runs").exists()


def test_a_device_that_is_full_in_an_evaluation_is_told_with_what_helps_there(
    data_flags: list[str], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller batch, which helps a training, would not."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")

    monkeypatch.setattr(Evaluation, "add", full)
    with pytest.raises(SystemExit) as stop:
        run(data_flags, tmp_path, "--set=evaluation.every_epochs=1")
    assert stop.value.code != 0
    line = "no device memory left (CUDA out of memory); take more ranks, a smaller evaluation.tile, or go on with"
    assert line in capfd.readouterr().err
    folder = run(data_flags, tmp_path, "--set=evaluation.every_epochs=0") / during.FOLDER
    assert not folder.exists()


def test_a_training_without_volumes_that_is_to_be_evaluated_is_left_as_it_was(tmp_path: Path, capfd: Any) -> None:
    """Told too late, its config.yaml was already one that cannot run."""
    yaml = str(Path(train.__file__).parent / "config" / "classification.yaml")
    flags = [f"--yaml_config={yaml}", "--config=digits_naive", f"--set=expdir={tmp_path}", "--set=device=cpu"]
    train.main([*flags, "--num_epochs=1"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        train.main([*flags, "--set=evaluation.every_epochs=1"])
    assert stop.value.code == 2
    assert "data_loader_config labelled reads no volumes to paint" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_cannot_be_read_is_left_out_of_the_history(trained: Path, tmp_path: Path) -> None:
    whole = trained / during.FOLDER / "step_00000008.npz"
    (tmp_path / whole.name).write_bytes(whole.read_bytes())
    (tmp_path / "step_00000016.npz").write_bytes(whole.read_bytes()[:1000])
    assert [each.about["step"] for each in during.history(tmp_path)] == [8]
