"""Weak and strong scaling over 1 … N ranks, from runs of benchmark mode (`train.py --enable_benchy`).

python -m benchmarks.scaling --config=demo --ranks 1 2 4            the whole study on this machine
python -m benchmarks.scaling --config=bs64_opt --ranks 1 4 8 32 128 --weak 64 128 --strong 2048 --sbatch runs/scaling
bash runs/scaling/submit.sh                                         one job a point and round
python -m benchmarks.scaling --collect runs/scaling                 what has come in so far

Weak scaling keeps the samples a rank (--weak, several if wanted), strong scaling those of all ranks (--strong). Each
number of ranks is measured --trials times, all of them once a round, so that what drifts meets them all. Further
arguments go to train.py.

Of the medians of benchmark mode's trials, and then of the rounds:
    efficiency               samples/s a rank, over those of the smallest number of ranks
    communication overhead   1 - SYNTHETIC / NO-COMM: of a step's time on one fixed batch, what the exchange takes
    input overhead           1 - FULL / SYNTHETIC: of a step's time on real batches, what waiting for them takes
On one rank NO-COMM is SYNTHETIC. On this machine a rank has the same number of threads at every point, the cores shared
among the most ranks, or OMP_NUM_THREADS of the environment: else one rank alone would compute with all cores, and more
of them would seem to gain nothing. Where there are more ranks than cores (and no GPUs), they take turns, which no
communication is to blame for: the table says so.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, Parser, save, summary
from benchmarks.processes import launcher, run_group, why_it_failed
from utils import cli
from utils import config as configs
from utils.cli import positive
from utils.config import Config
from utils.data import get_loader
from utils.errors import UserError, one_line_errors
from utils.files import atomic_write

REPOSITORY = Path(__file__).parent.parent
PLAN, BENCHY, SUBMIT = "plan.json", "benchy.yaml", "submit.sh"
KINDS = ("IO", "SYNTHETIC", "FULL", "NO-COMM")
OVERHEADS = ("communication overhead", "input overhead")
LEAST_TRIALS = 3
SUBMITTED_PER_NODE = 4  # ranks a node that submit_pm.sh asks for


@dataclass(frozen=True, order=True)
class Point:
    """So many ranks with so many samples each."""

    ranks: int
    local_batch: int

    def name(self, number: int) -> str:
        """Of the file of one round."""
        return f"ranks{self.ranks}_batch{self.local_batch}_round{number}.json"


@dataclass(frozen=True)
class Series:
    """A study: 'weak', at a local batch, or 'strong', at a global one."""

    study: str
    batch: int
    points: tuple[Point, ...]

    @property
    def title(self) -> str:
        return f"{self.study}, {'local' if self.study == 'weak' else 'global'} batch {self.batch}"


def studies(ranks: Sequence[int], weak: Sequence[int], strong: Sequence[int]) -> list[Series]:
    """The points of each study; UserError where a batch cannot be shared among the ranks."""
    for batch, number in itertools.product(strong, ranks):
        if batch % number:
            fitting = [count for count in ranks if batch % count == 0]
            raise UserError(
                f"--strong {batch} cannot be shared among {number} ranks; give a multiple of all --ranks, or of them "
                f"only {' '.join(map(str, fitting)) or 'divisors'}"
            )
    ordered = sorted(set(ranks))
    return [
        *(Series("weak", batch, tuple(Point(number, batch) for number in ordered)) for batch in dict.fromkeys(weak)),
        *(
            Series("strong", batch, tuple(Point(number, batch // number) for number in ordered))
            for batch in dict.fromkeys(strong)
        ),
    ]


@dataclass(frozen=True)
class Plan:
    """What is to be measured, and how train.py is called."""

    arguments: tuple[str, ...]  # of train.py, but for the batch
    series: tuple[Series, ...]
    trials: int
    batches: int  # of a trial of benchmark mode
    config: Mapping[str, Any]
    threads: int | None = None  # a rank; None: whatever a batch job's environment says
    cores: int | None = None  # of the machine, where all ranks share one and no GPUs

    @property
    def points(self) -> list[Point]:
        """Each once, though several studies may hold it."""
        return sorted({point for series in self.series for point in series.points})

    def runs(self) -> Iterator[tuple[Point, int]]:
        """Round by round."""
        yield from ((point, number) for number in range(1, self.trials + 1) for point in self.points)

    def flags(self, point: Point) -> list[str]:
        return [*self.arguments, "--enable_benchy", f"--local_batch_size={point.local_batch}"]


def make_plan(options: argparse.Namespace, rest: Sequence[str]) -> Plan:
    """UserError for all that can be known to be wrong before anything runs."""
    for word in rest:
        if word.split("=")[0] in ("--local_batch_size", "--enable_benchy", "--noddp", "--config"):
            raise UserError(f"{word.split('=')[0]} is for this command to set; give batches as --weak and --strong")
    arguments = (f"--config={options.config}", *rest)
    chosen = cli.parse(arguments)
    config = configs.load(chosen.yaml_config, chosen.config, chosen.overrides)
    batch = config.local_batch_size or config.global_batch_size
    weak, strong = ([batch] if given is None else given for given in (options.weak, options.strong))
    series = studies(options.ranks, weak, strong)
    if not series:
        raise UserError("there is nothing to measure; give --weak or --strong a batch")
    for point in {point for each in series for point in each.points}:
        config.model_copy(update={"local_batch_size": point.local_batch}).for_world(point.ranks)
    on_gpus = config.device != "cpu" and torch.cuda.device_count() > 0
    plan = Plan(arguments, tuple(series), options.trials, options.batches or 30, config.model_dump())
    if options.sbatch is not None:
        return plan
    check_here(config, options.ranks)
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return replace(
        plan,
        batches=options.batches or (30 if on_gpus else 5),
        threads=int(threads) if threads.isdigit() else max(1, here // max(options.ranks)),
        cores=None if on_gpus else here,
    )


def check_here(config: Config, ranks: Sequence[int]) -> None:
    """UserError where this machine lacks what the study needs."""
    gpus = torch.cuda.device_count()
    if config.device != "cpu" and 0 < gpus < max(ranks):
        raise UserError(f"{max(ranks)} ranks need as many GPUs, and there are {gpus}; give fewer --ranks, or --sbatch")
    twins = [f"{split}_path_npy_{kind}" for split in ("train", "val") for kind in ("data", "label")]
    keys = {"hdf5": ["train_path", "val_path"], "npy": twins}
    for key in keys.get(get_loader(config.data_loader_config).reads or "", []):
        path = getattr(config, key)
        if path is None or not os.path.exists(path):
            raise UserError(
                f"no such file: {key} {path}; `make demo` makes the demo's, python -m utils.simulation others; "
                f"or do without, by --data_loader_config=synthetic"
            )


# --- measuring -----------------------------------------------------------------------------------------------------


def prepare(plan: Plan, directory: Path) -> None:
    """The plan and benchmark mode's settings, where the results will come to lie."""
    series = [
        {"study": each.study, "batch": each.batch, "points": [astuple(point) for point in each.points]}
        for each in plan.series
    ]
    # Few trials a run, since rounds repeat them.
    trials = f"{{batches: {plan.batches}, trials: 3, warmup_trials: 1}}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write(directory / PLAN, json.dumps({**asdict(plan), "series": series}, indent=2) + "\n")
        write(directory / BENCHY, "".join(f"{kind}: {trials}\n" for kind in ("IO", "SYNTHETIC", "FULL")))
    except OSError as error:
        raise UserError(f"cannot write {directory}: {error.strerror or error}; choose another directory") from None


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    with atomic_write([path]) as (partial,):
        partial.write_text(text, encoding="utf-8")


