"""The gain and the cost of predictions that are averaged over symmetries of the cube (--symmetries of predict.py).

python -m benchmarks.symmetries --checkpoint runs/demo/2ranks/00 --input data/demo_val.h5

Several checkpoints and several files are combined. A change is that of the same network on the same file.

Expected before the first measurement: L1 3 to 8 % lower with 48 symmetries and about half of that with 8, r of log
density slightly higher, and the error of the flux power about the same, because it is mostly a bias.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from analysis.inference.sliding_window import SlidingWindowPredictor
from analysis.inference.trained_network import SYMMETRIES
from benchmarks import boxes, common

SECONDS = "CPU seconds of the forward passes"
SHOWN = ("L1", *(f"r of log {field}, k = {k} h/Mpc" for field in ("density", "temperature") for k in (2, 5, 10)))
SHOWN += (*(f"P ratio of log density, k = {k} h/Mpc" for k in (5, 10)),)
SHOWN += (*(boxes.FLUX_ERROR.format(k, "prediction") for k in boxes.FLUX_LARGEST_K), SECONDS)


def measures(checkpoint: str, file: str, symmetries: int) -> dict[str, float]:
    """Errors of a network on a volume, and the CPU time of its forward passes."""
    seconds = 0.0

    def timed(predictor: SlidingWindowPredictor) -> SlidingWindowPredictor:
        def predict(windows: torch.Tensor) -> torch.Tensor:
            nonlocal seconds
            started = time.process_time()
            outputs = predictor.predict(windows)
            seconds += time.process_time() - started
            return outputs

        return replace(predictor, predict=predict)

    result = boxes.evaluate(checkpoint, file, symmetries=symmetries, change=timed)
    return {**boxes.measures(result), SECONDS: seconds}


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--checkpoint", nargs="+", required=True, help="runs, or their checkpoints")
    parser.add_argument("--input", nargs="+", required=True, help="HDF5 files with Nbody and the true Hydro")
    options = parser.parse_args(argv)
    pairs = [(checkpoint, file) for checkpoint in options.checkpoint for file in options.input]
    measured = {str(count): [measures(*pair, count) for pair in pairs] for count in SYMMETRIES}
    first, *others = measured
    results: dict[str, Any] = {}
    for name in measured[first][0]:
        values = {count: [pair[name] for pair in trials] for count, trials in measured.items()}
        ratios = {
            count: [a / b for a, b in zip(trials, values[first], strict=True)] for count, trials in values.items()
        }
        results[name] = {
            count: {**common.over_seeds(trials), "ratio": common.over_seeds(ratios[count])}
            for count, trials in values.items()
        }
    rows = []
    for name in (name for name in SHOWN if name in results):
        ratio = [common.plus_minus(results[name][count]["ratio"], ".3f") for count in others]
        rows.append([name, *(common.plus_minus(spread, ".4g") for spread in results[name].values()), *ratio])
    heads = ["measure", *(f"--symmetries={count}" for count in measured), *(f"{count} / 1" for count in others)]
    text = f"n = {len(options.checkpoint)} networks × {len(options.input)} volumes; mean ± standard deviation.\n\n"
    common.publish("symmetries", options, {"measures": results}, text + common.table(heads, rows))


if __name__ == "__main__":
    common.run(main)
