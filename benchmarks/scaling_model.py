"""Predicts weak scaling of data-parallel training on many ranks from measurements on a few.

python -m benchmarks.scaling_model                                fitted to the SC21 tutorial's one and two nodes
python -m benchmarks.scaling_model --calibrate DIR/scaling.json   fitted to a result of benchmarks.scaling

Seconds per step of a rank = forward + backward + fixed + exposed communication + jitter + exposed input.
Forward and backward: each layer's FLOP over an achieved rate. Communication: gradients become ready layer by layer
during the backward pass and fill DistributedDataParallel's buckets; a bucket is reduced once it is full and the
previous one is done; the time after the end of the backward pass is exposed. Fixed: the update and other costs that do
not grow with the batch. Jitter: all ranks wait for the slowest one of p, which takes longer by
deviation × (forward + backward + fixed) × E[maximum of p independent numbers from N(0, 1)].

The fit to the tutorial's runs does not use its 128 GPUs, but those figures were known when the model was written.
Costs among the four ranks of a node count as fixed time. Congestion, switches and file systems are not in the model.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import RESULTS, Parser, publish, read_json, settings, table
from networks import build_network
from utils import config as configs
from utils.data.loaders.base import meta_batch
from utils.errors import UserError, one_line_errors, value_errors_for_users
from utils.steps import build

Layers = tuple[tuple[str, float, float], ...]  # (name, forward FLOP, backward FLOP) of one sample, in forward order
Gradients = tuple[tuple[str, int], ...]  # (layer, bytes) in the order of the backward pass


@dataclass(frozen=True)
class Model:
    """A training run on a cluster; bandwidths in bytes/s in one direction, latencies in seconds per hop."""

    layers: Layers
    gradients: Gradients
    local_batch: int
    rate: float  # FLOP/s per rank
    fixed_seconds: float = 0.0  # per step, independent of the batch
    input_seconds: float = 0.0  # per sample: time that input adds to the step
    jitter: float = 0.0  # standard deviation of a rank's step, as a fraction of it
    bucket_cap_mb: float = 25.0
    first_bucket_mb: float | None = None  # bucket_cap_mb if None
    compressed: bool = False  # gradients are sent as bfloat16
    # NCCL reaches at most 235 GB/s of an A100's 300 GB/s of NVLink. Perlmutter's network in 2021, Slingshot 10, was two
    # NICs of 100 Gb/s per node. Latencies: NVLink and network in NCCL 2.11's model (src/graph/tuning.cc).
    ranks_per_node: int = 4
    node_bandwidth: float = 235e9  # of a rank inside its node
    network_bandwidth: float = 25e9  # of a node
    node_latency: float = 3.4e-6
    network_latency: float = 9.6e-6


def examine(network: nn.Module, inputs: torch.Tensor) -> tuple[Layers, Gradients]:
    """Layers and gradients of a network for one sample [1, …]; on the meta device nothing is computed."""
    order: list[str] = []
    gradients: list[tuple[str, int]] = []
    for name, module in network.named_modules():
        for parameter in module.parameters(recurse=False):
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: gradients.append((name, p.nbytes)))
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(lambda *_, name=name: order.append(name))
    with FlopCounterMode(display=False) as counter:
        outputs = network(inputs)
    outputs.sum().backward()
    counts = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    # Backward is twice forward, except in the first layer: the gradient of the data is not computed.
    layers = [(name, counts.get(f"{type(network).__name__}.{name}", 0)) for name in dict.fromkeys(order)]
    return tuple((name, count, count * min(2, 1 + n)) for n, (name, count) in enumerate(layers)), tuple(gradients)


def flops(layers: Layers) -> float:
    """Forward and backward, per sample."""
    return sum(forward + backward for _, forward, backward in layers)


def buckets(model: Model) -> list[list[tuple[str, int]]]:
    """DistributedDataParallel's buckets of (layer, bytes): the gradient that reaches the cap closes a bucket."""
    formed: list[list[tuple[str, int]]] = [[]]
    for gradient in model.gradients:
        first = model.first_bucket_mb if len(formed) == 1 else None
        formed[-1].append(gradient)
        if sum(size for _, size in formed[-1]) >= int((first or model.bucket_cap_mb) * 2**20):
            formed.append([])
    return [bucket for bucket in formed if bucket]


