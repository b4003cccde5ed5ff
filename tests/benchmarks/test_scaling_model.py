"""The scaling model: its formulas against numbers worked out by hand, its limits, its fits, and real DDP buckets."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks
from torch import nn

from benchmarks import scaling_model
from benchmarks.scaling_model import (
    ALGORITHMS,
    GOALS,
    PUBLISHED,
    SLINGSHOT_10,
    UNKNOWN,
    Figure,
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
    expected_maximum,
    fit,
    full_network,
    original,
    predict,
    timed,
)
from networks import build_loss, build_network, initialise
from utils.config import Config
from utils.distributed import World
from utils.errors import UserError
from utils.steps.eager import EagerStep, StepOptions

# Nodes of 4 ranks, 100 bytes/s inside and 10 between them, 1 s and 2 s a hop.
TOY = Machine("toy", 4, 100.0, 10.0, 1.0, 2.0)
FREE = Machine("free", 4, math.inf, math.inf, 0.0, 0.0)
# One second a layer forward, two backward; gradients of 100 bytes each, the last layer's first.
TWO_LAYERS = Network((Layer("first", 1.0, 2.0), Layer("second", 1.0, 2.0)), (("second", 100), ("first", 100)))
TINY_BUCKETS = 1 / 2**20  # each gradient is a bucket of its own


@pytest.fixture(scope="module")
def full() -> Network:
    return full_network()


def small_network(in_channels: int = 4) -> nn.Module:
    return build_network("unet", 16, in_channels=in_channels, width=8, scales=3)


# --- all-reduce ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "ranks", "seconds"),
    [
        # On one node at 100 bytes/s: 2 · 3/4 · 1000 / 100 and 3 hops twice; two trees of 4; scatter and gather.
        ("ring", 4, 15 + 6),
        ("tree", 4, 20 + 4),
        ("hierarchical", 4, 15 + 6),
        ("ring", 2, 10 + 2),
        ("tree", 2, 10 + 2),
        # Two nodes, at 10 bytes/s: 2 · 7/8 · 1000 / 10, and of 7 hops 6 inside; each node is the root of one tree.
        ("ring", 8, 175 + 2 * (6 + 2)),
        ("tree", 8, 100 + 2 * (2 + 2)),
        ("hierarchical", 8, 15 + 6 + 100 + 2 * 2),
        # Four nodes: of 15 hops 12 inside; between the nodes a ring, 2 · 3/4 · 1000 / 10, beats the trees.
        ("ring", 16, 187.5 + 2 * (12 + 6)),
        ("tree", 16, 200 + 2 * (2 + 4)),
        ("hierarchical", 16, 15 + 6 + 150 + 12),
        ("fastest", 16, 15 + 6 + 150 + 12),
        ("fastest", 8, 100 + 2 * (2 + 2)),
    ],
)
def test_an_all_reduce_takes_what_was_worked_out_by_hand(algorithm: str, ranks: int, seconds: float) -> None:
    assert all_reduce_seconds(1000, TOY, ranks, algorithm) == pytest.approx(seconds)


def test_trees_between_two_nodes_are_held_up_by_narrow_links_inside_them() -> None:
    narrow = replace(TOY, node_bandwidth=12.5)
    assert all_reduce_seconds(1000, narrow, 8, "tree") == pytest.approx(160 + 8)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "fastest"])
def test_one_rank_exchanges_nothing(algorithm: str) -> None:
    assert all_reduce_seconds(1000, TOY, 1, algorithm) == 0.0


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_half_the_bytes_take_half_the_time_without_latency(algorithm: str) -> None:
    machine = replace(TOY, node_latency=0.0, network_latency=0.0)
    for ranks in (2, 4, 8, 64):
        half, whole = (all_reduce_seconds(size, machine, ranks, algorithm) for size in (500, 1000))
        assert 2 * half == pytest.approx(whole)


def test_ranks_that_do_not_fill_their_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks do not fill nodes of 4"):
        all_reduce_seconds(1000, TOY, 6)


@pytest.mark.parametrize(
    ("count", "value"),
    # Known in closed form, and for 5 and 100 from tables of normal order statistics.
    [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (5, 1.16296), (100, 2.50759)],
)
def test_expected_maximum_of_normal_numbers(count: int, value: float) -> None:
    assert expected_maximum(count) == pytest.approx(value, abs=1e-5)


# --- a step --------------------------------------------------------------------------------------------------------


def test_a_step_overlaps_as_worked_out_by_hand() -> None:
    """Two buckets of 100 bytes between two ranks at 50 bytes/s and no latency: 2 s each.

    Forward until 2, the second layer's gradients at 4, the first's at 6: the first exchange lasts from 4 to 6 and is
    hidden, the other one from 6 to 8 and is not.
    """
    machine = Machine("pair", 2, 50.0, 1.0, 0.0, 0.0)
    training = Training(TWO_LAYERS, 1, 1.0, bucket_cap_mb=TINY_BUCKETS)
    step = predict(training, machine, 2)
    assert step.compute == pytest.approx(6.0)
    assert step.communication == pytest.approx(2.0)
    # In one bucket: all 200 bytes after 6. At half the speed: the queue ends at 4 + 4 + 4. In halves: as at 50 bytes/s.
    assert predict(replace(training, bucket_cap_mb=25), machine, 2).communication == pytest.approx(4.0)
    slow = replace(machine, node_bandwidth=25.0)
    assert predict(training, slow, 2).communication == pytest.approx(6.0)
    assert predict(replace(training, compressed=True), slow, 2).communication == pytest.approx(2.0)


def test_a_step_adds_up_and_gives_the_rates_of_benchmark_mode() -> None:
    machine = Machine("pair", 2, 50.0, 1.0, 0.0, 0.0)
    training = Training(
        TWO_LAYERS, 3, 1.0, fixed_seconds=2.0, input_seconds=0.5, jitter=0.1, bucket_cap_mb=TINY_BUCKETS
    )
    step = predict(training, machine, 2)
    alone = 3 * 6.0 + 2.0
    together = alone + 2.0 + 0.1 * alone / math.sqrt(math.pi)
    assert step.seconds("NO-COMM") == pytest.approx(alone)
    assert step.seconds("SYNTHETIC") == pytest.approx(together)
    assert step.rate("FULL") == pytest.approx(6 / (together + 1.5))
    assert step.rate("SYNTHETIC / NO-COMM") == pytest.approx(alone / together)
    assert step.communication_overhead == pytest.approx(1 - alone / together)


def test_fixed_time_within_the_passes_hides_communication_and_counts_once() -> None:
    machine = Machine("pair", 2, 25.0, 1.0, 0.0, 0.0)
    training = Training(TWO_LAYERS, 1, 1.0, fixed_seconds=6.0, bucket_cap_mb=TINY_BUCKETS)
    after, within = (predict(replace(training, fixed_within=value), machine, 2) for value in (False, True))
    assert after.seconds("NO-COMM") == within.seconds("NO-COMM") == pytest.approx(12.0)
    # Everything comes at half the speed: gradients at 8 and 12, exchanges until 12 and 16.
    assert after.communication == pytest.approx(6.0)
    assert within.communication == pytest.approx(4.0)


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_exchange_that_costs_nothing_scales_perfectly(full: Network, ranks: int) -> None:
    training = replace(original(full), jitter=0.0)
    assert efficiency(training, FREE, ranks) == 1.0
    assert predict(training, FREE, ranks).communication_overhead == 0.0


def test_more_ranks_never_raise_efficiency(full: Network) -> None:
    training = original(full)
    counts = [1, 2, 4, *(2**power for power in range(3, 14))]
    for machine in (SLINGSHOT_10, replace(SLINGSHOT_10, network_bandwidth=1e12)):
        values = [efficiency(training, machine, ranks, "ring") for ranks in counts]
        assert values == sorted(values, reverse=True)
        assert values[0] == 1.0
        assert values[-1] < values[1]


def test_larger_batches_hide_more(full: Network) -> None:
    values = [efficiency(replace(original(full), local_batch=batch), SLINGSHOT_10, 128) for batch in (16, 32, 64, 128)]
    assert values == sorted(values)
    assert values[-1] > values[0] + 0.1


# --- network and buckets -------------------------------------------------------------------------------------------


def test_the_full_network_is_the_one_that_is_published(full: Network) -> None:
    assert full.work == pytest.approx(80.46e9, rel=1e-4)
    assert sum(size for _, size in full.gradients) == 4 * 116_977_029
    names = [layer.name for layer in full.layers]
    assert names == [*(f"down{n}" for n in range(1, 7)), *(f"up{n}" for n in range(6, 1, -1)), "last"]
    assert list(dict.fromkeys(name for name, _ in full.gradients)) == names[::-1]
    first, last = full.layers[0], full.layers[-1]
    # 4 → 64 channels, kernel 4³, to 32³ places; no gradient of the data.
    assert first.forward == first.backward == 2 * 4 * 64 * 4**3 * 32**3
    assert last.backward == 2 * last.forward == 2 * 2 * 128 * 5 * 4**3 * 32**3


def test_buckets_are_as_many_as_the_original_saw_in_its_profiles(full: Network) -> None:
    """8 NCCL calls a step with 25 MB, 5 with 100 MB; PyTorch 1.10's first bucket is of 1 MB."""
    assert len(buckets(full.gradients, 25, 1)) == 8
    assert len(buckets(full.gradients, 100, 1)) == 5


