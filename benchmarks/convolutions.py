"""How fast the U-Net's convolutions are: each layer and pass, in each dtype and memory format, as % of the matmul peak.

python -m benchmarks.convolutions
python -m benchmarks.convolutions --batch 2 --crop 32 --width 8     # on a CPU
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import peaks as ceilings
from benchmarks.common import Parser, positive_float, save, this_machine
from networks import build_network
from utils.cli import positive
from utils.errors import one_line_errors, value_errors_for_users

# From the most valuable to the least: a spent budget leaves out the end.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32}
FORMATS = {"NDHWC": torch.channels_last_3d, "NCDHW": torch.contiguous_format}
NAMES = ("layer", "version", "pass", "dtype", "format")
ROW_SECONDS = 0.03
PEAK_SECONDS = 0.5

Calls = dict[str, Callable[[], torch.Tensor]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """A convolution of the network for one sample: shapes are [C, D, H, W], the weight's as torch has it."""

    name: str
    transposed: bool
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    needs_input_gradient: bool

    @property
    def flops(self) -> int:
        """Of one pass over one sample: two for each weight at each place of the smaller grid."""
        return 2 * math.prod(self.weight_shape) * math.prod((self.output_shape, self.input_shape)[self.transposed][1:])

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward", *(["input gradient"] if self.needs_input_gradient else []), "weight gradient")


@dataclass(frozen=True)
class Job:
    """What is measured on the same tensors."""

    layer: Layer
    dtype: str
    format: str
    version: str = "plain"  # or "rewritten"

    @property
    def passes(self) -> tuple[str, ...]:
        # The rewritten layer's gradients share their rearrangement, so that they are one pass.
        return self.layer.passes if self.version == "plain" else ("forward", "backward")

    def flops(self, name: str) -> int:
        """Of one sample: those of the plain layer."""
        return self.layer.flops * (len(self.layer.passes) - 1 if name == "backward" else 1)

    def names(self, name: str) -> dict[str, str]:
        """What tells a row from all others."""
        return dict(zip(NAMES, (self.layer.name, self.version, name, self.dtype, self.format), strict=True))


def read_layers(crop: int, **network: Any) -> list[Layer]:
    """The convolutions of the real network in the order they run; nothing is computed."""
    layers: list[Layer] = []

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            assert isinstance(module, nn.Conv3d | nn.ConvTranspose3d)
            layers.append(
                Layer(
                    name=name,
                    transposed=module.transposed,
                    input_shape=tuple(inputs[0].shape[1:]),
                    output_shape=tuple(output.shape[1:]),
                    weight_shape=tuple(module.weight.shape),
                    stride=tuple(module.stride),
                    padding=tuple(int(side) for side in module.padding),
                    dilation=tuple(module.dilation),
                    output_padding=tuple(module.output_padding),
                    groups=module.groups,
                    needs_input_gradient=inputs[0].requires_grad,
                )
            )

        return hook

    with torch.device("meta"):
        built = build_network("unet", crop, **network)
        channels = 0
        for name, module in built.named_modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                channels = channels or module.in_channels
                module.register_forward_hook(record(name))
        built(torch.empty(1, channels, crop, crop, crop))
    return layers


def measure(
    device: torch.device,
    batch: int = 64,
    crop: int = 64,
    dtypes: Sequence[str] = tuple(DTYPES),
    formats: Sequence[str] = tuple(FORMATS),
    budget: float = 240.0,
    peaks: Mapping[str, float] | None = None,
    benchmark: bool = True,
    **network: Any,
) -> dict[str, Any]:
    """One row a layer, version, pass, dtype and format, until `budget` seconds are spent.

    peaks: TFLOP/s of a matrix product by dtype, measured where it is not given; benchmark: cuDNN tries its algorithms.
    """
    started = time.perf_counter()
    deadline = started + budget
    layers = read_layers(crop, **network)
    jobs = plan(layers, dtypes, formats)
    known = dict(peaks or {})
    rows: list[Row] = []
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = benchmark
    try:
        with _tf32_convolutions(device):
            for job in jobs:
                if job.dtype not in known and time.perf_counter() < deadline:
                    known[job.dtype] = _peak(device, job.dtype)
                rows += _measure_job(job, device, batch, known.get(job.dtype), deadline)
    finally:
        torch.backends.cudnn.benchmark = before
    measured = {tuple(row[name] for name in NAMES) for row in rows}
    planned = [job.names(name) for job in jobs for name in job.passes]
    return {
        "settings": {
            "batch": batch,
            "crop": crop,
            "dtypes": list(dtypes),
            "formats": list(formats),
            "budget": budget,
            "cudnn_benchmark": benchmark,
            **network,
        },
        "device": str(device),
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "seconds": time.perf_counter() - started,
        "peak_tflops": known,
        "layers": [{**asdict(layer), "flops": layer.flops} for layer in layers],
        "lines": [
            list(line) for line in dict.fromkeys((names["layer"], names["version"], names["pass"]) for names in planned)
        ],
        "rows": rows,
        "missing": [names for names in planned if tuple(names.values()) not in measured],
        "totals": totals(rows, dtypes, formats, len(layers)),
    }


