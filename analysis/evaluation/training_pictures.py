"""Pictures of a training run: its evaluations, its losses, and slices of two validation crops."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import numpy as np
import torch

from analysis.evaluation import drawing, report, results
from analysis.evaluation.results import Results
from utils.config import Config
from utils.config.channels import GAS, density_place
from utils.data.loaders import Loader
from utils.data.task import task_of
from utils.files import atomic_write
from utils.log import errors_as_warnings
from utils.run import tags
from utils.run.open_run import Run
from utils.run.state import FitResult
from utils.steps.eager import EagerStep

EXAMINED = 16  # validation crops from which those of the slices are chosen, at most
STRUCTURE, ERROR = "the most structure", "the largest error"


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
    """Draws all pictures of a run, slices also for TensorBoard, and writes its report; gives a log line for each file.

    `drawn` are the pictures of its last evaluation; empty: it draws them.
    """
    directory = run.directory
    with errors_as_warnings(f"Cannot draw pictures in {directory}"):
        records = directory.read_metrics()
        curves = drawing.submit(drawing.picture, report.TRAINING, records, config.loss, directory.title)
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
        if page := report.write_run_report(directory, result.goodput, drawn):
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
