"""Shared by the benchmarks: command line, trials, statistics, results with provenance, tables and plots."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from utils import cli
from utils.data import Batch, Loader
from utils.distributed.launch import Launch
from utils.distributed.threads import usable_cpus
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import atomic_write
from utils.profiling.timing import spread as spread
from utils.profiling.timing import summary as summary
from utils.profiling.timing import synchronize
from utils.provenance import provenance

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
YAML = str(REPOSITORY / "config" / "UNet.yaml")

# --- command line ----------------------------------------------------------------------------------------------------

# Descriptions of options that several benchmarks have.
HELP = {
    "batch": "samples per step",
    "box": "cells per side of the training volume",
    "crop": "cells per side of a sample",
    "scales": "scales of the network",
    "trials": "repetitions of each measurement",
    "valid_box": "cells per side of the validation volume",
    "warmup_steps": "training steps before the timed ones",
    "width": "channels of the network's first layer",
}


class Parser(cli.Parser):
    """The command line of a benchmark: the module's docstring as help, --output, and errors in one line."""

    def __init__(self, text: str | None) -> None:
        super().__init__(text)
        self.add_argument("--output", type=Path, default=RESULTS, help="directory for the results (%(default)s)")

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        """Also refuses directories that cannot be written, before time is spent on measurements.

        From then on SIGTERM and SIGHUP raise SystemExit, so that the benchmark ends the processes that it has started.
        """
        parsed, rest = super().parse_known_args(*arguments, **options)
        for name in ("output", "runs", "logs"):
            if isinstance(directory := getattr(parsed, name, None), Path):
                check_writable(directory, f"--{name}")
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, end_by_signal)
        return parsed, rest

    def add_integers(self, **defaults: int) -> None:
        """Adds an option --NAME, an integer above zero, for each default."""
        for name, default in defaults.items():
            text = f"{HELP.get(name, '')} (%(default)s)".lstrip()
            self.add_argument(f"--{name}", type=cli.positive, default=default, help=text)

    def add_changes(self) -> None:
        """Adds --set KEY=VALUE."""
        text = "sets a key in all configs; may be repeated"
        self.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help=text)


def end_by_signal(number: int, frame: object) -> NoReturn:
    sys.stderr.write(f"ended by {signal.Signals(number).name}\n")
    raise SystemExit(128 + number)


def check_writable(directory: Path, option: str) -> None:
    """Raises UserError if the directory is not writable or cannot be created. Creates nothing."""
    existing = directory.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = f"{existing} is not a writable directory"
        raise UserError(f"cannot write to {directory}: {reason}; choose another {option}")


def positive_float(text: str) -> float:
    """A finite number above zero, for argparse."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above zero")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON values, without --output. Paths in the repository are relative to it."""
    kept = {key: value for key, value in vars(options).items() if key != "output"}
    return {key: relative(value) if isinstance(value, Path) else value for key, value in kept.items()}


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path)


# --- measurements ----------------------------------------------------------------------------------------------------


def this_machine() -> World:
    """A world of one rank on the GPU, or on the CPU if there is none."""
    return World(Launch("benchmark"), torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def cores() -> int:
    """CPU cores that this process may use."""
    return len(usable_cpus())


def seconds_of(action: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Wall seconds of `repeats` calls, including the device's work."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(repeats):
        action()
    synchronize(device)
    return time.perf_counter() - started


def interleaved(measures: Mapping[str, Callable[[], float]], trials: int, warmup: int = 1) -> dict[str, list[float]]:
    """Calls each measure once per round, so that drift of the machine affects all; warm-up rounds are discarded."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(warmup + trials):
        for name, measure in measures.items():
            value = measure()
            sys.stderr.write(f"round {number + 1}/{warmup + trials}: {name} {value:.4g}\n")
            if number >= warmup:
                values[name].append(value)
    return values


def endless(loader: Loader) -> Generator[Batch, None, None]:
    """Batches of epoch after epoch."""
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


# --- results ---------------------------------------------------------------------------------------------------------


def save(name: str, result: dict[str, Any], directory: Path = RESULTS) -> Path:
    """Writes <directory>/<name>.json with provenance, atomically."""
    path = directory / f"{name}.json"
    text = json.dumps(finite({**result, "provenance": provenance(this_machine())}), indent=2, allow_nan=False) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; choose another --output") from None
    return path


def finite(value: Any) -> Any:
    """The value for JSON, which has no NaN and no infinity: None in their places."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plus_minus(values: Mapping[str, Any], form: str, factor: float = 1) -> str:
    """Mean ± standard deviation, from keys `mean`, `stdev` and `n`; the mean alone if it is of one value."""
    names = ("mean", "stdev") if values["n"] > 1 else ("mean",)
    return " ± ".join(format(factor * values[name], form) for name in names)


def publish(
    name: str, result: dict[str, Any], directory: Path, text: str, draw: Callable[[Path], object] | None = None
) -> None:
    """Writes <directory>/<name>.json, the report `text` as .md, and the plot of `draw` as .png; prints the report."""
    path = save(name, result, directory)
    write_text(path.with_suffix(".md"), text + "\n")
    written = [path, path.with_suffix(".md")]
    if draw is not None:
        written.append(path.with_suffix(".png"))
        draw(written[-1])
    sys.stdout.write(f"{text}\n\nwritten: {', '.join(map(str, written))}\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic_write([path]) as (partial,):
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path, maker: str, keys: Sequence[str] = ()) -> dict[str, Any]:
    """A result of the module `maker`; UserError if the file is missing, broken or lacks a key."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; create it with python -m {maker}") from None
    except ValueError:
        result = None
    if not isinstance(result, dict) or any(key not in result for key in keys):
        raise UserError(f"{path} is not a result of {maker}; create one with python -m {maker}")
    return result


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are left-aligned, all other columns right-aligned."""
    rules = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (heads, rules, *rows))


def ranged(values: Mapping[str, Any], form: str = ".4g") -> str:
    """Median and range of a summary as text."""
    middle, low, high = (format(values[key], form) for key in ("median", "min", "max"))
    return f"{middle} ({low} – {high})"


# --- plots -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def plot(path: Path, size: tuple[float, float], columns: int = 1, rows: int = 1, **options: Any) -> Iterator[Any]:
    """The panels [rows, columns] of a figure that is written to `path` at the end of the block.

    Names that the curves or bars have in common are listed below the panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **options)
    yield panels
    names: dict[str, Any] = {}
    for axes in panels.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            names.setdefault(label, handle)
    if names:
        figure.legend(names.values(), names, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    with atomic_write([path]) as (partial,):
        figure.savefig(partial, dpi=120, format="png")


def bars(axes: Any, names: Sequence[str], groups: Mapping[str, Sequence[Mapping[str, Any]]], **labels: Any) -> None:
    """Horizontal bars of medians with their ranges: a row per name, the first at the top, and a color per group."""
    height = 0.8 / len(groups)
    for number, (label, values) in enumerate(groups.items()):
        medians = [each["median"] for each in values]
        errors = [[each["median"] - each["min"] for each in values], [each["max"] - each["median"] for each in values]]
        rows = [row + number * height for row in range(len(names))]
        drawn = axes.barh(rows, medians, height, xerr=errors, capsize=2, label=label or None)
        axes.bar_label(drawn, fmt="%.4g", padding=4, fontsize="small")
    axes.set_yticks([row + (len(groups) - 1) * height / 2 for row in range(len(names))], names)
    axes.set_ylim(len(names) - 0.2, -0.6)
    axes.margins(x=0.15)
    axes.set(**labels)
