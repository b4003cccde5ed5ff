"""Weak and strong scaling over 1 … N ranks, from runs of benchmark mode (`train.py --enable_benchy`).

python -m benchmarks.scaling --config=demo --ranks 1 2 4            the whole study on this machine
python -m benchmarks.scaling --config=bs64_opt --ranks 1 4 8 32 128 --weak 64 128 --strong 2048 --sbatch runs/scaling
bash runs/scaling/submit.sh                                         one job per point and round
python -m benchmarks.scaling --collect runs/scaling                 the results that exist so far

Weak scaling keeps the samples per rank (--weak, one or more values), strong scaling those of all ranks (--strong). All
points are measured once per round, in --trials rounds, so that drift affects all of them. Other arguments go to
train.py.

Computed from the medians of benchmark mode's trials; the report shows the medians over the rounds:
    efficiency               samples/s per rank, relative to the smallest number of ranks
    communication overhead   1 - SYNTHETIC / NO-COMM: fraction of a step on one fixed batch spent on communication
    input overhead           1 - FULL / SYNTHETIC: fraction of a step on real batches spent waiting for them
On one rank NO-COMM is SYNTHETIC. On this machine each rank has the same number of threads at every point: the cores
divided by the largest number of ranks, or OMP_NUM_THREADS. Otherwise one rank would compute with all cores, and more
ranks would seem to gain nothing. The report marks points with more threads than cores, whose ranks take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, Parser, cores, plot, ranged, read_json, save, summary, table, write_text
from benchmarks.processes import failure_of, launcher
from utils import cli
from utils import config as configs
from utils.cli import positive
from utils.config import Config
from utils.errors import UserError, one_line_errors

REPOSITORY = Path(__file__).parents[1]
PLAN, BENCHY, SUBMIT = "plan.json", "benchy.yaml", "submit.sh"
KINDS = ("IO", "SYNTHETIC", "FULL", "NO-COMM")
OVERHEADS = ("communication overhead", "input overhead")
LEAST_TRIALS = 3
SUBMITTED_PER_NODE = 4  # ranks per node that submit_pm.sh asks for


@dataclass(frozen=True, order=True)
class Point:
    """A number of ranks, and the samples of each."""

    ranks: int
    local_batch: int

    def name(self, number: int) -> str:
        """File name of the result of one round."""
        return f"ranks{self.ranks}_batch{self.local_batch}_round{number}.json"


@dataclass(frozen=True)
class Series:
    """A study: 'weak' at a local batch, or 'strong' at a global one."""

    study: str
    batch: int
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        return f"{self.study}, {'local' if self.study == 'weak' else 'global'} batch {self.batch}"


def studies(ranks: Sequence[int], weak: Sequence[int], strong: Sequence[int]) -> list[Series]:
    """The points of each study; UserError if a batch cannot be divided among the ranks."""
    for batch, number in itertools.product(strong, ranks):
        if batch % number:
            raise UserError(f"--strong {batch} cannot be divided among {number} ranks; give a multiple of all --ranks")
    counts = sorted(set(ranks))
    return [
        *(Series("weak", batch, tuple(Point(count, batch) for count in counts)) for batch in weak),
        *(Series("strong", batch, tuple(Point(count, batch // count) for count in counts)) for batch in strong),
    ]


@dataclass(frozen=True)
class Plan:
    """The points to measure, and the arguments of train.py."""

    arguments: tuple[str, ...]  # without the batch
    series: tuple[Series, ...]
    trials: int
    batches: int  # per trial of benchmark mode
    config: Mapping[str, Any]
    threads: int | None = None  # per rank; None: set by a batch job's environment
    cores: int | None = None  # of the machine if all ranks share its CPU

    @property
    def points(self) -> list[Point]:
        """Each point once, also if several studies contain it."""
        return sorted({point for series in self.series for point in series.points})

    def runs(self) -> Iterator[tuple[Point, int]]:
        """Points and round numbers, round by round."""
        yield from ((point, number) for number in range(1, self.trials + 1) for point in self.points)

    def flags(self, point: Point) -> list[str]:
        return [*self.arguments, "--enable_benchy", f"--local_batch_size={point.local_batch}"]

    def mark(self, point: Point) -> str:
        """An asterisk if the point has more threads than the machine has cores."""
        return "*" if self.cores and self.threads and point.ranks * self.threads > self.cores else ""


def make_plan(options: argparse.Namespace, rest: Sequence[str]) -> Plan:
    """The plan; UserError for every mistake that can be found before anything runs."""
    for word in rest:
        if word.split("=")[0] in ("--local_batch_size", "--enable_benchy", "--noddp", "--config"):
            raise UserError(f"{word.split('=')[0]} is set by this command; give batches as --weak and --strong")
    arguments = (f"--config={options.config}", *rest)
    chosen = cli.parse(arguments)
    config = configs.load(chosen.yaml_config, chosen.config, chosen.overrides)
    batch = config.local_batch_size or config.global_batch_size
    weak, strong = ([batch] if given is None else given for given in (options.weak, options.strong))
    series = studies(options.ranks, weak, strong)
    if not series:
        raise UserError("there is nothing to measure; give --weak or --strong a batch")
    on_gpus = config.device != "cpu" and torch.cuda.device_count() > 0
    plan = Plan(arguments, tuple(series), options.trials, options.batches or 30, config.model_dump())
    for point in plan.points:
        config.model_copy(update={"local_batch_size": point.local_batch}).for_world(point.ranks)
    if options.sbatch is not None:
        return plan
    check_gpus(config, max(options.ranks))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return replace(
        plan,
        batches=options.batches or (30 if on_gpus else 5),
        threads=int(threads) if threads.isdigit() else max(1, cores() // max(options.ranks)),
        cores=None if on_gpus else cores(),
    )


def check_gpus(config: Config, ranks: int) -> None:
    """UserError if this machine has GPUs, but fewer than ranks."""
    gpus = torch.cuda.device_count()
    if config.device != "cpu" and 0 < gpus < ranks:
        raise UserError(
            f"{ranks} ranks need {ranks} GPUs, and this machine has {gpus}; give fewer --ranks, or --sbatch"
        )


# --- measurement -----------------------------------------------------------------------------------------------------


def prepare(plan: Plan, directory: Path) -> None:
    """Writes the plan and the settings of benchmark mode to the directory of the results."""
    series = [{**asdict(each), "points": [astuple(point) for point in each.points]} for each in plan.series]
    trials = f"{{batches: {plan.batches}, trials: 3, warmup_trials: 1}}"  # few trials, since rounds repeat them
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / PLAN, json.dumps({**asdict(plan), "series": series}, indent=2) + "\n")
        write_text(directory / BENCHY, "".join(f"{kind}: {trials}\n" for kind in ("IO", "SYNTHETIC", "FULL")))
    except OSError as error:
        raise UserError(f"cannot write {directory}: {error.strerror or error}; choose another directory") from None


def measure(plan: Plan, directory: Path) -> None:
    """Runs every point, round by round; earlier results in the directory are deleted."""
    prepare(plan, directory)
    for old in directory.glob("ranks*_batch*_round*.json"):
        old.unlink()
    runs, log = list(plan.runs()), (directory / "log.txt").resolve()
    for place, (point, number) in enumerate(runs, 1):
        output = (directory / point.name(number)).resolve()
        environment = {
            "OMP_NUM_THREADS": str(plan.threads),
            "BENCHY_OUTPUT": str(output),
            "BENCHY_CONFIG_FILE": str((directory / BENCHY).resolve()),
        }
        with tempfile.TemporaryDirectory() as scratch:  # nobody needs the run directory
            command = [*launcher(point.ranks), "train.py", *plan.flags(point), "--set", f"expdir={scratch}"]
            reason = failure_of(command, log, environment)
        if reason or not output.exists():
            reason = reason or "it left no result"
            raise UserError(f"ranks {point.ranks}, local batch {point.local_batch}: {reason}; see {log}")
        log.unlink()
        rate = read_run(output, point)["FULL"]["median"]
        sys.stderr.write(f"{place}/{len(runs)}: round {number}, {point}: FULL {rate:.4g} samples/s\n")


def job(plan: Plan, point: Point, number: int, ranks_per_node: int) -> str:
    """The shell line that submits one point of one round, unless its result exists."""
    nodes, left = divmod(point.ranks, ranks_per_node)
    if nodes and left:
        raise UserError(
            f"{point.ranks} ranks do not fill nodes of {ranks_per_node}; change --ranks or --ranks_per_node"
        )
    output = f'"$results/{point.name(number)}"'
    words = ["sbatch", f"--nodes={max(1, nodes)}", f"--ntasks={point.ranks}"]
    if ranks_per_node != SUBMITTED_PER_NODE:
        words += [f"--ntasks-per-node={ranks_per_node}", f"--gpus-per-node={ranks_per_node}"]
    words += ["submit_pm.sh", *plan.flags(point)]
    return f"[ -e {output} ] || BENCHY_OUTPUT={output} {shlex.join(words)}"


def write_jobs(plan: Plan, directory: Path, ranks_per_node: int) -> None:
    """Writes a script that submits every point of every round without a result."""
    lines = [job(plan, point, number, ranks_per_node) for point, number in plan.runs()]
    head = [
        "#!/usr/bin/env bash",
        "# Submits the points of a scaling study that have no result yet; written by benchmarks/scaling.py.",
        "# shellcheck disable=SC2016 # quoted text is literal",
        "set -eu",
        f"results={shlex.quote(str(directory.resolve()))}",
        f'export BENCHY_CONFIG_FILE="$results/{BENCHY}"',
        f"cd -- {shlex.quote(str(REPOSITORY))}",
    ]
    prepare(plan, directory)
    path = directory / SUBMIT
    write_text(path, "\n".join([*head, *lines]) + "\n")
    print(f"written: {path}, {len(lines)} jobs; submit them with: bash {shlex.quote(str(path))}")
    print(f"then: python -m benchmarks.scaling --collect {shlex.quote(str(directory))}")


def read_plan(directory: Path) -> Plan:
    """The plan that --sbatch wrote."""
    values = read_json(directory / PLAN, f"benchmarks.scaling --sbatch {directory}", ("series", "arguments"))
    series = (
        Series(each["study"], each["batch"], tuple(Point(*point) for point in each["points"]))
        for each in values["series"]
    )
    return Plan(**{**values, "series": tuple(series), "arguments": tuple(values["arguments"])})


# --- results ---------------------------------------------------------------------------------------------------------

Measured = Mapping[Point, Mapping[str, Any]]  # results of `combined` by point


def read_run(path: Path, point: Point) -> dict[str, Any]:
    """The result of benchmark mode for a point; UserError if it is broken or belongs to another point."""
    result = read_json(path, "train --enable_benchy")
    kinds = KINDS[:3] if point.ranks == 1 else KINDS
    try:
        sound = all(0 < result[kind]["median"] < math.inf for kind in kinds)
        found = Point(result["ranks"], result["global_batch_size"] // result["ranks"])
        hosts = len(set(result["provenance"]["hostnames"]))
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        sound, found, hosts = False, point, 0
    if not sound:
        raise UserError(f"{path} is not a result of benchmark mode (train.py --enable_benchy); delete it and rerun it")
    if found != point:
        raise UserError(f"{path} has {found.ranks} ranks at local batch {found.local_batch}; delete it and rerun it")
    return {**result, "NO-COMM": result.get("NO-COMM", result["SYNTHETIC"]), "hosts": hosts}


def gather(plan: Plan, directory: Path) -> tuple[dict[Point, dict[str, Any]], list[str]]:
    """The points with the results of their rounds, and the file names of missing runs."""
    runs: dict[Point, list[dict[str, Any]]] = {}
    missing = []
    for point, number in plan.runs():
        path = directory / point.name(number)
        if path.exists():
            runs.setdefault(point, []).append(read_run(path, point))
        else:
            missing.append(path.name)
    if not runs:
        raise UserError(f"no results in {directory} yet; submit with bash {shlex.quote(str(directory / SUBMIT))}")
    return {point: combined(point, found) for point, found in sorted(runs.items())}, missing


def combined(point: Point, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A point's rounds: rates in samples/s, overheads as fractions, each computed from one run's rates."""
    rates = {kind: [run[kind]["median"] for run in runs] for kind in KINDS}
    overheads = (("SYNTHETIC", "NO-COMM"), ("FULL", "SYNTHETIC"))
    lost = [[1 - a / b for a, b in zip(rates[one], rates[other], strict=True)] for one, other in overheads]
    seconds = {kind: point.ranks * point.local_batch / statistics.median(rates[kind]) for kind in KINDS}
    return {
        **asdict(point),
        "hosts": runs[0]["hosts"],
        "device": runs[0]["provenance"].get("device"),
        **{name: summary(values) for name, values in {**rates, **dict(zip(OVERHEADS, lost, strict=True))}.items()},
        # Noise can make a part negative.
        "step ms": {
            "compute": 1e3 * seconds["NO-COMM"],
            "communication": 1e3 * (seconds["SYNTHETIC"] - seconds["NO-COMM"]),
            "input": 1e3 * (seconds["FULL"] - seconds["SYNTHETIC"]),
        },
    }


