"""Seconds, memory and bytes read of a prediction and an evaluation of a large volume, on 1, 2 and 4 ranks.

python -m benchmarks.volumes                                  512³: about 15 minutes and 8 GB in --folder
python -m benchmarks.volumes --grid 1024 --ranks 4 --width 4  larger: 58 GB

The volume is a simulated box of 64³ cells, repeated along each axis. The network is the demo's at --width, trained for
one step. Each rank has an equal share of the cores. Memory is the largest of a rank's own pages (RssAnon, read every
20 ms), without those of mapped files, which belong to the page cache; libraries need about 0.3 GB of it. Bytes read are
those from the disk, and the files are not in the page cache at first: what one rank has read, others of this machine do
not. The slowest or largest rank is reported. Linux only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
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
from utils.errors import UserError, one_line_errors
from utils.files import read_json
from utils.training.checkpoint import FOLDER

SIDE = 64  # cells of the box that is repeated
MEASURES = {"seconds": 1.0, "peak GB": 1e9, "GB read": 1e9}


def start(words: Sequence[object], log: Path, **environment: object) -> None:
    """Runs a command of this project; UserError if it fails."""
    texts = {name: str(value) for name, value in environment.items()}
    if reason := common.failure_of([str(word) for word in words], log, texts):
        raise UserError(f"{' '.join(map(str, words))}: {reason}; see {log}")


def make_files(options: argparse.Namespace) -> tuple[Path, Path]:
    """The volume and the checkpoint of a network; those that exist are kept."""
    small, volume = options.folder / f"box{SIDE}.h5", options.folder / f"box{options.grid}.h5"
    log, run = options.folder / "log.txt", options.folder / f"width{options.width}"
    options.folder.mkdir(parents=True, exist_ok=True)
    if not small.exists():
        start([sys.executable, "-m", "utils.simulation", "--grid", SIDE, "--output", small], log)
    if not volume.exists():
        repeat(small, volume, options.grid // SIDE)
    if not run.exists():
        changes = {"train_path": small, "val_path": small, "box_size": [SIDE, SIDE], "data_size": options.crop}
        changes |= {"network.width": options.width, "Nsamples": 8, "Nsamples_val": 8, "expdir": run}
        changes |= {"report_pictures": "false", "report_baselines": "false", "evaluation.every_epochs": 0}
        flags = [f"--set={key}={value}" for key, value in changes.items()]
        start([sys.executable, "train.py", "--config=demo", "--num_epochs=1", *flags], log)
    return volume, next((run / "demo/1ranks/00" / FOLDER).glob("step_*"))


def repeat(source: Path, target: Path, times: int) -> None:
    """Repeats a box along each axis."""
    partial = target.with_suffix(".partial")
    with h5py.File(source) as small, h5py.File(partial, "w") as large:
        large.attrs.update(small.attrs)
        large.attrs["box_size_mpc_h"] = times * small.attrs["box_size_mpc_h"]
        for name, fields in small.items():
            shape = len(fields), *(times * size for size in fields.shape[1:])
            repeated = large.create_dataset(name, shape, fields.dtype)
            for channel, values in enumerate(fields):
                for number in range(times):
                    planes = slice(number * len(values), (number + 1) * len(values))
                    repeated[channel, planes] = np.tile(values, (1, times, times))
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
    found = re.search(rf"{name}:\s+(\d+)", Path(path).read_text())
    assert found is not None, f"{path} lacks {name}"
    return int(found[1])


def measure(program: str, ranks: int, flags: Sequence[object], folder: Path) -> dict[str, Any]:
    """The largest values of all ranks, and those of each rank."""
    output, threads = folder / "ranks", max(1, len(usable_cpus()) // ranks)
    output.mkdir(exist_ok=True)
    for old in output.iterdir():
        old.unlink()
    for file in folder.glob("*.h5"):
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())  # pages not yet written cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    words = [*common.launcher(ranks), "-m", "benchmarks.volumes", "rank", program, *flags]
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "VOLUMES_OUTPUT": output.resolve()}
    start(words, folder / "log.txt", **environment)
    by_rank = [read_json(path) for path in sorted(output.iterdir())]
    found = {name: max(one[name] for one in by_rank) / unit for name, unit in MEASURES.items()}
    sys.stderr.write(f"{program}, {ranks} ranks: {found}\n")
    return {"program": program, "ranks": ranks, "threads per rank": threads, **found, "by rank": by_rank}


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__)
    parser.add_integers(grid=512, crop=64, width=8)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="(1 2 4)")
    parser.add_argument("--folder", type=Path, default=Path("data/volumes"), help="for all files (%(default)s)")
    parser.add_argument("--flags", default="", help="more flags of both programs, such as '--overlap 16'")
    options = parser.parse_args(argv)
    if options.grid % SIDE:
        raise UserError(f"--grid {options.grid} is not a multiple of {SIDE}")
    volume, checkpoint = make_files(options)
    gas, results = options.folder / "gas.h5", []
    for ranks in options.ranks:
        common_flags = ["--input", volume, "--overwrite", "--device=cpu"]
        flags = ["--checkpoint", checkpoint, "--output", gas, *options.flags.split()]
        results.append(measure("predict", ranks, [*common_flags, *flags], options.folder))
        flags = ["--prediction", gas, "--output", options.folder / "evaluation"]
        results.append(measure("evaluate", ranks, [*common_flags, *flags], options.folder))
    rows = [(one["program"], one["ranks"], *(f"{one[name]:.2f}" for name in MEASURES)) for one in results]
    text = f"{options.grid}³ cells, width {options.width}, windows of {options.crop}³; the largest rank, n = 1.\n\n"
    text += common.table(("program", "ranks", *MEASURES), rows)
    result = {"settings": common.settings(options), "results": results}
    common.publish(f"volumes_{options.grid}", result, options.output, text)


if __name__ == "__main__":
    with one_line_errors():
        if sys.argv[1:2] == ["rank"]:
            run_rank(sys.argv[2], sys.argv[3:])
        else:
            main()
