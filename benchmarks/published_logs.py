"""Losses and times that the SC21 tutorial's logs publish, next to those of the demo: curves to compare a run with.

python -m benchmarks.published_logs

The published figures (benchmarks/published_logs.yaml) are of A100 GPUs and the published data set. The demo is a
smaller network on simulated boxes, so its losses have another scale.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks import common
from utils.config import read_file
from utils.run.tags import ITERATIONS_PER_SECOND, TRAIN_LOSS, VALID_LOSS

DEMO = common.REPOSITORY / "example_logs/demo"
COLORS = {"base": "black", "short": "tab:blue", "bs64_opt": "tab:orange", "demo": "tab:green"}


class Point(NamedTuple):
    """The end of an epoch; `seconds` since the start, with the validations, `rate` in samples/s of this epoch."""

    epoch: int
    samples: int
    seconds: float
    rate: float
    training_loss: float
    validation_loss: float


Curves = Mapping[str, Mapping[str, Sequence[Point]]]  # config -> run -> points


def published() -> dict[str, dict[str, list[Point]]]:
    """The published curves. A log without the first epoch begins at zero seconds with the one that it has."""
    curves: dict[str, dict[str, list[Point]]] = {}
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    for config, group in yaml.safe_load(text).items():
        for run, rows in group["runs"].items():
            ends = itertools.accumulate(seconds + validation for _, seconds, *_, validation in rows)
            points = [
                Point(epoch, epoch * group["samples"], end, *figures)
                for (epoch, _, *figures, _), end in zip(rows, ends, strict=True)
            ]
            curves.setdefault(config, {})[run] = points
    return curves


def demo(directory: Path = DEMO) -> list[Point]:
    """The curve of a stored run of the demo."""
    batch = read_file(str(directory / "config.yaml"))["demo"]["global_batch_size"]
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    rates = {record["step"]: record[ITERATIONS_PER_SECOND] for record in records if ITERATIONS_PER_SECOND in record}
    points = []
    for epoch, record in enumerate((record for record in records if VALID_LOSS in record and record["step"]), 1):
        rate = rates[record["step"]] * batch
        samples, losses = record["step"] * batch, (record[TRAIN_LOSS], record[VALID_LOSS])
        points.append(Point(epoch, samples, record["seconds"], rate, *losses))
    return points


def draw(curves: Curves, path: Path) -> None:
    """Validation loss after samples, and after seconds for runs whose log has the first epoch."""
    plotted = [
        (config, number, points) for config, runs in curves.items() for number, points in enumerate(runs.values())
    ]
    with common.plot(path, (9, 4), 2, sharey=True) as panels:
        for panel, key in zip(panels, ("samples", "seconds"), strict=True):
            for config, number, points in plotted:
                if key == "samples" or points[0].epoch == 1:
                    name = "demo, this project" if config == "demo" else f"{config}, published"
                    places = [getattr(point, key) for point in points]
                    losses = [point.validation_loss for point in points]
                    label = "" if number else name  # once per config
                    panel.plot(places, losses, "o-", markersize=3, color=COLORS[config], label=label)
            panel.set(xscale="log", yscale="log", xlabel=key)
            panel.grid(alpha=0.3, which="both")
        panels[0].set_ylabel("validation loss")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__).parse_args(argv)
    curves = {**published(), "demo": {"2 CPU cores, this project": demo()}}
    ends = [(config, run, points[-1]) for config, runs in curves.items() for run, points in runs.items()]
    losses = ["training loss", "validation loss"]
    rows = [(*names, end.epoch, f"{end.rate:.1f}", *(f"{loss:.6f}" for loss in end[-2:])) for *names, end in ends]
    text = common.table(["config", "run", "last epoch", "samples/s", *losses], rows, left=2)
    (base,) = curves["base"].values()
    rows = [(point.epoch, f"{point.seconds / 60:.0f}", *(f"{loss:.6f}" for loss in point[-2:])) for point in base]
    text += "\n\n" + common.table(["epoch of base", "minutes in epochs and validations", *losses], rows, left=0)
    plain = {
        config: {run: [point._asdict() for point in points] for run, points in runs.items()}
        for config, runs in curves.items()
    }
    result: dict[str, Any] = {"source": "github.com/NERSC/sc21-dl-tutorial", "curves": plain}
    common.publish("published_logs", options, result, text, lambda path: draw(curves, path))


if __name__ == "__main__":
    common.run(main)
