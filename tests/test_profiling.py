"""A profile covers its window of steps, and nothing is annotated outside it."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import re
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import run_ranks

import train
from utils import cli
from utils.config import Config, Profile, load
from utils.distributed import Launch, World
from utils.errors import UserError
from utils.profiling import NoProfiler, Nsys, TorchProfiler, WindowProfiler, annotate
from utils.stopping import NoSignals

TOP = Path(__file__).parent.parent
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RANGES = {"step", "data", "forward", "backward", "optimizer"}


def steps_annotated(profiler: NoProfiler, count: int) -> list[int]:
    """Runs `count` steps; those that were annotated."""
    annotated = []
    for step in range(count):
        profiler.before_step(step)
        named_range = annotate("forward")
        if not isinstance(named_range, contextlib.nullcontext):
            annotated.append(step)
        with named_range:
            torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.close()
    return annotated


def events(trace: Path) -> list[dict]:
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def ranges(trace: Path) -> Counter[str]:
    """How often each of our ranges is in the trace, on the host."""
    return Counter(event["name"] for event in events(trace) if event.get("cat") == "user_annotation")


def window(directory: Path, first: int = 2, length: int = 3) -> WindowProfiler:
    return WindowProfiler(first, length, TorchProfiler(directory, on_gpu=False), CPU)


# --- the window ----------------------------------------------------------------------------------------------------


def test_the_window_alone_is_profiled(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert steps_annotated(window(tmp_path), 8) == [2, 3, 4]
    assert ranges(tmp_path / "trace.json.gz") == {"forward": 3}
    table = (tmp_path / "top_operations.txt").read_text()
    assert "forward" in table
    assert "aten::mm" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["top_operations.txt", "trace.json.gz"]
    (line,) = caplog.messages
    assert line.startswith(f"Profile of steps 2 to 4, counted from 0: {tmp_path / 'trace.json.gz'} (for https://ui.")


def test_a_training_that_ends_inside_the_window_still_writes_its_profile(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert steps_annotated(window(tmp_path, 1, 30), 3) == [1, 2]
    assert ranges(tmp_path / "trace.json.gz") == {"forward": 2}
    assert "Profile of steps 1 to 2," in caplog.text
    assert isinstance(annotate("step"), contextlib.nullcontext)


def test_nothing_is_written_where_no_step_came_into_the_window(tmp_path) -> None:
    assert steps_annotated(window(tmp_path, 5), 3) == []
    assert list(tmp_path.iterdir()) == []


# --- nsys ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The CUDA calls, noted and not made."""
    made: list[str] = []

    @contextlib.contextmanager
    def named_range(name: str):
        made.append(name)
        yield

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.append(f"wait for {device}"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: made.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: made.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", named_range)
    return made


def test_nsys_captures_whole_steps_with_nvtx_ranges(calls, caplog) -> None:
    """The device is waited for: kernels of the step before would else be in it, those of the last one not."""
    caplog.set_level(logging.INFO)
    assert steps_annotated(WindowProfiler(1, 2, Nsys(), GPU), 5) == [1, 2]
    assert calls == ["wait for cuda:0", "start", "forward", "forward", "wait for cuda:0", "stop"]
    assert caplog.messages == ["Profile of steps 1 to 2, counted from 0: nsys' capture range has ended"]


def test_ranges_are_those_of_the_profiler_at_work_not_of_the_device(calls, tmp_path) -> None:
    profiler = WindowProfiler(0, 1, TorchProfiler(tmp_path, on_gpu=False), GPU)
    profiler.before_step(0)
    assert isinstance(annotate("step"), torch.profiler.record_function)
    profiler.close()
    assert calls == ["wait for cuda:0"] * 2


# --- what is asked for ---------------------------------------------------------------------------------------------


def built(directory: Path, device: torch.device = CPU, rank: int = 0, epochs: int = 2, **profile) -> NoProfiler:
    """build_profiler for a training of eight steps an epoch."""
    config = Config(
        enable_manual_profiling=True,
        global_batch_size=8,
        Nsamples=64,
        num_epochs=epochs,
        profile=Profile(**profile),
    )
    return train.build_profiler(config, World(Launch("test", rank, rank, 2), device), directory)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [13, 14, 15]),
        ({"epochs": 3}, list(range(13, 24))),
        ({"epochs": 1}, [5, 6, 7]),
        ({"epochs": 5}, list(range(13, 40))),
        ({"epochs": 6}, list(range(13, 43))),
        ({"first_step": 0, "steps": 2}, [0, 1]),
        ({"first_step": 15, "steps": 2}, [15]),
    ],
)
def test_the_window_is_thirty_steps_from_the_sixth_of_the_second_epoch_unless_told(calls, tmp_path, settings, steps):
    profiler = built(tmp_path, GPU, **settings)
    assert steps_annotated(profiler, 8 * settings.get("epochs", 2)) == steps


@pytest.mark.parametrize(
    ("device", "wanted", "nsys"),
    [(GPU, "auto", True), (GPU, "nsys", True), (CPU, "auto", False), (CPU, "torch", False)],
)
def test_auto_is_nsys_on_a_gpu_and_torch_elsewhere(calls, tmp_path, device, wanted, nsys) -> None:
    steps_annotated(built(tmp_path, device, first_step=0, steps=1, profiler=wanted), 2)
    assert ("start" in calls) == nsys
    assert (tmp_path / "trace.json.gz").exists() != nsys


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"profiler": "nsys"}, "profile.profiler nsys needs a GPU, and .* runs on cpu; use --profiler=torch"),
        ({"first_step": 16}, "profile.first_step 16 lies beyond the training: it has 16 steps, .*; lower it"),
    ],
)
def test_what_cannot_be_profiled_is_refused_on_every_rank(tmp_path, rank, settings, says) -> None:
    with pytest.raises(UserError, match=says):
        built(tmp_path, rank=rank, **settings)


