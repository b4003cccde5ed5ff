"""Figures of a training run: its losses, slices of one validation crop, and the results of its evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from utils.config import Config
from utils.data import Loader
from utils.data.channels import volume_channels
from utils.evaluation.figures import PALETTE, draw_slices, encode_png, new_figure
from utils.evaluation.results import Results
from utils.files import atomic_write
from utils.steps.eager import EagerStep
from utils.training import tags
from utils.training.loggers.base import Logger, read_records

LOSSES = {
    tags.STEP_LOSS: "training, per interval",
    tags.TRAIN_LOSS: "training, per epoch",
    tags.VALID_LOSS: "validation",
}


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


def write_slices(step: EagerStep, loader: Loader, config: Config, directory: Path, logger: Logger, steps: int) -> Path:
    """Draws slices of the first validation crop into slices.png, and into TensorBoard at step `steps`."""
    path = directory / "slices.png"
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
    logger.figure(tags.SLICES, figure, steps)
    return path


def _write(figure: Figure, path: Path) -> None:
    """Writes a picture atomically, since the disk may be full."""
    with atomic_write([path]) as (partial,):
        partial.write_bytes(encode_png(figure))


def evaluation_curves(history: Sequence[Results]) -> Figure:
    """L1 and R² of each channel, and the correlation of each field at three wavenumbers, over the epochs."""
    last = history[-1]
    channels, epochs = (
        [channel.name for channel in last.channels],
        [evaluation.metadata["epoch"] for evaluation in history],
    )
    first = next(iter(last.spectra.values()))
    panels: list[tuple[str, list[str], list[Any]]] = [
        ("L1", channels, [evaluation.l1 for evaluation in history]),
        ("R²", channels, [evaluation.r2 for evaluation in history]),
    ]
    for shell in first.reference_shells:
        title = f"correlation r at k = {first.k[shell]:.2g} {last.wavenumber_unit}"
        values = [[spectrum.correlation[shell] for spectrum in evaluation.spectra.values()] for evaluation in history]
        panels.append((title, list(last.spectra), values))
    figure = new_figure(9.5, 6.4)
    grid = figure.subplots(2, 3, sharex=True)
    grid[0, 2].set_axis_off()
    for axes, (title, names, values) in zip((*grid[0, :2], *grid[1]), panels, strict=True):
        axes.set_prop_cycle(color=PALETTE)
        axes.plot(epochs, np.array(values), label=names, marker="o", markersize=3.5)
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        low, high = axes.get_ylim()
        axes.set_ylim(low if high < 0 else max(low, -0.5))  # the first evaluations may be far below
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False)
    figure.legend(*grid[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure
