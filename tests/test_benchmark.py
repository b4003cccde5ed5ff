"""Benchmark mode measures, prints the contract's lines, writes JSON, and ends."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import pytest
import torch
from processes import run_ranks
from torch import nn

from utils import benchmark
from utils.benchmark import Benchmark, Settings, read_settings
from utils.data.synthetic import SyntheticLoader
from utils.distributed import Launch, World
from utils.errors import UserError
from utils.logs import SilentLogs

ALONE = World(Launch("test"), torch.device("cpu"))


class CountingStep:
    gradient_norm = torch.zeros(())

    def __init__(self) -> None:
        self.network = nn.Conv3d(4, 5, 1)
        self.seen: list[int] = []
        self.alone: list[int] = []
        self._exchanging = True

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        (self.seen if self._exchanging else self.alone).append(len(inputs))
        return torch.zeros(())

    def describe(self) -> list[str]:
        return ["how it computes"]

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.network(inputs) - targets).abs().mean()

    @contextlib.contextmanager
    def without_exchange(self) -> Iterator[None]:
        self._exchanging = False
        yield
        self._exchanging = True


class KeptLines(SilentLogs):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def measure(world: World, output: str, exchanges: bool) -> tuple[list[str], int, int]:
    step, logs = CountingStep(), KeptLines()
    # Three batches an epoch: a trial of five goes over its end.
    loader = SyntheticLoader(
        samples=12 * world.size,
        crop=4,
        channels=(4, 5),
        batch_size=4,
        drop_last=True,
        rank=world.rank,
        world_size=world.size,
    )
    trials = {"batches": 5, "trials": 3, "warmup_trials": 1}
    settings = Settings.model_validate({"IO": trials, "SYNTHETIC": trials, "FULL": trials, "output": output})
    Benchmark(
        step=step,
        loader=loader,
        world=world,
        logs=logs,
        rate=1e-3,
        global_batch_size=4 * world.size,
        settings=settings,
        exchanges=exchanges,
        peak_seconds=0.01,
    ).run({"commit": "none"})
    return logs.lines, len(step.seen), len(step.alone)


@pytest.mark.parametrize(("ranks", "exchanges"), [(2, True), (2, False), (1, False)])
def test_ranks_measure_print_and_write(tmp_path, ranks: int, exchanges: bool) -> None:
    output = tmp_path / "rates.json"
    names = ("IO", "SYNTHETIC", "FULL", "NO-COMM") if exchanges else ("IO", "SYNTHETIC", "FULL")
    for lines, steps, alone in run_ranks(measure, ranks, str(output), exchanges):
        assert "how it computes" in lines
        assert steps == 2 * 4 * 5, "SYNTHETIC and FULL take steps, IO takes none"
        assert alone == (4 * 5 if exchanges else 0)
        summary = [line for line in lines if "average trial throughput" in line]
        for line, name in zip(summary, names, strict=True):
            assert re.fullmatch(
                rf"BENCHY::SUMMARY::{name} average trial throughput: \d+\.\d{{3}} \+/- \d+\.\d{{3}}", line
            )
        assert any("NO-COMM communication overhead" in line for line in lines) is exchanges
        medians = [line for line in lines if " median " in line]
        assert len(medians) == len(names)
        assert all(("TFLOP/s a rank, " in line) == ("::IO" not in line) for line in medians)
    result = json.loads(output.read_text())
    assert result["provenance"] == {"commit": "none"}
    # 4 × 5 products a cell, forward and for the weights: the network's first layer needs no gradient of its inputs.
    assert result["flops_per_sample"] == 2 * 2 * 4 * 5 * 4**3
    assert len(result["matmul_peak"]["TFLOP/s of each rank"]) == result["ranks"] == ranks
    for name in names:
        trials = result[name]["trials"]
        assert len(trials) == 3
        assert result[name]["mean"] == pytest.approx(sum(trials) / 3)
        assert result[name]["median"] == sorted(trials)[1]
        assert (result[name]["min"], result[name]["max"]) == (min(trials), max(trials))
        if name != "IO":
            teraflops = result[name]["median"] * result["flops_per_sample"] / ranks / 1e12
            assert result[name]["TFLOP/s a rank"] == pytest.approx(teraflops)
            share = teraflops / result["matmul_peak"]["TFLOP/s"]
            assert result[name]["share of matmul peak"] == pytest.approx(share)


def test_settings_come_from_the_named_file_and_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("BENCHY_CONFIG_FILE", raising=False)
    monkeypatch.delenv("BENCHY_OUTPUT", raising=False)
    assert read_settings(ALONE).output == "benchy.json"
    conf = tmp_path / "conf.yaml"
    conf.write_text("IO: {batches: 2, trials: 3, warmup_trials: 0}\n")
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(conf))
    monkeypatch.setenv("BENCHY_OUTPUT", "weak_scale")
    settings = read_settings(ALONE)
    assert (settings.IO.batches, settings.FULL.batches, settings.output) == (2, 30, "weak_scale.json")


@pytest.mark.parametrize("text", ["IO: {batchs: 2}", "IO: {batches: 0}", "IO: [", "[1, 2]"])
def test_bad_settings_are_one_line(tmp_path, monkeypatch, text: str) -> None:
    conf = tmp_path / "conf.yaml"
    conf.write_text(text)
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(conf))
    with pytest.raises(UserError, match=r"conf\.yaml"):
        read_settings(ALONE)


@pytest.mark.parametrize("name", ["/proc/none/x", "/tmp", "/tmp/", "none/x.json"])
def test_an_output_that_cannot_be_written_is_one_line_before_anything_is_measured(monkeypatch, name: str) -> None:
    monkeypatch.setenv("BENCHY_OUTPUT", name)
    with pytest.raises(UserError, match=rf"^cannot write {name}"):
        read_settings(ALONE)


def test_shipped_settings_name_every_measurement() -> None:
    text = benchmark.DEFAULT_SETTINGS.read_text()
    assert all(f"\n{name}: {{batches:" in text for name in ("IO", "SYNTHETIC", "FULL"))
