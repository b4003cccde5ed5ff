"""The preflight of a run (`--preflight`): all checks that need neither a GPU nor the other ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from networks.norms import ghost_batch
from utils import cli
from utils import config as configs
from utils.config import Config
from utils.data import get_loader
from utils.data.channels import volume_channels
from utils.data.files.hdf5 import Volume, cells_text, check_cache
from utils.data.files.page_cache import memory_limit
from utils.data.files.shared_memory import check_fits, free_shared_memory
from utils.data.files.values import check_all, check_distinct, check_samples
from utils.data.loaders import auto, gpu_resident
from utils.data.loaders.build import meta_batch
from utils.data.loaders.classification import open_splits, shuffle_plan
from utils.data.plan import SPLITS
from utils.data.volumes import conversions, of_both_splits, open_split, open_split_npy, with_file_values
from utils.distributed.devices import choose_device, uses_gpus
from utils.distributed.launch import Launch, lasting_jobs, read_launch
from utils.distributed.locks import is_locked
from utils.distributed.world import World
from utils.errors import UserError, os_errors_for_users, value_errors_for_users
from utils.evaluation.callback import evaluation_volume
from utils.files import GIB, atomic_write, check_target
from utils.optim.schedules import StepSchedule, build_schedule
from utils.profiling.benchmark import read_settings
from utils.profiling.memory import TrainingMemory, training_memory
from utils.progress import Progress
from utils.steps import build
from utils.steps.eager import EagerStep
from utils.training.checkpoint import FOLDER, saved_steps
from utils.training.choice import LOCK, Request, choose, is_free, run_directory
from utils.training.loggers import check_loggers
from utils.training.resume import find_start

WARNING = "warning: "
OTHER_BATCH = "lower local_batch_size or raise accumulation_steps"
MOST_DIFFERENCES = 15
ALONE = World(Launch("preflight"), torch.device("cpu"))


def run(options: cli.Options, config: Config, step_class: type[EagerStep] = EagerStep) -> None:
    """Prints the findings on the first rank; raises UserError at the first fault."""
    launch = read_launch()
    if launch.rank > 0:
        return
    ranks = options.preflight or launch.world_size
    config = config.for_world(ranks)
    with value_errors_for_users():
        # An eager step runs on every device, and a login node may lack the run's.
        if step_class.capturable or config.device == "cpu":
            world = World(Launch("preflight", world_size=ranks), choose_device(config.device, 0))
            step_class.check(world, build.step_options(config))
            build.check_norm(config, world)
        build.loss(config)
        evaluation_volume(config, ALONE)
        check_loggers(config.loggers, ALONE)
        warnings = 0
        for line in _report(options, config, ranks):
            print(f"preflight: {line}", flush=True)
            warnings += line.startswith(WARNING)
    print(f"preflight: no errors; warnings: {warnings}" if warnings else "preflight: all checks passed")


def _report(options: cli.Options, config: Config, ranks: int) -> Iterator[str]:
    transformed = with_file_values(config, get_loader(config.data_loader_config).reads)
    yield f"ranks {ranks} × local batch {config.local_batch_size} = global batch {config.global_batch_size}" + (
        f", in {config.accumulation_steps} micro-batches" if config.accumulation_steps > 1 else ""
    )
    yield f"steps: {config.steps_per_epoch} per epoch × {config.num_epochs} epochs = {config.total_steps}"
    memory = training_memory(config)
    shape = " × ".join(map(str, meta_batch(config, 1)[0].shape[1:]))
    yield f"network: {config.network.name}, {memory.parameters:,} parameters, accepts samples of shape {shape}"
    if config.enable_benchy:
        read_settings(ALONE)
    yield from _memory(memory, config.device, ranks)
    yield _learning_rate(config)
    if options.plot is not None:
        yield _plot_learning_rate(config, options.config, Path(options.plot))
    yield _one_step(transformed)
    if not config.enable_benchy:
        directory = run_directory(config, options.config, options.run_num, ranks)
        jobs, restarted = map(tuple, lasting_jobs())
        request = Request(transformed, options.config, directory, options.resume, options.init_from, jobs, restarted)
        yield from _run_directory(request)
    if config.data_loader_config == "auto":
        world = World(Launch("preflight"), choose_device(config.device, 0))
        choice = auto.choose(config, world, memory.reserve)
        yield f"data_loader_config auto: {choice.name} on this machine, {choice.reason}"
    yield from _data(config, memory, ranks)
    if get_loader(config.data_loader_config).reads in ("hdf5", "npy"):
        formulas = dict.fromkeys(channel.formula() for channel in volume_channels(transformed)[1])
        yield f"channels: {'; '.join(formulas)}"
    if "base" in configs.read_file(options.yaml_config):
        yield from _differences(configs.load(options.yaml_config, "base"), config, options.overrides)


def _one_step(config: Config) -> str:
    """Trains one step on the smallest batch that the network accepts, of random values, if memory allows.

    On this machine's GPU if the run uses GPUs; else on the CPU, without compilation, which would take minutes.
    """
    # Batch norm needs two values per channel, which one sample may not have at the bottleneck.
    samples = ghost_batch(config.network.norm) or (1 if config.network.norm in ("none", "group") else 2)
    changes = {"local_batch_size": samples, "accumulation_steps": 1, "enable_jit": False}
    config = config.model_copy(update=changes)
    needed = training_memory(config).total
    on_gpu = uses_gpus(config.device) and torch.cuda.is_available()
    world = World(Launch("preflight"), choose_device(config.device, 0)) if on_gpu else ALONE
    limit = torch.cuda.mem_get_info(0)[0] if on_gpu else memory_limit()
    text = f"one step with {samples} sample{'s' * (samples > 1)} on {world.device}"
    if needed > limit // 2:
        return f"{text}: not tried, it needs about {needed / GIB:.2f} GiB"
    started = time.perf_counter()
    inputs, targets = (part.to(world.device) for part in _random_batch(config, samples))
    with build.step(config, world, build.model(config)) as step:
        loss = float(step(inputs, targets, config.lr_schedule.start_lr))
    return f"{text}: loss {loss:.4g}, {time.perf_counter() - started:.1f} s"


def _random_batch(config: Config, samples: int) -> list[torch.Tensor]:
    """Inputs and targets: uniform values in [-1, 1), zeros for words and labels."""
    generator = torch.Generator().manual_seed(config.seed)
    return [
        2 * torch.rand(part.shape, generator=generator) - 1
        if part.is_floating_point()
        else torch.zeros_like(part, device="cpu")
        for part in meta_batch(config, samples)
    ]


def _memory(memory: TrainingMemory, device: str, ranks: int) -> Iterator[str]:
    line = (
        f"memory per rank: about {memory.total / GIB:.2f} GiB (weights, gradients, optimizer {memory.state / GIB:.2f}; "
        f"activations {memory.activations / GIB:.2f}; batches {memory.batches / GIB:.2f})"
    )
    remedy = OTHER_BATCH
    if not uses_gpus(device):
        limit, place = memory_limit(), "on this machine"
        remedy += ", or, if the run is for GPUs of other machines, use --set device=cuda"
    elif torch.cuda.is_available():
        limit, place = torch.cuda.get_device_properties(0).total_memory, f"on {torch.cuda.get_device_name(0)}"
    else:
        yield line
        yield f"{WARNING}memory is not compared, because this machine has no GPU; compare it with that of the GPUs"
        return
    line += f" of {limit / GIB:.2f} GiB {place}"
    if memory.total > limit:
        if memory.state > limit:  # with any batch
            remedy = remedy.replace(OTHER_BATCH, "lower network.width, or choose a smaller network")
        raise UserError(f"{line}: it does not fit; {remedy}")
    yield line
    if not uses_gpus(device) and ranks * memory.total > limit:
        together = f"{ranks * memory.total / GIB:.2f} GiB together"
        yield f"{WARNING}{ranks} ranks on one such machine do not fit, because they need {together}; use several"


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
    directory, shown = choice.path, f"run directory: {choice}"
    parent = directory.absolute()
    while not os.path.exists(parent):  # unlike Path.exists, it does not raise in a directory without permission
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to the run directory {directory}; choose another with --set expdir=DIR")
    if is_locked(directory / LOCK):
        yield f"{WARNING}{directory} is locked: another run is writing to it; wait for its end"
        return
    if is_free(directory):
        yield f"{shown} is new"
    elif choice.resume != "no" and saved_steps(directory / FOLDER):
        yield f"{shown} exists: the run resumes from its newest checkpoint"
    else:
        yield f"{shown} exists: its logs and checkpoints will be replaced"
    config = request.config
    start = find_start(directory, choice.resume, request.init_from, config.model_dump(), ALONE)
    if lines := start.describe():
        start.restore(
            build.step(config, ALONE, build.model(config)), ALONE
        )  # raises what the run would raise if the state does not fit
        yield from lines
    if start.is_complete:
        yield f"{WARNING}{start.nothing_to_train.replace('was trained', 'is left to train', 1)}"


def _data(config: Config, memory: TrainingMemory, ranks: int) -> Iterator[str]:
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
        volumes = {
            split: [pair.volume() for pair in open_split_npy(config, split)]
            if spec.reads == "npy"
            else open_split(config, split)
            for split in SPLITS
        }
        if config.use_cache is not None:
            try:
                check_cache(config.use_cache)
            except UserError as error:  # no failure: this may be a login node, which lacks the nodes' local disks
                yield f"{WARNING}{error}, unless it exists on the nodes of the run"
        if config.data_loader_config in ("inmem", "resident"):
            _check_room(config, of_both_splits(volumes), memory, ranks)
        check_samples(of_both_splits(volumes), config.allow_physical_values)
        yield from (f"{WARNING}{line}" for line in check_distinct(volumes))
        for split, split_volumes in volumes.items():
            for volume in split_volumes:
                yield from _volume(volume, split)


def _check_room(config: Config, volumes: list[Volume], memory: TrainingMemory, ranks: int) -> None:
    """Raises UserError if a loader that keeps the volumes in memory would, as far as this machine can tell."""
    if not uses_gpus(config.device):
        world = World(Launch("preflight", world_size=ranks), torch.device("cpu"))
        check_fits(volumes, free_shared_memory(world))
    elif config.data_loader_config == "resident" and torch.cuda.is_available():
        world = World(Launch("preflight"), choose_device(config.device, 0))
        gpu_resident.check_memory(config, world, volumes, memory.reserve)


def _volume(volume: Volume, split: str) -> Iterator[str]:
    with Progress(f"checking all values of {volume.path}", len(volume.slab_locations()), "slabs") as progress:
        warnings = check_all(volume, progress.advance)
    access = "mapped" if volume.mapped else "chunked or compressed, read by h5py: rewrite it contiguously for speed"
    if volume.conversion:
        access = "converted or reordered as it is read"
    size = f"{cells_text(volume.shape)} cells, {volume.bytes / GIB:.2f} GiB"
    yield f"{split} data: {volume.path}, {size}, all finite, {access}"
    yield from conversions([volume])
    yield from (f"{WARNING}{line}" for line in warnings)


def _differences(base: Config, config: Config, given: Collection[str]) -> Iterator[str]:
    """The keys with other values than in `base`, one per line; first those `given` on the command line."""
    before, changes = configs.flatten(base), configs.differences(config, base)
    changes.pop("local_batch_size", None)
    yield f"differences from base: {len(changes) or 'none'}"
    keys = sorted(changes, key=lambda key: not any(f"{key}.".startswith(f"{flag}.") for flag in given))
    lines = [f"  {key} {before[key]} -> {changes[key]}" for key in keys]
    yield from lines[:MOST_DIFFERENCES]
    if len(lines) > MOST_DIFFERENCES:
        yield f"  and {len(lines) - MOST_DIFFERENCES} more; --print_config prints all keys"
