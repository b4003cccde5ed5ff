"""Weak and strong scaling over 1 … N ranks, from runs of benchmark mode (`train.py --enable_benchy`).

python -m benchmarks.scaling --config=demo --ranks 1 2 4                 the whole study on this machine
python -m benchmarks.scaling --config=bs64_opt --ranks 1 4 32 --submit   one Slurm job per missing point and round
python -m benchmarks.scaling --config=bs64_opt --ranks 1 4 32 --collect  the results so far

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
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.processes import failure_of, launcher
from utils import cli
from utils import config as configs
from utils.cli import positive
from utils.errors import UserError, one_line_errors

KINDS = ("IO", "SYNTHETIC", "FULL", "NO-COMM")
OVERHEADS = ("communication overhead", "input overhead")
PARTS = ("compute", "communication", "input")
BENCHY = "benchy.yaml"
SUBMITTED_PER_NODE = 4  # ranks per node that submit_pm.sh asks for


# --- plan ------------------------------------------------------------------------------------------------------------


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
    if options.submit or options.collect:
        return plan
    gpus = torch.cuda.device_count()
    if on_gpus and gpus < max(options.ranks):
        raise UserError(f"this machine has {gpus} GPUs, fewer than ranks; give fewer --ranks, or --submit")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return replace(
        plan,
        batches=options.batches or (30 if on_gpus else 5),
        threads=int(threads) if threads.isdigit() else max(1, common.cores() // max(options.ranks)),
        cores=None if on_gpus else common.cores(),
    )


# --- runs ------------------------------------------------------------------------------------------------------------


def write_settings(plan: Plan, directory: Path) -> None:
    """Writes the settings of benchmark mode to the directory of the results."""
    trials = f"{{batches: {plan.batches}, trials: 3, warmup_trials: 1}}"  # few trials, since rounds repeat them
    try:
        directory.mkdir(parents=True, exist_ok=True)
        common.write_text(directory / BENCHY, "".join(f"{kind}: {trials}\n" for kind in ("IO", "SYNTHETIC", "FULL")))
    except OSError as error:
        raise UserError(f"cannot write {directory}: {error.strerror or error}; choose another --output") from None


def environment(directory: Path, output: str) -> dict[str, str]:
    """Environment variables that make benchmark mode read those settings and write the result `output`."""
    return {"BENCHY_CONFIG_FILE": str(directory.resolve() / BENCHY), "BENCHY_OUTPUT": str(directory.resolve() / output)}


def measure(plan: Plan, directory: Path) -> None:
    """Runs every point, round by round; earlier results in the directory are deleted."""
    write_settings(plan, directory)
    for old in directory.glob("ranks*_batch*_round*.json"):
        old.unlink()
    runs, log = list(plan.runs()), (directory / "log.txt").resolve()
    for place, (point, number) in enumerate(runs, 1):
        output = directory / point.name(number)
        # MKL_NUM_THREADS, because train.py ignores OMP_NUM_THREADS=1 under torchrun, which sets it by default.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(plan.threads))
        variables = {**threads, **environment(directory, output.name)}
        with tempfile.TemporaryDirectory() as scratch:  # nobody needs the run directory
            command = [*launcher(point.ranks), "train.py", *plan.flags(point), "--set", f"expdir={scratch}"]
            reason = failure_of(command, log, variables)
        if reason or not output.exists():
            reason = reason or "it left no result"
            raise UserError(f"ranks {point.ranks}, local batch {point.local_batch}: {reason}; see {log}")
        log.unlink()
        rate = read_run(output, point)["FULL"]["median"]
        sys.stderr.write(f"{place}/{len(runs)}: round {number}, {point}: FULL {rate:.4g} samples/s\n")


def job(plan: Plan, point: Point, ranks_per_node: int) -> list[str]:
    """The command that submits a point."""
    nodes, left = divmod(point.ranks, ranks_per_node)
    if nodes and left:
        raise UserError(
            f"{point.ranks} ranks do not fill nodes of {ranks_per_node}; change --ranks or --ranks_per_node"
        )
    words = ["sbatch", f"--nodes={max(1, nodes)}", f"--ntasks={point.ranks}"]
    if ranks_per_node != SUBMITTED_PER_NODE:
        words += [f"--ntasks-per-node={ranks_per_node}", f"--gpus-per-node={ranks_per_node}"]
    return [*words, "submit_pm.sh", *plan.flags(point)]


def submit(plan: Plan, directory: Path, ranks_per_node: int) -> None:
    """Submits a job for each point of each round that has no result yet."""
    missing = {
        point.name(number): job(plan, point, ranks_per_node)
        for point, number in plan.runs()
        if not (directory / point.name(number)).exists()
    }
    write_settings(plan, directory)
    for name, words in missing.items():
        try:
            subprocess.run(words, cwd=common.REPOSITORY, env={**os.environ, **environment(directory, name)}, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(f"{shlex.join(words)}: {error}; submit the study where sbatch works") from None
    print(f"submitted {len(missing)} jobs; repeat the command with --collect instead of --submit for the results")


# --- results ---------------------------------------------------------------------------------------------------------

Measured = Mapping[Point, Mapping[str, Any]]  # results of `combined` by point


def read_run(path: Path, point: Point) -> dict[str, Any]:
    """The result of benchmark mode for a point; UserError if it is broken or belongs to another point."""
    kinds = KINDS[:3] if point.ranks == 1 else KINDS
    result = common.read_json(path, "train --enable_benchy", (*kinds, "ranks", "global_batch_size", "provenance"))
    found = Point(result["ranks"], result["global_batch_size"] // result["ranks"])
    if found != point:
        raise UserError(f"{path} has {found.ranks} ranks at local batch {found.local_batch}; delete it and rerun it")
    hosts = len(set(result["provenance"]["hostnames"]))
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
        raise UserError(f"no results in {directory} yet; submit the study with --submit")
    return {point: combined(point, found) for point, found in sorted(runs.items())}, missing


def combined(point: Point, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A point's rounds: rates in samples/s, overheads as fractions, each computed from one run's rates."""
    rates = {kind: [run[kind]["median"] for run in runs] for kind in KINDS}
    pairs = zip(OVERHEADS, (("SYNTHETIC", "NO-COMM"), ("FULL", "SYNTHETIC")), strict=True)
    lost = {name: [1 - run[one]["median"] / run[other]["median"] for run in runs] for name, (one, other) in pairs}
    seconds = {kind: point.ranks * point.local_batch / statistics.median(rates[kind]) for kind in KINDS}
    return {
        **asdict(point),
        "hosts": runs[0]["hosts"],
        "device": runs[0]["provenance"].get("device"),
        **{name: common.summary(values) for name, values in {**rates, **lost}.items()},
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
    first = next(iter(each.values()), float("nan"))
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
            cells = [f"{point.ranks}{plan.mark(point)}", str(point.local_batch)]
            cells += [common.ranged(values[kind]) for kind in KINDS]
            cells += [f"{100 * each[point.ranks]:.1f} %" for each in found]
            cells += [f"{100 * values[name]['median']:.1f} %" for name in OVERHEADS]
            rows.append([*cells, values["FULL"]["n"]])
        if rows:
            parts.append(f"**{series.title}**\n\n{common.table(heads, rows, left=0)}")
    parts.append("Medians of n rounds (smallest – largest); overheads are fractions of a step's time.")
    if plan.threads is not None:
        parts.append(f"Threads per rank: {plan.threads}.")
    if any(plan.mark(point) for point in points):
        parts.append(f"\\* More threads than the {plan.cores} cores: ranks take turns, efficiency cannot reach 100 %.")
    if missing:
        parts.append(f"Missing: {', '.join(missing)}.")
    return "\n\n".join(parts)


def draw(plan: Plan, points: Measured, path: Path) -> None:
    """Efficiency, and below it the parts of a step's time; a column per study."""
    shown = [series for series in plan.series if any(point in points for point in series.points)]
    with common.plot(path, (4.6 * len(shown) + 0.8, 8), len(shown), 2, sharey="row") as panels:
        for (above, below), series in zip(panels.T, shown, strict=True):
            for kind in KINDS:
                found = efficiencies(series, points, kind)
                above.plot(list(found), [100 * value for value in found.values()], "o-", markersize=4, label=kind)
            above.set(title=series.title, ylabel="samples/s per rank, % of the fewest ranks", ylim=(0, None))
            above.set_xscale("log", base=2)
            measured = [point for point in series.points if point in points]
            names = [f"{point.ranks}{plan.mark(point)}" for point in measured]
            above.set_xticks([point.ranks for point in measured], names)
            bottoms = [0.0] * len(measured)
            for part in PARTS:
                heights = [max(0.0, points[point]["step ms"][part]) for point in measured]
                below.bar(names, heights, 0.6, bottoms, label=part)
                bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
            below.set(xlabel="ranks (*: they share cores)" if "*" in "".join(names) else "ranks", ylabel="ms per step")


def report(plan: Plan, directory: Path, output: Path) -> None:
    """Writes result, tables and plots of the runs in `directory`."""
    points, missing = gather(plan, directory)
    series = []
    for one in plan.series:
        efficiency = {kind: efficiencies(one, points, kind) for kind in KINDS}
        series.append({"study": one.study, "batch": one.batch, "efficiency": efficiency})
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
    text = report_text(plan, points, missing)
    common.publish("scaling", result, output, text, lambda path: draw(plan, points, path))


def main() -> None:
    parser = common.Parser(__doc__)
    parser.set_defaults(output=common.RESULTS / "scaling")
    parser.add_argument("--config", default="demo", help="config of train.py (%(default)s)")
    parser.add_argument("--ranks", nargs="+", type=positive, default=[1, 2, 4], metavar="N", help="(1 2 4)")
    parser.add_argument("--weak", nargs="*", type=positive, metavar="BATCH", help="samples per rank (the config's)")
    parser.add_argument("--strong", nargs="*", type=positive, metavar="BATCH", help="samples of all ranks (the same)")
    parser.add_argument("--trials", type=positive, default=3, help="rounds, at least 3 (%(default)s)")
    parser.add_argument("--batches", type=positive, help="batches per benchmark trial (30; 5 on a CPU)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--submit", action="store_true", help="only submit a job for each missing result")
    instead.add_argument("--collect", action="store_true", help="only report the results in the output directory")
    per_node = "ranks per node of those jobs (%(default)s)"
    parser.add_argument("--ranks_per_node", type=positive, default=SUBMITTED_PER_NODE, help=per_node)
    with one_line_errors():
        options, rest = parser.parse_known_args()
        if options.trials < 3:
            raise UserError(f"{options.trials} rounds are too few for a spread; give --trials of at least 3")
        plan, directory = make_plan(options, rest), options.output / "points"
        if options.submit:
            submit(plan, directory, options.ranks_per_node)
            return
        if not options.collect:
            measure(plan, directory)
        report(plan, directory, options.output)


if __name__ == "__main__":
    main()
