"""Benchmark mode measures, prints the contract's lines, writes JSON, and ends."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from torch import nn

from utils.data.loaders.synthetic import SyntheticLoader
from utils.distributed.world import Launch, World
from utils.errors import UserError
from utils.profiling.benchmark import Benchmark, Settings, read_settings
from utils.runs.logger import NullLogger

ALONE = World(Launch("test"), torch.device("cpu"))


class CountingStep:
    """Counts its calls, those without exchange of gradients apart."""

    gradient_norm = torch.zeros(())

    def __init__(self) -> None:
        self.network = nn.Conv3d(4, 5, 1)
        self.calls = {True: 0, False: 0}
        self._exchanging = True

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        self.calls[self._exchanging] += 1
        return torch.zeros(())

    def describe(self) -> list[str]:
        return ["how it computes"]

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.network(inputs) - targets).abs().mean()[None]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._exchanging = False
        yield
        self._exchanging = True


class KeptLines(NullLogger):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)


def measure(world: World, output: str, exchanges: bool) -> tuple[list[str], dict[bool, int]]:
    """The lines logged by this rank, and its step's calls with and without exchange."""
    step, logs = CountingStep(), KeptLines()
    # Three batches an epoch, so that a trial of five needs a second epoch.
    options = {"samples": 12 * world.size, "crop": 4, "channels": (4, 5), "batch_size": 4, "drop_last": True}
    loader = SyntheticLoader(**options, rank=world.rank, world_size=world.size)
    trials = {"batches": 5, "trials": 3, "warmup_trials": 1}
    Benchmark(
        step=step,
        loader=loader,
        world=world,
        logs=logs,
        rate=1e-3,
        global_batch_size=4 * world.size,
        settings=Settings.model_validate({"IO": trials, "SYNTHETIC": trials, "FULL": trials, "output": output}),
        exchanges=exchanges,
        peak_seconds=0.01,
    ).run({"commit": "none"})
    return logs.lines, step.calls


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_measure_print_and_write(tmp_path: Path, ranks: int) -> None:
    """With several ranks, NO-COMM measures the step without its exchange of gradients."""
    output, exchanges = str(tmp_path / "rates.json"), ranks > 1
    answers = run_ranks(measure, ranks, output, True) if exchanges else [measure(ALONE, output, False)]
    names = ["IO", "SYNTHETIC", "FULL", "NO-COMM"][: 4 if exchanges else 3]
    for lines, calls in answers:
        assert "how it computes" in lines
        assert calls == {True: 2 * 4 * 5, False: 4 * 5 if exchanges else 0}, "SYNTHETIC and FULL take steps, not IO"
        summary = [line for line in lines if "average trial throughput" in line]
        for line, name in zip(summary, names, strict=True):
            pattern = rf"BENCHY::SUMMARY::{name} average trial throughput: \d+\.\d{{3}} \+/- \d+\.\d{{3}}"
            assert re.fullmatch(pattern, line)
        assert any("NO-COMM communication overhead" in line for line in lines) is exchanges
    result = json.loads(Path(output).read_text())
    # 4 × 5 products a cell, forward and for the weights: the network's first layer needs no gradient of its inputs.
    assert result["flops_per_sample"] == 2 * 2 * 4 * 5 * 4**3
    assert len(result["matmul_peak"]["TFLOP/s of each rank"]) == result["ranks"] == ranks
    for name in names:
        assert result[name]["median"] == sorted(result[name]["trials"])[1]
        if name != "IO":
            teraflops = result[name]["median"] * result["flops_per_sample"] / ranks / 1e12
            assert result[name]["TFLOP/s a rank"] == pytest.approx(teraflops)
            share = teraflops / result["matmul_peak"]["TFLOP/s"]
            assert result[name]["share of matmul peak"] == pytest.approx(share)


def test_settings_come_from_the_named_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings(ALONE).output == "benchy.json"
    conf = tmp_path / "conf.yaml"
    conf.write_text("IO: {batches: 2, trials: 3, warmup_trials: 0}\n")
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(conf))
    monkeypatch.setenv("BENCHY_OUTPUT", "weak_scale")
    settings = read_settings(ALONE)
    assert (settings.IO.batches, settings.FULL.batches, settings.output) == (2, 30, "weak_scale.json")


def test_bad_settings_and_output_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "conf.yaml"
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(conf))
    for text, says in (
        ("IO: {batchs: 2}", r"IO\.batchs: Extra inputs"),
        ("IO: [", "^cannot read "),
        ("[1, 2]", "must map IO, SYNTHETIC, FULL and output"),
    ):
        conf.write_text(text)
        with pytest.raises(UserError, match=says) as caught:
            read_settings(ALONE)
        assert str(conf) in str(caught.value)
    conf.write_text("")
    for name in (f"{tmp_path}/none/x.json", str(tmp_path)):
        monkeypatch.setenv("BENCHY_OUTPUT", name)
        with pytest.raises(UserError, match=f"^cannot write {re.escape(name)}"):
            read_settings(ALONE)
