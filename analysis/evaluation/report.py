"""The report of an evaluation: for evaluate.py a directory, for train.py one page in the run directory."""

import base64
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.evaluation import drawing, results, tables
from analysis.evaluation.results import Results
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_write, make_output_directory, to_json
from utils.log import errors_as_warnings
from utils.progress import Progress
from utils.run import tags
from utils.run.directory import RunDirectory

PAGE, SUMMARY, ARRAYS, MEANS = "report.html", "evaluation.json", "evaluation.npz", "summary.json"
PAGES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
TRAINING = "loss_curves"  # a picture of the page, and its name in drawing.py
ORIGIN = ["run", "checkpoint", "prediction", "epoch", "step", "input", "windows"]  # shown in this order
ORIGIN += ["date", "git_commit", "device", "goodput"]
SPACE = 2**20  # bytes that a report needs at least

log = logging.getLogger(__name__)


def check_directories(outputs: Sequence[Path], overwrite: bool) -> None:
    """UserError if a report must not or cannot be written to one of them; they are in the first one."""
    for output in outputs:
        if output.exists() and not output.is_dir():
            raise UserError(f"output {output} is a file; give the name of a directory")
        if (output / PAGE).exists() and not overwrite:
            raise UserError(f"output {output} has a report; give --overwrite to replace it, or another --output")
    make_output_directory(outputs[0].absolute().parent, SPACE * len(outputs))


def write_report(output: Path, evaluation: Results, provenance: Mapping[str, Any], world: World) -> None:
    """Writes the page, the results and the pictures for which they have data, and logs the tables, on rank 0."""
    with world.raise_together():
        if not world.is_root:
            return
        for note in tables.notes(evaluation.metadata):
            log.warning("Note: %s", note)
        for line in tables.lines(evaluation):
            log.info(line)
        output.mkdir(exist_ok=True, parents=True)
        results.save(evaluation, output / ARRAYS)  # first: they are kept if the process that draws is killed
        with atomic_write([output / SUMMARY]) as (partial,):
            partial.write_text(to_json(_summary(evaluation, provenance)))
        log.info("drawing pictures in %s", output)
        world.pulse.enter("pictures")
        pictures = _completed(drawing.draw(evaluation) | _training_curves(evaluation))
        contents = {f"{name}.png": picture for name, picture in pictures.items() if name != TRAINING}
        contents[PAGE] = page(evaluation, pictures, provenance).encode()
        with atomic_write([output / name for name in contents]) as partials:
            for partial, content in zip(partials, contents.values(), strict=True):
                partial.write_bytes(content)
        for name in {*results.PICTURES} - {*pictures}:  # of an earlier report
            (output / f"{name}.png").unlink(missing_ok=True)
        log.info("report: %s", output / PAGE)


def write_summary(output: Path, evaluations: Sequence[dict[str, Any]], record: dict[str, Any], world: World) -> None:
    """Writes and logs means and standard deviations of the scalars of several evaluations, on rank 0."""
    with world.raise_together():
        if not world.is_root:
            return
        measures, template = tables.spreads(evaluations), PAGES.get_template("summary.html.j2")
        columns = [*next(iter(measures.values()))][:-1]  # without the values
        rows = [[tag.partition(" ")[2], *(f"{measures[tag][key]:.4g}" for key in columns)] for tag in measures]
        for line in tables.aligned([["measure", *columns], *rows]):
            log.info(line)
        with atomic_write([output / MEANS, output / PAGE]) as (values, page):
            values.write_text(to_json({"measures": measures, "evaluations": evaluations, "provenance": record}))
            page.write_text(template.render(evaluations=evaluations, columns=columns, rows=rows), encoding="utf-8")
        log.info("summary: %s", output / PAGE)


