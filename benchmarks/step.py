"""Speed of a training step with sets of options, each in a process of its own, the most important first.

python -m benchmarks.step                      the sets of a CPU: make bench-cpu
python -m benchmarks.step --call 1             each convolution, and the fastest sets on a GPU: make bench-gpu CALL=1
python -m benchmarks.step --call 2             pytest -m gpu
python -m benchmarks.step --call 3             Adam and SOAP, predictions, loaders, comparisons, and single options
python -m benchmarks.step --call 1 --peer DIR  also the SC21 tutorial, of which DIR is a clone
python -m benchmarks.step --call 1 --dry_run   on any machine: what the call would reach, at assumed costs
python -m benchmarks.step --sets own cudnn --profile     these sets, in alternating trials in one process

A set is measured as `train.py --enable_benchy` does: SYNTHETIC steps on one batch, FULL steps on real ones, in
interleaved trials. --profile adds the kernels of a step by category. Each set also reports loss and gradient norm after
the same number of steps on the same samples (random values, from which nothing can be learned): speeds are comparable
only if these agree. The rate of matrix products is measured before anything else (cold) and with each set (warm). A
call takes 8 minutes at most. It writes its results after each part, to benchmarks/results/<gpu> on a GPU. It needs
torch, numpy, h5py, pyyaml, pydantic and tensorboard, and creates its data.
"""

import argparse
import functools
import itertools
import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common, layers, loaders, peer, step_profile
from utils.config import Config
from utils.data.loaders import Batch, get_loader, open_volumes
from utils.data.loaders.prefetcher import DEVICE_SLOTS
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import read_json
from utils.run.provenance import device_name
from utils.steps import build
from utils.steps.backends import set_backends
from utils.steps.eager import EagerStep
from utils.steps.graph import WARMUP_STEPS, GraphStep

STARTED = time.perf_counter()
LEARNING_RATE = 2e-4
LOSS_STEPS = 10  # after which losses are compared
WARMUP_SECONDS = 3.0  # at most, after the steps that are necessary
SIZES: dict[str, dict[str, Any]] = {  # --size: by default that of the device
    "cuda": {"batch": 64, "crop": 64, "width": 64, "box": 512, "warmup_steps": 30, "trials": 3, "seconds": 1.0},
    "cpu": {"batch": 4, "crop": 64, "width": 64, "box": 128, "warmup_steps": LOSS_STEPS, "trials": 3, "seconds": 4.0},
    "tiny": {"batch": 2, "crop": 8, "width": 4, "box": 16, "warmup_steps": 3, "trials": 2, "seconds": 0.02},
}

# Assumed seconds, rather too many than too few: a part starts only if it should end in time.
VOLUME, START, SEARCH, TRIALS, LOADERS, LAYERS = 20.0, 10.0, 30.0, 10.0, 90.0, 150.0
RECORD, VOLUMES = 225.0, 60.0
# In place of cuDNN's search, by a set's first word: Triton kernels, which layers.py has compiled; a compiler.
SECONDS = {"own": 15.0, "SOAP": 20.0, "EMA": 15.0, "G": 90.0, "compiled": 90.0}
WRITING, GRACE = 5.0, 5.0  # of the results at the end; for a process that is stopped


class Options(NamedTuple):
    text: str
    changes: Mapping[str, Any] = {}  # of the config 'base'
    graph: bool = False


_FLOAT16 = {"num_data_workers": 8, "enable_amp": True, "precision": "float16"}
_BFLOAT16 = {"data_loader_config": "resident", "enable_amp": True, "precision": "bfloat16"}
_LAST = {**_BFLOAT16, "channels_last": True}
_OWN = {**_LAST, "kernels": "auto"}
_CUDNN = {**_LAST, "kernels": "cudnn"}
_SOAP = {"optimizer.name": "soap", "optimizer.betas": [0.9, 0.95], "ema_decay": 0.999}

