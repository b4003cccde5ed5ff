"""The report of an evaluation: for evaluate.py a directory, for train.py one page in the run directory."""

import base64
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from analysis.evaluation import figures, results, tables
from analysis.evaluation.loss_curves import loss_curves
from analysis.evaluation.results import Results
from analysis.lyman_alpha.results import FGPA, REAL_FGPA, TRANSFER, Flux
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_write, make_output_directory, to_json
from utils.run import tags
from utils.run.directory import RunDirectory

PAGE, SUMMARY, ARRAYS = "report.html", "evaluation.json", "evaluation.npz"
TEMPLATE = Path(__file__).with_name("report.html.j2")
TRAINING = "loss_curves"  # a picture of the page
ORIGIN = (
    "run",
    "checkpoint",
    "prediction",
    "epoch",
    "step",
    "input",
    "windows",
    "date",
    "git_commit",
    "device",
    "goodput",
)
SPACE = 2**20  # bytes that a report needs at least

log = logging.getLogger(__name__)


# --- files -----------------------------------------------------------------------------------------------------------


def check_directory(output: Path, overwrite: bool) -> None:
    """UserError if a report must not or cannot be written there."""
    if output.exists() and not output.is_dir():
        raise UserError(f"output {output} is a file; give the name of a directory")
    if (output / PAGE).exists() and not overwrite:
        raise UserError(f"output {output} has a report; give --overwrite to replace it, or another --output")
    make_output_directory(output.absolute().parent, SPACE)


def write_report(output: Path, evaluation: Results, provenance: Mapping[str, Any], world: World) -> None:
    """Writes the page, the results and the pictures for which they have data, and logs the tables, on rank 0."""
    with world.raise_together():
        if not world.is_root:
            return
        if "note" in evaluation.metadata:
            log.warning("Note: %s", evaluation.metadata["note"])
        for line in tables.lines(evaluation):
            log.info(line)
        log.info("drawing pictures in %s", output)
        with world.heartbeat.quiet():
            pictures = _draw(evaluation)
        contents = {f"{name}.png": picture for name, picture in pictures.items()}
        contents[SUMMARY] = to_json(_summary(evaluation, provenance)).encode()
        contents[PAGE] = page(evaluation, pictures | _training_curves(evaluation), provenance).encode()
        output.mkdir(exist_ok=True)
        results.save(evaluation, output / ARRAYS)
        with atomic_write([output / name for name in contents]) as partials:
            for partial, content in zip(partials, contents.values(), strict=True):
                partial.write_bytes(content)
        for name in figures.PICTURES.keys() - pictures.keys():  # of an earlier report
            (output / f"{name}.png").unlink(missing_ok=True)
        log.info("report: %s", output / PAGE)


def write_run_report(run: RunDirectory, goodput: float | None = None) -> list[Path]:
    """Writes report.html, with the last evaluation of a run, into its directory; returns the files written."""
    steps = run.evaluated_steps()
    if not steps:
        return []
    evaluation = results.load(run.evaluation(steps[-1]))
    records = run.read_metrics()
    losses = {record["step"]: record[tags.VALID_LOSS] for record in records if tags.VALID_LOSS in record}
    known = {"run": str(run), "final_loss": losses.get(evaluation.metadata["step"])}
    known |= {} if goodput is None else {"goodput": f"{goodput:.1%}"}
    evaluation = replace(evaluation, metadata={**evaluation.metadata, **known})
    pictures = _draw(evaluation) | _training_curves(evaluation)
    provenance = run.read_provenance()
    provenance.pop("earlier", None)
    with atomic_write([run.report]) as (partial,):
        partial.write_text(page(evaluation, pictures, provenance), encoding="utf-8")
    return [run.report]


def _draw(evaluation: Results) -> dict[str, bytes]:
    return {name: figures.encode_png(figure) for name, figure in figures.draw_all(evaluation).items()}


def _training_curves(evaluation: Results) -> dict[str, bytes]:
    """The picture of the training run's losses, if its records are there."""
    run = evaluation.run
    records = run.read_metrics() if run else []
    if not (run and records):
        return {}
    return {TRAINING: figures.encode_png(loss_curves(records, evaluation.metadata.get("loss", ""), run.title))}


