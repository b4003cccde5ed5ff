"""Evaluation during training, which does not change the training, and baselines at its end."""

import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from processes import run_ranks, wait_until
from reference_samples import ALONE, cubes, loader_of
from sample_results import SIMULATION, draw_nothing
from trainings import assert_equal, directory

import train
from analysis.evaluation import volume
from analysis.evaluation.baselines import volume_losses
from analysis.evaluation.results import Results, load
from analysis.lyman_alpha.forest import FluxStatistics, KnownFlux
from networks import build_loss
from utils.config.channels import Channel, Channels, known_channels
from utils.data.loaders.threaded import ThreadedCropLoader
from utils.data.plan import SamplePlan
from utils.distributed.signals import StopSignals
from utils.distributed.world import World
from utils.run.checkpoint import read_weights
from utils.run.directory import RunDirectory
from utils.run.state import FitResult
from utils.volumes.hdf5 import open_volume

EVERY_EPOCH = "--set=evaluation.every_epochs=1"


def run(flags: list[str], folder: Path, *more: str) -> Path:
    train.main(["--config=test", *flags, f"--set=expdir={folder}", *more])
    return directory(folder)


def history(run: Path) -> list[Results]:
    return [load(path) for path in sorted((run / "evaluation").glob("step_*.npz"))]


def epochs_of(run: Path) -> list[int]:
    return [results.metadata["epoch"] for results in history(run)]


def assert_same_network(*runs: Path) -> None:
    assert_equal(*(read_weights(run)["network"] for run in runs))


KNOWN: list[list[str]] = []  # the fields whose flux each evaluation of `trained` takes from the one before


