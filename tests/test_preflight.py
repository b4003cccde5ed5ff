"""Tests of --preflight: it checks a run before training, prints the findings and writes nothing; sizes of runs."""

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import start_ranks
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from trainings import TOP, directory

import train
from networks import build_network
from utils import preflight
from utils.config import Config
from utils.config.sections import NetworkConfig
from utils.data.loaders import threaded
from utils.steps import build, size
from utils.steps.graph import GraphStep

SAME_VOLUME = "training and validation use the same volume; results look better than they are"
Report = Callable[..., str]


@pytest.fixture
def report(tmp_path: Path, data_flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Report:
    """report(*flags) -> stdout of a preflight of config 'test'; with code=2 it ends so, and its error is returned."""
    monkeypatch.chdir(TOP)

    def run(*flags: str, code: int = 0, **options: Any) -> str:
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
        words = ["--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}", "--preflight", *flags]
        with pytest.raises(SystemExit, match=f"^{code}$") if code else contextlib.nullcontext():
            train.main(words, **options)
        output = capsys.readouterr()
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before, "it writes nothing"
        assert all(line.startswith("preflight: ") for line in output.out.splitlines())
        assert ("passed" in output.out) == (code == 0 and "warning: " not in output.out)
        assert output.err.count("\n") == (code != 0)
        return output.err or output.out.replace("preflight: ", "")

    return run


def test_the_report_follows_the_flags(report: Report, tmp_path: Path, volume_file: Any) -> None:
    chunked = volume_file(tmp_path / "chunked.h5", chunks=(1, 8, 8, 8), compression="gzip")
    longer = volume_file(tmp_path / "other.h5", box=(8, 24, 12))
    schedule = "--set=lr_schedule={scaling: linear, start_lr: 1e-3, end_lr: 1e-5, warmup_steps: 4}"
    # 4 -> 4 -> 8 channels down, 8 -> 4 and 8 -> 5 up, kernels of 4³
    parameters = 64 * (4 * 4 + 4 * 8 + 8 * 4 + 8 * 5) + 4 + 8 + 4 + 5
    plain = ["global batch 8\n", "steps: 8 per epoch × 2 epochs = 16\n", f"{parameters:,} parameters, ", "/00 is new"]
    plain += ["peak 2.000e-03; step 0: 1.981e-03", "16³ cells, 0.00 GiB, all finite, mapped", "memory per rank: about "]
    batches = ["ranks 4 × local batch 8 = global batch 32\n", "steps: 2 per epoch", "/4ranks/00 is new"]
    peak = ["scaling linear, 4 steps of warm-up, peak 2.000e-03; step 0: 5.000e-04", "step 7: 1.005e-03"]
    files = [f"train data: {chunked}, 16³ ", f"train data: {longer}, 8 × 24 × 12 cells, ", "rewrite it contiguously"]
    for flags, parts in (
        ([], [*plain, "all checks passed\n"]),
        (["4", "--local_batch_size=8", "--set=accumulation_steps=2"], batches),
        ([schedule, "--set=global_batch_size=16"], peak),
        ([f"--set=train_path=[{chunked},{longer}]"], files),
        (["--data_loader_config=synthetic", "--set=train_path=/nowhere.h5"], []),
        (["--enable_benchy"], []),
    ):
        printed = report(*flags)
        assert ("run directory: " in printed) == (flags != ["--enable_benchy"])
        for part in ("one step with 1 sample on cpu: loss 0.", *parts):
            assert part in printed, flags


def test_several_ranks_first_check_their_fabric(tmp_path: Path, data_flags: list[str]) -> None:
    words = ["train.py", "--config=test", *data_flags, f"--set=expdir={tmp_path}", "--preflight"]
    first, second = [rank.end() for rank in start_ranks(words, 2, tmp_path)]
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, ""), first.stderr + second.stderr
    (line,) = re.findall(r"^preflight: Fabric: .* per matrix product, .*", first.stdout, re.MULTILINE)
    assert line.endswith(" GB/s between neighbors")
    assert first.stdout.index(line) < first.stdout.index("preflight: ranks 2 × local batch 4")