PEER = "SC21"  # see peer.py
SETS = {
    "own": Options("bs64_opt with the volume in GPU memory, as a CUDA graph", _OWN, graph=True),
    "cudnn": Options("own, with kernels cudnn", _CUDNN, graph=True),
    "own eager": Options("own without the graph", _OWN),
    "cudnn eager": Options("cudnn without the graph", _CUDNN),
    "SOAP": Options("own with SOAP and averaged weights, as bs64_fast", {**_OWN, **_SOAP}, graph=True),
    "EMA": Options("own with averaged weights", {**_OWN, "ema_decay": 0.999}, graph=True),
    # DALI would need copies of the volume and is rarely installed: the threaded loader stands in for it.
    "G": Options("the tutorial's options at its best: float16, compiled, 8 threads", {**_FLOAT16, "enable_jit": True}),
    PEER: Options("the tutorial's own network and loop, our loader", {**_FLOAT16, "data_loader_config": "resident"}),
    "TF32": Options("the tutorial's start, 2 loader threads"),
    "float32": Options("no TF32, 2 loader threads", {"tf32": False}),
    "bfloat16": Options("volume in memory", _BFLOAT16),
    "channels last": Options("bfloat16, channels last", _LAST),
    "compiled": Options("bfloat16, compiled", {**_BFLOAT16, "enable_jit": True}),
}
for _name, _size in (("own", 16), ("own eager", 16), ("cudnn", 16), ("own", 128), ("cudnn", 128)):
    _changes = {**SETS[_name].changes, "local_batch_size": _size}
    SETS[f"{_name} {_size}"] = SETS[_name]._replace(text=f"{_name} at batch {_size}", changes=_changes)
# The sets of each call; those of a tuple are compared in alternating trials in one process.
Sets = list[tuple[str, ...]]
CPU_SETS: Sets = [("float32",), ("bfloat16",), ("channels last",), ("compiled",)]
FASTEST: Sets = [("own", "cudnn"), ("own", PEER), ("own 128", "own 16", "own eager 16"), ("SOAP",)]
FASTEST += [("own eager", "cudnn eager")]
OTHERS: Sets = [("own", "EMA"), ("own", "G"), ("cudnn 128",), ("cudnn 16",), ("TF32",), *CPU_SETS[1:], CPU_SETS[0]]


def config_of(options: argparse.Namespace, changes: Mapping[str, Any], device: torch.device) -> Config:
    scales = min(6, (options.crop & -options.crop).bit_length() - 1)
    base = {"network.width": options.width, "network.scales": scales, "device": device.type}
    return loaders.config_of(options, {**base, **changes})


class Training:
    """A step with its loader, warmed up on the first samples of the first epoch."""

    def __init__(self, options: argparse.Namespace, name: str, world: World, stack: ExitStack) -> None:
        chosen, self._device, self.memory = SETS[name], world.device, dict[str, float]()
        self.config = config_of(options, chosen.changes, world.device)
        set_backends(self.config, world.device)
        build_loader = get_loader(self.config.data_loader_config).build
        opened = stack.enter_context(build_loader(open_volumes(self.config), world))
        self._note_memory("volumes")
        step_class = GraphStep if chosen.graph else EagerStep
        step = build.step(self.config, world, build.network_with_loss(self.config), step_class)
        stack.callback(step.close)
        self.step: Any = step if name != PEER else peer.Step(options.peer, step.network, world.device)
        self._batches = stack.enter_context(closing(common.endless(opened.train)))
        first = next(self._batches)
        self._fixed = Batch(*(part.clone(memory_format=torch.preserve_format) for part in first))
        self.flops = build.model_size(self.config).flops
        self._note_memory("built")
        self.first_seconds = common.seconds_of(lambda: self.step.warm_up(self._fixed), self._device)
        self._note_memory("first pass")
        if self.config.enable_jit and not self.step.compiled:
            raise UserError("the compiler failed: see its warning")
        # A graph's first steps are eager; then it is recorded once for each of the loader's buffers.
        least = WARMUP_STEPS + DEVICE_SLOTS + 1 if chosen.graph else LOSS_STEPS
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        end = time.perf_counter() + WARMUP_SECONDS
        for batch in itertools.chain([first], self._batches):
            self.losses.append(float(self.step(batch, LEARNING_RATE)))
            self.gradient_norms.append(float(self.step.gradient_norm))
            enough = len(self.losses) >= least and time.perf_counter() > end
            if enough or len(self.losses) >= max(least, options.warmup_steps):
                break
        self.synthetic()
        self._note_memory("steps")
        seconds = common.seconds_of(self.synthetic, self._device, 2) / 2
        self.steps = max(2, math.ceil(options.seconds / seconds))

    def _note_memory(self, after: str) -> None:
        """Keeps the most memory, in GiB, that was allocated on the GPU since the last call."""
        if self._device.type == "cuda":
            self.memory[after] = torch.cuda.max_memory_allocated(self._device) / 2**30
            torch.cuda.reset_peak_memory_stats(self._device)

    def synthetic(self) -> object:
        return self.step(self._fixed, LEARNING_RATE)

    def full(self) -> object:
        return self.step(next(self._batches), LEARNING_RATE)

    def rate(self, action: Callable[[], object]) -> float:
        """Samples/s of one trial."""
        return self.steps * len(self._fixed.inputs) / common.seconds_of(action, self._device, self.steps)