def plan(layers: Sequence[Layer], dtypes: Iterable[str], formats: Iterable[str]) -> list[Job]:
    """All jobs, those first that say most: dtype by dtype, and in each format the largest layers."""
    formats = list(formats)
    largest = sorted(layers, key=lambda layer: layer.flops, reverse=True)
    jobs = []
    for dtype in dtypes:
        for format in formats:
            jobs += [Job(layer, dtype, format) for layer in largest]
            if _rewrites():
                jobs += [Job(layer, dtype, format, "rewritten") for layer in (layers[0], layers[-1])]
    return jobs


def weighted(rows: Sequence[Row], dtype: str | None = None, format: str | None = None, rewrites: bool = False) -> Row:
    """The convolutions of a whole step: their time, and their share of the matmul peak.

    A dtype or format of None is chosen layer by layer, whichever is fastest; `rewrites` lets the rewritten layers
    compete. What a change of dtype or format between two layers costs is not counted. `layers` counts those that were
    measured in all passes: the others are in no number.
    """
    candidates: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        fits = dtype in (None, row["dtype"]) and format in (None, row["format"])
        if fits and "error" not in row and (rewrites or row["version"] == "plain"):
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
        # Time at the peak over time taken, which holds for a mix of dtypes, too.
        "share_of_peak": sum(row["ms"] * row["share_of_peak"] for row in chosen) / milliseconds
        if chosen and None not in shares
        else None,
        "choices": {
            layer: " ".join([row["dtype"], row["format"], *([] if row["version"] == "plain" else ["rewritten"])])
            for layer, (row, *_) in best.items()
        },
    }


def totals(rows: Sequence[Row], dtypes: Iterable[str], formats: Iterable[str], layers: int) -> list[Row]:
    """`weighted` for each dtype and format, for the best choices in each dtype, and for the best of all."""
    formats = list(formats)
    space_to_depth = any(row["version"] == "rewritten" for row in rows)
    found = []
    for dtype in dtypes:
        for format in formats:
            found.append({"of": f"{dtype} {format}", **weighted(rows, dtype, format)})
            if space_to_depth:
                name = f"{dtype} {format}, rewritten where faster"
                found.append({"of": name, **weighted(rows, dtype, format, rewrites=True)})
        found.append({"of": f"{dtype}, the best choice a layer", **weighted(rows, dtype, rewrites=True)})
    found.append({"of": "the best choice a layer", **weighted(rows, rewrites=True)})
    return [{**total, "complete": total["layers"] == layers} for total in found]


