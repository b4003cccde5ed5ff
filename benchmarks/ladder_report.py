"""Table and plot of the optimization ladder's results (benchmarks/ladder.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import bars, plot, ranged, table
from utils.profiling.timing import peak_caveat

LOSS_STEPS = 10  # after which losses are compared


def best_of(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last step of the ladder that was kept."""
    return next((entry for entry in reversed(results) if entry.get("kept")), None)


def markdown(results: Sequence[Mapping[str, Any]], peak: Mapping[str, float]) -> str:
    """A line per step of the ladder."""
    heads = ["option", "SYNTHETIC samples/s", "FULL samples/s", "FULL / SYNTHETIC", "TFLOP/s", "% of matmul peak"]
    heads += ["kept", f"loss, gradient norm of step {LOSS_STEPS}", "predicted for an H200"]
    rows = []
    for entry in results:
        cells = [entry["name"], *_measured(entry, peak)]
        cells += [""] * (len(heads) - 1 - len(cells))
        rows.append([*cells, entry.get("predicted for an H200", "")])
    shares = [entry["TFLOP/s"] / bound for entry in results if (bound := _bound(entry, peak)) is not None]
    return "\n\n".join(filter(None, (table(heads, rows), peak_caveat(*shares))))


def _bound(entry: Mapping[str, Any], peak: Mapping[str, float]) -> float | None:
    """The matmul peak in the precision of a measured step."""
    return peak_of(entry["state"]["changes"], peak) if "SYNTHETIC" in entry else None


def _measured(entry: Mapping[str, Any], peak: Mapping[str, float]) -> list[str]:
    if "SYNTHETIC" not in entry:
        return [entry.get("skipped") or f"failed: {entry['failed']}"]
    bound = _bound(entry, peak)
    finals = [entry[f"{name} of the warm-up steps"][:LOSS_STEPS][-1] for name in ("loss", "gradient norm")]
    return [
        *(ranged(entry[name]) for name in ("SYNTHETIC", "FULL")),
        f"{entry['FULL / SYNTHETIC']:.3f}",
        f"{entry['TFLOP/s']:.4g}",
        "" if bound is None else f"{100 * entry['TFLOP/s'] / bound:.1f}",
        "yes" if entry["kept"] else "no",
        ", ".join(f"{value:.4f}" for value in finals),
    ]


def peak_of(changes: Mapping[str, Any], peak: Mapping[str, float]) -> float | None:
    """TFLOP/s of a matrix product in the training's precision."""
    if changes.get("enable_amp"):
        name = changes.get("precision", "bfloat16")
    else:
        name = "tf32" if changes.get("tf32", True) and "tf32" in peak else "float32"
    return peak.get(name)


def draw(results: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """SYNTHETIC and FULL samples/s of each measured step."""
    shown = [entry for entry in results if "SYNTHETIC" in entry]
    names = [entry["name"] + ("" if entry["kept"] else " (not kept)") for entry in shown]
    groups = {kind: [entry[kind] for entry in shown] for kind in ("SYNTHETIC", "FULL")}
    with plot(path, (8, 1.5 + 0.36 * len(shown))) as panels:
        bars(panels[0, 0], names, groups, xlabel="samples/s, median and range", title=title)