def ring(size: float, model: Model, nodes: int, local: int) -> float:
    ranks = nodes * local
    hops = nodes * (local - 1) * model.node_latency + (nodes - 1) * model.network_latency
    slowest = model.node_bandwidth if nodes == 1 else min(model.node_bandwidth, model.network_bandwidth)
    return 2 * (ranks - 1) / ranks * size / slowest + 2 * hops


def tree(size: float, model: Model, nodes: int, local: int) -> float:
    """Double binary tree: two participants send each byte once, more of them twice (NVIDIA/nccl issue 946)."""
    inside, between = ({1: 0.0, 2: 1.0}.get(participants, 2.0) for participants in (local, nodes))
    hops = math.log2(local) * model.node_latency + math.log2(nodes) * model.network_latency
    return max(inside / model.node_bandwidth, between / model.network_bandwidth) * size + 2 * hops


def hierarchical(size: float, model: Model, nodes: int, local: int) -> float:
    """Reduce-scatter and all-gather inside the nodes; in between, the faster of ring and tree over the nodes."""
    inside = 2 * (local - 1) / local * size / model.node_bandwidth + 2 * (local - 1) * model.node_latency
    if nodes == 1:
        return inside
    between = replace(model, node_bandwidth=math.inf)
    return inside + min(ring(size, between, nodes, 1), tree(size, between, nodes, 1))


