"""The ceilings of this machine: large matrix products and copies, on random data.

python -m benchmarks.peaks
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import Parser, positive_float, save, this_machine
from utils.cli import positive
from utils.errors import one_line_errors

# tf32 is float32 multiplied by the matrix units; a CPU, which has no such mode, computes float32 for both.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32, "float32": torch.float32}
CYCLES_PER_SECOND = 2e9  # at least a GPU's clock, for waits that may be too long but not too short
LONGEST_WAIT = 0.05  # s


def measure(
    device: torch.device, seconds_each: float = 1.0, size: int | None = None, copied_bytes: int | None = None
) -> dict[str, Any]:
    """Matrix products in TFLOP/s by dtype and copies in GB/s: median and range of repeats, `seconds_each` for each."""
    cuda = device.type == "cuda"
    copied_bytes = copied_bytes or (2**30 if cuda else 2**28)
    dtypes = list(DTYPES) if cuda else ["bfloat16", "float32"]
    copies = {"device": device_copy_gb_per_s(device, copied_bytes, seconds_each)}
    if cuda:
        copies["pinned host to device"] = pinned_copy_gb_per_s(device, copied_bytes // 4, seconds_each)
    return {
        "device": str(device),
        "matmul_size": size or matmul_size(device),
        "copied_bytes": copied_bytes,
        "matmul_tflops": {dtype: matmul_tflops(device, dtype, seconds_each, size) for dtype in dtypes},
        "copy_gb_per_s": copies,
    }


def matmul_size(device: torch.device) -> int:
    """The side of a product that fills the device and takes milliseconds."""
    return 8192 if device.type == "cuda" else 1024


def matmul_tflops(
    device: torch.device, dtype: str, seconds: float = 1.0, size: int | None = None
) -> dict[str, float | int]:
    """A square product of normally distributed numbers in one of DTYPES."""
    size = size or matmul_size(device)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, dtype=DTYPES[dtype], device=device, generator=generator) for _ in range(2))
    product = torch.empty_like(left)
    with _float32_products("high" if dtype == "tf32" else "highest", device):
        times = repeat(lambda: torch.mm(left, right, out=product), device, seconds)
    return spread([2 * size**3 / taken / 1e12 for taken in times])


def device_copy_gb_per_s(device: torch.device, size: int, seconds: float = 1.0) -> dict[str, float | int]:
    """A copy from the device's memory to itself; counts bytes read plus bytes written."""
    source = _random_bytes(device, size)
    target = torch.empty_like(source)
    return spread([2 * size / taken / 1e9 for taken in repeat(lambda: target.copy_(source), device, seconds)])


def pinned_copy_gb_per_s(device: torch.device, size: int, seconds: float = 1.0) -> dict[str, float | int]:
    """A copy of page-locked host memory to a GPU; counts the bytes that cross the bus, once."""
    source = _random_bytes(device, size).cpu().pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    times = repeat(lambda: target.copy_(source, non_blocking=True), device, seconds)
    return spread([size / taken / 1e9 for taken in times])


def repeat(
    call: Callable[[], object], device: torch.device, seconds: float, least: int = 3, most: int = 500
) -> list[float]:
    """What each of several calls takes in seconds, after a warm-up: as many as `seconds` hold, within the limits."""
    call()  # compiles, allocates, and lets cuDNN search
    _wait(device)
    started = time.perf_counter()
    call()
    issued = time.perf_counter() - started
    _wait(device)
    count = int(seconds / max(time.perf_counter() - started, 1e-6))
    count = min(max(count, least), most)
    if device.type != "cuda":
        return [_seconds(call) for _ in range(count)]
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2))
    # The device sleeps until the calls are queued: otherwise a short kernel's time would be that of its launch.
    torch.cuda._sleep(int(min(1.5 * issued * count, LONGEST_WAIT) * CYCLES_PER_SECOND))
    for start, end in zip(starts, ends, strict=True):
        start.record()
        call()
        end.record()
    _wait(device)
    return [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]


def spread(values: list[float]) -> dict[str, float | int]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def markdown(result: dict[str, Any]) -> str:
    """A table of all ceilings."""
    lines = ["| ceiling | median | range | n |", "|---|---|---|---|"]
    for kind, unit, places in (("matmul_tflops", "TFLOP/s", 2), ("copy_gb_per_s", "GB/s", 1)):
        for name, values in result[kind].items():
            what = f"matmul {name}" if kind == "matmul_tflops" else f"copy {name}"
            low, middle, high = (f"{values[key]:.{places}f}" for key in ("min", "median", "max"))
            lines.append(f"| {what} | {middle} {unit} | {low} – {high} | {values['n']} |")
    return "\n".join(lines)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _random_bytes(device: torch.device, size: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(256, (size,), dtype=torch.uint8, device=device, generator=generator)


@contextlib.contextmanager
def _float32_products(precision: str, device: torch.device) -> Iterator[None]:
    """float32 matrix products in 'high' (TF32) or 'highest' precision on CUDA; afterwards as before."""
    if device.type != "cuda":
        yield
        return
    # torch holds this setting twice, in an older and a newer form. Setting the newer one alone makes whatever reads
    # the older one fail (torch 2.11's compiler does), so both are set, and both are put back.
    newer = torch.backends.cuda.matmul.fp32_precision
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the two contradict each other already
        older = "highest" if newer == "tf32" else "high"
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        torch.backends.cuda.matmul.fp32_precision = newer


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=positive_float, default=1.0, help="for each ceiling")
    parser.add_argument("--size", type=positive, help="side of the matrices")
    with one_line_errors():
        options = parser.parse_args()
        device = this_machine().device
        result = measure(device, options.seconds, options.size)
        print(markdown(result))
        print(f"written: {save('peaks', result, options.output)}")


if __name__ == "__main__":
    main()
