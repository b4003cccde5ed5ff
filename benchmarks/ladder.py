"""The optimization ladder: each rung is a training run with a fixed set of options.

python -m benchmarks.ladder                      the rungs of a CPU, at most 8 minutes; a GPU's: make bench-gpu
python -m benchmarks.ladder --budget 300 --width 16 --crop 32

A rung is measured as `train.py --enable_benchy` does: SYNTHETIC steps on one batch, FULL steps on real ones, in
interleaved trials. Each also reports loss and gradient norm after the same number of steps on the same samples (random
values, from which nothing can be learned): speeds are comparable only if these agree.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, peaks
from benchmarks.convolutions import scales
from benchmarks.ladder_report import LOSS_STEPS, draw, markdown
from benchmarks.loaders import make_file, make_npy, volume_keys
from benchmarks.rungs import CPU_RUNGS, Changes, Entry, Rung, predicted, state_of
from utils import config as configs
from utils.config import Config
from utils.data import Batch, DataSplits, get_loader
from utils.data.loaders.prefetcher import DEVICE_SLOTS
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors
from utils.provenance import device_name
from utils.steps import build
from utils.steps.backends import set_backends
from utils.steps.eager import EagerStep
from utils.steps.flops import training_flops
from utils.steps.graph import WARMUP_STEPS, GraphStep

LEARNING_RATE = 2e-4
WARMUP_SECONDS = 3.0  # at most, after the steps that are necessary
TRIALS = 3


class Machine:
    """The device, the files, and the current loaders, which the next rungs reuse if they can."""

    def __init__(self, options: argparse.Namespace, world: World) -> None:
        self.options, self.world = options, world
        self._loaders = ExitStack()
        self._current: tuple[tuple[Any, ...], DataSplits] | None = None

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

    def loaders(self, config: Config) -> DataSplits:
        names = ("data_loader_config", "num_data_workers", "channels_last", "local_batch_size")
        key = tuple(getattr(config, name) for name in names)
        if self._current is None or self._current[0] != key:
            self.close()  # the previous loader may fill the device
            if config.data_loader_config == "dali-lowmem":
                make_npy(self.options.data, self.options.valid_data)
            loaders = get_loader(config.data_loader_config).build(config, self.world)
            self._current = key, self._loaders.enter_context(loaders)
        return self._current[1]

    def close(self) -> None:
        self._current = None
        self._loaders.close()
        self.free()

    def free(self) -> None:
        """Frees memory. Raises if the device is unusable: after a fault such as an illegal address, or because a CUDA
        graph could not be recorded."""
        gc.collect()
        if "torch._dynamo" in sys.modules:  # importing it takes seconds
            torch._dynamo.reset()
        if self.world.device.type == "cuda":
            torch.rand(1, device=self.world.device)
            common.synchronize(self.world.device)
            torch.cuda.empty_cache()


@dataclass
class Built:
    """A rung's training, ready to be measured."""

    step: EagerStep
    fixed: Batch
    batches: Generator[Batch, None, None]
    flops_per_sample: float
    losses: list[float]  # of the warm-up steps
    gradient_norms: list[float]

    def synthetic(self) -> object:
        return self.step(*self.fixed, LEARNING_RATE)

    def full(self) -> object:
        return self.step(*next(self.batches), LEARNING_RATE)

    def close(self) -> None:
        self.batches.close()
        self.step.close()


def prepare(machine: Machine, changes: Changes, graph: bool) -> Built:
    """Builds the step and the loader, and warms them up on the first samples of the first epoch."""
    config, device = machine.config(changes), machine.world.device
    set_backends(config, device)
    loaders = machine.loaders(config)
    step = build.step(config, machine.world, build.model(config), GraphStep if graph else EagerStep)
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


def both_rates(machine: Machine, built: Built, steps: int, trials: int) -> dict[str, list[float]]:
    """Samples/s of SYNTHETIC and FULL, in turn."""
    actions = {"SYNTHETIC": built.synthetic, "FULL": built.full}
    measures = {name: trial(machine, built, action, steps) for name, action in actions.items()}
    return common.interleaved(measures, trials, warmup=0)


def measure(machine: Machine, changes: Changes, graph: bool) -> dict[str, Any]:
    """Measures SYNTHETIC and FULL in turn."""
    device = machine.world.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    with closing(prepare(machine, changes, graph)) as built:
        ready = time.perf_counter() - started
        steps = steps_per_trial(machine, built)
        rates = both_rates(machine, built, steps, TRIALS)
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