def markdown(result: Mapping[str, Any]) -> str:
    """A line a layer and pass, a column a dtype and format: % of the matmul peak, and milliseconds."""
    columns = [(dtype, format) for dtype in result["settings"]["dtypes"] for format in result["settings"]["formats"]]
    rows = {tuple(row[name] for name in NAMES): row for row in result["rows"]}
    lines = [
        "| layer | pass | " + " | ".join(" ".join(column) for column in columns) + " |",
        "|---|---|" + "---:|" * len(columns),
    ]
    order = [layer["name"] for layer in result["layers"]]
    for layer, version, name in sorted(result["lines"], key=lambda line: order.index(line[0])):
        cells = [_cell(rows.get((layer, version, name, *column))) for column in columns]
        lines.append(f"| {layer}{'' if version == 'plain' else ' rewritten'} | {name} | {' | '.join(cells)} |")
    lines += ["", "| all convolutions of a step | ms | TFLOP/s | % of peak |", "|---|---:|---:|---:|"]
    for total in result["totals"]:
        of = total["of"] if total["complete"] else f"{total['of']} ({total['layers']} of {len(order)} layers)"
        lines.append(f"| {of} | {total['ms']:.2f} | {_number(total['tflops'])} | {_percent(total['share_of_peak'])} |")
    best = result["totals"][-1]["choices"]
    if best:
        lines += ["", "Best: " + ", ".join(f"{layer} {best[layer]}" for layer in order if layer in best) + "."]
    known = ", ".join(f"{dtype} {_number(peak)}" for dtype, peak in result["peak_tflops"].items())
    lines += ["", f"Matmul peaks in TFLOP/s: {known or 'none measured'}. cuDNN {result['cudnn']}."]
    if any(row.get("format_kept") is False for row in result["rows"]):
        lines.append("\\* The result came back in the other memory format.")
    if result["missing"]:
        lines.append(f"Not measured within {result['settings']['budget']:g} s: {len(result['missing'])} rows.")
    errors = {" ".join(key): row["error"] for key, row in rows.items() if "error" in row}
    return "\n".join([*lines, *(f"Error in {where}: {text}" for where, text in errors.items())])


def _measure_job(job: Job, device: torch.device, batch: int, peak: float | None, deadline: float) -> list[Row]:
    """A row for each pass until the deadline; what fails leaves its reason in the row."""
    rows: list[Row] = []
    calls: Calls = {}
    failure = ""
    if time.perf_counter() < deadline:
        try:
            calls = (_plain_calls if job.version == "plain" else _rewritten_calls)(job, device, batch)
        except Exception as error:  # out of memory, for one: other jobs may have enough
            failure = _text(error)
    for name in job.passes:
        if time.perf_counter() >= deadline:
            break
        row: Row = {**job.names(name), "passes": len(job.passes), "flops": batch * job.flops(name)}
        if not failure:
            try:
                row.update(_time(calls[name], device, job.format, row["flops"], peak))
            except Exception as error:  # nothing computes this here, for one: other passes may be computed
                row["error"] = _text(error)
        else:
            row["error"] = failure
        said = row.get("error") or f"{row['ms']:.3f} ms, {_percent(row['share_of_peak'])} of peak"
        sys.stderr.write(f"{' '.join(job.names(name).values())}: {said}\n")
        rows.append(row)
    calls.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _text(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200] or repr(error)


def _time(
    call: Callable[[], torch.Tensor], device: torch.device, format: str, flops: int, peak: float | None
) -> dict[str, Any]:
    kept = call().is_contiguous(memory_format=FORMATS[format])
    times = ceilings.repeat(call, device, ROW_SECONDS, most=100)
    milliseconds = ceilings.spread([1e3 * seconds for seconds in times])
    tflops = flops / milliseconds["median"] / 1e9
    return {
        "ms": milliseconds["median"],
        "ms_range": [milliseconds["min"], milliseconds["max"]],
        "n": milliseconds["n"],
        "tflops": tflops,
        "share_of_peak": tflops / peak if peak else None,
        "format_kept": kept,
    }


def _plain_calls(job: Job, device: torch.device, batch: int) -> Calls:
    """The passes as autograd calls them, each alone, without bias."""
    layer = job.layer
    draw = _random(job, device)
    inputs = draw((batch, *layer.input_shape))
    weight = draw(layer.weight_shape, 0.02)
    gradient = draw((batch, *layer.output_shape))
    where = (layer.stride, layer.padding, layer.dilation, layer.transposed, layer.output_padding, layer.groups)

    def forward() -> torch.Tensor:
        return torch.ops.aten.convolution(inputs, weight, None, *where)

    def backward(mask: list[bool]) -> torch.Tensor:
        gradients = torch.ops.aten.convolution_backward(gradient, inputs, weight, None, *where, mask)
        return gradients[mask.index(True)]

    return {
        "forward": torch.no_grad()(forward),
        "input gradient": lambda: backward([True, False, False]),
        "weight gradient": lambda: backward([False, True, False]),
    }


