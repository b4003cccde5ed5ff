"""The upper bounds: operations and bytes counted, TF32 restored; and the benchmarks of the loop and of checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoints, loop_overhead, peaks
from utils.profiling import timing

CPU = torch.device("cpu")


def settings() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def check(result: dict[str, Any], dtypes: list[str], copies: list[str]) -> None:
    assert list(result["matmul_tflops"]) == dtypes
    assert list(result["copy_gb_per_s"]) == copies
    for values in [*result["matmul_tflops"].values(), *result["copy_gb_per_s"].values()]:
        assert 0 < values["min"] <= values["median"] <= values["max"] < math.inf


def test_a_cpu_has_two_matrix_products_and_a_copy() -> None:
    check(peaks.measure(CPU, 0.002, size=64, copied_bytes=4096), ["bfloat16", "float32"], ["device"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_has_four_matrix_products_and_two_copies_and_tf32_is_faster() -> None:
    before = settings()
    result = peaks.measure(torch.device("cuda"), 0.1, size=4096, copied_bytes=2**26)
    check(result, ["bfloat16", "float16", "tf32", "float32"], ["device", "pinned host to device"])
    matmul = {dtype: values["median"] for dtype, values in result["matmul_tflops"].items()}
    assert matmul["bfloat16"] > matmul["tf32"] > matmul["float32"]
    assert settings() == before


def test_a_multiplication_counts_as_two_operations_and_a_copy_as_read_and_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "repeat", lambda *arguments: [1e-3, 2e-3, 4e-3])
    result = peaks.matmul_tflops(CPU, "float32", size=100)
    assert result == pytest.approx({"median": 1e-3, "min": 0.5e-3, "max": 2e-3, "n": 3})
    assert peaks.copy_gb_per_s(CPU, CPU, 10**6)["median"] == pytest.approx(1.0)


@pytest.mark.parametrize("enabled", [True, False])
def test_tf32_is_restored(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before = settings()
    with peaks.tf32(enabled):
        assert settings() == (enabled, enabled)
    assert settings() == before


@pytest.mark.parametrize(("benchmark", "steps"), [(checkpoints, 1), (loop_overhead, 2)])
def test_benchmarks_of_the_loop_and_of_checkpoints_write_their_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], benchmark: Any, steps: int
) -> None:
    small = ["--width=2", "--scales=2", "--crop=8", "--batch=1", "--trials=2", f"--steps={steps}"]
    monkeypatch.setattr("sys.argv", ["benchmark", *small, f"--output={tmp_path}"])
    threads = torch.get_num_threads()
    try:
        benchmark.main()
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert result["settings"]["steps"] == steps
    assert result["provenance"]["command"]
    assert f"written: {path}" in capsys.readouterr().out
