"""Breakdown of a training step's time: kernels by category, and the gaps between them."""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import seconds_of, table

# The first pattern found in a name decides.
PATTERNS: tuple[tuple[str, str], ...] = (
    # networks/ops/hopper
    ("convolutions", r"^((strided|transposed)_convolution|(strided|block)_weight_gradient|sum_splits)(_\w+)?$"),
    ("convolutions", r"^(rows_to_blocks|blocks_to_padded_rows)(_\w+)?$"),
    ("communication", r"nccl"),
    ("layout and casts", r"multi_tensor_apply_kernel.*\bCopy|^shuffle_cells"),
    ("optimizer", r"multi_tensor_apply|(?i:fused_?(adam|sgd))"),
    # From cuDNN, from .contiguous() and .to(), and from inductor if the kernel does nothing else.
    ("layout and casts", r"(?i:n(cd?hw|d?hwc)_?to_?n(cd?hw|d?hwc)|nd?hwcToFolded|foldedNd?hwc|AddPadding_?Kernel)"),
    ("layout and casts", r"(?i:convertTensor|tensorTransform|transpose\w*_kernel|transpose_readWrite)"),
    ("layout and casts", r"(direct|b?float\d\w*)_copy_kernel|^triton_poi_fused(_(_to_copy|clone))+_\d+$"),
    ("copies", r"(?i:^mem(cpy|set)|index_?select)|vectorized_gather|scatter_gather|index_elementwise"),
    # Before the convolutions: inductor names a kernel after neighboring operators, including convolutions.
    ("pointwise", r"^triton_(poi|red|per|for|mix|split_scan)_"),
    ("convolutions", r"(?i:convol|conv[123]d|conv_(transpose|depthwise)|fprop|[dw]grad|im2col|col2im|vol2col|col2vol)"),
    ("convolutions", r"(?i:xmma|cutlass|gemm|gemv|nvjet|cudnn_generated|^sm\d+_|cask_|computeOffsets|cublas|winograd)"),
    ("convolutions", r"^triton_tem_|scalePackedTensor|kern_precompute_indices|splitK"),
    ("pointwise", r"elementwise_kernel|reduce_kernel|CatArrayBatchedCopy|op_(generic_)?tensor|at::native::"),
    # networks/ops/pointwise.py and l1.py
    ("pointwise", r"^(bias_activation_(forward|backward)|(\w+_)?l1(_\w+)?)$"),
)
# Where kernels overlap, the time counts for the earlier category: the later one was hidden behind it.
CATEGORIES = ("convolutions", "pointwise", "layout and casts", "optimizer", "copies", "other", "communication")


class Kernel(NamedTuple):
    """One run of a kernel; times in µs."""

    name: str
    start: float
    end: float


@functools.cache
def classify(name: str) -> str:
    """The category of a kernel by its name."""
    return next((category for category, pattern in PATTERNS if re.search(pattern, name)), "other")


def measure(run_step: Callable[[], object], device: torch.device, steps: int = 10, warmup: int = 3) -> dict[str, Any]:
    """Times `steps` steps without a profiler, then profiles the kernels of as many."""
    for _ in range(warmup):
        run_step()
    milliseconds = 1e3 * seconds_of(run_step, device, steps) / steps
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        seconds_of(run_step, device, steps)  # also waits for the device
    return breakdown(kernels_of(profiled.events() or []), steps, milliseconds)


def breakdown(kernels: Sequence[Kernel], steps: int, step_ms: float) -> dict[str, Any]:
    """Time by category in ms per step that is not hidden behind an earlier category, and the kernels that take longest.

    `step_ms` is that of steps without the profiler. The times and the gaps add up to it; negative gaps mean that the
    profiler slowed the kernels.
    """
    categories = {}
    seen: list[tuple[float, float]] = []
    busy = 0.0
    for category in CATEGORIES:
        seen += [(kernel.start, kernel.end) for kernel in kernels if classify(kernel.name) == category]
        covered = union(seen)
        categories[category] = (covered - busy) / 1e3 / steps
        busy = covered
    categories["gaps"] = step_ms - busy / 1e3 / steps
    runs: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        runs[kernel.name].append((kernel.end - kernel.start) / 1e3)
    listed = [
        {"name": name, "category": classify(name), "ms": sum(times) / steps, "runs": len(times) / steps}
        for name, times in sorted(runs.items(), key=lambda item: -sum(item[1]))
    ]
    others = [entry for entry in listed if entry["category"] == "other"]
    counts = {"steps": steps, "step_ms": step_ms, "kernels": len(kernels) / steps}
    return {**counts, "categories": categories, "top": listed[:15], "other": others}


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length that the intervals cover; overlaps count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0)
        reached = max(end, reached)
    return total


def markdown(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Categories of several sets of options, and the kernels of each that take longest."""
    columns = [{"step": result["step_ms"], **result["categories"]} for result in results.values()]
    rows = [[name, *(f"{column[name]:.3f}" for column in columns)] for name in ("step", *CATEGORIES, "gaps")]
    rows.append(["kernels per step", *(f"{result['kernels']:.0f}" for result in results.values())])
    parts = [table(("ms per step, not hidden behind a line above", *results), rows)]
    for name, result in results.items():
        kernels = [
            (f"`{entry['name'][:120]}`", entry["category"], f"{entry['ms']:.3f}", f"{entry['runs']:g}")
            for entry in result["top"]
        ]
        parts.append(table((f"kernel of {name}", "category", "ms", "runs"), kernels, left=2))
    return "\n\n".join(parts)


def kernels_of(events: Iterable[Any]) -> list[Kernel]:
    """Everything the device ran, including the kernels of a replayed graph, which no operator launches."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        # Annotated ranges and waits are not work.
        and not getattr(event, "is_user_annotation", False)
        and not re.match(r"(Context|Stream|Event) (Sync|Wait)", event.name)
    ]