def all_reduce_seconds(size: float, model: Model, ranks: int) -> float:
    """Seconds of the fastest algorithm, as in NCCL's own model; ValueError if the ranks do not fill their nodes."""
    local = min(ranks, model.ranks_per_node)
    if ranks % local:
        raise ValueError(f"{ranks} ranks do not fill nodes of {local}")
    return min(cost(size, model, ranks // local, local) for cost in (ring, tree, hierarchical))


@functools.cache
def expected_maximum(count: int) -> float:
    """E[maximum of `count` independent numbers from N(0, 1)]: the mean of the inverse of their distribution."""
    from scipy.integrate import quad
    from scipy.stats import norm

    return float(quad(lambda p: norm.ppf(p ** (1 / count)), 0, 1, limit=200)[0])


def step_seconds(model: Model, ranks: int) -> dict[str, float]:
    """Seconds per step, by kind as benchmark mode measures them, and those of exposed communication."""
    per_flop = model.local_batch / model.rate
    now = sum(forward for _, forward, _ in model.layers) * per_flop
    ready: dict[str, float] = {}
    for name, _, backward in reversed(model.layers):
        now += backward * per_flop
        ready[name] = now
    done = 0.0
    for bucket in buckets(model) if ranks > 1 else []:
        size = sum(size for _, size in bucket) / (2 if model.compressed else 1)
        full = max(ready[layer] for layer, _ in bucket)
        done = max(done, full) + all_reduce_seconds(size, model, ranks)
    exposed = max(0.0, done - now)
    compute = now + model.fixed_seconds
    together = compute + exposed + model.jitter * compute * expected_maximum(ranks)
    full_step = together + model.input_seconds * model.local_batch
    return {"NO-COMM": compute, "SYNTHETIC": together, "FULL": full_step, "communication": exposed}


def rate(model: Model, ranks: int, kind: str) -> float:
    """Samples/s of all ranks; for two kinds, as in "SYNTHETIC / NO-COMM", their ratio."""
    first, _, second = kind.partition(" / ")
    seconds = step_seconds(model, ranks)
    return (seconds[second] if second else ranks * model.local_batch) / seconds[first]


def efficiency(model: Model, ranks: int) -> float:
    """Weak scaling: FULL samples/s per rank, relative to one rank at the same local batch."""
    return rate(model, ranks, "FULL") / ranks / rate(model, 1, "FULL")


@dataclass(frozen=True)
class Figure:
    """A measurement: samples/s of a kind, or the ratio of two kinds."""

    ranks: int
    local_batch: int
    kind: str
    value: float
    bucket_cap_mb: float = 25.0
    what: str = ""

    def modeled(self, model: Model) -> float:
        measured = replace(model, local_batch=self.local_batch, bucket_cap_mb=self.bucket_cap_mb)
        return rate(measured, self.ranks, self.kind)


def fit(figures: Sequence[Figure], start: Model, unknown: Sequence[str]) -> Model:
    """Least squares of the logarithms; `unknown` are fields of the model, which start from its values."""
    from scipy.optimize import least_squares

    def changed(logarithms: Iterable[float]) -> Model:
        values: dict[str, Any] = {name: math.exp(value) for name, value in zip(unknown, logarithms, strict=True)}
        return replace(start, **values)

    def residuals(logarithms: Iterable[float]) -> list[float]:
        model = changed(logarithms)
        return [math.log(figure.modeled(model) / figure.value) for figure in figures]

    given = [math.log(getattr(start, name)) for name in unknown]
    # A bandwidth has no slope where all its time is hidden, or another one is lower: several starts.
    moves = [(-13.8, -9.2, -4.6, 0.0) if "bandwidth" in name else (0.0,) for name in unknown]
    runs = []
    for moved in itertools.product(*moves):
        first = [value + move for value, move in zip(given, moved, strict=True)]
        bounds = ([value - 20 for value in first], [value + 20 for value in first])
        runs.append(least_squares(residuals, first, bounds=bounds, x_scale=0.1, diff_step=1e-4, xtol=1e-10, ftol=1e-12))
    return changed(min(runs, key=lambda run: run.cost).x)


def calibrate(path: Path) -> tuple[list[Figure], Model, list[str]]:
    """Figures of a result of benchmarks.scaling, the model to start a fit from, and the fields to fit.

    Compute and input are fitted to the fullest nodes, whose ranks slow each other down even without communication. If
    all ranks share one node, further ranks count as linked like them.
    """
    result = read_json(path, "benchmarks.scaling", ("points", "config"))
    config, points = configs.validate(result["config"], str(path)), result["points"]
    if not points:
        raise UserError(f"{path} has no points; measure some with python -m benchmarks.scaling")
    with torch.device("meta"), value_errors_for_users():
        layers, gradients = examine(build.network(config), meta_batch(config, 1)[0])

    def figure(point: Mapping[str, Any], kind: str) -> Figure:
        first, _, second = kind.partition(" / ")
        value = point[first]["median"] / (point[second]["median"] if second else 1)
        what = f"ranks {point['ranks']}, hosts {point['hosts']}"
        return Figure(point["ranks"], point["local_batch"], kind, value, config.bucket_cap_mb, what)

    fullest = max(point["ranks"] // point["hosts"] for point in points)
    full = [point for point in points if point["ranks"] // point["hosts"] == fullest]
    several = [point for point in points if point["ranks"] > 1]
    figures = [figure(point, kind) for point in full for kind in ("NO-COMM", "FULL / SYNTHETIC")]
    figures += [figure(point, "SYNTHETIC / NO-COMM") for point in several]
    unknown = ["rate", "input_seconds"]
    if len({point["local_batch"] for point in full}) > 1:
        unknown.append("fixed_seconds")
    hosts = {point["hosts"] for point in several}
    unknown += ["node_bandwidth"] * (1 in hosts) + ["network_bandwidth"] * (not hosts <= {1})
    batch = max(point["local_batch"] for point in full)
    seconds = max(point["ranks"] * point["local_batch"] / point["NO-COMM"]["median"] for point in full)
    start = Model(
        layers,
        gradients,
        local_batch=batch,
        rate=flops(layers) * batch / seconds,
        fixed_seconds=0.01 * seconds if "fixed_seconds" in unknown else 0.0,
        input_seconds=0.01 * seconds / batch,
        jitter=JITTER,
        bucket_cap_mb=config.bucket_cap_mb,
        compressed=config.gradient_compression == "bfloat16",
        ranks_per_node=fullest if "network_bandwidth" in unknown else 2**30,
    )
    return figures, start, unknown


_published = yaml.safe_load(Path(__file__).with_name("published_scaling.yaml").read_text(encoding="utf-8"))
PUBLISHED = tuple(Figure(**figure) for figure in _published["figures"])
UNKNOWN = ("rate", "fixed_seconds", "input_seconds", "network_bandwidth")
GOALS, GOAL_RANKS = _published["goals"], 128
# SYNTHETIC's trials scatter by 0.318 of 707.966 samples/s; a trial averages the noise of 64 steps.
JITTER = 0.318 / 707.966 * 64**0.5


def tutorial_base() -> Model:
    """The tutorial's fastest run of config 'base'; its values are the start of a fit."""
    with torch.device("meta"):
        layers, gradients = examine(build_network("unet", 64), torch.empty(1, 4, 64, 64, 64))
    # PyTorch 1.10's first bucket is 1 MB.
    return Model(layers, gradients, 64, flops(layers) * 800, 0.01, 3e-4, JITTER, first_bucket_mb=1.0)


def at_goal(model: Model) -> dict[str, dict[str, float]]:
    """The figures published for 128 GPUs as the model predicts them, by local batch."""
    predicted = {}
    for batch in GOALS:
        one = replace(model, local_batch=batch)
        lost = 1 - rate(one, GOAL_RANKS, "SYNTHETIC / NO-COMM")
        predicted[str(batch)] = {"efficiency": efficiency(one, GOAL_RANKS), "communication overhead": lost}
    return predicted


def predictions(model: Model) -> dict[str, dict[str, float]]:
    """Weak-scaling efficiency by variant and number of ranks."""
    variants = {
        "25 MB buckets, float32": model,
        "sent as bfloat16": replace(model, compressed=True),
        "local batch × 2": replace(model, local_batch=2 * model.local_batch),
        "local batch × 2, sent as bfloat16": replace(model, local_batch=2 * model.local_batch, compressed=True),
    }
    ranks = [2**power for power in range(14)]
    return {name: {str(count): efficiency(one, count) for count in ranks} for name, one in variants.items()}


def report(figures: Sequence[Figure], model: Model, result: Mapping[str, Any]) -> str:
    """Measured and fitted values, predicted and published ones, and efficiencies."""
    fits = [
        (f"{figure.what}: {figure.kind}", figure.local_batch, f"{figure.value:.4g}", f"{figure.modeled(model):.4g}")
        for figure in figures
    ]
    goals = [
        (f"local batch {batch}, {name}", f"{100 * value:.0f} %", f"{100 * result['predicted'][str(batch)][name]:.1f} %")
        for batch, values in result.get("published", {}).items()
        for name, value in values.items()
    ]
    shown = (8, 32, 128, 512, 2048, 8192)
    efficiencies = [
        (name, *(f"{100 * values[str(ranks)]:.1f} %" for ranks in shown))
        for name, values in result["efficiency"].items()
    ]
    parts = [
        table(("measurement", "local batch", "measured", "fitted"), fits),
        f"Fitted: {', '.join(f'{key} {value:.4g}' for key, value in result['fitted'].items())}.",
        *([table((f"{GOAL_RANKS} GPUs", "published", "predicted"), goals)] if goals else []),
        table((f"efficiency at local batch {model.local_batch} on ranks", *shown), efficiencies),
    ]
    return "\n\n".join(parts)


def run(options: argparse.Namespace) -> None:
    """Fits, predicts, and writes result and tables."""
    figures, start, unknown = (
        calibrate(options.calibrate) if options.calibrate else (PUBLISHED, tutorial_base(), UNKNOWN)
    )
    model = fit(figures, start, unknown)
    result: dict[str, Any] = {
        "settings": settings(options),
        "figures": [{**asdict(figure), "fitted": figure.modeled(model)} for figure in figures],
        "fitted": {name: getattr(model, name) for name in unknown},
        "efficiency": predictions(model),
        **({} if options.calibrate else {"published": GOALS, "predicted": at_goal(model)}),
    }
    name = "scaling_model_calibrated" if options.calibrate else "scaling_model"
    publish(name, result, options.output, report(figures, model, result))


def main() -> None:
    parser = Parser(__doc__)
    parser.set_defaults(output=RESULTS / "scaling_model")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="scaling.json of benchmarks.scaling")
    with one_line_errors():
        run(parser.parse_args())


if __name__ == "__main__":
    main()