def test_an_existing_run_is_reported_and_kept(report: Report, data_flags: Any, tmp_path: Path, capsys: Any) -> None:
    """It warns of what the run warns of: both files are the same."""
    same = [data_flags[0].replace("train_path", "val_path"), "--num_epochs=1"]
    command = ["--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}", *same]
    train.main([*command, "--set=report_baselines=False"])
    finished = directory(tmp_path / "runs")
    assert f"{SAME_VOLUME}\n" in (finished / "out.log").read_text()
    capsys.readouterr()
    resumes = f"run directory: {finished} exists: the run resumes from its newest checkpoint\n"
    for flags, parts in (
        ([], [f"{finished}-2 (00 is finished; ", SAME_VOLUME]),
        (["--resume"], [resumes, "warning: Nothing is left to train: ", "no errors; warnings: 2\n"]),
        (["--resume", "--num_epochs=2"], [resumes, "after step 8\n", "num_epochs 1 -> 2\n"]),
        (["--resume=no"], [f"{finished} exists: its logs and checkpoints will be replaced"]),
    ):
        printed = report(*same, *flags)
        for part in parts:
            assert part in printed, flags
    report(*same, "--resume", "--set=network.width=5", "--num_epochs=2", code=2)
    # Fixed: of a run without a checkpoint, the checkpoints, of which there were none, were to be replaced.
    (finished / "summary.json").unlink()
    shutil.rmtree(finished / "checkpoints")
    assert f"{finished} exists: the run starts from scratch\n" in report(*same)
    assert f"{finished} exists: its logs and checkpoints will be replaced\n" in report(*same, "--resume=no")


@pytest.mark.parametrize(("seconds", "says"), [(1, "3:12 on"), (100, "5:20:00 on this CPU; use a GPU, more ranks, ")])
def test_the_time_of_all_steps_follows_from_one(report: Report, seconds: int, says: str, monkeypatch: Any) -> None:
    """Fixed: a laptop was silent for hours, and the update, of four times `seconds`, counted for each of 8 samples."""
    clock = iter([0, 9, 10, 10 + 5 * seconds, 10 + 9 * seconds])
    monkeypatch.setattr(preflight, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    warning = "warning: " if seconds == 100 else ""
    assert f"\n{warning}all 16 steps would take about {says}" in report()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("limit", "remedy"),
    [(130_000, "lower local_batch_size or raise accumulation_steps"), (100_000, "lower network.width, or choose a")],
)
def test_too_little_memory_is_refused(report: Report, limit: int, remedy: str, device: str, monkeypatch: Any) -> None:
    """Fixed: a smaller batch was recommended although weights, gradients and optimizer alone, 123 kB, did not fit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Small")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=limit))
    monkeypatch.setattr(preflight, "choose_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(size, "memory_limit", lambda: limit)
    error = report(f"--set=device={device}", code=2)
    where = "Small" if device == "cuda" else "this machine"
    assert re.match(rf"error: memory per rank: about .* on {where}: it does not fit; {remedy}", error)


def test_ranks_that_do_not_fit_one_machine_together_get_a_warning(report: Report, monkeypatch: Any) -> None:
    monkeypatch.setattr(size, "memory_limit", lambda: 3 * 10**6)
    assert "one step with 1 sample on cpu: loss " in report()
    assert "8 ranks on one such machine do not fit" in report("8", "--local_batch_size=8")


def test_a_login_node_without_gpu_compares_no_memory_and_loads_no_volumes(report: Report, monkeypatch: Any) -> None:
    """Its memory may be too small. Fixed: a run with CUDA graphs was refused, because only CUDA devices have them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(threaded, "available_memory", lambda: 0)
    for flags, options in (
        (["--data_loader_config=resident"], {}),
        (["8", "--data_loader_config=auto"], {"step_class": GraphStep}),
    ):
        printed = report(*flags, "--set=device=cuda", **options)
        for part in ("warning: GPU memory was not checked", "one step with 1 sample on cpu: loss ", "warnings: 1\n"):
            assert part in printed
    assert "valid.h5 need 0.00 GiB of memory" in report("--data_loader_config=inmem", code=2)
    assert "because this machine has no GPU; for GPUs of 40 GiB add --gpu_memory" in report("--set=device=auto")


