"""Benchmark mode measures, prints the contract's lines, writes JSON, and ends."""

from __future__ import annotations

import json
import re

import pytest
import torch
from ranks import run_ranks
from torch import nn

from utils import benchmark
from utils.benchmark import Benchmark, Settings, read_settings
from utils.data.synthetic import SyntheticLoader
from utils.distributed import World
from utils.errors import UserError
from utils.logs import SilentLogs


class CountingStep:
    network = nn.Linear(1, 1)
    gradient_norm = torch.zeros(())

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> torch.Tensor:
        self.seen.append(len(inputs))
        return torch.zeros(())


class KeptLines(SilentLogs):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def measure(world: World, output: str) -> tuple[list[str], int]:
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
    ).run({"commit": "none"})
    return logs.lines, len(step.seen)


def test_two_ranks_measure_print_and_write(tmp_path) -> None:
    output = tmp_path / "rates.json"
    for lines, steps in run_ranks(measure, 2, str(output)):
        assert steps == 2 * 4 * 5, "SYNTHETIC and FULL take steps, IO takes none"
        summary = [line for line in lines if line.startswith("BENCHY::SUMMARY::")]
        for line, name in zip(summary, ("IO", "SYNTHETIC", "FULL"), strict=True):
            assert re.fullmatch(
                rf"BENCHY::SUMMARY::{name} average trial throughput: \d+\.\d{{3}} \+/- \d+\.\d{{3}}", line
            )
    result = json.loads(output.read_text())
    assert result["provenance"] == {"commit": "none"}
    for name in ("IO", "SYNTHETIC", "FULL"):
        assert len(result[name]["trials"]) == 3
        assert result[name]["mean"] == pytest.approx(sum(result[name]["trials"]) / 3)


def test_settings_come_from_the_named_file_and_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("BENCHY_CONFIG_FILE", raising=False)
    monkeypatch.delenv("BENCHY_OUTPUT", raising=False)
    assert read_settings().output == "benchy.json"
    conf = tmp_path / "conf.yaml"
    conf.write_text("IO: {batches: 2, trials: 3, warmup_trials: 0}\n")
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(conf))
    monkeypatch.setenv("BENCHY_OUTPUT", "weak_scale")
    settings = read_settings()
    assert (settings.IO.batches, settings.FULL.batches, settings.output) == (2, 30, "weak_scale.json")


@pytest.mark.parametrize("text", ["IO: {batchs: 2}", "IO: {batches: 0}", "IO: [", "[1, 2]"])
def test_bad_settings_are_one_line(tmp_path, monkeypatch, text: str) -> None:
    conf = tmp_path / "conf.yaml"
    conf.write_text(text)
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(conf))
    with pytest.raises(UserError, match=r"conf\.yaml"):
        read_settings()


def test_shipped_settings_name_every_measurement() -> None:
    text = benchmark.DEFAULT_SETTINGS.read_text()
    assert all(f"\n{name}: {{batches:" in text for name in ("IO", "SYNTHETIC", "FULL"))
