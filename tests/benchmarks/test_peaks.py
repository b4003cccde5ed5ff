"""The ceilings: what is counted, what is timed, and that float32's precision is left as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks import peaks

CPU = torch.device("cpu")


def settings() -> tuple[str, str]:
    """Both forms of torch's setting; the older one cannot be read where they contradict each other."""
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = "contradiction"
    return torch.backends.cuda.matmul.fp32_precision, older


class Clock:
    """Events that are 2 ms apart, and all that was queued."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = math.nan

    def record(self) -> None:
        Clock.now += 1
        self.at = Clock.now

    def elapsed_time(self, end: Clock) -> float:
        return 2 * (end.at - self.at)


def check(result: dict[str, Any], dtypes: list[str], copies: list[str]) -> None:
    assert list(result["matmul_tflops"]) == dtypes
    assert list(result["copy_gb_per_s"]) == copies
    for values in [*result["matmul_tflops"].values(), *result["copy_gb_per_s"].values()]:
        assert 0 < values["min"] <= values["median"] <= values["max"] < math.inf
        assert values["n"] >= 3
    lines = peaks.markdown(result).splitlines()
    assert len(lines) == 2 + len(dtypes) + len(copies)


def test_a_cpu_has_two_products_and_a_copy() -> None:
    check(peaks.measure(CPU, 0.002, size=64, copied_bytes=4096), ["bfloat16", "float32"], ["device"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_four_products_and_two_copies_and_tf32_is_faster() -> None:
    before = settings()
    result = peaks.measure(torch.device("cuda"), 0.1, size=4096, copied_bytes=2**26)
    check(result, ["bfloat16", "float16", "tf32", "float32"], ["device", "pinned host to device"])
    matmul = {dtype: values["median"] for dtype, values in result["matmul_tflops"].items()}
    assert matmul["bfloat16"] > matmul["tf32"] > matmul["float32"]
    assert settings() == before


def test_operations_are_two_a_multiplication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "repeat", lambda *arguments: [1e-3, 2e-3, 4e-3])
    assert peaks.matmul_tflops(CPU, "float32", size=100) == {
        "median": pytest.approx(1e-3),
        "min": pytest.approx(0.5e-3),
        "max": pytest.approx(2e-3),
        "n": 3,
    }
    # 1 MB is read and 1 MB written.
    assert peaks.device_copy_gb_per_s(CPU, 10**6)["median"] == pytest.approx(1.0)


def test_repeats_fill_the_time_within_limits() -> None:
    calls = []
    assert len(peaks.repeat(lambda: calls.append(0), CPU, seconds=0.0)) == 3
    assert len(calls) == 5  # two to warm up
    assert len(peaks.repeat(lambda: None, CPU, seconds=1.0, most=7)) == 7


def test_a_gpu_is_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    assert peaks.repeat(lambda: None, torch.device("cuda"), seconds=1.0, most=5) == [pytest.approx(2e-3)] * 5
    assert 0 <= slept[0] <= peaks.LONGEST_WAIT * peaks.CYCLES_PER_SECOND


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize(("older", "newer"), [("highest", "none"), ("high", "tf32"), ("highest", "tf32")])
def test_precision_is_put_back(older: str, newer: str, precision: str) -> None:
    start = settings()
    try:
        torch.set_float32_matmul_precision(older)
        torch.backends.cuda.matmul.fp32_precision = newer
        before = settings()
        with peaks._float32_products(precision, torch.device("cuda")):
            assert settings() == ("tf32" if precision == "high" else "ieee", precision)
        assert settings() == before
    finally:
        # Both forms say the same again, or later readers refuse.
        torch.set_float32_matmul_precision("highest" if start[1] == "contradiction" else start[1])
        torch.backends.cuda.matmul.fp32_precision = start[0]
