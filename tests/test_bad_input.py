"""Invalid input ends with one error line and exit code 2 and writes nothing; valid input writes a run's records."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch
import yaml
from log_lines import messages, other_lines
from processes import TOP, rank_variables
from volume_files import write_volume

import train
from networks import build_network
from utils import cli, data, errors
from utils.config import Config, load
from utils.data.loaders.base import sample_plan
from utils.optim.schedules import build_schedule
from utils.steps import build
from utils.training.checkpoint import load_newest, read_weights
from utils.training.checkpoint_writer import BackgroundWriter
from utils.training.state import TrainState


def check_error(stderr: str, *says: str) -> str:
    """Asserts that stderr has one error line, which contains all of `says`; returns it."""
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    for part in says:
        assert part in lines[0]
    return lines[0]


def small_config(overrides: dict[str, Any] | None = None) -> Config:
    return load(str(TOP / "config" / "UNet.yaml"), "test", overrides)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], Any]:
    """fails(flags): the output of a training of config 'test' that must end with exit code 2."""
    monkeypatch.chdir(TOP)

    def run(flags: list[str]) -> Any:
        with pytest.raises(SystemExit) as stop:
            train.main(["--config=test", *flags])
        assert stop.value.code == 2
        return capsys.readouterr()

    return run


@pytest.fixture
def refuse(tmp_path: Path, data_flags: list[str], fails: Callable[[list[str]], Any]) -> Callable[..., None]:
    """refuse(flags, *says): training and preflight of config 'test' must refuse these flags in one line."""

    def check(flags: list[str], *says: str, preflight: bool = True) -> None:
        expdir = tmp_path / "runs"
        for preflight_flag in ([], ["--preflight"]) if preflight else ([],):
            output = fails([*data_flags, f"--set=expdir={expdir}", *flags, *preflight_flag])
            if preflight_flag:
                assert all(line.startswith("preflight: ") for line in output.out.splitlines())
                assert "all checks passed" not in output.out
            else:
                assert output.out == ""
            line = check_error(output.err, *says)
            assert other_lines(output.err) == [line], "stderr contains only the error line and log lines"
            assert not expdir.exists(), "a run directory was created"

    return check


# --- flags and config files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config=shrt"], ("unknown config shrt in ./config/UNet.yaml", "did you mean short?")),
        (["--yaml_config=/no.yaml"], ("cannot read /no.yaml", "--yaml_config")),
        (["--set=num_epoch=3"], ("unknown key num_epoch; did you mean num_epochs?",)),
        (["--num_epochs=-1"], ("num_epochs must be greater than or equal to 1, got -1",)),
        (["--set=data_size=6"], ("data_size 6 is not a multiple of 4",)),
        (["--set=Nsamples=7"], ("Nsamples 7 is less than global_batch_size 8",)),
        (["--data_loader_config=low_mem"], ("low_mem; known: lowmem, inmem, ", "did you mean lowmem?")),
        (["--data_loader_config=dali-lowmem", "--set=train_path_npy_data=None"], ("train_path_npy_data is not set",)),
        (["--set=network.name=unett"], ("network.name", "unett; known: unet, smooth_unet; did you mean")),
        (["--set=train_path=data/demo_none.h5"], ("data/demo_none.h5", "run make demo")),
        (["--set=val_path=/no/val.h5"], ("/no/val.h5", "set val_path")),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_invalid_flag_is_refused_in_one_line(
    refuse: Callable[..., None], flags: list[str], says: tuple[str, ...]
) -> None:
    if "--data_loader_config=dali-lowmem" in flags:
        pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    refuse(flags, *says)


def test_without_the_data_of_the_defaults_the_demo_is_named(
    fails: Callable[[list[str]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """python train.py without arguments reads /data."""
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/data") and exists(path))
    check_error(fails(["--set=train_path=/data/train.h5"]).err, "/data/train.h5", "run make demo", "--config=demo")


def test_a_nan_before_training_is_not_blamed_on_the_learning_rate(
    data_flags: list[str], tmp_path: Path, fails: Callable[[list[str]], Any]
) -> None:
    flags = [f"--set=expdir={tmp_path}", "--set=weight_init.conv_scale=1e30"]
    line = check_error(fails([*data_flags, *flags]).err, "is nan after step 0, the untrained network", "weight_init")
    assert "learning" not in line


def test_invalid_environment_is_refused_in_one_line(
    refuse: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incomplete rank variables, no CUDA device, a file in place of a directory, no benchmark settings, full memory."""
    for rank in ("0", "1"):  # each rank reports it, because rank 0 may not exist
        with monkeypatch.context() as patched:
            patched.setenv("RANK", rank)
            refuse([], "LOCAL_RANK, WORLD_SIZE missing", "unset RANK")
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        # The preflight may run on a login node without the device.
        refuse(["--set=device=cuda"], "device is cuda, but PyTorch finds no CUDA device; use --set", preflight=False)
    (tmp_path / "file").write_text("precious")  # root ignores permissions
    refuse([f"--set=expdir={tmp_path / 'file' / 'runs'}"], "cannot write to the run directory", "--set expdir=DIR")
    assert (tmp_path / "file").read_text() == "precious"
    with monkeypatch.context() as patched:
        patched.setenv("BENCHY_CONFIG_FILE", str(tmp_path / "none.yaml"))
        refuse(["--enable_benchy"], f"{tmp_path / 'none.yaml'}: No such file")

    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of …")

    monkeypatch.setattr(build, "step", fill)
    refuse([], "no device memory left (CUDA out of memory); lower local_batch_size", preflight=False)


