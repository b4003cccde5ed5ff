"""Figures of a training run: its losses, and slices of one validation crop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from utils.config import Config
from utils.data import Loader
from utils.data.channels import volume_channels
from utils.evaluation import report
from utils.evaluation.figures import draw_slices, encode_png, new_figure
from utils.files import atomic_write
from utils.steps.eager import EagerStep
from utils.training import tags
from utils.training.loggers.base import read_records
from utils.training.run import Run

LOSSES = {
    tags.STEP_LOSS: "training, per interval",
    tags.TRAIN_LOSS: "training, per epoch",
    tags.VALID_LOSS: "validation",
}


def draw_run(step: EagerStep, loader: Loader, config: Config, run: Run, steps: int) -> Iterator[str]:
    """Draws all pictures of a run, and the report of its last evaluation; gives a log line for each file."""
    yield f"picture: {write_loss_curves(run.directory, config.loss)}"
    if not config.is_classification:
        yield f"picture: {write_slices(step, loader, config, run, steps)}"
    for path in report.write_run_report(run.directory):
        yield f"report: {path}"


def write_loss_curves(directory: Path, loss: str) -> Path:
    """Draws the losses of a run's metrics.jsonl into loss_curves.png; `loss` is the config's."""
    path = directory / "loss_curves.png"
    label = {"l1": "mean absolute error", "mse": "mean squared error"}.get(loss, loss.replace("_", "-"))
    _write(loss_curves(read_records(directory / "metrics.jsonl"), label), path)
    return path


def loss_curves(records: Sequence[Mapping[str, Any]], measure: str) -> Figure:
    """Losses over steps and, below them, the metrics of each validation; `measure` names the loss."""
    names = sorted({name for record in records for name in record if name.endswith(tags.VALID_SUFFIX)} - {*LOSSES})
    figure = new_figure(7, 6.4 if names else 4.2)
    panels = figure.subplots(2 if names else 1, sharex=True, squeeze=False)[:, 0]
    panels[0].set(ylabel=f"loss ({measure})", yscale="log")
    panels[-1].set(xlabel="step")
    if names:
        panels[1].set(ylabel="validation")
    labels = {name: name.removesuffix(tags.VALID_SUFFIX).lower().replace("$", r"\$") for name in names}
    for axes, labeled in zip(panels, (LOSSES, labels), strict=False):
        for name, label in labeled.items():
            points = [(record["step"], record[name]) for record in records if name in record]
            if points:
                style = {"color": "0.7"} if name == tags.STEP_LOSS else {"marker": "o", "markersize": 4}
                axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def write_slices(step: EagerStep, loader: Loader, config: Config, run: Run, steps: int) -> Path:
    """Draws slices of the first validation crop into slices.png, and into TensorBoard at step `steps`."""
    path = run.directory / "slices.png"
    batches = loader.epoch(0)
    inputs, targets = (part[:1] for part in next(batches))
    fields = {"input": inputs, "target": targets, "predicted": step.predict(inputs)}
    batches.close()
    middle = targets.shape[2] // 2
    figure = draw_slices(
        *volume_channels(config),
        {name: field[0, :, middle].float().cpu().numpy() for name, field in fields.items()},
        cell=None,
    )
    _write(figure, path)
    run.records.figure(tags.SLICES, figure, steps)
    return path


def _write(figure: Figure, path: Path) -> None:
    """Writes a picture atomically, since the disk may be full."""
    with atomic_write([path]) as (partial,):
        partial.write_bytes(encode_png(figure))
