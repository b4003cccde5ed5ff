"""The end of a run: its step is released first."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from trainings import ALONE, YAML

import train
from utils import cli
from utils import config as configs
from utils.distributed import world as worlds
from utils.distributed.signals import Signals
from utils.errors import UserError
from utils.steps.eager import EagerStep


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_closed_and_released_before_the_process_group_is_destroyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
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

    flags = ["--set=data_loader_config=synthetic", f"--set=expdir={tmp_path}", "--num_epochs=1"]
    options = cli.parse([f"--yaml_config={YAML}", "--config=test", *flags])
    config = configs.load(options.yaml_config, options.config, options.overrides).for_world(1)
    monkeypatch.setattr(worlds.dist, "destroy_process_group", lambda: events.append(events[0]()))
    with pytest.raises(UserError) if fails else contextlib.nullcontext(), worlds._leaving_group():
        train.run(options, config, ALONE, CyclicStep, Signals())
    assert events[1:] == ["closed", None]
