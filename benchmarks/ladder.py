"""The optimisation ladder: one switch a rung, each kept where it pays.

python -m benchmarks.ladder                      the rungs that mean something on this machine, at most 8 minutes
python -m benchmarks.ladder --budget 300 --width 16 --crop 32

A rung is a training as `train.py --enable_benchy` runs it: SYNTHETIC steps on one batch, FULL steps on real ones, in
interleaved trials. It keeps what the best rung before it had and changes one thing. Every rung tells loss and gradient
norm after as many steps on the same samples (random numbers, of which nothing can be learnt): speed counts only where
they are the same.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import train
from benchmarks import peaks
from benchmarks.common import Parser, positive_float, save, settings, summary, this_machine
from benchmarks.convolutions import scales
from benchmarks.loaders import endless, make_file, twins_of
from networks import build_network
from utils import config as configs
from utils.cli import SWITCHES, positive
from utils.config import Config
from utils.data import Loaders, attach_pending_work, build_loaders
from utils.data.loaders.prefetcher import DEVICE_SLOTS, Batch
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors, value_errors_for_users
from utils.profiling.flops import training_flops
from utils.runs.logger import device_name
from utils.steps import Step
from utils.steps.eager import EagerStep
from utils.steps.graph import WARMUP_STEPS, GraphStep

YAML = str(Path(__file__).parent.parent / "config" / "UNet.yaml")
RATE = 2e-4
WARMUP_SECONDS = 3.0  # at most, where that is enough for all that must be seen
LOSS_STEPS = 10  # after which rungs are compared by their loss
BETTER = 1.005  # less than this is noise
TRIALS = 3

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Rung:
    """`changes` are keys of the config; `always` is for rungs that others are measured against.

    `predicted` are SYNTHETIC samples/s of an H200 at batch 64, written down before any was measured: bytes and
    operations of a step over the rates of the chip, with convolutions at half the rate of matrix products (at 70 % once
    `down1` and `last` are rewritten).
    """

    name: str
    changes: Changes = field(default_factory=dict)
    graph: bool | None = None
    needs: str | None = None  # a package
    always: bool = False
    predicted: int | None = None


GPU_RUNGS = (
    Rung("float32, no TF32, 2 loader threads", {"tf32": False}, always=True),
    Rung("TF32", {"tf32": True}, always=True),
    Rung("8 loader threads", {"num_data_workers": 8}),
    Rung("DALI", {"data_loader_config": "dali-lowmem"}, needs="nvidia.dali"),
    Rung("float16 AMP, fused Adam", {"enable_amp": True, "precision": "float16"}, always=True),
    Rung("apex FusedAdam", {"enable_apex": True}, needs="apex"),
    Rung("volume on the device", {"data_loader_config": "resident"}),
    Rung("bfloat16", {"precision": "bfloat16"}, predicted=3144),
    Rung("channels last", {"channels_last": True}, predicted=3621),
    Rung("down1 rewritten", {"network.space_to_depth": ["down1"]}),
    Rung("last rewritten", {"network.space_to_depth": ["last"]}),
    Rung("down1 and last rewritten", {"network.space_to_depth": ["down1", "last"]}, predicted=4586),
    Rung("fused pointwise kernels", {"fused_pointwise": True}, predicted=5547),
    Rung("CUDA graph", graph=True),
    Rung("torch.compile", {"enable_jit": True, "fused_pointwise": False}),
    Rung("batch 128", {"local_batch_size": 128}),
    Rung("batch 256", {"local_batch_size": 256}),
)
# The one whose like the original ended with: its own loader, float16 AMP, fused Adam.
ORIGINAL_BEST = "float16 AMP, fused Adam"
CPU_RUNGS = (
    Rung("float32", always=True),
    Rung("bfloat16", {"enable_amp": True}),
    Rung("channels last", {"channels_last": True}),
    Rung("down1 and last rewritten", {"network.space_to_depth": ["down1", "last"]}),
    Rung("torch.compile", {"enable_jit": True}),
    Rung("volume in memory", {"data_loader_config": "resident"}),
)


class Machine:
    """The device, the files, and the loaders of the rungs so far, which later ones take over."""

    def __init__(self, options: argparse.Namespace, world: World) -> None:
        self.options, self.world = options, world
        self._loaders: dict[tuple[Any, ...], Loaders] = {}

    def config(self, changes: Changes) -> Config:
        options = self.options
        twins = {
            f"{split}_path_npy_{kind}": str(path.with_name(f"{path.stem}_{kind}.npy"))
            for split, path in (("train", options.data), ("val", options.valid_data))
            for kind in ("data", "label")
        }
        base = {
            "train_path": str(options.data),
            "val_path": str(options.valid_data),
            "box_size": [options.box, options.valid_box],
            "data_size": options.crop,
            "local_batch_size": options.batch,
            "network.width": options.width,
            "network.scales": scales(options.crop) or 1,
            "Nsamples_val": options.batch,
            "device": self.world.device.type,
            **twins,
        }
        return configs.load(YAML, "base", {**base, **changes}).for_world(self.world.size)

    def loaders(self, config: Config) -> Loaders:
        key = (config.data_loader_config, config.num_data_workers, config.channels_last, config.local_batch_size)
        if key not in self._loaders:
            # What an earlier rung read from is not needed any more, and may be as large as the device.
            self.close()
            if config.data_loader_config == "dali-lowmem":
                for path in (self.options.data, self.options.valid_data):
                    twins_of(path)
            self._loaders[key] = build_loaders(config, self.world)
        return self._loaders[key]

    def close(self) -> None:
        for loaders in self._loaders.values():
            loaders.train.close()
            loaders.valid.close()
        self._loaders.clear()
        self.free()

    def free(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


@dataclass
class Built:
    """A rung ready to be measured."""

    config: Config
    step: Step
    fixed: Batch
    batches: Generator[Batch, None, None]
    flops_per_sample: float
    losses: list[float]  # of the warm-up steps
    gradient_norms: list[float]

    def synthetic(self) -> object:
        return self.step(*self.fixed, RATE)

    def full(self) -> object:
        return self.step(*next(self.batches), RATE)


def build(machine: Machine, changes: Changes, graph: bool, warmup_steps: int) -> Built:
    """The rung's training, warmed up on the first samples of the first epoch."""
    config = machine.config(changes)
    train.set_backends(config, machine.world.device)
    loaders = machine.loaders(config)
    network, loss = train.build_model(config), train.build_objective(config)
    step = train.build_step(config, machine.world, network, loss, GraphStep if graph else EagerStep)
    attach_pending_work(loaders.train, step.pending_work)
    batches = endless(loaders.train)
    first = next(batches)
    fixed = Batch(*(part.clone(memory_format=torch.preserve_format) for part in first))
    step.warm_up(*fixed)
    if config.enable_jit and not step.compiled:
        raise RuntimeError("the compiler failed: its warning says why")
    # A graph's first steps are plain ones, and then it is recorded for each of the loader's buffers.
    least = WARMUP_STEPS + DEVICE_SLOTS + 1 if graph else LOSS_STEPS
    losses, norms, end = [], [], time.perf_counter() + WARMUP_SECONDS
    inputs, targets = first
    while True:
        losses.append(float(step(inputs, targets, RATE)))
        norms.append(float(step.gradient_norm))
        if len(losses) >= warmup_steps or (len(losses) >= least and time.perf_counter() > end):
            break
        inputs, targets = next(batches)
    step(fixed.inputs, fixed.targets, RATE)
    machine.wait()
    return Built(config, step, fixed, batches, training_flops(step.network, fixed.inputs), losses, norms)