def test_a_gradient_that_reaches_the_cap_closes_its_bucket() -> None:
    cap = 4 / 2**20
    gradients = [("d", 3), ("c", 1), ("b", 9), ("a", 2)]
    assert buckets(gradients, cap) == [[("d", 3), ("c", 1)], [("b", 9)], [("a", 2)]]
    assert buckets(gradients, cap, first_mb=1 / 2**20) == [[("d", 3)], [("c", 1), ("b", 9)], [("a", 2)]]
    assert buckets(gradients[:2], cap) == [gradients[:2]]


CAPS = (0.001, 0.005, 0.02, 0.05, 0.2, 25.0)


def described_buckets(world: World) -> list[list[str]]:
    """What describe() prints of each cap's buckets, in MB."""
    told = []
    for cap in CAPS:
        network = small_network()
        initialise(network, torch.Generator().manual_seed(3))
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        step = EagerStep(network, build_loss("l1"), optimizer, world, StepOptions(bucket_cap_mb=cap))
        for _ in range(3):  # buckets are formed anew after the first one, and told of in the third
            step.warm_up(torch.ones(1, 4, 16, 16, 16), torch.ones(1, 5, 16, 16, 16))
        line = next(line for line in step.describe() if "DistributedDataParallel" in line)
        listed = re.search(r"MB: (.*) MB;", line)
        assert listed is not None, line
        told.append(listed.group(1).split(", "))
    return told


