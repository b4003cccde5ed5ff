"""The convolution table: the real network's layers, each row or the reason it is missing, and consistent totals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks import convolutions
from benchmarks.convolutions import FORMATS, Job, Row, markdown, measure, plan, read_layers, weighted
from utils.profiling import timing

CPU = torch.device("cpu")
SMALL = {"batch": 1, "crop": 8, "width": 4, "scales": 2}
EVERY = ("plain", "space-to-depth")
# down1, down2, up2 and last; the same by space-to-depth with two passes each; their dense convolutions.
PASSES = (2 + 3 + 3 + 3) + 4 * 2 + (2 + 1 + 1 + 3)


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "ROW_SECONDS", 1e-4)
    monkeypatch.setattr(convolutions, "PEAK_SECONDS", 1e-3)
    if not torch.cuda.is_available():
        monkeypatch.setattr(timing, "matmul_size", lambda device: 64)


def test_layers_are_those_of_the_network() -> None:
    full = read_layers(64)
    downs, ups = (f"down{scale}" for scale in range(1, 7)), (f"up{scale}" for scale in range(6, 1, -1))
    assert [layer.name for layer in full] == [*downs, *ups, "last"]
    assert sum(len(layer.passes) for layer in full) == 35
    assert sum(layer.flops * len(layer.passes) for layer in full) == pytest.approx(80.46e9, rel=1e-3)
    down1, *_, last = read_layers(8, width=4, scales=2)
    assert (down1.flops, last.flops) == (2 * 4 * 4 * 4**3 * 4**3, 2 * 8 * 5 * 4**3 * 4**3)


@pytest.mark.parametrize("job", plan(8, ["tf32"], ["NDHWC", "NCDHW"], width=4, scales=2))
def test_passes_return_the_output_and_the_gradients(job: Job) -> None:
    """Gradients of the inputs come first; down1 has none."""
    calls = convolutions.calls(job, CPU, batch=2)
    shapes = {"forward": (2, *job.layer.output_shape), "weight gradient": tuple(job.layer.module.weight.shape)}
    shapes["input gradient"] = (2, *job.layer.input_shape)
    if job.layer.version == "dense" and job.layer.passes == ("input gradient",):
        shapes["input gradient"] = (2, *job.layer.output_shape)
    shapes["backward"] = shapes["input gradient" if job.layer.needs_input_gradient else "weight gradient"]
    assert tuple(calls) == job.layer.passes
    for name, call in calls.items():
        assert tuple(call().shape) == shapes[name]
        assert call().is_contiguous(memory_format=FORMATS[job.format]) or job.layer.version == "space-to-depth"


def test_dense_convolutions_are_those_in_the_layers_computed_by_space_to_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the shuffles, so that the difference between the two is what the shuffles cost."""
    jobs = plan(16, ["tf32"], ["NDHWC"], width=4, scales=4)
    layers = {(job.layer.name, job.layer.version): job for job in jobs}
    used: list[tuple[torch.Size, ...]] = []

    def record(convolution: Any) -> Any:
        def function(x: torch.Tensor, weight: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            used.append((x.shape, weight.shape))
            return convolution(x, weight, *arguments, **options)

        return function

    for owner, name in ((torch.ops.aten, "convolution"), (torch.nn.functional, "conv3d")):
        monkeypatch.setattr(owner, name, record(getattr(owner, name)))
    for name in ("down1", "down2", "up2", "up3", "up4", "last"):
        whole, dense = layers[name, "space-to-depth"], layers[name, "dense"]
        used.clear()
        for call in convolutions.calls(whole, CPU, batch=2).values():
            call()
        assert (torch.Size((2, *dense.layer.input_shape)), dense.layer.module.weight.shape) in used
        assert whole.layer.flops == dense.layer.flops == layers[name, "plain"].layer.flops


def test_a_table_is_complete_and_adds_up() -> None:
    result = measure(CPU, **SMALL, dtypes=["bfloat16", "tf32"], budget=math.inf)
    assert result["missing"] == []
    assert len(result["rows"]) == 4 * PASSES
    for row in result["rows"]:
        assert "error" not in row, row
        assert row["ms_range"][0] <= row["ms"] <= row["ms_range"][1]
        assert row["tflops"] == pytest.approx(row["flops"] / row["ms"] / 1e9)
        assert row["share_of_peak"] == pytest.approx(row["tflops"] / result["peak_tflops"][row["dtype"]])
    plain = [
        row for row in result["rows"] if (row["version"], row["dtype"], row["format"]) == ("plain", "tf32", "NCDHW")
    ]
    total = weighted(result["rows"], "tf32", "NCDHW")
    assert (total["layers"], total["ms"]) == (4, pytest.approx(sum(row["ms"] for row in plain)))
    assert total["share_of_peak"] == pytest.approx(total["tflops"] / result["peak_tflops"]["tf32"])
    assert all(each["complete"] for each in result["totals"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_table_is_complete_on_a_gpu() -> None:
    before = torch.backends.cudnn.benchmark
    result = measure(
        torch.device("cuda"), batch=2, crop=16, width=16, scales=1, dtypes=["bfloat16", "tf32"], budget=120
    )
    assert result["missing"] == []
    assert [row["error"] for row in result["rows"] if "error" in row] == []
    assert all(0 < row["ms"] < 100 for row in result["rows"])
    assert torch.backends.cudnn.benchmark == before


def test_rows_beyond_the_budget_are_listed_as_missing() -> None:
    result = measure(CPU, **SMALL, budget=0)
    assert (result["rows"], result["peak_tflops"]) == ([], {})
    assert len(result["missing"]) == 6 * PASSES
    assert f"{len(result['missing'])} rows" in markdown(result)


def test_a_layer_that_fails_leaves_its_error_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = convolutions.calls

    def failing(job: Job, device: torch.device, batch: int) -> convolutions.Calls:
        if job.layer.name == "up2":
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore about it")
        return real(job, device, batch)

    monkeypatch.setattr(convolutions, "calls", failing)
    result = measure(CPU, **SMALL, dtypes=["tf32"], formats=["NCDHW"], budget=math.inf, peaks={"tf32": 1.0})
    failed = [(row["layer"], row["error"]) for row in result["rows"] if "error" in row]
    assert failed == [("up2", "CUDA out of memory.")] * (3 + 2 + 1)
    assert len(result["rows"]) == PASSES
    assert not result["totals"][0]["complete"]
    assert "(3 of 4 layers)" in markdown(result)


def test_rows_before_a_fault_of_the_device_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_job, jobs = convolutions._measure_job, iter(range(2))

    def faulty(*arguments: Any) -> list[Row]:
        if next(jobs, None) is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return measure_job(*arguments)

    monkeypatch.setattr(convolutions, "_measure_job", faulty)
    result = measure(CPU, **SMALL, dtypes=["tf32"], formats=["NCDHW"], budget=math.inf, peaks={"tf32": 1.0})
    layers = {(row["layer"], row["version"]) for row in result["rows"]}
    assert len(layers) == 2
    assert len(result["rows"]) + len(result["missing"]) == PASSES
    assert markdown(result)


def test_the_best_choice_is_made_layer_by_layer() -> None:
    def row(
        layer: str, dtype: str, ms: float, share: float, format: str = "NDHWC", version: str = "plain", passes: int = 1
    ) -> Row:
        names = {"layer": layer, "version": version, "pass": "forward", "dtype": dtype, "format": format}
        return {**names, "passes": passes, "flops": 10**9, "ms": ms, "share_of_peak": share}

    rows = [
        row("a", "bfloat16", 4.0, 0.5),
        row("a", "float16", 2.0, 0.9),
        row("a", "float16", 1.0, 0.9, version="space-to-depth"),
        row("b", "bfloat16", 1.0, 0.2),
        row("b", "float16", 3.0, 0.1),
        row("b", "float16", 0.1, 0.9, format="NCDHW", passes=3),  # two passes were not measured
        {**row("b", "tf32", 0.0, 0.0), "error": "none"},
    ]
    assert weighted(rows, "bfloat16", "NDHWC")["ms"] == 5.0
    assert weighted(rows, "bfloat16", "NDHWC")["share_of_peak"] == pytest.approx((4 * 0.5 + 1 * 0.2) / 5)
    assert weighted(rows, "float16")["ms"] == 5.0
    best = weighted(rows, versions=EVERY)
    assert best["choices"] == {"a": "float16 NDHWC space-to-depth", "b": "bfloat16 NDHWC"}
    assert (best["ms"], best["tflops"]) == (2.0, pytest.approx(1.0))
    assert weighted(rows)["choices"]["a"] == "float16 NDHWC"
    assert weighted(rows, "tf32")["layers"] == 0
