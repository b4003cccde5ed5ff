"""The scaling model: its formulas against numbers worked out by hand, its fits, and the buckets of real DDP."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from torch import nn

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
    buckets,
    calibrate,
    efficiency,
    examine,
    fit,
    full_network,
    original,
    predict,
    timed,
)
from networks import build_loss, build_network, initialise
from utils.distributed import World
from utils.errors import UserError
from utils.steps.eager import EagerStep, StepOptions

# Nodes of 4 ranks, 100 bytes/s inside and 10 between them, 1 s and 2 s per hop.
TOY = Machine("toy", 4, 100.0, 10.0, 1.0, 2.0)
# One second per layer forward, two backward; gradients of 100 bytes each, the last layer's first.
TWO_LAYERS = Network((Layer("first", 1.0, 2.0), Layer("second", 1.0, 2.0)), (("second", 100), ("first", 100)))


@pytest.fixture(scope="module")
def full() -> Network:
    return full_network()


def small_network() -> nn.Module:
    return build_network("unet", 16, in_channels=4, width=8, scales=3)


# --- a step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "ring", "tree", "hierarchical"),
    [
        (1, 0, 0, 0),
        # On one node at 100 bytes/s: 2 · 3/4 · 1000 / 100 and 3 hops twice; two trees of 4; scatter and gather.
        (4, 15 + 6, 20 + 4, 15 + 6),
        # Two nodes, at 10 bytes/s: 2 · 7/8 · 1000 / 10, and of 7 hops 6 inside; each node is the root of one tree.
        (8, 175 + 2 * (6 + 2), 100 + 2 * (2 + 2), 15 + 6 + 100 + 2 * 2),
        # Four nodes: of 15 hops 12 inside; between the nodes a ring, 2 · 3/4 · 1000 / 10, beats the trees.
        (16, 187.5 + 2 * (12 + 6), 200 + 2 * (2 + 4), 15 + 6 + 150 + 12),
    ],
)
def test_an_all_reduce_takes_as_long_as_worked_out_by_hand(
    ranks: int, ring: float, tree: float, hierarchical: float
) -> None:
    expected = {"ring": ring, "tree": tree, "hierarchical": hierarchical, "fastest": min(ring, tree, hierarchical)}
    assert {name: all_reduce_seconds(1000, TOY, ranks, name) for name in expected} == pytest.approx(expected)
    with pytest.raises(ValueError, match="6 ranks do not fill nodes of 4"):
        all_reduce_seconds(1000, TOY, 6)


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
    # Fixed time within the passes hides communication: gradients at 8 and 12 s, exchanges until 12 and 16.
    fixed = replace(training, fixed_seconds=6.0)
    assert predict(fixed, slow, 2).communication == pytest.approx(6.0)
    assert predict(replace(fixed, fixed_within=True), slow, 2).communication == pytest.approx(4.0)
    # The rates of benchmark mode: the larger of two normal numbers is expected at 1 / √π deviations.
    noisy = replace(training, local_batch=3, fixed_seconds=2.0, input_seconds=0.5, jitter=0.1)
    step, alone = predict(noisy, machine, 2), 3 * 6.0 + 2.0
    together = alone + 2.0 + 0.1 * alone / math.sqrt(math.pi)
    assert step.seconds("NO-COMM") == pytest.approx(alone)
    assert step.rate("FULL") == pytest.approx(6 / (together + 1.5))
    assert step.communication_overhead == pytest.approx(1 - alone / together)


# --- the network and its buckets -------------------------------------------------------------------------------------


def test_the_full_network_has_the_published_size(full: Network) -> None:
    assert full.work == pytest.approx(80.46e9, rel=1e-4)
    assert sum(size for _, size in full.gradients) == 4 * 116_977_029
    # Gradients are ready in the reverse order of the layers.
    assert list(dict.fromkeys(name for name, _ in full.gradients)) == [layer.name for layer in full.layers][::-1]
    # 4 → 64 channels, kernel 4³, to 32³ cells; no gradient of the data.
    assert full.layers[0].forward == full.layers[0].backward == 2 * 4 * 64 * 4**3 * 32**3
    # The original's profiles show 8 NCCL calls per step with 25 MB, 5 with 100 MB; PyTorch 1.10's first bucket is 1 MB.
    assert [len(buckets(full.gradients, cap, 1)) for cap in (25, 100)] == [8, 5]


CAPS = (0.005, 0.05, 25.0)


def ddp_buckets(world: World) -> list[list[str]]:
    """The bucket sizes in MB that DDP reports for each cap."""
    sizes = []
    for cap in CAPS:
        network = small_network()
        initialise(network, torch.Generator().manual_seed(3))
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        step = EagerStep(network, build_loss("l1"), optimizer, world, StepOptions(bucket_cap_mb=cap))
        for _ in range(3):  # buckets are formed again after the first step, and reported from the third
            step.warm_up(torch.ones(1, 4, 16, 16, 16), torch.ones(1, 5, 16, 16, 16))
        line = next(line for line in step.describe() if "DistributedDataParallel" in line)
        listed = re.search(r"MB: (.*) MB;", line)
        assert listed is not None, line
        sizes.append(listed.group(1).split(", "))
    return sizes


def test_predicted_buckets_are_those_of_ddp_on_two_ranks() -> None:
    with torch.device("meta"):
        network = examine(small_network(), torch.empty(1, 4, 16, 16, 16))
    expected = [
        [f"{sum(size for _, size in bucket) / 1e6:.3g}" for bucket in buckets(network.gradients, cap)] for cap in CAPS
    ]
    assert len({len(sizes) for sizes in expected}) == len(CAPS), "each cap must make a difference"
    assert run_ranks(ddp_buckets, 2) == [expected, expected]


def test_measured_layer_times_replace_operation_counts(tmp_path: Path) -> None:
    """Each layer counts in its fastest type, of those in which all its passes were measured."""
    passes = ("forward", "input gradient", "weight gradient")
    times = {
        ("first", "bfloat16"): (1.0, 1.5, 2.5),
        ("second", "tf32"): (9.0, 9.0, 9.0),
        ("second", "bfloat16"): (2.0, 4.0, 4.0),
        ("second", "float16"): (0.1,),  # the other passes failed
    }
    rows = [
        {"layer": layer, "version": "plain", "dtype": dtype, "format": "NDHWC", "pass": name, "passes": 3, "ms": ms}
        for (layer, dtype), measured in times.items()
        for name, ms in zip(passes, measured, strict=False)
    ]
    path = tmp_path / "convolutions.json"
    path.write_text(json.dumps({"rows": rows}))
    assert timed(TWO_LAYERS, path).layers == (Layer("first", 1.0, 4.0), Layer("second", 2.0, 8.0))
    path.write_text(json.dumps({"rows": rows[3:]}))
    with pytest.raises(UserError, match="no times of all passes of layer first"):
        timed(TWO_LAYERS, path)


# --- calibration -----------------------------------------------------------------------------------------------------


def test_128_ranks_are_predicted_from_one_and_two_nodes(full: Network) -> None:
    """The predictions lie within five points of the published ones, and are those of the result in the repository."""
    assert max(figure.ranks for figure in PUBLISHED) == 8
    found = fit(PUBLISHED, original(full), SLINGSHOT_10, UNKNOWN)
    assert found.machine.network_bandwidth < SLINGSHOT_10.network_bandwidth, "no more than the line rate"
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
        network = examine(small_network(), torch.empty(1, 4, 16, 16, 16))
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


def test_results_of_small_runs_calibrate_one_node_and_the_network(tmp_path: Path, small: Training) -> None:
    machine = replace(SLINGSHOT_10, name="true", ranks_per_node=4, node_bandwidth=2e7, network_bandwidth=5e6)
    one = measured(tmp_path / "one.json", small, machine, [(1, 1, 8), (2, 1, 8), (4, 1, 8), (4, 1, 2)])
    found, unknown = calibrate([one])
    assert unknown == ("rate", "fixed_seconds", "input_seconds", "node_bandwidth")
    assert found.machine.node_bandwidth == pytest.approx(2e7, rel=1e-3)
    assert (found.training.rate, found.training.fixed_seconds) == pytest.approx((2e9, 0.01), rel=1e-3)
    assert found.training.input_seconds == pytest.approx(1e-4, rel=1e-2)
    two = measured(tmp_path / "two.json", small, machine, [(8, 2, 8)])
    found, unknown = calibrate([one, two])
    assert {"network_bandwidth", "node_bandwidth"} <= set(unknown)
    assert found.machine.ranks_per_node == 4
    assert found.machine.network_bandwidth == pytest.approx(5e6, rel=1e-3)
    assert efficiency(found.training, found.machine, 64) == pytest.approx(efficiency(small, machine, 64), rel=1e-3)


def test_bad_results_are_one_line(tmp_path: Path, small: Training, monkeypatch, capsys) -> None:
    path = tmp_path / "scaling.json"
    for text in ("{", "[]", json.dumps({"points": []})):
        path.write_text(text)
        with pytest.raises(UserError, match=r"no result of benchmarks\.scaling"):
            calibrate([path])
    path.write_text(json.dumps({"points": [], "config": SMALL}))
    with pytest.raises(UserError, match="has no points"):
        calibrate([path])
    good = measured(tmp_path / "good.json", small, SLINGSHOT_10, [(1, 1, 8)])
    other = json.loads(good.read_text())
    other["config"]["data_size"] = 8
    path.write_text(json.dumps(other))
    with pytest.raises(UserError, match="different networks"):
        calibrate([good, path])
    monkeypatch.setattr("sys.argv", ["scaling_model", "--calibrate", "none.json", f"--output={tmp_path / 'out'}"])
    with pytest.raises(SystemExit) as stopped:
        scaling_model.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: cannot read none.json")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_result_table_and_plot(tmp_path: Path, small: Training, monkeypatch, capsys) -> None:
    source = measured(tmp_path / "s.json", small, replace(SLINGSHOT_10, node_bandwidth=2e7), [(1, 1, 8), (2, 1, 8)])
    monkeypatch.setattr("sys.argv", ["scaling_model", "--calibrate", str(source), f"--output={tmp_path / 'out'}"])
    scaling_model.main()
    path = tmp_path / "out" / "scaling_model_calibrated.json"
    result = json.loads(path.read_text())
    assert result["provenance"]["command"]
    prediction = result["predictions"][0]
    assert prediction["efficiency"]["25 MB buckets, float32"]["1"] == 1.0
    assert sum(bucket["bytes"] for bucket in prediction["buckets"]) == sum(size for _, size in small.network.gradients)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    table = path.with_suffix(".md").read_text()
    assert table.strip() in capsys.readouterr().out
    assert "| sent as bfloat16 | " in table
