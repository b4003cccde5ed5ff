"""Tries how a config runs fastest on this machine, and writes the winner as a config of its own.

python -m benchmarks.tune --config=bs64_opt --minutes 20
python train.py --config=tuned

Each trial is a benchmark (--enable_benchy) of train.py or train_graph.py in a process of its own. What is tried changes
how samples are read and steps are computed; which samples, which loss and which precision stay as the config has them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml

from benchmarks.processes import STOPPED, launcher, run_group, why_it_failed
from networks.unet import REWRITES
from utils import cli
from utils import config as configs
from utils.config import Config
from utils.data.loaders import dali
from utils.distributed.world import read_launch
from utils.errors import UserError, one_line_errors
from utils.files import atomic_write
from utils.progress import format_duration

TOP = Path(__file__).resolve().parent.parent
MEASURED = ("IO", "SYNTHETIC", "FULL")
START, COMPARE, KEPT = "start", "compare", "kept"
NOISE = 0.02  # medians closer than this are told apart by no trial's minimum alone
ROUNDS = 2  # of start and winner in turn, at the end
THREADS = (1, 2, 4, 8, 16)
BUCKETS_MB = (10.0, 25.0, 50.0, 100.0)
MEASURED_SECONDS = (3.0, 20.0)  # of one process, beside its start: at least, at most


# --- the search ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a trial changes in the starting config, by dotted keys, and whether train_graph.py runs it."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    graph: bool = False

    def change(self, changes: Mapping[str, Any]) -> Setting:
        return Setting({**self.changes, **changes}, self.graph)


@dataclass(frozen=True)
class Result:
    """What a trial gave: samples/s of its parts by name, or in one line why it failed."""

    seconds: float = 0.0  # from the start of the process to its end
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    fault: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def median(self, name: str = "FULL") -> float:
        """0 where it failed."""
        return statistics.median(self.rates[name]) if name in self.rates else 0.0


@dataclass(frozen=True)
class Trial:
    """A line of the table; `part` is the part of the search that it belongs to."""

    part: str
    setting: Setting
    change: str
    result: Result
    verdict: str = ""


@dataclass(frozen=True)
class Found:
    """What the search came to; `best` may be `start`, and `gain` is None where `start` does not run."""

    start: Trial
    best: Trial
    trials: Sequence[Trial]
    untried: Sequence[str]
    gain: float | None
    pairs: Sequence[tuple[Trial, Trial]] = ()  # start and best in turn, which the gain is from; else from the search


Measure = Callable[[Setting, float], Result]  # the second argument: seconds after which to give up
Candidates = Callable[[Setting], Sequence[Setting]]  # what to try beside a setting


class Budget:
    """Seconds that are left."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock, self._end = seconds, clock, clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()


def search(
    parts: Mapping[str, Candidates],
    measure: Measure,
    budget: Budget,
    tell: Callable[[Trial], None] = lambda trial: None,
) -> Found:
    """Part after part, what beats the best so far is kept; in the end the best and the start are measured in turn."""
    start = Trial(START, Setting(), "as it is", measure(Setting(), budget.left()))
    tell(start)
    trials, untried, best = [start], [], start
    expected = start.result.seconds
    for part, candidates in parts.items():
        tried = len(trials)
        for setting in candidates(best.setting):
            change = describe(setting, best.setting)
            reserve = 2 * expected  # for the comparison at the end
            if budget.left() < expected + reserve:
                untried.append(change)
                continue
            # Compilers may take long, but one trial must not take the place of all others.
            result = measure(setting, min(budget.left() - reserve, max(budget.seconds / 4, 3 * expected)))
            trials.append(Trial(part, setting, change, result, judge(result, best.result)))
            tell(trials[-1])
            if trials[-1].verdict == KEPT:
                best = trials[-1]
            if not result.fault:
                expected = result.seconds
        if best.result.fault and len(trials) > tried:
            break  # what is wrong will be wrong with all the others, too
    if best.result.fault.startswith(STOPPED):
        raise UserError("no time to measure the config as it is, even once; give more --minutes")
    if best.result.fault:
        raise UserError(f"nothing to tune, the config does not run here: {best.result.fault}")
    if best is start:
        return Found(start, best, trials, untried, 1.0)
    if start.result.fault:
        return Found(start, best, trials, untried, None)
    again = compare(start, best, measure, budget, tell)
    trials += again
    pairs = [
        pair for pair in zip(again[0::2], again[1::2], strict=False) if not any(trial.result.fault for trial in pair)
    ]
    if any(trial.result.fault and trial.setting == best.setting for trial in again):
        return Found(start, start, trials, untried, 1.0, pairs)  # it runs at times only
    gain = _rate([pair[1] for pair in pairs] or [best]) / _rate([pair[0] for pair in pairs] or [start])
    surely = gain > 1 + NOISE or all(_rate([after]) > _rate([before]) for before, after in pairs)
    if not surely:
        return Found(start, start, trials, untried, 1.0, pairs)
    return Found(start, best, trials, untried, gain, pairs)


