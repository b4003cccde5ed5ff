"""A training step's time on a GPU: kernels by category, the gaps between them, and the least time that kernels need."""

import functools
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import repeat, seconds_of, table
from networks.ops.plan import layers_of
from utils.config import Config
from utils.data.loaders.base import meta_batch
from utils.steps import build

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
    # networks/ops/pointwise.py, l1.py and smoothing.py
    ("pointwise", r"^(bias_activation_(forward|backward)|(\w+_)?l1(_\w+)?|subtract_smoothed)$"),
)
# Where kernels overlap, the time counts for the earlier category: the later one was hidden behind it.
CATEGORIES = ("convolutions", "pointwise", "layout and casts", "optimizer", "copies", "other", "communication")
HALF, FLOAT = 2, 4  # bytes
# Of the gradient's norm, and of Adam's update: gradient, weight and two moments, and again without the gradient.
ADAM = FLOAT * (1 + 4 + 3)
AVERAGE = FLOAT * 2  # read and written


@functools.cache
def classify(name: str) -> str:
    return next((category for category, pattern in PATTERNS if re.search(pattern, name)), "other")


def measure(run_step: Callable[[], object], device: torch.device, steps: int = 10, warmup: int = 3) -> dict[str, Any]:
    """Times `steps` steps without a profiler, then profiles the kernels of as many."""
    for _ in range(warmup):
        run_step()
    milliseconds = 1e3 * seconds_of(run_step, device, steps) / steps
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        seconds_of(run_step, device, steps)  # also waits for the device
    return breakdown(kernels_of(profiled.events() or []), steps, milliseconds)


def breakdown(kernels: Sequence[Any], steps: int, step_ms: float) -> dict[str, Any]:
    """Time by category in ms per step that is not hidden behind an earlier category, and the kernels that take longest.

    `kernels` are those of `kernels_of`, with times in µs; `step_ms` is that of steps without the profiler. The times
    and the gaps add up to it; negative gaps mean that the profiler slowed the kernels.
    """
    categories = {}
    seen: list[Any] = []
    busy = 0.0
    for category in CATEGORIES:
        seen += [kernel.time_range for kernel in kernels if classify(kernel.name) == category]
        covered = union(seen)
        categories[category] = (covered - busy) / 1e3 / steps
        busy = covered
    categories["gaps"] = step_ms - busy / 1e3 / steps
    runs: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        runs[kernel.name].append((kernel.time_range.end - kernel.time_range.start) / 1e3)
    listed = [
        {"name": name, "category": classify(name), "ms": sum(times) / steps, "runs": len(times) / steps}
        for name, times in sorted(runs.items(), key=lambda item: -sum(item[1]))
    ]
    others = [entry for entry in listed if entry["category"] == "other"]
    counts = {"steps": steps, "step_ms": step_ms, "kernels": len(kernels) / steps}
    return {**counts, "categories": categories, "top": listed[:15], "other": others}


def union(spans: Iterable[Any]) -> float:
    """Total length that the spans cover; overlaps count once."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(span.end - max(span.start, reached), 0)
        reached = max(span.end, reached)
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


def kernels_of(events: Iterable[Any]) -> list[Any]:
    """Everything the device ran, including the kernels of a replayed graph, which no operator launches."""
    return [
        event
        for event in events
        if event.device_type == DeviceType.CUDA
        # Annotated ranges and waits are not work.
        and not getattr(event, "is_user_annotation", False)
        and not re.match(r"(Context|Stream|Event) (Sync|Wait)", event.name)
    ]


def copy_rate(device: torch.device) -> float:
    """Median TB/s of repeated copies of a large tensor, read and written."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2e-12 * source.nbytes / statistics.median(repeat(lambda: target.copy_(source), device, 0.2))


def work(config: Config) -> Iterator[tuple[str, float, float]]:
    """Name, FLOP and bytes, each read or written once, of the kernels of a step with the config's U-Net and batch."""
    network, batch = build.network_without_values(config), meta_batch(config, config.local_batch_size or 1)
    value = HALF if config.enable_amp else FLOAT
    samples = len(batch.inputs)
    for name, layer in layers_of(network).items():
        coarse, fine = layer.weight.shape[:2]
        side = config.data_size >> (layer.halvings + 1)
        flops = 2.0 * layer.weight.numel() * samples * side**3
        grids = value * samples * side**3 * (coarse + 8 * fine)
        yield f"{name}, forward", flops, grids + value * layer.weight.numel()
        if name != "down1":  # nobody needs the gradient of the fields
            yield f"{name}, input gradient", flops, grids + value * layer.weight.numel()
        yield f"{name}, weight gradient", flops, grids + FLOAT * layer.weight.numel()
    yield "loss", 0.0, (FLOAT + value) * batch.targets.numel()
    parameters = sum(parameter.numel() for parameter in network.parameters())
    yield "optimizer", 0.0, parameters * (ADAM + (AVERAGE if config.ema_decay else 0) + (HALF if value == HALF else 0))


def floor_milliseconds(config: Config, matmul: float, copies: float) -> float:
    """The least time of a step: kernels need the longer of FLOP / matmul (TFLOP/s) and bytes / copies (TB/s)."""
    return sum(1e-9 * max(flops / matmul, size / copies) for _, flops, size in work(config))
