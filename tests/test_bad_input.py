"""The trainer from outside: bad input is one clear line and exit code 2, good input leaves its records."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml

import train
from networks import build_network
from utils import cli
from utils.checkpoint import Position, Saving, newest, read_weights
from utils.config import load
from utils.convert_to_npy import convert
from utils.data import sample_plan
from utils.schedule import build_schedule
from utils.trainer import Trainer

TOP = Path(__file__).parent.parent
LOG_LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - \S+ - [A-Z]+ - "


def check_error(stderr: str, *says: str) -> str:
    """Beside log lines, stderr holds the one line, which says all of `says`; returns it."""
    lines = [line for line in stderr.splitlines() if not re.match(LOG_LINE, line)]
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    for part in says:
        assert part in errors[0]
    return errors[0]


@pytest.fixture
def refuse(tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch):
    """refuse(flags, *says): config 'test' with these flags ends as bad input must; returns the error line."""
    monkeypatch.chdir(TOP)

    def run(flags: list[str], *says: str) -> str:
        expdir = tmp_path / "runs"
        with pytest.raises(SystemExit) as stop:
            train.main(["--config=test", *data_flags, f"--set=expdir={expdir}", *flags])
        assert stop.value.code == 2
        output = capsys.readouterr()
        assert output.out == ""
        line = check_error(output.err, *says)
        others = [text for text in output.err.splitlines() if not re.match(LOG_LINE, text)]
        assert others == [line], "nothing but the line and log lines"
        assert not expdir.exists(), "nothing is written"
        return line

    return run


# --- the config and the flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--config=shrt"], ["unknown config shrt", "known: base, short, ", "; did you mean short?"]),
        (["--config=zzz"], ["unknown config zzz", "known: base, short, "]),
        (["--yaml_config=/nowhere.yaml"], ["cannot read yaml_config /nowhere.yaml: No such file"]),
        (["--set=num_epoch=3"], ["unknown key num_epoch; did you mean num_epochs?"]),
        (["--set=lr_schedule.strat_lr=1e-3"], ["unknown key lr_schedule.strat_lr; did you mean start_lr?"]),
        (["--set=lr_shedule.start_lr=1e-3"], ["unknown key lr_shedule; did you mean lr_schedule?"]),
        (["--set=num_epochs.x=1"], ["num_epochs has no keys of its own, so num_epochs.x cannot be set"]),
        (["--set=num_epochs=three"], ["num_epochs: Input should be a valid integer, not 'three'"]),
        (["--set=num_epochs=1.5"], ["num_epochs: Input should be a valid integer, not 1.5"]),
        (["--set=enable_amp=yes"], ["enable_amp: Input should be a valid boolean, not 'yes'"]),
        (["--set=lr_schedule.start_lr=fast"], ["lr_schedule.start_lr: Input should be a valid number, not 'fast'"]),
        (["--set=num_epochs=0"], ["num_epochs: Input should be greater than or equal to 1, not 0"]),
        (["--num_epochs=-1"], ["num_epochs: Input should be greater than or equal to 1, not -1"]),
        (["--bucket_cap_mb=nan"], ["bucket_cap_mb: Input should be a finite number, not nan"]),
        (["--set=lr_schedule.start_lr=.nan"], ["lr_schedule.start_lr: Input should be a finite number, not nan"]),
        (["--set=weight_init.conv_bias=.nan"], ["weight_init.conv_bias: Input should be a finite number, not nan"]),
        (["--set=lr_schedule.start_lr=0"], ["lr_schedule.start_lr: Input should be greater than 0, not 0"]),
        (["--set=lr_schedule.scaling=cubic"], ["lr_schedule.scaling: Input should be 'none', 'linear' or 'sqrt'"]),
        (["--set=accumulation_steps=3"], ["local batch of 8 is not divisible by accumulation_steps 3"]),
        (["--set=data_size=6"], ["data_size 6 is not a multiple of 4"]),
        (["--set=data_size=32"], ["data_size 32 is larger than the box [16, 16]"]),
        (["--set=Nsamples=7"], ["Nsamples 7 is less than global_batch_size 8"]),
        (["--enable_benchy", "--enable_manual_profiling"], ["enable_manual_profiling cannot be combined"]),
        (["--num_epoch", "3"], ["unrecognized arguments: --num_epoch 3; did you mean --num_epochs?"]),
        (["--set", "num_epochs"], ["--set num_epochs: expected key=value"]),
        (["--run_num=../../elsewhere"], ["--run_num '../../elsewhere' must be a plain name"]),
        (["--data_loader_config=tape"], ["unknown data_loader_config tape; known: lowmem, "]),
        (["--data_loader_config=dali-lowmem", "--set=train_path_npy_data=None"], ["train_path_npy_data is not set"]),
        (
            ["--data_loader_config=dali-lowmem", "--set=train_path_npy_data=/no.npy"],
            ["no such file: /no.npy; make it"],
        ),
        (["--set=resident_dtype=int8"], ["resident_dtype: Input should be 'float32' or 'float16', not 'int8'"]),
        (["--set=network.name=vnet"], ["unknown network vnet; known: unet"]),
        (["--set=optimizer.name=adm"], ["unknown optimizer adm; known: adam, "]),
        (["--set=loss=l7"], ["unknown loss l7; known: l1"]),
    ],
)
def test_bad_config_or_flag_is_one_line(refuse: Callable[..., str], flags: list[str], says: list[str]) -> None:
    if "--data_loader_config=dali-lowmem" in flags:
        pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    refuse(flags, *says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("test: {num_epoch: 3}", ["config 'test': unknown key num_epoch; did you mean num_epochs?"]),
        ("test: {optimizer: {nam: sgd}}", ["unknown key optimizer.nam; did you mean name?"]),
        ("test: {num_epochs: '3'}", ["num_epochs: Input should be a valid integer, not '3'"]),
        ("test: {num_epochs: 1.5}", ["num_epochs: Input should be a valid integer, not 1.5"]),
        ("test: {enable_amp: yes}", ["enable_amp: Input should be a valid boolean, not 'yes'"]),
        ("test: {seed: 1, seed: 2}", ["line 1: the key seed stands there twice"]),
        ("test: {seed: 1", ["cannot read ", "line 1, column "]),
        ("- test", ["must hold named configs, each a mapping of keys to values"]),
        ("test: 3", ["must hold named configs, each a mapping of keys to values"]),
        ("tset: {seed: 1}", ["unknown config test in ", "known: tset; did you mean tset?"]),
    ],
)
def test_bad_yaml_is_one_line(refuse: Callable[..., str], tmp_path: Path, text: str, says: list[str]) -> None:
    path = tmp_path / "configs.yaml"
    path.write_text(text + "\n")
    refuse([f"--yaml_config={path}"], *says)


def test_cuda_where_there_is_none_is_one_line(refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse(["--set=device=cuda"], "device is cuda, but torch sees no CUDA device; use --set device=cpu")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_half_set_rank_environment_is_one_line(refuse: Callable[..., str], monkeypatch: Any, rank: str) -> None:
    monkeypatch.setenv("RANK", rank)
    refuse([], "the rank environment is half set: LOCAL_RANK, WORLD_SIZE missing", "or unset RANK")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read BENCHY_CONFIG_FILE "),
        ("IO: {batchs: 3}", "IO.batchs"),
        ("IO: {trials: 0}", "IO.trials: Input should be greater than or equal to 1"),
        ("IO: [", "cannot read "),
    ],
)
def test_bad_benchmark_settings_are_one_line(
    refuse: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, says: str
) -> None:
    path = tmp_path / "benchy.yaml"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(path))
    refuse(["--enable_benchy"], str(path), says)


def test_run_directory_below_a_file_is_one_line(refuse: Callable[..., str], tmp_path: Path) -> None:
    """Permissions would not stop root; this stops everyone."""
    (tmp_path / "file").write_text("precious")
    refuse([f"--set=expdir={tmp_path / 'file' / 'runs'}"], "cannot write to the run directory", "--set expdir=DIR")
    assert (tmp_path / "file").read_text() == "precious"


# --- the data ------------------------------------------------------------------------------------------------------


def truncated(path: Path, volume_file: Any) -> None:
    volume_file(path)
    path.write_bytes(path.read_bytes()[:-1000])


def without_hydro(path: Path, volume_file: Any) -> None:
    with h5py.File(volume_file(path), "r+") as file:
        del file["Hydro"]


def reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Path, Any], None]:
    def make(path: Path, volume_file: Any) -> None:
        with h5py.File(volume_file(path), "r+") as file:
            del file[name]
            file.create_dataset(name, data=np.zeros(shape, "f4"))

    return make


def made(**options: Any) -> Callable[[Path, Any], None]:
    return lambda path, volume_file: volume_file(path, **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path, volume_file: None, "no such file"),
        (lambda path, volume_file: path.mkdir(), "cannot read "),
        (lambda path, volume_file: path.write_text("no HDF5"), "it is not an HDF5 file"),
        (lambda path, volume_file: path.write_bytes(b""), "cannot read "),
        (truncated, "the file is truncated"),
        (without_hydro, "has no dataset Hydro; it holds Nbody"),
        (reshaped("Nbody", (4, 16, 16)), "Nbody is (4, 16, 16), expected (4, L, L, L)"),
        (reshaped("Hydro", (5, 16, 16, 8)), "Hydro is (5, 16, 16, 8), expected (5, L, L, L)"),
        (reshaped("Hydro", (5, 8, 8, 8)), "Hydro is a box of 8 cells a side, but box_size says 16"),
        (reshaped("Hydro", (16, 16, 16, 5)), "Hydro is (16, 16, 16, 5), expected (5, L, L, L)"),
        (made(channels=(3, 5)), "Nbody is (3, 16, 16, 16), expected (4, L, L, L)"),
        (made(channels=(4, 6)), "Hydro is (6, 16, 16, 16), expected (5, L, L, L)"),
        (made(dtype="f8"), "Nbody is of type float64, expected little-endian float32"),
        (made(dtype=">f4"), "Nbody is of type >f4, expected little-endian float32"),
        (made(dtype="i4"), "Nbody is of type int32, expected little-endian float32"),
        (made(box=24), "Nbody is a box of 24 cells a side, but box_size says 16; set box_size"),
    ],
)
@pytest.mark.parametrize("key", ["train_path", "val_path"])
def test_bad_data_file_is_one_line_that_names_it(
    refuse: Callable[..., str], tmp_path: Path, volume_file, make: Callable[[Path, Any], None], says: str, key: str
) -> None:
    path = tmp_path / "bad.h5"
    make(path, volume_file)
    before = path.read_bytes() if path.is_file() else None
    refuse([f"--set={key}={path}"], str(path), says)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_full_device_is_one_line(refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of …")

    monkeypatch.setattr(train, "build_step", fill)
    refuse([], "no device memory left (CUDA out of memory); lower local_batch_size", "--data_loader_config=lowmem")


def save_at(folder: Path) -> None:
    """A checkpoint of some other training, at step 1."""
    state = {"network": {"weight": torch.zeros(3)}, "optimizer": {}, "scaler": {}, "random": []}
    Saving(folder, {}, 2).save(state, Position(step=1), is_best=False, last_chance=True)


def test_bad_input_leaves_the_records_of_an_earlier_run(
    data_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TOP)
    directory = tmp_path / "test" / "1GPU" / "00"
    directory.mkdir(parents=True)
    save_at(directory / "checkpoints")
    for name in ("out.log", "config.yaml", "metrics.jsonl"):
        (directory / name).write_text(f"precious {name}")

    def found() -> dict[Path, tuple[bytes, int]]:
        files = (path for path in directory.rglob("*") if path.is_file() and path.name not in (".lock", ".anew"))
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = found()
    assert len(before) == 6
    for flag in ("--set=train_path=/nowhere.h5", "--set=num_epoch=3", "--set=data_size=6", "--set=loss=l7"):
        with pytest.raises(SystemExit):
            train.main(["--config=test", *data_flags, f"--set=expdir={tmp_path}", flag, "--resume=no"])
    assert found() == before


def holed_volume(path: Path, volume_file: Any) -> tuple[Path, int, int]:
    """A volume with one NaN; the step, counted from 1, and the sample in its batch, that meet it first."""
    config = load(str(TOP / "config" / "UNet.yaml"), "test")
    origins, crop, batch = sample_plan(config, "train").epoch(0).origins, config.data_size, config.global_batch_size
    for cell in np.ndindex(16, 16, 16):
        inside = ((origins <= cell) & (np.array(cell) < origins + crop)).all(axis=1)
        first = int(inside.argmax())
        # Past the first interval of four steps, on the second of two ranks, and of that batch's samples the only one.
        if inside.any() and 4 < first // batch + 1 < 8 and first % 2 == 1 and inside[first : first + batch].sum() == 1:
            with h5py.File(volume_file(path, seed=1), "r+") as file:
                file["Nbody"][(2, *cell)] = np.nan
            return path, first // batch + 1, first % batch
    raise AssertionError("no cell is met late and once")


def nan_line(step: int, rank: int) -> str:
    """What is told of that step."""
    config = load(str(TOP / "config" / "UNet.yaml"), "test")
    rate = build_schedule(config.for_world(1))(step - 1)
    return f"loss nan on rank {rank}, gradient norm nan, learning rate {rate:.3e}"


def test_nan_in_the_data_costs_its_updates_alone(
    data_flags: list[str], tmp_path: Path, volume_file, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(TOP)
    path, step, _ = holed_volume(tmp_path / "holed.h5", volume_file)
    train.main(["--config=test", *data_flags, f"--set=train_path={path}", f"--set=expdir={tmp_path / 'runs'}"])
    told = [line for line in capsys.readouterr().err.splitlines() if " WARNING - " in line]
    assert re.sub(LOG_LINE, "", told[0]) == f"Step {step}: {nan_line(step, 0)}: no update (left out so far: 1)"
    assert len(told) < 8
    assert told[-1].endswith(f"no update (left out so far: {len(told)})")
    saved = newest(tmp_path / "runs/test/1GPU/00/checkpoints")
    assert saved is not None
    assert (saved.position.step, saved.position.skipped) == (16, len(told))
    assert all(tensor.isfinite().all() for tensor in saved.weights["network"].values())


def test_nan_in_too_many_steps_stops_training_naming_step_rank_and_rate(
    data_flags: list[str], tmp_path: Path, volume_file, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(TOP)
    path, step, _ = holed_volume(tmp_path / "holed.h5", volume_file)
    flags = [f"--set=train_path={path}", f"--set=expdir={tmp_path / 'runs'}", "--set=max_skipped_updates=1"]
    with pytest.raises(SystemExit) as stop:
        train.main(["--config=test", *data_flags, *flags, "--set=checkpoint.every_steps=1"])
    assert stop.value.code == 2
    line = check_error(capsys.readouterr().err, "check the data with --preflight")
    start = f"error: no update for 1 steps in a row, the last is step {step}: {nan_line(step, 0)}: training stops; "
    assert line.startswith(start)
    saved = newest(tmp_path / "runs/test/1GPU/00/checkpoints")
    assert saved is not None
    assert saved.position.step == step - 1


def test_nan_in_the_validation_data_stops_the_run_before_training(
    data_flags: list[str], tmp_path: Path, volume_file, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(TOP)
    path = volume_file(tmp_path / "holed.h5")
    with h5py.File(path, "r+") as file:
        file["Hydro"][0, 8] = np.nan
    with pytest.raises(SystemExit) as stop:
        train.main(["--config=test", *data_flags, f"--set=val_path={path}", f"--set=expdir={tmp_path / 'runs'}"])
    assert stop.value.code == 2
    check_error(capsys.readouterr().err, "the validation loss is nan after step 0")


@pytest.mark.parametrize(
    ("loader", "victim"), [("lowmem", "train.h5"), ("dali-lowmem", "train_label.npy"), ("auto", "train.h5")]
)
def test_a_file_that_shrinks_during_training_is_one_line(
    tmp_path: Path, volume_file, capsys: pytest.CaptureFixture[str], monkeypatch: Any, loader: str, victim: str
) -> None:
    """It is cut when the first losses have been measured, before the first step."""
    if loader == "dali-lowmem":
        pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    monkeypatch.chdir(TOP)
    flags = [f"--data_loader_config={loader}", f"--set=expdir={tmp_path / 'runs'}", "--set=device=cpu"]
    for key, split, seed in (("train", "train", 1), ("val", "valid", 2)):
        path = volume_file(tmp_path / f"{split}.h5", seed=seed)
        twins = zip(("data", "label"), convert(path), strict=True)
        flags += [f"--set={key}_path={path}", *(f"--set={key}_path_npy_{name}={twin}" for name, twin in twins)]
    measure = Trainer._measure_untrained

    def measure_and_cut(trainer: Trainer, *arguments: Any) -> Any:
        result = measure(trainer, *arguments)
        os.truncate(tmp_path / victim, 5000)
        return result

    monkeypatch.setattr(Trainer, "_measure_untrained", measure_and_cut)
    with pytest.raises(SystemExit) as stop:
        train.main(["--config=test", *flags])
    assert stop.value.code == 2
    check_error(capsys.readouterr().err, f"{victim} became shorter while it was being read", "to 5000 bytes")


# --- from outside --------------------------------------------------------------------------------------------------


def command(arguments: list[str], ranks: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    """The real command, alone or under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, "train.py", *arguments],
        cwd=TOP,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_bad_input_under_plain_python(tmp_path: Path) -> None:
    run = command(["--config=test", "--set=num_epoch=3", f"--set=expdir={tmp_path / 'runs'}"])
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == "error: config 'test': unknown key num_epoch; did you mean num_epochs?\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set=num_epoch=3"], "unknown key num_epoch; did you mean num_epochs?"),
        (["--set=global_batch_size=9"], "global_batch_size 9 is not divisible by 2 ranks; use 8"),
        (["--set=train_path=/nowhere.h5"], "no such file: /nowhere.h5"),
        (["--set=device=cuda"], "device is cuda, but torch sees no CUDA device; use --set device=cpu"),
    ],
)
def test_bad_input_under_torchrun_is_one_line_of_all_ranks(
    data_flags: list[str], tmp_path: Path, flags: list[str], says: str
) -> None:
    """Before the ranks have met, when they have, in what only files tell, and in what each rank finds by itself."""
    run = command(
        ["--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}", *flags], 2, CUDA_VISIBLE_DEVICES=""
    )
    assert run.returncode != 0
    check_error(run.stderr, says)
    assert 'train.py", line' not in run.stderr, "the only traceback is torchrun's own"
    assert re.search(r"exitcode\s*: 2 ", run.stderr), "rank 0 ended with code 2"
    assert not (tmp_path / "runs").exists()


