"""Seconds, memory and bytes read of a prediction and an evaluation of a large volume, on 1, 2 and 4 ranks.

python -m benchmarks.volumes                                  512³: about 15 minutes and 8 GB in --folder
python -m benchmarks.volumes --grid 1024 --ranks 4 --width 4  larger: 58 GB
python -m benchmarks.volumes --grid 256 --ranks 1 --width 64 --device cuda   on a GPU; a part of make bench-gpu CALL=3

The volume is a simulated box of 64³ cells, repeated along each axis. The network is the demo's at --width, trained for
one step. Each rank has an equal share of the cores. Memory is the largest of a rank's own pages (RssAnon, read every
20 ms), without those of mapped files, which belong to the page cache; libraries need about 0.3 GB of it. Bytes read are
those from the disk, and the files are not in the page cache at first: what one rank has read, others of this machine do
not. The slowest or largest rank is reported. Linux only.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks import common
from utils.distributed.threads import usable_cpus
from utils.errors import UserError
from utils.files import read_json
from utils.run.directory import RunDirectory

SIDE = 64  # cells of the box that is repeated
MEASURES = {"seconds": 1.0, "peak GB": 1e9, "GB read": 1e9}


def make_files(options: argparse.Namespace) -> tuple[Path, Path]:
    """The volume and the checkpoint of a network; those that exist are kept."""
    small, volume = options.folder / f"box{SIDE}.h5", options.folder / f"box{options.grid}.h5"
    log, run = options.folder / "log.txt", options.folder / f"width{options.width}"
    if not small.exists():
        command = [sys.executable, "-m", "simulation", "--grid", SIDE, "--output", small]
        common.call("the simulation", command, log)
    if not volume.exists():
        repeat(small, volume, options.grid // SIDE)
    if not run.exists():
        changes = {"train_path": small, "val_path": small, "box_size": [SIDE, SIDE], "data_size": options.crop}
        changes |= {"network.width": options.width, "Nsamples": 8, "Nsamples_val": 8, "expdir": run}
        changes |= {"report_pictures": "false", "report_baselines": "false", "evaluation.every_epochs": 0}
        flags = [f"--set={key}={value}" for key, value in changes.items()]
        command = [sys.executable, "train.py", "--config=demo", "--num_epochs=1", *flags]
        common.call("the training run", command, log)
    return volume, next(RunDirectory(run / "demo/1ranks/00").checkpoints.glob("step_*"))


def repeat(source: Path, target: Path, times: int) -> None:
    """Repeats a box along each axis."""
    partial = target.with_suffix(".partial")
    with h5py.File(source) as small, h5py.File(partial, "w") as large:
        large.attrs.update(small.attrs)
        large.attrs["box_size_mpc_h"] = times * small.attrs["box_size_mpc_h"]
        for name, fields in small.items():
            repeated = large.create_dataset(name, (len(fields), *[times * SIDE] * 3), fields.dtype)
            for channel, values in enumerate(fields):
                for start in range(0, times * SIDE, SIDE):
                    repeated[channel, start : start + SIDE] = np.tile(values, (1, times, times))
    partial.rename(target)


def run_rank(program: str, arguments: Sequence[str]) -> None:
    """One rank: runs the program, and writes what it needed to the directory VOLUMES_OUTPUT."""
    started, peak = time.perf_counter(), 0

    def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, number("/proc/self/status", "RssAnon"))
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    try:
        importlib.import_module(program).main(arguments)
    finally:
        values = time.perf_counter() - started, 1024 * peak, number("/proc/self/io", "read_bytes")
        path = Path(os.environ["VOLUMES_OUTPUT"]) / f"{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps(dict(zip(MEASURES, values, strict=True))))


def number(path: str, name: str) -> int:
    """A number of /proc."""
    (value,) = re.findall(rf"\b{name}:\s+(\d+)", Path(path).read_text())
    return int(value)


def measure(program: str, ranks: int, flags: Sequence[object], folder: Path, device: str) -> dict[str, Any]:
    """The largest values of all ranks, and those of each rank."""
    output, threads = folder / "ranks", max(1, len(usable_cpus()) // ranks)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    for file in folder.glob("*.h5"):
        common.drop_pages(file)
    words = [*common.launcher(ranks), "-m", "benchmarks.volumes", "rank", program, "--overwrite", f"--device={device}"]
    words += map(str, flags)
    environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    environment |= {"VOLUMES_OUTPUT": str(output.resolve())}
    common.call(f"{program} on {ranks} ranks", words, folder / "log.txt", environment=environment)
    by_rank = [read_json(path) for path in sorted(output.iterdir())]
    largest = {name: max(values[name] for values in by_rank) / unit for name, unit in MEASURES.items()}
    sys.stderr.write(f"{program}, {ranks} ranks: {largest}\n")
    return {"program": program, "ranks": ranks, "threads per rank": threads, **largest, "by rank": by_rank}


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(
        __doc__, grid=512, crop=64, width=8, ranks=[1, 2, 4], folder=Path("data/volumes"), device="cpu"
    )
    options = parser.parse_args(argv)
    if options.grid % SIDE:
        raise UserError(f"--grid {options.grid} is not a multiple of {SIDE}")
    volume, checkpoint = make_files(options)
    gas, results = options.folder / "gas.h5", []
    prediction = ["--checkpoint", checkpoint, "--input", volume, "--output", gas]
    evaluation = ["--prediction", gas, "--input", volume, "--output", options.folder / "evaluation"]
    for ranks in options.ranks:
        for program, flags in (("predict", prediction), ("evaluate", evaluation)):
            results.append(measure(program, ranks, flags, options.folder, options.device))
    rows = [(row["program"], row["ranks"], *(f"{row[name]:.2f}" for name in MEASURES)) for row in results]
    text = f"{options.grid}³ cells, width {options.width}, windows of {options.crop}³, {options.device}; "
    text += "the largest rank, n = 1.\n\n"
    text += common.table(("program", "ranks", *MEASURES), rows)
    common.publish(f"volumes_{options.grid}", options, {"results": results}, text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        common.run(lambda: run_rank(sys.argv[2], sys.argv[3:]))
    else:
        common.run(main)
