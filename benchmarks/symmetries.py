"""The gain and the cost of predictions that are averaged over symmetries of the cube (--symmetries of predict.py).

python -m benchmarks.symmetries --checkpoint runs/demo/2ranks/00 --input data/demo_val.h5

Several checkpoints and several files are combined. A change is that of the same network on the same file.

Expected before the first measurement: L1 3 to 8 % lower with 48 symmetries and about half of that with 8, r of log
density slightly higher, and the error of the flux power about the same, because it is mostly a bias.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch

from benchmarks import boxes, common
from utils.config.sections import EvaluationConfig
from utils.errors import one_line_errors
from utils.evaluation.volume import VolumeFields
from utils.inference.trained_network import SYMMETRIES, InferenceOptions, TrainedNetwork, build_predictor

SECONDS = "CPU seconds of the forward passes"
FIELDS = ("density", "temperature")
SHOWN = ("L1", *(f"r of log {field}, k = {k} h/Mpc" for field in FIELDS for k in (2, 5, 10)))
SHOWN += (*(f"P ratio of log density, k = {k} h/Mpc" for k in (5, 10)),)
SHOWN += (*(boxes.FLUX_ERROR.format(k, "prediction") for k in boxes.FLUX_LARGEST_K), SECONDS)


def measures(checkpoint: str, file: str, symmetries: int) -> dict[str, float]:
    """Errors of a network on a volume, and the CPU time of its forward passes."""
    world, seconds = common.this_machine(), 0.0
    trained = TrainedNetwork.load(checkpoint, world.device)
    config = trained.config.model_copy(update={"evaluation": EvaluationConfig(sightlines=boxes.SIGHTLINES)})
    with closing(VolumeFields(file, None, config)) as fields:
        predictor = build_predictor(trained, fields.inputs, InferenceOptions(symmetries=symmetries), world)

        def timed(windows: torch.Tensor) -> torch.Tensor:
            nonlocal seconds
            started = time.process_time()
            outputs = predictor.predict(windows)
            seconds += time.process_time() - started
            return outputs

        found = fields.evaluate(replace(predictor, predict=timed), f"{symmetries} symmetries", {}, world)
    return {**boxes.measures(found), SECONDS: seconds}


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--checkpoint", nargs="+", required=True, help="runs, or their checkpoints")
    parser.add_argument("--input", nargs="+", required=True, help="HDF5 files with Nbody and the true Hydro")
    options = parser.parse_args(argv)
    pairs = [(checkpoint, file) for checkpoint in options.checkpoint for file in options.input]
    found = {count: [measures(*pair, count) for pair in pairs] for count in SYMMETRIES}
    first, results, rows = found[SYMMETRIES[0]], {}, []
    for name in first[0]:
        values = {count: [one[name] for one in ones] for count, ones in found.items()}
        results[name] = {str(count): common.over_seeds(each) for count, each in values.items()}
        for count, each in values.items():
            ratios = [value / one[name] for value, one in zip(each, first, strict=True)]
            results[name][str(count)]["ratio"] = common.over_seeds(ratios)
    for name in (name for name in SHOWN if name in results):
        ratio = [common.plus_minus(results[name][str(count)]["ratio"], ".3f") for count in SYMMETRIES[1:]]
        rows.append([name, *(common.plus_minus(one, ".4g") for one in results[name].values()), *ratio])
    heads = ["measure", *(f"--symmetries={count}" for count in SYMMETRIES)]
    heads += [f"{count} / 1" for count in SYMMETRIES[1:]]
    text = f"n = {len(options.checkpoint)} networks × {len(options.input)} volumes; mean ± standard deviation.\n\n"
    result = {"settings": common.settings(options), "measures": results}
    common.publish("symmetries", result, options.output, text + common.table(heads, rows))


if __name__ == "__main__":
    with one_line_errors():
        main()
