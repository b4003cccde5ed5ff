"""Everything that can be known before training: checked and printed, without a GPU or the other ranks."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from utils import config as configs
from utils.config import Config
from utils.data import (
    SPLITS,
    batch_like,
    choose,
    get_loader,
    open_labelled,
    open_split,
    open_split_npy,
    shuffle_plan,
)
from utils.data.files.hdf5 import Volume, first_nonfinite
from utils.data.loaders.dali import check_installed
from utils.distributed.world import Launch, World, choose_device
from utils.errors import UserError
from utils.files import atomic_write
from utils.optim.optimizers import build_optimizer
from utils.optim.schedules import StepSchedule, build_schedule
from utils.profiling.benchmark import read_settings
from utils.profiling.memory import GIB, TrainingMemory, training_memory
from utils.progress import Progress
from utils.training.checkpoint import FOLDER, saved_steps


def report(
    config: Config,
    base: Config | None,
    directory: Path,
    ranks: int,
    build: Callable[[], nn.Module],
    anew: bool,
    plot: Callable[[], str] | None = None,
) -> Iterator[str]:
    """The findings, line by line; raises UserError at the first fault. `config` is settled for `ranks` ranks."""
    assert config.local_batch_size is not None
    yield f"ranks {ranks} × local batch {config.local_batch_size} = global batch {config.global_batch_size}" + (
        f", in {config.accumulation_steps} micro-batches" if config.accumulation_steps > 1 else ""
    )
    yield f"steps: {config.steps_per_epoch} an epoch × {config.num_epochs} epochs = {config.total_steps}"
    memory = training_memory(config, build, lambda samples: batch_like(config, samples))
    shape = " × ".join(map(str, batch_like(config, 1)[0].shape[1:]))
    yield f"network: {config.network.name}, {memory.parameters:,} parameters; a sample of {shape} fits"
    build_optimizer(config.optimizer, [("weight", nn.Parameter(torch.zeros(1)))], config.lr_schedule.start_lr)
    if config.enable_benchy:
        read_settings(World(Launch("preflight"), torch.device("cpu")))
    yield from _memory(memory)
    yield from _rates(config)
    if plot is not None:
        yield plot()
    yield f"run directory: {_writable(directory, anew)}"
    if config.data_loader_config == "auto":
        here = World(Launch("preflight"), choose_device(config.device, 0))
        yield "data_loader_config auto: on this machine {}, {}".format(*choose(config, here, lambda: memory.reserve))
    reads = get_loader(config.data_loader_config).reads
    if reads is None:
        yield f"data: {config.data_loader_config}, no files are read"
    elif reads == "npy":
        check_installed()
        for split in SPLITS:
            yield _data(open_split_npy(config, split).volume(), split)
    elif reads == "classification":
        for split, data in open_labelled(config)[1].items():
            plan = shuffle_plan(config, split, len(data.labels))
            used = f"{plan.samples} of {plan.available} samples"
            yield f"{split} data: {config.dataset.name}, {used}, all labels in range"
    else:
        for split in SPLITS:
            yield _data(open_split(config, split), split)
    if base is not None:
        changed, own = configs.flatten(base), configs.flatten(config)
        differences = [
            f"{key} {changed[key]} -> {value}"
            for key, value in own.items()
            if changed.get(key) != value and key != "local_batch_size"
        ]
        yield "differs from base: " + ("; ".join(differences) if differences else "in nothing")


def _memory(memory: TrainingMemory) -> Iterator[str]:
    line = (
        f"memory a rank: about {memory.total / GIB:.2f} GiB (weights, gradients, optimizer {memory.state / GIB:.2f}; "
        f"activations {memory.activations / GIB:.2f}; batches {memory.batches / GIB:.2f})"
    )
    if torch.cuda.is_available():
        there = torch.cuda.get_device_properties(0).total_memory
        line += f" of {there / GIB:.2f} GiB on {torch.cuda.get_device_name(0)}"
        if memory.total > there:
            raise UserError(f"{line}: it does not fit; lower local_batch_size or raise accumulation_steps")
    yield line


def _rates(config: Config) -> Iterator[str]:
    schedule, total, options = build_schedule(config), config.total_steps, config.lr_schedule
    turns = schedule.drops if isinstance(schedule, StepSchedule) else (total // 4, total // 2, 3 * total // 4)
    marks = sorted({0, schedule.warmup_steps, *turns, total - 1})
    curve = ", ".join(f"step {step}: {schedule(step):.3e}" for step in marks if step < total)
    kind = f"{schedule.warmup_steps} steps of warm-up" if schedule.warmup_steps else "no warm-up"
    how = f"{options.scaling} scaling, {kind}, peak {schedule.peak:.3e}"
    yield f"learning rate: {how}; {curve}; shape {options.shape}"


def plot_rates(config: Config, name: str, file: Path) -> str:
    """Draws the learning rate of config `name`, settled for its ranks, into a PNG file; what to say of it."""
    if file.is_dir():
        raise UserError(f"--plot={file}: it is a directory; give a file to write")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from None
    schedule, options, per_epoch = build_schedule(config), config.lr_schedule, config.steps_per_epoch
    steps = range(config.total_steps)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, [schedule(step) for step in steps], drawstyle="steps-post")
    if schedule.warmup_steps:
        axes.axvspan(0, schedule.warmup_steps, alpha=0.15, label=f"warm-up, {schedule.warmup_steps} steps")
    axes.plot([schedule.warmup_steps], [schedule.peak], "o", label=f"peak {schedule.peak:.3e}")
    axes.set_ylabel("learning rate")
    if options.shape == "step":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel="step")
    to_and_fro = (partial(operator.mul, 1 / per_epoch), partial(operator.mul, per_epoch))
    axes.secondary_xaxis("top", functions=to_and_fro).set_xlabel("epoch")
    axes.set_title(f"{name}: global batch {config.global_batch_size}, {options.scaling} scaling, shape {options.shape}")
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        with atomic_write([file]) as (whole,):
            figure.savefig(whole, format="png", dpi=150)
    except OSError as error:
        raise UserError(f"--plot={file}: cannot write it: {error.strerror or error}; give another file") from None
    return f"learning rate plotted in {file}"


def _writable(directory: Path, anew: bool) -> str:
    existing = directory.absolute()
    while not os.path.exists(existing):  # unlike Path.exists, it raises nothing where a folder may not be looked into
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to the run directory {directory}; choose another with --set expdir=DIR")
    if not os.path.exists(directory):
        return f"{directory} is new"
    goes_on = not anew and any(saved_steps(directory / FOLDER))
    return f"{directory} exists: " + (
        "training goes on from its newest checkpoint" if goes_on else "its logs and checkpoints will be replaced"
    )


def _data(volume: Volume, split: str) -> str:
    with Progress(f"looking for NaN in {volume.path}", volume.slab_count(), "slabs") as progress:
        fault = first_nonfinite(volume, progress.advance)
    if fault is not None:
        raise UserError(f"{fault}; mend or remove it: training would stop at its first crop")
    how = "mapped" if volume.mapped else "chunked or compressed, read through h5py: rewrite it contiguous for speed"
    return f"{split} data: {volume.path}, {volume.box}³ cells, {volume.bytes / GIB:.2f} GiB, all finite, {how}"


def show(lines: Iterator[str]) -> None:
    """Prints findings as they come."""
    for line in lines:
        sys.stdout.write(f"preflight: {line}\n")
        sys.stdout.flush()
    sys.stdout.write("preflight: all checks passed\n")
