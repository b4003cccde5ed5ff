"""Figures of a training run: its losses, and slices of two validation crops."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from analysis.evaluation import figures, report
from analysis.evaluation.loss_curves import loss_curves, progress
from analysis.evaluation.results import Results
from utils.config import Config
from utils.data.loaders import Loader
from utils.files import atomic_write
from utils.run import tags
from utils.run.open_run import Run
from utils.run.state import FitResult
from utils.steps.eager import EagerStep
from utils.volumes.channels import volume_channels

EXAMINED = 16  # validation crops from which those of the slices are chosen, at most
STRUCTURE, ERROR = "the most structure", "the largest error"


def draw_evaluation(results: Results, run: Run, step: int) -> None:
    """Draws the figures of an evaluation into TensorBoard."""
    for name, figure in figures.draw_all(results).items():
        run.records.figure(tags.EVALUATION_FIGURE + name, figure, step)
        run.world.pulse.advance()


def draw_run(step: EagerStep, loader: Loader, config: Config, run: Run, result: FitResult) -> Iterator[str]:
    """Draws all pictures of a run, and the report of its last evaluation; gives a log line for each file."""
    directory, records = run.directory, run.directory.read_metrics()
    _write(loss_curves(records, config.loss, directory.title), directory.loss_curves)
    yield f"picture: {directory.loss_curves}"
    if not config.is_classification:
        title = f"{directory.title}, {progress(records)}"
        for path in write_slices(step, loader, config, run, result.steps, title):
            yield f"picture: {path}"
    if page := report.write_run_report(run.directory, result.goodput):
        yield f"report: {page}"


def write_slices(step: EagerStep, loader: Loader, config: Config, run: Run, steps: int, title: str) -> Iterator[Path]:
    """Draws planes of the validation crops into two files, and into TensorBoard at step `steps`."""
    places = (run.directory.slices, tags.SLICES), (run.directory.error_slices, tags.SLICES_LARGEST_ERROR)
    for (name, planes), (path, tag) in zip(choose_planes(step, loader).items(), places, strict=True):
        crop = f"{title}\nvalidation crop with {name}"
        figure = figures.draw_slices(*volume_channels(config), planes, None, crop)
        _write(figure, path)
        run.records.figure(tag, figure, steps)
        yield path


def choose_planes(step: EagerStep, loader: Loader) -> dict[str, dict[str, np.ndarray]]:
    """The planes across x with the most structure and the largest error, of the first EXAMINED crops; ties: the first.

    Structure is the standard deviation of the first target channel, the density of the gas; the error is the mean
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
            deviation = fields["target"][0].std((1, 2))
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


def _write(figure: Figure, path: Path) -> None:
    """Writes a picture atomically, since the disk may be full."""
    with atomic_write([path]) as (partial,):
        partial.write_bytes(figures.encode_png(figure))
