"""Errors of an exported network on a periodic box: at once, and with the windows that docs/inference.md shows.

python -m benchmarks.whole_box --checkpoint runs/demo/2ranks/00 --input data/demo_val.h5

Several checkpoints and several files are combined. An error is the mean of |log10 of the gas density / target's|.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from analysis.inference.export import ExportedNetwork
from analysis.inference.trained_network import TrainedNetwork
from benchmarks import boxes, common
from utils.volumes.hdf5 import DATASETS, FieldReader

PAGE = common.REPOSITORY / "docs" / "inference.md"


def measures(checkpoint: str, path: str) -> dict[str, float]:
    """Errors by method and place."""
    network, fields = ExportedNetwork.of(TrainedNetwork.load(checkpoint, torch.device("cpu")), "physical"), []
    for name, channels in zip(DATASETS, (network.inputs, network.targets), strict=True):
        values = torch.from_numpy(np.array(FieldReader(path, name, len(channels)).values))
        fields.append(torch.stack([channel.to_physical(part) for channel, part in zip(channels, values, strict=True)]))
    names: dict[str, Any] = {"torch": torch, "predict": network.module}
    (shown,) = re.findall(r"```python\n([^`]*def predict_box.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(shown, names)
    inner = torch.zeros(fields[0].shape[1:], dtype=torch.bool)
    inner[1:-1, 1:-1, 1:-1] = True
    found: dict[str, float] = {}
    with torch.inference_mode():
        outputs = {"at once": network.module(fields[0][None])[0], "windows": names["predict_box"](fields[0])}
    for method, gas in outputs.items():
        errors = (gas[0] / fields[1][0]).log10().abs()
        places = {"outermost cells": errors[~inner], "other cells": errors[inner]}
        found |= {f"{method}, {place}": float(values.mean()) for place, values in places.items()}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--checkpoint", nargs="+", required=True, help="runs, or their checkpoints")
    parser.add_argument("--input", nargs="+", required=True, help="periodic HDF5 files with Nbody and the true Hydro")
    options = parser.parse_args(argv)
    errors = boxes.spreads([measures(*pair) for pair in itertools.product(options.checkpoint, options.input)])
    rows = [[name, common.plus_minus(spread, ".4f")] for name, spread in errors.items()]
    text = f"n = {len(options.checkpoint)} networks × {len(options.input)} boxes; mean ± standard deviation.\n\n"
    text += common.table(["error of log10 density", "dex"], rows)
    common.publish("whole_box", options, {"errors": errors}, text)


if __name__ == "__main__":
    common.run(main)
