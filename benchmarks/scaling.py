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

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from utils import cli
from utils import config as configs
from utils.cli import positive
from utils.distributed.threads import usable_cpus
from utils.errors import UserError
from utils.files import read_json

KINDS = ("IO", "SYNTHETIC", "FULL", "NO-COMM")
OVERHEADS = {"communication overhead": ("SYNTHETIC", "NO-COMM"), "input overhead": ("FULL", "SYNTHETIC")}
RANKS_PER_NODE = 4  # that submit_pm.sh asks for


@dataclass(frozen=True, order=True)
class Point:
    ranks: int
    local_batch: int

    def name(self, number: int) -> str:
        """File name of the result of one round."""
        return f"ranks{self.ranks}_batch{self.local_batch}_round{number}.json"


@dataclass(frozen=True)
class Plan:
    """A study. `threads` of each rank: None in a batch job's environment. `cores` of the machine, if ranks share it."""

    arguments: Sequence[str]  # of train.py
    series: Mapping[str, Sequence[Point]]  # by title, such as "weak, local batch 8"
    directory: Path  # of the results of all points
    trials: int
    batches: int  # per trial of benchmark mode
    threads: int | None = None
    cores: int | None = None

    def runs(self) -> Iterator[tuple[Point, Path]]:
        """Points and their results, round by round; a point that several series share is measured once."""
        points = sorted({point for points in self.series.values() for point in points})
        for number in range(1, self.trials + 1):
            yield from ((point, self.directory / point.name(number)) for point in points)

    def flags(self, point: Point) -> list[str]:
        return [*self.arguments, "--enable_benchy", f"--local_batch_size={point.local_batch}"]

    def environment(self, output: Path) -> dict[str, str]:
        """Environment variables with which benchmark mode reads the settings of the plan and writes `output`."""
        settings = (self.directory / "benchy.yaml").resolve()
        trials = f"{{batches: {self.batches}, trials: 3, warmup_trials: 1}}\n"  # few trials, since rounds repeat them
        self.directory.mkdir(parents=True, exist_ok=True)
        settings.write_text("".join(f"{kind}: {trials}" for kind in ("IO", "SYNTHETIC", "FULL")), encoding="utf-8")
        return {"BENCHY_CONFIG_FILE": str(settings), "BENCHY_OUTPUT": str(output.resolve())}

    def mark(self, ranks: int) -> str:
        """The number of ranks, with an asterisk if they have more threads than the machine has cores."""
        return f"{ranks}*" if self.cores and self.threads and ranks * self.threads > self.cores else str(ranks)


