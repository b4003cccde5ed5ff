"""Predicts weak scaling of data-parallel training on many ranks, fitted to the SC21 tutorial's runs on a few.

python -m benchmarks.scaling_model

A step of a rank takes forward + backward + fixed + exposed communication + jitter + exposed input. Forward and
backward: each layer's FLOP over an achieved rate. Communication: gradients become ready layer by layer; a bucket is
reduced once it is full and the previous one is done; the time after the end of the backward pass is exposed. Fixed: the
update and other costs that do not grow with the batch. Jitter: all ranks wait for the slowest of p, which takes longer
by deviation × (forward + backward + fixed) × E[maximum of p independent numbers from N(0, 1)].
The fit to one and two nodes (benchmarks/published_scaling.yaml) does not use the runs on 128 GPUs, but those figures
were known when the model was written. Costs inside a node count as fixed. Congestion is not in the model.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import RESULTS, Parser, publish, run, table
from networks import build_network


class Layer(NamedTuple):
    forward: float  # FLOP of one sample
    backward: float
    gradients: Sequence[int]  # bytes, in the order of the backward pass


@dataclass(frozen=True)
class Model:
    """A training run on a cluster; bandwidths in bytes/s in one direction, latencies in seconds per hop."""

    layers: Sequence[Layer]  # in the order of the forward pass
    local_batch: int
    rate: float  # FLOP/s per rank
    fixed_seconds: float = 0.0  # per step, independent of the batch
    input_seconds: float = 0.0  # per sample: time that input adds to the step
    jitter: float = 0.0  # standard deviation of a rank's step, as a fraction of it
    bucket_cap_mb: float = 25.0
    compressed: bool = False  # gradients are sent as bfloat16
    # NCCL reaches at most 235 GB/s of an A100's 300 GB/s of NVLink. Perlmutter's network in 2021, Slingshot 10, was two
    # NICs of 100 Gb/s per node. Latencies: NVLink and network in NCCL 2.11's model (src/graph/tuning.cc).
    ranks_per_node: int = 4
    node_bandwidth: float = 235e9  # of a rank inside its node
    network_bandwidth: float = 25e9  # of a node
    node_latency: float = 3.4e-6
    network_latency: float = 9.6e-6


def examine(network: nn.Module, inputs: torch.Tensor) -> list[Layer]:
    """The layers of a network for one sample [1, …]; on the meta device nothing is computed."""
    order: dict[str, nn.Module] = {}
    for name, module in network.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(lambda module, *_, name=name: order.update({name: module}))
    with FlopCounterMode(display=False) as counter:
        network(inputs)
    counts = {name.partition(".")[2]: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    # Backward is twice forward, except in the first layer: the gradient of the data is not computed.
    return [
        Layer(counts[name], counts[name] * min(2, 1 + number), [p.nbytes for p in module.parameters()][::-1])
        for number, (name, module) in enumerate(order.items())
    ]


def all_reduce_seconds(size: float, model: Model, ranks: int) -> float:
    """The faster of two algorithms, as in NCCL's own model; the ranks fill their nodes.

    A double binary tree: two participants send each byte once, more of them twice (NVIDIA/nccl issue 946). Or
    reduce-scatter and all-gather inside the nodes, and in between the faster of a ring and a tree.
    """
    local, nodes = min(ranks, model.ranks_per_node), max(1, ranks // model.ranks_per_node)
    inside = 2 * (local - 1) * (size / local / model.node_bandwidth + model.node_latency)
    ring = 2 * (nodes - 1) * (size / nodes / model.network_bandwidth + model.network_latency)
    between, hops = min(nodes - 1, 2) * size / model.network_bandwidth, 2 * math.log2(nodes) * model.network_latency
    nested = min(local - 1, 2) * size / model.node_bandwidth
    tree = max(nested, between) + hops + 2 * math.log2(local) * model.node_latency
    return min(tree, inside + min(ring, between + hops))


@functools.cache
def expected_maximum(count: int) -> float:
    """E[maximum of `count` independent numbers from N(0, 1)]: the mean of the inverse of their distribution."""
    from scipy.integrate import quad
    from scipy.stats import norm

    return float(quad(lambda p: norm.ppf(p ** (1 / count)), 0, 1, limit=200)[0])


def step_seconds(model: Model, ranks: int) -> dict[str, float]:
    """Seconds per step, by kind as benchmark mode measures them."""
    per_flop = model.local_batch / model.rate
    now, done, bucket = sum(layer.forward for layer in model.layers) * per_flop, 0.0, 0
    cap = 1.0  # MB of PyTorch 1.10's first bucket
    for layer in reversed(model.layers):
        now += layer.backward * per_flop
        for size in layer.gradients:
            bucket += size
            last = layer is model.layers[0] and size is layer.gradients[-1]
            if bucket >= int(cap * 2**20) or last:  # the gradient that reaches the cap closes a bucket
                done = max(done, now) + all_reduce_seconds(bucket / (2 if model.compressed else 1), model, ranks)
                bucket, cap = 0, model.bucket_cap_mb
    exposed = max(0.0, done - now) if ranks > 1 else 0.0
    compute = now + model.fixed_seconds
    together = compute + exposed + model.jitter * compute * expected_maximum(ranks)
    return {"NO-COMM": compute, "SYNTHETIC": together, "FULL": together + model.input_seconds * model.local_batch}


def rate(model: Model, ranks: int, kind: str) -> float:
    """Samples/s of all ranks."""
    return ranks * model.local_batch / step_seconds(model, ranks)[kind]


def efficiency(model: Model, ranks: int) -> float:
    """Weak scaling: FULL samples/s per rank, relative to one rank at the same local batch."""
    return rate(model, ranks, "FULL") / ranks / rate(model, 1, "FULL")


PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_scaling.yaml").read_text(encoding="utf-8"))
UNKNOWN = ("rate", "fixed_seconds", "input_seconds", "network_bandwidth")
# SYNTHETIC's trials scatter by 0.318 of 707.966 samples/s; a trial averages the noise of 64 steps.
JITTER = 0.318 / 707.966 * 64**0.5
RANKS = (8, 32, 128, 512, 2048, 8192)


def modeled(figure: Mapping[str, Any], model: Model) -> float:
    """Samples/s that the model gives for a published figure."""
    changes = {key: figure[key] for key in ("local_batch", "bucket_cap_mb") if key in figure}
    return rate(replace(model, **changes), figure["ranks"], figure["kind"])


def fit(start: Model) -> Model:
    """Least squares of the logarithms of the published figures; the fields UNKNOWN start from the model's values."""
    from scipy.optimize import least_squares

    def changed(logarithms: Iterable[float]) -> Model:
        values: dict[str, Any] = {name: math.exp(value) for name, value in zip(UNKNOWN, logarithms, strict=True)}
        return replace(start, **values)

    def residuals(logarithms: Iterable[float]) -> list[float]:
        model = changed(logarithms)
        return [math.log(modeled(figure, model) / figure["value"]) for figure in PUBLISHED["figures"]]

    given = [math.log(getattr(start, name)) for name in UNKNOWN]
    return changed(least_squares(residuals, given, x_scale=0.1, diff_step=1e-4, xtol=1e-10, ftol=1e-12).x)


