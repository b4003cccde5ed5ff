"""A profile covers its window of steps, and nothing is annotated outside it."""

from __future__ import annotations

import contextlib
import json

import torch

from utils.profiling import WindowProfiler, annotate


def run_steps(profiler: WindowProfiler, count: int) -> list[bool]:
    """Whether each step was annotated."""
    annotated = []
    for step in range(count):
        profiler.before_step(step)
        ranged = annotate("forward")
        annotated.append(not isinstance(ranged, contextlib.nullcontext))
        with ranged:
            torch.ones(8, 8) @ torch.ones(8, 8)
    return annotated


def test_the_window_alone_is_profiled(tmp_path) -> None:
    profiler = WindowProfiler(first=2, length=3, directory=tmp_path, cuda=False)
    assert run_steps(profiler, 8) == [False, False, True, True, True, False, False, False]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "forward" and event.get("ph") == "X" for event in events) == 3
    assert "forward" in (tmp_path / "top_operations.txt").read_text()


def test_a_training_that_ends_inside_the_window_still_writes_its_profile(tmp_path) -> None:
    profiler = WindowProfiler(first=1, length=30, directory=tmp_path, cuda=False)
    run_steps(profiler, 3)
    profiler.close()
    assert (tmp_path / "trace.json").exists()
    assert isinstance(annotate("step"), contextlib.nullcontext)