def _rewritten_calls(job: Job, device: torch.device, batch: int) -> Calls:
    """The module that takes the layer's place, with all it rearranges."""
    layer = job.layer
    draw = _random(job, device)
    # Without a bias, as in the plain layer's passes; on the meta device no weights are drawn.
    with torch.device("meta"):
        module: Any = _rewrites()[layer.transposed](
            layer.input_shape[0],
            layer.output_shape[0],
            layer.weight_shape[2:],
            stride=layer.stride,
            padding=layer.padding,
            bias=False,
            dtype=DTYPES[job.dtype],
        )
    module = module.to_empty(device=device).to(memory_format=FORMATS[job.format])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(draw(tuple(parameter.shape), 0.02))
    inputs = draw((batch, *layer.input_shape)).requires_grad_(layer.needs_input_gradient)
    wanted = [*([inputs] if layer.needs_input_gradient else []), *module.parameters()]
    output = module(inputs)
    gradient = draw(tuple(output.shape))

    def forward() -> torch.Tensor:
        return module(inputs)

    def backward() -> torch.Tensor:
        # Of the gradients, that of the inputs (or of the only weight) says which format they have.
        return torch.autograd.grad(output, wanted, gradient, retain_graph=True)[0]

    return {"forward": torch.no_grad()(forward), "backward": backward}


def _rewrites() -> tuple[Callable[..., nn.Module], Callable[..., nn.Module]] | tuple[()]:
    """What takes the place of a Conv3d and of a ConvTranspose3d; empty where there is no such module."""
    try:
        from networks.space_to_depth import DepthToSpaceConvTranspose3d, SpaceToDepthConv3d
    except ImportError:
        return ()
    return SpaceToDepthConv3d, DepthToSpaceConvTranspose3d


def _random(job: Job, device: torch.device) -> Callable[..., torch.Tensor]:
    """draw(shape, scale=1): normally distributed, in the job's dtype and format."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, dtype=DTYPES[job.dtype], device=device, generator=generator)
        return values.mul_(scale).contiguous(memory_format=FORMATS[job.format])

    return draw


def _peak(device: torch.device, dtype: str) -> float:
    """TFLOP/s of a matrix product; 0, of which there are no shares, where the device has none in this dtype."""
    try:
        return float(ceilings.matmul_tflops(device, dtype, PEAK_SECONDS)["median"])
    except RuntimeError as error:
        sys.stderr.write(f"no matmul peak in {dtype}: {error}\n")
        return 0.0


@contextlib.contextmanager
def _tf32_convolutions(device: torch.device) -> Iterator[None]:
    """TF32 for float32 convolutions on CUDA, which is torch's default; afterwards as before."""
    if device.type != "cuda" or torch.backends.cudnn.conv.fp32_precision == "tf32":  # type: ignore[attr-defined]
        yield
        return
    newer = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    try:
        older = torch.backends.cudnn.allow_tf32
    except RuntimeError:  # the two contradict each other already
        older = True
    # The older setting sets the newer one, too: what reads the older one fails where they contradict each other.
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = older
        torch.backends.cudnn.conv.fp32_precision = newer  # type: ignore[attr-defined]


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


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--crop", type=positive, default=64)
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--scales", type=positive, help="6, or as many as halve the crop into whole cells")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--budget", type=positive_float, default=240.0, help="seconds; what matters least comes last")
    parser.add_argument("--no-cudnn-benchmark", action="store_true", help="take cuDNN's first guess, unsearched")
    with one_line_errors(), value_errors_for_users():
        options = parser.parse_args()
        result = measure(
            this_machine().device,
            batch=options.batch,
            crop=options.crop,
            dtypes=options.dtypes,
            formats=options.formats,
            budget=options.budget,
            benchmark=not options.no_cudnn_benchmark,
            width=options.width,
            scales=options.scales or scales(options.crop),
        )
        print(markdown(result))
        print(f"\nwritten: {save('convolutions', result, options.output)}")


def scales(crop: int) -> int:
    """As many as the full network has, or as halve the crop into whole cells."""
    return min(6, (crop & -crop).bit_length() - 1)


if __name__ == "__main__":
    main()
