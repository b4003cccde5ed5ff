"""The ledger: kernels by category, overlaps counted once, and a step that adds up to 100 %."""

from __future__ import annotations

import ast
import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import ledger
from benchmarks.common import REPOSITORY
from benchmarks.ledger import CATEGORIES, Kernel, classify, markdown, measure, union
from networks import build_loss, build_network

CPU = torch.device("cpu")

NAMES = {
    "convolutions": (
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1_"
        "execute_segment_k_off_kernel__5x_cudnn",
        "void cudnn::ops::scalePackedTensor_kernel<__nv_bfloat16, float>(long, __nv_bfloat16*, float)",
        "aten::mkldnn_convolution",
    ),
    "layout and casts": (
        "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true, (cudnnKernelDataType_t)0>"
        "(cudnn::ops::nchw2nhwc_params_t<float>, __nv_bfloat16 const*, __nv_bfloat16*)",
        "triton_poi_fused__to_copy_clone_12",
    ),
    "pointwise": (
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<at::native::"
        "(anonymous namespace)::OpaqueType<2u>, unsigned int, 5, 64, 64>(...)",
        "triton_poi_fused__to_copy_convolution_leaky_relu_0",
    ),
    "optimizer": ("aten::_fused_adam_",),
    "communication": ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "gloo:all_reduce"),
    "copies": (
        "Memcpy HtoD (Pinned -> Device)",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
    ),
    "other": ("void dali::kernels::Unknown<float>(int)", "cudaLaunchKernel"),
}


def test_kernels_are_classified_by_name() -> None:
    found = {name: classify(name) for names in NAMES.values() for name in names}
    assert found == {name: category for category, names in NAMES.items() for name in names}


def is_kernel(node: ast.AST) -> bool:
    """True for a function that Triton compiles and that returns nothing; others are parts of kernels."""
    if not isinstance(node, ast.FunctionDef) or "triton.jit" not in ast.unparse(node).partition("def ")[0]:
        return False
    return not any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(node))


def test_every_kernel_of_this_project_has_a_category() -> None:
    paths = [path for folder in ("networks", "utils") for path in (REPOSITORY / folder).rglob("*.py")]
    names = [node.name for path in paths for node in ast.walk(ast.parse(path.read_text())) if is_kernel(node)]
    assert {"bias_activation", "gather", "tail_l1"} <= set(names)
    assert [name for name in names if classify(name) == "other"] == []


def test_exposed_time_counts_overlaps_once_and_adds_up_to_the_step() -> None:
    """Time that overlaps with a convolution is counted as the convolution's."""
    assert union([(5, 6), (1, 3), (2, 5), (3, 3), (8, 9)]) == 6
    kernels = [
        Kernel("sm90_xmma_fprop_implicit_gemm", 0, 4000),
        Kernel("gather", 3000, 5000),
        Kernel("gather", 6000, 7000),
        Kernel("triton_poi_fused_relu_0", 7000, 8000),
        Kernel("mystery", 9000, 9500),
    ]
    result = ledger.ledger(kernels, [6.0, 4.0], top=2)
    assert (result["step_ms"], result["busy_ms"]) == pytest.approx((5.0, 3.75))
    categories = result["categories"]
    milliseconds = {name: sums["ms"] for name, sums in categories.items() if sums["ms"]}
    assert milliseconds == {"convolutions": 2.0, "pointwise": 0.5, "copies": 1.5, "other": 0.25}
    assert categories["convolutions"]["exposed_ms"] == pytest.approx(2.0)
    assert categories["copies"]["exposed_ms"] == pytest.approx(1.0)
    assert result["gaps"] == pytest.approx({"ms": 1.25, "percent": 25.0})
    check(result)
    assert [(entry["name"], entry["runs"]) for entry in result["top"]] == [
        ("sm90_xmma_fprop_implicit_gemm", 0.5),
        ("gather", 1.0),
    ]
    assert [entry["name"] for entry in result["other"]] == ["mystery"]
    assert "`mystery`" in markdown(result)
    empty = ledger.ledger([], [1.0])
    assert empty["gaps"]["percent"] == pytest.approx(100)
    assert "saw no kernels" in markdown(empty)


def check(result: dict[str, Any]) -> None:
    percents = [sums["percent"] for sums in result["categories"].values()]
    assert sum(percents) + result["gaps"]["percent"] == pytest.approx(100)
    assert all(0 <= sums["exposed_ms"] <= sums["ms"] + 1e-9 for sums in result["categories"].values())
    text = markdown(result)
    for category in (*CATEGORIES, "gaps"):
        assert f"| {category} |" in text
    json.dumps(result)


class Training:
    """Steps of a small network."""

    def __init__(self, device: torch.device) -> None:
        self.network = build_network("unet", 8, width=4, scales=2).to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), 1e-4, fused=True)
        self.loss = build_loss("l1")
        self.inputs = torch.randn(2, 4, 8, 8, 8, device=device)
        self.targets = torch.randn(2, 5, 8, 8, 8, device=device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.network(self.inputs), self.targets).backward()
        self.optimizer.step()


def test_ledger_of_a_training_step_on_a_cpu() -> None:
    result = measure(Training(CPU), CPU, steps=2, warmup=1)
    check(result)
    assert result["steps"] == 2
    for category in ("convolutions", "pointwise", "optimizer"):
        assert result["categories"][category]["ms"] > 0
    assert len(result["top"]) == ledger.TOP


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_ledger_of_a_training_step_on_a_gpu() -> None:
    device = torch.device("cuda")
    result = measure(Training(device), device, steps=3)
    check(result)
    for category in ("convolutions", "pointwise", "optimizer"):
        assert result["categories"][category]["ms"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_of_a_cuda_graph_are_seen() -> None:
    device = torch.device("cuda")
    left = torch.randn(256, 256, device=device)
    left @ left  # cuBLAS allocates its workspace before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (left @ left).relu()
    result = measure(graph.replay, device, steps=3)
    check(result)
    assert result["categories"]["convolutions"]["kernels"] >= 1
    assert result["categories"]["pointwise"]["kernels"] == 1


def test_named_ranges_waits_and_the_hosts_calls_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a simulated profile of a GPU."""

    def event(name: str, device: DeviceType = DeviceType.CUDA, named: bool = False) -> Any:
        time_range = SimpleNamespace(start=0, end=9)
        return SimpleNamespace(name=name, time_range=time_range, device_type=device, is_user_annotation=named)

    kernel, *others = event("sm80_xmma_dgrad_kernel"), event("cudaLaunchKernel", DeviceType.CPU), event("Context Sync")
    events = [kernel, *others, event("Optimizer.step#Adam.step", named=True)]
    profile = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found = ledger._kernels(lambda: None, torch.device("cuda"), steps=2)
    assert found == [Kernel("sm80_xmma_dgrad_kernel", 0, 9)]