def measure(options: argparse.Namespace) -> None:
    """Measures the sets in alternating trials; writes step.json before the profiler runs, and after it."""
    world = common.this_machine()
    cold, copies = layers.matmul_rate(world.device), step_profile.copy_rate(world.device)
    with ExitStack() as stack:
        built = {name: Training(options, name, world, stack) for name in options.sets}
        measures: dict[str, Callable[[], float]] = {}
        for name, training in built.items():
            measures[f"{name}, SYNTHETIC"] = functools.partial(training.rate, training.synthetic)
            measures[f"{name}, FULL"] = functools.partial(training.rate, training.full)
        rates = common.interleaved(measures, options.trials, warmup=0)
        entries = [entry_of(name, training, rates, options.sets[0]) for name, training in built.items()]
        for entry, training in zip(entries, built.values(), strict=True):
            entry["floor ms"] = step_profile.floor_milliseconds(training.config, cold, copies)
        result = {"unit": "samples/s", layers.COLD: cold, "copies TB/s at the start": copies, "ladder": entries}
        common.save("step", options, result, markdown(entries, cold))
        for entry, training in zip(entries, built.values(), strict=True) if options.profile else ():
            entry["profile"] = step_profile.measure(training.synthetic, world.device)
    common.publish("step", options, result, markdown(entries, cold))


def entry_of(name: str, training: Training, rates: Mapping[str, Sequence[float]], first: str) -> dict[str, Any]:
    """The result of one set of options, and its ratio to the first one in each trial."""
    config, device = training.config, training.step.gradient_norm.device
    dtype = getattr(torch, config.precision) if config.enable_amp else torch.float32
    synthetic, full = (common.summary(rates[f"{name}, {kind}"]) for kind in ("SYNTHETIC", "FULL"))
    pairs = zip(rates[f"{name}, SYNTHETIC"], rates[f"{first}, SYNTHETIC"], strict=True)
    return {
        "name": name,
        "options": SETS[name].text,
        "changes": SETS[name].changes,
        "SYNTHETIC": synthetic,
        "FULL": full,
        "FULL / SYNTHETIC": full["median"] / synthetic["median"],
        "ratio to the first": common.summary([rate / reference for rate, reference in pairs]),
        "TFLOP/s": synthetic["median"] * training.flops / 1e12,
        "matmul TFLOP/s": layers.matmul_rate(device, dtype),
        "first step s": training.first_seconds,
        "steps per trial": training.steps,
        "loss of the warm-up steps": training.losses,
        "gradient norm of the warm-up steps": training.gradient_norms,
        "device GiB": max(training.memory.values(), default=None),
        "device GiB at most until": training.memory,
        "ms": 1e3 * (config.global_batch_size or 0) / synthetic["median"],
    }


