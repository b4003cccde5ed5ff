"""Table and plot of the optimization ladder's results (benchmarks/ladder.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import bars, plot, ranged, table
from utils.profiling.timing import peak_caveat

LOSS_STEPS = 10  # after which losses are compared


def markdown(results: Sequence[Mapping[str, Any]], peak: Mapping[str, float]) -> str:
    """A line per rung."""
    heads = ["rung", "SYNTHETIC samples/s", "/ first", "FULL samples/s", "FULL / SYNTHETIC", "TFLOP/s"]
    heads += ["% of matmul peak", f"loss, gradient norm of step {LOSS_STEPS}", "predicted for an H200"]
    first = next((entry["SYNTHETIC"]["median"] for entry in results if "SYNTHETIC" in entry), None)
    rows = []
    for entry in results:
        cells = [entry["name"], *_measured(entry, peak, first)]
        cells += [""] * (len(heads) - 1 - len(cells))
        rows.append([*cells, " / ".join(f"{value:,.0f}" for value in entry.get("predicted for an H200", []))])
    shares = [entry["TFLOP/s"] / bound for entry in results if (bound := _bound(entry, peak)) is not None]
    return "\n\n".join(filter(None, (table(heads, rows), peak_caveat(*shares))))


def _bound(entry: Mapping[str, Any], peak: Mapping[str, float]) -> float | None:
    """The matmul peak in the precision of a measured rung."""
    return peak_of(entry["state"]["changes"], peak) if "SYNTHETIC" in entry else None


def _measured(entry: Mapping[str, Any], peak: Mapping[str, float], first: float | None) -> list[str]:
    if first is None or "SYNTHETIC" not in entry:
        return [entry.get("skipped") or f"failed: {entry['failed']}"]
    bound = _bound(entry, peak)
    finals = [entry[f"{name} of the warm-up steps"][:LOSS_STEPS][-1] for name in ("loss", "gradient norm")]
    return [
        ranged(entry["SYNTHETIC"]),
        f"{entry['SYNTHETIC']['median'] / first:.3f}",
        ranged(entry["FULL"]),
        f"{entry['FULL / SYNTHETIC']:.3f}",
        f"{entry['TFLOP/s']:.4g}",
        "" if bound is None else f"{100 * entry['TFLOP/s'] / bound:.1f}",
        ", ".join(f"{value:.4f}" for value in finals),
    ]


def peak_of(changes: Mapping[str, Any], peak: Mapping[str, float]) -> float | None:
    """TFLOP/s of a matrix product in the precision of training."""
    if changes.get("enable_amp"):
        name = changes.get("precision", "bfloat16")
    else:
        name = "tf32" if changes.get("tf32", True) and "tf32" in peak else "float32"
    return peak.get(name)


def draw(results: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """SYNTHETIC and FULL samples/s of each measured rung."""
    shown = [entry for entry in results if "SYNTHETIC" in entry]
    groups = {kind: [entry[kind] for entry in shown] for kind in ("SYNTHETIC", "FULL")}
    with plot(path, (8, 1.5 + 0.36 * len(shown))) as panels:
        bars(
            panels[0, 0], [entry["name"] for entry in shown], groups, xlabel="samples/s, median and range", title=title
        )
