"""Trains; ranks end themselves with SIGKILL before the steps in DEATHS, [rank, restart by torchrun (if any), step]."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import train
from utils.distributed.launch import run_script
from utils.steps.eager import EagerStep

START = [int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT") if name in os.environ]
DEATHS = json.loads(os.environ["DEATHS"])


class DyingStep(EagerStep):
    """Dies before a step; before step 0, when it has been built."""

    steps = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.die()

    def __call__(self, *arguments: Any) -> Any:
        self.steps += 1
        self.die()
        return super().__call__(*arguments)

    def die(self) -> None:
        if [*START, self.steps] in DEATHS:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run_script(lambda: train.main(sys.argv[1:], DyingStep))
