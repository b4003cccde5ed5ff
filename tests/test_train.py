"""The assembly of a run: it closes what it opens."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainings import ALONE, YAML

import train
from utils import cli
from utils import config as configs
from utils.data import DataSplits
from utils.distributed import world as worlds
from utils.distributed.signals import Signals
from utils.errors import UserError
from utils.steps import build
from utils.steps.eager import EagerStep


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    flags = [f"--yaml_config={YAML}", "--config=test", "--set=data_loader_config=synthetic", "--set=device=cpu"]
    return [*flags, f"--set=expdir={tmp_path}", "--num_epochs=1"]


def end(*_: Any) -> Any:
    raise RuntimeError


def test_both_loaders_are_closed_when_a_run_fails_even_if_the_first_fails_to_close(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    loaders = [SimpleNamespace(close=lambda name=name: end(closed.append(name))) for name in ("train", "valid")]
    monkeypatch.setattr(train, "open_loaders", lambda *_: DataSplits(*loaders))
    monkeypatch.setattr(build, "step", end)
    with pytest.raises(RuntimeError):
        train.main(flags)
    assert closed == ["train", "valid"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_closed_and_released_before_the_process_group_is_destroyed(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """NCCL would wait forever for the step's CUDA graphs. The first import of the compiler once left such a cycle."""
    events: list[Any] = []

    class CyclicStep(EagerStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.cycle = self
            events.append(weakref.ref(self))

        def __call__(self, *arguments: Any) -> torch.Tensor:
            if fails:
                raise UserError("wrong")
            return super().__call__(*arguments)

        def close(self) -> None:
            events.append("closed")

    options = cli.parse(flags)
    config = configs.load(options.yaml_config, options.config, options.overrides).for_world(1)
    monkeypatch.setattr(worlds.dist, "destroy_process_group", lambda: events.append(events[0]()))
    with pytest.raises(UserError) if fails else contextlib.nullcontext(), worlds._leaving_group():
        train.run(options, config, ALONE, CyclicStep, Signals())
    assert events[1:] == ["closed", None]