def measure(plan: Plan, directory: Path) -> None:
    """Every point, round by round; earlier results in the directory go."""
    prepare(plan, directory)
    for old in directory.glob("ranks*_batch*_round*.json"):
        old.unlink()
    runs, log, started = list(plan.runs()), (directory / "log.txt").resolve(), time.perf_counter()
    for place, (point, number) in enumerate(runs, 1):
        output = (directory / point.name(number)).resolve()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(plan.threads),
            "BENCHY_OUTPUT": str(output),
            "BENCHY_CONFIG_FILE": str((directory / BENCHY).resolve()),
        }
        # What a run directory would hold nobody needs.
        with tempfile.TemporaryDirectory() as scratch, open(log, "wb") as file:
            code = run_group(command(plan, point, scratch), environment, file, directory=REPOSITORY)
        if code or not output.exists():
            why = why_it_failed(code, log.read_text(encoding="utf-8", errors="replace")) or "it left no result"
            raise UserError(f"ranks {point.ranks}, local batch {point.local_batch}: {why}; see {log}")
        log.unlink()
        rate = read_run(output, point)["FULL"]["median"]
        sys.stderr.write(
            f"{place}/{len(runs)}, {time.perf_counter() - started:.0f} s: round {number}, ranks {point.ranks}, "
            f"local batch {point.local_batch}: FULL {rate:.4g} samples/s\n"
        )


