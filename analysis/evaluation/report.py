"""The report of an evaluation: for evaluate.py a directory; for train.py a page and pictures in the run directory."""

import base64
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from analysis.evaluation import drawing, results, tables
from analysis.evaluation.results import Results
from utils.config import Config
from utils.config.channels import GAS, density_place
from utils.data.loaders import Loader
from utils.data.task import task_of
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_write, make_output_directory, to_json
from utils.log import errors_as_warnings
from utils.progress import Progress
from utils.run import tags
from utils.run.directory import RunDirectory
from utils.run.open_run import Run
from utils.run.state import FitResult
from utils.steps.eager import EagerStep

PAGE, SUMMARY, ARRAYS, MEANS = "report.html", "evaluation.json", "evaluation.npz", "summary.json"
PAGES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
TRAINING = "loss_curves"  # a picture of the page, and its name in drawing.py
ORIGIN = ["run", "checkpoint", "prediction", "epoch", "step", "input", "windows"]  # shown in this order
ORIGIN += ["date", "git_commit", "device", "goodput"]
SPACE = 2**20  # bytes that a report needs at least
EXAMINED = 16  # validation crops from which those of the slices are chosen, at most
STRUCTURE, ERROR = "the most structure", "the largest error"

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
        for note in tables.notes({**evaluation.metadata, "warnings": ()}):  # these are logged
            log.warning("Note: %s", note)
        for line in tables.lines(evaluation):
            log.info(line)
        output.mkdir(exist_ok=True, parents=True)
        results.save(evaluation, output / ARRAYS)  # first: they are kept if the process that draws is killed
        with atomic_write([output / SUMMARY]) as (partial,):
            partial.write_text(to_json(_summary(evaluation, provenance)))
        (output / PAGE).unlink(missing_ok=True)  # of an earlier report: the process may be killed while it draws
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


def _write_run_report(run: RunDirectory, goodput: float | None, drawn: Mapping[str, Future[bytes]]) -> Path | None:
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


def save_and_draw(evaluation: Results, run: Run, step: int, draws: bool) -> dict[str, Future[bytes]]:
    """Saves an evaluation and, if `draws`, draws it for TensorBoard; a full disk does not stop the run."""
    directory, drawn = run.directory, drawing.draw(evaluation) if draws else {}
    with errors_as_warnings(f"Cannot save the evaluation in {directory.evaluations}"):
        results.save(evaluation, directory.evaluation(step))
    run.world.pulse.enter("pictures")
    with errors_as_warnings(f"Cannot draw pictures in {directory}"):
        for name, picture in drawn.items():
            run.records.picture(tags.EVALUATION_PICTURE + name, picture.result(), step)
            run.world.pulse.advance()
    return drawn


def draw_run(
    step: EagerStep, loader: Loader, config: Config, run: Run, result: FitResult, drawn: Mapping[str, Future[bytes]]
) -> Iterator[str]:
    """Draws all pictures of a run, unless `drawn` has them, and writes its report; gives a log line for each file."""
    directory = run.directory
    with errors_as_warnings(f"Cannot draw pictures in {directory}"):
        records = directory.read_metrics()
        curves = drawing.submit(drawing.picture, TRAINING, records, config.loss, directory.title)
        pictures = [(directory.loss_curves, "", curves)]
        if task_of(config).is_3d:
            title = ", ".join(filter(None, (directory.title, tags.progress(records))))
            places = (directory.slices, tags.SLICES), (directory.error_slices, tags.SLICES_LARGEST_ERROR)
            chosen = choose_planes(step, loader, density_place(config.volume_channels[1], GAS) or 0)
            for (name, planes), place in zip(chosen.items(), places, strict=True):
                crop = *config.volume_channels, planes, None, f"{title}\nvalidation crop with {name}"
                pictures.append((*place, drawing.submit(drawing.picture, "crop", *crop)))
        for path, tag, picture in pictures:
            with atomic_write([path]) as (partial,):  # since the disk may be full
                partial.write_bytes(picture.result())
            if tag:
                run.records.picture(tag, picture.result(), result.steps)
            run.world.pulse.advance()
            yield f"picture: {path}"
        if page := _write_run_report(directory, result.goodput, drawn):
            yield f"report: {page}"


def choose_planes(step: EagerStep, loader: Loader, density: int) -> dict[str, dict[str, np.ndarray]]:
    """The planes across x with the most structure and the largest error, of the first EXAMINED crops; ties: the first.

    Structure is the standard deviation of a target channel, the `density` of the gas; the error is the mean
    |prediction − target|, and a prediction that is not finite has the largest.
    """
    chosen: dict[str, dict[str, np.ndarray]] = {}  # planes as draw_slices takes them
    best: dict[str, float] = {}
    batches, examined = loader.epoch(0), 0
    for batch in batches:
        # Of the whole batch, as in a validation: another size would need other kernels.
        predictions = step.predict(*batch.network_inputs)
        for crop in range(min(len(batch.inputs), EXAMINED - examined)):
            parts = {"input": batch.inputs, "target": batch.targets, "predicted": predictions}
            fields = {key: part[crop].float() for key, part in parts.items()}  # [C, x, y, z]
            difference = (fields["predicted"] - fields["target"]).abs().mean((0, 2, 3))
            deviation = fields["target"][density].std((1, 2))
            for name, scores in ((STRUCTURE, deviation), (ERROR, difference.nan_to_num(nan=torch.inf))):
                score, place = (float(value) for value in scores.max(0))
                if name not in best or score > best[name]:
                    # Copies: the loader reuses its buffers.
                    best[name] = score
                    chosen[name] = {key: field[:, int(place)].cpu().numpy().copy() for key, field in fields.items()}
        examined += len(batch.inputs)
        if examined >= EXAMINED:
            break
    batches.close()
    return chosen