def write_run_report(run: RunDirectory, goodput: float | None, drawn: Mapping[str, Future[bytes]]) -> Path | None:
    """Writes the report of a run's last evaluation, if it has one; draws its pictures unless `drawn` has them."""
    if not (steps := run.evaluated_steps()):
        return None
    evaluation = results.load(run.evaluation(steps[-1]))
    losses = {record["step"]: record[tags.VALID_LOSS] for record in run.read_metrics() if tags.VALID_LOSS in record}
    known = {"run": str(run), "final_loss": losses.get(evaluation.metadata["step"])}
    known |= {} if goodput is None else {"goodput": f"{goodput:.1%}"}
    evaluation = replace(evaluation, metadata={**evaluation.metadata, **known})
    pictures = _completed({**(drawn or drawing.draw(evaluation)), **_training_curves(evaluation)})
    provenance = run.read_provenance()
    provenance.pop("earlier", None)
    with atomic_write([run.report]) as (partial,):
        partial.write_text(page(evaluation, pictures, provenance), encoding="utf-8")
    return run.report


def _completed(drawn: Mapping[str, Future[bytes]]) -> dict[str, bytes]:
    """The pictures, once they are drawn; a picture that cannot be drawn is a warning."""
    pictures = {}
    with Progress("drawing", len(drawn), "pictures") as progress:
        for name, picture in drawn.items():
            with errors_as_warnings(f"The report lacks the picture {name}"):
                pictures[name] = picture.result()
            progress.advance()
    return pictures


def _training_curves(evaluation: Results) -> dict[str, Future[bytes]]:
    """The picture of the training run's losses, if its records are there."""
    run = evaluation.run
    if not (run and (records := run.read_metrics())):
        return {}
    loss = evaluation.metadata.get("loss", "")
    return {TRAINING: drawing.submit(drawing.picture, TRAINING, records, loss, run.title)}


def _summary(evaluation: Results, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The content of evaluation.json; statistics and flux have the names of evaluation.npz."""
    flux = evaluation.flux
    statistics = {name: statistic.summary(evaluation) for name, statistic in evaluation.statistics.items()}
    return {
        "scalars": evaluation.scalars(),
        "spectra": {
            name: {
                f"k ({evaluation.wavenumber_unit})": _rounded(spectrum.k),
                "P ratio": _rounded(spectrum.ratio),
                "r": _rounded(spectrum.correlation),
                **{f"k at {level}": k for level, k in spectrum.resolutions.items()},
            }
            for name, spectrum in evaluation.spectra.items()
        },
        **{name: _rounded(part) for name, part in statistics.items() if part},
        **({"flux": _rounded(asdict(flux))} if flux else {}),
        "metadata": {**evaluation.metadata, "cell": evaluation.cell},
        "provenance": dict(provenance),
    }


def _rounded(value: Any) -> Any:
    """Arrays as lists with six significant digits, also in dictionaries."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | list):
        return [_rounded(part) for part in value]
    return float(f"{value:.6g}")


def page(evaluation: Results, pictures: Mapping[str, bytes], provenance: Mapping[str, Any]) -> str:
    """One self-contained HTML file, without scripts or links; `pictures` are PNG files by name."""
    flux, metadata = evaluation.flux, {**evaluation.metadata, "cell (Mpc/h)": evaluation.cell, **provenance}
    return PAGES.get_template("report.html.j2").render(
        title=": ".join(filter(None, ("Evaluation", evaluation.title))),
        conclusion=tables.conclusion(evaluation),
        notes=tables.notes(evaluation.metadata),
        summary=tables.summary_table(evaluation),
        validation_loss=[evaluation.metadata.get(key) for key in ("loss", "final_loss")],
        fields=tables.field_table(evaluation),
        statistics=[(name, part, part.table(evaluation)) for name, part in evaluation.statistics.items()],
        flux=flux,
        flux_table=tables.flux_table(flux) if flux else None,
        pictures={name: base64.b64encode(picture).decode("ascii") for name, picture in pictures.items()},
        origin=[(key, metadata[key]) for key in ORIGIN if key in metadata],
        metadata=[(key, value if isinstance(value, str) else json.dumps(value)) for key, value in metadata.items()],
    )
