"""The assembly of a run: it measures the step that it trains, and closes what it opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import train
from utils.data import Loaders
from utils.profiling import benchmark
from utils.steps.eager import EagerStep
from utils.training.trainer import Trainer

YAML = Path(__file__).parents[1] / "config" / "UNet.yaml"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    flags = [f"--yaml_config={YAML}", "--config=test", "--set=data_loader_config=synthetic", "--set=device=cpu"]
    return [*flags, f"--set=expdir={tmp_path}", "--set=accumulation_steps=2"]


class Ended(Exception):
    """Ends a run once a test has seen enough."""


def refuse(*_: Any, **__: Any) -> Any:
    raise Ended


def test_benchmark_measures_the_step_that_training_makes(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise-scale hook was once on in training and off in the benchmark."""
    options, current = {}, ("", "")

    class NotedStep(EagerStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            options[current] = self._options

    monkeypatch.setattr(Trainer, "fit", refuse)
    monkeypatch.setattr(benchmark.Benchmark, "run", refuse)
    for switch in ("true", "false"):
        for mode, flag in (("training", []), ("benchmark", ["--enable_benchy"])):
            current = mode, switch
            with pytest.raises(Ended):
                train.main([*flags, *flag, f"--set=log_noise_scale={switch}"], NotedStep)
        assert options["training", switch] == options["benchmark", switch]
        assert options["training", switch].log_noise_scale == (switch == "true")


def test_loaders_are_closed_when_a_run_fails(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(Trainer, "fit", refuse)
    monkeypatch.setattr(Loaders, "__exit__", lambda loaders, *_: closed.append(loaders))
    with pytest.raises(Ended):
        train.main(flags)
    assert len(closed) == 1


def test_both_loaders_are_closed_if_the_first_fails_to_close() -> None:
    closed = []

    class Loader:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            if self.name == "train":
                raise Ended

    with pytest.raises(Ended), Loaders(Loader("train"), Loader("valid")):  # type: ignore[arg-type]
        pass
    assert closed == ["train", "valid"]
