"""Predicts how training scales beyond the machines at hand, from runs on a few ranks.

python -m benchmarks.scaling_model                                 from the original tutorial's one and two nodes
python -m benchmarks.scaling_model --calibrate DIR/scaling.json    from what benchmarks.scaling measured
python -m benchmarks.scaling_model --timeline benchmarks/results/<gpu>/convolutions.json

A rank's step takes
    forward + backward + fixed + exposed communication + jitter + exposed input.
Forward and backward take each layer's work over an achieved rate: its FLOP, or the times that benchmarks.convolutions
measured, of which only the shares matter. Gradients appear layer by layer as the backward pass goes on. They fill
DistributedDataParallel's buckets in that order; a bucket is reduced once it is full and the one before it is done. What
the last one takes beyond the end of the backward pass is exposed. `fixed` does not grow with the batch: the update, and
whatever else a step costs once. All ranks wait for the slowest one of p, so that
    jitter = deviation × (forward + backward + fixed) × E[largest of p independent numbers from N(0, 1)].

An all-reduce of n bytes over m nodes of g ranks (p = m g) takes, with b bytes/s and a seconds a hop for a rank inside
its node, and B bytes/s and A seconds a hop for a node on the network, all in one direction:
    ring           2 (p - 1)/p n/w + 2 (m (g - 1) a + (m - 1) A), w being b on one node, else the smaller of b and B
    tree           n max(t(g)/b, t(m)/B) + 2 (log2(g) a + log2(m) A), a double binary one: t is 2, or 1 where only two
                   take part, of which each is the root of one tree and the leaf of the other, or 0 for one alone
    hierarchical   2 (g - 1)/g n/b + 2 (g - 1) a inside the node, to scatter and to gather; between them n bytes by
                   ring or tree, whichever is faster, among m participants at B
Sent as bfloat16, n is half as much. The fastest is taken, as NCCL does by a model of this kind, or that of --algorithm.

The rate, the fixed time, the exposed input and the bandwidths are fitted; with --calibrate to NO-COMM on nodes that are
full (at two local batches, or else nothing counts as fixed), FULL / SYNTHETIC, and SYNTHETIC / NO-COMM.

No parameter was fitted to the original's 128 GPUs, though what is published of them was known when this was written.
What its runs on one and two nodes do not determine:
- Which part of a step is fixed. The only runs at another batch than 64 are on four and eight ranks, so that whatever
  four ranks cost each other counts as fixed here. The same figures can be read as slow links inside the node, or as
  ranks that slow down each other's input: "readings" in the result tells what would follow.
- What the network carries. Two nodes exchange n bytes where many exchange 2 n; but a flat ring of eight ranks exchanges
  1.75 n between its two nodes, and then the same time means a faster network, and cheaper exchanges at 128 ranks. For
  the tree speak NCCL's authors (github.com/NVIDIA/nccl/issues/946), and the line rate, which a flat ring would exceed.
- Jitter: the scatter of benchmark trials bounds it, since drift counts as noise there.
- Congestion, hops through more switches, file systems that many nodes share, and kernels that run slower while others
  communicate: they are not in the model at all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import train
from benchmarks.common import RESULTS, Parser, save, settings
from benchmarks.ladder import GPU_RUNGS
from networks import build_network
from utils import config as configs
from utils.data import batch_like
from utils.errors import UserError, one_line_errors, value_errors_for_users
from utils.files import atomic_write
from utils.profiling.flops import Flops, counted

MEBIBYTE = 2**20
ALL_ON_ONE_NODE = 2**30


# --- what trains, and on what --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Its work for one sample: FLOP, or seconds where they were measured."""

    name: str
    forward: float
    backward: float


@dataclass(frozen=True)
class Network:
    """`layers` as the forward pass meets them; `gradients`, (layer, bytes), as the backward pass yields them."""

    layers: tuple[Layer, ...]
    gradients: tuple[tuple[str, int], ...]

    @property
    def work(self) -> float:
        """Of one sample, forward and backward."""
        return sum(layer.forward + layer.backward for layer in self.layers)


@dataclass(frozen=True)
class Machine:
    """A cluster; bandwidths in bytes/s and one direction, latencies in seconds a hop."""

    name: str
    ranks_per_node: int
    node_bandwidth: float  # of a rank inside its node
    network_bandwidth: float  # of a node
    node_latency: float
    network_latency: float


@dataclass(frozen=True)
class Training:
    """What a rank computes and sends a step."""

    network: Network
    local_batch: int
    rate: float  # the layers' work a second
    fixed_seconds: float = 0.0  # a step, whatever its batch
    input_seconds: float = 0.0  # a sample: what input adds to the step
    jitter: float = 0.0  # standard deviation of a rank's step, as a fraction of it
    bucket_cap_mb: float = 25.0
    first_bucket_mb: float | None = None  # the cap unless given
    compressed: bool = False  # gradients are sent as bfloat16
    fixed_within: bool = False  # the fixed time lies in forward and backward, where it hides communication