def command(plan: Plan, point: Point, scratch: str) -> list[str]:
    """One run on this machine."""
    return [*launcher(point.ranks), "train.py", *plan.flags(point), "--set", f"expdir={scratch}"]


# --- on a cluster --------------------------------------------------------------------------------------------------


def job(plan: Plan, point: Point, number: int, ranks_per_node: int) -> str:
    """The shell line that submits one point of one round, unless its result is there."""
    nodes, left = divmod(point.ranks, ranks_per_node)
    if nodes and left:
        raise UserError(
            f"{point.ranks} ranks do not fill nodes of {ranks_per_node}; change --ranks or --ranks_per_node"
        )
    output = f'"$results/{point.name(number)}"'
    other_nodes = [f"--ntasks-per-node={ranks_per_node}", f"--gpus-per-node={ranks_per_node}"]
    words = ["sbatch", f"--nodes={max(1, nodes)}", f"--ntasks={point.ranks}"]
    words += [*(other_nodes if ranks_per_node != SUBMITTED_PER_NODE else []), "submit_pm.sh", *plan.flags(point)]
    return f"[ -e {output} ] || BENCHY_OUTPUT={output} {shlex.join(words)}"


def write_jobs(plan: Plan, directory: Path, ranks_per_node: int) -> None:
    """A script that submits every point of every round that has no result yet."""
    lines = [job(plan, point, number, ranks_per_node) for point, number in plan.runs()]
    head = [
        "#!/usr/bin/env bash",
        "# Submits the points of a scaling study that have no result yet; written by benchmarks/scaling.py.",
        "# shellcheck disable=SC2016 # what is quoted means itself",
        "set -eu",
        f"results={shlex.quote(str(directory.resolve()))}",
        f'export BENCHY_CONFIG_FILE="$results/{BENCHY}"',
        f"cd -- {shlex.quote(str(REPOSITORY))}",
    ]
    prepare(plan, directory)
    path = directory / SUBMIT
    write(path, "\n".join([*head, *lines]) + "\n")
    print(f"written: {path}, {len(lines)} jobs; submit them with: bash {shlex.quote(str(path))}")
    print(f"then: python -m benchmarks.scaling --collect {shlex.quote(str(directory))}")


def read_plan(directory: Path) -> Plan:
    try:
        values = json.loads((directory / PLAN).read_text(encoding="utf-8"))
        series = tuple(
            Series(each["study"], each["batch"], tuple(Point(*point) for point in each["points"]))
            for each in values.pop("series")
        )
        return Plan(**{**values, "series": series, "arguments": tuple(values["arguments"])})
    except OSError as error:
        raise UserError(f"cannot read {directory / PLAN}: {error.strerror}; --sbatch {directory} writes it") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{directory / PLAN} is no plan of this command; write it anew with --sbatch") from None


