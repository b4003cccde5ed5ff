"""Timing of repeated calls on a device, and their statistics."""

import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch

from utils.distributed.devices import synchronize

CYCLES_PER_SECOND = 2e9  # at least a GPU's clock rate: waits may be too long but not too short
LONGEST_WAIT = 0.05  # s


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, range and all values."""
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
    return {**spread, "trials": list(values)}


def repeat(
    call: Callable[[], object], device: torch.device, seconds: float, least: int = 3, most: int = 500
) -> list[float]:
    """Seconds of each of several calls after a warm-up: as many calls as fit into `seconds`, within the limits."""
    call()  # compiles, allocates, and runs cuDNN's search
    synchronize(device)
    started = time.perf_counter()
    call()
    issued = time.perf_counter() - started
    synchronize(device)
    count = int(seconds / max(time.perf_counter() - started, 1e-6))
    count = min(max(count, least), most)
    if device.type != "cuda":
        return timeit.repeat(call, number=1, repeat=count)
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2))
    # The device sleeps until the calls are queued: otherwise the launch of a short kernel would be timed.
    torch.cuda._sleep(int(min(1.5 * issued * count, LONGEST_WAIT) * CYCLES_PER_SECOND))
    for start, end in zip(starts, ends, strict=True):
        start.record()
        call()
        end.record()
    synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]
