"""Curves of a training run over its steps: losses, metrics, and learning rate."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.evaluation.figures import new_figure
from utils.run import tags

LOSSES = {
    tags.STEP_LOSS: "training, per interval",
    tags.TRAIN_LOSS: "training, per epoch",
    tags.VALID_LOSS: "validation",
}
STYLES: dict[str, dict[str, Any]] = {tags.STEP_LOSS: {"color": "0.7"}, tags.STEP_LEARNING_RATE: {"color": "black"}}
MEASURES = {"l1": "mean absolute error", "mse": "mean squared error"}

Records = Sequence[Mapping[str, Any]]  # of metrics.jsonl


def loss_curves(records: Records, loss: str, run: str) -> Figure:
    """Losses over steps and, below them, the metrics of each validation and the learning rate.

    `loss` is the config's; `run` is the first part of the title.
    """
    names, begin = {name for record in records for name in record}, tags.VOLUME_LOSS
    volumes = {name: f"validation, {name.removeprefix(begin)}" for name in sorted(names) if name.startswith(begin)}
    metrics = sorted({name for name in names if name.endswith(tags.VALID_SUFFIX)} - {*LOSSES, *volumes})
    heights = [3.0, *([2.0] if metrics else []), 1.0]
    figure = new_figure(7, 1.5 * sum(heights))
    panels = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    _draw(panels[0], records, LOSSES | volumes)
    panels[0].set(ylabel=f"loss ({MEASURES.get(loss, loss.replace('_', '-'))})", yscale="log")
    if metrics:
        labels = {name: name.removesuffix(tags.VALID_SUFFIX).lower().replace("$", r"\$") for name in metrics}
        _draw(panels[1], records, labels)
        panels[1].set(ylabel="validation")
    highest = _draw(panels[-1], records, {tags.STEP_LEARNING_RATE: ""})
    # From zero: limits that follow the values would magnify the rounding of a constant rate.
    panels[-1].set(xlabel="step", ylabel="learning\nrate", ylim=(0, 1.15 * highest or 1))
    figure.suptitle(", ".join(filter(None, (run, tags.progress(records)))))
    figure.align_ylabels()
    return figure


def _draw(axes: Axes, records: Records, labels: Mapping[str, str]) -> float:
    """Draws a curve for each tag that the records have, and returns the largest value."""
    highest = 0.0
    for tag, label in labels.items():
        points = [(record["step"], record[tag]) for record in records if tag in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **STYLES.get(tag, {"marker": "o", "markersize": 4}))
            highest = max(highest, *(value for _, value in points))
    axes.grid(alpha=0.3)
    if any(labels.values()) and axes.lines:
        axes.legend()
    return highest
