"""The optimization ladder: each step changes one option, and keeps it if training becomes faster.

python -m benchmarks.ladder                      the steps that apply to this machine, at most 8 minutes
python -m benchmarks.ladder --budget 300 --width 16 --crop 32

A step of the ladder is a training as `train.py --enable_benchy` runs it: SYNTHETIC steps on one batch, FULL steps on
real ones, in interleaved trials. Each also reports loss and gradient norm after the same number of steps on the same
samples (random values, from which nothing can be learned): speeds are comparable only if these agree.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, peaks
from benchmarks.convolutions import scales
from benchmarks.ladder_report import LOSS_STEPS, best_of, draw, markdown
from benchmarks.loaders import make_file, make_npy, volume_keys
from networks import build_network
from utils import build
from utils import config as configs
from utils.cli import positive
from utils.config import Config
from utils.data import Batch, Loaders, get_loader
from utils.data.loaders.prefetcher import DEVICE_SLOTS
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors, value_errors_for_users
from utils.profiling.flops import training_flops
from utils.runs.provenance import device_name
from utils.steps import Step
from utils.steps.eager import EagerStep
from utils.steps.graph import WARMUP_STEPS, GraphStep

LEARNING_RATE = 2e-4
WARMUP_SECONDS = 3.0  # at most, after the steps that are necessary
BETTER = 1.005  # smaller gains are noise
TRIALS = 3

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class LadderStep:
    """`changes` are keys of the config; `always`: is kept even if it is slower, because others are compared with it.

    `predicted`: SYNTHETIC samples/s of an H200 at batch 64, written down before any measurement: bytes and operations
    of a step over the rates of the chip, with convolutions at half the rate of matrix products (at 70 % with
    space-to-depth in `down1` and `last`).
    """

    name: str
    changes: Changes = field(default_factory=dict)
    graph: bool | None = None
    package: str | None = None  # that must be installed
    always: bool = False
    predicted: int | None = None


GPU_STEPS = (
    LadderStep("float32, no TF32, 2 loader threads", {"tf32": False}, always=True),
    LadderStep("TF32", {"tf32": True}, always=True),
    LadderStep("8 loader threads", {"num_data_workers": 8}),
    LadderStep("DALI", {"data_loader_config": "dali-lowmem"}, package="nvidia.dali"),
    LadderStep("float16 AMP, fused Adam", {"enable_amp": True, "precision": "float16"}, always=True),
    LadderStep("apex FusedAdam", {"enable_apex": True}, package="apex"),
    LadderStep("volume in GPU memory", {"data_loader_config": "resident"}),
    LadderStep("bfloat16", {"precision": "bfloat16"}, predicted=3144),
    LadderStep("channels last", {"channels_last": True}, predicted=3621),
    LadderStep("space-to-depth down1", {"network.space_to_depth": ["down1"]}),
    LadderStep("space-to-depth last", {"network.space_to_depth": ["last"]}),
    LadderStep("space-to-depth down1 and last", {"network.space_to_depth": ["down1", "last"]}, predicted=4586),
    LadderStep("fused pointwise kernels", {"fused_pointwise": True}, predicted=5547),
    LadderStep("CUDA graph", graph=True),
    LadderStep("torch.compile", {"enable_jit": True, "fused_pointwise": False}),
    LadderStep("batch 128", {"local_batch_size": 128}),
    LadderStep("batch 256", {"local_batch_size": 256}),
)
# The step with the original's fastest options: its loader, float16 AMP, fused Adam.
ORIGINAL_BEST = "float16 AMP, fused Adam"
CPU_STEPS = (
    LadderStep("float32", always=True),
    LadderStep("bfloat16", {"enable_amp": True}),
    LadderStep("channels last", {"channels_last": True}),
    LadderStep("space-to-depth down1 and last", {"network.space_to_depth": ["down1", "last"]}),
    LadderStep("torch.compile", {"enable_jit": True}),
    LadderStep("volume in memory", {"data_loader_config": "inmem"}),
)


class Machine:
    """The device, the files, and the current loaders, which the next steps of the ladder reuse if they can."""

    def __init__(self, options: argparse.Namespace, world: World) -> None:
        self.options, self.world = options, world
        self._loaders = ExitStack()
        self._current: tuple[tuple[Any, ...], Loaders] | None = None

    def config(self, changes: Changes) -> Config:
        options = self.options
        base = {
            **volume_keys(options.data, options.valid_data),
            "data_size": options.crop,
            "local_batch_size": options.batch,
            "network.width": options.width,
            "network.scales": scales(options.crop) or 1,
            "Nsamples_val": options.batch,
            "device": self.world.device.type,
        }
        return configs.load(common.YAML, "base", {**base, **changes}).for_world(self.world.size)

    def loaders(self, config: Config) -> Loaders:
        key = (config.data_loader_config, config.num_data_workers, config.channels_last, config.local_batch_size)
        if self._current is None or self._current[0] != key:
            self.close()  # the previous loader may fill the device
            if config.data_loader_config == "dali-lowmem":
                make_npy(self.options.data, self.options.valid_data)
            loaders = get_loader(config.data_loader_config).build(config, self.world, lambda: 0)
            self._current = key, self._loaders.enter_context(loaders)
        return self._current[1]

    def close(self) -> None:
        self._loaders.close()
        self._current = None
        self.free()

    def free(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass
class Built:
    """A step of the ladder, ready to be measured."""

    step: Step
    fixed: Batch
    batches: Generator[Batch, None, None]
    flops_per_sample: float
    losses: list[float]  # of the warm-up steps
    gradient_norms: list[float]

    def synthetic(self) -> object:
        return self.step(*self.fixed, LEARNING_RATE)

    def full(self) -> object:
        return self.step(*next(self.batches), LEARNING_RATE)


def prepare(machine: Machine, changes: Changes, graph: bool) -> Built:
    """Builds the training, and warms it up on the first samples of the first epoch."""
    config, device = machine.config(changes), machine.world.device
    build.backends(config, device)
    loaders = machine.loaders(config)
    step = build.step(config, machine.world, build.model(config), GraphStep if graph else EagerStep)
    loaders.train.attach(step.pending_work)
    batches = common.endless(loaders.train)
    first = next(batches)
    fixed = Batch(*(part.clone(memory_format=torch.preserve_format) for part in first))
    flops = training_flops(step.network, fixed.inputs)
    step.warm_up(*fixed)
    if config.enable_jit and not step.compiled:
        raise RuntimeError("the compiler failed: see its warning")
    # A graph's first steps are eager; then it is recorded once for each of the loader's buffers.
    least = WARMUP_STEPS + DEVICE_SLOTS + 1 if graph else LOSS_STEPS
    losses, norms, end = [], [], time.perf_counter() + WARMUP_SECONDS
    for batch in itertools.chain([first], batches):
        losses.append(float(step(*batch, LEARNING_RATE)))
        norms.append(float(step.gradient_norm))
        if len(losses) >= machine.options.warmup_steps or (len(losses) >= least and time.perf_counter() > end):
            break
    step(*fixed, LEARNING_RATE)
    common.synchronize(device)
    return Built(step, fixed, batches, flops, losses, norms)


def steps_per_trial(machine: Machine, built: Built) -> int:
    seconds_per_step = common.seconds_of(built.synthetic, machine.world.device, 2) / 2
    return max(2, math.ceil(machine.options.seconds / seconds_per_step))


def trial(machine: Machine, built: Built, action: Callable[[], object], steps: int) -> Callable[[], float]:
    """A measurement of samples/s."""
    return lambda: steps * len(built.fixed.inputs) / common.seconds_of(action, machine.world.device, steps)


def measure(machine: Machine, changes: Changes, graph: bool) -> dict[str, Any]:
    """Measures SYNTHETIC and FULL in turn."""
    device = machine.world.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    built = prepare(machine, changes, graph)
    ready = time.perf_counter() - started
    steps = steps_per_trial(machine, built)
    kinds = {"SYNTHETIC": built.synthetic, "FULL": built.full}
    trials = {kind: trial(machine, built, action, steps) for kind, action in kinds.items()}
    rates = common.interleaved(trials, TRIALS, warmup=0)
    built.batches.close()
    result: dict[str, Any] = {name: common.summary(values) for name, values in rates.items()}
    result |= {
        "FULL / SYNTHETIC": result["FULL"]["median"] / result["SYNTHETIC"]["median"],
        "TFLOP/s": result["SYNTHETIC"]["median"] * built.flops_per_sample / 1e12,
        "steps per trial": steps,
        "ready after seconds": ready,
        "loss of the warm-up steps": built.losses,
        "gradient norm of the warm-up steps": built.gradient_norms,
    }
    if device.type == "cuda":
        result["device GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    return result


def climb(
    machine: Machine,
    steps: Sequence[LadderStep],
    deadline: float,
    note: Callable[[list[dict]], None] = lambda results: None,
) -> list[dict]:
    """Measures the steps in turn, each on top of the best so far. `note` receives the results so far."""
    results: list[dict[str, Any]] = []
    changes: dict[str, Any] = {}
    graph, best = False, 0.0
    durations = [0.0]  # the first steps are the slowest
    for step in steps:
        tried, tried_graph = {**changes, **step.changes}, graph if step.graph is None else step.graph
        entry: dict[str, Any] = {"name": step.name, "command": command(tried, tried_graph)}
        if step.predicted is not None:
            entry["predicted for an H200"] = step.predicted
        results.append(entry)
        if step.package is not None and not importable(step.package):
            entry["skipped"] = f"{step.package} is not installed"
            continue
        if time.perf_counter() + statistics.median(durations[-3:]) > deadline:
            entry["skipped"] = "no time left"
            continue
        started = time.perf_counter()
        sys.stderr.write(f"{step.name}\n")
        try:
            entry |= measure(machine, tried, tried_graph)
        except Exception as error:  # the other steps are still measured
            entry["failed"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if tried_graph:
                recover_from_failed_recording(machine.world.device)
            machine.close()
            continue
        finally:
            machine.free()
        durations.append(time.perf_counter() - started)
        # Both count: a step may speed up the network while the input limits the training, or only the input.
        score = math.sqrt(entry["SYNTHETIC"]["median"] * entry["FULL"]["median"])
        entry["kept"] = step.always or score > BETTER * best
        if entry["kept"]:
            changes, graph, best = tried, tried_graph, score
        entry["state"] = {"changes": tried, "graph": tried_graph}
        note(results)
    return results


def recover_from_failed_recording(device: torch.device) -> None:
    """Records a small graph: until one succeeds, PyTorch generates no random numbers on the device."""
    if device.type != "cuda":
        return
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device).add_(1)
    except RuntimeError as error:
        sys.stderr.write(f"the device does not recover: {error}\n")


def compare(machine: Machine, states: Mapping[str, Mapping[str, Any]], trials: int = 5) -> dict[str, Any]:
    """SYNTHETIC trials of several trainings in turn, so that drift affects all of them; ratios to the first.

    states: arguments of `prepare` by name.
    """
    measures = {}
    for name, state in states.items():
        built = prepare(machine, **state)
        built.batches.close()  # the next one may replace the loader
        measures[name] = trial(machine, built, built.synthetic, steps_per_trial(machine, built))
    rates = common.interleaved(measures, trials, warmup=0)
    first, *others = rates
    result: dict[str, Any] = {name: common.summary(values) for name, values in rates.items()}
    for name in others:
        ratios = [one / other for one, other in zip(rates[name], rates[first], strict=True)]
        result[name]["ratio to the first"] = common.summary(ratios)
    machine.free()
    return result


def command(changes: Changes, graph: bool) -> str:
    """The command line of this training."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    changed = [f"--set={key}={text}" for key, text in texts.items()]
    return shlex.join(["python", "train_graph.py" if graph else "train.py", "--config=base", *changed])


def importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def add_options(parser: common.Parser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_integers(batch=64 if on_gpu else 4, crop=64, width=64, box=512 if on_gpu else 128, valid_box=128)
    parser.add_argument("--seconds", type=common.positive_float, default=1.0 if on_gpu else 4.0, help="per trial")
    parser.add_argument("--warmup_steps", type=positive, default=30 if on_gpu else LOSS_STEPS)
    parser.add_argument(
        "--budget", type=common.positive_float, default=240.0 if on_gpu else 500.0, help="seconds for all steps"
    )
    parser.add_argument("--data", type=Path, help="HDF5 file (data/benchmark_<box>.h5, created if missing)")


def settle(options: argparse.Namespace) -> None:
    """Checks the sizes, and creates missing files; UserError if the sizes do not fit."""
    with value_errors_for_users():
        build_network("unet", options.crop, width=1, scales=scales(options.crop))
    if options.crop > min(options.box, options.valid_box):
        raise UserError(f"crops of {options.crop} cells do not fit into boxes of {options.box} and {options.valid_box}")
    if options.data is None:
        options.data = Path(f"data/benchmark_{options.box}.h5")
        make_file(options.data, options.box)
    elif not options.data.exists():
        raise UserError(f"no such file: {options.data}; without --data, one is created")
    options.valid_data = Path(f"data/benchmark_{options.valid_box}.h5")
    make_file(options.valid_data, options.valid_box)


def main() -> None:
    parser = common.Parser(__doc__)
    add_options(parser)
    with one_line_errors():
        options = parser.parse_args()
        settle(options)
        run(options)


def run(options: argparse.Namespace) -> None:
    """Measures the steps for this machine, and writes result, table and plot."""
    world = common.this_machine()
    deadline = time.perf_counter() + options.budget
    measured = peaks.measure(world.device)["matmul_tflops"]
    peak = {name: value["median"] for name, value in measured.items()}
    on_gpu = world.device.type == "cuda"
    with closing(Machine(options, world)) as machine:
        results = climb(machine, GPU_STEPS if on_gpu else CPU_STEPS, deadline)
    if best_of(results) is None:
        reasons = {entry.get("failed") or entry.get("skipped") or "" for entry in results}
        raise UserError(f"no step of the ladder could be measured: {'; '.join(sorted(reasons))}")
    title = f"{device_name(world.device)}, {options.crop}³ crops, batch {options.batch}"
    result = {"settings": common.settings(options), "matmul_peak_tflops": peak, "unit": "samples/s", "ladder": results}
    name, text = "ladder_gpu" if on_gpu else "ladder", markdown(results, peak)
    common.publish(name, result, options.output, text, lambda path: draw(results, title, path))


if __name__ == "__main__":
    main()
