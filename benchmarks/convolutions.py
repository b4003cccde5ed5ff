"""Speed of the U-Net's convolutions by layer, pass, dtype and memory format, in % of the matmul peak.

A part of benchmarks/gpu.py.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import peaks as upper_bounds
from benchmarks.common import table
from networks import build_network
from networks.space_to_depth import DepthToSpaceConvTranspose3d, SpaceToDepthConv3d
from networks.unet import SPACE_TO_DEPTH
from utils.profiling import timing

# From the most valuable to the least: what the budget does not cover is skipped.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32}
FORMATS = {"NDHWC": torch.channels_last_3d, "NCDHW": torch.contiguous_format}
NAMES = ("layer", "version", "pass", "dtype", "format")

ROW_SECONDS = 0.03
PEAK_SECONDS = 0.5

Row = dict[str, Any]
Calls = dict[str, Callable[[], torch.Tensor]]

# --- the network's convolutions --------------------------------------------------------------------------------------


def scales(crop: int) -> int:
    """The full network's number of scales, or as many as the crop can be halved."""
    return min(6, (crop & -crop).bit_length() - 1)


@dataclass(frozen=True)
class Layer:
    """A convolution of the network, a module on the meta device; shapes of one sample, [C, D, H, W]."""

    name: str
    version: str  # plain, space-to-depth, or dense: the dense convolution alone, without the shuffles around it
    module: nn.Conv3d | nn.ConvTranspose3d
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    needs_input_gradient: bool
    passes: tuple[str, ...]  # the first is the module's forward pass, and the others its gradients
    flops: int  # of one pass over one sample; another version counts like the plain one


@dataclass(frozen=True)
class Job:
    """Measurements on the same tensors."""

    layer: Layer
    dtype: str
    format: str

    def flops(self, name: str) -> int:
        """FLOP per sample of a pass."""
        return self.layer.flops * (1 + self.layer.needs_input_gradient if name == "backward" else 1)

    def names(self, name: str) -> dict[str, str]:
        """The values that identify a row."""
        return dict(zip(NAMES, (self.layer.name, self.layer.version, name, self.dtype, self.format), strict=True))


def read_layers(crop: int, space_to_depth: Sequence[str] = (), **network: Any) -> list[Layer]:
    """The network's convolutions in the order of the forward pass; nothing is computed."""
    layers: list[Layer] = []

    def record(name: str, module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        shapes = tuple(inputs[0].shape[1:]), tuple(output.shape[1:])
        differentiated = inputs[0].requires_grad
        passes: tuple[str, ...] = ("forward", *(["input gradient"] if differentiated else []), "weight gradient")
        version = "space-to-depth" if name in space_to_depth else "plain"
        if version != "plain":
            passes = ("forward", "backward")  # the gradients may share a rearrangement, so they are one pass
        # Two operations per weight and cell of the smaller grid.
        flops = 2 * module.weight.numel() * math.prod(shapes[0 if module.transposed else 1][1:])
        layers.append(Layer(name, version, module, *shapes, differentiated, passes, flops))

    with torch.device("meta"):
        built: Any = build_network("unet", crop, space_to_depth=space_to_depth, **network)
        hooks = [
            module.register_forward_hook(functools.partial(record, name))
            for name, module in built.named_modules()
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d)
        ]
        built(torch.empty(1, built.down1.in_channels, crop, crop, crop))
    for hook in hooks:
        hook.remove()
    return layers