def examine(network: nn.Module, inputs: torch.Tensor) -> Network:
    """The layers and gradients of a network and one sample, [1, …], both on the meta device: nothing is computed."""
    order: list[str] = []
    gradients: list[tuple[str, int]] = []
    flops: dict[str, Flops] = {}
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(counted(network))
        for name, module in network.named_modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            flops[name] = stack.enter_context(counted(module))
            module.register_forward_hook(lambda *_, name=name: order.append(name))
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, name=name: gradients.append((name, parameter.nbytes))
                )
        outputs = network(inputs)
    outputs.sum().backward()
    # Backward is twice forward, except in the layer that the data enter: nobody needs a gradient of them.
    spared = 3 * whole.forward - whole.training
    layers = tuple(
        Layer(name, flops[name].forward, 2 * flops[name].forward - (spared if place == 0 else 0))
        for place, name in enumerate(dict.fromkeys(order))
    )
    return Network(layers, tuple(gradients))


def full_network() -> Network:
    """The network of config 'base'."""
    with torch.device("meta"):
        return examine(build_network("unet", 64), torch.empty(1, 4, 64, 64, 64))


def timed(network: Network, path: Path) -> Network:
    """The network with its layers' measured times in place of FLOP; `path` is a result of benchmarks.convolutions.

    Each layer counts in the type and memory format in which it is fastest.
    """
    result = read_json(path, "benchmarks.convolutions", ("rows",))
    passes: dict[tuple[str, str, str], dict[str, float]] = {}
    counts: dict[tuple[str, str, str], int] = {}
    for row in result["rows"]:
        if row["version"] == "plain" and "ms" in row:
            key = (row["layer"], row["dtype"], row["format"])
            passes.setdefault(key, {})[row["pass"]] = row["ms"]
            counts[key] = row["passes"]
    layers = []
    for layer in network.layers:
        measured = [
            milliseconds
            for key, milliseconds in passes.items()
            if key[0] == layer.name and len(milliseconds) == counts[key]
        ]
        if not measured:
            raise UserError(
                f"{path} has no times of all passes of layer {layer.name}; give benchmarks.convolutions time"
            )
        best = min(measured, key=lambda milliseconds: sum(milliseconds.values()))
        layers.append(Layer(layer.name, best["forward"], sum(best.values()) - best["forward"]))
    return replace(network, layers=tuple(layers))


# --- communication -------------------------------------------------------------------------------------------------


def buckets(
    gradients: Sequence[tuple[str, int]], cap_mb: float, first_mb: float | None = None
) -> list[list[tuple[str, int]]]:
    """DistributedDataParallel's buckets: each is closed by the gradient with which it reaches its cap.

    PyTorch's default for the first one is 1 MB. Where bucket_cap_mb is given, as here, newer versions hold the first
    one to that as well.
    """
    formed: list[list[tuple[str, int]]] = [[]]
    for gradient in gradients:
        cap = cap_mb if first_mb is None or len(formed) > 1 else first_mb
        formed[-1].append(gradient)
        if sum(size for _, size in formed[-1]) >= int(cap * MEBIBYTE):
            formed.append([])
    return [bucket for bucket in formed if bucket]


def ring(size: float, machine: Machine, nodes: int, local: int) -> float:
    ranks = nodes * local
    hops = nodes * (local - 1) * machine.node_latency + (nodes - 1) * machine.network_latency
    slowest = machine.node_bandwidth if nodes == 1 else min(machine.node_bandwidth, machine.network_bandwidth)
    return 2 * (ranks - 1) / ranks * size / slowest + 2 * hops


def tree(size: float, machine: Machine, nodes: int, local: int) -> float:
    hops = math.log2(local) * machine.node_latency + math.log2(nodes) * machine.network_latency
    transfer = max(_trees(local) / machine.node_bandwidth, _trees(nodes) / machine.network_bandwidth)
    return transfer * size + 2 * hops


def hierarchical(size: float, machine: Machine, nodes: int, local: int) -> float:
    inside = 2 * (local - 1) / local * size / machine.node_bandwidth + 2 * (local - 1) * machine.node_latency
    if nodes == 1:
        return inside
    by_ring = 2 * (nodes - 1) / nodes * size / machine.network_bandwidth + 2 * (nodes - 1) * machine.network_latency
    by_tree = _trees(nodes) * size / machine.network_bandwidth + 2 * math.log2(nodes) * machine.network_latency
    return inside + min(by_ring, by_tree)


