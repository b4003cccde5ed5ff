"""Invalid input ends with one error line and exit code 2 and writes nothing."""

import re
import shutil
from collections.abc import Callable
from operator import setitem
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from log_lines import messages, other_lines
from processes import TOP
from trainings import directory, last
from volume_files import write_volume

import train
from utils.config import load
from utils.data.loaders.base import sample_plan
from utils.steps import build
from utils.volumes.opened import Volumes

Refuse = Callable[..., str]


@pytest.fixture
def refuse(tmp_path: Path, data_flags: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """refuse(*flags, says=…): the line with which training of config 'test' and its preflight end, with exit code 2.

    They do so before a run directory exists. `trains`: only the training is run, and may begin.
    """
    monkeypatch.chdir(TOP)

    def check(*flags: str, says: tuple[str, ...] = (), trains: bool = False) -> str:
        for preflight in [[]] if trains else [["--preflight"], []]:
            with pytest.raises(SystemExit, match="2"):
                train.main(["--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}", *flags, *preflight])
            output = capsys.readouterr()
            (line,) = [line for line in output.err.splitlines() if line.startswith("error: ")]
            assert [part for part in says if part not in line] == [], line
            assert "all checks passed" not in output.out
            assert [line for line in output.out.splitlines() if not line.startswith("preflight: ")] == []
            assert trains or (other_lines(output.err) == [line] and not (tmp_path / "runs").exists())
        return line

    return check


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--set=data_size=6"], ["data_size 6 is not a multiple of 4"]),
        (["--data_loader_config=low_mem"], ["low_mem; known: lowmem, inmem, ", "did you mean lowmem?"]),
        (["--set=network.name=unett"], ["network.name: unknown name unett; known: unet, ", "did you mean unet?"]),
        (["--set=network.name=my_net"], ["unknown name my_net; ", "my_module.MyNetwork"]),
        (["--set=loss=hubert"], ["loss: unknown name hubert; known: l1, ", "mean huber?; a class of your own"]),
        (["--set=metrics=[recall]"], ["metrics: recall is no metric of volumes; name one of your own, my_module.f"]),
        (["--set=train_path=/data/no.h5"], ["/data/no.h5; set DATA_DIR to the", "make demo and --config=demo"]),
        (["--set=val_path=/no/val.h5"], ["/no/val.h5", "set val_path"]),
        (["mine.yaml"], ["did you mean --yaml_config mine.yaml?"]),
        # Fixed: the refusal came after the run's config.yaml had been replaced.
        (["--data_loader_config=synthetic", "--set=evaluation.every_epochs=1"], ["synthetic reads no volumes"]),
        (["--enable_amp", "--amp_mode=none"], ["--enable_amp and --amp_mode none contradict each other"]),
        (["--local_batch_size=4", "--set=global_batch_size=8"], ["both set the batch"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_invalid_flag_is_refused_in_one_line(refuse: Refuse, flags: list[str], says: list[str]) -> None:
    refuse(*flags, says=says)


def test_invalid_environment_is_refused_in_one_line(refuse: Refuse, tmp_path: Path, monkeypatch: Any) -> None:
    """Incomplete rank variables, a file in place of a directory, no benchmark settings, no CUDA device, full memory."""
    for rank in ("0", "1"):  # each rank reports it, because rank 0 may not exist
        monkeypatch.setenv("RANK", rank)
        refuse(says=("LOCAL_RANK, WORLD_SIZE missing", "unset RANK"))
    monkeypatch.delenv("RANK")
    (tmp_path / "file").write_text("precious")  # root ignores permissions
    says = ("cannot write to the run directory", "--set expdir=DIR")
    refuse(f"--set=expdir={tmp_path / 'file' / 'runs'}", says=says)
    assert (tmp_path / "file").read_text() == "precious"
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(tmp_path / "none.yaml"))
    refuse("--enable_benchy", says=(f"{tmp_path / 'none.yaml'}: No such file",))

    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of …")

    # The preflight may run on a login node without the device.
    monkeypatch.setattr(build, "step", fill)
    refuse(says=("no device memory left (CUDA out of memory); lower local_batch_size",), trains=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse("--set=device=cuda", says=("device is cuda, but PyTorch finds no CUDA device; use --set",), trains=True)


def volume_with_nan(path: Path, *cell: Any, seed: int = 0) -> None:
    with h5py.File(write_volume(path, seed=seed), "r+") as file:
        file["Nbody"][(2, *cell)] = np.nan


cube = np.ones((16, 16, 16), np.float32)
last_channels = {"Nbody": np.stack([cube] * 4, -1), "Hydro": np.stack([cube] * 5, -1)}


@pytest.mark.parametrize(
    ("options", "change", "says"),
    [
        # Fixed: the run trained on the real parts, and succeeded.
        ({"dtype": "c8"}, len, "Nbody holds complex64, expected real numbers; write it as float32"),
        ({"box": 24}, len, "has 24 cells per side, but box_size is 16; set box_size"),
        ({}, lambda file: [file.clear(), file.update(last_channels)], "channels come first: write numpy.moveaxis(val"),
        ({}, lambda file: [file.clear(), file.update({"native_fields/a": cube})], "is a snapshot of Nyx; import it wi"),
        # Fixed: the run ended with a ZeroDivisionError after its last epoch.
        ({}, lambda file: setitem(file["Hydro"], ..., 0), "Hydro is 0 everywhere; write its values"),
    ],
)
def test_invalid_data_file_is_refused_in_one_line_with_its_name(
    refuse: Refuse, tmp_path: Path, options: dict[str, Any], change: Callable[[h5py.File], Any], says: str
) -> None:
    path = write_volume(tmp_path / "bad.h5", **options)
    with h5py.File(path, "r+") as file:
        change(file)
    before = path.read_bytes()
    for key in ("train_path", "val_path"):
        refuse(f"--set={key}={path}", says=(str(path), says))
    assert path.read_bytes() == before


def test_two_boxes_of_another_size_or_with_other_channels_are_refused(refuse: Refuse, tmp_path: Path) -> None:
    """Fixed: the second number of the suggested box_size was that of the config."""
    paths = [write_volume(tmp_path / f"{seed}.h5", box=24, seed=seed) for seed in (1, 2)]
    refuse(f"--set=train_path={paths[0]}", f"--set=val_path={paths[1]}", says=("set box_size to [24, 24]",))
    path = write_volume(tmp_path / "three.h5", channels=(3, 5))
    refuse(f"--set=val_path={path}", says=(str(path), "give files with the same channels"))


def test_invalid_input_changes_no_file_of_an_earlier_run(trained_run: Path, tmp_path: Path, refuse: Refuse) -> None:
    run = directory(tmp_path / "runs")
    shutil.copytree(trained_run, run)

    def contents() -> dict[Path, tuple[bytes, int]]:
        files = (path for path in run.rglob("*") if path.is_file() and path.name != ".lock")
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = contents()
    volume_with_nan(tmp_path / "nan.h5")
    for flag in (f"val_path={tmp_path / 'nan.h5'}", "train_path=/nowhere.h5", "num_epoch=3", "data_size=6"):
        refuse(f"--set={flag}", "--resume=no", trains=True)
    assert contents() == before


def test_training_skips_updates_with_nan_unless_all_are(
    data_flags: list[str], tmp_path: Path, capsys: Any, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the run stops. With few steps it once ended with the result of a "trained network"."""
    monkeypatch.setattr(Volumes, "check", lambda *_: None)  # its sample of a large file may miss a NaN
    path, cell, config = tmp_path / "nan.h5", (0, 10, 2), load(str(TOP / "config" / "UNet.yaml"), "test")
    volume_with_nan(path, *cell, seed=1)
    origins = sample_plan(config, "train", [(16, 16, 16)]).epoch(0).origins
    inside = ((origins <= cell) & (np.array(cell) < origins + config.data_size)).all(axis=1)
    step = int(inside.argmax()) // config.global_batch_size + 1
    assert 4 < step < 8, "choose another cell"
    train.main(["--config=test", *data_flags, f"--set=train_path={path}", f"--set=expdir={tmp_path}"])
    description = f"tep {step}: loss nan on rank 0, gradient norm nan, learning rate "
    warnings = messages(capsys.readouterr().err, "WARNING")
    assert warnings[0].startswith(f"S{description}")
    assert "update skipped (1 so far); check the data with --preflight, " in warnings[0]
    assert warnings[-1].endswith(f"update skipped ({len(warnings)} so far)")
    assert len(warnings) < 8
    saved = last(directory(tmp_path))
    assert (saved.state.step, saved.state.skipped) == (16, len(warnings))
    assert all(tensor.isfinite().all() for tensor in saved.weights["network"].values())
    assert re.search(
        rf"Result:(.*\n)+  skipped updates +{len(warnings)} .*\n  warning: more than a tenth of .* with --preflight\n",
        (directory(tmp_path) / "out.log").read_text(),
    )
    says: tuple[str, ...] = ("is nan after step 0, the untrained network", "weight_init")
    assert "learning" not in refuse("--set=weight_init.conv_scale=1e30", "--run_num=02", says=says, trains=True)
    volume_with_nan(tmp_path / "all.h5")
    flags = [f"--set=train_path={tmp_path / 'all.h5'}", "--num_epochs=1", "--run_num=01"]
    says = ("Nbody[", "is nan")
    refuse(*flags, "--preflight", "--set=optimizer.name=soap", says=says, trains=True)  # once a traceback
    for _ in range(2):  # the same command says so again
        refuse(*flags, says=("all 8 updates were skipped", "check the data with --preflight"), trains=True)
    assert not (directory(tmp_path / "runs", run_num="01") / "summary.json").exists()
