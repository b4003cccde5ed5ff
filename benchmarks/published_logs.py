"""Losses and times that the SC21 tutorial's logs publish, to compare a run with.

python -m benchmarks.published_logs

The published figures (benchmarks/published_logs.yaml) are of A100 GPUs and the published data set.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks import common


class Point(NamedTuple):
    """The end of an epoch; `seconds` since the start, with the validations, `rate` in samples/s of this epoch."""

    epoch: int
    samples: int
    seconds: float
    rate: float
    training_loss: float
    validation_loss: float


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


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__).parse_args(argv)
    curves = published()
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
    common.publish("published_logs", options, result, text)


if __name__ == "__main__":
    common.run(main)