def tutorial_base() -> Model:
    """The tutorial's fastest run of config 'base'; its values are the start of a fit."""
    with torch.device("meta"):
        layers = examine(build_network("unet", crop=64), torch.empty(1, 4, 64, 64, 64))
    speed = 800 * sum(layer.forward + layer.backward for layer in layers)
    return Model(layers, 64, speed, fixed_seconds=0.01, input_seconds=3e-4, jitter=JITTER)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.set_defaults(output=RESULTS / "scaling_model")
    options = parser.parse_args(argv)
    model = fit(tutorial_base())
    predicted: dict[str, dict[str, float]] = {}
    for batch in PUBLISHED["goals"]:
        variant = replace(model, local_batch=batch)
        lost = 1 - rate(variant, 128, "SYNTHETIC") / rate(variant, 128, "NO-COMM")
        predicted[str(batch)] = {"efficiency": efficiency(variant, 128), "communication overhead": lost}
    doubled = replace(model, local_batch=2 * model.local_batch)
    variants = {"as published": model, "gradients sent as bfloat16": replace(model, compressed=True)}
    variants |= {"local batch × 2": doubled, "both": replace(doubled, compressed=True)}
    efficiencies = {name: {str(n): efficiency(variant, n) for n in RANKS} for name, variant in variants.items()}
    result = {
        "figures": [{**figure, "fitted": modeled(figure, model)} for figure in PUBLISHED["figures"]],
        "fitted": {name: getattr(model, name) for name in UNKNOWN},
        "published": PUBLISHED["goals"],
        "predicted": predicted,
        "efficiency": efficiencies,
    }
    rows = []
    for batch, values in PUBLISHED["goals"].items():
        for name, value in values.items():
            cells = f"{100 * value:.0f} %", f"{100 * predicted[str(batch)][name]:.1f} %"
            rows.append((f"{name}, local batch {batch}", *cells))
    text = table(("128 GPUs", "published", "predicted"), rows)
    shares = [(name, *(f"{100 * value:.1f} %" for value in line.values())) for name, line in efficiencies.items()]
    text += "\n\n" + table(("efficiency at local batch 64 on ranks", *RANKS), shares)
    publish("scaling_model", options, result, text)


if __name__ == "__main__":
    run(main)