def measure_rung(machine: Machine, rung: Rung, entries: Sequence[Entry] = ()) -> dict[str, Any]:
    """The rung's result, or the reason why there is none; `entries` are the results so far."""
    state = state_of(rung, entries)
    entry: dict[str, Any] = {"name": rung.name, "command": command(**state)}
    if rung.gigabytes is not None:
        batch = state["changes"].get("local_batch_size", machine.options.batch)
        entry["predicted for an H200"] = predicted(rung.gigabytes, batch)
    if rung.package is not None and not importable(rung.package):
        return {**entry, "skipped": f"{rung.package} is not installed"}
    sys.stderr.write(f"{rung.name}\n")
    try:
        return {**entry, **measure(machine, **state), "state": state}
    except Exception as error:  # the other rungs are still measured
        entry["failed"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
    with suppress(Exception):  # all of it fails after a fault of the device, which the next `free` finds
        common.synchronize(machine.world.device)
        if state["graph"]:
            recover_from_failed_recording(machine.world.device)
        machine.close()
    return entry


def recover_from_failed_recording(device: torch.device) -> None:
    """Records a small graph: until one succeeds, PyTorch generates no random numbers on the device."""
    if device.type == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device).add_(1)


def compare(machine: Machine, states: Mapping[str, Mapping[str, Any]], trials: int = 5) -> dict[str, Any]:
    """SYNTHETIC trials of several sets of options in turn, so that drift affects all of them; ratios to the first.

    states: arguments of `prepare` by name.
    """
    measures = {}
    with ExitStack() as stack:
        for name, state in states.items():
            built = stack.enter_context(closing(prepare(machine, **state)))
            built.batches.close()  # the next one may replace the loader
            measures[name] = trial(machine, built, built.synthetic, steps_per_trial(machine, built))
        rates = common.interleaved(measures, trials, warmup=0)
    first, *others = rates
    result: dict[str, Any] = {name: common.summary(values) for name, values in rates.items()}
    for name in others:
        ratios = [one / other for one, other in zip(rates[name], rates[first], strict=True)]
        result[name]["ratio to the first"] = common.summary(ratios)
    return result


def command(changes: Changes, graph: bool) -> str:
    """The command line of this run."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    changed = [f"--set={key}={text}" for key, text in texts.items()]
    return shlex.join(["python", "train_graph.py" if graph else "train.py", "--config=base", *changed])


def importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def add_options(parser: common.Parser, batch: int, box: int, seconds: float, warmup_steps: int) -> None:
    """Adds the options of a rung, with these defaults."""
    parser.add_integers(batch=batch, crop=64, width=64, box=box, valid_box=128, warmup_steps=warmup_steps)
    parser.add_argument("--seconds", type=common.positive_float, default=seconds, help="per trial (%(default)s)")
    parser.add_argument("--data", type=Path, help="HDF5 file (data/benchmark_<box>.h5, created if missing)")


def check_sizes(options: argparse.Namespace) -> None:
    """UserError if the sizes do not fit or the file is missing. Names the files that `make_files` creates."""
    if options.crop % 2:
        raise UserError(f"--crop {options.crop} is odd, and the network halves it; give an even number")
    if options.crop > min(options.box, options.valid_box):
        raise UserError(f"crops of {options.crop} cells do not fit into boxes of {options.box} and {options.valid_box}")
    if options.data is not None and not options.data.exists():
        raise UserError(f"no such file: {options.data}; without --data, one is created")
    options.data = options.data or Path(f"data/benchmark_{options.box}.h5")
    options.valid_data = Path(f"data/benchmark_{options.valid_box}.h5")


def make_files(options: argparse.Namespace) -> None:
    """Creates missing files."""
    make_file(options.data, options.box)
    make_file(options.valid_data, options.valid_box)


def main() -> None:
    parser = common.Parser(__doc__)
    add_options(parser, batch=4, box=128, seconds=4.0, warmup_steps=LOSS_STEPS)
    parser.add_argument("--budget", type=common.positive_float, default=500.0, help="seconds for all rungs")
    with one_line_errors():
        options = parser.parse_args()
        if torch.cuda.is_available():
            raise UserError("these are the rungs of a CPU; on a GPU run make bench-gpu")
        check_sizes(options)
        make_files(options)
        run(options)


def run(options: argparse.Namespace) -> None:
    """Measures the rungs within the budget, and writes result, table and plot."""
    world = common.this_machine()
    deadline = time.perf_counter() + options.budget
    measured = peaks.measure(world.device)["matmul_tflops"]
    peak = {name: value["median"] for name, value in measured.items()}
    results: list[dict[str, Any]] = []
    longest = 0.0
    with closing(Machine(options, world)) as machine:
        for rung in CPU_RUNGS:
            started = time.perf_counter()
            if started + longest > deadline:
                results.append({"name": rung.name, "skipped": "no time left"})
                continue
            results.append(measure_rung(machine, rung))
            machine.free()
            longest = max(longest, time.perf_counter() - started)
    if not any("SYNTHETIC" in entry for entry in results):
        reasons = {entry.get("failed") or entry.get("skipped") or "" for entry in results}
        raise UserError(f"no rung could be measured: {'; '.join(sorted(reasons))}")
    title = f"{device_name(world.device)}, {options.crop}³ crops, batch {options.batch}"
    result = {"settings": common.settings(options), "matmul_peak_tflops": peak, "unit": "samples/s", "ladder": results}
    common.publish("ladder", result, options.output, markdown(results, peak), lambda path: draw(results, title, path))


if __name__ == "__main__":
    main()
