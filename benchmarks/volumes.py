"""Seconds of a prediction and of an evaluation of a large volume on one device.

python -m benchmarks.volumes                            on a CPU: 256³ cells
python -m benchmarks.volumes --width 64 --device cuda   on a GPU; a part of make bench-gpu CALL=3

The volume is a simulated box of 64³ cells, repeated along each axis. The network is the demo's at --width, trained for
one step. All trials are in one process; the first one includes the search for the fastest convolutions on a GPU.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch

import predict
from benchmarks import common
from utils.errors import UserError

SIDE = 64  # cells of the box that is repeated


def make_files(folder: Path, width: int, crop: int, times: int) -> tuple[Path, Path]:
    """The checkpoint of a network, and a box that is repeated along each axis; those that exist are kept."""
    small, large = (folder / f"box{side}.h5" for side in (SIDE, times * SIDE))
    log, expdir = folder / "log.txt", folder / f"width{width}_crop{crop}"
    if not small.exists():
        common.call("the simulation", [sys.executable, "-m", "simulation", "--grid", SIDE, "--output", small], log)
    if not large.exists():
        with h5py.File(small) as source, h5py.File(large, "w") as target:
            target.attrs.update({**source.attrs, "box_size_mpc_h": times * source.attrs["box_size_mpc_h"]})
            for name, fields in source.items():
                target[name] = np.tile(fields, (1, times, times, times))
    if not expdir.exists():
        changes = {"train_path": small, "val_path": small, "box_size": [SIDE, SIDE], "data_size": crop}
        changes |= {"network.width": width, "Nsamples": 8, "Nsamples_val": 8, "expdir": expdir}
        changes |= {"report_pictures": "false", "report_baselines": "false", "evaluation.every_epochs": 0}
        flags = [f"--set={key}={value}" for key, value in changes.items()]
        command = [sys.executable, "train.py", "--config=demo", "--num_epochs=1", *flags]
        common.call("the training run", command, log)
    return next(expdir.glob("demo/*/00/checkpoints/step_*")), large


def main(argv: Sequence[str] | None = None) -> None:
    import evaluate  # needs optional libraries

    sizes, folder = {"grid": 256, "crop": 64, "width": 8, "trials": 3}, Path("data/volumes")
    options = common.Parser(__doc__, **sizes, folder=folder, device="cpu").parse_args(argv)
    options.folder = options.folder.absolute()
    if options.grid % SIDE:
        raise UserError(f"--grid {options.grid} is not a multiple of {SIDE}")
    checkpoint, volume = make_files(options.folder, options.width, options.crop, options.grid // SIDE)
    gas, shared = options.folder / "gas.h5", [f"--input={volume}", "--overwrite", f"--device={options.device}"]
    calls = {"predict": partial(predict.main, [f"--checkpoint={checkpoint}", f"--output={gas}", *shared])}
    words = [f"--prediction={gas}", f"--output={options.folder / 'evaluation'}", *shared]
    calls["evaluate"] = partial(evaluate.main, words)
    measures = {name: partial(common.seconds_of, call, torch.device("cpu")) for name, call in calls.items()}
    seconds = common.interleaved(measures, options.trials, warmup=0)
    results = {name: common.summary(values) for name, values in seconds.items()}
    text = f"{options.grid}³ cells, width {options.width}, windows of {options.crop}³, {options.device}.\n\n"
    text += common.table(("program", "seconds"), [(name, common.ranged(values)) for name, values in results.items()])
    common.publish("volumes", options, {"seconds": results}, text)


if __name__ == "__main__":
    common.run(main)