def rate_of(machine: Machine, action: Callable[[], object], steps: int, batch: int) -> float:
    """Samples/s of a trial."""
    machine.wait()
    started = time.perf_counter()
    for _ in range(steps):
        action()
    machine.wait()
    return steps * batch / (time.perf_counter() - started)


def steps_a_trial(machine: Machine, built: Built, seconds: float) -> int:
    assert built.config.local_batch_size is not None
    pace = rate_of(machine, built.synthetic, 2, built.config.local_batch_size) / built.config.local_batch_size
    return max(2, math.ceil(seconds * pace))


def measure(machine: Machine, changes: Changes, graph: bool) -> dict[str, Any]:
    """One rung: SYNTHETIC and FULL in turn."""
    options, device = machine.options, machine.world.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    built = build(machine, changes, graph, options.warmup_steps)
    ready = time.perf_counter() - started
    batch = built.config.local_batch_size
    assert batch is not None
    steps = steps_a_trial(machine, built, options.seconds)
    rates: dict[str, list[float]] = {"SYNTHETIC": [], "FULL": []}
    for _ in range(TRIALS):
        rates["SYNTHETIC"].append(rate_of(machine, built.synthetic, steps, batch))
        rates["FULL"].append(rate_of(machine, built.full, steps, batch))
    built.batches.close()
    result: dict[str, Any] = {name: summary(values) for name, values in rates.items()}
    teraflops = result["SYNTHETIC"]["median"] * built.flops_per_sample / 1e12
    result |= {
        "FULL / SYNTHETIC": result["FULL"]["median"] / result["SYNTHETIC"]["median"],
        "TFLOP/s": teraflops,
        "steps a trial": steps,
        "ready after seconds": ready,
        "loss of the warm-up steps": built.losses,
        "gradient norm of the warm-up steps": built.gradient_norms,
    }
    if device.type == "cuda":
        result["device GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    return result


def climb(machine: Machine, rungs: Sequence[Rung], deadline: float, note: Callable[[list[dict]], None]) -> list[dict]:
    """The rungs in turn; one that is faster is where the next one starts. `note` gets the results so far."""
    results: list[dict[str, Any]] = []
    changes: dict[str, Any] = {}
    graph, best = False, 0.0
    took = [0.0]  # by each rung; the first ones are the slowest
    for rung in rungs:
        tried, tried_graph = {**changes, **rung.changes}, graph if rung.graph is None else rung.graph
        entry: dict[str, Any] = {"rung": rung.name, "command": command(machine, tried, tried_graph)}
        if rung.predicted is not None:
            entry["predicted for an H200"] = rung.predicted
        results.append(entry)
        if rung.needs is not None and not importable(rung.needs):
            entry["skipped"] = f"{rung.needs} is not installed"
            continue
        if time.perf_counter() + statistics.median(took[-3:]) > deadline:
            entry["skipped"] = "no time left"
            continue
        started = time.perf_counter()
        sys.stderr.write(f"rung: {rung.name}\n")
        try:
            entry |= measure(machine, tried, tried_graph)
        except Exception as error:  # a rung that fails must not take the others with it
            entry["failed"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if tried_graph:
                after_a_failed_recording(machine.world.device)
            machine.close()
            continue
        finally:
            machine.free()
        took.append(time.perf_counter() - started)
        # Both count: a rung may speed up the step alone while the input holds up the training, or the input alone.
        score = math.sqrt(entry["SYNTHETIC"]["median"] * entry["FULL"]["median"])
        entry["kept"] = rung.always or score > BETTER * best
        if entry["kept"]:
            changes, graph, best = tried, tried_graph, score
        sys.stderr.write(f"  SYNTHETIC {entry['SYNTHETIC']['median']:.4g}, FULL {entry['FULL']['median']:.4g}\n")
        entry["state"] = {"changes": tried, "graph": tried_graph}
        note(results)
    return results


def after_a_failed_recording(device: torch.device) -> None:
    """Records a graph that works: until then PyTorch takes the device for one that records, and draws no numbers."""
    if device.type != "cuda":
        return
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device).add_(1)
    except RuntimeError as error:
        sys.stderr.write(f"the device does not recover: {error}\n")


def best_of(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last rung that was kept."""
    return next((entry for entry in reversed(results) if entry.get("kept")), None)


def duel(machine: Machine, pairs: Mapping[str, tuple[Changes, bool]], trials: int = 5) -> dict[str, Any]:
    """Rungs side by side: their SYNTHETIC trials in turn, so that what drifts meets all of them."""
    built: dict[str, Built] = {}
    for name, (changes, graph) in pairs.items():
        built[name] = build(machine, changes, graph, machine.options.warmup_steps)
        built[name].batches.close()  # the next one may need another loader in its place
    counts = {name: steps_a_trial(machine, each, machine.options.seconds) for name, each in built.items()}
    rates: dict[str, list[float]] = {name: [] for name in built}
    for _ in range(trials):
        for name, each in built.items():
            assert each.config.local_batch_size is not None
            rates[name].append(rate_of(machine, each.synthetic, counts[name], each.config.local_batch_size))
    first, *others = built
    result: dict[str, Any] = {name: summary(values) for name, values in rates.items()}
    for name in others:
        ratios = [one / other for one, other in zip(rates[name], rates[first], strict=True)]
        result[name]["ratio to the first"] = summary(ratios)
    machine.free()
    return result


def command(machine: Machine, changes: Changes, graph: bool) -> str:
    """What a user types for this rung's training."""
    words = ["python", "train_graph.py" if graph else "train.py", "--config=base"]
    for key, value in changes.items():
        if key in SWITCHES and value is True:
            words.append(f"--{key}")
        elif key in ("num_data_workers", "data_loader_config", "local_batch_size"):
            words.append(f"--{key}={value}")
        elif value != configs.flatten(Config()).get(key):
            text = str(value).lower() if isinstance(value, bool) else str(value).replace("'", "").replace(" ", "")
            words += ["--set", f"{key}={text}"]
    return " ".join(words)


def importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package in a package that is not there either
        return False


# --- telling -------------------------------------------------------------------------------------------------------


def markdown(results: Sequence[Mapping[str, Any]], peak: Mapping[str, float]) -> str:
    """A line a rung."""
    titles = [
        "rung",
        "SYNTHETIC samples/s",
        "FULL samples/s",
        "FULL / SYNTHETIC",
        "TFLOP/s",
        "% of matmul peak",
        "kept",
    ]
    titles.append(f"loss, gradient norm of step {LOSS_STEPS}")
    predicted = any("predicted for an H200" in entry for entry in results)
    if predicted:
        titles.append("predicted for an H200")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for entry in results:
        cells = [entry["rung"], *_measured(entry, peak)]
        cells += [""] * (len(titles) - predicted - len(cells))
        if predicted:
            cells.append(str(entry.get("predicted for an H200", "")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _measured(entry: Mapping[str, Any], peak: Mapping[str, float]) -> list[str]:
    if "SYNTHETIC" not in entry:
        return [entry.get("skipped") or f"failed: {entry['failed']}"]
    rates = [entry[name] for name in ("SYNTHETIC", "FULL")]
    ceiling = peak_of(entry["state"]["changes"], peak)
    return [
        *(f"{rate['median']:.4g} ({rate['min']:.4g} – {rate['max']:.4g})" for rate in rates),
        f"{entry['FULL / SYNTHETIC']:.3f}",
        f"{entry['TFLOP/s']:.4g}",
        "" if ceiling is None else f"{100 * entry['TFLOP/s'] / ceiling:.1f}",
        "yes" if entry["kept"] else "no",
        ", ".join(
            f"{entry[f'{name} of the warm-up steps'][:LOSS_STEPS][-1]:.4f}" for name in ("loss", "gradient norm")
        ),
    ]


def peak_of(changes: Changes, peak: Mapping[str, float]) -> float | None:
    """TFLOP/s of a matrix product in what the rung computes in."""
    if changes.get("enable_amp"):
        name = changes.get("precision", "bfloat16")
    else:
        name = "tf32" if changes.get("tf32", True) and "tf32" in peak else "float32"
    return peak.get(name)


def draw(results: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """The rungs' rates, FULL within SYNTHETIC; those that were not kept are pale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [entry for entry in results if "SYNTHETIC" in entry][::-1]
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.36 * len(shown)), layout="constrained")
    for place, entry in enumerate(shown):
        strength = 1.0 if entry["kept"] else 0.35
        synthetic, full = entry["SYNTHETIC"], entry["FULL"]
        label = place == len(shown) - 1
        axes.barh(
            place + 0.19, synthetic["median"], 0.36, color="0.6", alpha=strength, label="SYNTHETIC" if label else None
        )
        low, high = full["median"] - full["min"], full["max"] - full["median"]
        axes.barh(
            place - 0.19,
            full["median"],
            0.36,
            xerr=[[low], [high]],
            color="tab:blue",
            alpha=strength,
            label="FULL" if label else None,
        )
        axes.text(full["max"], place - 0.19, f"  {full['median']:.3g}", va="center", fontsize="small")
    names = [entry["rung"] + ("" if entry["kept"] else " (not kept)") for entry in shown]
    axes.set_yticks(range(len(shown)), names)
    axes.set(xlabel="samples/s, median and range", title=title)
    axes.set_xlim(0, 1.12 * max(max(entry["SYNTHETIC"]["max"], entry["FULL"]["max"]) for entry in shown))
    figure.legend(loc="outside lower right", ncols=2, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--batch", type=positive, default=64 if on_gpu else 4)
    parser.add_argument("--crop", type=positive, default=64)
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--box", type=positive, default=512 if on_gpu else 128)
    parser.add_argument("--valid_box", type=positive, default=128)
    parser.add_argument("--seconds", type=positive_float, default=1.0 if on_gpu else 4.0, help="of a trial")
    parser.add_argument("--warmup_steps", type=positive, default=30 if on_gpu else LOSS_STEPS)
    parser.add_argument("--budget", type=positive_float, default=240.0 if on_gpu else 500.0, help="seconds for all")
    parser.add_argument("--data", type=Path, help="HDF5 file of <box> cells (data/benchmark_<box>.h5, made if missing)")


def settle(options: argparse.Namespace) -> None:
    """Checks the sizes, and makes the files that are missing; UserError for what can't be."""
    with value_errors_for_users():
        build_network("unet", options.crop, width=1, scales=scales(options.crop))
    if options.crop > min(options.box, options.valid_box):
        raise UserError(f"crops of {options.crop} cells do not fit into boxes of {options.box} and {options.valid_box}")
    if options.data is None:
        options.data = Path(f"data/benchmark_{options.box}.h5")
        make_file(options.data, options.box)
    elif not options.data.exists():
        raise UserError(f"no such file: {options.data}; leave --data out, and one is made")
    options.valid_data = Path(f"data/benchmark_{options.valid_box}.h5")
    make_file(options.valid_data, options.valid_box)


def main() -> None:
    parser = Parser(__doc__)
    add_options(parser)
    with one_line_errors():
        options = parser.parse_args()
        settle(options)
        run(options)


def run(options: argparse.Namespace) -> None:
    """Climbs the ladder of this machine, tells it and draws it."""
    world = this_machine()
    started = time.perf_counter()
    measured = peaks.measure(world.device)["matmul_tflops"]
    peak = {name: value["median"] for name, value in measured.items()}
    machine = Machine(options, world)
    rungs = GPU_RUNGS if world.device.type == "cuda" else CPU_RUNGS
    name = "ladder_gpu" if world.device.type == "cuda" else "ladder"
    told = {"settings": settings(options), "matmul_peak_tflops": peak, "unit": "samples/s"}

    def keep(results: list[dict[str, Any]]) -> None:
        save(name, {**told, "rungs": results}, options.output)

    with closing(machine):
        results = climb(machine, rungs, started + options.budget, keep)
    if best_of(results) is None:
        reasons = {entry.get("failed") or entry.get("skipped") or "" for entry in results}
        raise UserError(f"no rung could be measured: {'; '.join(sorted(reasons))}")
    keep(results)
    print(markdown(results, peak))
    picture = options.output / f"{name}.png"
    draw(results, f"{device_name(world.device)}, {options.crop}³ crops, batch {options.batch}", picture)
    print(f"written: {picture.with_suffix('.json')}, {picture}; {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
