"""Tests of --preflight: it checks a run before training, prints the findings and writes nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import train
from utils.distributed.locks import open_locked
from utils.profiling.memory import activation_bytes

TOP = Path(__file__).parent.parent.parent


@pytest.fixture
def preflight(tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch):
    """preflight(*flags) -> (exit code, stdout, stderr) of a preflight of config 'test'."""
    monkeypatch.chdir(TOP)

    def run(*flags: str) -> tuple[int, str, str]:
        code = 0
        try:
            train.main(["--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}", "--preflight", *flags])
        except SystemExit as stop:
            code = int(stop.code or 0)
        assert not (tmp_path / "runs").exists(), "a preflight writes nothing"
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def test_valid_config_passes_and_its_properties_are_printed(preflight, tmp_path: Path) -> None:
    code, printed, errors = preflight()
    assert (code, errors) == (0, "")
    lines = printed.splitlines()
    assert lines[-1] == "preflight: all checks passed"
    # 4 -> 4 -> 8 channels down, 8 -> 4 and 8 -> 5 up, kernels of 4³
    parameters = 64 * (4 * 4 + 4 * 8 + 8 * 4 + 8 * 5) + 4 + 8 + 4 + 5
    for part in (
        "ranks 1 × local batch 8 = global batch 8\n",
        "steps: 8 per epoch × 2 epochs = 16\n",
        f"network: unet, {parameters:,} parameters, accepts samples of shape 4 × 8 × 8 × 8\n",
        "memory per rank: about ",
        "one step with 1 sample on cpu: loss 0.",
        "learning rate: shape cosine, scaling none, no warm-up, peak 2.000e-03; step 0: 2.000e-03",
        "step 15: 0.000e+00",
        f"run directory: {tmp_path / 'runs' / 'test' / '1ranks' / '00'} is new",
        "train data: ",
        "valid data: ",
        "16³ cells, 0.00 GiB, all finite, mapped",
        "channels: ln(value / mean density) / 14; value / (900 km/s); (log10(value / K) - 5.211533783) / 3.474355855\n",
        "differences from base: ",
        "\npreflight:   train_path /data/train.h5 -> ",
    ):
        assert part in printed, part
    assert max(map(len, lines)) < 300, "fixed: the differences were one line of 1000 characters"


def test_report_follows_the_flags(preflight, tmp_path: Path, volume_file) -> None:
    """The report contains ranks, batches, learning rate, loader and data."""
    chunked = volume_file(tmp_path / "chunked.h5", chunks=(1, 8, 8, 8), compression="gzip")
    schedule = "--set=lr_schedule={scaling: linear, start_lr: 1e-3, end_lr: 1e-5, warmup_steps: 4}"
    for flags, parts in (
        (
            ["4", "--local_batch_size=8", "--set=accumulation_steps=2"],
            [
                "ranks 4 × local batch 8 = global batch 32, in 2 micro-batches",
                "steps: 2 per epoch",
                "/4ranks/00 is new",
            ],
        ),
        (
            [schedule, "--set=global_batch_size=16"],
            ["scaling linear, 4 steps of warm-up, peak 2.000e-03; step 0: 5.000e-04", "step 7: 1.000e-05"],
        ),
        (
            ["--data_loader_config=auto"],
            ["data_loader_config auto: lowmem on this machine, the files are contiguous and mapped"],
        ),
        ([f"--set=train_path={chunked}"], ["rewrite it contiguously for speed"]),
        (
            [f"--set=train_path=[{chunked},{volume_file(tmp_path / 'other.h5', box=(8, 24, 12))}]"],
            [f"train data: {chunked}, 16³ cells, ", f"train data: {tmp_path / 'other.h5'}, 8 × 24 × 12 cells, "],
        ),
        (["--data_loader_config=synthetic", "--set=train_path=/nowhere.h5"], ["data: synthetic, no files are read"]),
    ):
        code, printed, errors = preflight(*flags)
        assert (code, errors) == (0, "")
        for part in parts:
            assert part in printed, flags


def test_only_the_first_rank_prints_the_report(preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "1")
    assert preflight() == (0, "", "")
    monkeypatch.setenv("RANK", "0")
    assert "ranks 2 × local batch 4 = global batch 8" in preflight()[1]


def test_existing_run_is_reported_kept_and_refused_as_by_the_training(
    data_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The report says where a training run would write, and whether it would resume, replace or refuse what is there.

    The run logs the preflight's warning that both files are the same.
    """
    monkeypatch.chdir(TOP)
    same = data_flags[0].replace("train_path", "val_path")
    command = ["--config=test", *data_flags, same, f"--set=expdir={tmp_path}", "--num_epochs=1"]
    train.main([*command, "--set=report_baselines=False"])
    directory = tmp_path / "test" / "1ranks" / "00"
    warning = "training and validation use the same volume; results look better than they are"
    assert re.search(f"WARNING - .*train.h5: {warning}\n", (directory / "out.log").read_text())
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    capsys.readouterr()

    def report(*flags: str, code: int = 0) -> str:
        status = 0
        try:
            train.main([*command, "--preflight", *flags])
        except SystemExit as stop:
            status = int(stop.code or 0)
        output = capsys.readouterr()
        assert status == code, output.err
        assert ("all checks passed" in output.out) == (code == 0 and "warning: " not in output.out)
        assert code or "no errors; warnings: " in output.out
        return output.out.replace("preflight: ", "") if code == 0 else output.err

    text = report()
    assert f"run directory: {directory}-2 (00 is finished; --resume would use it) is new\n" in text
    assert f"warning: {data_flags[0].partition('train_path=')[2]}: {warning}\n" in text
    assert text.endswith("no errors; warnings: 1\n")
    text = report("--resume")
    assert f"run directory: {directory} exists: the run resumes from its newest checkpoint\n" in text
    assert "warning: Nothing is left to train: " in text
    assert text.endswith("no errors; warnings: 2\n")
    text = report("--resume", "--set=lr_schedule.start_lr=0.5", "--set=lr_schedule.scaling=sqrt")
    assert re.search(r"\nChanged config keys: lr_schedule.scaling none -> sqrt, lr_schedule.start_lr \S+ -> 0.5", text)
    moved = shutil.copy(data_flags[1].partition("val_path=")[2], tmp_path / "moved.h5")
    text = report("--resume", "--set=report_baselines=False", f"--set=val_path={moved}")
    assert re.search(rf"\nChanged config keys: val_path \S+ -> {moved}\n", text)
    text = report("--resume", "--num_epochs=2")
    assert (
        f"Resuming from {directory}/checkpoints/step_00000008, after step 8\nChanged config keys: num_epochs 1 ->"
        in text
    )
    for flags in (["--set=global_batch_size=16"], ["--set=network.width=5", "--num_epochs=2"]):
        refused = report("--resume", *flags, code=2)
        with pytest.raises(SystemExit):
            train.main([*command, "--resume", *flags])
        assert refused in capsys.readouterr().err
    assert f"{directory} exists: its logs and checkpoints will be replaced" in report("--resume=no")
    assert f"{directory.with_name('01')} is new" in report("--run_num=01")
    assert "run directory: " not in report("--enable_benchy"), "a benchmark has none"
    with open_locked(directory / ".lock", "locked"):
        for flags in (["--resume"], ["--resume=no"]):
            says = f"warning: {directory} is locked: another run is writing to it; wait for its end"
            assert says in report(*flags)
    (directory / ".lock").unlink()
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }


