"""The report of an evaluation: for evaluate.py a directory, for train.py one page in the run directory."""

from __future__ import annotations

import base64
import json
import logging
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from utils.distributed.world import World
from utils.errors import UserError
from utils.evaluation import figures, results, training_figures
from utils.evaluation.results import FGPA, REAL_FGPA, Flux, Results, Spectrum
from utils.files import atomic_directory, atomic_write
from utils.provenance import read_provenance
from utils.training import evaluations

PAGE, SUMMARY, ARRAYS = "report.html", "evaluation.json", "evaluation.npz"
REPORT_FILES = {PAGE, SUMMARY, ARRAYS, *(f"{name}.png" for name in figures.PICTURES)}
TEMPLATE = Path(__file__).with_name("report.html.j2")
GOOD_CORRELATION = 0.9
SPACE = 2**20  # bytes that a report needs at least

log = logging.getLogger(__name__)

Table = tuple[list[str], list[list[str]]]  # header and rows


# --- files -----------------------------------------------------------------------------------------------------------


def check_directory(output: Path, overwrite: bool) -> None:
    """UserError if a report must not or cannot be written there."""
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file; give the name of a directory")
    existing = {path.name for path in output.iterdir()} if output.exists() else set()
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output.absolute().parent) as file:
        file.write(bytes(SPACE))
    others = sorted(existing - REPORT_FILES)
    if others:  # --overwrite would remove them
        raise UserError(f"output {output} holds {others[0]}, which is not part of a report; give another --output")
    if existing and not overwrite:
        raise UserError(f"output {output} exists; give --overwrite to replace it, or another --output")


def write_report(output: Path, evaluation: Results, provenance: Mapping[str, Any], world: World) -> None:
    """Writes the files of REPORT_FILES that the results have data for, and logs the main results, on rank 0."""
    with world.raise_together():
        if not world.is_root:
            return
        for line in evaluation.lines():
            log.info(line)
        pictures = {name: figures.encode_png(figure) for name, figure in figures.draw_all(evaluation).items()}
        with atomic_directory(output) as partial:
            results.save(evaluation, partial / ARRAYS)
            (partial / SUMMARY).write_text(
                json.dumps(_summary(evaluation, provenance), indent=2) + "\n", encoding="utf-8"
            )
            for name, picture in pictures.items():
                (partial / f"{name}.png").write_bytes(picture)
            (partial / PAGE).write_text(page(evaluation, pictures, provenance), encoding="utf-8")
        log.info("report: %s", output / PAGE)


def write_run_report(run: Path) -> list[Path]:
    """Writes report.html into a run directory that has evaluations; returns the files written."""
    history = results.load_history(run / evaluations.FOLDER)
    if not history:
        return []
    drawn = figures.draw_all(history[-1]) | {"evaluation_curves": training_figures.evaluation_curves(history)}
    pictures = {name: figures.encode_png(figure) for name, figure in drawn.items()}
    provenance = read_provenance(run / "provenance.json")
    provenance.pop("earlier", None)
    with atomic_write([run / PAGE]) as (partial,):
        partial.write_text(page(history[-1], pictures, provenance), encoding="utf-8")
    return [run / PAGE]


def _summary(evaluation: Results, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The content of evaluation.json."""
    return {
        "scalars": evaluation.scalars(),
        "spectra": {
            name: {
                f"k ({evaluation.wavenumber_unit})": _rounded(spectrum.k),
                "P ratio": _rounded(spectrum.ratio),
                "r": _rounded(spectrum.correlation),
            }
            for name, spectrum in evaluation.spectra.items()
        },
        **({"flux": _flux_summary(evaluation.flux)} if evaluation.flux else {}),
        "metadata": {**evaluation.metadata, "cell": evaluation.cell},
        "provenance": dict(provenance),
    }


def _flux_summary(flux: Flux) -> dict[str, Any]:
    """The flux in evaluation.json."""
    return {
        "redshift": flux.redshift,
        "mean flux": flux.mean_flux,
        "sight-lines along x, y, z": flux.sightlines,
        "smoothing of the baseline (Mpc/h)": flux.smoothing,
        "k (s/km)": _rounded(flux.k),
        **{f"k along {axis} (s/km)": _rounded(k) for axis, k in zip("xyz", flux.axis_k, strict=True)},
        "PDF bin edges": _rounded(flux.edges),
        "fields": {
            name: {
                "scale": _rounded(np.array([field.scale]))[0],
                "P1D (km/s)": _rounded(field.power),
                **{
                    f"P1D along {axis} (km/s)": _rounded(power)
                    for axis, power in zip("xyz", field.axis_power, strict=True)
                },
                "PDF": _rounded(field.pdf),
            }
            for name, field in flux.fields.items()
        },
    }


def _rounded(values: np.ndarray) -> list[float | None]:
    """Six significant digits; None for non-finite values, since JSON has no NaN."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


# --- the page --------------------------------------------------------------------------------------------------------


def page(evaluation: Results, pictures: Mapping[str, bytes], provenance: Mapping[str, Any]) -> str:
    """One self-contained HTML file, without scripts or links; `pictures` are PNG files by name."""
    flux, metadata = evaluation.flux, {**evaluation.metadata, "cell (Mpc/h)": evaluation.cell, **provenance}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=f"Evaluation: epoch {metadata['epoch']}" if "epoch" in metadata else "Evaluation",
        channels=_channel_table(evaluation),
        fields=_field_table(evaluation),
        flux=_flux_table(flux) if flux else None,
        mean_flux=f", {flux.mean_flux:.4g} at redshift {flux.redshift:g}" if flux else "",
        baseline=_baseline_text(flux) if flux else "",
        pictures={name: base64.b64encode(picture).decode("ascii") for name, picture in pictures.items()},
        metadata=[(key, value if isinstance(value, str) else json.dumps(value)) for key, value in metadata.items()],
    )


