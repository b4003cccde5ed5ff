"""Breakdown of a training step's time: kernels by category, and the gaps between them."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from benchmarks.common import table

# The first pattern found in a name decides. Names of kernels on a GPU, of operators on a CPU.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|^c10d::|^gloo:"),
    ("optimizer", r"multi_tensor_apply|(?i:fused_?(adam|sgd))|^aten::_foreach_|^Optimizer\."),
    # From cuDNN, from .contiguous() and .to(), and from inductor if the kernel does nothing else.
    ("layout and casts", r"(?i:n(cd?hw|d?hwc)_?to_?n(cd?hw|d?hwc)|nd?hwcToFolded|foldedNd?hwc|AddPadding_?Kernel)"),
    ("layout and casts", r"(?i:convertTensor|tensorTransform|transpose\w*_kernel|transpose_readWrite)"),
    ("layout and casts", r"(direct|b?float\d\w*)_copy_kernel|^triton_poi_fused(_(_to_copy|clone))+_\d+$"),
    ("layout and casts", r"^aten::(copy_|_copy_from|clone|contiguous|to|_to_copy)$|mkldnn_reorder"),
    # gather is this project's kernel that crops a volume on the GPU.
    ("copies", r"^Mem(cpy|set)\b|^gather(_\w*)?$|vectorized_gather|scatter_gather|index_elementwise"),
    ("copies", r"(?i:index_?select)|^aten::(index|gather|take)$"),
    # Before the convolutions: inductor names a kernel after neighboring operators, including convolutions.
    ("pointwise", r"^triton_(poi|red|per|for|mix|split_scan)_|^cpp_fused"),
    ("convolutions", r"(?i:convol|conv[123]d|conv_(transpose|depthwise)|fprop|[dw]grad|im2col|col2im|vol2col|col2vol)"),
    ("convolutions", r"(?i:xmma|cutlass|gemm|gemv|nvjet|cudnn_generated|^sm\d+_|cask_|computeOffsets|cublas|winograd)"),
    ("convolutions", r"^triton_tem_|scalePackedTensor|kern_precompute_indices|splitK|^aten::(add|b)?mm$"),
    ("pointwise", r"elementwise_kernel|reduce_kernel|CatArrayBatchedCopy|op_(generic_)?tensor|at::native::"),
    # networks/kernels.py
    ("pointwise", r"^(bias_activation|activation_backward|l1|l1_backward|tail_l1)$"),
    (
        "pointwise",
        r"^aten::(?!empty|as_strided|view|_unsafe_view|reshape|resize|slice|narrow|detach|t$|select|transpose|permute"
        r"|expand|unsqueeze|squeeze|result_type|item|_local_scalar|is_|set_|alias|lift)",
    ),
)
# Where kernels overlap, the time counts for the earlier category: the later one was hidden behind it.
CATEGORIES = ("convolutions", "pointwise", "layout and casts", "optimizer", "copies", "other", "communication")
TOP = 15
LONGEST_NAME = 120


class Kernel(NamedTuple):
    """One run of a kernel or operator; times in µs."""

    name: str
    start: float
    end: float


def measure(
    run_step: Callable[[], object], device: torch.device, steps: int = 10, warmup: int = 3, top: int = TOP
) -> dict[str, Any]:
    """Times `steps` steps without a profiler, then profiles the kernels of as many; on a CPU, the operators.

    Several ranks can measure together, since each runs the same number of steps.
    """
    for _ in range(warmup):
        run_step()
    times = _step_milliseconds(run_step, device, steps)
    kernels = (_kernels if device.type == "cuda" else _operators)(run_step, device, steps)
    return {"device": str(device), **ledger(kernels, times, top)}


def ledger(kernels: Sequence[Kernel], step_times: Sequence[float], top: int = TOP) -> dict[str, Any]:
    """Sums by category in ms per step, of which `exposed_ms` are not hidden behind another category.

    The exposed times and the gaps add up to 100 % of the step. Negative gaps mean that the profiler slowed the kernels.
    step_times: ms of each of as many other steps, without the profiler.
    """
    steps, step_ms = len(step_times), sum(step_times) / len(step_times)
    groups: dict[str, list[Kernel]] = {category: [] for category in CATEGORIES}
    names: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[classify(kernel.name)].append(kernel)
        names[kernel.name].append(kernel)
    categories = {}
    seen: list[tuple[float, float]] = []
    busy = 0.0
    for category, members in groups.items():
        seen += [(kernel.start, kernel.end) for kernel in members]
        covered = union(seen)
        categories[category] = {
            "ms": _milliseconds(members) / steps,
            "exposed_ms": (covered - busy) / 1e3 / steps,
            "percent": 100 * (covered - busy) / 1e3 / steps / step_ms,
            "kernels": len(members) / steps,
        }
        busy = covered
    busy_ms = busy / 1e3 / steps
    listed: list[dict[str, Any]] = [
        {"name": name, "category": classify(name), "ms": _milliseconds(runs) / steps, "runs": len(runs) / steps}
        for name, runs in names.items()
    ]
    listed.sort(key=lambda entry: entry["ms"], reverse=True)
    return {
        "steps": steps,
        "step_ms": step_ms,
        "step_ms_range": [min(step_times), max(step_times)],
        "busy_ms": busy_ms,
        "kernels": len(kernels) / steps,
        "categories": categories,
        "gaps": {"ms": step_ms - busy_ms, "percent": 100 * (step_ms - busy_ms) / step_ms},
        "top": listed[:top],
        "other": [entry for entry in listed if entry["category"] == "other"],
    }


@functools.cache
def classify(name: str) -> str:
    """The category of a kernel or operator by its name."""
    return next((category for category, pattern in PATTERNS if re.search(pattern, name)), "other")


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length that the intervals cover; overlaps count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def markdown(result: Mapping[str, Any]) -> str:
    """The categories, the kernels that take longest, and the longest kernels without a category."""
    low, high = result["step_ms_range"]
    gaps = result["gaps"]
    rows = [
        (name, f"{sums['ms']:.3f}", f"{sums['exposed_ms']:.3f}", f"{sums['percent']:.1f}", f"{sums['kernels']:.0f}")
        for name, sums in result["categories"].items()
    ]
    rows.append(("gaps", f"{gaps['ms']:.3f}", f"{gaps['ms']:.3f}", f"{gaps['percent']:.1f}", ""))
    parts = [
        f"A step takes {result['step_ms']:.3f} ms ({low:.3f} – {high:.3f}, n = {result['steps']}) and runs "
        f"{result['kernels']:.0f} kernels for {result['busy_ms']:.3f} ms.",
        table(("category", "ms", "not hidden, ms", "% of the step", "kernels"), rows),
        _kernel_table(result["top"]),
    ]
    if result.get("device") == "cpu":
        parts.append(
            "On a CPU operators are timed under the profiler, which slows the many small ones: the gaps, the rest of a "
            "step without it, may be negative."
        )
    if not result["kernels"]:
        parts.append("The profiler saw no kernels: the gaps above are the entire step.")
    # Kernels that take less than a thousandth of the step are in the JSON only.
    others = [entry for entry in result["other"] if entry["ms"] > result["step_ms"] / 1e3]
    if others:
        parts += ["Without a known category:", _kernel_table(others)]
    return "\n\n".join(parts)


def _kernel_table(entries: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for entry in entries:
        name = entry["name"].replace("|", "\\|")
        name = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
        rows.append((f"`{name}`", entry["category"], f"{entry['ms']:.3f}", f"{entry['runs']:g}"))
    return table(("kernel", "category", "ms", "runs"), rows, left=2)


def _milliseconds(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.end - kernel.start for kernel in kernels) / 1e3


def _step_milliseconds(run_step: Callable[[], object], device: torch.device, steps: int) -> list[float]:
    """Duration of each of consecutive steps; on CUDA between events, with the host running ahead as in training."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            run_step()
            marks.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        run_step()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def _kernels(run_step: Callable[[], object], device: torch.device, steps: int) -> list[Kernel]:
    """Everything the device ran, including the kernels of a replayed graph, which no operator launches."""
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            run_step()
        torch.cuda.synchronize(device)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if event.device_type == DeviceType.CUDA
        # Annotated ranges and waits are not work.
        and not getattr(event, "is_user_annotation", False)
        and not re.match(r"(Context|Stream|Event) (Sync|Wait)", event.name)
    ]


def _operators(run_step: Callable[[], object], device: torch.device, steps: int) -> list[Kernel]:
    """Each operator's own time, without the operators it calls; laid end to end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            run_step()
    operators, end = [], 0.0
    for event in profile.events() or []:
        if event.self_cpu_time_total > 0:
            operators.append(Kernel(event.name, end, end + event.self_cpu_time_total))
            end += event.self_cpu_time_total
    return operators
