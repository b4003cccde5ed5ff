"""Upper bounds of this machine: throughput of large matrix products and copies, on random data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common import ranged, spread, table
from utils.profiling import timing

# tf32 is float32 computed by the tensor cores; a CPU, which has no such mode, computes float32 for both.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32, "float32": torch.float32}


def measure(
    device: torch.device, seconds_each: float = 1.0, size: int | None = None, copied_bytes: int | None = None
) -> dict[str, Any]:
    """Matrix products in TFLOP/s by dtype and copies in GB/s: median and range of repeats within `seconds_each`."""
    cuda = device.type == "cuda"
    copied_bytes = copied_bytes or (2**30 if cuda else 2**28)
    dtypes = list(DTYPES) if cuda else ["bfloat16", "float32"]
    copies = {"device": copy_gb_per_s(device, device, copied_bytes, seconds_each)}
    if cuda:
        copies["pinned host to device"] = copy_gb_per_s(torch.device("cpu"), device, copied_bytes // 4, seconds_each)
    return {
        "device": str(device),
        "matmul_size": size or timing.matmul_size(device),
        "copied_bytes": copied_bytes,
        "matmul_tflops": {dtype: matmul_tflops(device, dtype, seconds_each, size) for dtype in dtypes},
        "copy_gb_per_s": copies,
    }


def matmul_tflops(device: torch.device, dtype: str, seconds: float = 1.0, size: int | None = None) -> dict[str, Any]:
    """The product of two square matrices of normally distributed numbers in one of DTYPES."""
    with tf32(dtype == "tf32" and device.type == "cuda"):
        return spread(timing.matmul_tflops(device, DTYPES[dtype], seconds, size))


def copy_gb_per_s(source: torch.device, target: torch.device, size: int, seconds: float = 1.0) -> dict[str, Any]:
    """A copy of random bytes; counts bytes read plus bytes written, or once those that cross the bus to a GPU."""
    generator = torch.Generator(source).manual_seed(0)
    values = torch.randint(256, (size,), dtype=torch.uint8, device=source, generator=generator)
    crosses = source.type != target.type
    values = values.pin_memory() if crosses else values
    copied = torch.empty(size, dtype=torch.uint8, device=target)
    times = timing.repeat(lambda: copied.copy_(values, non_blocking=True), target, seconds)
    return spread([(1 if crosses else 2) * size / taken / 1e9 for taken in times])


def markdown(result: dict[str, Any]) -> str:
    """A table of all upper bounds."""
    rows = []
    for kind, what, unit, form in (
        ("matmul_tflops", "matmul", "TFLOP/s", ".2f"),
        ("copy_gb_per_s", "copy", "GB/s", ".1f"),
    ):
        rows += [(f"{what} {name}", unit, ranged(values, form), values["n"]) for name, values in result[kind].items()]
    return table(("upper bound", "unit", "median (range)", "n"), rows, left=2)


@contextlib.contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Turns TF32 on or off for float32 matrix products and convolutions on CUDA; restored afterward.

    Uses PyTorch's older switches, like `utils.steps.backends`.
    """
    cublas, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cublas.allow_tf32, cudnn.allow_tf32
    try:
        cublas.allow_tf32 = cudnn.allow_tf32 = enabled
        yield
    finally:
        cublas.allow_tf32, cudnn.allow_tf32 = before