def markdown(entries: Sequence[Mapping[str, Any]], cold: float) -> str:
    """A line per set of options, and the kernels of those that were profiled; `cold`: TFLOP/s of matrix products."""
    heads = ["set", "SYNTHETIC samples/s", "/ first", "FULL samples/s", "FULL / SYNTHETIC", "TFLOP/s"]
    heads += ["% of matmul, cold", "% of matmul, warm", "ms", "floor ms", "% of the floor's speed"]
    rows = []
    for entry in entries:
        cells = [f"{entry['name']}: {entry['options']}", common.ranged(entry["SYNTHETIC"])]
        cells += [f"{entry['SYNTHETIC']['median'] / entries[0]['SYNTHETIC']['median']:.3f}"]
        cells += [common.ranged(entry["FULL"]), f"{entry['FULL / SYNTHETIC']:.3f}", f"{entry['TFLOP/s']:.4g}"]
        cells += [f"{100 * entry['TFLOP/s'] / rate:.1f}" for rate in (cold, entry["matmul TFLOP/s"])]
        cells += [f"{entry['ms']:.2f}", f"{entry['floor ms']:.2f}", f"{100 * entry['floor ms'] / entry['ms']:.0f}"]
        finals = [entry[f"{name} of the warm-up steps"][:LOSS_STEPS][-1] for name in ("loss", "gradient norm")]
        rows.append([*cells, ", ".join(f"{value:.4f}" for value in finals)])
    parts = [common.table([*heads, f"loss, gradient norm of step {LOSS_STEPS}"], rows)]
    if profiled := {entry["name"]: entry["profile"] for entry in entries if "profile" in entry}:
        parts.append(step_profile.markdown(profiled))
    return "\n\n".join(parts)


class Part(NamedTuple):
    name: str
    words: Sequence[str]  # of a child process, after the interpreter's name
    seconds: float  # that it should need


def parts_of(options: argparse.Namespace) -> list[Part]:
    if options.call == 2:
        pytest = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header"]
        files, marks = (common.REPOSITORY / "tests").rglob("test_*.py"), re.compile(r"mark\.gpu|from devices import")
        marked = [path for path in files if marks.search(path.read_text(encoding="utf-8"))]
        marked.sort(key=lambda path: -path.stat().st_size)  # no process is left with a long one at the end
        return [Part(path.name, [*pytest, str(path.relative_to(common.REPOSITORY))], 0) for path in marked]
    parts, output = [], f"--output={options.output / 'part'}"
    for names in {None: CPU_SETS, 1: FASTEST, 3: OTHERS}[options.call]:
        if PEER in names and options.peer is None:
            continue
        words = ["-m", "benchmarks.step", "--sets", *names, f"--size={options.size}", output]
        words += ["--profile"] * (options.call is not None) + [f"--peer={options.peer}"] * (PEER in names)
        seconds = sum(SECONDS.get(name.split()[0], SEARCH) + TRIALS for name in names)
        parts.append(Part(", ".join(names), words, START + seconds))
    parts[0] = parts[0]._replace(seconds=parts[0].seconds + VOLUME)
    if options.call == 1:
        parts.insert(0, Part("layers", ["-m", "benchmarks.layers", f"--batch={options.batch}", output], LAYERS))
    if options.call == 3:
        words = ["-m", "benchmarks.loaders", f"--box={options.box}", f"--crop={options.crop}", "--starts=0"]
        words += [f"--batch={options.batch}", "--workers=8", "--trials=2", f"--output={options.output}"]
        record = ["-m", "benchmarks.record", "--size=full", f"--peer={options.peer}", f"--output={options.output}"]
        volumes = ["-m", "benchmarks.volumes", "--width=64", "--trials=2", "--device=cuda"]
        first = [Part("record", record, RECORD)] if options.peer is not None else []
        first.append(Part("loaders", words, LOADERS))
        parts[:0] = [*first, Part("volumes", [*volumes, f"--output={options.output}"], VOLUMES)]
    return parts


def timeline(parts: Sequence[Part], minutes: float) -> str:
    """The parts that a call would reach at the assumed costs, with the seconds of their start and end."""
    now, rows = START, []
    for part in parts:
        end = now + part.seconds
        reached = end <= 60 * minutes - WRITING - GRACE
        rows.append((part.name, f"{now:.0f}", f"{end:.0f}") if reached else (part.name, "not reached", ""))
        now = end if reached else now
    return common.table(("part", "starts after s", "ends after s"), rows)