def efficiencies(series: Series, points: Measured, kind: str) -> dict[int, float]:
    """Samples/s per rank relative to the fewest ranks, by number of ranks."""
    each = {point.ranks: points[point][kind]["median"] / point.ranks for point in series.points if point in points}
    first = next(iter(each.values()), math.nan)
    return {ranks: rate / first for ranks, rate in each.items()}


def report_text(plan: Plan, points: Measured, missing: Sequence[str]) -> str:
    """A table per study, and notes."""
    heads = ["ranks", "local batch", *(f"{kind} samples/s" for kind in KINDS)]
    heads += ["efficiency SYNTHETIC", "efficiency FULL", *OVERHEADS, "n"]
    parts = []
    for series in plan.series:
        found = [efficiencies(series, points, kind) for kind in ("SYNTHETIC", "FULL")]
        rows = []
        for point in (point for point in series.points if point in points):
            values = points[point]
            cells = [
                f"{point.ranks}{plan.mark(point)}",
                str(point.local_batch),
                *(ranged(values[kind]) for kind in KINDS),
            ]
            cells += [f"{100 * each[point.ranks]:.1f} %" for each in found]
            cells += [f"{100 * values[name]['median']:.1f} %" for name in OVERHEADS]
            rows.append([*cells, values["FULL"]["n"]])
        if rows:
            parts.append(f"**{series.title}**\n\n{table(heads, rows, left=0)}")
    parts.append("Medians of n rounds (smallest – largest); overheads are fractions of a step's time.")
    if plan.threads is not None:
        parts.append(f"Threads per rank: {plan.threads}.")
    if any(plan.mark(point) for point in points):
        parts.append(f"\\* More threads than the {plan.cores} cores: ranks take turns, efficiency cannot reach 100 %.")
    if missing:
        parts.append(f"Missing: {', '.join(missing)}.")
    return "\n\n".join(parts)


