"""Shared by the benchmarks: command line, child processes, measurements, results with provenance, tables and plots."""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch

from utils import cli
from utils.data.loaders import Batch, Loader
from utils.distributed.devices import synchronize
from utils.distributed.launch import Launch
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors
from utils.files import atomic_write
from utils.run.provenance import provenance

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
YAML = str(REPOSITORY / "config" / "UNet.yaml")
RUNS = Path("runs/studies")
# torchrun gives its ranks, which have process groups of their own, this long to end before it kills them.
GRACE_SECONDS = 40.0
CYCLES_PER_SECOND = 2e9  # at least a GPU's clock rate: waits may be too long but not too short
LONGEST_WAIT = 0.05  # s
Drawing = Callable[[Path], object]  # writes a plot
TYPES = {int: cli.positive, type(None): cli.positive}  # of options by the type of their default; others are themselves


class Parser(cli.Parser):
    """The command line of a benchmark: the module's docstring as help, --output, and an option for each default."""

    def __init__(self, text: str | None, **defaults: Any) -> None:
        super().__init__(text)
        for name, default in {"output": RESULTS, **defaults}.items():
            several = isinstance(default, (list, tuple))
            kind = type(default[0] if several else default)
            shape: dict[str, Any] = {"nargs": "+"} if several else {}
            self.add_argument(f"--{name}", type=TYPES.get(kind, kind), default=default, help="(%(default)s)", **shape)

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        """Also has SIGTERM and SIGHUP raise SystemExit, so that the benchmark ends the processes that it started."""
        parsed, rest = super().parse_known_args(*arguments, **options)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, end_by_signal)
        return parsed, rest

    def parse_in_repository(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Also makes the repository the working directory; given paths stay, but --runs is one in the repository."""
        options = self.parse_args(argv)
        for name, value in vars(options).items():
            if isinstance(value, Path) and name != "runs":
                setattr(options, name, value.absolute())
        os.chdir(REPOSITORY)
        return options


def end_by_signal(number: int, frame: object) -> NoReturn:
    sys.stderr.write(f"ended by {signal.Signals(number).name}\n")
    raise SystemExit(128 + number)


def run(main: Callable[[], object]) -> None:
    """Runs a benchmark's command; an expected error is one line."""
    with one_line_errors():
        main()


_running: set[subprocess.Popen[bytes]] = set()


def launcher(ranks: int) -> list[str]:
    """The words before the script's name in a command that starts `ranks` ranks on this machine."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(torchrun if ranks > 1 else [])]


def failure_of(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    limit: float | None = None,
    grace: float = GRACE_SECONDS,
) -> str:
    """Runs the command in the repository, with its output in `log`; returns why it failed, or an empty string.

    It ends after `limit` seconds. All processes that it started have ended by then, also after an error or a signal.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
    code = None
    with open(log, "wb") as file:
        variables = {**os.environ, **(environment or {})}
        process = subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=file, **output)
        _running.add(process)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(None if limit is None else max(limit, 0))
        finally:
            _running.remove(process)
            if process.poll() is None:
                _end(process, grace)
    return failure_reason(code, log.read_text(encoding="utf-8", errors="replace"), limit or 0)


def call(what: str, command: Sequence[object], log: Path, **options: Any) -> None:
    """Runs the command as `failure_of` does; UserError if it fails."""
    if reason := failure_of([str(word) for word in command], log, **options):
        raise UserError(f"{what} failed: {reason}; see {log}")