# --- data files ------------------------------------------------------------------------------------------------------


def snapshot(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["native_fields/baryon_density"] = np.ones((16, 16, 16), np.float32)


def truncated(path: Path) -> None:
    write_volume(path)
    path.write_bytes(path.read_bytes()[:-1000])


def physical(path: Path) -> None:
    with h5py.File(write_volume(path), "r+") as file:
        file["Hydro"][1:4] *= 1000  # km/s


def all_zero(path: Path) -> None:
    """A fixed bug: the run ended with a ZeroDivisionError after its last epoch."""
    with h5py.File(write_volume(path), "r+") as file:
        file["Hydro"][...] = 0


def all_nan(path: Path) -> None:
    with h5py.File(write_volume(path), "r+") as file:
        file["Hydro"][2] = np.nan


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (physical, "Hydro[1] holds physical values (up to "),
        (all_nan, "Hydro[2, 0, 0, 0] is nan; correct or remove it"),
        (all_zero, "Hydro is 0 everywhere; write its values"),
        (truncated, "the file is truncated"),
        (snapshot, "bad.h5 is a snapshot of Nyx; import it with python -m utils.data.import_volume --input "),
        (lambda path: write_volume(path, box=24), "has 24 cells per side, but box_size is 16; set box_size"),
        (lambda path: write_volume(path, box=(16, 7, 16)), "crops of data_size 8 do not fit; lower"),
    ],
)
def test_invalid_data_file_is_refused_in_one_line_with_its_name(
    refuse: Callable[..., None], tmp_path: Path, make: Callable[[Path], Any], says: str
) -> None:
    path = tmp_path / "bad.h5"
    make(path)
    before = path.read_bytes()
    for key in ("train_path", "val_path"):
        refuse([f"--set={key}={path}"], str(path), says)
    assert path.read_bytes() == before


def test_invalid_input_does_not_change_the_files_of_an_earlier_run(
    data_flags: list[str], tmp_path: Path, fails: Callable[[list[str]], Any]
) -> None:
    directory = tmp_path / "test" / "1ranks" / "00"
    directory.mkdir(parents=True)
    state = {"network": {"weight": torch.zeros(3)}, "optimizer": {}, "scaler": {}, "random": []}
    BackgroundWriter(directory / "checkpoints", small_config(), {}).save(state, TrainState(step=1), wait=True)
    for name in ("out.log", "config.yaml", "metrics.jsonl"):
        (directory / name).write_text(f"precious {name}")

    def contents() -> dict[Path, tuple[bytes, int]]:
        files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = contents()
    assert len(before) == 6
    all_nan(tmp_path / "nan.h5")
    for flag in (f"val_path={tmp_path / 'nan.h5'}", "train_path=/nowhere.h5", "num_epoch=3", "data_size=6"):
        fails([*data_flags, f"--set=expdir={tmp_path}", f"--set={flag}", "--resume=no"])
    assert contents() == before


# --- NaN in the data -------------------------------------------------------------------------------------------------


