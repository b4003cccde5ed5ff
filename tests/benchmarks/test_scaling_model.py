"""The scaling model: its formulas against values computed by hand, and its check against the published runs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import scaling_model
from benchmarks.common import RESULTS
from benchmarks.scaling_model import Layer, Model, all_reduce_seconds, examine, rate, step_seconds
from networks import build_network

# One second per layer forward, two backward; gradients of 100 bytes each, the last layer's first. Nodes of 4 ranks,
# 100 bytes/s inside and 10 between them, 1 s and 2 s per hop.
TOY = Model(
    layers=(Layer(1.0, 2.0, [100]), Layer(1.0, 2.0, [100])),
    local_batch=1,
    rate=1.0,
    ranks_per_node=4,
    node_bandwidth=100.0,
    network_bandwidth=10.0,
    node_latency=1.0,
    network_latency=2.0,
)


def test_all_reduce_seconds_equal_values_computed_by_hand() -> None:
    # On one node at 100 bytes/s: two trees of 4; scatter and gather of 3/4 · 1000 bytes and 3 hops.
    assert all_reduce_seconds(1000, TOY, 4) == pytest.approx(min(20 + 4, 2 * 7.5 + 6))
    # Two nodes, at 10 bytes/s: each node is the root of one tree; or scatter and gather inside, and a ring of two.
    assert all_reduce_seconds(1000, TOY, 8) == pytest.approx(min(100 + 2 * (2 + 2), 15 + 6 + 100 + 2 * 2))


def test_step_seconds_equal_values_computed_by_hand() -> None:
    """A bucket of 200 bytes between two ranks at 50 bytes/s and no latency lasts 4 s, after the backward pass."""
    pair = replace(TOY, ranks_per_node=2, node_bandwidth=50.0, node_latency=0.0)
    seconds = step_seconds(pair, 2)
    assert (seconds["NO-COMM"], seconds["SYNTHETIC"]) == pytest.approx((6.0, 6.0 + 4.0))
    assert step_seconds(replace(pair, compressed=True), 2)["SYNTHETIC"] == pytest.approx(6.0 + 2.0)
    # The first gradient fills the first bucket: its exchange lasts from 4 to 6 s and is hidden, the other is not.
    large = replace(pair, layers=(Layer(1.0, 2.0, [2**20]), Layer(1.0, 2.0, [2**20])), node_bandwidth=2**19)
    assert step_seconds(large, 2)["SYNTHETIC"] == pytest.approx(6.0 + 2.0)
    # The maximum of two normal numbers is expected at 1 / √π deviations.
    noisy = replace(pair, local_batch=3, fixed_seconds=2.0, input_seconds=0.5, jitter=0.1)
    seconds = step_seconds(noisy, 2)
    assert seconds["NO-COMM"] == pytest.approx(3 * 6 + 2)
    assert seconds["SYNTHETIC"] == pytest.approx(20 + 4 + 0.1 * 20 / math.sqrt(math.pi))
    assert seconds["FULL"] == pytest.approx(seconds["SYNTHETIC"] + 1.5)
    assert rate(noisy, 2, "FULL") == pytest.approx(6 / seconds["FULL"])


def test_the_layers_are_those_of_the_network() -> None:
    with torch.device("meta"):
        network = build_network("unet", 64)
        layers = examine(network, torch.empty(1, 4, 64, 64, 64))
    assert sum(layer.forward + layer.backward for layer in layers) == pytest.approx(80.46e9, rel=1e-3)
    gradients = sum(sum(layer.gradients) for layer in layers)
    assert gradients == 4 * sum(parameter.numel() for parameter in network.parameters())
    assert layers[0].backward == layers[0].forward
    assert layers[1].backward == 2 * layers[1].forward


def test_the_fit_to_one_and_two_nodes_predicts_the_published_runs_on_128_gpus(tmp_path: Path) -> None:
    """Within 3 points; and the stored result is that of this model."""
    scaling_model.main([f"--output={tmp_path}"])
    found = json.loads((tmp_path / "scaling_model.json").read_text())
    for batch, published in found["published"].items():
        for name, value in published.items():
            assert found["predicted"][batch][name] == pytest.approx(value, abs=0.03)
    stored = json.loads((RESULTS / "scaling_model/scaling_model.json").read_text())
    for key in ("fitted", "predicted", "efficiency"):
        assert flat(found[key]) == pytest.approx(flat(stored[key]), rel=1e-4)
    assert heads(tmp_path) == heads(RESULTS / "scaling_model")


def heads(directory: Path) -> list[str]:
    return re.findall(r"^(.*)\n\| ---", (directory / "scaling_model.md").read_text(), re.MULTILINE)


def flat(values: dict) -> dict[str, float]:
    pairs = ((key, value if isinstance(value, dict) else {"": value}) for key, value in values.items())
    return {f"{key} {name}": number for key, inner in pairs for name, number in inner.items()}