# --- results -------------------------------------------------------------------------------------------------------

Measured = Mapping[Point, Mapping[str, Any]]  # what `combined` gives, by point


def read_run(path: Path, point: Point) -> dict[str, Any]:
    """What benchmark mode wrote; UserError where it did not, or not of this point."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = None
    kinds = KINDS[:3] if point.ranks == 1 else KINDS
    try:
        sound = all(0 < result[kind]["median"] < math.inf for kind in kinds)
        found = Point(result["ranks"], result["global_batch_size"] // result["ranks"])
        hosts = len(set(result["provenance"]["hostnames"]))
    except (KeyError, TypeError, AttributeError, ZeroDivisionError):
        sound, found, hosts = False, point, 0
    if not sound:
        raise UserError(f"{path} is no result of benchmark mode (train.py --enable_benchy); remove it and run it again")
    if found != point:
        raise UserError(
            f"{path} is of {found.ranks} ranks at local batch {found.local_batch}; remove it and run it again"
        )
    return {**result, "NO-COMM": result.get("NO-COMM", result["SYNTHETIC"]), "hosts": hosts}


def gather(plan: Plan, directory: Path) -> tuple[dict[Point, dict[str, Any]], list[str]]:
    """The points with what their rounds gave, and the names of the runs that gave nothing yet."""
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
    """A point's rounds as one: rates in samples/s, overheads as shares; a run's own rates make its overheads."""
    rates = {kind: [run[kind]["median"] for run in runs] for kind in KINDS}
    overheads = {
        "communication overhead": _lost(rates["SYNTHETIC"], rates["NO-COMM"]),
        "input overhead": _lost(rates["FULL"], rates["SYNTHETIC"]),
    }
    return {
        **asdict(point),
        "hosts": runs[0]["hosts"],
        "device": runs[0]["provenance"].get("device"),
        **{name: summary(values) for name, values in {**rates, **overheads}.items()},
        "step ms": parts({kind: statistics.median(values) for kind, values in rates.items()}, point),
    }


def _lost(slower: Sequence[float], faster: Sequence[float]) -> list[float]:
    return [1 - one / other for one, other in zip(slower, faster, strict=True)]


def parts(rates: Mapping[str, float], point: Point) -> dict[str, float]:
    """A real step's milliseconds; what noise makes negative stays so."""
    seconds = {kind: point.ranks * point.local_batch / rates[kind] for kind in KINDS}
    return {
        "compute": 1e3 * seconds["NO-COMM"],
        "communication": 1e3 * (seconds["SYNTHETIC"] - seconds["NO-COMM"]),
        "input": 1e3 * (seconds["FULL"] - seconds["SYNTHETIC"]),
    }


def efficiencies(series: Series, points: Measured, kind: str) -> dict[int, float]:
    """By number of ranks, of those measured: samples/s a rank over those of the fewest."""
    each = {point.ranks: points[point][kind]["median"] / point.ranks for point in series.points if point in points}
    first = next(iter(each.values()), math.nan)
    return {ranks: rate / first for ranks, rate in each.items()}


# --- telling -------------------------------------------------------------------------------------------------------


