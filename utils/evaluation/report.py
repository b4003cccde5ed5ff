"""Writes the report of an evaluation: for evaluate.py a directory, for a training one page in its run directory."""

from __future__ import annotations

import importlib.util
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.distributed.world import World
from utils.errors import UserError
from utils.evaluation import figures, html_report, plotting, results
from utils.evaluation.results import Results
from utils.files import atomic_directory
from utils.runs.logger import read_records

PAGE, SUMMARY, ARRAYS = "report.html", "evaluation.json", "evaluation.npz"
REPORT_FILES = {PAGE, SUMMARY, ARRAYS, *(f"{name}.png" for name in figures.PICTURES)}

log = logging.getLogger(__name__)


def check_directory(output: Path, overwrite: bool) -> None:
    """UserError if a report must not or cannot be written there."""
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file; give the name of a directory")
    try:
        existing = {path.name for path in output.iterdir()} if output.exists() else set()
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.absolute().parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}; give another --output") from None
    others = sorted(existing - REPORT_FILES)
    if others:  # --overwrite would remove them
        raise UserError(f"output {output} holds {others[0]}, which is not part of a report; give another --output")
    if existing and not overwrite:
        raise UserError(f"output {output} exists; give --overwrite to replace it, or another --output")


def write_report(
    output: Path, found: Results, provenance: Mapping[str, Any], checkpoint: str | None, world: World
) -> None:
    """Writes report.html, its pictures, evaluation.json and evaluation.npz atomically, on rank 0. Every rank calls it.

    If `checkpoint` is a run directory with earlier evaluations of the same volume, the page shows them and its losses.
    """
    with world.raise_together():
        if not world.is_root:
            return
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with atomic_directory(output) as partial:
                results.save(found, partial / ARRAYS)
                content = json.dumps(_summary(found, provenance), indent=2) + "\n"
                (partial / SUMMARY).write_text(content, encoding="utf-8")
                _draw(partial, found, provenance, Path(checkpoint) if checkpoint else None)
        except OSError as error:
            raise UserError(f"cannot write {output}: {error.strerror or error}; give another --output") from None
        log.info("report: %s", output / PAGE)


def _summary(found: Results, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The content of evaluation.json."""
    return {
        "scalars": found.scalars(),
        "spectra": {
            name: {
                f"k ({found.wavenumber_unit})": _rounded(spectrum.k),
                "P ratio": _rounded(spectrum.ratio),
                "r": _rounded(spectrum.correlation),
            }
            for name, spectrum in found.spectra.items()
        },
        "metadata": dict(found.metadata),
        "provenance": dict(provenance),
    }


def _rounded(values: np.ndarray) -> list[float | None]:
    """Six significant digits; None for non-finite values, since JSON has no NaN."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def _draw(folder: Path, found: Results, provenance: Mapping[str, Any], run: Path | None) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        log.info("matplotlib is not installed (pip install matplotlib): no pictures, no report")
        return
    for name, figure in figures.draw_all(found):
        (folder / f"{name}.png").write_bytes(plotting.encode_png(figure))
    history: Sequence[Results] = [found]
    records: Sequence[Mapping[str, Any]] = ()
    if run is not None and (run / results.FOLDER).is_dir():
        history, records = _history_with(found, run), read_records(run / "metrics.jsonl")
    html_report.write(folder / PAGE, history, {**found.metadata, **provenance}, records)


def _history_with(found: Results, run: Path) -> list[Results]:
    """The run's evaluations of the same volume, with `found` in place of the one at its step."""
    volume, step = Path(str(found.metadata.get("input"))).resolve(), found.metadata.get("step")
    history = [
        each
        for each in results.load_history(run / results.FOLDER)
        if Path(str(each.metadata.get("input"))).resolve() == volume and each.metadata.get("step") != step
    ]
    return sorted([*history, found], key=lambda each: each.metadata.get("step") or 0)


def write_run_report(run: Path) -> list[Path]:
    """Writes report.html into a run directory that has evaluations; returns the files written."""
    history = results.load_history(run / results.FOLDER)
    if not history or importlib.util.find_spec("matplotlib") is None:
        return []
    provenance = json.loads((run / "provenance.json").read_text(encoding="utf-8"))
    metadata = {key: value for key, value in {**history[-1].metadata, **provenance}.items() if key != "earlier"}
    html_report.write(run / PAGE, history, metadata, read_records(run / "metrics.jsonl"))
    return [run / PAGE]
