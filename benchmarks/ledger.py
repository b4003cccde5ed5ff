"""Where a training step's time goes: kernels by category, and the gaps between them."""

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

# The first pattern that a name contains decides. Kernels' names on a GPU, operators' names on a CPU.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|^c10d::|^gloo:"),
    ("optimizer", r"multi_tensor_apply|(?i:fused_?(adam|sgd))|^aten::_foreach_|^Optimizer\."),
    # Of cuDNN, of .contiguous() and .to(), and of inductor where a kernel does nothing else.
    ("layout and casts", r"(?i:n(cd?hw|d?hwc)_?to_?n(cd?hw|d?hwc)|nd?hwcToFolded|foldedNd?hwc|AddPadding_?Kernel)"),
    ("layout and casts", r"(?i:convertTensor|tensorTransform|transpose\w*_kernel|transpose_readWrite)"),
    ("layout and casts", r"(direct|b?float\d\w*)_copy_kernel|^triton_poi_fused(_(_to_copy|clone))+_\d+$"),
    ("layout and casts", r"^aten::(copy_|_copy_from|clone|contiguous|to|_to_copy)$|mkldnn_reorder"),
    # gather is this project's kernel that crops a resident volume.
    ("copies", r"^Mem(cpy|set)\b|^gather(_\w*)?$|vectorized_gather|scatter_gather|index_elementwise"),
    ("copies", r"(?i:index_?select)|^aten::(index|gather|take)$"),
    # Before the convolutions: inductor names a kernel after what it stands next to, convolutions included.
    ("pointwise", r"^triton_(poi|red|per|for|mix|split_scan)_|^cpp_fused"),
    ("convolutions", r"(?i:convol|conv[123]d|conv_(transpose|depthwise)|fprop|[dw]grad|im2col|col2im|vol2col|col2vol)"),
    ("convolutions", r"(?i:xmma|cutlass|gemm|gemv|nvjet|cudnn_generated|^sm\d+_|cask_|computeOffsets|cublas|winograd)"),
    ("convolutions", r"^triton_tem_|scalePackedTensor|kern_precompute_indices|splitK|^aten::(add|b)?mm$"),
    ("pointwise", r"elementwise_kernel|reduce_kernel|CatArrayBatchedCopy|op_(generic_)?tensor|at::native::"),
    # networks/fused.py
    ("pointwise", r"^(bias_activation|bias_relu_cat|activation_backward|l1|l1_backward)$"),
    (
        "pointwise",
        r"^aten::(?!empty|as_strided|view|_unsafe_view|reshape|resize|slice|narrow|detach|t$|select|transpose|permute"
        r"|expand|unsqueeze|squeeze|result_type|item|_local_scalar|is_|set_|alias|lift)",
    ),
)
# Where kernels overlap, the earlier category has the time: what the later one took was hidden behind it.
CATEGORIES = ("convolutions", "pointwise", "layout and casts", "optimizer", "copies", "other", "communication")
TOP = 15
LONGEST_NAME = 120


class Kernel(NamedTuple):
    """One run of a kernel, or of an operator, in µs."""

    name: str
    start: float
    end: float


def measure(
    run_step: Callable[[], object], device: torch.device, steps: int = 10, warmup: int = 3, top: int = TOP
) -> dict[str, Any]:
    """The ledger of `run_step`: its time without a profiler, and the kernels of as many steps under one.

    Several ranks measure together, as each runs the same number of steps. On a CPU, operators take the kernels' place.
    """
    for _ in range(warmup):
        run_step()
    times = _step_milliseconds(run_step, device, steps)
    kernels = (_kernels if device.type == "cuda" else _operators)(run_step, device, steps)
    return {"device": str(device), **ledger(kernels, times, top)}


def ledger(kernels: Sequence[Kernel], step_times: Sequence[float], top: int = TOP) -> dict[str, Any]:
    """Sums by category in ms a step, of which `exposed_ms` are not hidden behind another category.

    The exposed times and the gaps add up to the step: 100 %. Gaps below zero say that the profiler slowed the kernels.
    step_times: what each of as many other steps took without it, in ms.
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
    """The category of a kernel or operator: that of the first pattern found in its name."""
    return next((category for category, pattern in PATTERNS if re.search(pattern, name)), "other")


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what the intervals cover: what overlaps counts once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def markdown(result: Mapping[str, Any]) -> str:
    """The ledger, the kernels that take longest, and those of no known category."""
    low, high = result["step_ms_range"]
    lines = [
        f"A step takes {result['step_ms']:.3f} ms ({low:.3f} – {high:.3f}, n = {result['steps']}), "
        f"{result['kernels']:.0f} kernels run in it, for {result['busy_ms']:.3f} ms.",
        "",
        "| category | ms | not hidden, ms | % of the step | kernels |",
        "|---|---:|---:|---:|---:|",
    ]
    for category, sums in result["categories"].items():
        lines.append(
            f"| {category} | {sums['ms']:.3f} | {sums['exposed_ms']:.3f} | {sums['percent']:.1f} "
            f"| {sums['kernels']:.0f} |"
        )
    gaps = result["gaps"]
    lines.append(f"| gaps | {gaps['ms']:.3f} | {gaps['ms']:.3f} | {gaps['percent']:.1f} | |")
    lines += ["", "| kernel | category | ms | runs |", "|---|---|---:|---:|"]
    lines += [_line(entry) for entry in result["top"]]
    if result.get("device") == "cpu":
        lines.append(
            "\nOn a CPU operators are timed under the profiler, which slows the many small ones: the gaps, which are "
            "what is left of a step without it, may be below zero."
        )
    if not result["kernels"]:
        lines.append("\nThe profiler saw no kernels: the gaps above are the whole step.")
    # What takes less than a thousandth of the step stays in the JSON.
    others = [entry for entry in result["other"] if entry["ms"] > result["step_ms"] / 1e3]
    if others:
        lines += ["", "Of no known category:", "", "| kernel | category | ms | runs |", "|---|---|---:|---:|"]
        lines += [_line(entry) for entry in others]
    return "\n".join(lines)


def _line(entry: Mapping[str, Any]) -> str:
    name = entry["name"].replace("|", "\\|")
    name = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    return f"| `{name}` | {entry['category']} | {entry['ms']:.3f} | {entry['runs']:g} |"


def _milliseconds(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.end - kernel.start for kernel in kernels) / 1e3


def _step_milliseconds(run_step: Callable[[], object], device: torch.device, steps: int) -> list[float]:
    """What each of consecutive steps takes; on CUDA between events, with the host running ahead as in training."""
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
    """All that the device did, as it saw it: a replayed graph's kernels, too, which no operator launches."""
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            run_step()
        torch.cuda.synchronize(device)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if event.device_type == DeviceType.CUDA
        # Ranges that somebody named, and waits, are not work.
        and not getattr(event, "is_user_annotation", False)
        and not re.match(r"(Context|Stream|Event) (Sync|Wait)", event.name)
    ]


def _operators(run_step: Callable[[], object], device: torch.device, steps: int) -> list[Kernel]:
    """Each operator's own time, without that of the operators it calls, laid end to end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            run_step()
    operators, end = [], 0.0
    for event in profile.events() or []:
        if event.self_cpu_time_total > 0:
            operators.append(Kernel(event.name, end, end + event.self_cpu_time_total))
            end += event.self_cpu_time_total
    return operators
