"""Tests of --preflight: it checks a run before training, prints the findings and writes nothing."""

from __future__ import annotations

import re
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
        "learning rate: shape cosine, scaling none, no warm-up, peak 2.000e-03; step 0: 2.000e-03",
        "step 15: 0.000e+00",
        f"run directory: {tmp_path / 'runs' / 'test' / '1ranks' / '00'} is new",
        "train data: ",
        "valid data: ",
        "16³ cells, 0.00 GiB, all finite, mapped",
        "channels: ln(value / mean density) / 14; value / (900 km/s); (log10(value / K) - 5.211533783) / 3.474355855\n",
        "differences from base: ",
        "data_size 64 -> 8",
    ):
        assert part in printed, part


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
        (["--set=device=cuda"], ["all checks passed"]),  # even on a login node without such a device
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


def test_existing_run_directory_is_reported_and_kept(
    data_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The report names the directory, and says whether a training would resume or replace what is in it."""
    monkeypatch.chdir(TOP)
    directory = tmp_path / "test" / "1ranks" / "00"
    weights = directory / "checkpoints" / "step_00000008" / "weights.pt"
    weights.parent.mkdir(parents=True)
    weights.write_text("precious")
    (directory / "summary.json").write_text('{"steps": 8}')

    def report(*flags: str) -> str:
        train.main(["--config=test", *data_flags, f"--set=expdir={tmp_path}", "--preflight", *flags])
        lines = [line for line in capsys.readouterr().out.splitlines() if "run directory: " in line]
        return "\n".join(lines).replace("preflight: run directory: ", "")

    assert report() == f"{directory}-2 (00 is finished; --resume would continue it) is new"
    assert report("--resume") == f"{directory} exists: training resumes from its newest checkpoint"
    assert report("--resume=no") == f"{directory} exists: the run in it will be removed"
    assert report("--run_num=01") == f"{directory.with_name('01')} is new"
    assert report("--enable_benchy") == "", "a benchmark has none"
    assert weights.read_text() == "precious"
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoints", "summary.json"]
    with open_locked(directory / ".lock", "locked"):
        for flags in ([], ["--resume"]):
            says = f"{directory} is locked: another run is writing to it; wait for its end, or give another "
            assert report(*flags).startswith(says)


def test_first_nonfinite_value_is_located(preflight, tmp_path: Path, volume_file) -> None:
    path = volume_file(tmp_path / "bad.h5")
    with h5py.File(path, "r+") as file:
        file["Hydro"][3, 2, 7, 15] = file["Hydro"][3, 9, 0, 0] = np.inf
    code, printed, errors = preflight(f"--set=val_path={path}")
    assert code == 2
    assert errors.startswith(f"error: {path}: Hydro[3, 2, 7, 15] is inf; ")
    assert errors.count("\n") == 1
    assert "train data: " in printed
    assert "passed" not in printed


def test_run_that_does_not_fit_the_device_is_refused(preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Small")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=1000))
    code, _, errors = preflight()
    assert code == 2
    assert re.fullmatch(
        r"error: memory per rank: about .* on Small: it does not fit; lower local_batch_size or raise .*\n", errors
    )


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