def test_buckets_are_those_of_ddp_on_two_ranks() -> None:
    with torch.device("meta"):
        network = examine(small_network(), torch.empty(1, 4, 16, 16, 16))
    expected = [
        [f"{sum(size for _, size in bucket) / 1e6:.3g}" for bucket in buckets(network.gradients, cap)] for cap in CAPS
    ]
    assert len({len(sizes) for sizes in expected}) > 3, "the caps must make a difference"
    for told in run_ranks(described_buckets, 2):
        assert told == expected


def test_measured_layer_times_take_the_place_of_flop(tmp_path: Path) -> None:
    def row(layer: str, name: str, milliseconds: float, passes: int, dtype: str = "bfloat16") -> dict[str, Any]:
        names = {"layer": layer, "version": "plain", "pass": name, "dtype": dtype, "format": "NDHWC"}
        return {**names, "passes": passes, "ms": milliseconds}

    rows = [
        row("first", "forward", 1.0, 2),
        row("first", "weight gradient", 4.0, 2),
        row("second", "forward", 9.0, 3, "tf32"),
        row("second", "input gradient", 9.0, 3, "tf32"),
        row("second", "weight gradient", 9.0, 3, "tf32"),
        row("second", "forward", 2.0, 3),
        row("second", "input gradient", 3.0, 3),
        row("second", "weight gradient", 5.0, 3),
        row("second", "forward", 0.1, 3, "float16"),  # its other passes failed
        {**row("first", "forward", 0.1, 2), "version": "rewritten"},
    ]
    path = tmp_path / "convolutions.json"
    path.write_text(json.dumps({"rows": rows}))
    assert timed(TWO_LAYERS, path).layers == (Layer("first", 1.0, 4.0), Layer("second", 2.0, 8.0))
    path.write_text(json.dumps({"rows": rows[2:]}))
    with pytest.raises(UserError, match="no times of all passes of layer first"):
        timed(TWO_LAYERS, path)