def test_first_nonfinite_value_is_located(preflight, tmp_path: Path, volume_file) -> None:
    path = volume_file(tmp_path / "bad.h5")
    with h5py.File(path, "r+") as file:
        file["Hydro"][3, 2, 8, 15] = file["Hydro"][3, 10, 0, 0] = np.inf  # not in the sample
    code, printed, errors = preflight(f"--set=val_path={path}")
    assert code == 2
    assert errors.startswith(f"error: {path}: Hydro[3, 2, 8, 15] is inf; ")
    assert errors.count("\n") == 1
    assert "train data: " in printed
    assert "passed" not in printed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("limit", "remedy"),
    [(130_000, "lower local_batch_size or raise accumulation_steps"), (100_000, "lower network.width, or choose a")],
)
def test_run_that_does_not_fit_the_memory_is_refused(
    preflight, limit: int, remedy: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: a smaller batch was recommended although weights, gradients and optimizer alone, 123 kB, did not fit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Small")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=limit))
    monkeypatch.setattr("utils.profiling.preflight.memory_limit", lambda: limit)
    code, printed, errors = preflight(f"--set=device={device}")
    assert code == 2
    assert "passed" not in printed
    assert re.fullmatch(
        rf"error: memory per rank: about .* on (Small|this machine): it does not fit; {remedy}.*\n",
        errors,
    )


def test_ranks_that_do_not_fit_one_machine_together_get_a_warning(preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.profiling.preflight.memory_limit", lambda: 3 * 10**6)
    assert "all checks passed" in preflight()[1]
    assert "one step with 1 sample on cpu: loss " in preflight()[1]
    assert "8 ranks on one such machine do not fit" in preflight("8", "--local_batch_size=8")[1]


def test_memory_is_not_compared_on_a_login_node_without_the_runs_gpus(
    preflight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, printed, _ = preflight("--set=device=cuda")
    assert code == 0
    assert "warning: memory is not compared" in printed
    assert printed.endswith("preflight: no errors; warnings: 1\n")


def test_volumes_that_do_not_fit_the_memory_are_refused(preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * 4 * 9 * 16**3
    for free, wanted in ((size, 0), (size - 1, 2)):
        monkeypatch.setattr("utils.profiling.preflight.free_shared_memory", lambda _, free=free: free)
        code, _, errors = preflight("--data_loader_config=inmem")
        assert code == wanted
    assert "valid.h5 need 0.00 GiB of memory" in errors


def test_mixed_precision_and_micro_batches_lower_the_memory_of_activations(preflight) -> None:
    def activations(*flags: str) -> float:
        large = ["--set=Nsamples=8192", "--set=network.width=256", "--data_loader_config=synthetic"]
        match = re.search(r"activations (\S+);", preflight(*large, *flags)[1])
        assert match
        return float(match.group(1))

    full = activations("--local_batch_size=4096")
    assert full > 1
    assert activations("--local_batch_size=4096", "--enable_amp") == pytest.approx(full / 2, abs=0.01)
    assert activations("--local_batch_size=4096", "--set=accumulation_steps=4") == pytest.approx(full / 4, abs=0.01)


def test_activation_memory_is_that_of_the_tensors_saved_for_the_backward_pass() -> None:
    """A convolution saves its input, a tanh its output. Weights are not activations."""
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv3d(4, 3, 3, padding=1), nn.Tanh())
    assert activation_bytes(network, torch.empty(5, 4, 8, 8, 8, device="meta")) == 4 * 5 * 8**3 * (4 + 3)


def test_a_cache_that_cannot_be_created_is_a_warning(preflight, tmp_path: Path) -> None:
    """The preflight once said nothing; it may run on a login node, which lacks the local disks of the run's nodes."""
    code, output, _ = preflight("--set=use_cache=/proc/nocache/data")
    assert code == 0
    assert re.search(r"cannot stage data in use_cache=/proc/nocache/data: .+; choose another use_cache, unless", output)
    assert "warnings: 1" in output
    assert preflight(f"--set=use_cache={tmp_path / 'new' / 'cache'}")[0] == 0
    assert not (tmp_path / "new").exists()
