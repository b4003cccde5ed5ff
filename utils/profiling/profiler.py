"""Seeing where a step's time goes: named ranges, and a window of steps under a profiler.

Nsight Systems, run around the training (`nsys profile -c cudaProfilerApi …`), takes NVTX ranges and the CUDA profiler's
start and stop. torch.profiler needs no such tool: it writes a trace for https://ui.perfetto.dev and a table.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

Range = contextlib.AbstractContextManager[Any]

_named_range: Callable[[str], Range] | None = None  # that of the profiler at work


def annotate(name: str) -> Range:
    """A named range in a profile; free while nothing is profiled."""
    return contextlib.nullcontext() if _named_range is None else _named_range(name)


class Nsys:
    """Nsight Systems' capture range; the tool around the training writes the file."""

    def named_range(self, name: str) -> Range:
        return torch.cuda.nvtx.range(name)

    def start(self) -> None:
        torch.cuda.profiler.start()

    def stop(self, steps: str) -> None:
        torch.cuda.profiler.stop()
        log.info("Profile of %s: nsys' capture range has ended", steps)


class TorchProfiler:
    """torch.profiler on the host and, where there is one, the GPU: trace.json.gz and top_operations.txt.

    With a rank, both names carry it: every rank writes its own.
    """

    def __init__(self, directory: Path, on_gpu: bool, rank: int | None = None) -> None:
        suffix = "" if rank is None else f"_rank{rank}"
        self._trace, self._table = directory / f"trace{suffix}.json.gz", directory / f"top_operations{suffix}.txt"
        self._on_gpu = on_gpu
        self._profile: Any = None

    def named_range(self, name: str) -> Range:
        return torch.profiler.record_function(name)

    def start(self) -> None:
        kinds = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if self._on_gpu else [])])
        self._profile.start()

    def stop(self, steps: str) -> None:
        """Writes the files; where that fails, a warning: no training ends for its profile."""
        profile, self._profile = self._profile, None
        profile.stop()
        try:
            self._write(profile)
        except OSError as error:
            reason = error.strerror or error
            log.warning("Cannot write the profile %s: %s; training goes on without it", self._trace, reason)
        else:
            log.info("Profile of %s: %s (for https://ui.perfetto.dev), %s", steps, self._trace, self._table)

    def _write(self, profile: Any) -> None:
        """Both files, whole; raises OSError, and leaves what stood under their names."""
        directory = self._trace.parent
        directory.mkdir(parents=True, exist_ok=True)  # rank 0 made it on its own node
        with tempfile.TemporaryDirectory(dir=directory, prefix=".profile-", ignore_cleanup_errors=True) as name:
            plain, trace, table = (Path(name) / part for part in ("plain.json", self._trace.name, self._table.name))
            # Given a name in .gz torch compresses by itself, but would do so with a broken trace, too.
            profile.export_chrome_trace(str(plain))
            if not _is_whole(plain):
                raise OSError("torch could not write the trace; is the disk full?")
            with open(plain, "rb") as source, gzip.open(trace, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target)
            order = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
            table.write_text(profile.key_averages().table(sort_by=order, row_limit=20), encoding="utf-8")
            os.replace(trace, self._trace)
            os.replace(table, self._table)


def _is_whole(trace: Path) -> bool:
    """torch raises nothing where the disk is full: the file is missing then, or lacks its end."""
    if not trace.exists():
        return False
    with open(trace, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read() == b"}"


class NullProfiler:
    """Profiles nothing."""

    def before_step(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class WindowProfiler(NullProfiler):
    """Profiles steps first … first + length − 1, counted from the start of training, or up to its end."""

    def __init__(self, first: int, length: int, tool: Nsys | TorchProfiler, device: torch.device) -> None:
        self._first, self._end = first, first + length
        self._tool, self._device = tool, device
        self._step = 0  # the latest
        self._running = False

    def before_step(self, step: int) -> None:
        if step == self._first:
            self._start()
        elif step == self._end:
            self.close()
        self._step = step

    def close(self) -> None:
        if not self._running:
            return
        global _named_range
        self._synchronize()  # or the last step's kernels would be missing
        self._running, _named_range = False, None
        self._tool.stop(f"steps {self._first} to {self._step}, counted from 0")

    def _start(self) -> None:
        global _named_range
        self._synchronize()  # or the kernels of earlier steps would be in it
        self._tool.start()
        self._running, _named_range = True, self._tool.named_range

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
