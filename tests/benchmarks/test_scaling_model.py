"""The scaling model: its formulas against values computed by hand, its fits, and the command's files and errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import scaling_model
from benchmarks.common import RESULTS
from benchmarks.scaling_model import (
    GOALS,
    PUBLISHED,
    UNKNOWN,
    Model,
    all_reduce_seconds,
    at_goal,
    efficiency,
    examine,
    fit,
    rate,
    step_seconds,
    tutorial_base,
)
from networks import build_network

# One second per layer forward, two backward; gradients of 100 bytes each, the last layer's first. Nodes of 4 ranks,
# 100 bytes/s inside and 10 between them, 1 s and 2 s per hop.
TOY = Model(
    layers=(("first", 1.0, 2.0), ("second", 1.0, 2.0)),
    gradients=(("second", 100), ("first", 100)),
    local_batch=1,
    rate=1.0,
    ranks_per_node=4,
    node_bandwidth=100.0,
    network_bandwidth=10.0,
    node_latency=1.0,
    network_latency=2.0,
)


@pytest.mark.parametrize(
    ("ranks", "ring", "tree", "hierarchical"),
    [
        # On one node at 100 bytes/s: 2 · 3/4 · 1000 / 100 and 3 hops twice; two trees of 4; scatter and gather.
        (4, 15 + 6, 20 + 4, 15 + 6),
        # Two nodes, at 10 bytes/s: 2 · 7/8 · 1000 / 10, and of 7 hops 6 inside; each node is the root of one tree.
        (8, 175 + 2 * (6 + 2), 100 + 2 * (2 + 2), 15 + 6 + 100 + 2 * 2),
    ],
)
def test_all_reduce_seconds_equal_values_computed_by_hand(
    ranks: int, ring: float, tree: float, hierarchical: float
) -> None:
    algorithms = (scaling_model.ring, scaling_model.tree, scaling_model.hierarchical)
    seconds = [cost(1000, TOY, max(1, ranks // 4), 4) for cost in algorithms]
    assert seconds == pytest.approx([ring, tree, hierarchical])
    assert all_reduce_seconds(1000, TOY, ranks) == pytest.approx(min(ring, tree, hierarchical))
    with pytest.raises(ValueError, match="6 ranks do not fill nodes of 4"):
        all_reduce_seconds(1000, TOY, 6)


def test_step_seconds_equal_values_computed_by_hand() -> None:
    """Two buckets of 100 bytes between two ranks at 50 bytes/s and no latency: 2 s each.

    The forward pass ends at 2 s, the second layer's gradients are ready at 4 and the first's at 6: the first exchange
    lasts from 4 to 6 and is hidden, the other from 6 to 8 and is not.
    """
    pair = replace(TOY, ranks_per_node=2, node_bandwidth=50.0, node_latency=0.0, bucket_cap_mb=1 / 2**20)
    seconds = step_seconds(pair, 2)
    assert (seconds["NO-COMM"], seconds["communication"]) == pytest.approx((6.0, 2.0))
    # In one bucket, all 200 bytes follow after 6 s. At half the speed, the exchanges end at 4 + 4 + 4 s.
    assert step_seconds(replace(pair, bucket_cap_mb=25), 2)["communication"] == pytest.approx(4.0)
    slow = replace(pair, node_bandwidth=25.0)
    assert step_seconds(slow, 2)["communication"] == pytest.approx(6.0)
    assert step_seconds(replace(slow, compressed=True), 2)["communication"] == pytest.approx(2.0)
    # The rates of benchmark mode: the maximum of two normal numbers is expected at 1 / √π deviations.
    noisy = replace(pair, local_batch=3, fixed_seconds=2.0, input_seconds=0.5, jitter=0.1)
    alone = 3 * 6.0 + 2.0
    together = alone + 2.0 + 0.1 * alone / math.sqrt(math.pi)
    assert step_seconds(noisy, 2)["NO-COMM"] == pytest.approx(alone)
    assert rate(noisy, 2, "FULL") == pytest.approx(6 / (together + 1.5))
    assert rate(noisy, 2, "SYNTHETIC / NO-COMM") == pytest.approx(alone / together)
    assert efficiency(noisy, 2) == pytest.approx((alone + 1.5) / (together + 1.5))


def test_layers_and_gradients_are_those_of_the_network() -> None:
    model = tutorial_base()
    assert [name for name, *_ in model.layers][::10] == ["down1", "up2"]
    assert sum(forward + backward for _, forward, backward in model.layers) == pytest.approx(80.46e9, rel=1e-3)
    assert model.layers[0][1] == model.layers[0][2], "the gradient of the data is not computed"
    assert sum(size for _, size in model.gradients) == 4 * 116_977_029
    assert model.gradients[0][0] == "last"


def test_128_ranks_are_predicted_from_one_and_two_nodes() -> None:
    """The predictions are within five points of the published ones, and equal the result in the repository."""
    model = fit(PUBLISHED, tutorial_base(), UNKNOWN)
    assert all(figure.modeled(model) == pytest.approx(figure.value, rel=0.03) for figure in PUBLISHED)
    shipped = json.loads((RESULTS / "scaling_model" / "scaling_model.json").read_text())
    for batch, predicted in at_goal(model).items():
        assert predicted == pytest.approx(GOALS[int(batch)], abs=0.05), batch
        assert {name: shipped["predicted"][batch][name] for name in predicted} == pytest.approx(predicted, rel=1e-3)


SMALL = {"network": {"name": "unet", "width": 8, "scales": 3}, "data_size": 16, "box_size": [16, 16]}


@pytest.fixture(scope="module")
def small() -> Model:
    with torch.device("meta"):
        network = build_network("unet", 16, in_channels=4, width=8, scales=3)
        layers, gradients = examine(network, torch.empty(1, 4, 16, 16, 16))
    jitter = scaling_model.JITTER
    machine = {"node_bandwidth": 2e7, "network_bandwidth": 5e6}
    return Model(layers, gradients, 8, 2e9, 0.01, 1e-4, jitter, bucket_cap_mb=0.05, **machine)


def measured(path: Path, model: Model, points: list[tuple[int, int, int]]) -> Path:
    """A result of benchmarks.scaling with the model's own values, for (ranks, hosts, local batch) each."""
    found = []
    for ranks, hosts, batch in points:
        one = replace(model, local_batch=batch)
        rates = {kind: {"median": rate(one, ranks, kind)} for kind in ("SYNTHETIC", "FULL", "NO-COMM")}
        found.append({"ranks": ranks, "hosts": hosts, "local_batch": batch, **rates})
    path.write_text(json.dumps({"points": found, "config": {**SMALL, "bucket_cap_mb": 0.05}}))
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "error: cannot read "),
        ("[]", "is not a result of benchmarks.scaling"),
        (json.dumps({"points": [], "config": SMALL}), "has no points"),
    ],
)
def test_bad_results_are_one_line(tmp_path: Path, monkeypatch, capsys, text: str | None, says: str) -> None:
    path = tmp_path / "scaling.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr("sys.argv", ["scaling_model", "--calibrate", str(path), f"--output={tmp_path / 'out'}"])
    with pytest.raises(SystemExit) as stopped:
        scaling_model.main()
    line = capsys.readouterr().err
    assert (stopped.value.code, line.count("\n")) == (2, 1)
    assert says in line
    assert not (tmp_path / "out").exists()


def test_the_command_recovers_the_machine_that_made_the_results(
    tmp_path: Path, small: Model, monkeypatch, capsys
) -> None:
    """It fits one node and the network, and writes the result and tables."""
    source = measured(tmp_path / "s.json", small, [(1, 1, 8), (2, 1, 8), (4, 1, 8), (4, 1, 2), (8, 2, 8)])
    monkeypatch.setattr("sys.argv", ["scaling_model", "--calibrate", str(source), f"--output={tmp_path / 'out'}"])
    scaling_model.main()
    path = tmp_path / "out" / "scaling_model_calibrated.json"
    result = json.loads(path.read_text())
    assert result["provenance"]["command"]
    expected = {"rate": 2e9, "fixed_seconds": 0.01, "node_bandwidth": 2e7, "network_bandwidth": 5e6}
    assert {name: result["fitted"][name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert result["fitted"]["input_seconds"] == pytest.approx(1e-4, rel=1e-2)
    assert result["efficiency"]["25 MB buckets, float32"]["1"] == 1.0
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out