def table(plan: Plan, points: Measured, missing: Sequence[str]) -> str:
    shares = [f"efficiency {kind}" for kind in ("SYNTHETIC", "FULL")]
    titles = ["ranks", "local batch", *(f"{kind} samples/s" for kind in KINDS), *shares, *OVERHEADS, "n"]
    lines = []
    for series in plan.series:
        measured = [point for point in series.points if point in points]
        if not measured:
            continue
        found = [efficiencies(series, points, kind) for kind in ("SYNTHETIC", "FULL")]
        lines += [f"**{series.title}**", "", f"| {' | '.join(titles)} |", "|" + "---:|" * len(titles)]
        for point in measured:
            values = points[point]
            cells = [f"{point.ranks}{crowded(plan, point)}", str(point.local_batch)]
            cells += [_range(values[kind]) for kind in KINDS]
            cells += [f"{100 * each[point.ranks]:.1f} %" for each in found]
            cells += [f"{100 * values[name]['median']:.1f} %" for name in OVERHEADS]
            lines.append(f"| {' | '.join([*cells, str(values['FULL']['n'])])} |")
        lines.append("")
    lines.append("Medians of n rounds (smallest – largest); overheads are shares of a step's time.")
    if plan.threads is not None:
        lines.append(f"{plan.threads} thread{'s' * (plan.threads > 1)} a rank at every point.")
    if any(crowded(plan, point) for point in points):
        lines.append(
            f"\\* More threads than the {plan.cores} cores: ranks take turns, and efficiency cannot reach 100 %."
        )
    if missing:
        lines.append(f"Missing: {', '.join(missing)}.")
    return "\n".join(lines)


def crowded(plan: Plan, point: Point) -> str:
    """A mark for points whose ranks have to take turns."""
    if plan.cores is None or plan.threads is None:
        return ""
    return "\\*" if point.ranks * plan.threads > plan.cores else ""


def _range(values: Mapping[str, Any]) -> str:
    return f"{values['median']:.4g} ({values['min']:.4g} – {values['max']:.4g})"


STYLES = {
    "IO": ("tab:blue", "-", "IO: input alone"),
    "NO-COMM": ("tab:orange", ":", "NO-COMM: steps without exchange"),
    "SYNTHETIC": ("tab:orange", "-", "SYNTHETIC: steps on one batch"),
    "FULL": ("tab:green", "-", "FULL: training"),
}