def in_threads(action: Callable[[Any], object], items: Iterable[Any], threads: int, grace: float) -> None:
    """Calls the action, which may start processes, for each item; an error or a signal ends all that are running."""
    pool = ThreadPoolExecutor(threads)
    try:
        list(pool.map(action, items))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(_running):
            _end(process, grace)


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Logs the start of the block, and its seconds at the end."""
    sys.stderr.write(f"{what}\n")
    started = time.perf_counter()
    yield
    sys.stderr.write(f"{what}: {time.perf_counter() - started:.0f} s\n")


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    try:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(grace)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failure_reason(code: int | None, output: str, limit: float = 0) -> str:
    """One line from what the processes wrote; empty if the exit code is 0."""
    if code == 0:
        return ""
    if code is None:
        return f"stopped after {limit:.0f} s"
    reported = re.findall(r"^error: (.*)", output, re.MULTILINE)
    raised = re.findall(r"^(?:\[rank\d+\]:\s*)?((?:[A-Za-z_][\w.]*)(?:Error|Exception)(?::.*)?)$", output, re.MULTILINE)
    raised = [line for line in raised if "ChildFailedError" not in line]  # torchrun raises it for any failed rank
    signals = [signal.Signals(-code).name] if code < 0 else re.findall(r"Signal \d+ \((SIG\w+)\)", output)
    return (reported or raised or [f"ended by {name}" for name in signals] or [f"exit code {code}"])[0]


def this_machine() -> World:
    """A world of one rank on the GPU, or on the CPU if there is none."""
    return World(Launch("benchmark"), torch.device("cuda" if torch.cuda.is_available() else "cpu"))


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


def repeat(call: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Seconds of each of several calls after a warm-up: as many calls as fit into `seconds`, 3 to 500."""
    call()  # compiles, allocates, and runs cuDNN's search
    synchronize(device)
    started = time.perf_counter()
    call()
    issued = time.perf_counter() - started
    synchronize(device)
    count = min(max(int(seconds / max(time.perf_counter() - started, 1e-6)), 3), 500)
    if device.type != "cuda":
        return timeit.repeat(call, number=1, repeat=count)
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2))
    # The device sleeps until the calls are queued: otherwise the launch of a short kernel would be timed.
    torch.cuda._sleep(int(min(1.5 * issued * count, LONGEST_WAIT) * CYCLES_PER_SECOND))
    for start, end in zip(starts, ends, strict=True):
        start.record()
        call()
        end.record()
    synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]


def summary(values: Sequence[float]) -> dict[str, Any]:
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
    return {**spread, "trials": list(values)}


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (NaN for a single value) and the values."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return {"mean": statistics.fmean(values), "stdev": deviation, "n": len(values), "values": list(values)}


def endless(loader: Loader) -> Generator[Batch, None, None]:
    for epoch in itertools.count():
        yield from loader.epoch(epoch)


def save(name: str, options: argparse.Namespace, result: Mapping[str, Any], text: str) -> Path:
    """Writes <options.output>/<name>.json with settings and provenance, and the report `text` as .md; atomically."""
    settings = {key: value for key, value in vars(options).items() if key not in ("output", "runs")}
    known = provenance(this_machine())
    known["command"] = [re.sub("(^|=)/.*", r"\1DIR", word) for word in known["command"]]  # no directory of this machine
    content = json.dumps({"settings": settings, **result, "provenance": known}, default=str)
    content = json.loads(content, parse_constant=lambda _: None)  # JSON has no NaN and no infinity
    path: Path = options.output / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write([path, path.with_suffix(".md")]) as partials:
        for partial, written in zip(partials, (json.dumps(content, indent=2), text), strict=True):
            partial.write_text(written + "\n", encoding="utf-8")
    return path


def publish(
    name: str, options: argparse.Namespace, result: Mapping[str, Any], text: str, draw: Drawing | None = None
) -> None:
    """Writes result and report, and the plot of `draw` as <name>.png; prints the report."""
    path = save(name, options, result, text)
    if draw is not None:
        draw(path.with_suffix(".png"))
    sys.stdout.write(f"{text}\n\nwritten: {path}\n")


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are left-aligned, all other columns right-aligned."""
    rules = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (heads, rules, *rows))


def ranged(values: Mapping[str, Any], form: str = ".4g") -> str:
    """Median and range of a summary as text."""
    middle, low, high = (format(values[key], form) for key in ("median", "min", "max"))
    return f"{middle} ({low} – {high})"


def plus_minus(values: Mapping[str, Any] | None, form: str, factor: float = 1) -> str:
    """Mean ± standard deviation of `over_seeds`; the mean alone if it is of one value; empty without values."""
    if values is None:
        return ""
    names = ("mean", "stdev") if values["n"] > 1 else ("mean",)
    return " ± ".join(format(factor * values[name], form) for name in names)


@contextlib.contextmanager
def plot(path: Path, size: tuple[float, float], columns: int = 1, **options: Any) -> Iterator[Any]:
    """The panels of a figure, written to `path` at the end of the block; names of curves or bars are below them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    (panels,) = figure.subplots(1, columns, squeeze=False, **options)
    yield panels
    legends = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    if names := {label: handle for legend in legends for handle, label in legend}:
        figure.legend(names.values(), names, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    with atomic_write([path]) as (partial,):
        figure.savefig(partial, dpi=120, format="png")


def band(axes: Any, places: Any, means: Any, deviations: Any, **options: Any) -> None:
    """A curve with standard deviations."""
    (line,) = axes.plot(places, means, markersize=3, **options)
    pairs = list(zip(means, deviations, strict=True))
    low, high = ([mean + sign * deviation for mean, deviation in pairs] for sign in (-1, 1))
    axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