class Call:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._directory, self._lock = options, options.output, threading.Lock()
        self._deadline = STARTED - START + 60 * options.minutes - WRITING - GRACE
        self.name = f"call{options.call}" if options.call else "ladder"
        self.results: dict[str, Any] = {"unit": "samples/s", "ladder": [], "last lines": {}, "failed": {}}

    def run(self, parts: Sequence[Part]) -> None:
        """Runs the parts, one at a time; the files of tests in four processes."""
        common.in_threads(self._run_part, parts, 4 if self._options.call == 2 else 1, GRACE)
        shutil.rmtree(self._directory / "part", ignore_errors=True)

    def _run_part(self, part: Part) -> None:
        left = self._deadline - time.perf_counter()
        log = self._directory / f"{self.name}-{part.name}.log"
        if part.seconds > left or left <= 0:
            reason = f"no time left: it needs about {part.seconds:.0f} s, {max(left, 0):.0f} s are left"
        else:
            sys.stderr.write(f"== {part.name}, {left:.0f} s left\n")
            reason = common.failure_of([sys.executable, *part.words], log, limit=left, grace=GRACE)
        with self._lock:
            for path in self._directory.glob("part/*.json"):  # also of a process that failed later, in the profiler
                measured = read_json(path)
                self.results["ladder"] += measured.pop("ladder", [])
                first = {key: measured[key] for key in (layers.COLD, layers.WARM, "layers") if key in measured}
                self.results = first | self.results
                path.unlink()
            if self._options.call == 2 and log.exists():
                self.results["last lines"][part.name] = log.read_text(errors="replace").strip().splitlines()[-1:]
            if reason:  # its log is kept
                self.results["failed"][part.name] = reason
            else:
                log.unlink()
            common.save(self.name, self._options, self.results, self.page())

    def page(self) -> str:
        made = [markdown(self.results["ladder"], self.results[layers.COLD])] if self.results["ladder"] else []
        made += [layers.markdown(self.results)] if "layers" in self.results else []
        made += [f"- {name}: {' '.join(line)}" for name, line in self.results["last lines"].items()]
        return "\n\n".join([*made, *(f"- {name}: {reason}" for name, reason in self.results["failed"].items())])


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.Parser(__doc__, minutes=8.0)
    parser.set_defaults(output=None)
    parser.add_argument("--call", type=int, choices=(1, 2, 3), help="a call for a GPU")
    parser.add_argument("--sets", nargs="+", choices=SETS, metavar="SET", help=", ".join(SETS))
    parser.add_argument("--peer", type=Path, metavar="DIR", help="a clone of the SC21 tutorial, to measure it, too")
    parser.add_argument("--profile", action="store_true", help="with --sets: also the kernels of a step")
    parser.add_argument("--size", choices=SIZES, help="of the network, its samples and trials (that for the device)")
    parser.add_argument("--dry_run", action="store_true", help="print what the call would reach, and measure nothing")
    options = parser.parse_args(argv)
    if options.sets and (options.call or options.dry_run):
        raise UserError("--sets measures these sets alone; remove --call and --dry_run, or --sets")
    if options.peer is not None:
        peer.load(options.peer, *peer.NETWORK)  # refuses another directory before anything is measured
        options.peer = options.peer.absolute()
        options.sets = options.sets and [*dict.fromkeys([*options.sets, PEER])]
    elif PEER in (options.sets or ()):
        raise UserError(f"the set {PEER} needs --peer DIR, a clone of the tutorial")
    device = common.this_machine().device
    if options.profile and not (options.sets and device.type == "cuda"):
        raise UserError("--profile needs --sets and a GPU; remove it, or name the sets")
    options.size = options.size or ("cuda" if options.call else device.type)
    vars(options).update(SIZES[options.size])
    if options.sets:
        options.output = options.output or Path("runs/step")
        return measure(options)
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")  # such as nvidia-h200
    options.output = (options.output or common.RESULTS / (name if options.call else "")).absolute()
    parts = parts_of(options)
    if options.dry_run:
        return print(timeline(parts, options.minutes))
    if device.type != "cuda" and options.call:
        raise UserError("torch sees no CUDA device; on a CPU run make bench-cpu")
    call = Call(options)
    call.run(parts)
    return print(f"{call.page()}\n\nwritten: {options.output / call.name}.json")


if __name__ == "__main__":
    common.run(main)