def series_of(ranks: Sequence[int], weak: Sequence[int], strong: Sequence[int]) -> dict[str, list[Point]]:
    """The points of each series by title; UserError if a batch cannot be divided among the ranks."""
    for batch, number in itertools.product(strong, ranks):
        if batch % number:
            raise UserError(f"--strong {batch} cannot be divided among {number} ranks; give a multiple of all --ranks")
    counts = sorted(set(ranks))
    series = {f"weak, local batch {batch}": [Point(count, batch) for count in counts] for batch in weak}
    return series | {
        f"strong, global batch {batch}": [Point(count, batch // count) for count in counts] for batch in strong
    }


def make_plan(options: argparse.Namespace, rest: Sequence[str]) -> Plan:
    """The plan; UserError for mistakes that can be found before anything runs."""
    arguments = (f"--config={options.config}", *rest)
    chosen = cli.parse(arguments)
    config = configs.load(chosen.yaml_config, chosen.config, chosen.overrides)
    batch = config.local_batch_size or config.global_batch_size or 0
    weak, strong = ([batch] if given is None else given for given in (options.weak, options.strong))
    series, most = series_of(options.ranks, weak, strong), max(options.ranks)
    for point in {point for points in series.values() for point in points}:
        config.model_copy(update={"local_batch_size": point.local_batch}).for_world(point.ranks)
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    remote = options.submit or options.collect
    batches = options.batches or (30 if gpus or remote else 5)
    shared = arguments, series, options.output / "points", options.trials, batches
    if remote:
        return Plan(*shared)
    if gpus and gpus < most:
        raise UserError(f"this machine has {gpus} GPUs, fewer than ranks; give fewer --ranks, or --submit")
    threads, cores = os.environ.get("OMP_NUM_THREADS", ""), len(usable_cpus())
    return Plan(*shared, int(threads) if threads.isdigit() else max(1, cores // most), None if gpus else cores)


def measure(plan: Plan) -> None:
    """Runs every point, round by round; earlier results in the directory are deleted."""
    for old in plan.directory.glob("ranks*_batch*_round*.json"):
        old.unlink()
    for point, output in plan.runs():
        # MKL_NUM_THREADS, because train.py ignores OMP_NUM_THREADS=1 under torchrun, which sets it by default.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(plan.threads))
        with tempfile.TemporaryDirectory() as scratch:  # nobody needs the run directory
            command = [*common.launcher(point.ranks), "train.py", *plan.flags(point), "--set", f"expdir={scratch}"]
            what, log = f"ranks {point.ranks}, local batch {point.local_batch}", (plan.directory / "log.txt").resolve()
            common.call(what, command, log, environment={**threads, **plan.environment(output)})
        sys.stderr.write(f"{output.name}: FULL {read_json(output)['FULL']['median']:.4g} samples/s\n")


def job(plan: Plan, point: Point) -> list[str]:
    """The command that submits a point."""
    nodes, left = divmod(point.ranks, RANKS_PER_NODE)
    if nodes and left:
        raise UserError(f"{point.ranks} ranks do not fill nodes of {RANKS_PER_NODE}; change --ranks")
    return ["sbatch", f"--nodes={max(1, nodes)}", f"--ntasks={point.ranks}", "submit_pm.sh", *plan.flags(point)]


def submit(plan: Plan) -> None:
    """Submits a job for each point of each round that has no result yet."""
    jobs = [(job(plan, point), output) for point, output in plan.runs() if not output.exists()]
    for words, output in jobs:
        try:
            subprocess.run(words, cwd=common.REPOSITORY, env={**os.environ, **plan.environment(output)}, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(f"{error}; submit the study where sbatch works") from None
    print(f"submitted {len(jobs)} jobs; repeat the command with --collect instead of --submit for the results")


def gather(plan: Plan) -> tuple[dict[Point, dict[str, Any]], list[str]]:
    """The points with the results of their rounds, and the file names of missing runs."""
    runs: dict[Point, list[dict[str, Any]]] = {}
    missing = []
    for point, path in plan.runs():
        if path.exists():
            run = read_json(path)
            runs.setdefault(point, []).append({"NO-COMM": run["SYNTHETIC"], **run})
        else:
            missing.append(path.name)
    if not runs:
        raise UserError(f"no results in {plan.directory} yet; submit the study with --submit")
    return {point: combined(point, measured) for point, measured in sorted(runs.items())}, missing


def combined(point: Point, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A point's rounds: rates in samples/s, overheads as fractions, each computed from one run's rates."""
    values = {kind: [run[kind]["median"] for run in runs] for kind in KINDS}
    for name, (slower, faster) in OVERHEADS.items():
        values[name] = [1 - slow / fast for slow, fast in zip(values[slower], values[faster], strict=True)]
    measured = {name: common.summary(trials) for name, trials in values.items()}
    return {**asdict(point), "device": runs[0]["provenance"]["device"], **measured}


def efficiencies(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Samples/s per rank relative to the first point, by kind and number of ranks."""
    rates = {kind: {point["ranks"]: point[kind]["median"] / point["ranks"] for point in points} for kind in KINDS}
    return {kind: {ranks: rate / next(iter(of.values())) for ranks, rate in of.items()} for kind, of in rates.items()}


def report(plan: Plan, options: argparse.Namespace) -> None:
    """Writes the result of the runs that exist, and a table per series."""
    points, missing = gather(plan)
    heads = ["ranks", "local batch", *(f"{kind} samples/s" for kind in KINDS)]
    heads += ["efficiency SYNTHETIC", "efficiency FULL", *OVERHEADS, "n"]
    parts, series = [], []
    for title, places in plan.series.items():
        measured, rows = [points[place] for place in places if place in points], []
        efficiency = efficiencies(measured)
        for values in measured:
            ranks = values["ranks"]
            cells = [plan.mark(ranks), values["local_batch"], *(common.ranged(values[kind]) for kind in KINDS)]
            cells += [f"{100 * efficiency[kind][ranks]:.1f} %" for kind in ("SYNTHETIC", "FULL")]
            cells += [f"{100 * values[name]['median']:.1f} %" for name in OVERHEADS]
            rows.append([*cells, values["FULL"]["n"]])
        parts.append(f"**{title}**\n\n{common.table(heads, rows, left=0)}")
        series.append({"series": title, "efficiency": efficiency})
    parts.append("Medians of n rounds (smallest – largest); overheads are fractions of a step's time.")
    if plan.threads is not None:
        parts.append(f"Threads per rank: {plan.threads}.")
    if any(plan.mark(point.ranks).endswith("*") for point in points):
        parts.append(f"\\* More threads than the {plan.cores} cores: ranks take turns, efficiency cannot reach 100 %.")
    if missing:
        parts.append(f"Missing: {', '.join(missing)}.")
    machine = {"arguments of train.py": plan.arguments, "threads per rank": plan.threads, "cores": plan.cores}
    result = {**machine, "points": list(points.values()), "series": series, "missing": missing}
    common.publish("scaling", options, result, "\n\n".join(parts))


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__, config="demo", ranks=[1, 2, 4], trials=3, output=common.RESULTS / "scaling")
    parser.add_argument("--weak", nargs="*", type=positive, metavar="BATCH", help="samples per rank (the config's)")
    parser.add_argument("--strong", nargs="*", type=positive, metavar="BATCH", help="samples of all ranks (the same)")
    parser.add_argument("--batches", type=positive, help="batches per benchmark trial (30; 5 on a CPU)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--submit", action="store_true", help="only submit a job for each missing result")
    instead.add_argument("--collect", action="store_true", help="only report the results in the output directory")
    options, rest = parser.parse_known_args(argv)
    plan = make_plan(options, rest)
    if options.submit:
        return submit(plan)
    if not options.collect:
        measure(plan)
    return report(plan, options)


if __name__ == "__main__":
    common.run(main)