def test_rank_0_alone_profiles_unless_all_are_to(tmp_path) -> None:
    assert isinstance(built(tmp_path, rank=0), WindowProfiler)
    assert type(built(tmp_path, rank=1)) is NoProfiler
    assert isinstance(built(tmp_path, rank=1, ranks="all"), WindowProfiler)


# --- files that cannot be written ----------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process grows beyond 100 bytes: what a full disk does, but for the error's name."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("length", [1, 100], ids=["at the trace's end", "amid the trace"])
def test_a_full_disk_costs_the_profile_alone(tmp_path, caplog, length) -> None:
    """torch.profiler raises nothing then, and leaves a broken trace or a part of one."""
    (tmp_path / "trace.json.gz").write_text("an earlier one")
    profiler = window(tmp_path, 0, length)
    for step in range(length):
        profiler.before_step(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
    with full_disk():
        profiler.before_step(length)
    (line,) = caplog.messages
    assert line.startswith(f"Cannot write the profile {tmp_path / 'trace.json.gz'}: torch could not write the trace; ")
    assert line.endswith("; training goes on without it")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]
    assert (tmp_path / "trace.json.gz").read_text() == "an earlier one"


def test_a_directory_that_is_not_there_yet_is_made(tmp_path) -> None:
    """Rank 0 makes the run directory; on another node it may be that node's own."""
    steps_annotated(window(tmp_path / "runs" / "00"), 8)
    assert (tmp_path / "runs" / "00" / "trace.json.gz").exists()


# --- whole trainings -----------------------------------------------------------------------------------------------


@pytest.fixture
def profile_training(tmp_path, data_flags, monkeypatch):
    """profile_training(*flags) trains config 'test', 16 steps, with profiling; returns the run directory."""
    monkeypatch.chdir(TOP)

    def run(*flags: str) -> Path:
        options = [*data_flags, f"--set=expdir={tmp_path}", "--set=report_baselines=false"]
        train.main(["--config=test", *options, "--enable_manual_profiling", *flags])
        return tmp_path / "test/1GPU/00"

    return run


def test_a_training_is_profiled_in_every_part_of_its_steps(profile_training) -> None:
    directory = profile_training("--set=profile.steps=2", "--set=accumulation_steps=2")
    counts = ranges(directory / "trace.json.gz")
    parts = {"step": 2, "data": 2, "forward": 4, "backward": 4, "optimizer": 2}
    assert {name: counts[name] for name in RANGES} == parts
    assert "aten::convolution_backward" in (directory / "top_operations.txt").read_text()
    lines = (directory / "out.log").read_text()
    assert "Profile of steps 13 to 14, counted from 0: " in lines
    assert "DONE ---- rank 0" in lines


def test_a_training_ends_well_where_its_profile_cannot_be_written(profile_training, tmp_path) -> None:
    directory = tmp_path / "test/1GPU/00"
    (directory / "trace.json.gz").mkdir(parents=True)
    profile_training("--profiler=torch")
    lines = (directory / "out.log").read_text()
    assert re.search(r"WARNING - Cannot write the profile \S+/trace\.json\.gz: Is a directory; training goes on", lines)
    assert "DONE ---- rank 0" in lines
    assert not (directory / "top_operations.txt").exists()
    assert list(directory.glob(".profile-*")) == []


def train_with_both(world: World, flags: list[str]) -> None:
    """One training with profile.ranks root, one with all; each in a directory of that name."""
    for ranks in ("root", "all"):
        options = cli.parse([*flags, f"--set=profile.ranks={ranks}", f"--run_num={ranks}"])
        config = load(options.yaml_config, options.config, options.overrides).for_world(world.size)
        train.run(options, config, world, train.EagerStep, NoSignals())


def test_rank_0_writes_one_profile_and_all_ranks_one_each(tmp_path, data_flags, monkeypatch) -> None:
    monkeypatch.chdir(TOP)
    flags = ["--config=test", *data_flags, f"--set=expdir={tmp_path}", "--set=report_baselines=false"]
    run_ranks(train_with_both, 2, [*flags, "--enable_manual_profiling", "--set=profile.steps=2"])
    for ranks, suffixes in (("root", [""]), ("all", ["_rank0", "_rank1"])):
        directory = tmp_path / "test/2GPU" / ranks
        found = {path.name for pattern in ("trace*", "top_operations*") for path in directory.glob(pattern)}
        assert found == {name for end in suffixes for name in (f"trace{end}.json.gz", f"top_operations{end}.txt")}
        for end in suffixes:
            counts = ranges(directory / f"trace{end}.json.gz")
            assert {name: counts[name] for name in RANGES} == dict.fromkeys(RANGES, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_trace_of_a_training_on_the_gpu_holds_its_kernels(profile_training) -> None:
    directory = profile_training("--profiler=torch", "--set=device=cuda", "--set=profile.steps=2")
    assert sum(event.get("cat") == "kernel" for event in events(directory / "trace.json.gz")) >= 2 * 10
    counts = ranges(directory / "trace.json.gz")
    assert {name: counts[name] for name in RANGES} == dict.fromkeys(RANGES, 2)
    assert "Self CUDA" in (directory / "top_operations.txt").read_text()