@pytest.fixture(scope="module")
def trained(data_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an evaluation after each epoch, of a file that states its simulation; its pictures are empty."""
    begin, folder = FluxStatistics.__init__, tmp_path_factory.mktemp("runs")

    def record(self: FluxStatistics, setup: Any, slabs: Any, known: KnownFlux) -> None:
        KNOWN.append([*known.fields])
        begin(self, setup, slabs, known)

    stating = shutil.copy(data_flags[1].removeprefix("--set=val_path="), folder / "valid.h5")
    with h5py.File(stating, "r+") as file:
        file.attrs.update(SIMULATION | {"box_size_mpc_h": 3.2})
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        patch.setattr(FluxStatistics, "__init__", record)
        return run(data_flags, folder / "runs", EVERY_EPOCH, "--set=report_pictures=true", f"--set=val_path={stating}")


def test_each_evaluation_saves_results_scalars_and_pictures(trained: Path) -> None:
    """The flux of target and baseline is computed once."""
    assert KNOWN == [[], ["target", "FGPA"]]
    evaluations = history(trained)
    assert [(results.metadata["epoch"], results.metadata["step"]) for results in evaluations] == [(1, 8), (2, 16)]
    records = [record for record in RunDirectory(trained).read_metrics() if "Evaluation L1/all channels" in record]
    assert [record["step"] for record in records] == [8, 16]
    for record, results in zip(records, evaluations, strict=True):
        scalars = results.scalars()
        assert "Evaluation flux/P1D error, prediction" in scalars
        assert {name: record[name] for name in scalars} == pytest.approx(scalars)
    first, second = (results.flux.fields for results in evaluations)
    assert [name for name in first if first[name].scale == second[name].scale] == ["target", "FGPA"]
    events = b"".join(path.read_bytes() for path in (trained / "logs").glob("events.*"))
    assert all(f"Evaluation/{name}".encode() in events for name in results.pictures)
    report = (trained / "report.html").read_text()
    assert "Evaluation: test/1ranks/00, epoch 2, step 16" in report
    assert f"(l1, {next(r['Loss/valid'] for r in records if r['step'] == 16):.5f})" in report
    assert report.count("data:image/png;base64,") == 1 + len(results.pictures)


def test_evaluations_change_no_bit_of_the_training(trained: Path, data_flags: list[str], tmp_path: Path) -> None:
    plain = run(data_flags, tmp_path)
    assert not (plain / "evaluation").exists()
    assert not (plain / "report.html").exists()
    assert_same_network(trained, plain)


def test_a_run_stopped_during_an_evaluation_repeats_it(trained: Path, data_flags, tmp_path: Path, monkeypatch) -> None:
    draw_nothing(monkeypatch)
    evaluate, enter, calls, signals = volume.volume_statistics, StopSignals.__enter__, [], []
    monkeypatch.setattr(StopSignals, "__enter__", lambda self: (signals.append(self), enter(self))[1])

    def stop_in_the_second(*arguments: Any) -> Results:
        calls.append("begin")
        if calls.count("begin") == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: signals[-1].received, what=lambda: "the signal")
        results = evaluate(*arguments)
        calls.append("end")
        return results

    monkeypatch.setattr(volume, "volume_statistics", stop_in_the_second)
    with pytest.raises(SystemExit) as stop:
        run(data_flags, tmp_path, EVERY_EPOCH)
    assert (stop.value.code, calls) == (75, ["begin", "end", "begin"]), "it stops between two spectra"
    assert epochs_of(directory(tmp_path)) == [1]
    stopped = run(data_flags, tmp_path, EVERY_EPOCH)
    assert epochs_of(stopped) == [1, 2]
    assert_same_network(trained, stopped)
    records = RunDirectory(stopped).read_metrics()
    assert [record["step"] for record in records if "Evaluation L1/all channels" in record] == [8, 16]
    run(data_flags, tmp_path, "--resume=no", "--num_epochs=3", "--set=evaluation.every_epochs=2")
    assert epochs_of(stopped) == [2, 3], "a run from scratch removes the evaluations of the run that it replaces"


SAMPLES, GAS = 5, known_channels("targets", 5)
# Loss of each cell for differences d, and lambda_rho of the config.
CELLWISE: dict[str, tuple[Any, float]] = {"l1": (np.abs, 0.0), "mse with density term": (np.square, 1e-4)}


def baselines(world: World, path: str, name: str, *channels: tuple[Channels, Channels]) -> dict[str, float]:
    plan = SamplePlan(SAMPLES, cubes(16), 8, split="valid")
    volume = open_volume(path)
    keys = {"local_batch_size": 2, "num_data_workers": 1}
    loader = loader_of(ThreadedCropLoader, [volume], plan, world.rank, world.size, **keys)
    # Channel weights have no effect on a validation.
    loss = build_loss(name.split()[0], lambda_rho=CELLWISE[name][1], density_log_scale=14.0, weights=range(1, 6))
    return volume_losses(loader, loss, world, *channels)


@pytest.mark.parametrize("name", CELLWISE)
def test_baselines_agree_with_numpy_on_one_rank_and_on_two(name: str, tmp_path: Path, volume_file) -> None:
    """The second of two ranks has fewer crops than the first."""
    path = str(volume_file(tmp_path / "box.h5"))
    volume, plan = open_volume(path), SamplePlan(SAMPLES, cubes(16), 8, split="valid").epoch(0)
    crops = [tuple(slice(int(start), int(start) + 8) for start in origin) for origin in plan.origins]
    inputs = np.stack([volume.inputs[(slice(None), *crop)] for crop in crops]).astype(np.float64)
    targets = np.stack([volume.targets[(slice(None), *crop)] for crop in crops]).astype(np.float64)
    cellwise, lambda_rho = CELLWISE[name]

    def loss(channel: int, outputs: np.ndarray) -> float:
        right = targets[:, channel]
        density = np.abs(np.exp(14 * outputs) - np.exp(14 * right)).mean() if channel == 0 and lambda_rho else 0.0
        return float(cellwise(outputs - right).mean() + 5 * lambda_rho * density)

    candidates = [[loss(channel, value) for value in np.linspace(-1.5, 1.5, 3001)] for channel in range(5)]
    constants = np.min(candidates, axis=1)
    alone = baselines(ALONE, path, name)
    assert alone["best constant per channel"] == pytest.approx(constants.mean(), rel=1e-4)
    copy = [*(loss(channel, inputs[:, channel]) for channel in range(4)), constants[4]]
    assert alone["copying density and velocities"] == pytest.approx(np.mean(copy), rel=1e-4)
    if name == "l1":
        one = constants.mean() + (copy[0] - constants[0]) / 5
        density = known_channels("inputs", 4)[:1] + [Channel(f"other {place}") for place in range(3)]
        assert baselines(ALONE, path, name, (density, GAS))["copying the density"] == pytest.approx(one, rel=1e-4)
        for rank in run_ranks(baselines, 2, path, name):
            assert rank == pytest.approx(alone, rel=1e-6)


def test_copying_takes_what_inputs_and_targets_share_at_any_place(tmp_path: Path, volume_file) -> None:
    """In the transform of the target; nothing is copied if they share nothing."""
    path, dark = str(volume_file(tmp_path / "box.h5")), known_channels("inputs", 4)
    field = [Channel(f"B {axis}", component=f"field {axis}") for axis in "xyz"]
    both = "copying density and velocities"
    for inputs, targets, *expected in (
        (dark, GAS, both),
        (dark[::-1], GAS[::-1], "copying velocities and density"),
        ([*dark[1:], field[0]], GAS, "copying the velocity"),
        ([dark[0], *field], [GAS[0], GAS[4], *field], "copying density and field"),
        (known_channels("inputs", 4, vectors=[]), GAS, "copying the input"),
        ([*field, Channel("y")], GAS),
    ):
        assert [*baselines(ALONE, path, "l1", (inputs, targets))] == ["best constant per channel", *expected]
    other = [dataclasses.replace(channel, scale=2 * channel.scale) for channel in dark]
    losses = [baselines(ALONE, path, "l1", (inputs, GAS))[both] for inputs in (dark, other)]
    assert losses[0] != pytest.approx(losses[1], rel=0.05)


def test_the_result_table_names_what_the_trained_network_is_worse_than() -> None:
    tables = [FitResult(400, 0.2, loss, loss, 50.0, 65.0).table({"a": 0.2, "copy": 0.04}) for loss in (0.05, 0.01)]
    assert "the trained network is worse than: copy; train longer" in "\n".join(tables[0])
    assert "worse" not in "\n".join(tables[1])
