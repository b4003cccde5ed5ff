"""What the calibration of the gas density changes: the demo's networks at z = 3 on boxes of other seeds.

python -m benchmarks.calibration

Trains the networks of the study `forest` at z = 3, and evaluates them with and without the factor of their checkpoints.
"""

import itertools
import os
from collections.abc import Sequence

from analysis.evaluation.results import Results
from analysis.lyman_alpha.results import PREDICTION
from benchmarks import boxes, common, forest, study

LINES = 1024  # sight-lines along each axis


def measures(result: Results) -> dict[str, float]:
    assert result.flux is not None
    errors = {"L1, gas density": float(result.l1[0]), "L1, all channels": float(result.l1.mean())}
    return {f"mean gas density{forest.RATIO}": result.mass_ratio} | errors | forest.comparison(result.flux, PREDICTION)


def main(argv: Sequence[str] | None = None) -> None:
    options = common.Parser(__doc__, seeds=3, runs=common.RUNS).parse_args(argv)
    options.output = options.output.absolute()
    os.chdir(common.REPOSITORY)
    every = study.training_runs_of("forest", options.seeds, options.runs, {})
    training_runs = [run for run in every if run.condition.name == every[0].condition.name]
    if failure := study.run_missing(training_runs):
        raise failure
    files = study.STUDIES["forest"].simulated(options.runs).files("z = 3", "held_out")
    values = {
        calibrated: [
            measures(boxes.evaluation(run.checkpoint, file, options.runs, calibrated=calibrated, sightlines=LINES))
            for run, file in itertools.product(training_runs, files)
        ]
        for calibrated in (False, True)
    }
    without, calibrated = (boxes.spreads(values[key]) for key in (False, True))
    rows = [[name, *(common.plus_minus(spread[name], ".4f") for spread in (without, calibrated))] for name in without]
    text = common.table(("measure", "the network's own output", "calibrated"), rows)
    common.publish("calibration", options, {"own output": without, "calibrated": calibrated}, text)


if __name__ == "__main__":
    common.run(main)
