"""Finds the settings with which a config trains fastest on this machine, and writes them as a new config.

python -m benchmarks.tune --config=bs64_opt --minutes 20
python train.py --config=tuned

Each trial is a run of train.py or train_graph.py in benchmark mode (--enable_benchy). One group of options is tried
after the other, and a candidate is kept if it is faster than the best so far by more than noise; at the end, start and
winner alternate. Only options that change how samples are read and steps are computed are tried: samples, loss,
precision and batch size stay those of the config. A loader whose files or packages are missing is reported as failed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common import REPOSITORY, Parser, cores, positive_float, table
from benchmarks.processes import failure_of, launcher
from networks.unet import SPACE_TO_DEPTH
from utils import config as configs
from utils.cli import positive, read_changes
from utils.config import Config
from utils.errors import UserError, one_line_errors
from utils.files import atomic_write
from utils.progress import format_duration

KINDS = ("IO", "SYNTHETIC", "FULL")
NOISE = 0.02  # relative; smaller differences count only if all trials agree
ROUNDS = 2  # of start and winner, alternating at the end
TRIAL_SECONDS = 300.0
GRAPH_STEPS = 12  # steps before a CUDA graph is recorded
SCRIPT = "script"  # the one candidate key that is not a key of the config

Changes = Mapping[str, Any]  # config keys, dotted, to values; and SCRIPT


def candidates(ranks: int, on_gpu: bool) -> dict[str, list[Changes]]:
    """The candidates by group."""
    layers = [[], ["down1"], ["last"], ["down1", "last"], list(SPACE_TO_DEPTH)]
    return {
        "loader": [{"data_loader_config": name} for name in ("lowmem", "inmem", "resident", "dali-lowmem")],
        "threads": [{"num_data_workers": count} for count in (1, 2, 4, 8, 16) if count <= max(1, cores() // ranks)],
        "memory_format": [{"channels_last": True}, {"channels_last": False, "fused_pointwise": False}],
        "compile": [{"enable_jit": True}, {"enable_jit": False}],
        "space_to_depth": [{"network.space_to_depth": names} for names in layers],
        # The fused kernels need this memory format.
        "fused": [{"fused_pointwise": True, "channels_last": True}, {"fused_pointwise": False}] if on_gpu else [],
        "graph": [{SCRIPT: "train_graph.py"}] if on_gpu else [],
        "buckets": [{"bucket_cap_mb": size} for size in (10.0, 25.0, 50.0, 100.0)] if ranks > 1 else [],
    }


@dataclass(frozen=True)
class Trial:
    """A measurement of some settings: samples/s of each trial of benchmark mode by kind, or why it failed."""

    change: str
    changes: Changes
    seconds: float = 0.0  # of the process
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fault: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Median FULL samples/s; 0 if it failed."""
        return statistics.median(self.rates["FULL"]) if self.rates else 0.0

    def faster_than(self, other: Trial) -> bool:
        """True if it is faster by more than noise, or if all its trials are faster than the other's median."""
        return self.rate > (1 + NOISE) * other.rate or min(self.rates.get("FULL", [0.0])) > other.rate


Measure = Callable[[str, Changes, float], Trial]  # of a label and settings, within a limit in seconds


@dataclass
class Search:
    """The search and all its trials, in order."""

    measure: Measure
    deadline: float  # of time.monotonic()
    trials: list[Trial] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # no time left

    def run(self, groups: Mapping[str, Sequence[Changes]], config: Config) -> tuple[Trial, float]:
        """The best trial, which may be the start, and its speed relative to the start."""
        start = best = self._try("start", {})
        if start.fault:
            raise UserError(f"nothing to tune, the config does not run here: {start.fault}")
        own = {SCRIPT: "train.py", **configs.flatten(config)}
        for changes in (changes for group in groups.values() for changes in group):
            now = {**own, **best.changes}
            if all(now[key] == value for key, value in changes.items()):
                continue
            label = " ".join(f"{key}={json.dumps(value)}" for key, value in changes.items())
            if self._left() < 3 * start.seconds:  # the candidate, and the comparison at the end
                self.skipped.append(label)
                continue
            trial = self._try(label, {**best.changes, **changes})
            best = trial if trial.faster_than(best) else best
        return (best, 1.0) if best is start else self._compare(start, best)

    def _compare(self, start: Trial, best: Trial) -> tuple[Trial, float]:
        """Measures both alternately as long as there is time, so that drift of the machine affects both."""
        pairs: list[tuple[Trial, Trial]] = []
        while len(pairs) < ROUNDS and self._left() > start.seconds + best.seconds:
            first, second = self._try("start again", start.changes), self._try("best again", best.changes)
            if second.fault:
                return start, 1.0  # it does not run reliably
            if not first.fault:
                pairs.append((first, second))
        before, after = ([rate for pair in pairs for rate in pair[place].rates["FULL"]] for place in (0, 1))
        gain = statistics.median(after or [best.rate]) / statistics.median(before or [start.rate])
        sure = gain > 1 + NOISE or all(second.rate > first.rate for first, second in pairs)
        return (best, gain) if sure else (start, 1.0)

    def _try(self, label: str, changes: Changes) -> Trial:
        # Compilers may take long, but one trial must not use up the time of all others.
        limit = max(TRIAL_SECONDS, 3 * self.trials[0].seconds) if self.trials else self._left()
        self.trials.append(self.measure(label, changes, min(limit, self._left())))
        result = self.trials[-1].fault or f"{self.trials[-1].rate:.1f} samples/s"
        sys.stderr.write(f"{format_duration(max(0.0, self._left()))} left: {label}: {result}\n")
        return self.trials[-1]

    def _left(self) -> float:
        return self.deadline - time.monotonic()


