"""What a run leaves for the eye: a closing table, loss curves, slices of input, target and prediction."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.data import Loader
from utils.data.files.hdf5 import CHANNEL_NAMES
from utils.distributed.world import World
from utils.evaluation import figures
from utils.files import atomic_write
from utils.progress import format_duration
from utils.runs.logger import NullLogger, read_records
from utils.steps import Step
from utils.training.trainer import FitResult

SUMMARY = "summary.json"
HISTOGRAM_BINS = 8192
HISTOGRAM_RANGE = (-1.5, 1.5)


def is_finished(directory: Path, step: int, world: World) -> bool:
    """True if the training that ended after `step` has written its summary. Rank 0 looks; every rank calls it."""
    written = False
    if world.is_root:
        try:
            written = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))["steps"] == step
        except (OSError, ValueError, KeyError, TypeError):
            written = False
    return bool(world.gather_objects(written)[0])


def write_summary(directory: Path, result: FitResult, logs: NullLogger) -> None:
    """Writes summary.json, the last file of a run: a run that is started again without it writes its summary again."""
    try:
        with atomic_write([directory / SUMMARY]) as (partial,):
            partial.write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        logs.warning(f"Cannot write {directory / SUMMARY}: {error.strerror or error}")


def forget_summary(directory: Path) -> None:
    """Removes the summary of an earlier, shorter training before a run resumes or starts from scratch."""
    (directory / SUMMARY).unlink(missing_ok=True)


def label_baselines(loader: Loader, world: World) -> dict[str, float]:
    """Cross-entropy of the best guess that does not look at the sample: how often each class comes."""
    counts: dict[int, int] = {}
    for _, labels in loader.epoch(0):
        for label in labels.tolist():
            counts[label] = counts.get(label, 0) + 1
    total: dict[int, int] = {}
    for part in world.gather_objects(counts):
        for label, count in part.items():
            total[label] = total.get(label, 0) + count
    samples = sum(total.values())
    return {"frequencies": -sum(count * math.log(count / samples) for count in total.values()) / samples}


def baseline_losses(loader: Loader, world: World) -> dict[str, float]:
    """Mean |difference| over the validation crops of two predictors that learn nothing from the input's structure.

    'constant': each target channel's median, the best constant under this loss (to half a histogram bin);
    'copy': the input's density and velocities as the gas's, and the constant for what the input lacks.
    """
    medians = _medians(loader, world)
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # constant, copy, elements
    for inputs, targets in loader.epoch(0):
        constant = medians.to(targets.dtype).view(1, -1, 1, 1, 1).expand_as(targets)
        shared = min(inputs.shape[1], targets.shape[1])
        copy = torch.cat([inputs[:, :shared], constant[:, shared:]], dim=1)
        sums[0] += (constant - targets).abs().sum(dtype=torch.float64)
        sums[1] += (copy - targets).abs().sum(dtype=torch.float64)
        sums[2] += targets.numel()
    constant_sum, copy_sum, count = world.sum(sums).tolist()
    return {"constant": constant_sum / count, "copy": copy_sum / count}


def _medians(loader: Loader, world: World) -> torch.Tensor:
    """Per target channel, from histograms summed over the ranks."""
    low, high = HISTOGRAM_RANGE
    counts: torch.Tensor | None = None
    channels = 0
    for _, targets in loader.epoch(0):
        channels = targets.shape[1]
        part = torch.stack(
            [
                torch.histc(targets[:, channel].clamp(low, high), HISTOGRAM_BINS, low, high)
                for channel in range(channels)
            ]
        ).double()
        counts = part if counts is None else counts + part
    # A rank may have had no validation batch; it still takes part in the sum.
    channels = max(world.gather_objects(channels))
    total = world.sum(torch.zeros(channels, HISTOGRAM_BINS, device=world.device).double() if counts is None else counts)
    cumulative = total.cumsum(1)
    bins = (cumulative < cumulative[:, -1:] / 2).sum(1)
    return low + (bins + 0.5) * (high - low) / HISTOGRAM_BINS


def closing_table(
    result: FitResult, baselines: dict[str, float], directory: Path, start: str = "untrained network"
) -> list[str]:
    """The lines that end a run; `start` is what it began with."""
    names = {
        "constant": "best constant per channel",
        "copy": "copying density and velocities",
        "frequencies": "guessing by class frequency",
    }
    others = {start: result.initial_loss, **{names[key]: loss for key, loss in baselines.items()}}
    lines = [f"{'validation loss':<32}{'':>10}   trained is"]
    lines += [f"  {name:<30}{loss:>10.6f}   {result.final_loss / loss:.3f} of it" for name, loss in others.items()]
    lines.append(f"  {'trained network':<30}{result.final_loss:>10.6f}")
    lines += [f"{f'validation {name}'.replace('_', ' '):<32}{value:>10.4f}" for name, value in result.metrics.items()]
    lines.append(f"{'throughput, last epoch':<32}{result.samples_per_second:>10.1f}   samples/s")
    lines.append(f"{'training and validation':<32}{format_duration(result.seconds):>10}   {result.steps} steps")
    if result.noise_scale is not None:
        lines.append(result.noise_scale)
    lines.append(f"run directory  {directory}")
    return lines


def draw(
    step: Step, loader: Loader, directory: Path, logs: NullLogger, steps: int, is_classification: bool
) -> list[Path]:
    """Writes loss_curves.png and, of volumes, slices.png; the slices go to TensorBoard too."""
    if importlib.util.find_spec("matplotlib") is None:
        logs.info("matplotlib is not installed (pip install matplotlib): no pictures")
        return []
    curves, slices = directory / "loss_curves.png", directory / "slices.png"
    records = read_records(directory / "metrics.jsonl")
    figure = figures.loss_curves(records, "cross-entropy" if is_classification else "mean absolute error")
    figure.savefig(curves, dpi=120)
    if is_classification:
        return [curves]
    batches = loader.epoch(0)
    inputs, targets = (part[:1] for part in next(batches))
    outputs = step.predict(inputs)
    batches.close()
    fields = [part[0].float().cpu().numpy() for part in (inputs, targets, outputs)]
    figure = _slices(fields[0], fields[1], fields[2])
    figure.savefig(slices, dpi=120)
    logs.figure("Slices", figure, steps)
    return [curves, slices]


def _slices(inputs: np.ndarray, targets: np.ndarray, outputs: np.ndarray) -> Any:
    """Rows input, target, prediction; a column for each target channel: the middle plane of a crop [C, D, D, D]."""
    from matplotlib.figure import Figure

    channels, middle = len(targets), targets.shape[1] // 2
    known = CHANNEL_NAMES["Hydro"]
    names = known if channels == len(known) else tuple(f"channel {channel}" for channel in range(channels))
    size = (2.3 * channels, 7.6)
    figure = Figure(figsize=size, layout="constrained")
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
                axes.text(0.5, 0.5, "not in the input", ha="center", va="center", transform=axes.transAxes)
                continue
            # axis 0 of the plane is y: drawn to the right, with z upwards
            image = axes.imshow(plane.T, origin="lower", vmin=low, vmax=high, cmap=colours)
        figure.colorbar(image, ax=list(column), location="bottom", shrink=0.9, pad=0.02, label="channel's value")
        column[0].set_title(name.removeprefix("gas "))
    for axes, title in zip(grid[:, 0], ("input: dark matter", "target: gas", "prediction"), strict=True):
        axes.set_ylabel(title)
    return figure