def judge(result: Result, incumbent: Result) -> str:
    """KEPT, or why not; to be kept, the median must be higher by more than noise."""
    if result.fault:
        return result.fault
    rate, bar = result.median(), incumbent.median()
    if rate <= bar:
        return "slower"
    return KEPT if rate > (1 + NOISE) * bar or min(result.rates["FULL"]) > bar else "within the noise"


def compare(start: Trial, best: Trial, measure: Measure, budget: Budget, tell: Callable[[Trial], None]) -> list[Trial]:
    """Both again, in turn, as often as there is time: what drifts on the machine meets both."""
    again: list[Trial] = []
    while len(again) < 2 * ROUNDS and budget.left() >= start.result.seconds + best.result.seconds:
        for name, trial in (("the start again", start), ("the best again", best)):
            again.append(Trial(COMPARE, trial.setting, name, measure(trial.setting, budget.left())))
            tell(again[-1])
    return again


def _rate(trials: Sequence[Trial]) -> float:
    return statistics.median(rate for trial in trials for rate in trial.result.rates["FULL"])


def describe(setting: Setting, before: Setting) -> str:
    """What a setting has that another has not."""
    told = [
        f"{key}={_text(value)}"
        for key, value in setting.changes.items()
        if key not in before.changes or before.changes[key] != value
    ]
    if setting.graph != before.graph:
        told.append("CUDA graph" if setting.graph else "no CUDA graph")
    return " ".join(told)


def _text(value: Any) -> str:
    """As --set takes it."""
    return value if isinstance(value, str) else json.dumps(value)


# --- what is tried -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """What there is to choose from on this machine; `config` is the starting one, settled for the ranks."""

    config: Config
    ranks: int = 1
    cores: int = 1  # a rank
    on_gpu: bool = False
    loaders: Sequence[str] = ()
    local_batch_sizes: Sequence[int] = ()

    def now(self, setting: Setting, key: str) -> Any:
        return setting.changes[key] if key in setting.changes else configs.flatten(self.config)[key]

    def each(self, setting: Setting, key: str, values: Sequence[Any]) -> list[Setting]:
        """The setting with each of the values that it has not yet."""
        return [setting.change({key: value}) for value in values if value != self.now(setting, key)]


def _loader(space: Space, setting: Setting) -> list[Setting]:
    if space.now(setting, "data_loader_config") == "synthetic":
        return []  # no data is wanted
    return space.each(setting, "data_loader_config", space.loaders)


def _threads(space: Space, setting: Setting) -> list[Setting]:
    loader = space.now(setting, "data_loader_config")
    if loader == "synthetic" or (loader == "resident" and space.on_gpu):
        return []  # they have no threads
    return space.each(setting, "num_data_workers", [count for count in THREADS if count <= space.cores])


def _memory_format(space: Space, setting: Setting) -> list[Setting]:
    if not space.now(setting, "channels_last"):
        return [setting.change({"channels_last": True})]
    off = {"channels_last": False}
    return [setting.change({**off, "fused_pointwise": False} if space.now(setting, "fused_pointwise") else off)]


def _compile(space: Space, setting: Setting) -> list[Setting]:
    return space.each(setting, "enable_jit", [True, False])


