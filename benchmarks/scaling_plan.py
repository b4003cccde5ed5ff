"""The plan of a scaling study (benchmarks/scaling.py): its points, and its jobs for a cluster."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import REPOSITORY, cores, write_text
from utils import cli
from utils import config as configs
from utils.errors import UserError

BENCHY = "benchy.yaml"
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
    if options.submit or options.collect:
        return plan
    gpus = torch.cuda.device_count()
    if on_gpus and gpus < max(options.ranks):
        raise UserError(f"this machine has {gpus} GPUs, fewer than ranks; give fewer --ranks, or --submit")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return replace(
        plan,
        batches=options.batches or (30 if on_gpus else 5),
        threads=int(threads) if threads.isdigit() else max(1, cores() // max(options.ranks)),
        cores=None if on_gpus else cores(),
    )


def write_settings(plan: Plan, directory: Path) -> None:
    """Writes the settings of benchmark mode to the directory of the results."""
    trials = f"{{batches: {plan.batches}, trials: 3, warmup_trials: 1}}"  # few trials, since rounds repeat them
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / BENCHY, "".join(f"{kind}: {trials}\n" for kind in ("IO", "SYNTHETIC", "FULL")))
    except OSError as error:
        raise UserError(f"cannot write {directory}: {error.strerror or error}; choose another --output") from None


def environment(directory: Path, output: str) -> dict[str, str]:
    """The variables with which benchmark mode reads those settings and writes the result `output`."""
    return {"BENCHY_CONFIG_FILE": str(directory.resolve() / BENCHY), "BENCHY_OUTPUT": str(directory.resolve() / output)}


# --- jobs ------------------------------------------------------------------------------------------------------------


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
            subprocess.run(words, cwd=REPOSITORY, env={**os.environ, **environment(directory, name)}, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(f"{shlex.join(words)}: {error}; submit the study where sbatch works") from None
    print(f"submitted {len(missing)} jobs; repeat the command with --collect instead of --submit for the results")