ALGORITHMS: dict[str, Callable[[float, Machine, int, int], float]] = {
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
}
FASTEST = "fastest"


def all_reduce_seconds(size: float, machine: Machine, ranks: int, algorithm: str = FASTEST) -> float:
    """What `size` bytes take among so many ranks; ValueError where they do not fill their nodes."""
    local = min(ranks, machine.ranks_per_node)
    if ranks % local:
        raise ValueError(f"{ranks} ranks do not fill nodes of {local}")
    if ranks == 1:
        return 0.0
    chosen = ALGORITHMS.values() if algorithm == FASTEST else (ALGORITHMS[algorithm],)
    return min(cost(size, machine, ranks // local, local) for cost in chosen)


def _trees(participants: int) -> float:
    """How often the two trees send all bytes through the busiest participant's link, in one direction."""
    return {1: 0.0, 2: 1.0}.get(participants, 2.0)


@functools.cache
def expected_maximum(count: int) -> float:
    """E[largest of `count` independent numbers from N(0, 1)], by integrating P(largest > x)."""
    from scipy.integrate import quad
    from scipy.stats import norm

    above = quad(lambda x: 1 - norm.cdf(x) ** count, 0, 10, limit=200)[0]
    below = quad(lambda x: norm.cdf(x) ** count, -10, 0, limit=200)[0]
    return float(above - below)


# --- a step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A step's parts in seconds."""

    ranks: int
    local_batch: int
    compute: float
    fixed: float
    communication: float  # what the backward pass does not hide
    jitter: float
    input: float

    def seconds(self, kind: str) -> float:
        """As benchmark mode measures it."""
        alone = self.compute + self.fixed  # NO-COMM: no rank waits for another
        together = alone + self.communication + self.jitter
        return {"NO-COMM": alone, "SYNTHETIC": together, "FULL": together + self.input}[kind]

    def rate(self, kind: str) -> float:
        """Samples/s of all ranks; of two kinds, as in "SYNTHETIC / NO-COMM", their ratio."""
        first, _, second = kind.partition(" / ")
        if second:
            return self.seconds(second) / self.seconds(first)
        return self.ranks * self.local_batch / self.seconds(first)

    @property
    def communication_overhead(self) -> float:
        return 1 - self.rate("SYNTHETIC / NO-COMM")


def predict(training: Training, machine: Machine, ranks: int, algorithm: str = FASTEST) -> Step:
    """One step on so many ranks."""
    per_work = training.local_batch / training.rate
    compute = training.network.work * per_work
    if training.fixed_within:
        per_work *= 1 + training.fixed_seconds / compute
    now = sum(layer.forward for layer in training.network.layers) * per_work
    ready: dict[str, float] = {}
    for layer in reversed(training.network.layers):
        now += layer.backward * per_work
        ready[layer.name] = now
    done = 0.0
    for bucket in buckets(training.network.gradients, training.bucket_cap_mb, training.first_bucket_mb):
        size = sum(size for _, size in bucket) / (2 if training.compressed else 1)
        full = max(ready[layer] for layer, _ in bucket)
        done = max(done, full) + all_reduce_seconds(size, machine, ranks, algorithm)
    return Step(
        ranks=ranks,
        local_batch=training.local_batch,
        compute=compute,
        fixed=training.fixed_seconds,
        communication=max(0.0, done - now),
        jitter=training.jitter * (compute + training.fixed_seconds) * expected_maximum(ranks),
        input=training.input_seconds * training.local_batch,
    )


def efficiency(training: Training, machine: Machine, ranks: int, algorithm: str = FASTEST) -> float:
    """Weak scaling: FULL samples/s a rank, over those of one rank at the same local batch."""
    one, many = (predict(training, machine, number, algorithm) for number in (1, ranks))
    return one.seconds("FULL") / many.seconds("FULL")


# --- calibration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """Something measured: samples/s of a kind, or the ratio of two kinds."""

    ranks: int
    local_batch: int
    kind: str
    value: float
    bucket_cap_mb: float = 25.0
    what: str = ""


@dataclass(frozen=True)
class Fit:
    """What came out, the figures with it, and which of the unknowns the figures say nothing of."""

    training: Training
    machine: Machine
    figures: tuple[tuple[Figure, float], ...]  # (measured, as the model has it)
    undetermined: tuple[str, ...]


def fit(
    figures: Sequence[Figure], training: Training, machine: Machine, unknown: Sequence[str], algorithm: str = FASTEST
) -> Fit:
    """Least squares of the logarithms; `unknown` are fields of Training and Machine, which start from what they are."""
    from scipy.optimize import least_squares

    own = {field.name for field in fields(Training)}

    def at(logarithms: Iterable[float]) -> tuple[Training, Machine]:
        values: dict[str, Any] = {name: math.exp(value) for name, value in zip(unknown, logarithms, strict=True)}
        return (
            replace(training, **{name: value for name, value in values.items() if name in own}),
            replace(machine, **{name: value for name, value in values.items() if name not in own}),
        )

    def modelled(logarithms: Iterable[float]) -> list[float]:
        trained, on = at(logarithms)
        return [
            predict(
                replace(trained, local_batch=figure.local_batch, bucket_cap_mb=figure.bucket_cap_mb),
                on,
                figure.ranks,
                algorithm,
            ).rate(figure.kind)
            for figure in figures
        ]

    def residuals(logarithms: Iterable[float]) -> list[float]:
        return [math.log(value / figure.value) for value, figure in zip(modelled(logarithms), figures, strict=True)]

    given = [math.log(getattr(training if name in own else machine, name)) for name in unknown]
    # A bandwidth has no slope where all its time is hidden, or another one is narrower: several starts.
    moves = [(0.0,) if name in own else tuple(math.log(10) * power for power in (-6, -4, -2, 0)) for name in unknown]
    runs = []
    for moved in itertools.product(*moves):
        start = [value + move for value, move in zip(given, moved, strict=True)]
        bounds = ([value - 20 for value in start], [value + 20 for value in start])
        runs.append(least_squares(residuals, start, bounds=bounds, x_scale=0.1, diff_step=1e-4, xtol=1e-10, ftol=1e-12))
    found = min(runs, key=lambda run: run.cost)
    slopes = [max(abs(row[place]) for row in found.jac) for place in range(len(unknown))]
    return Fit(
        *at(found.x),
        tuple(zip(figures, modelled(found.x), strict=True)),
        tuple(name for name, slope in zip(unknown, slopes, strict=True) if slope < 1e-4),
    )


# The original tutorial's figures (github.com/NERSC/sc21-dl-tutorial, November 2021) on one and two nodes of Perlmutter.
PUBLISHED = (
    Figure(1, 64, "SYNTHETIC", 707.966, what="benchmark, 1 GPU"),
    Figure(1, 64, "FULL", 538.593, what="benchmark, 1 GPU"),
    Figure(1, 64, "FULL", 542.011, what="training, 1 GPU"),
    Figure(4, 16, "FULL", 1271.69, what="training, 4 GPUs"),
    Figure(4, 16, "FULL", 1315.09, what="training, 4 GPUs, no buffers broadcast"),  # there are none
    Figure(4, 16, "FULL", 1316.41, 100.0, what="training, 4 GPUs, 100 MB buckets"),
    Figure(8, 16, "FULL", 1823.25, what="training, 8 GPUs on 2 nodes"),
    Figure(8, 16, "FULL", 1856.86, 100.0, what="training, 8 GPUs on 2 nodes, 100 MB buckets"),
)
# At 128 GPUs; they take no part in any fit.
GOALS = {
    64: {"efficiency": 0.78, "communication overhead": 0.25},
    128: {"efficiency": 0.89, "communication overhead": 0.12},
}
GOAL_RANKS = 128
UNKNOWN = ("rate", "fixed_seconds", "input_seconds", "network_bandwidth")

# SYNTHETIC's trials scatter by 0.318 of 707.966 samples/s; a trial is an epoch of 64 steps, whose noise averages out.
JITTER = 0.318 / 707.966 * 64**0.5
# Of an update of all parameters by Adam: at 4.7 to 5.6 GB, and 1.555 TB/s of an A100 and 4.8 TB/s of an H200.
A100_UPDATE_SECONDS, H200_UPDATE_SECONDS = 3.3e-3, 1.1e-3

# NCCL 2.11's own model (src/graph/tuning.cc): 3.4 µs a hop on NVLink and 9.6 µs on a network, of the ring's plain
# protocol; at most 235 GB/s of an A100's 300 GB/s of NVLink.
HOPS = {"node_latency": 3.4e-6, "network_latency": 9.6e-6}
NVLINK_SHARE = 235 / 300
# Line rates. In 2021 two NICs a node, ConnectX-5 of 100 Gb/s (Slingshot 10); now four of 200 Gb/s (Slingshot 11).
SLINGSHOT_10 = Machine("A100, Slingshot 10 (Perlmutter 2021)", 4, 300e9 * NVLINK_SHARE, 25e9, **HOPS)
SLINGSHOT_11 = Machine("A100, Slingshot 11 (Perlmutter)", 4, 300e9 * NVLINK_SHARE, 100e9, **HOPS)
# HGX: 450 GB/s of NVLink a GPU, an NDR adapter of 400 Gb/s each.
NDR = Machine("H200, NDR (computed)", 8, 450e9 * NVLINK_SHARE, 400e9, **HOPS)
# SYNTHETIC samples/s of one H200 at batch 64: computed, not measured.
H200_RATE = next(rung.predicted for rung in GPU_RUNGS if rung.name == "channels last")


def original(network: Network) -> Training:
    """The original's training at its best, where a fit starts. PyTorch 1.10's first bucket is of 1 MB."""
    return Training(
        network,
        local_batch=64,
        rate=network.work * 800,
        fixed_seconds=0.01,
        input_seconds=3e-4,
        jitter=JITTER,
        first_bucket_mb=1.0,
    )


def readings(network: Network) -> dict[str, dict[str, Any]]:
    """128 ranks as the model sees them, and as they follow from the same figures where those are read otherwise."""
    start = original(network)
    update_alone = replace(start, fixed_seconds=A100_UPDATE_SECONDS)
    slow_links = ("rate", "input_seconds", "node_bandwidth", "network_bandwidth")
    cases: dict[str, tuple[Training, Sequence[str], str]] = {
        "as the model has it": (start, UNKNOWN, FASTEST),
        "fixed time lies within forward and backward": (replace(start, fixed_within=True), UNKNOWN, FASTEST),
        "a flat ring on two nodes and on all": (start, UNKNOWN, "ring"),
        "only the update is fixed; slow links inside the node": (update_alone, slow_links, FASTEST),
    }
    told = {}
    for name, (training, unknown, algorithm) in cases.items():
        found = fit(PUBLISHED, training, SLINGSHOT_10, unknown, algorithm)
        told[name] = {**at_goal(found, algorithm), "fitted": fitted(found, unknown)}
    # One rank alone gives what its input costs; those of a node, which share one loader's CPU, what theirs does.
    alone = fit(PUBLISHED[:3], update_alone, SLINGSHOT_10, ("rate", "input_seconds"))
    shared = fit(PUBLISHED[3:], alone.training, SLINGSHOT_10, ("input_seconds", "network_bandwidth"))
    told["only the update is fixed; ranks of a node slow down each other's input"] = {
        **at_goal(shared, alone=alone.training),
        "fitted": {**fitted(alone, ("rate",)), **fitted(shared, ("input_seconds", "network_bandwidth"))},
    }
    return told


def at_goal(found: Fit, algorithm: str = FASTEST, alone: Training | None = None) -> dict[str, Any]:
    """What is published of 128 GPUs, as the fit has it, by local batch; `alone`: one rank's training if it differs."""
    result: dict[str, Any] = {}
    for batch in GOALS:
        training = replace(found.training, local_batch=batch)
        many = predict(training, found.machine, GOAL_RANKS, algorithm)
        one = predict(replace(alone or training, local_batch=batch), found.machine, 1)
        result[str(batch)] = {
            "efficiency": one.seconds("FULL") / many.seconds("FULL"),
            "communication overhead": many.communication_overhead,
            "exposed communication ms": 1e3 * many.communication,
        }
    return result


def fitted(found: Fit, unknown: Sequence[str]) -> dict[str, float]:
    return {name: getattr(found.training if hasattr(found.training, name) else found.machine, name) for name in unknown}


def scatter(network: Network, algorithm: str = FASTEST) -> dict[str, dict[str, list[float]]]:
    """Smallest and largest prediction when each pair of a 4-GPU and an 8-GPU figure is fitted by itself."""
    single, four, eight = ([figure for figure in PUBLISHED if figure.ranks == ranks] for ranks in (1, 4, 8))
    fits = [
        at_goal(fit([*single, *pair], original(network), SLINGSHOT_10, UNKNOWN, algorithm), algorithm)
        for pair in itertools.product(four, eight)
    ]
    return {
        batch: {
            name: [least([each[batch][name] for each in fits]) for least in (min, max)]
            for name in ("efficiency", "communication overhead")
        }
        for batch in map(str, GOALS)
    }


def calibrate(
    paths: Sequence[Path], machine: Machine | None = None, timeline: Path | None = None, algorithm: str = FASTEST
) -> tuple[Fit, tuple[str, ...]]:
    """A fit to results of benchmarks.scaling; what they do not tell is taken from `machine`. Also: what was fitted.

    On one node alone, without a machine, it is as if all further ranks were linked like those of this node.
    """
    results = [read_json(path, "benchmarks.scaling", ("points", "config")) for path in paths]
    config = configs.validate(results[0]["config"], str(paths[0]))
    points = [point for result in results for point in result["points"]]
    if not points:
        raise UserError(f"{paths[0]} has no points; measure some with python -m benchmarks.scaling")
    if any(
        result["config"].get(key) != results[0]["config"].get(key)
        for result in results
        for key in ("network", "data_size")
    ):
        raise UserError("the results are of different networks; give --calibrate those of one")
    with torch.device("meta"), value_errors_for_users():
        network = examine(train.build_model(config), batch_like(config, 1)[0])
    if timeline is not None:
        network = timed(network, timeline)
    base = machine or replace(SLINGSHOT_10, name="like the measured ranks", ranks_per_node=ALL_ON_ONE_NODE)
    several = [point for point in points if point["hosts"] > 1]
    if several:
        local = max(point["ranks"] // point["hosts"] for point in several)
        base = replace(base, name="as measured", ranks_per_node=local)
    figures, unknown = [], ["rate"]
    # Ranks that share a node may slow each other down without exchanging anything: nodes that are full count.
    fullest = max(point["ranks"] // point["hosts"] for point in points)
    full = [point for point in points if point["ranks"] // point["hosts"] == fullest]
    for point in full:
        figures.append(_figure(point, "NO-COMM", config))
        figures.append(_figure(point, "FULL / SYNTHETIC", config))
    if len({point["local_batch"] for point in full}) > 1:
        unknown.append("fixed_seconds")
    unknown.append("input_seconds")
    for point in points:
        if point["ranks"] > 1:
            figures.append(_figure(point, "SYNTHETIC / NO-COMM", config))
            name = "network_bandwidth" if point["hosts"] > 1 else "node_bandwidth"
            if name not in unknown:
                unknown.append(name)
    batch = max(figure.local_batch for figure in figures)
    seconds = max(figure.ranks * figure.local_batch / figure.value for figure in figures if figure.kind == "NO-COMM")
    start = Training(
        network,
        local_batch=batch,
        rate=network.work * batch / seconds,
        fixed_seconds=0.01 * seconds if "fixed_seconds" in unknown else 0.0,
        input_seconds=0.01 * seconds / batch,
        jitter=JITTER,
        bucket_cap_mb=config.bucket_cap_mb,
        compressed=config.gradient_compression == "bfloat16",
    )
    return fit(figures, start, base, unknown, algorithm), tuple(unknown)


def _figure(point: Mapping[str, Any], kind: str, config: configs.Config) -> Figure:
    first, _, second = kind.partition(" / ")
    value = point[first]["median"] / (point[second]["median"] if second else 1)
    what = f"ranks {point['ranks']}, hosts {point['hosts']}"
    return Figure(point["ranks"], point["local_batch"], kind, value, config.bucket_cap_mb, what)


def read_json(path: Path, maker: str, keys: Sequence[str]) -> dict[str, Any]:
    """A benchmark's result; UserError where it is none of `maker`."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; make it with python -m {maker}") from None
    except ValueError:
        result = None
    if not isinstance(result, dict) or any(key not in result for key in keys):
        raise UserError(f"{path} is no result of {maker}; make one with python -m {maker}")
    return result


# --- predictions ---------------------------------------------------------------------------------------------------

# What is changed, and the only algorithm there is, if so.
CHANGES: dict[str, tuple[dict[str, Any], str | None]] = {
    "25 MB buckets, float32": ({}, None),
    "sent as bfloat16": ({"compressed": True}, None),
    "5 MB buckets": ({"bucket_cap_mb": 5.0}, None),
    "100 MB buckets": ({"bucket_cap_mb": 100.0}, None),
    "local batch × 1/4": ({"local_batch": 0.25}, None),
    "local batch × 2": ({"local_batch": 2}, None),
    "local batch × 2, sent as bfloat16": ({"local_batch": 2, "compressed": True}, None),
    "flat ring alone": ({}, "ring"),
    "tree alone": ({}, "tree"),
    "hierarchical alone": ({}, "hierarchical"),
}
MOST_RANKS = 8192
TABLE_RANKS = (8, 32, 128, 512, 2048, 8192)


def predictions(training: Training, machine: Machine, algorithm: str = FASTEST) -> dict[str, dict[str, float]]:
    """Weak-scaling efficiency by change and number of ranks, of 1, 2, 4, … of them."""
    told = {}
    for name, (changes, alone) in CHANGES.items():
        values = dict(changes)
        if "local_batch" in values:
            values["local_batch"] = max(1, int(values["local_batch"] * training.local_batch))
        changed = replace(training, **values)
        told[name] = {str(ranks): efficiency(changed, machine, ranks, alone or algorithm) for ranks in counts()}
    return told


def counts() -> list[int]:
    return [2**power for power in range(MOST_RANKS.bit_length())]


def clusters(found: Fit) -> list[tuple[Training, Machine]]:
    """The original's training where it ran, on today's network, and this project's on H200s.

    Other networks are taken to give the share of their line rate that the fitted one gives of its own.
    """
    share = found.machine.network_bandwidth / SLINGSHOT_10.network_bandwidth
    today = replace(found.training, first_bucket_mb=None)
    network = found.training.network
    assert H200_RATE is not None
    seconds = today.local_batch / H200_RATE - H200_UPDATE_SECONDS
    ours = replace(
        today,
        rate=network.work * today.local_batch / seconds,
        fixed_seconds=H200_UPDATE_SECONDS,
        input_seconds=0.0,  # the volume lies on the device
    )
    scaled = [replace(machine, network_bandwidth=share * machine.network_bandwidth) for machine in (SLINGSHOT_11, NDR)]
    return [(found.training, found.machine), (today, scaled[0]), (ours, scaled[1])]


# --- telling -------------------------------------------------------------------------------------------------------


def described(training: Training, machine: Machine) -> dict[str, Any]:
    """For JSON."""
    values = {field.name: getattr(training, field.name) for field in fields(Training) if field.name != "network"}
    network = training.network
    formed = buckets(network.gradients, training.bucket_cap_mb, training.first_bucket_mb)
    return {
        "machine": asdict(machine),
        "training": values,
        "work a sample": network.work,
        "samples/s of one rank": {kind: predict(training, machine, 1).rate(kind) for kind in ("SYNTHETIC", "FULL")},
        "buckets": [{"bytes": sum(size for _, size in bucket), "ready with": bucket[-1][0]} for bucket in formed],
    }


def fit_table(found: Fit, unknown: Sequence[str]) -> str:
    lines = ["| figure | local batch | measured | fitted | difference |", "|---|---:|---:|---:|---:|"]
    for figure, value in found.figures:
        cells = [f"{figure.what}: {figure.kind}", f"{figure.local_batch}", f"{figure.value:.4g}", f"{value:.4g}"]
        lines.append(f"| {' | '.join(cells)} | {100 * (value / figure.value - 1):+.1f} % |")
    training, machine = found.training, found.machine
    in_flops = training.network.work > 1e6
    speed = f"{training.rate / 1e12:.4g} TFLOP/s" if in_flops else f"{training.rate:.4g} of the measured layers' speed"
    texts = {
        "rate": f"{speed} in forward and backward",
        "fixed_seconds": f"{1e3 * training.fixed_seconds:.3g} ms fixed a step",
        "input_seconds": f"{1e3 * training.input_seconds:.3g} ms of exposed input a sample",
        "node_bandwidth": f"{machine.node_bandwidth / 1e9:.3g} GB/s for a rank inside its node",
        "network_bandwidth": f"{machine.network_bandwidth / 1e9:.3g} GB/s for a node",
    }
    told = [f"{texts[name]}{' (these figures do not tell)' * (name in found.undetermined)}" for name in unknown]
    return "\n".join([*lines, "", f"Fitted: {'; '.join(told)}."])


def goal_table(reading: Mapping[str, Any], spread: Mapping[str, Any]) -> str:
    """Prediction beside publication."""
    lines = [
        f"| {GOAL_RANKS} GPUs | published | predicted | off by | each pair of figures by itself |",
        "|---|---:|---:|---:|---:|",
    ]
    for batch, goals in GOALS.items():
        for name, goal in goals.items():
            value, (low, high) = reading[str(batch)][name], spread[str(batch)][name]
            lines.append(
                f"| local batch {batch}, {name} | {100 * goal:.0f} % | {100 * value:.1f} % "
                f"| {100 * (value - goal):+.1f} points | {100 * low:.1f} – {100 * high:.1f} % |"
            )
    return "\n".join(lines)


def readings_table(told: Mapping[str, Any]) -> str:
    lines = [
        "| the same figures, read | efficiency at 64, 128 | communication overhead at 64, 128 | network GB/s a node |",
        "|---|---:|---:|---:|",
    ]
    for name, reading in told.items():
        cells = [
            ", ".join(f"{100 * reading[str(batch)][what]:.1f} %" for batch in GOALS)
            for what in ("efficiency", "communication overhead")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {reading['fitted']['network_bandwidth'] / 1e9:.3g} |")
    return "\n".join(lines)


def predictions_table(training: Training, machine: Machine, told: Mapping[str, Mapping[str, float]]) -> str:
    rate = predict(training, machine, 1).rate("FULL")
    title = f"{machine.name}: {rate:.4g} samples/s a rank at local batch {training.local_batch}; efficiency on ranks"
    lines = [f"| {title} | {' | '.join(map(str, TABLE_RANKS))} |", "|---|" + "---:|" * len(TABLE_RANKS)]
    for change, values in told.items():
        lines.append(f"| {change} | {' | '.join(f'{100 * values[str(ranks)]:.1f} %' for ranks in TABLE_RANKS)} |")
    return "\n".join(lines)


def draw(shown: Sequence[tuple[str, Mapping[str, Mapping[str, float]]]], goals: bool, path: Path) -> None:
    """Efficiency over ranks, a panel a cluster; with the published points on the first one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = {
        "25 MB buckets, float32": ("tab:blue", "-"),
        "sent as bfloat16": ("tab:green", "-"),
        "local batch × 2": ("tab:orange", "-"),
        "local batch × 2, sent as bfloat16": ("tab:red", "-"),
        "local batch × 1/4": ("tab:purple", "-"),
        "flat ring alone": ("0.5", ":"),
    }
    figure, panels = plt.subplots(
        1, len(shown), figsize=(4.4 * len(shown) + 0.6, 4.4), layout="constrained", sharey=True, squeeze=False
    )
    for place, (axes, (title, told)) in enumerate(zip(panels[0], shown, strict=True)):
        for name, (color, style) in lines.items():
            values = told[name]
            label = name if place == 0 else None
            axes.plot(
                [int(ranks) for ranks in values],
                [100 * value for value in values.values()],
                style,
                color=color,
                label=label,
            )
        if goals and place == 0:
            look = {"marker": "o", "markeredgecolor": "black", "linestyle": "", "zorder": 3}
            for batch, color in ((64, "tab:blue"), (128, "tab:orange")):
                axes.plot(GOAL_RANKS, 100 * GOALS[batch]["efficiency"], color=color, **look)
            axes.plot([], [], color="white", **look, label="published, local batch 64 and 128")
        axes.set_xscale("log", base=2)
        ticks = [1, 8, 64, 512, 4096]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set(xlabel="ranks", title=title)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("weak-scaling efficiency, %")
    panels[0][0].set_ylim(0, 103)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = Parser(__doc__)
    parser.set_defaults(output=RESULTS / "scaling_model")
    machines = {"slingshot-10": SLINGSHOT_10, "slingshot-11": SLINGSHOT_11, "ndr": NDR}
    parser.add_argument("--calibrate", nargs="+", type=Path, metavar="FILE", help="scaling.json of benchmarks.scaling")
    parser.add_argument("--machine", choices=list(machines), help="has what --calibrate's files do not tell")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="convolutions.json: measured times of the layers")
    parser.add_argument(
        "--algorithm", choices=[FASTEST, *ALGORITHMS], default=FASTEST, help="of an all-reduce (%(default)s)"
    )
    with one_line_errors():
        options = parser.parse_args()
        run(options, machines)


def run(options: argparse.Namespace, machines: Mapping[str, Machine]) -> None:
    """Fits, predicts, tells and draws."""
    files = [str(path) for path in options.calibrate or []]
    result: dict[str, Any] = {"settings": {**settings(options), "calibrate": files}}
    if options.calibrate:
        name = "scaling_model_calibrated"
        found, unknown = calibrate(
            options.calibrate, machines.get(options.machine), options.timeline, options.algorithm
        )
        shown = [(found.training, found.machine)]
        text = [fit_table(found, unknown)]
    else:
        name, unknown = "scaling_model", UNKNOWN
        network = full_network() if options.timeline is None else timed(full_network(), options.timeline)
        found = fit(PUBLISHED, original(network), SLINGSHOT_10, UNKNOWN, options.algorithm)
        shown = clusters(found)
        reading, spread, others = (
            at_goal(found, options.algorithm),
            scatter(network, options.algorithm),
            readings(network),
        )
        result |= {"published": GOALS, "predicted": reading, "each pair by itself": spread, "readings": others}
        text = [fit_table(found, unknown), goal_table(reading, spread), readings_table(others)]
    told = [predictions(training, machine, options.algorithm) for training, machine in shown]
    result |= {
        "figures": [{**asdict(figure), "fitted": value} for figure, value in found.figures],
        "fitted": fitted(found, unknown),
        "undetermined": found.undetermined,
        "predictions": [
            {**described(*cluster), "efficiency": values} for cluster, values in zip(shown, told, strict=True)
        ],
    }
    text += [predictions_table(*cluster, values) for cluster, values in zip(shown, told, strict=True)]
    path = save(name, result, options.output)
    write_text(path.with_suffix(".md"), "\n\n".join(text) + "\n")
    titles = [machine.name for _, machine in shown]
    draw(list(zip(titles, told, strict=True)), not options.calibrate, path.with_suffix(".png"))
    print("\n\n".join(text))
    print(f"\nwritten: {path}, {path.with_suffix('.md')}, {path.with_suffix('.png')}")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    with atomic_write([path]) as (partial,):
        partial.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
