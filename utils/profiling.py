"""Seeing where a step's time goes: named ranges, and a window of steps under a profiler.

On CUDA the ranges are NVTX ranges and the window starts and stops Nsight Systems' capture (`nsys profile -c
cudaProfilerApi …`); elsewhere torch.profiler writes a trace for https://ui.perfetto.dev and a table.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

_annotating = False


def annotate(name: str) -> contextlib.AbstractContextManager[Any]:
    """A named range in a profile; free while nothing is profiled."""
    if not _annotating:
        return contextlib.nullcontext()
    return torch.cuda.nvtx.range(name) if torch.cuda.is_available() else torch.profiler.record_function(name)


class NoProfiler:
    """Profiles nothing."""

    def before_step(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class WindowProfiler(NoProfiler):
    """Profiles steps first … first + length − 1, counted from the start of training."""

    def __init__(self, first: int, length: int, directory: Path, cuda: bool) -> None:
        self._first, self._last = first, first + length
        self._directory, self._cuda = directory, cuda
        self._profile: Any = None
        self._running = False

    def before_step(self, step: int) -> None:
        if step == self._first:
            self._start()
        elif step == self._last:
            self.close()

    def close(self) -> None:
        if not self._running:
            return
        global _annotating
        self._running = _annotating = False
        if self._cuda:
            torch.cuda.profiler.stop()
            return
        self._profile.stop()
        trace, table = self._directory / "trace.json", self._directory / "top_operations.txt"
        self._profile.export_chrome_trace(str(trace))
        table.write_text(self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
        log.info("Profile of steps %d to %d: %s, %s", self._first, self._last - 1, trace, table)

    def _start(self) -> None:
        global _annotating
        self._running = _annotating = True
        if self._cuda:
            torch.cuda.profiler.start()
            return
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._profile.start()
