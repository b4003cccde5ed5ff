"""What all benchmarks share: results with provenance, and medians of interleaved trials."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from utils.distributed import Launch, World
from utils.logs import provenance

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


def save(name: str, result: dict[str, Any]) -> Path:
    """Writes benchmarks/results/<name>.json with what made it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**result, "provenance": provenance(this_machine())}, indent=2) + "\n")
    return path