def _rewrites(space: Space, setting: Setting) -> list[Setting]:
    if space.config.network.name != "unet":
        return []
    choices = [list(names) for count in range(len(REWRITES), -1, -1) for names in combinations(REWRITES, count)]
    now = set(space.now(setting, "network.space_to_depth"))
    return [setting.change({"network.space_to_depth": names}) for names in choices if set(names) != now]


def _fused(space: Space, setting: Setting) -> list[Setting]:
    if not space.on_gpu:
        return []
    if space.now(setting, "fused_pointwise"):
        return [setting.change({"fused_pointwise": False})]
    return [setting.change({"fused_pointwise": True, "channels_last": True})]  # its kernels take no other format


def _graph(space: Space, setting: Setting) -> list[Setting]:
    return [Setting(setting.changes, graph=True)] if space.on_gpu else []


def _batch(space: Space, setting: Setting) -> list[Setting]:
    return space.each(setting, "local_batch_size", space.local_batch_sizes)


def _buckets(space: Space, setting: Setting) -> list[Setting]:
    if space.ranks == 1 or space.config.noddp:
        return []
    return space.each(setting, "bucket_cap_mb", BUCKETS_MB)


PARTS: dict[str, Callable[[Space, Setting], list[Setting]]] = {
    "loader": _loader,
    "threads": _threads,
    "memory_format": _memory_format,
    "compile": _compile,
    "rewrites": _rewrites,
    "fused": _fused,
    "graph": _graph,
    "batch": _batch,
    "buckets": _buckets,
}