def _channel_table(evaluation: Results) -> Table:
    rows = []
    for channel, l1, r2 in zip(evaluation.channels, evaluation.l1, evaluation.r2, strict=True):
        error = l1 * channel.scale / (math.log(10) if channel.is_log else 1)
        mean = f"{_number(error)} {figures.residual_unit(channel)}" if channel.unit else "unknown"
        rows.append([channel.name, f"{l1:.5f}", _number(r2, 4), channel.unit or "unknown", mean])
    rows.append(["all channels", f"{evaluation.l1.mean():.5f}", "", "", ""])
    if math.isfinite(evaluation.divergence_r2):
        rows.append(["velocity divergence", "", _number(evaluation.divergence_r2, 4), "", ""])
    return ["channel", "L1 of channel values", "R² of channel values", "unit", "mean error"], rows


def _field_table(evaluation: Results) -> Table:
    """Correlation and power ratio of each field at the reference wavenumbers, and the first k of poor correlation."""
    first = next(iter(evaluation.spectra.values()))
    ks, unit = [f"{k:.2g}" for k in first.k[first.reference_shells]], evaluation.wavenumber_unit
    header = ["field", *(f"r at k = {k} {unit}" for k in ks), *(f"power ratio at {k}" for k in ks)]
    header.append(f"r below {GOOD_CORRELATION} from k")
    rows = []
    for name, spectrum in evaluation.spectra.items():
        shells = spectrum.reference_shells
        values = [*spectrum.correlation[shells], *spectrum.ratio[shells]]
        rows.append([name, *map(_number, values), _correlation_limit(spectrum)])
    return header, rows


def _flux_table(flux: Flux) -> Table:
    """Mean flux before rescaling, and deviations of P1D and PDF from those of the target."""
    ks = [f"{flux.k[mode]:.2g}" for mode in flux.reference_modes]
    header = ["field", "mean flux before rescaling", "factor of τ", *(f"P1D ratio at k = {k} s/km" for k in ks)]
    header += [f"mean |P1D ratio − 1| to k = {flux.largest_k:.2g}", "PDF distance"]
    rows = []
    for name, field in flux.fields.items():
        comparisons: list[float] = []
        if name in flux.ratios:
            comparisons = [*flux.ratios[name][flux.reference_modes], flux.power_errors[name], flux.pdf_distances[name]]
        values = [*map(_number, (field.unscaled_mean, field.scale, *comparisons))]
        rows.append([name, *values, *[""] * (len(header) - 1 - len(values))])
    return header, rows


def _baseline_text(flux: Flux) -> str:
    """The definition of the baseline, as far as it differs between evaluations."""
    if REAL_FGPA not in flux.fields and FGPA not in flux.fields:
        return "The unit of the dark-matter density is unknown, so there is no baseline."
    smoothing = f"smoothed by {flux.smoothing:g} Mpc/h" if flux.smoothing else "not smoothed: the cells are too large"
    velocities = "" if FGPA in flux.fields else ", in real space: the input has no velocities"
    return f"The baseline, FGPA, is computed from the dark matter, {smoothing}{velocities}."


def _correlation_limit(spectrum: Spectrum) -> str:
    """The first k whose correlation is not good."""
    bad = np.flatnonzero(~(spectrum.correlation >= GOOD_CORRELATION))  # NaN counts as bad
    return f"{spectrum.k[bad[0]]:.2g}" if bad.size else "none"


def _number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "non-finite"