def volume_with_a_nan(path: Path) -> int:
    """Writes a volume with one NaN; returns the first step that reads it, 5 to 7, counted from 1."""
    config = small_config()
    origins, batch = sample_plan(config, "train", [(16, 16, 16)]).epoch(0).origins, config.global_batch_size
    for cell in np.ndindex(16, 16, 16):
        inside = ((origins <= cell) & (np.array(cell) < origins + config.data_size)).all(axis=1)
        step = int(inside.argmax()) // batch + 1
        if inside.any() and 4 < step < 8:
            with h5py.File(write_volume(path, seed=1), "r+") as file:
                file["Nbody"][(2, *cell)] = np.nan
            return step
    raise AssertionError("no such cell")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the data finds nothing, as its sample of a large file may miss a NaN."""
    monkeypatch.setattr(data, "check_data", lambda *_: None)


@pytest.mark.usefixtures("unchecked")
def test_training_skips_updates_with_nan_up_to_a_limit(
    data_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Callable[[list[str]], Any]
) -> None:
    """The run continues to its end, or stops after max_consecutive_skips."""
    path = tmp_path / "nan.h5"
    step = volume_with_a_nan(path)
    train.main(["--config=test", *data_flags, f"--set=train_path={path}", f"--set=expdir={tmp_path / 'runs'}"])
    description = f"tep {step}: loss nan on rank 0, gradient norm nan, learning rate "
    warnings = messages(capsys.readouterr().err, "WARNING")
    assert warnings[0].startswith(f"S{description}")
    assert warnings[-1].endswith(f"update skipped ({len(warnings)} so far)")
    assert len(warnings) < 8
    directory = tmp_path / "runs/test/1ranks/00"
    saved = load_newest(directory / "checkpoints")
    assert saved is not None
    assert (saved.state.step, saved.state.skipped) == (16, len(warnings))
    assert all(tensor.isfinite().all() for tensor in saved.weights["network"].values())
    table = (directory / "out.log").read_text().partition("Result:")[2]
    assert re.search(rf"^  skipped updates +{len(warnings)}   see the warnings", table, re.MULTILINE)
    # With a limit of one step:
    flags = [f"--set=train_path={path}", f"--set=expdir={tmp_path / 'stopped'}", "--set=checkpoint.every_steps=1"]
    output = fails([*data_flags, *flags, "--set=max_consecutive_skips=1"])
    check_error(output.err, "training stopped: 1 updates in a row were skipped", description, "--preflight")
    saved = load_newest(tmp_path / "stopped/test/1ranks/00/checkpoints")
    assert saved is not None
    assert saved.state.step == step - 1


@pytest.mark.usefixtures("unchecked")
def test_a_run_in_which_every_update_was_skipped_is_no_success(
    data_flags: list[str], tmp_path: Path, fails: Callable[[list[str]], Any]
) -> None:
    """With fewer steps than max_consecutive_skips it once ended with the result of a "trained network"."""
    all_nan(tmp_path / "nan.h5")
    flags = [*data_flags, f"--set=train_path={tmp_path / 'nan.h5'}", f"--set=expdir={tmp_path}", "--num_epochs=1"]
    for _ in range(2):  # the same command says so again
        output = fails(flags).err
        check_error(output, "training failed: all 8 updates were skipped", "check the data with --preflight")
        assert "Result:" not in output
    assert not (tmp_path / "test/1ranks/00/summary.json").exists()


# --- several ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", ["0", "1"])
def test_invalid_config_is_reported_only_by_rank_0(
    data_flags: list[str], fails: Callable[[list[str]], Any], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """The error occurs before the ranks are connected."""
    monkeypatch.setattr(errors, "GRACE_SECONDS", 0.0)
    for name, value in rank_variables(int(rank), 2, 1).items():
        monkeypatch.setenv(name, value)
    output = fails([*data_flags, "--set=num_epoch=3"]).err
    if rank == "0":
        check_error(output, "unknown key num_epoch; did you mean num_epochs?")
    else:
        assert output == ""


# --- valid input -----------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """A training run of config 'test'."""

    flags: list[str]
    stdout: str
    stderr: str
    directory: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Trained:
    expdir = tmp_path_factory.mktemp("trained")
    flags = ["--config=test", *data_flags, f"--set=expdir={expdir}", "--run_num=first", "--set=use_cache=None"]
    flags += ["--set=report_pictures=true"]
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(TOP)
        patched.setattr(sys, "argv", ["train.py", *flags])
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            train.main()
    return Trained(flags, stdout.getvalue(), stderr.getvalue(), expdir / "test" / "1ranks" / "first")


def test_training_logs_the_lines_of_the_tutorial(trained: Trained) -> None:
    log = (trained.directory / "out.log").read_text()
    lines = messages(log)
    number = r"\d+(\.\d+)?(e-\d+)?"
    loss = r"  Avg train loss=\d\.\d{6}"
    validation = rf"  Avg val loss=\d\.\d{{6}}  Total validation time: {number} sec"
    expected = ["Before training:", validation]
    for epoch in (1, 2):
        line = rf"Time taken for epoch {epoch} is {number} sec, avg {number} samples/sec"
        expected += [line, loss, validation]
    expected.append("DONE ---- rank 0")
    logged = [line for line in lines if re.match("Time taken|  Avg|Before|DONE", line)]
    assert len(logged) == len(expected)
    for message, pattern in zip(logged, expected, strict=True):
        assert re.fullmatch(pattern, message)
        assert message in trained.stderr, "the terminal shows the lines of the log file"
    assert lines[-1] == "DONE ---- rank 0"
    dump = next(index for index, line in enumerate(lines) if line.startswith("Config test"))
    assert dump < lines.index(logged[0])
    assert "  num_epochs: 2 (default 10)" in log
    assert "Traceback" not in trained.stderr
    assert trained.stdout == ""


def test_training_records_the_curves_of_the_tutorial(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags, directory = trained.flags, trained.directory
    events = EventAccumulator(str(directory / "logs"))
    events.Reload()

    def curve(name: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(name)}

    schedule = build_schedule(small_config(cli.parse(flags).overrides).for_world(1))
    assert list(curve("Loss/train")) == list(curve("Loss/valid")) == [0, 8, 16]
    assert curve("Learning Rate") == pytest.approx({step: schedule(max(step - 1, 0)) for step in (0, 8, 16)})
    assert list(curve("Avg iters per sec")) == [8, 16]
    log = (directory / "out.log").read_text()
    for name, word in (("Loss/train", "train"), ("Loss/valid", "val")):
        logged = [float(value) for value in re.findall(rf"  Avg {word} loss=(\S+)", log)]
        assert list(curve(name).values())[-len(logged) :] == pytest.approx(logged, abs=1e-6)
    hparams = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"lr_schedule.start_lr" in hparams
    assert b"optimizer.eps" not in hparams, "it has its default value"
    assert b"train_path" not in hparams, "it changes no result"
    assert events.Scalars("hparam/final loss")[0].value == pytest.approx(curve("Loss/valid")[16])
    assert events.Tags()["images"] == ["Slices", "Slices, largest error"]


def test_training_records_its_config_and_provenance(trained: Trained) -> None:
    flags, directory = trained.flags, trained.directory
    config = load(str(directory / "config.yaml"), "test")
    assert config == small_config(cli.parse(flags).overrides)
    assert list(yaml.safe_load((directory / "config.yaml").read_text())) == ["test"]
    record = json.loads((directory / "provenance.json").read_text())
    assert record["command"] == ["train.py", *flags]
    assert record["hostnames"] == [socket.gethostname()]
    assert record["world_size"] == 1
    assert record["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"unknown|[0-9a-f]{40}(-dirty)?", record["git_commit"])


def test_training_writes_weights_and_pictures(trained: Trained) -> None:
    directory = trained.directory
    assert sorted(os.listdir(directory / "checkpoints")) == ["best", "step_00000008", "step_00000016"]
    content = read_weights(directory / "checkpoints" / "step_00000016")
    assert (content["epoch"], content["step"]) == (2, 16)
    network = build_network("unet", 8, width=4, scales=2)
    network.load_state_dict(content["network"])
    assert all(torch.isfinite(parameter).all() for parameter in network.parameters())
    for name in ("loss_curves.png", "slices.png"):
        data = (directory / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        assert len(data) > 5000
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert content["final_loss"] == metrics[-1]["Loss/valid"]
    losses = {record["step"]: record["Loss/valid"] for record in metrics if "Loss/valid" in record}
    best = min((8, 16), key=lambda step: losses[step])
    assert read_weights(directory / "checkpoints" / "best")["step"] == best