# --- calibration ---------------------------------------------------------------------------------------------------


def made_up(training: Training, machine: Machine, figures: tuple[Figure, ...]) -> list[Figure]:
    """The figures as the model has them."""
    return [
        replace(
            figure,
            value=predict(
                replace(training, local_batch=figure.local_batch, bucket_cap_mb=figure.bucket_cap_mb),
                machine,
                figure.ranks,
            ).rate(figure.kind),
        )
        for figure in figures
    ]


def test_a_fit_recovers_what_made_the_figures(full: Network) -> None:
    truth = replace(original(full), rate=6e13, fixed_seconds=0.02, input_seconds=5e-4)
    machine = replace(SLINGSHOT_10, network_bandwidth=1.4e10)
    found = fit(made_up(truth, machine, PUBLISHED), original(full), SLINGSHOT_10, UNKNOWN)
    for name in UNKNOWN:
        of = (truth, found.training) if hasattr(truth, name) else (machine, found.machine)
        assert getattr(of[1], name) == pytest.approx(getattr(of[0], name), rel=1e-3), name
    assert not found.undetermined
    assert all(value == pytest.approx(figure.value, rel=1e-4) for figure, value in found.figures)


def test_a_fit_names_what_its_figures_do_not_tell(full: Network) -> None:
    found = fit(PUBLISHED[:3], original(full), SLINGSHOT_10, ("rate", "input_seconds", "network_bandwidth"))
    assert found.undetermined == ("network_bandwidth",)


def test_128_ranks_are_predicted_from_one_and_two_nodes(full: Network) -> None:
    """Within five points of what is published, and from figures of at most eight ranks alone."""
    assert max(figure.ranks for figure in PUBLISHED) == 8
    found = fit(PUBLISHED, original(full), SLINGSHOT_10, UNKNOWN)
    assert found.machine.network_bandwidth < SLINGSHOT_10.network_bandwidth, "no more than the line rate"
    assert all(value == pytest.approx(figure.value, rel=0.03) for figure, value in found.figures)
    predicted = at_goal(found)
    for batch, goals in GOALS.items():
        for name, goal in goals.items():
            assert predicted[str(batch)][name] == pytest.approx(goal, abs=0.05), (batch, name)


SMALL = {"network": {"name": "unet", "width": 8, "scales": 3}, "data_size": 16, "box_size": [16, 16]}


def measured(path: Path, training: Training, machine: Machine, points: list[tuple[int, int, int]]) -> Path:
    """A result of benchmarks.scaling that the model made: (ranks, hosts, local batch) each."""
    told = []
    for ranks, hosts, batch in points:
        step = predict(replace(training, local_batch=batch), machine, ranks)
        rates = {kind: {"median": step.rate(kind)} for kind in ("SYNTHETIC", "FULL", "NO-COMM")}
        told.append({"ranks": ranks, "hosts": hosts, "local_batch": batch, **rates})
    path.write_text(json.dumps({"points": told, "config": {**SMALL, "bucket_cap_mb": 0.05}}))
    return path


