"""The preflight of a run (`--preflight`): all checks that need neither a GPU nor the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from utils import cli
from utils import config as configs
from utils.config import Config
from utils.data import get_loader
from utils.data.files.hdf5 import Volume, first_nonfinite
from utils.data.loaders import auto
from utils.data.loaders.classification import open_splits, shuffle_plan
from utils.data.plan import SPLITS
from utils.data.splits import meta_batch, open_split, open_split_npy, with_file_transform
from utils.distributed.devices import choose_device
from utils.distributed.launch import Launch, lasting_jobs, read_launch
from utils.distributed.locks import is_locked
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users, value_errors_for_users
from utils.files import GIB, atomic_write, check_target
from utils.inference.channels import volume_channels
from utils.optim.optimizers import build_optimizer
from utils.optim.schedules import StepSchedule, build_schedule
from utils.profiling.benchmark import read_settings
from utils.profiling.memory import TrainingMemory, training_memory
from utils.progress import Progress
from utils.runs.choice import LOCK, Request, choose, is_free, run_directory_errors
from utils.runs.directory import run_directory
from utils.training.checkpoint import FOLDER, saved_steps


def run(
    options: cli.Options,
    config: Config,
    build_network: Callable[[Config], nn.Module],
    check: Callable[[Config], object],
) -> None:
    """Prints the findings on the first rank; raises UserError at the first fault.

    `check` raises UserError or ValueError for faults that this module cannot find. Both functions receive the config
    with the batch sizes of the number of ranks.
    """
    launch = read_launch()
    if launch.rank > 0:
        return
    ranks = options.preflight or launch.world_size
    config = config.for_world(ranks)
    with value_errors_for_users():
        check(config)
        for line in _report(options, config, ranks, build_network):
            print(f"preflight: {line}", flush=True)
    print("preflight: all checks passed")


def _report(
    options: cli.Options, config: Config, ranks: int, build_network: Callable[[Config], nn.Module]
) -> Iterator[str]:
    transformed = with_file_transform(config)
    yield f"ranks {ranks} × local batch {config.local_batch_size} = global batch {config.global_batch_size}" + (
        f", in {config.accumulation_steps} micro-batches" if config.accumulation_steps > 1 else ""
    )
    yield f"steps: {config.steps_per_epoch} per epoch × {config.num_epochs} epochs = {config.total_steps}"
    memory = training_memory(config, build_network)
    shape = " × ".join(map(str, meta_batch(config, 1)[0].shape[1:]))
    yield f"network: {config.network.name}, {memory.parameters:,} parameters, accepts samples of shape {shape}"
    build_optimizer(config.optimizer, [("weight", nn.Parameter(torch.zeros(1)))], config.lr_schedule.start_lr)
    if config.enable_benchy:
        read_settings(World(Launch("preflight"), torch.device("cpu")))
    yield _memory(memory)
    yield _learning_rate(config)
    if options.plot is not None:
        yield _plot_learning_rate(config, options.config, Path(options.plot))
    if not config.enable_benchy:
        directory = run_directory(config, options.config, options.run_num, ranks)
        jobs, restarted = map(tuple, lasting_jobs())
        request = Request(transformed, options.config, directory, options.resume, options.init_from, jobs, restarted)
        yield from (f"run directory: {line}" for line in _run_directory(request))
    if config.data_loader_config == "auto":
        world = World(Launch("preflight"), choose_device(config.device, 0))
        name, reason = auto.choose(config, world, lambda: memory.reserve)
        yield f"data_loader_config auto: {name} on this machine, {reason}"
    yield from _data(config)
    if get_loader(config.data_loader_config).reads in ("hdf5", "npy"):
        yield f"channels: {'; '.join(dict.fromkeys(each.formula() for each in volume_channels(transformed)[1]))}"
    if "base" in configs.read_file(options.yaml_config):
        yield _differences(configs.load(options.yaml_config, "base"), config)


def _memory(memory: TrainingMemory) -> str:
    line = (
        f"memory per rank: about {memory.total / GIB:.2f} GiB (weights, gradients, optimizer {memory.state / GIB:.2f}; "
        f"activations {memory.activations / GIB:.2f}; batches {memory.batches / GIB:.2f})"
    )
    if torch.cuda.is_available():
        available = torch.cuda.get_device_properties(0).total_memory
        line += f" of {available / GIB:.2f} GiB on {torch.cuda.get_device_name(0)}"
        if memory.total > available:
            raise UserError(f"{line}: it does not fit; lower local_batch_size or raise accumulation_steps")
    return line


def _learning_rate(config: Config) -> str:
    schedule, total, options = build_schedule(config), config.total_steps, config.lr_schedule
    inner = schedule.drops if isinstance(schedule, StepSchedule) else (total // 4, total // 2, 3 * total // 4)
    steps = sorted({0, schedule.warmup_steps, *inner, total - 1})
    curve = ", ".join(f"step {step}: {schedule(step):.3e}" for step in steps if step < total)
    warmup = f"{schedule.warmup_steps} steps of warm-up" if schedule.warmup_steps else "no warm-up"
    return (
        f"learning rate: shape {options.shape}, scaling {options.scaling}, {warmup}, peak {schedule.peak:.3e}; {curve}"
    )


def _plot_learning_rate(config: Config, name: str, file: Path) -> str:
    """Plots the learning rate of all steps of config `name` to a PNG file; returns the line to print."""
    check_target(file, overwrite=True, option="--plot")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib, or remove --plot") from None
    schedule, options = build_schedule(config), config.lr_schedule
    steps = range(0, config.total_steps, max(1, config.total_steps // 10_000))  # more points than the plot shows
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="learning rate")
    axes.plot(steps, [schedule(step) for step in steps], drawstyle="steps-post")
    axes.set_title(f"{name}: global batch {config.global_batch_size}, {options.scaling} scaling, shape {options.shape}")
    axes.grid(alpha=0.3)
    with os_errors_for_users(f"cannot write --plot={file}", "give another file"), atomic_write([file]) as (partial,):
        figure.savefig(partial, format="png", dpi=150)
    return f"learning rate plotted in {file}"


def _run_directory(request: Request) -> Iterator[str]:
    choice = choose(request)
    yield from choice.warnings
    directory, shown = choice.path, str(choice)
    parent = directory.absolute()
    while not os.path.exists(parent):  # unlike Path.exists, it does not raise in a directory without permission
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to the run directory {directory}; choose another with --set expdir=DIR")
    locked = [path for path in (choice.newest, directory) if path is not None and is_locked(path / LOCK)]
    with run_directory_errors(directory):
        if locked:
            yield f"{locked[0]} is locked: another run is writing to it; wait for its end, or give another --run_num"
        elif is_free(directory):
            yield f"{shown} is new"
        elif choice.resume != "no" and any(saved_steps(directory / FOLDER)):
            yield f"{shown} exists: training resumes from its newest checkpoint"
        else:
            removed = "the run in it will be removed" if choice.resume == "no" else "its logs will be replaced"
            yield f"{shown} exists: {removed}"


def _data(config: Config) -> Iterator[str]:
    """Opens and checks what the loader will read."""
    spec = get_loader(config.data_loader_config)
    if spec.requires is not None:
        spec.requires()
    if spec.reads is None:
        yield f"data: {config.data_loader_config}, no files are read"
    elif spec.reads == "classification":
        for split, data in open_splits(config)[1].items():
            plan = shuffle_plan(config, split, len(data.labels))
            used = f"{plan.samples} of {plan.available} samples"
            yield f"{split} data: {config.dataset.name}, {used}, all labels in range"
    else:
        for split in SPLITS:
            npy = spec.reads == "npy"
            yield _volume(open_split_npy(config, split).volume() if npy else open_split(config, split), split)


def _volume(volume: Volume, split: str) -> str:
    with Progress(f"looking for NaN in {volume.path}", len(volume.slab_locations()), "slabs") as progress:
        fault = first_nonfinite(volume, progress.advance)
    if fault is not None:
        raise UserError(f"{fault}; correct or remove it: training skips every update whose samples contain it")
    access = "mapped" if volume.mapped else "chunked or compressed, read by h5py: rewrite it contiguously for speed"
    return f"{split} data: {volume.path}, {volume.box}³ cells, {volume.bytes / GIB:.2f} GiB, all finite, {access}"


def _differences(base: Config, config: Config) -> str:
    before = configs.flatten(base)
    changes = [
        f"{key} {before.get(key)} -> {value}"
        for key, value in configs.flatten(config).items()
        if before.get(key) != value and key != "local_batch_size"
    ]
    return f"differences from base: {'; '.join(changes) or 'none'}"
