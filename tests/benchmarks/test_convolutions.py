"""The convolution table: the real network's layers, every row or its reason, and sums that add up."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import convolutions
from benchmarks.convolutions import Job, Layer, Row, markdown, measure, plan, read_layers, weighted
from networks import build_network
from utils.distributed import Launch, World

CPU = torch.device("cpu")
SMALL = {"batch": 1, "crop": 8, "width": 4, "scales": 2}
SMALL_PASSES = 2 + 3 + 3 + 3  # down1, down2, up2, last
REWRITTEN = 4 if convolutions._rewrites() else 0


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "ROW_SECONDS", 1e-4)
    monkeypatch.setattr(convolutions, "PEAK_SECONDS", 1e-3)


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")][1:]


def test_full_network_has_35_passes_of_80_gflop() -> None:
    layers = read_layers(64)
    assert [layer.name for layer in layers] == [
        *(f"down{scale}" for scale in range(1, 7)),
        *(f"up{scale}" for scale in range(6, 1, -1)),
        "last",
    ]
    assert sum(len(layer.passes) for layer in layers) == 35
    assert [layer.name for layer in layers if not layer.needs_input_gradient] == ["down1"]
    assert sum(layer.flops * len(layer.passes) for layer in layers) == pytest.approx(80.46e9, rel=1e-3)


def test_layers_are_read_from_the_network() -> None:
    down1, *_, last = read_layers(8, width=4, scales=2)
    common = {"stride": (2,) * 3, "padding": (1,) * 3, "dilation": (1,) * 3, "output_padding": (0,) * 3, "groups": 1}
    assert down1 == Layer(
        "down1", False, (4, 8, 8, 8), (4, 4, 4, 4), (4, 4, 4, 4, 4), **common, needs_input_gradient=False
    )
    assert last == Layer("last", True, (8, 4, 4, 4), (5, 8, 8, 8), (8, 5, 4, 4, 4), **common, needs_input_gradient=True)
    assert down1.flops == 2 * 4 * 4 * 4**3 * 4**3
    assert last.flops == 2 * 8 * 5 * 4**3 * 4**3


@pytest.mark.parametrize("name", ["down1", "up2"])
@pytest.mark.parametrize("format", convolutions.FORMATS)
def test_passes_are_those_of_autograd(name: str, format: str) -> None:
    layer = next(layer for layer in read_layers(8, width=4, scales=2) if layer.name == name)
    calls = convolutions._plain_calls(Job(layer, "tf32", format), CPU, batch=2)
    draw = convolutions._random(Job(layer, "tf32", format), CPU)
    inputs = draw((2, *layer.input_shape)).requires_grad_()
    module = build_network("unet", 8, width=4, scales=2).get_submodule(name)
    module.weight.data = draw(layer.weight_shape, 0.02)
    module.bias.data.zero_()
    output = module(inputs)
    expected = torch.autograd.grad(output, [inputs, module.weight], draw(tuple(output.shape)))
    torch.testing.assert_close(calls["forward"](), output)
    torch.testing.assert_close(calls["input gradient"](), expected[0])
    torch.testing.assert_close(calls["weight gradient"](), expected[1])


@pytest.mark.skipif(not REWRITTEN, reason="networks.rewrites is not there")
@pytest.mark.parametrize("name", ["down1", "last"])
def test_rewritten_layers_have_the_shapes_of_the_plain_ones(name: str) -> None:
    layer = next(layer for layer in read_layers(8, width=4, scales=2) if layer.name == name)
    calls = convolutions._rewritten_calls(Job(layer, "bfloat16", "NDHWC", "rewritten"), CPU, batch=2)
    assert calls["forward"]().shape == (2, *layer.output_shape)
    assert calls["backward"]().shape == (layer.weight_shape if name == "down1" else (2, *layer.input_shape))


def test_small_table_is_complete_and_consistent() -> None:
    result = measure(CPU, **SMALL, dtypes=["bfloat16", "tf32"], budget=600)
    assert result["missing"] == []
    assert len(result["rows"]) == 4 * (SMALL_PASSES + REWRITTEN)
    for row in result["rows"]:
        assert "error" not in row, row
        assert row["ms_range"][0] <= row["ms"] <= row["ms_range"][1]
        assert row["tflops"] == pytest.approx(row["flops"] / row["ms"] / 1e9)
        assert row["share_of_peak"] == pytest.approx(row["tflops"] / result["peak_tflops"][row["dtype"]])
    plain = [
        row for row in result["rows"] if (row["version"], row["dtype"], row["format"]) == ("plain", "tf32", "NCDHW")
    ]
    total = weighted(result["rows"], "tf32", "NCDHW")
    assert total["layers"] == 4
    assert total["ms"] == pytest.approx(sum(row["ms"] for row in plain))
    assert total["share_of_peak"] == pytest.approx(total["tflops"] / result["peak_tflops"]["tf32"])
    assert all(each["complete"] and math.isfinite(each["ms"]) for each in result["totals"])
    text = markdown(result)
    assert len(table(text)) == SMALL_PASSES + REWRITTEN + 1 + len(result["totals"])
    json.dumps(result)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_small_table_on_a_gpu() -> None:
    before = torch.backends.cudnn.benchmark
    result = measure(
        torch.device("cuda"), batch=2, crop=16, width=16, scales=1, dtypes=["bfloat16", "tf32"], budget=120
    )
    assert result["missing"] == []
    assert [row["error"] for row in result["rows"] if "error" in row] == []
    assert all(0 < row["ms"] < 100 for row in result["rows"])
    assert torch.backends.cudnn.benchmark == before


def test_without_budget_all_rows_are_missing_and_the_result_is_valid() -> None:
    result = measure(CPU, **SMALL, budget=0)
    assert result["rows"] == []
    assert result["peak_tflops"] == {}
    assert len(result["missing"]) == 6 * (SMALL_PASSES + REWRITTEN)
    assert {"layer": "down1", "version": "plain", "pass": "forward", "dtype": "tf32", "format": "NCDHW"} in result[
        "missing"
    ]
    text = markdown(result)
    assert len(table(text)) == SMALL_PASSES + REWRITTEN + 1 + len(result["totals"])
    assert f"{len(result['missing'])} rows" in text
    json.dumps(result)


def test_most_valuable_rows_come_first() -> None:
    jobs = plan(read_layers(8, width=4, scales=2), convolutions.DTYPES, convolutions.FORMATS)
    order = list(dict.fromkeys((job.dtype, job.format) for job in jobs))
    assert order[:3] == [("bfloat16", "NDHWC"), ("bfloat16", "NCDHW"), ("float16", "NDHWC")]
    first = [job.layer.flops for job in jobs[:4]]
    assert first == sorted(first, reverse=True)


def test_what_fails_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = convolutions._plain_calls

    def failing(job: Job, device: torch.device, batch: int) -> convolutions.Calls:
        if job.layer.name == "up2":
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore about it")
        calls = real(job, device, batch)
        if job.layer.name == "down2":
            calls["input gradient"] = lambda: torch.zeros(2) @ torch.zeros(3)
        return calls

    monkeypatch.setattr(convolutions, "_plain_calls", failing)
    result = measure(CPU, **SMALL, dtypes=["tf32"], formats=["NCDHW"], budget=600, peaks={"tf32": 1.0})
    failed = {(row["layer"], row["pass"]): row["error"] for row in result["rows"] if "error" in row}
    assert set(failed) == {
        ("up2", "forward"),
        ("up2", "input gradient"),
        ("up2", "weight gradient"),
        ("down2", "input gradient"),
    }
    assert failed["up2", "forward"] == "CUDA out of memory."
    assert len(result["rows"]) == SMALL_PASSES + REWRITTEN
    assert not result["totals"][0]["complete"]
    text = markdown(result)
    assert "(2 of 4 layers)" in text
    assert text.count("Error in") == 4


def made_up(
    layer: str, dtype: str, format: str, ms: float, share: float, version: str = "plain", passes: int = 1
) -> Row:
    return {
        "layer": layer,
        "version": version,
        "pass": "forward",
        "dtype": dtype,
        "format": format,
        "passes": passes,
        "flops": 10**9,
        "ms": ms,
        "share_of_peak": share,
    }


def test_best_choice_is_made_layer_by_layer() -> None:
    rows = [
        made_up("a", "bfloat16", "NDHWC", 4.0, 0.5),
        made_up("a", "float16", "NDHWC", 2.0, 0.9),
        made_up("a", "float16", "NDHWC", 1.0, 0.9, "rewritten"),
        made_up("b", "bfloat16", "NDHWC", 1.0, 0.2),
        made_up("b", "float16", "NDHWC", 3.0, 0.1),
        made_up("b", "float16", "NCDHW", 0.1, 0.9, passes=3),  # two passes were not measured
        {**made_up("b", "tf32", "NDHWC", 0.0, 0.0), "error": "none"},
    ]
    assert weighted(rows, "bfloat16", "NDHWC")["ms"] == 5.0
    assert weighted(rows, "bfloat16", "NDHWC")["share_of_peak"] == pytest.approx((4 * 0.5 + 1 * 0.2) / 5)
    assert weighted(rows, "float16")["ms"] == 5.0
    best = weighted(rows, rewrites=True)
    assert best["choices"] == {"a": "float16 NDHWC rewritten", "b": "bfloat16 NDHWC"}
    assert best["ms"] == 2.0
    assert best["tflops"] == pytest.approx(1.0)
    assert weighted(rows)["choices"]["a"] == "float16 NDHWC"
    assert weighted(rows, "tf32")["layers"] == 0


def test_command_writes_the_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A crop of 4 cells can be halved twice.
    command = ["convolutions", "--batch", "1", "--crop", "4", "--width", "2", "--dtypes", "tf32", "--formats", "NCDHW"]
    monkeypatch.setattr(sys, "argv", [*command, "--budget", "600", "--output", str(tmp_path / "new")])
    monkeypatch.setattr(convolutions, "this_machine", lambda: World(Launch("test"), CPU))
    convolutions.main()
    result: dict[str, Any] = json.loads((tmp_path / "new" / "convolutions.json").read_text())
    assert result["settings"]["scales"] == 2
    assert result["missing"] == []
    assert "provenance" in result
    assert "| last | weight gradient |" in capsys.readouterr().out


def test_without_rewrites_the_plain_layers_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networks.rewrites", None)
    jobs = plan(read_layers(8, width=4, scales=2), ["bfloat16"], ["NDHWC"])
    assert [job.version for job in jobs] == ["plain"] * 4


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_allowed_and_put_back(allowed: bool) -> None:
    convolution = torch.backends.cudnn.conv
    try:
        torch.backends.cudnn.allow_tf32 = allowed
        before = convolution.fp32_precision
        with convolutions._tf32_convolutions(torch.device("cuda")):
            assert convolution.fp32_precision == "tf32"
            assert torch.backends.cudnn.allow_tf32
        assert (convolution.fp32_precision, torch.backends.cudnn.allow_tf32) == (before, allowed)
    finally:
        torch.backends.cudnn.allow_tf32 = True