STYLES = {
    "IO": ("tab:blue", "-", "IO: input alone"),
    "NO-COMM": ("tab:orange", ":", "NO-COMM: steps without communication"),
    "SYNTHETIC": ("tab:orange", "-", "SYNTHETIC: steps on one batch"),
    "FULL": ("tab:green", "-", "FULL: training"),
}


def draw(plan: Plan, points: Measured, directory: Path) -> list[Path]:
    """Throughput, efficiency, and the parts of a step's time; a panel per study."""
    shown = [series for series in plan.series if any(point in points for point in series.points)]
    paths = []
    for name, fill in (("throughput", _throughput), ("efficiency", _efficiency), ("step", _step)):
        paths.append(directory / f"scaling_{name}.png")
        with plot(paths[-1], (4.6 * len(shown) + 0.8, 4.4), len(shown), sharey=name != "step") as (figure, panels):
            for axes, series in zip(panels, shown, strict=True):
                measured = [point for point in series.points if point in points]
                places = fill(axes, series, measured, points)
                axes.set_xticks(places, [f"{point.ranks}{plan.mark(point)}" for point in measured])
                crowded = any(plan.mark(point) for point in measured)
                axes.set(xlabel=f"ranks{' (*: they share cores)' if crowded else ''}", title=series.title)
            handles, labels = panels[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return paths


def _throughput(axes: Any, series: Series, measured: Sequence[Point], points: Measured) -> list[int]:
    ranks = [point.ranks for point in measured]
    for kind, (color, style, label) in STYLES.items():
        values = [points[point][kind] for point in measured]
        medians = [each["median"] for each in values]
        errors = [[each["median"] - each["min"] for each in values], [each["max"] - each["median"] for each in values]]
        axes.errorbar(ranks, medians, errors, color=color, linestyle=style, marker="o", capsize=3, label=label)
    first = points[measured[0]]["FULL"]["median"] / ranks[0]
    axes.plot(ranks, [first * count for count in ranks], "--", color="tab:green", alpha=0.6, label="FULL, ideal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("samples/s, median and range")
    axes.grid(alpha=0.25)
    return ranks


def _efficiency(axes: Any, series: Series, measured: Sequence[Point], points: Measured) -> list[int]:
    ranks = [point.ranks for point in measured]
    for kind, (color, style, label) in STYLES.items():
        values = [100 * value for value in efficiencies(series, points, kind).values()]
        axes.plot(ranks, values, style, color=color, marker="o", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("samples/s per rank, % of the fewest ranks")
    axes.grid(alpha=0.25)
    return ranks


def _step(axes: Any, series: Series, measured: Sequence[Point], points: Measured) -> list[int]:
    places, bottoms = list(range(len(measured))), [0.0] * len(measured)
    for name, color in (("compute", "0.6"), ("communication", "tab:orange"), ("input", "tab:blue")):
        heights = [max(0.0, points[point]["step ms"][name]) for point in measured]
        axes.bar(places, heights, 0.6, bottoms, color=color, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylabel("ms per step")
    return places


def report(plan: Plan, directory: Path, output: Path) -> None:
    """Writes result, tables and plots of the runs in `directory`."""
    points, missing = gather(plan, directory)
    text = report_text(plan, points, missing)
    series = [
        {
            "study": one.study,
            "batch": one.batch,
            "efficiency": {kind: efficiencies(one, points, kind) for kind in KINDS},
        }
        for one in plan.series
    ]
    result = {
        "arguments of train.py": plan.arguments,
        "unit": "samples/s",
        "threads per rank": plan.threads,
        "cores": plan.cores,
        "config": plan.config,
        "points": list(points.values()),
        "series": series,
        "missing": missing,
    }
    path = save("scaling", result, output)
    write_text(path.with_suffix(".md"), text + "\n")
    pictures = draw(plan, points, output)
    print(f"{text}\n\nwritten: {', '.join(map(str, [path, path.with_suffix('.md'), *pictures]))}")


def at_least_three(text: str) -> int:
    number = positive(text)
    if number < LEAST_TRIALS:
        raise argparse.ArgumentTypeError(f"{text} rounds are too few for a spread, give at least {LEAST_TRIALS}")
    return number


def main() -> None:
    parser = Parser(__doc__)
    parser.set_defaults(output=RESULTS / "scaling")
    parser.add_argument("--config", default="demo", help="config of train.py (%(default)s)")
    parser.add_argument("--ranks", nargs="+", type=positive, default=[1, 2, 4], metavar="N", help="(1 2 4)")
    parser.add_argument("--weak", nargs="*", type=positive, metavar="BATCH", help="samples per rank (the config's)")
    parser.add_argument("--strong", nargs="*", type=positive, metavar="BATCH", help="samples of all ranks (the same)")
    parser.add_argument("--trials", type=at_least_three, default=3, help="rounds (%(default)s)")
    parser.add_argument("--batches", type=positive, help="batches per benchmark trial (30; 5 on a CPU)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--sbatch", type=Path, metavar="DIR", help="only write jobs for submit_pm.sh to DIR")
    instead.add_argument("--collect", type=Path, metavar="DIR", help="only read the results in DIR")
    per_node = "ranks per node of those jobs (%(default)s)"
    parser.add_argument("--ranks_per_node", type=positive, default=SUBMITTED_PER_NODE, help=per_node)
    with one_line_errors():
        options, rest = parser.parse_known_args()
        if options.collect is not None and rest:
            raise UserError(f"--collect takes no arguments of train.py, such as {rest[0]}; remove them")
        if options.collect is not None:
            report(read_plan(options.collect), options.collect, options.output)
        elif options.sbatch is not None:
            write_jobs(make_plan(options, rest), options.sbatch, options.ranks_per_node)
        else:
            plan = make_plan(options, rest)
            measure(plan, options.output / "points")
            report(plan, options.output / "points", options.output)


if __name__ == "__main__":
    main()
