"""The scaling model: its formulas against numbers worked out by hand, its fits, and the command's files and errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import scaling_model
from benchmarks.scaling_model import (
    GOALS,
    PUBLISHED,
    SLINGSHOT_10,
    UNKNOWN,
    Layer,
    Machine,
    Network,
    Training,
    all_reduce_seconds,
    at_goal,
    examine,
    fit,
    full_network,
    original,
    predict,
)
from networks import build_network

# Nodes of 4 ranks, 100 bytes/s inside and 10 between them, 1 s and 2 s per hop.
TOY = Machine("toy", 4, 100.0, 10.0, 1.0, 2.0)
# One second per layer forward, two backward; gradients of 100 bytes each, the last layer's first.
TWO_LAYERS = Network((Layer("first", 1.0, 2.0), Layer("second", 1.0, 2.0)), (("second", 100), ("first", 100)))


@pytest.mark.parametrize(
    ("ranks", "ring", "tree", "hierarchical"),
    [
        # On one node at 100 bytes/s: 2 · 3/4 · 1000 / 100 and 3 hops twice; two trees of 4; scatter and gather.
        (4, 15 + 6, 20 + 4, 15 + 6),
        # Two nodes, at 10 bytes/s: 2 · 7/8 · 1000 / 10, and of 7 hops 6 inside; each node is the root of one tree.
        (8, 175 + 2 * (6 + 2), 100 + 2 * (2 + 2), 15 + 6 + 100 + 2 * 2),
    ],
)
def test_an_all_reduce_takes_as_long_as_worked_out_by_hand(
    ranks: int, ring: float, tree: float, hierarchical: float
) -> None:
    expected = {"ring": ring, "tree": tree, "hierarchical": hierarchical, "fastest": min(ring, tree, hierarchical)}
    assert {name: all_reduce_seconds(1000, TOY, ranks, name) for name in expected} == pytest.approx(expected)


def test_a_step_takes_as_long_as_worked_out_by_hand() -> None:
    """Two buckets of 100 bytes between two ranks at 50 bytes/s and no latency: 2 s each.

    The forward pass ends at 2 s, the second layer's gradients are ready at 4 and the first's at 6: the first exchange
    lasts from 4 to 6 and is hidden, the other from 6 to 8 and is not.
    """
    machine = Machine("pair", 2, 50.0, 1.0, 0.0, 0.0)
    training = Training(TWO_LAYERS, 1, 1.0, bucket_cap_mb=1 / 2**20)
    step = predict(training, machine, 2)
    assert (step.compute, step.communication) == pytest.approx((6.0, 2.0))
    # In one bucket, all 200 bytes follow after 6 s. At half the speed, the exchanges end at 4 + 4 + 4 s.
    assert predict(replace(training, bucket_cap_mb=25), machine, 2).communication == pytest.approx(4.0)
    slow = replace(machine, node_bandwidth=25.0)
    assert predict(training, slow, 2).communication == pytest.approx(6.0)
    assert predict(replace(training, compressed=True), slow, 2).communication == pytest.approx(2.0)
    # The rates of benchmark mode: the larger of two normal numbers is expected at 1 / √π deviations.
    noisy = replace(training, local_batch=3, fixed_seconds=2.0, input_seconds=0.5, jitter=0.1)
    step, alone = predict(noisy, machine, 2), 3 * 6.0 + 2.0
    together = alone + 2.0 + 0.1 * alone / math.sqrt(math.pi)
    assert step.seconds("NO-COMM") == pytest.approx(alone)
    assert step.rate("FULL") == pytest.approx(6 / (together + 1.5))
    assert step.communication_overhead == pytest.approx(1 - alone / together)


def test_128_ranks_are_predicted_from_one_and_two_nodes() -> None:
    """The predictions lie within five points of the published ones, and are those of the result in the repository."""
    found = fit(PUBLISHED, original(full_network()), SLINGSHOT_10, UNKNOWN)
    assert all(value == pytest.approx(figure.value, rel=0.03) for figure, value in found.figures)
    shipped = json.loads((scaling_model.RESULTS / "scaling_model" / "scaling_model.json").read_text())
    for batch, predicted in at_goal(found).items():
        goals = GOALS[int(batch)]
        assert {name: predicted[name] for name in goals} == pytest.approx(goals, abs=0.05), batch
        assert shipped["predicted"][batch] == pytest.approx(predicted, rel=1e-3)


SMALL = {"network": {"name": "unet", "width": 8, "scales": 3}, "data_size": 16, "box_size": [16, 16]}


@pytest.fixture(scope="module")
def small() -> Training:
    with torch.device("meta"):
        network = build_network("unet", 16, in_channels=4, width=8, scales=3)
        network = examine(network, torch.empty(1, 4, 16, 16, 16))
    return Training(network, 8, 2e9, 0.01, 1e-4, scaling_model.JITTER, bucket_cap_mb=0.05)


def measured(path: Path, training: Training, machine: Machine, points: list[tuple[int, int, int]]) -> Path:
    """A result of benchmarks.scaling with the model's own numbers, for (ranks, hosts, local batch) each."""
    found = []
    for ranks, hosts, batch in points:
        step = predict(replace(training, local_batch=batch), machine, ranks)
        rates = {kind: {"median": step.rate(kind)} for kind in ("SYNTHETIC", "FULL", "NO-COMM")}
        found.append({"ranks": ranks, "hosts": hosts, "local_batch": batch, **rates})
    path.write_text(json.dumps({"points": found, "config": {**SMALL, "bucket_cap_mb": 0.05}}))
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "error: cannot read "),
        ("[]", "is no result of benchmarks.scaling"),
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
    tmp_path: Path, small: Training, monkeypatch, capsys
) -> None:
    """It fits one node and the network, and writes the result, a table and a plot."""
    machine = replace(SLINGSHOT_10, ranks_per_node=4, node_bandwidth=2e7, network_bandwidth=5e6)
    source = measured(tmp_path / "s.json", small, machine, [(1, 1, 8), (2, 1, 8), (4, 1, 8), (4, 1, 2), (8, 2, 8)])
    monkeypatch.setattr("sys.argv", ["scaling_model", "--calibrate", str(source), f"--output={tmp_path / 'out'}"])
    scaling_model.main()
    path = tmp_path / "out" / "scaling_model_calibrated.json"
    result = json.loads(path.read_text())
    assert result["provenance"]["command"]
    expected = {"rate": 2e9, "fixed_seconds": 0.01, "node_bandwidth": 2e7, "network_bandwidth": 5e6}
    assert {name: result["fitted"][name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert result["fitted"]["input_seconds"] == pytest.approx(1e-4, rel=1e-2)
    prediction = result["predictions"][0]
    assert prediction["efficiency"]["25 MB buckets, float32"]["1"] == 1.0
    assert sum(bucket["bytes"] for bucket in prediction["buckets"]) == sum(size for _, size in small.network.gradients)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert path.with_suffix(".md").read_text().strip() in capsys.readouterr().out
