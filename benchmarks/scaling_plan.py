"""The plan of a scaling study (benchmarks/scaling.py): its points, its files, and its jobs for a cluster."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import REPOSITORY, cores, read_json, write_text
from utils import cli
from utils import config as configs
from utils.config import Config
from utils.errors import UserError

PLAN, BENCHY, SUBMIT = "plan.json", "benchy.yaml", "submit.sh"
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


# --- files -----------------------------------------------------------------------------------------------------------


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
