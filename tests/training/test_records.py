"""Each point is recorded once, wherever a run ends between its records and the checkpoint that follows them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import GENEROUS, context
from trainings import YAML, assert_same_training, directory

import train
from utils.distributed.launch import run_script
from utils.steps.eager import EagerStep
from utils.training.trainer import Trainer

KILLED = 9


class StoppingStep(EagerStep):
    """Receives SIGTERM during the first validation after a training step."""

    trained = False

    def __call__(self, *arguments: Any) -> torch.Tensor:
        self.trained = True
        return super().__call__(*arguments)

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.trained:
            self.trained = False
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # until the thread that waits for signals has run
        return super().evaluate(inputs, targets)


def start(flags: list[str], log: str, ending: str) -> None:
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
    if ending == "killed after the records":
        Trainer._finish_epoch = lambda *_: os._exit(KILLED)  # type: ignore[assignment, method-assign]
    run_script(lambda: train.main(flags, StoppingStep if ending == "stopped" else EagerStep))


@pytest.mark.parametrize("interval", [4, 3])  # 3: the last interval of an epoch of 8 steps is shorter
def test_a_stop_in_the_validation_and_a_kill_after_its_repetition_record_no_point_twice(
    tmp_path: Path, data_flags: list[str], interval: int
) -> None:
    """A fixed bug: the records of the epoch's end were written before the kill, and again after it."""
    flags = [f"--yaml_config={YAML}", "--config=test", *data_flags, "--set=report_baselines=false"]
    flags += [f"--set=log_interval={interval}", "--set=log_noise_scale=true"]
    codes = {"finished": 0, "stopped": 75, "killed after the records": KILLED}
    for name, endings in {"whole": ["finished"], "parts": ["stopped", "killed after the records", "finished"]}.items():
        for ending in endings:
            log = tmp_path / "log"
            arguments = ([*flags, f"--set=expdir={tmp_path / name}"], str(log), ending)
            process = context().Process(target=start, args=arguments)
            process.start()
            process.join(GENEROUS)
            assert process.exitcode == codes[ending], log.read_text()
    assert_same_training(directory(tmp_path / "whole"), directory(tmp_path / "parts"))