def draw(plan: Plan, points: Measured, directory: Path) -> list[Path]:
    """Throughput, efficiency, and what a step's time goes to; a panel a study."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [series for series in plan.series if any(point in points for point in series.points)]
    paths = []
    for name, fill in (("throughput", _throughput), ("efficiency", _efficiency), ("step", _step)):
        figure, panels = plt.subplots(
            1, len(shown), figsize=(4.6 * len(shown) + 0.8, 4.4), layout="constrained", sharey=name != "step"
        )
        for axes, series in zip([panels] if len(shown) == 1 else panels, shown, strict=True):
            measured = [point for point in series.points if point in points]
            places = fill(axes, series, measured, points)
            axes.set_xticks(places, [f"{point.ranks}{'*' if crowded(plan, point) else ''}" for point in measured])
            turns = any(crowded(plan, point) for point in measured)
            axes.set(xlabel=f"ranks{' (* they take turns on the cores)' if turns else ''}", title=series.title)
            if name != "step":  # where panels share what they are measured by
                axes.label_outer()
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
        paths.append(directory / f"scaling_{name}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def _throughput(axes: Any, series: Series, measured: Sequence[Point], points: Measured) -> list[int]:
    from matplotlib.ticker import LogLocator, NullFormatter

    ranks = [point.ranks for point in measured]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for kind, (color, style, label) in STYLES.items():
        values = [points[point][kind] for point in measured]
        medians = [each["median"] for each in values]
        errors = [[each["median"] - each["min"] for each in values], [each["max"] - each["median"] for each in values]]
        look = {"color": color, "linestyle": style, "marker": "o", "markersize": 4, "capsize": 3}
        axes.errorbar(ranks, medians, errors, **look, label=label)
    first = points[measured[0]]["FULL"]["median"] / ranks[0]
    ideal = [first * number for number in ranks]
    axes.plot(ranks, ideal, "--", color="tab:green", alpha=0.6, label="FULL, were it ideal")
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.25)
    axes.set_ylabel("samples/s, median and range")
    return ranks


def _efficiency(axes: Any, series: Series, measured: Sequence[Point], points: Measured) -> list[int]:
    ranks = [point.ranks for point in measured]
    axes.set_xscale("log", base=2)
    for kind, (color, style, label) in STYLES.items():
        values = [100 * value for value in efficiencies(series, points, kind).values()]
        axes.plot(ranks, values, style, color=color, marker="o", markersize=4, label=label)
    axes.axhline(100, color="0.5", linewidth=0.8)
    axes.xaxis.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.set_ylabel("samples/s a rank, % of the fewest ranks'")
    return ranks


def _step(axes: Any, series: Series, measured: Sequence[Point], points: Measured) -> list[int]:
    places, bottoms = list(range(len(measured))), [0.0] * len(measured)
    for name, color in (("compute", "0.6"), ("communication", "tab:orange"), ("input", "tab:blue")):
        heights = [max(0.0, points[point]["step ms"][name]) for point in measured]
        axes.bar(places, heights, 0.6, bottoms, color=color, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylabel("ms a step")
    axes.set_ylim(0, 1.05 * max(bottoms))
    return places


def report(plan: Plan, directory: Path, output: Path) -> None:
    """Result, table and pictures of the runs in `directory`."""
    points, missing = gather(plan, directory)
    text = table(plan, points, missing)
    result = {
        "arguments of train.py": plan.arguments,
        "unit": "samples/s",
        "threads a rank": plan.threads,
        "cores": plan.cores,
        "config": plan.config,
        "points": list(points.values()),
        "series": [
            {
                "study": series.study,
                "batch": series.batch,
                "efficiency": {kind: efficiencies(series, points, kind) for kind in KINDS},
            }
            for series in plan.series
        ],
        "missing": missing,
    }
    path = save("scaling", result, output)
    write(path.with_suffix(".md"), text + "\n")
    pictures = draw(plan, points, output)
    print(text)
    print(f"\nwritten: {', '.join(map(str, [path, path.with_suffix('.md'), *pictures]))}")


def at_least_three(text: str) -> int:
    number = positive(text)
    if number < LEAST_TRIALS:
        raise argparse.ArgumentTypeError(f"{text} rounds say nothing of the spread, give at least {LEAST_TRIALS}")
    return number


def main() -> None:
    parser = Parser(__doc__)
    parser.set_defaults(output=RESULTS / "scaling")
    parser.add_argument("--config", default="demo", help="of train.py (%(default)s)")
    parser.add_argument("--ranks", nargs="+", type=positive, default=[1, 2, 4], metavar="N", help="(1 2 4)")
    parser.add_argument("--weak", nargs="*", type=positive, metavar="BATCH", help="samples a rank (the config's batch)")
    parser.add_argument("--strong", nargs="*", type=positive, metavar="BATCH", help="samples of all ranks (the same)")
    parser.add_argument("--trials", type=at_least_three, default=3, help="rounds (%(default)s)")
    parser.add_argument("--batches", type=positive, help="of a benchmark trial (30; 5 on a CPU)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--sbatch", type=Path, metavar="DIR", help="only write jobs for submit_pm.sh, there")
    instead.add_argument("--collect", type=Path, metavar="DIR", help="only read the results that are there")
    parser.add_argument(
        "--ranks_per_node", type=positive, default=SUBMITTED_PER_NODE, help="of those jobs (%(default)s)"
    )
    with one_line_errors():
        options, rest = parser.parse_known_args()
        if options.collect is not None:
            if rest:
                raise UserError(f"--collect takes no arguments of train.py, such as {rest[0]}; leave them out")
            report(read_plan(options.collect), options.collect, options.output)
        elif options.sbatch is not None:
            write_jobs(make_plan(options, rest), options.sbatch, options.ranks_per_node)
        else:
            plan = make_plan(options, rest)
            measure(plan, options.output / "points")
            report(plan, options.output / "points", options.output)


if __name__ == "__main__":
    main()