def look_around(config: Config, ranks: int, local_batch_sizes: Sequence[int]) -> tuple[Space, list[str]]:
    """What this machine offers, and why some is left out; `config` is settled for the ranks."""
    notes = []
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    loaders = []
    if all(os.path.exists(path) for path in (config.train_path, config.val_path)):
        loaders += ["lowmem", "inmem", "resident"]
    else:
        notes.append("not tried: lowmem, inmem, resident: the HDF5 files are not there")
    try:
        _check_dali(config)
        loaders.append("dali-lowmem")
    except UserError as error:
        notes.append(f"not tried: dali-lowmem: {error}")
    if not on_gpu:
        notes.append("not tried: fused_pointwise, CUDA graph: they need a GPU")
    if local_batch_sizes:
        notes.append("--local_batch_sizes: another batch changes the training, and with it the learning rate")
    else:
        notes.append(
            f"global_batch_size stays {config.global_batch_size}, {config.local_batch_size} a rank: "
            f"another changes the training; --local_batch_sizes tries some"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Space(config, ranks, max(1, cores // ranks), on_gpu, loaders, local_batch_sizes), notes


def _check_dali(config: Config) -> None:
    dali.check_installed()
    for key in (f"{split}_path_npy_{part}" for split in ("train", "val") for part in ("data", "label")):
        path = getattr(config, key)
        if path is None or not os.path.exists(path):
            raise UserError(f"{key} {path} is not there; python -m utils.convert_to_npy makes it")


# --- a trial -------------------------------------------------------------------------------------------------------


class Processes:
    """Measures settings as a user would: the training's own command, in benchmark mode."""

    def __init__(self, arguments: Sequence[str], space: Space, planned: int, budget: Budget, folder: Path) -> None:
        """`arguments` name the starting config; `planned` trials are to share the budget."""
        self._arguments, self._space, self._folder = arguments, space, folder
        self._planned, self._budget = planned, budget
        self._samples: float | None = None  # of one of a measurement's trials

    def __call__(self, setting: Setting, limit: float) -> Result:
        started = time.monotonic()
        if self._samples is None:
            quick = {"batches": 1, "trials": 1, "warmup_trials": 1}
            first = self._run(setting, dict.fromkeys(MEASURED, quick), limit)
            if first.fault:
                return first
            self._samples = self._affordable(first, self._batch(setting))
            limit -= time.monotonic() - started
        return self._run(setting, self._settings(setting), limit)

    def _affordable(self, first: Result, batch: int) -> float:
        """Samples a trial with which all that is planned fits into the budget, from one run with a batch a trial."""
        overhead = first.seconds - sum(batch / first.median(name) for name in first.rates)
        seconds = self._budget.left() / self._planned - overhead
        shortest, longest = MEASURED_SECONDS
        # Five trials and a warm-up of FULL, three and a warm-up of the others.
        a_sample = sum((6 if name == "FULL" else 4) / first.median(name) for name in first.rates)
        return min(max(seconds, shortest), longest) / a_sample

    def _settings(self, setting: Setting) -> dict[str, dict[str, int]]:
        assert self._samples is not None
        batches = max(1, round(self._samples / self._batch(setting)))
        # A graph is recorded after eleven steps, one for each of the loader's buffers; and what a loader has read
        # ahead must be used up before its speed counts.
        steps, buffers = (12 if setting.graph else 1), 4
        return {
            "IO": {"batches": batches, "trials": 3, "warmup_trials": math.ceil(buffers / batches)},
            "SYNTHETIC": {"batches": batches, "trials": 3, "warmup_trials": math.ceil(steps / batches)},
            "FULL": {"batches": batches, "trials": 5, "warmup_trials": math.ceil(buffers / batches)},
        }

    def _batch(self, setting: Setting) -> int:
        return int(self._space.now(setting, "local_batch_size")) * self._space.ranks

    def _run(self, setting: Setting, settings: Mapping[str, Any], limit: float) -> Result:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder = Path(name)
            (folder / "benchy.yaml").write_text(yaml.safe_dump(dict(settings)), encoding="utf-8")
            environment = {
                **os.environ,
                "BENCHY_CONFIG_FILE": str(folder / "benchy.yaml"),
                "BENCHY_OUTPUT": str(folder / "rates.json"),
            }
            started = time.monotonic()
            with open(folder / "output", "wb") as log:
                code = run_group(self._command(setting, folder), environment, log, limit)
            seconds = time.monotonic() - started
            output = (folder / "output").read_text(encoding="utf-8", errors="replace")
            fault = why_it_failed(code, output, limit)
            if not fault and setting.changes.get("enable_jit"):
                warned = re.search(r"\S+ failed, going on without it: .*", output)
                fault = warned.group() if warned else ""
            if fault:
                return Result(seconds, fault=textwrap.shorten(fault, 160, placeholder=" …"))
            found = json.loads((folder / "rates.json").read_text(encoding="utf-8"))
        rates = {name: found[name]["trials"] for name in (*MEASURED, "NO-COMM") if name in found}
        return Result(seconds, rates, provenance=found["provenance"])

    def _command(self, setting: Setting, folder: Path) -> list[str]:
        script = str(TOP / ("train_graph.py" if setting.graph else "train.py"))
        changes = {**setting.changes, "enable_manual_profiling": False, "expdir": str(folder / "runs")}
        return [
            *launcher(self._space.ranks),
            script,
            *self._arguments,
            "--enable_benchy",
            *(f"--set={key}={json.dumps(value, ensure_ascii=False)}" for key, value in changes.items()),
        ]


# --- what comes out ------------------------------------------------------------------------------------------------


def table(found: Found, name: str) -> Iterator[str]:
    """A line a trial: what was changed, median samples/s, kept or why not."""
    changes = [f"{name} {trial.change}" if trial.part == START else trial.change for trial in found.trials]
    width = max(map(len, changes))
    yield f"{'':3} {'change':<{width}}" + "".join(f" {part:>9}" for part in MEASURED) + "  samples/s, medians"
    for number, (change, trial) in enumerate(zip(changes, found.trials, strict=True)):
        rates = "".join(
            f" {trial.result.median(part):9.1f}" if part in trial.result.rates else f" {'-':>9}" for part in MEASURED
        )
        yield f"{number:3} {change:<{width}}{rates}  {trial.verdict or trial.result.fault}".rstrip()


def conclusion(found: Found, name: str, tuned: str) -> str:
    """What was gained, and how far it can be trusted."""
    if found.gain is None:
        return f"{name} does not run here ({found.start.result.fault}); {tuned} does: {_full(found.best)}"
    again = [trial for trial in found.trials if trial.part == COMPARE]
    if found.best is found.start:
        tried = "in the comparison nothing was" if again else "nothing that was tried is"
        return f"{tried} faster than {name} by more than noise: {tuned} is the same; {_full(found.start)}"
    pairs = found.pairs or [(found.start, found.best)]
    before, after = ([pair[number] for pair in pairs] for number in (0, 1))
    how = (
        f"{len(pairs)} {'run' if len(pairs) == 1 else 'runs'} of each, in turn, "
        f"{sum(len(trial.result.rates['FULL']) for trial in before)} trials each, median and range"
        if found.pairs
        else "measured once each, at different times: no time was left to measure them in turn"
    )
    rates = f"FULL {_rate(before):.1f} ({_range(before)}) -> {_rate(after):.1f} ({_range(after)}) samples/s"
    return f"{tuned} is {found.gain:.2f} times {name}: {rates} ({how})"


def _range(trials: Sequence[Trial]) -> str:
    rates = [rate for trial in trials for rate in trial.result.rates["FULL"]]
    return f"{min(rates):.1f} to {max(rates):.1f}"


def _full(trial: Trial) -> str:
    return f"FULL {trial.result.median():.1f} samples/s"


def tuned_yaml(found: Found, config: Config, space: Space, name: str, header: Sequence[str]) -> str:
    """The winner as a file of one config; `config` is the winner's."""
    script = "train_graph.py, the step as a CUDA graph" if found.best.setting.graph else "train.py"
    before = space.config
    old, new = configs.flatten(before), found.best.setting.changes
    changed = [f"{key} {_text(old[key])} -> {_text(value)}" for key, value in new.items()]
    lines = [*header, f"Changed: {', '.join(changed) or 'nothing'}", f"Run it with {script}"]
    # The global batch says it all: on another number of ranks, the local one would change it.
    resolved = config.for_world(space.ranks).model_copy(update={"local_batch_size": None})
    comments = "".join(f"# {' '.join(line.split())}\n" for line in lines)
    return comments + configs.to_yaml(resolved, name)


def _file_header(found: Found, name: str, tuned: str, ranks: int, command: str) -> list[str]:
    made = found.best.result.provenance
    hosts = ", ".join(sorted(set(made.get("hostnames", []))))
    versions = ", ".join(f"{key} {value}" for key, value in made.get("versions", {}).items())
    return [
        f"Written by: {command}",
        f"On {made.get('date')}, {hosts}: {ranks} × {made.get('device')}, {made.get('cpu_count')} cores; {versions}",
        f"Commit: {made.get('git_commit')}",
        f"Gain: {conclusion(found, name, tuned)}",
    ]


def _record(found: Found, name: str, notes: Sequence[str], command: str) -> dict[str, Any]:
    best = found.best
    return {
        "starting config": name,
        "changes": dict(best.setting.changes),
        "script": "train_graph.py" if best.setting.graph else "train.py",
        "gain": found.gain,
        "interleaved pairs": len(found.pairs),
        "unit": "samples/s",
        "trials": [
            {
                **{key: value for key, value in asdict(trial).items() if key != "result"},
                "medians": {part: trial.result.median(part) for part in trial.result.rates},
                **{key: value for key, value in asdict(trial.result).items() if key != "provenance"},
            }
            for trial in found.trials
        ],
        "not tried for lack of time": list(found.untried),
        "notes": list(notes),
        "provenance": {**best.result.provenance, "command": command},
    }


def check_output(directory: Path, name: str, yaml_config: str, overwrite: bool) -> tuple[Path, Path]:
    """The two files to write, before time is spent on what goes in; UserError where they cannot be."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"--name {name!r} must be a plain name of letters, digits, _, - and dots")
    if not directory.is_dir():
        raise UserError(f"no such directory: {directory}; make it, or give another --output")
    target, record = directory / f"{name}.yaml", directory / f"{name}.json"
    if target.resolve() == Path(yaml_config).resolve():
        raise UserError(f"--name {name} would replace {yaml_config}, which the starting config is from; give another")
    for file in sorted(directory.glob("*.yaml")):
        if file != target and name in configs.names(str(file)):
            raise UserError(f"{file} has a config {name} already, which would be found first; give another --name")
    for path in (target, record):
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists; give another --name, or --overwrite to replace it")
    return target, record


# --- the command ---------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python -m benchmarks.tune --help")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes")
    return minutes


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"unknown part {name!r}; known: {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m benchmarks.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="the config to start from, as for train.py")
    parser.add_argument("--yaml_config", default="./config/UNet.yaml", help="file of named configs (%(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="changes the starting config, as for train.py"
    )
    parser.add_argument("--ranks", type=_positive, default=1, help="ranks on this machine (%(default)s)")
    parser.add_argument("--minutes", type=_minutes, default=10.0, help="time to take (%(default)s)")
    parser.add_argument("--name", default="tuned", help="of the config to write (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("config"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace files of that name")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--local_batch_sizes",
        type=_positive,
        nargs="+",
        default=[],
        metavar="SAMPLES",
        help="batches a rank to try, too; they change the training",
    )
    batch.add_argument("--keep_batch", action="store_true", help="keep global_batch_size (the default)")
    parser.add_argument("--only", type=_parts, default=list(PARTS), help=f"parts to try of {','.join(PARTS)} (all)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """The command; bad input ends in one line and exit code 2."""
    with one_line_errors():
        tune(parse(argv), sys.argv[1:] if argv is None else argv)


def tune(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Searches, prints and writes."""
    budget = Budget(60 * options.minutes)
    command = shlex.join(["python", "-m", "benchmarks.tune", *argv])
    if read_launch().world_size > 1:
        raise UserError("start benchmarks.tune once, not on every rank: --ranks=N starts the ranks of each trial")
    files = check_output(options.output, options.name, options.yaml_config, options.overwrite)
    arguments = [f"--yaml_config={options.yaml_config}", *(f"--set={text}" for text in options.set)]
    given = cli.parse([*arguments, *([f"--config={options.config}"] if options.config else [])])
    arguments.insert(1, f"--config={given.config}")

    def load(changes: Mapping[str, Any]) -> Config:
        off = {"enable_benchy": False, "enable_manual_profiling": False}
        return configs.load(given.yaml_config, given.config, {**given.overrides, **changes, **off})

    for size in options.local_batch_sizes:
        load({"local_batch_size": size}).for_world(options.ranks)
    space, notes = look_around(load({}).for_world(options.ranks), options.ranks, options.local_batch_sizes)
    for note in notes:
        print(note, flush=True)
    parts = {name: _bound(PARTS[name], space) for name in options.only}
    planned = 1 + sum(len(candidates(Setting())) for candidates in parts.values()) + 2 * ROUNDS

    def tell(trial: Trial) -> None:
        rate = trial.result.fault or f"{trial.result.median():.1f} samples/s"
        verdict = f", {trial.verdict}" if trial.verdict and not trial.result.fault else ""
        sys.stderr.write(f"{format_duration(budget.left())} left: {trial.change}: {rate}{verdict}\n")

    with tempfile.TemporaryDirectory(prefix="tune-") as folder:
        found = search(parts, Processes(arguments, space, planned, budget, Path(folder)), budget, tell)
    print(*table(found, given.config), sep="\n")
    if found.untried:
        print(f"no time for: {'; '.join(found.untried)}")
    print(conclusion(found, given.config, options.name))
    header = _file_header(found, given.config, options.name, options.ranks, command)
    text = tuned_yaml(found, load(found.best.setting.changes), space, options.name, header)
    try:
        with atomic_write(files) as partials:
            partials[0].write_text(text, encoding="utf-8")
            partials[1].write_text(json.dumps(_record(found, given.config, notes, command), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {options.output}: {error.strerror}; give another --output") from None
    print(f"written: {files[0]}, {files[1]}")
    script = "train_graph.py" if found.best.setting.graph else "train.py"
    place = (
        "" if options.output.resolve() == Path("config").resolve() else f" --yaml_config={shlex.quote(str(files[0]))}"
    )
    print(f"train with: python {script}{place} --config={options.name}")


def _bound(part: Callable[[Space, Setting], list[Setting]], space: Space) -> Candidates:
    return lambda setting: part(space, setting)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a cancelled job, too, tidies up
    main()
