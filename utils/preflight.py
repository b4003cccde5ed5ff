"""Everything that can be known before training: checked and printed, without a GPU or the other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from utils import config as configs
from utils.benchmark import read_settings
from utils.checkpoint import FOLDER, saved_steps
from utils.config import Config
from utils.data import SPLITS, choose, find_loader, open_split, open_split_twins
from utils.data.dali import check_installed
from utils.data.volumes import Volume, first_nonfinite
from utils.distributed import Launch, World, choose_device
from utils.errors import UserError
from utils.memory import GIB, TrainingMemory, training_memory
from utils.optim import build_optimizer
from utils.progress import Progress
from utils.schedule import build_schedule


def report(
    config: Config, base: Config | None, directory: Path, ranks: int, build: Callable[[], nn.Module], anew: bool
) -> Iterator[str]:
    """The findings, line by line; raises UserError at the first fault. `config` is settled for `ranks` ranks."""
    assert config.local_batch_size is not None
    yield f"ranks {ranks} × local batch {config.local_batch_size} = global batch {config.global_batch_size}" + (
        f", in {config.accumulation_steps} micro-batches" if config.accumulation_steps > 1 else ""
    )
    yield f"steps: {config.steps_per_epoch} an epoch × {config.num_epochs} epochs = {config.total_steps}"
    memory = training_memory(config, build)
    yield f"network: {config.network.name}, {memory.parameters:,} parameters; crop {config.data_size}³ fits"
    build_optimizer(config.optimizer, [nn.Parameter(torch.zeros(1))], config.lr_schedule.start_lr)
    if config.enable_benchy:
        read_settings(World(Launch("preflight"), torch.device("cpu")))
    yield from _memory(memory)
    yield from _rates(config)
    yield f"run directory: {_writable(directory, anew)}"
    if config.data_loader_config == "auto":
        here = World(Launch("preflight"), choose_device(config.device, 0))
        yield "data_loader_config auto: on this machine {}, {}".format(*choose(config, here, lambda: memory.reserve))
    reads = find_loader(config.data_loader_config).reads
    if reads is None:
        yield f"data: {config.data_loader_config}, no files are read"
    elif reads == "npy":
        check_installed()
        for split in SPLITS:
            yield _data(open_split_twins(config, split).volume(), split)
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
    schedule, total = build_schedule(config), config.total_steps
    marks = sorted({0, schedule.warmup_steps, total // 4, total // 2, 3 * total // 4, total - 1})
    curve = ", ".join(f"step {step}: {schedule(step):.3e}" for step in marks if step < total)
    kind = f"{schedule.warmup_steps} steps of warm-up" if schedule.warmup_steps else "no warm-up"
    yield f"learning rate: {config.lr_schedule.scaling} scaling, {kind}, peak {schedule.peak:.3e}; {curve}"


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
