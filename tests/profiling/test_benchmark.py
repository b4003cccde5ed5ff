"""Tests of the benchmark mode: its measurements, log lines, JSON file and settings."""

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from log_lines import CollectedLines
from processes import run_ranks
from reference_samples import cubes, loader_of
from small_steps import ALONE, make_step
from torch import nn

from utils.config import Config
from utils.data.loaders.synthetic import SyntheticLoader
from utils.data.plan import SamplePlan
from utils.distributed.world import World
from utils.errors import UserError
from utils.profiling.benchmark import Benchmark, Settings, Trials, read_settings
from utils.steps.build import Parts
from utils.steps.eager import EagerStep


class CountingStep(EagerStep):
    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.calls[self.sync] += 1
        return super().__call__(*arguments)


def measure(world: World, output: str, settings: Settings | None = None) -> tuple[list[str], dict[bool, int]]:
    """The lines logged by this rank, and the calls of its step with and without gradient exchange."""
    step, log = make_step(kind=CountingStep, world=world, network=nn.Conv3d(4, 5, 1)), CollectedLines("utils.profiling")
    step.calls = {True: 0, False: 0}
    # Three batches per epoch, so that a trial of five needs a second epoch.
    plan = SamplePlan(samples=12 * world.size, boxes=cubes(8), crop=4, seed=0, split="train")
    loader = loader_of(lambda _, *rest: SyntheticLoader(*rest), None, plan, world.rank, world.size)
    trials = Trials(batches=5, trials=3, warmup_trials=1)
    settings = settings or Settings(IO=trials, SYNTHETIC=trials, FULL=trials)
    settings = settings.model_copy(update={"output": output})
    parts = Parts(mock.Mock(flops=10), mock.Mock(train=loader), step)
    Benchmark(Config(global_batch_size=4 * world.size), parts, world, settings).run()
    return log.lines, step.calls


@pytest.mark.parametrize("ranks", [1, 2])
def test_benchmark_logs_and_writes_its_measurements(tmp_path: Path, ranks: int) -> None:
    output, exchanges = str(tmp_path / "rates.json"), ranks > 1
    answers = run_ranks(measure, ranks, output) if exchanges else [measure(ALONE, output)]
    names = ["IO", "SYNTHETIC", "FULL", "NO-COMM"][: 4 if exchanges else 3]
    for lines, calls in answers:
        assert calls == {True: 2 * 4 * 5, False: 4 * 5 if exchanges else 0}, "IO does not call the step"
        pattern = r"BENCHY::SUMMARY::(.*) average trial throughput: \d+\.\d{3} \+/- \d+\.\d{3}"
        assert re.findall(pattern, "\n".join(lines)) == names
        assert any("NO-COMM communication overhead" in line for line in lines) is exchanges
    (line,) = Path(output).read_text().splitlines()  # SC22's plot of the weak scaling reads a line and these keys
    result = json.loads(line)
    assert result["flops_per_sample"] == 10
    assert result["nranks"] == ranks
    for name in names:
        assert result[name]["median"] == sorted(result[name]["trial_throughput"])[1]
        if name != "IO":
            teraflops = result[name]["median"] * result["flops_per_sample"] / ranks / 1e12
            assert result[name]["TFLOP/s per rank"] == pytest.approx(teraflops)


def test_settings_of_the_tutorial_are_understood(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """With the keys of the tutorial's benchy-conf.yaml; they were unknown."""
    caplog.set_level("INFO")
    conf = tmp_path / "conf.yaml"
    common = f"{{report_freq: 10, profiler_mode: 'single', output_filename: 'theirs.json', output_dir: '{tmp_path}'}}"
    trials = "{run_benchmark: %s, nbatches: 2, ntrials: 3, nwarmup: 4}"
    conf.write_text(f"global: {common}\nIO: {trials % False}\nsynthetic: {trials % True}\nfull: {trials % True}\n")
    monkeypatch.chdir(tmp_path)
    assert read_settings(ALONE).output == "benchy.json"
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(conf))
    settings = read_settings(ALONE)
    measured = Trials(batches=2, trials=3, warmup_trials=4)
    assert (settings.SYNTHETIC, settings.FULL, settings.IO.run_benchmark) == (measured, measured, False)
    assert settings.output == str(tmp_path / "theirs.json")
    assert "report_freq, profiler_mode have no effect here" in caplog.text
    conf.write_text("IO: {batches: 2}\nglobal: {output_filename: 'theirs.json', output_dir: null}")
    assert (read_settings(ALONE).output, read_settings(ALONE).IO.batches) == ("theirs.json", 2)
    monkeypatch.setenv("BENCHY_OUTPUT", "weak_scale")
    assert read_settings(ALONE).output == "weak_scale.json"
    off = Trials(run_benchmark=False)
    once = Settings(IO=off, SYNTHETIC=off, FULL=Trials(batches=1, trials=1, warmup_trials=0))
    assert measure(ALONE, str(tmp_path / "rates.json"), once)[1] == {True: 1, False: 0}


def test_invalid_settings_and_output_are_refused_before_the_measurements(tmp_path: Path, monkeypatch: Any) -> None:
    conf = tmp_path / "conf.yaml"
    monkeypatch.setenv("BENCHY_CONFIG_FILE", str(conf))
    conf.write_text("IO: {batchs: 2}")
    with pytest.raises(UserError, match=rf"{conf}.*did you mean IO\.batches\?"):
        read_settings(ALONE)
    conf.write_text("")
    (tmp_path / "results.json").mkdir()
    for name in ("none/x.json", "results"):
        monkeypatch.setenv("BENCHY_OUTPUT", str(tmp_path / name))
        with pytest.raises(UserError, match=rf"^cannot write .*{name}.*BENCHY_OUTPUT"):
            read_settings(ALONE)