def _summary(evaluation: Results, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The content of evaluation.json."""
    unit, bispectrum = evaluation.wavenumber_unit, evaluation.bispectrum
    triangles = {}
    if bispectrum:  # of log density
        triangles = {f"k ({unit})": bispectrum.k, "B ratio": bispectrum.ratio, "B of the target": bispectrum.target}
    return {
        "scalars": evaluation.scalars(),
        "spectra": {
            name: {
                f"k ({unit})": _rounded(spectrum.k),
                "P ratio": _rounded(spectrum.ratio),
                "r": _rounded(spectrum.correlation),
                **{f"k at {level}": k for level, k in spectrum.resolutions.items()},
            }
            for name, spectrum in evaluation.spectra.items()
        },
        "bispectrum": {name: _rounded(values) for name, values in triangles.items()},
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
        "mu bin edges": _rounded(flux.mu_edges),
        "k of P3D, by mu (h/Mpc)": [*map(_rounded, flux.p3d_k)],
        "k of the bispectra (h/Mpc)": _rounded(flux.flux_bispectrum_k),
        "fields": {
            name: {
                "scale": float(f"{field.scale:.6g}"),
                "P1D (km/s)": _rounded(field.power),
                **{
                    f"P1D along {axis} (km/s)": _rounded(power)
                    for axis, power in zip("xyz", field.axis_power, strict=True)
                },
                "P3D, by mu ((Mpc/h)³)": [*map(_rounded, field.p3d)],
                "bispectra, equilateral and squeezed ((Mpc/h)⁶)": [*map(_rounded, field.flux_bispectrum)],
                "PDF": _rounded(field.pdf),
            }
            for name, field in flux.fields.items()
        },
    }


def _rounded(values: np.ndarray) -> list[float]:
    """Six significant digits."""
    return [float(f"{value:.6g}") for value in values]


# --- the page --------------------------------------------------------------------------------------------------------


def page(evaluation: Results, pictures: Mapping[str, bytes], provenance: Mapping[str, Any]) -> str:
    """One self-contained HTML file, without scripts or links; `pictures` are PNG files by name."""
    flux, metadata = evaluation.flux, {**evaluation.metadata, "cell (Mpc/h)": evaluation.cell, **provenance}
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=": ".join(filter(None, ("Evaluation", evaluation.title))),
        conclusion=tables.conclusion(evaluation),
        summary=tables.summary_table(evaluation),
        validation_loss=_validation_loss(evaluation.metadata),
        channels=tables.channel_table(evaluation),
        fields=tables.field_table(evaluation),
        flux=tables.flux_table(flux) if flux else None,
        mean_flux=f", {flux.mean_flux:.4g} at redshift {flux.redshift:g}" if flux else "",
        baseline=_baseline_text(flux) if flux else "",
        pictures={name: base64.b64encode(picture).decode("ascii") for name, picture in pictures.items()},
        origin=[(key, metadata[key]) for key in ORIGIN if key in metadata],
        metadata=[(key, value if isinstance(value, str) else json.dumps(value)) for key, value in metadata.items()],
    )


def _validation_loss(metadata: Mapping[str, Any]) -> str:
    """The validation loss of the network, as far as it is known: " (l1, 0.00687)"."""
    value = metadata.get("final_loss")
    parts = [metadata.get("loss"), f"{value:.5f}" if isinstance(value, float) else None]
    return f" ({', '.join(filter(None, parts))})" if any(parts) else ""


def _baseline_text(flux: Flux) -> str:
    """The definition of the baseline, as far as it differs between evaluations."""
    if REAL_FGPA not in flux.fields and FGPA not in flux.fields:
        return "The unit of the dark-matter density is unknown, so there is no baseline."
    smoothing = f"smoothed by {flux.smoothing:g} Mpc/h" if flux.smoothing else "not smoothed: the cells are too large"
    velocities = "" if FGPA in flux.fields else ", in real space: the input has no velocities"
    text = f"The baseline, FGPA, is computed from the dark matter, {smoothing}{velocities}."
    if TRANSFER in flux.fields:
        text += " Other baselines are fitted to another volume: the power law of the temperature, and for the transfer "
        text += "function a factor for each wavenumber of log density."
    return text
