"""Pictures of a training: its loss curves, and slices of one validation crop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from utils.data import Loader
from utils.data.files.hdf5 import CHANNEL_NAMES
from utils.evaluation import history_figures
from utils.runs import tags
from utils.runs.logger import Logger, read_records
from utils.steps import Step

DPI = 120
MISSING = "not in the input"


def write_loss_curves(directory: Path, is_classification: bool) -> Path:
    """Draws the losses of a run's metrics.jsonl into loss_curves.png."""
    path = directory / "loss_curves.png"
    label = "cross-entropy" if is_classification else "mean absolute error"
    history_figures.loss_curves(read_records(directory / "metrics.jsonl"), label).savefig(path, dpi=DPI)
    return path


def write_slices(step: Step, loader: Loader, directory: Path, logger: Logger, steps: int) -> Path:
    """Draws slices of the first validation crop into slices.png, and into TensorBoard at step `steps`."""
    path = directory / "slices.png"
    batches = loader.epoch(0)
    inputs, targets = (part[:1] for part in next(batches))
    outputs = step.predict(inputs)
    batches.close()
    crops = [part[0].float().cpu().numpy() for part in (inputs, targets, outputs)]
    figure = _slices(*crops)
    figure.savefig(path, dpi=DPI)
    logger.figure(tags.SLICES, figure, steps)
    return path


def _slices(inputs: np.ndarray, targets: np.ndarray, outputs: np.ndarray) -> Any:
    """The middle plane of a crop [C, D, D, D]; rows are input, target and prediction, columns the target's channels."""
    from matplotlib.figure import Figure

    channels, middle = len(targets), targets.shape[1] // 2
    known = CHANNEL_NAMES["Hydro"]
    names = known if channels == len(known) else tuple(f"channel {channel}" for channel in range(channels))
    figure = Figure(figsize=(2.3 * channels, 7.6), layout="constrained")
    grid = figure.subplots(3, channels, squeeze=False)
    for channel, (column, name) in enumerate(zip(grid.T, names, strict=True)):
        target = targets[channel, middle]
        low, high = float(target.min()), float(target.max())
        colours = "magma" if "density" in name else "inferno"
        if "velocity" in name:
            high = max(abs(low), abs(high))
            low, colours = -high, "RdBu_r"
        planes = [inputs[channel, middle] if channel < len(inputs) else None, target, outputs[channel, middle]]
        for axes, plane in zip(column, planes, strict=True):
            axes.set(xticks=[], yticks=[], box_aspect=1)
            if plane is None:
                axes.text(0.5, 0.5, MISSING, ha="center", va="center", transform=axes.transAxes)
                continue
            # Axis 0 of the plane is y: it is drawn to the right, with z upwards.
            image = axes.imshow(plane.T, origin="lower", vmin=low, vmax=high, cmap=colours)
        figure.colorbar(image, ax=list(column), location="bottom", shrink=0.9, pad=0.02, label="channel's value")
        column[0].set_title(name.removeprefix("gas "))
    for axes, title in zip(grid[:, 0], ("input: dark matter", "target: gas", "prediction"), strict=True):
        axes.set_ylabel(title)
    return figure
