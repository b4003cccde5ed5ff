"""Invalid input ends with one error line and exit code 2 and writes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from log_lines import messages, other_lines
from processes import TOP, rank_variables
from volume_files import write_volume

import train
from utils import data, errors
from utils.config import Config, load
from utils.data.loaders.base import sample_plan
from utils.steps import build
from utils.training.checkpoint import load_newest
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
    """fails(flags): the output of a run of config 'test' that must end with exit code 2."""
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
        (["--set=network.name=unett"], ("network.name", "unett; known: unet; did you mean")),
        (["--set=train_path=data/demo_none.h5"], ("data/demo_none.h5", "run make demo")),
        (["--set=val_path=/no/val.h5"], ("/no/val.h5", "set val_path")),
        (["--set=network.name=my_net"], ("unknown network my_net", "my_module.MyNetwork")),
        (["--set=optimizer=adam"], ("did you mean optimizer.name=adam?",)),
        (["--set=learning_rate=1"], ("did you mean lr_schedule.start_lr?",)),
        (["--set=num_epochs=3", "--num_epoch=3"], ("did you mean --num_epochs?",)),
        (["--set", "num_epochs", "3"], ("did you mean --set num_epochs=3?",)),
        (["mine.yaml"], ("did you mean --yaml_config mine.yaml?",)),
        (["--enable_amp", "--amp_mode=none"], ("--enable_amp and --amp_mode none contradict each other",)),
        (["--local_batch_size=4", "--set=global_batch_size=8"], ("both set the batch",)),
        (["--set=local_batch_size=4", "--set=global_batch_size=8"], ("both set the batch",)),
        (["--set=N_in_channels=3"], ("there is no channel 3", "[] for none")),
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


def complex_values(path: Path) -> None:
    """A fixed bug: the run trained on the real parts, and succeeded."""
    write_volume(path, dtype="c8")


def channels_last(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["Nbody"], file["Hydro"] = np.zeros((16, 16, 16, 4), np.float32), np.zeros((16, 16, 16, 5), np.float32)


def without_gas(path: Path) -> None:
    with h5py.File(write_volume(path), "r+") as file:
        del file["Hydro"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (complex_values, "Nbody holds complex64, expected real numbers; write it as float32"),
        (channels_last, "channels come first: write numpy.moveaxis(values, -1, 0)"),
        (without_gas, "has no dataset Hydro; it contains Nbody; choose another file, or set dataset_names"),
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


def test_two_boxes_of_another_size_are_refused_with_their_sizes(refuse: Callable[..., None], tmp_path: Path) -> None:
    """Fixed: the second number of the suggested box_size was that of the config."""
    paths = [write_volume(tmp_path / f"{seed}.h5", box=24, seed=seed) for seed in (1, 2)]
    refuse([f"--set=train_path={paths[0]}", f"--set=val_path={paths[1]}"], "set box_size to [24, 24]")
    path = write_volume(tmp_path / "three.h5", channels=(3, 5))
    refuse([f"--set=val_path={path}"], str(path), "give files with the same channels")


def test_a_box_of_one_crop_is_trained_with_a_warning(
    data_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_volume(tmp_path / "small.h5", box=8)
    flags = [*data_flags, f"--set=train_path={path}", "--set=box_size=[8, 16]", "--preflight"]
    train.main([f"--yaml_config={TOP / 'config' / 'UNet.yaml'}", "--config=test", *flags])
    assert "data_size 8 leaves a single crop; lower data_size" in capsys.readouterr().out


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
