"""Page and plot of a call of benchmarks/gpu.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import common, convolutions, ladder_report, ledger, peaks
from benchmarks.rungs import COPY, MATMUL, SHARES

# Written before any measurement: an audit of the code, which then moved 22.7 GB per step outside the convolutions.
AUDIT = (
    "An audit by reading predicted for rung A on an H200, with convolutions at 50 / 65 / 80 % of the matmul peak: "
    "2,780 / 3,200 / 3,550 samples/s for the code of that time, and 4,000 / 4,890 / 5,770 once its faults are fixed. "
    "A second audit expects 36 to 37 % of the bfloat16 peak for A, and 34 to 46 % with the fused tail and "
    "inputs gathered in blocks (removed since), which is 14.2 to 19.2 ms per step at batch 64."
)


def write(results: dict[str, Any], path: Path, with_plot: bool = True) -> None:
    """`path` (.json), and next to it .md and .png, each atomically, the results first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if with_plot and any("SYNTHETIC" in entry for entry in results.get("rungs", [])):
        results["skipped"].pop("plot", None)
        try:
            title = f"{results['provenance']['device']}, batch {results['settings']['batch']}"
            ladder_report.draw(results["rungs"], title, path.with_suffix(".png"))
        except Exception as error:
            results["skipped"]["plot"] = f"{error}; python -m benchmarks.gpu --draw {path.name}"
    common.write_text(path, json.dumps(results, indent=1) + "\n")
    common.write_text(path.with_suffix(".md"), markdown(results))


def markdown(results: Mapping[str, Any]) -> str:
    """All results of a call as a page."""
    made = results["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    parts = [
        f"# {made['device']}\n\n`{' '.join(made['command'])}`, commit {made['git_commit']}, {made['date']}, "
        f"{sum(results['seconds'].values()):.0f} s; {versions}."
    ]
    peak = {name: values["median"] for name, values in results.get("peaks", {}).get("matmul_tflops", {}).items()}
    writers: dict[str, tuple[str, Callable[[Any], str]]] = {
        "peaks": ("Upper bounds", peaks.markdown),
        "rungs": ("Rungs", lambda entries: _rungs(entries, peak)),
        "best": (f"The fastest rung at batch {results['settings']['batch']} in detail", _best),
        "comparisons": ("Comparisons in alternating trials", _comparisons),
        "convolutions": ("Convolutions", convolutions.markdown),
        "loaders": ("Loaders", _loaders),
        "tests": ("Tests", _tests),
        "skipped": ("Not measured", lambda skipped: "\n".join(f"- {name}: {why}" for name, why in skipped.items())),
    }
    parts += [f"## {title}\n\n{text(results[name])}" for name, (title, text) in writers.items() if results.get(name)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _rungs(entries: list[dict[str, Any]], peak: Mapping[str, float]) -> str:
    commands = "\n".join(f"- {entry['name']}: `{entry['command']}`" for entry in entries)
    shares = " / ".join(f"{100 * share:.0f}" for share in SHARES)
    return (
        f"Median and range.\n\n{ladder_report.markdown(entries, peak)}\n\nPredicted before any measurement: time of "
        f"the convolutions at {shares} % of {MATMUL / 1e12:.0f} TFLOP/s, plus all other bytes (benchmarks/traffic.py) "
        f"at {COPY / 1e12:g} TB/s. {AUDIT}\n\nCommands, to which --enable_benchy is added:\n\n{commands}"
    )


def _best(best: Mapping[str, Any]) -> str:
    ratio = common.ranged(best["FULL / SYNTHETIC"], ".3f")
    text = f"{best['name']}: real data reach {ratio} of synthetic."
    return f"{text}\n\n{ledger.markdown(best['ledger'])}" if "ledger" in best else text


def _comparisons(pairs: Mapping[str, Any]) -> str:
    rows = []
    for name, pair in pairs.items():
        for side, values in pair.items():
            ratio = values.get("ratio to the first")
            rows.append((f"{name}: {side}", f"{values['median']:.4g}", common.ranged(ratio, ".3f") if ratio else ""))
    return common.table(("pair", "samples/s", "ratio to the first, median (range)"), rows)


def _loaders(results: Mapping[str, Any]) -> str:
    rows = []
    for name, values in results.items():
        other = ", ".join(f"{key} {value:.3g}" for key, value in values.items() if "median" not in values)
        rows.append((name, other or common.ranged(values)))
    return common.table(("loader", "samples/s, median (range)"), rows)


def _tests(files: Mapping[str, Any]) -> str:
    rows = [(name, result["ended"], f"{result['seconds']:.0f}", result["summary"]) for name, result in files.items()]
    failed = [f"- {line}" for result in files.values() for line in result["failed"]]
    return "\n".join([common.table(("file", "ended", "s", "summary"), rows, left=4), "", *failed])
