"""Trains, and ends with SIGKILL at a moment of the run's end: training_that_dies.py MOMENT FLAG..."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import train
from utils import files
from utils.evaluation import baselines
from utils.training.choice import SUMMARY
from utils.training.loggers.base import RunRecords

FLUSH = files._flush


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_summary(path: Path) -> None:
    FLUSH(path)
    if path.name.startswith(f".{SUMMARY}"):
        die()


MOMENTS = {
    "after the last checkpoint": (baselines, "volume_losses", die),
    "before the hyperparameters": (RunRecords, "hparams", die),
    "while summary.json is written": (files, "_flush", die_in_summary),
}

if __name__ == "__main__":
    setattr(*MOMENTS[sys.argv.pop(1)])
    train.main(sys.argv[1:])