@pytest.fixture
def small() -> Training:
    with torch.device("meta"):
        network = examine(small_network(), torch.empty(1, 4, 16, 16, 16))
    return Training(network, 8, 2e9, 0.01, 1e-4, scaling_model.JITTER, bucket_cap_mb=0.05)


def test_results_of_small_runs_calibrate_one_node_and_the_network(tmp_path: Path, small: Training) -> None:
    machine = replace(SLINGSHOT_10, name="true", ranks_per_node=4, node_bandwidth=2e7, network_bandwidth=5e6)
    one = measured(tmp_path / "one.json", small, machine, [(1, 1, 8), (2, 1, 8), (4, 1, 8), (4, 1, 2)])
    found, unknown = calibrate([one])
    assert unknown == ("rate", "fixed_seconds", "input_seconds", "node_bandwidth")
    assert found.machine.node_bandwidth == pytest.approx(2e7, rel=1e-3)
    assert found.training.rate == pytest.approx(2e9, rel=1e-3)
    assert found.training.fixed_seconds == pytest.approx(0.01, rel=1e-3)
    assert found.training.input_seconds == pytest.approx(1e-4, rel=1e-2)
    assert found.machine.ranks_per_node > 10**6, "one node alone: others are taken to be like it"
    assert calibrate([one], SLINGSHOT_10)[0].machine.ranks_per_node == 4
    two = measured(tmp_path / "two.json", small, machine, [(8, 2, 8)])
    found, unknown = calibrate([one, two])
    assert "network_bandwidth" in unknown
    assert "node_bandwidth" in unknown
    assert found.machine.ranks_per_node == 4
    assert found.machine.network_bandwidth == pytest.approx(5e6, rel=1e-3)
    assert efficiency(found.training, found.machine, 64) == pytest.approx(efficiency(small, machine, 64), rel=1e-3)


def test_what_is_no_result_is_refused_in_one_line(tmp_path: Path, small: Training) -> None:
    path = tmp_path / "scaling.json"
    with pytest.raises(UserError, match=r"cannot read .*scaling\.json"):
        calibrate([path])
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


def test_the_command_writes_result_table_and_picture(tmp_path: Path, small: Training, monkeypatch, capsys) -> None:
    source = measured(tmp_path / "s.json", small, replace(SLINGSHOT_10, node_bandwidth=2e7), [(1, 1, 8), (2, 1, 8)])
    monkeypatch.setattr("sys.argv", ["scaling_model", "--calibrate", str(source), "--output", str(tmp_path / "out")])
    scaling_model.main()
    result = json.loads((tmp_path / "out" / "scaling_model_calibrated.json").read_text())
    assert result["provenance"]["command"]
    told = result["predictions"][0]
    assert told["efficiency"]["25 MB buckets, float32"]["1"] == 1.0
    assert sum(bucket["bytes"] for bucket in told["buckets"]) == sum(size for _, size in small.network.gradients)
    assert (tmp_path / "out" / "scaling_model_calibrated.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "out" / "scaling_model_calibrated.md").read_text()
    assert table.strip() in capsys.readouterr().out
    assert "| sent as bfloat16 | " in table


def test_a_missing_file_ends_in_one_line_and_code_2(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["scaling_model", "--calibrate", "none.json", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        scaling_model.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: cannot read none.json")
    assert not list(tmp_path.iterdir())


def test_the_shipped_result_is_what_the_model_gives(full: Network) -> None:
    """The table in the repository is of this model, not of an earlier one."""
    shipped = json.loads((scaling_model.RESULTS / "scaling_model" / "scaling_model.json").read_text())
    predicted = at_goal(fit(PUBLISHED, original(full), SLINGSHOT_10, UNKNOWN))
    for batch in map(str, GOALS):
        assert shipped["predicted"][batch] == pytest.approx(predicted[batch], rel=1e-3)
    assert Config().bucket_cap_mb == shipped["predictions"][0]["training"]["bucket_cap_mb"]