def test_on_a_login_node_memory_and_directory_are_those_of_a_job(
    data_flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed: the directory was that of a run on CPUs, below the config's expdir, which submit_pm.sh replaces."""
    monkeypatch.chdir(TOP)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LOGS_DIR", raising=False)
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    data = [flag for flag in data_flags if "device" not in flag]
    command = ["--config=test", *data, "--preflight", "8", "--local_batch_size=8"]
    logs = tmp_path / "nbody-unet" / "logs"
    logs.mkdir(parents=True)
    for flags, place in (([], logs), ([f"--set=expdir={tmp_path}/other"], tmp_path / "other")):
        train.main([*command, "--gpu_memory", "40", *flags])
        printed = capsys.readouterr().out
        for part in (" of 40.00 GiB on each GPU\n", f"run directory: {place}/test/8GPU/00 ", "one step with 1 sample"):
            assert part in printed, flags
        assert "warning" not in printed
    monkeypatch.setattr(size.ModelSize, "total", 41 * 2**30)
    with pytest.raises(SystemExit):
        train.main([*command, "--gpu_memory", "40"])
    assert " of 40.00 GiB on each GPU: it does not fit; lower local_batch_size" in capsys.readouterr().err


def test_the_space_for_checkpoints_is_checked_by_the_preflight_and_before_training(
    report: Report, data_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A checkpoint of 7,701 parameters has three numbers of 4 bytes for each, and four exist at once."""
    disk = SimpleNamespace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    line = "checkpoints: about 0.1 MB each, up to 4 at once; the file system of "
    refusal = "a checkpoint needs about 0.1 MB, and the file system of "
    training = ["--config=test", *data_flags, f"--set=expdir={tmp_path / 'runs'}", "--num_epochs=1"]
    for disk.free, is_refused, warns in ((50_000, True, False), (200_000, False, True), (2_000_000, False, False)):
        printed = report(code=2 * is_refused)
        with pytest.raises(SystemExit) if is_refused else contextlib.nullcontext():
            train.main(training)
        log = capsys.readouterr().err
        assert (refusal in printed) == (refusal in log) == is_refused
        assert (f"warning: {line}" in printed) == (f"WARNING - {line}" in log) == warns
        assert (line in printed) == (tmp_path / "runs").exists() == (not is_refused)


def test_activation_memory_is_that_of_the_tensors_saved_for_the_backward_pass() -> None:
    """A convolution saves its input, a tanh its output; mixed precision and micro-batches lower it."""
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv3d(4, 3, 3, padding=1), nn.Tanh())
    assert size.activation_bytes(network, torch.empty(5, 4, 8, 8, 8, device="meta")) == 4 * 5 * 8**3 * (4 + 3)
    small = {"data_size": 8, "network": NetworkConfig(width=4, scales=2), "global_batch_size": 8}
    full, half, quarter = (
        build.model_size(Config(**small, **changes).for_world(1)).activations
        for changes in ({}, {"enable_amp": True}, {"accumulation_steps": 4})
    )
    assert full == 2 * half == 4 * quarter > 0


UNET, FIELDS = {"crop": 16, "width": 4, "scales": 3}, torch.rand(2, 4, 16, 16, 16)


@pytest.mark.parametrize(
    ("name", "options", "inputs"),
    [
        ("unet", UNET, FIELDS),
        ("cifar_cnn", {"shape": (3, 32, 32), "classes": 10, "norm": "ghost(4)"}, torch.rand(4, 3, 32, 32)),
        ("reuters_cnn", {"shape": (50,), "classes": 46, "vocabulary": 9}, torch.zeros(2, 50, dtype=torch.int64)),
    ],
)
def test_the_count_is_what_a_real_pass_executes(name: str, options: dict[str, Any], inputs: torch.Tensor) -> None:
    network = build_network(name, **options).to("meta")
    counted = size.training_flops(network, inputs.to("meta"))
    assert network.training
    with FlopCounterMode(display=False) as counter:
        build_network(name, **options)(inputs).sum().backward()
    assert counted == counter.get_total_flops() / len(inputs) > 0
