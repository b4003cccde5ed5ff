"""Profiling of a window of steps (`--enable_manual_profiling`), with named ranges for the parts of a step."""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from utils.config import Config
from utils.distributed.devices import synchronize
from utils.distributed.world import World
from utils.errors import UserError
from utils.log import errors_as_warnings
from utils.run.directory import RunDirectory
from utils.steps import annotate
from utils.steps.annotate import Range

log = logging.getLogger(__name__)

Record = Callable[[Callable[[], str]], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def _recording(recorder: Range, create: Callable[[str], Range], device: torch.device) -> Iterator[None]:
    """The recorder's context, with named ranges that `create` makes."""
    synchronize(device)  # otherwise kernels of earlier steps would be recorded
    with recorder:
        annotate.named_range = create
        try:
            yield
        finally:
            synchronize(device)  # otherwise kernels of the last step would be missing
            annotate.named_range = None


@contextlib.contextmanager
def record_by_nsys(device: torch.device, content: Callable[[], str]) -> Iterator[None]:
    """Context that Nsight Systems captures, which runs around the command; `content` describes it at its end."""
    try:
        with _recording(torch.cuda.profiler.profile(), torch.cuda.nvtx.range, device):
            yield
    finally:
        log.info("Profile of %s: end of the capture range of nsys", content())


@contextlib.contextmanager
def record_by_torch(directory: RunDirectory, device: torch.device, content: Callable[[], str]) -> Iterator[None]:
    """Context that torch.profiler records; writes a trace and a table. If that fails, logs a warning."""
    (trace, table), on_gpu, kinds = directory.profile, device.type == "cuda", torch.profiler.ProfilerActivity
    profile: Any = torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if on_gpu else [])])
    try:
        with _recording(profile, torch.profiler.record_function, device):
            yield
    finally:
        with errors_as_warnings(f"Cannot write the profile {trace}"):
            profile.export_chrome_trace(str(trace))
            order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
            table.write_text(profile.key_averages().table(sort_by=order, row_limit=20), encoding="utf-8")
            log.info("Profile of %s: %s (for https://ui.perfetto.dev), %s", content(), trace, table)


class Profiler:
    """Profiles the steps first … first + length − 1, counted from 0, or up to the end of the run; by default none."""

    def __init__(self, first: float = math.inf, length: int = 0, record: Record = contextlib.nullcontext) -> None:
        self._first, self._end, self._record = first, first + length, record
        self._step: int | None = None  # the latest step
        self._recording = contextlib.ExitStack()

    def before_step(self, step: int) -> None:
        """Called before each step, counted from 0 over the whole run."""
        if step == self._first:
            steps = self._record(lambda: f"steps {self._first} to {self._step}, counted from 0")
            self._recording.enter_context(steps)
        elif step == self._end:
            self.close()
        elif self._step is None and step > self._first:
            fault = f"its first step is {self._first}, but the run resumes at step {step}"
            log.warning("No profile: %s; raise profile.first_step, or give another --run_num", fault)
        self._step = step

    def close(self) -> None:
        self._recording.close()


def _runs_under_nsys() -> bool:
    return "NSYS_PROFILING_SESSION_ID" in os.environ  # nsys sets it


@contextlib.contextmanager
def nsys_capture(world: World, content: str) -> Iterator[None]:
    """Context that nsys captures on rank 0, if it runs around the command."""
    captures, on_gpu = world.is_root and _runs_under_nsys(), world.device.type == "cuda"
    if captures and not on_gpu:
        log.warning("No profile: nsys captures GPUs, but this run uses %s", world.device)
    with record_by_nsys(world.device, lambda: content) if captures and on_gpu else contextlib.nullcontext():
        yield


def build_profiler(config: Config, world: World, directory: RunDirectory) -> Profiler:
    """The profiler of rank 0, if the config asks for one; UserError, on every rank, if that profile is impossible."""
    if not config.enable_manual_profiling:
        if world.is_root and (_runs_under_nsys() or os.environ.get("ENABLE_PROFILING") == "1"):
            log.warning("No profile: nsys captures nothing without --enable_manual_profiling; add it")
        return Profiler()
    options, on_gpu = config.profile, world.device.type == "cuda"
    with_nsys = options.profiler == "nsys" or (options.profiler == "auto" and on_gpu)
    if with_nsys and not on_gpu:
        raise UserError(f"profile.profiler nsys needs a GPU, but this run uses {world.device}; use --profiler=torch")
    first = _first_step(config)
    if not world.is_root:
        return Profiler()
    if with_nsys and not _runs_under_nsys():
        log.warning("No nsys runs around this command; if no profile appears, use --profiler=torch")
    record = partial(record_by_nsys, world.device) if with_nsys else partial(record_by_torch, directory, world.device)
    return Profiler(first, options.steps, record)


def _first_step(config: Config) -> int:
    """The first step of the window; by default the sixth step of the second epoch, when everything is warmed up."""
    first = config.profile.first_step
    if first is None:
        second_epoch = config.steps_per_epoch if config.num_epochs > 1 else 0
        return second_epoch + min(5, config.steps_per_epoch - 1)
    if first >= config.total_steps:
        raise UserError(f"profile.first_step {first} must be less than the {config.total_steps} steps of the run")
    return first