def benchmark(arguments: Sequence[str], ranks: int, batches: int) -> Measure:
    """Runs the job's own command in benchmark mode, with `arguments` for the config."""
    warmup = math.ceil(GRAPH_STEPS / batches)
    trials = {"batches": batches, "trials": 3, "warmup_trials": warmup}
    settings = {kind: {**trials, "trials": 5} if kind == "FULL" else trials for kind in KINDS}

    def measure(label: str, changes: Changes, limit: float) -> Trial:
        with tempfile.TemporaryDirectory(prefix="tune-") as name:
            folder, keys = Path(name), {**changes, "enable_manual_profiling": False, "expdir": f"{name}/runs"}
            script = str(REPOSITORY / keys.pop(SCRIPT, "train.py"))
            (folder / "benchy.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
            names = {"BENCHY_CONFIG_FILE": f"{name}/benchy.yaml", "BENCHY_OUTPUT": f"{name}/rates.json"}
            flags = [f"--set={key}={json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
            started = time.monotonic()
            command = [*launcher(ranks), script, *arguments, "--enable_benchy", *flags]
            fault = failure_of(command, folder / "output", names, limit)
            seconds = time.monotonic() - started
            if "torch.compile failed" in (folder / "output").read_text(errors="replace") and changes.get("enable_jit"):
                fault = fault or "torch.compile failed"
            if fault:
                return Trial(label, changes, seconds, fault=fault[:160])
            found = json.loads((folder / "rates.json").read_text(encoding="utf-8"))
        return Trial(label, changes, seconds, {kind: found[kind]["trials"] for kind in KINDS}, "", found["provenance"])

    return measure


def output_files(directory: Path, name: str, overwrite: bool) -> list[Path]:
    """The config and the record to write; UserError if that is impossible, before time is spent on measurements."""
    if not directory.is_dir():
        raise UserError(f"no such directory: {directory}; create it, or give another --output")
    files = [directory / f"{name}.yaml", directory / f"{name}.json"]
    for file in sorted(directory.glob("*.yaml")):
        if file not in files and name in configs.read_file(str(file)):
            raise UserError(f"{file} already has a config {name}, which train.py would find first; give another --name")
    for path in files:
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists; give another --name, or --overwrite to replace it")
    return files


def tune(options: argparse.Namespace, command: str) -> None:
    """Searches, prints and writes."""
    deadline = time.monotonic() + 60 * options.minutes
    files = output_files(options.output, options.name, options.overwrite)
    name = options.config or configs.default_name(options.yaml_config)

    def load(changes: Changes) -> Config:
        keys = {key: value for key, value in changes.items() if key != SCRIPT}
        return configs.load(options.yaml_config, name, {**read_changes(options.changes), **keys})

    config = load({}).for_world(options.ranks)
    groups = candidates(options.ranks, config.device != "cpu" and torch.cuda.is_available())
    arguments = [f"--yaml_config={options.yaml_config}", f"--config={name}"]
    arguments += [f"--set={text}" for text in options.changes]
    search = Search(benchmark(arguments, options.ranks, options.batches), deadline)
    best, gain = search.run({group: groups[group] for group in options.only or groups}, config)
    conclusion = f"{options.name} is {gain:.2f} times {name} in FULL samples/s"
    if best.change == "start":
        conclusion = f"nothing was faster than {name} by more than noise: {options.name} is the same"
    rows = [(trial.change, f"{trial.rate:.1f}" if trial.rates else trial.fault) for trial in search.trials]
    print(table(("change", "FULL samples/s"), rows))
    if search.skipped:
        print(f"no time left for: {'; '.join(search.skipped)}")
    print(conclusion)
    made, script = best.provenance, best.changes.get(SCRIPT, "train.py")
    header = (
        f"# Written by: {command}\n# {made['date']}, commit {made['git_commit']}: {options.ranks} × {made['device']}\n"
        f"# {conclusion}. Run it with {script}\n"
    )
    # The global batch size is kept, and the local one depends on the number of ranks.
    tuned = load(best.changes).for_world(options.ranks).model_copy(update={"local_batch_size": None})
    record = {
        "starting config": name,
        "changes": best.changes,
        "gain": gain,
        "trials": [asdict(trial) for trial in search.trials],
        "skipped": search.skipped,
        "provenance": {**best.provenance, "command": command},
    }
    with atomic_write(files) as (new_config, new_record):
        new_config.write_text(header + configs.to_yaml(tuned, options.name), encoding="utf-8")
        new_record.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written: {files[0]}, {files[1]}; train with {script} --config={options.name}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.set_defaults(output=Path("config"))
    parser.add_argument("--config", help="the config to start from")
    parser.add_argument("--yaml_config", default="./config/UNet.yaml", help="file of named configs (%(default)s)")
    parser.add_changes()
    parser.add_argument("--ranks", type=positive, default=1, help="ranks on this machine (%(default)s)")
    parser.add_argument("--minutes", type=positive_float, default=10.0, help="time limit (%(default)s)")
    batches = 30 if torch.cuda.is_available() else 5
    parser.add_argument("--batches", type=positive, default=batches, help="batches per benchmark trial (%(default)s)")
    parser.add_argument("--name", default="tuned", help="name of the new config (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace files of that name")
    parser.add_argument("--only", nargs="+", choices=candidates(1, False), help="groups of options to try (all)")
    with one_line_errors():
        options = parser.parse_args(argv)
        words = sys.argv[1:] if argv is None else argv
        tune(options, shlex.join(["python", "-m", "benchmarks.tune", *words]))


if __name__ == "__main__":
    main()
