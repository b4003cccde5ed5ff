"""What all benchmarks share: results with provenance, and medians of interleaved trials."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from utils import cli
from utils.distributed.world import Launch, World
from utils.errors import UserError
from utils.files import atomic_write
from utils.runs.logger import provenance

RESULTS = Path(__file__).parent / "results"


def this_machine() -> World:
    """A world of one rank on the best device there is."""
    return World(Launch("benchmark"), torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def interleaved(measures: Mapping[str, Callable[[], float]], trials: int, warmup: int = 1) -> dict[str, list[float]]:
    """Each measure once a round, so that what drifts on the machine meets them all; warm-up rounds do not count."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(warmup + trials):
        for name, measure in measures.items():
            value = measure()
            sys.stderr.write(f"round {number + 1}/{warmup + trials}: {name} {value:.4g}\n")
            if number >= warmup:
                values[name].append(value)
    return values


def summary(values: list[float]) -> dict[str, Any]:
    """Median, range and the trials themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
        "trials": values,
    }


def save(name: str, result: dict[str, Any], directory: Path = RESULTS) -> Path:
    """Writes <directory>/<name>.json, whole or not at all, with what made it."""
    path = directory / f"{name}.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with atomic_write([path]) as (partial,):
            partial.write_text(json.dumps({**result, "provenance": provenance(this_machine())}, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; choose another --output") from None
    return path


class Parser(cli.Parser):
    """The command line of a benchmark: its module's text as help, --output, and complaints in one line."""

    def __init__(self, text: str | None) -> None:
        super().__init__(text)
        self.add_argument("--output", type=Path, default=RESULTS, help="directory of the results (%(default)s)")


def positive_float(text: str) -> float:
    """A number above zero, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above zero")
    return value


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON takes them, but for where results go."""
    kept = {key: value for key, value in vars(options).items() if key != "output"}
    return {key: str(value) if isinstance(value, Path) else value for key, value in kept.items()}
