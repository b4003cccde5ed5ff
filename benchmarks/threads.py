"""Samples/s of short training runs with one and with several CPU threads per rank, alone and next to a busy process.

python -m benchmarks.threads        after make demo, which simulates the data; about 15 minutes

A thread that waits for the others of an operation spins before it sleeps. `short` is the program's setting
(utils/__init__.py), `long` the default of libgomp, PyTorch's OpenMP library. All settings are measured once per round.
The program uses the cores divided by the ranks, and spins for a short time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import Parser, cores, interleaved, publish, ranged, settings, summary, table
from benchmarks.processes import failure_of, launcher
from utils.cli import positive
from utils.errors import UserError, one_line_errors
from utils.training.loggers.base import read_records

RATE = "Step/samples per sec"
SPINS = {"short": "1000", "long": "300000"}  # rounds


class Case(NamedTuple):
    """A training run; `busy`: next to a process that uses one core."""

    width: int
    ranks: int
    busy: bool


class Setting(NamedTuple):
    """Threads per rank, and how long they spin."""

    threads: int
    spin: str

    def __str__(self) -> str:
        return f"{self.threads} threads, {self.spin}" if self.threads > 1 else "1 thread"


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def samples_per_second(options: argparse.Namespace, case: Case, setting: Setting) -> float:
    """The rate in the second half of a training run of 2 · `steps` steps; UserError if it fails."""
    keys = {
        "device": "cpu",
        "global_batch_size": options.batch,
        "network.width": case.width,
        "Nsamples": 2 * options.steps * options.batch,
        "Nsamples_val": options.batch,
        "log_interval": options.steps,
        "report_baselines": "false",
        "report_pictures": "false",
    }
    # MKL_NUM_THREADS, because train.py ignores OMP_NUM_THREADS=1 under torchrun, which sets it by default.
    count = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(setting.threads))
    with tempfile.TemporaryDirectory() as scratch, busy_process() if case.busy else contextlib.nullcontext():
        changes = [*(f"{key}={value}" for key, value in keys.items()), f"expdir={scratch}", *options.changes]
        flags = ["--config=demo", "--num_epochs=1", *(f"--set={change}" for change in changes)]
        log = Path(scratch, "log.txt")
        reason = failure_of(
            [*launcher(case.ranks), "train.py", *flags], log, {**count, "GOMP_SPINCOUNT": SPINS[setting.spin]}
        )
        if reason:
            raise UserError(f"width {case.width}, {case.ranks} ranks, {setting}: {reason}")
        (path,) = Path(scratch).rglob("metrics.jsonl")
        return [record[RATE] for record in read_records(path) if RATE in record][-1]


def measure(options: argparse.Namespace) -> None:
    """Measures all cases and settings, and publishes the rates."""
    cases = [Case(*values) for values in itertools.product(options.widths, options.ranks, (False, True))]
    several = max(2, cores())
    compared = [Setting(1, "short"), Setting(several, "short"), Setting(several, "long")]
    measures = {
        f"{case}, {setting}": partial(samples_per_second, options, case, setting)
        for case in cases
        for setting in compared
    }
    load = os.getloadavg()[0]
    values = interleaved(measures, options.trials, warmup=0)
    rates = [{str(setting): summary(values[f"{case}, {setting}"]) for setting in compared} for case in cases]
    heads = ["width", "ranks", "busy process", *(f"{setting}: samples/s" for setting in compared)]
    rows = [
        [case.width, case.ranks, "yes" if case.busy else "no", *(ranged(rate, ".3g") for rate in each.values())]
        for case, each in zip(cases, rates, strict=True)
    ]
    result = {
        "settings": settings(options),
        "cores": cores(),
        "load average before": load,
        "cases": [{**case._asdict(), "samples/s": each} for case, each in zip(cases, rates, strict=True)],
    }
    text = f"{table(heads, rows, left=0)}\n\nMedians of {options.trials} rounds (smallest – largest), {cores()} cores."
    publish("threads", result, options.output, text)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_integers(trials=3, steps=6, batch=8)
    parser.add_argument("--widths", type=positive, nargs="+", default=[16, 48], help="channels (%(default)s)")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2], help="(%(default)s)")
    parser.add_changes()
    with one_line_errors():
        measure(parser.parse_args())


if __name__ == "__main__":
    main()