def dense(layer: Layer) -> Layer:
    """The dense convolution in a layer that is computed by space-to-depth; see networks/space_to_depth.py."""
    kind, few = type(layer.module), (layer.module.in_channels, layer.module.out_channels)
    passes: tuple[str, ...] = ("forward",)
    with torch.device("meta"):
        if kind is SpaceToDepthConv3d:
            module, passes = nn.Conv3d(8 * few[0], few[1], 2), ("forward", "weight gradient")
            input_shape = module.in_channels, *(side // 2 + 1 for side in layer.input_shape[1:])
        elif layer.module.transposed:
            module, input_shape = nn.Conv3d(few[0], 8 * few[1], 2, padding=1), layer.input_shape
            if kind is DepthToSpaceConvTranspose3d:
                passes = "forward", "input gradient", "weight gradient"
        else:
            module, input_shape = nn.Conv3d(few[1], 8 * few[0], 2, padding=1), layer.output_shape
            passes = ("input gradient",)
        output_shape = tuple(module(torch.empty(1, *input_shape)).shape[1:])
    return Layer(layer.name, "dense", module, input_shape, output_shape, len(passes) == 3, passes, layer.flops)


def plan(crop: int, dtypes: Iterable[str], formats: Sequence[str], **network: Any) -> list[Job]:
    """All jobs, the most informative first: dtype by dtype, and in each format the largest layers."""
    layers = sorted(read_layers(crop, **network), key=lambda layer: layer.flops, reverse=True)
    names = [layer.name for layer in layers if layer.name in SPACE_TO_DEPTH]
    rewritten = {layer.name: layer for layer in read_layers(crop, names, **network)}
    layers += [version for name in names for version in (rewritten[name], dense(rewritten[name]))]
    return [Job(layer, dtype, format) for dtype in dtypes for format in formats for layer in layers]


def calls(job: Job, device: torch.device, batch: int) -> Calls:
    """The job's passes by name: the layer without bias, and its gradients as autograd computes them."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, dtype=DTYPES[job.dtype], device=device, generator=generator)
        return values.mul_(scale).contiguous(memory_format=FORMATS[job.format])

    layer = job.layer
    module = copy.deepcopy(layer.module)
    module.bias = None
    module.weight = nn.Parameter(draw(module.weight.shape, 0.02))
    inputs = draw((batch, *layer.input_shape)).requires_grad_(layer.needs_input_gradient)
    output = module(inputs)
    gradient = draw(output.shape)
    both = [inputs, module.weight] if layer.needs_input_gradient else [module.weight]
    sources = {"input gradient": inputs, "weight gradient": module.weight, "backward": both}

    def backward(name: str) -> torch.Tensor:
        """The first gradient, which shows the memory format."""
        return torch.autograd.grad(output, sources[name], gradient, retain_graph=True)[0]

    found = {name: functools.partial(backward, name) for name in layer.passes[1:]}
    return {layer.passes[0]: torch.no_grad()(functools.partial(module, inputs)), **found}


# --- measurements ----------------------------------------------------------------------------------------------------


def measure(
    device: torch.device,
    batch: int,
    crop: int,
    budget: float,
    dtypes: Sequence[str] = tuple(DTYPES),
    formats: Sequence[str] = tuple(FORMATS),
    peaks: Mapping[str, float] | None = None,
    **network: Any,
) -> dict[str, Any]:
    """One row per layer, version, pass, dtype and format, until `budget` seconds are spent.

    peaks: TFLOP/s of a matrix product by dtype, measured if not given.
    """
    started = time.perf_counter()
    deadline = started + budget
    layers = read_layers(crop, **network)
    jobs = plan(crop, dtypes, formats, **network)
    known = dict(peaks or {})
    rows: list[Row] = []
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with upper_bounds.tf32(True):
            for job in jobs:
                if job.dtype not in known and time.perf_counter() < deadline:
                    known[job.dtype] = _peak(device, job.dtype)
                rows += _measure_job(job, device, batch, known.get(job.dtype), deadline)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    except RuntimeError as error:  # a fault of the device: the rows so far are the result
        sys.stderr.write(f"no more convolutions: {error}\n")
    finally:
        torch.backends.cudnn.benchmark = before
    settings = {"batch": batch, "crop": crop, "dtypes": list(dtypes), "formats": list(formats), "budget": budget}
    return {
        "settings": {**settings, **network},
        "device": str(device),
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "seconds": time.perf_counter() - started,
        "peak_tflops": known,
        "flops of a pass": {layer.name: layer.flops for layer in layers},
        "rows": rows,
        "missing": _missing(jobs, rows),
        "totals": totals(rows, dtypes, formats, len(layers)),
    }


def _measure_job(job: Job, device: torch.device, batch: int, peak: float | None, deadline: float) -> list[Row]:
    """A row for each pass until the deadline; a failed pass has the reason in its row."""
    rows: list[Row] = []
    ready: Calls = {}
    for name in job.layer.passes:
        if time.perf_counter() >= deadline:
            break
        row: Row = {**job.names(name), "passes": len(job.layer.passes), "flops": batch * job.flops(name)}
        try:
            ready = ready or calls(job, device, batch)
            row.update(_time(ready[name], device, job.format, row["flops"], peak))
            outcome = f"{row['ms']:.3f} ms, {_percent(row['share_of_peak'])} of peak"
        except Exception as error:  # such as an unsupported dtype or out of memory: other passes may work
            outcome = row["error"] = (str(error).splitlines() or [""])[0][:200] or repr(error)
        sys.stderr.write(f"{' '.join(job.names(name).values())}: {outcome}\n")
        rows.append(row)
    return rows


def _time(
    call: Callable[[], torch.Tensor], device: torch.device, format: str, flops: int, peak: float | None
) -> dict[str, Any]:
    kept = call().is_contiguous(memory_format=FORMATS[format])
    times = timing.repeat(call, device, ROW_SECONDS, most=100)
    milliseconds = timing.spread([1e3 * seconds for seconds in times])
    tflops = flops / milliseconds["median"] / 1e9
    return {
        "ms": milliseconds["median"],
        "ms_range": [milliseconds["min"], milliseconds["max"]],
        "n": milliseconds["n"],
        "tflops": tflops,
        "share_of_peak": tflops / peak if peak else None,
        "format_kept": kept,
    }


def _peak(device: torch.device, dtype: str) -> float:
    """TFLOP/s of a matrix product; 0 if the device has none in this dtype, so that no shares are computed."""
    try:
        return float(upper_bounds.matmul_tflops(device, dtype, PEAK_SECONDS)["median"])
    except RuntimeError as error:
        sys.stderr.write(f"no matmul peak in {dtype}: {error}\n")
        return 0.0


def _missing(jobs: Sequence[Job], rows: Sequence[Row]) -> list[dict[str, str]]:
    measured = {tuple(row[name] for name in NAMES) for row in rows}
    planned = [job.names(name) for job in jobs for name in job.layer.passes]
    return [names for names in planned if tuple(names.values()) not in measured]


# --- the report ------------------------------------------------------------------------------------------------------


def weighted(
    rows: Sequence[Row], dtype: str | None = None, format: str | None = None, versions: Sequence[str] = ("plain",)
) -> Row:
    """All convolutions of a step: their time, and their share of the matmul peak.

    If dtype or format is None, or there are several versions, the fastest is chosen layer by layer; the cost of a
    change between two layers is not counted. `layers` is the number of those measured in all passes; the others are
    not included.
    """
    candidates: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        fits = dtype in (None, row["dtype"]) and format in (None, row["format"])
        if fits and "error" not in row and row["version"] in versions:
            candidates.setdefault((row["layer"], row["dtype"], row["format"], row["version"]), []).append(row)
    best: dict[str, list[Row]] = {}
    for (layer, *_), passes in candidates.items():
        complete = len(passes) == passes[0]["passes"]
        if complete and (layer not in best or _sum(passes, "ms") < _sum(best[layer], "ms")):
            best[layer] = passes
    chosen = [row for passes in best.values() for row in passes]
    milliseconds = _sum(chosen, "ms")
    shares = [row["share_of_peak"] for row in chosen]
    return {
        "layers": len(best),
        "ms": milliseconds,
        "tflops": _sum(chosen, "flops") / milliseconds / 1e9 if chosen else None,
        # Time at the peak over measured time, which is also valid for a mix of dtypes.
        "share_of_peak": sum(row["ms"] * row["share_of_peak"] for row in chosen) / milliseconds
        if chosen and None not in shares
        else None,
        "choices": {
            layer: f"{row['dtype']} {row['format']}{'' if row['version'] == 'plain' else ' ' + row['version']}"
            for layer, (row, *_) in best.items()
        },
    }


def totals(rows: Sequence[Row], dtypes: Iterable[str], formats: Iterable[str], layers: int) -> list[Row]:
    """`weighted` for each dtype and format, for the best choices in each dtype, and for the best of all."""
    formats, every = list(formats), ("plain", "space-to-depth")
    found = []
    for dtype in dtypes:
        for format in formats:
            found.append({"of": f"{dtype} {format}", **weighted(rows, dtype, format)})
            name = f"{dtype} {format}, space-to-depth where faster"
            found.append({"of": name, **weighted(rows, dtype, format, every)})
        found.append({"of": f"{dtype}, best choice per layer", **weighted(rows, dtype, versions=every)})
    found.append({"of": "best choice per layer", **weighted(rows, versions=every)})
    return [{**total, "complete": total["layers"] == layers} for total in found]


def markdown(result: Mapping[str, Any]) -> str:
    """% of the matmul peak and milliseconds: a row per layer and pass, a column per dtype and format."""
    columns = [(dtype, format) for dtype in result["settings"]["dtypes"] for format in result["settings"]["formats"]]
    rows = {tuple(row[name] for name in NAMES): row for row in result["rows"]}
    order = list(result["flops of a pass"])
    lines = dict.fromkeys(
        (names["layer"], names["version"], names["pass"]) for names in [*result["rows"], *result["missing"]]
    )
    body = []
    for layer, version, name in sorted(lines, key=lambda line: order.index(line[0])):
        cells = [_cell(rows.get((layer, version, name, *column))) for column in columns]
        body.append((f"{layer}{'' if version == 'plain' else ' ' + version}", name, *cells))
    sums = []
    for total in result["totals"]:
        of = total["of"] if total["complete"] else f"{total['of']} ({total['layers']} of {len(order)} layers)"
        sums.append((of, f"{total['ms']:.2f}", _number(total["tflops"]), _percent(total["share_of_peak"])))
    best = result["totals"][-1]["choices"]
    known = ", ".join(f"{dtype} {_number(peak)}" for dtype, peak in result["peak_tflops"].items())
    parts = [
        table(("layer", "pass", *(" ".join(column) for column in columns)), body, left=2),
        table(("all convolutions of a step", "ms", "TFLOP/s", "% of peak"), sums),
        f"Best: {', '.join(f'{layer} {best[layer]}' for layer in order if layer in best)}.",
        f"Matmul peaks in TFLOP/s: {known or 'none measured'}. cuDNN {result['cudnn']}.",
    ]
    parts += filter(None, [timing.peak_caveat(*(row.get("share_of_peak") for row in result["rows"]))])
    if any(row.get("format_kept") is False for row in result["rows"]):
        parts.append("\\* The result was returned in the other memory format.")
    if result["missing"]:
        parts.append(f"Not measured within {result['settings']['budget']:g} s: {len(result['missing'])} rows.")
    parts += [f"Error in {' '.join(key)}: {row['error']}" for key, row in rows.items() if "error" in row]
    return "\n\n".join(parts)


def _sum(rows: Iterable[Row], key: str) -> float:
    return sum(row[key] for row in rows)


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    if "error" in row:
        return "error"
    return f"{_percent(row['share_of_peak'])}{'' if row['format_kept'] else '*'} ({row['ms']:.3f} ms)"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"