def test_nan_on_one_rank_stops_all_naming_it(data_flags: list[str], tmp_path: Path, volume_file) -> None:
    path, step, sample = holed_volume(tmp_path / "holed.h5", volume_file)
    assert sample % 2 == 1
    flags = [*data_flags, f"--set=train_path={path}", f"--set=expdir={tmp_path / 'runs'}"]
    run = command(["--config=test", *flags, "--set=max_skipped_updates=1"], 2)
    assert run.returncode != 0
    start = f"error: no update for 1 steps in a row, the last is step {step}: {nan_line(step, 1)}: training stops; "
    assert check_error(run.stderr).startswith(start)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]):
    """A training of config 'test' by the real command: (flags, what it printed, its run directory)."""
    expdir = tmp_path_factory.mktemp("trained")
    flags = ["--config=test", *data_flags, f"--set=expdir={expdir}", "--run_num=first", "--set=use_cache=None"]
    flags += ["--set=report_pictures=true"]
    run = command(flags)
    assert run.returncode == 0, run.stderr
    return flags, run, expdir / "test" / "1GPU" / "first"


def test_valid_input_leaves_the_contracts_log(trained: Any) -> None:
    _, run, directory = trained
    log = (directory / "out.log").read_text()
    messages = [re.sub(LOG_LINE, "", line) for line in log.splitlines()]
    number = r"\d+(\.\d+)?(e-\d+)?"
    loss, seconds = r"  Avg {} loss=\d\.\d{{6}}", rf"  Total validation time: {number} sec"
    epochs = [rf"Time taken for epoch {epoch} is {number} sec, avg {number} samples/sec" for epoch in (1, 2)]
    expected = [loss.format("val"), seconds]  # before training
    for epoch in epochs:
        expected += [epoch, loss.format("train"), loss.format("val"), seconds]
    expected.append("DONE ---- rank 0")
    kinds = "Time taken|  Avg|  Total|DONE"
    found = [message for message in messages if re.match(kinds, message)]
    assert len(found) == len(expected)
    for message, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, message)
    assert messages[-1] == "DONE ---- rank 0"
    dump = next(index for index, message in enumerate(messages) if message.startswith("Configuration test"))
    assert dump < messages.index(found[0])
    assert "  num_epochs: 2" in messages[dump:]
    for message in found:
        assert message in run.stderr, "what the log has, the terminal had"
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_valid_input_leaves_the_contracts_curves(trained: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags, _, directory = trained
    events = EventAccumulator(str(directory / "logs"))
    events.Reload()

    def curve(name: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(name)}

    options = cli.parse(flags)
    schedule = build_schedule(load(str(TOP / "config" / "UNet.yaml"), "test", options.overrides).for_world(1))
    assert list(curve("Loss/train")) == list(curve("Loss/valid")) == [0, 8, 16]
    assert curve("Learning Rate") == pytest.approx({step: schedule(max(step - 1, 0)) for step in (0, 8, 16)})
    assert list(curve("Avg iters per sec")) == [8, 16]
    assert min(curve("Avg iters per sec").values()) > 0
    log = (directory / "out.log").read_text()
    for name, word in (("Loss/train", "train"), ("Loss/valid", "val")):
        logged = [float(value) for value in re.findall(rf"  Avg {word} loss=(\S+)", log)]
        assert list(curve(name).values())[-len(logged) :] == pytest.approx(logged, abs=1e-6)
    hparams = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for key in (b"num_epochs", b"lr_schedule.start_lr", b"optimizer.name"):
        assert key in hparams
    assert events.Scalars("hparam/final loss")[0].value == pytest.approx(curve("Loss/valid")[16])
    assert events.Tags()["images"] == ["Slices"]


def test_without_pictures_a_training_leaves_none(data_flags: list[str], tmp_path: Path) -> None:
    train.main(["--config=test", *data_flags, f"--set=expdir={tmp_path}", "--num_epochs=1"])
    directory = tmp_path / "test" / "1GPU" / "00"
    assert "Result:" in (directory / "out.log").read_text()
    assert not list(directory.rglob("*.png"))


def test_valid_input_leaves_a_config_that_loads_back(trained: Any) -> None:
    flags, _, directory = trained
    config = load(str(directory / "config.yaml"), "test")
    given = load(str(TOP / "config" / "UNet.yaml"), "test", cli.parse(flags).overrides)
    assert config == given
    assert list(yaml.safe_load((directory / "config.yaml").read_text())) == ["test"]


def test_valid_input_leaves_its_provenance(trained: Any) -> None:
    flags, _, directory = trained
    record = json.loads((directory / "provenance.json").read_text())
    assert record["command"] == ["train.py", *flags]
    assert record["hostnames"] == [socket.gethostname()]
    assert record["world_size"] == 1
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["numpy"] == np.__version__
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    head = subprocess.run(["git", "-C", TOP, "rev-parse", "HEAD"], capture_output=True, text=True)
    commit = head.stdout.strip() if head.returncode == 0 else "unknown"
    assert record["git_commit"].removesuffix("-dirty") == commit


def test_valid_input_leaves_weights_and_pictures(trained: Any) -> None:
    _, _, directory = trained
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
