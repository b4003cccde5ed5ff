"""Tests of utils.profiling.profiler: a profile covers its window of steps, and no step outside it is annotated."""

import contextlib
import gzip
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from trainings import directory, train_on

from utils.config import Config
from utils.config.sections import ProfileConfig
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError
from utils.profiling.profiler import Profiler, build_profiler, nsys_capture, record_by_nsys, record_by_torch
from utils.run.directory import RunDirectory
from utils.steps.annotate import annotate

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def steps_annotated(profiler: Profiler, count: int) -> list[int]:
    """Runs `count` steps; returns those that were annotated."""
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


def ranges(trace: Path) -> Counter[str]:
    """The number of occurrences of each of our ranges in the trace, on the host."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


@pytest.mark.parametrize(
    ("first", "length", "count", "profiled"), [(2, 3, 8, [2, 3, 4]), (1, 30, 3, [1, 2]), (5, 3, 3, [])], ids=str
)
def test_only_the_steps_of_the_window_are_profiled(tmp_path, first, length, count, profiled) -> None:
    """Also if the training ends inside the window; if it ends before the window, there are no files."""
    window = Profiler(first, length, partial(record_by_torch, RunDirectory(tmp_path), CPU))
    assert steps_annotated(window, count) == profiled
    assert any(tmp_path.iterdir()) == bool(profiled)
    if profiled:
        assert ranges(tmp_path / "trace.json.gz") == {"forward": len(profiled)}
        assert "aten::mm" in (tmp_path / "top_operations.txt").read_text()


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Replaces the CUDA calls and records them."""
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


def test_nsys_captures_complete_steps_with_nvtx_ranges_or_a_benchmark_on_rank_0(calls, monkeypatch) -> None:
    """Without synchronization, kernels of the previous step would be captured, and those of the last step missed."""
    assert steps_annotated(Profiler(1, 2, partial(record_by_nsys, GPU)), 5) == [1, 2]
    assert calls == ["wait for cuda:0", "start", "forward", "forward", "wait for cuda:0", "stop"]
    for session, rank, device in ((None, 0, GPU), ("1", 0, GPU), ("1", 1, GPU), ("1", 0, CPU)):
        calls.clear()
        if session:
            monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", session)
        with nsys_capture(World(Launch("test", rank, rank, 2), device), "the benchmark"), annotate("forward"):
            pass
        captured = session and rank == 0 and device == GPU
        assert calls == (["wait for cuda:0", "start", "forward", "wait for cuda:0", "stop"] if captured else [])


def built(directory: Path, device: torch.device = CPU, rank: int = 0, epochs: int = 2, **profile) -> Profiler:
    """The profiler of a training run with eight steps per epoch."""
    options = {"global_batch_size": 8, "Nsamples": 64, "num_epochs": epochs, "profile": ProfileConfig(**profile)}
    config = Config(enable_manual_profiling=True, **options)
    return build_profiler(config, World(Launch("test", rank, rank, 2), device), RunDirectory(directory))


def test_default_window_is_thirty_steps_from_the_sixth_step_of_the_second_epoch(calls, tmp_path) -> None:
    """On a GPU, the default profiler is nsys."""
    for settings, steps in (({"epochs": 1}, [5, 6, 7]), ({"epochs": 6}, [*range(13, 43)]), ({"first_step": 15}, [15])):
        calls.clear()
        assert steps_annotated(built(tmp_path, GPU, **settings), 8 * settings.get("epochs", 2)) == steps
        assert "start" in calls


def test_only_rank_0_profiles_and_every_rank_refuses_an_impossible_profile(tmp_path) -> None:
    assert [len(steps_annotated(built(tmp_path, rank=rank), 16)) for rank in (0, 1)] == [3, 0]
    for settings, says in (
        ({"profiler": "nsys"}, "profile.profiler nsys needs a GPU"),
        ({"first_step": 16}, "profile.first_step 16 must be less than the 16 steps"),
    ):
        for rank in (0, 1):
            with pytest.raises(UserError, match=says):
                built(tmp_path, rank=rank, **settings)


def test_a_run_that_captures_nothing_says_what_to_add(calls, tmp_path, caplog, monkeypatch) -> None:
    """Fixed: ENABLE_PROFILING=1 without --enable_manual_profiling left no file and no word."""
    built(tmp_path, GPU, profiler="torch")
    assert caplog.messages == []
    built(tmp_path, GPU)
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    built(tmp_path, GPU)
    for rank in (0, 1):
        build_profiler(Config(), World(Launch("test", rank, rank, 2), GPU), RunDirectory(tmp_path))
    assert ["--profiler=torch" in line for line in caplog.messages] == [True, False]
    assert caplog.messages[1].endswith("without --enable_manual_profiling; add it")


def test_profile_of_rank_0_shows_every_part_of_its_steps(tmp_path, data_flags) -> None:
    settings = ("report_baselines=false", "profile.steps=2", "accumulation_steps=2")
    flags = ["--config=test", *data_flags, f"--set=expdir={tmp_path}", *(f"--set={setting}" for setting in settings)]
    flags += ["--enable_manual_profiling"]
    run_ranks(train_on, 2, flags)
    counts = ranges(directory(tmp_path, 2) / "trace.json.gz")
    parts = {"step": 2, "data": 2, "forward": 4, "backward": 4, "optimizer": 2}
    assert {name: counts[name] for name in parts} == parts
    table = (directory(tmp_path, 2) / "top_operations.txt").read_text()
    assert "aten::convolution_backward" in table
