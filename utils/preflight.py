"""The preflight of a run (`--preflight`): builds what the run builds, trains one step and reads all data.

One process checks a run of any number of ranks and writes nothing. Several ranks first check their fabric.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Callable

import torch

from utils.cli import Options
from utils.config import Config, describe_config
from utils.data.loaders import open_loaders, open_volumes
from utils.distributed.devices import choose_device
from utils.distributed.launch import Launch, read_launch
from utils.distributed.world import World, connect
from utils.errors import UserError, value_errors_for_users
from utils.optim.schedules import log_learning_rate
from utils.profiling.benchmark import read_settings
from utils.profiling.profiler import build_profiler
from utils.progress import format_duration
from utils.run.choice import choose, first_directory, run_request
from utils.run.directory import RunDirectory
from utils.run.loggers import check_loggers
from utils.run.start import Start, find_start
from utils.run.writer import check_space
from utils.steps import build
from utils.steps.eager import EagerStep
from utils.steps.size import ModelSize, check_memory, fits_one_step
from utils.volumes.opened import Volumes

log = logging.getLogger(__name__)

HOUR = 3600.0  # seconds
Check = Callable[[Volumes, World], object]


class _Report(logging.Handler):
    """Prints the log lines and counts the warnings among them."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings = 0

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        self.warnings += is_warning
        for line in record.getMessage().splitlines():
            print(f"preflight: {'warning: ' if is_warning else ''}{line}", flush=True)


def run(options: Options, config: Config, step_class: type[EagerStep], check_evaluation: Check) -> None:
    """Prints the findings on the first rank; UserError at the first fault, which `check_evaluation` may raise."""
    launch, report = read_launch(), _Report()
    logging.basicConfig(level=logging.INFO, handlers=[logging.NullHandler() if launch.rank else report], force=True)
    if launch.world_size > 1:
        with connect(config.device, config.timeouts, nccl=not config.noddp) as world:
            world.check_fabric(limit=20.0)
    if launch.rank > 0:
        return
    ranks = options.preflight or launch.world_size
    volumes = dataclasses.replace(open_volumes(config.for_world(ranks)), complete=True)
    with value_errors_for_users():
        _check(options, volumes, ranks, step_class, check_evaluation)
    print(f"preflight: no errors; warnings: {report.warnings}" if report.warnings else "preflight: all checks passed")


def _check(
    options: Options, volumes: Volumes, ranks: int, step_class: type[EagerStep], check_evaluation: Check
) -> None:
    lacks_gpu = volumes.config.device == "cuda" and not torch.cuda.is_available()  # a login node
    scratch = os.environ.get("SCRATCH", "")
    logs = os.environ.get("LOGS_DIR", f"{scratch}/nbody-unet/logs" if os.path.isdir(scratch) else "")
    if lacks_gpu and logs and "expdir" not in options.overrides:
        volumes = volumes.changed(expdir=logs)
        log.info("expdir: %s, as in jobs of submit_pm.sh", logs)
    config = volumes.config
    device = torch.device("cpu") if lacks_gpu else choose_device(config.device, 0)
    alone = World(Launch("preflight"), device)
    together = World(Launch("preflight", world_size=ranks), torch.device("cuda") if lacks_gpu else device)
    build.check(config, together, step_class)
    check_evaluation(volumes, alone)
    check_loggers(config.loggers, alone)
    log.info("ranks %d × local batch %s = global batch %d", ranks, config.local_batch_size, config.global_batch_size)
    log.info("steps: %d per epoch × %d epochs = %d", config.steps_per_epoch, config.num_epochs, config.total_steps)
    size = build.model_size(config)
    check_memory(size, ranks, options.gpu_memory)
    log_learning_rate(config)
    log.info(describe_config(config, options.yaml_config, options.config))
    directory, start = first_directory(config, options.config, options.run_num, ranks), None
    if config.enable_benchy:
        read_settings(alone)
    else:
        directory, start = _find_start(options, volumes, directory, size, alone)
        if not lacks_gpu:
            build_profiler(config, alone, directory)
    if lacks_gpu and volumes.reads == "hdf5":  # others may need its memory
        volumes = volumes.changed(data_loader_config="lowmem")
    _train_one_step(volumes, alone, ranks, size, start)
    volumes.check_all()


def _find_start(
    options: Options, volumes: Volumes, directory: RunDirectory, size: ModelSize, world: World
) -> tuple[RunDirectory, Start]:
    """The directory that the run uses, and its start there; logs both. UserError if it is not writable or is full."""
    config, request = volumes.config, dataclasses.replace(run_request(options, volumes, world), directory=directory)
    choice = choose(request)
    path = choice.directory.path.absolute()
    parent = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to the run directory {choice.directory}; choose another with --set expdir=DIR")
    start = find_start(choice, request.init_from, config.model_dump(), world)
    if choice.directory.is_free:
        log.info("run directory: %s is new", choice)
    elif start.path is not None:
        log.info("run directory: %s exists: the run resumes from its newest checkpoint", choice)
    else:
        state = "its logs and checkpoints will be replaced" if choice.resume == "no" else "the run starts from scratch"
        log.info("run directory: %s exists: %s", choice, state)
    for line in start.describe():
        log.info(line)
    if start.is_complete:
        log.warning(start.nothing_to_train.replace("was trained", "is left to train", 1))
    else:
        log.info(check_space(choice.directory.checkpoints, size, resumes=start.path is not None))
    return choice.directory, start


def _train_one_step(volumes: Volumes, world: World, ranks: int, size: ModelSize, start: Start | None) -> None:
    """Opens the loaders and trains one eager step on the smallest batch that the network accepts, if memory allows."""
    run, samples = volumes.config, build.preflight_batch(volumes.config)
    volumes = volumes.changed(local_batch_size=samples, accumulation_steps=1, enable_jit=False, use_cache=None)
    config = volumes.config
    if not fits_one_step(build.model_size(config), world):
        with open_loaders(volumes, world, size.reserve(world.device)):
            log.info("Optimizer: %s", config.optimizer.name)
            build.check_output(config)
        return
    with build.assemble(volumes, world, EagerStep, size) as parts:
        started = time.perf_counter()
        if start is not None:
            start.restore(parts.step, volumes, world)
        batch = next(parts.loaders.train.epoch(0))
        loss = float(parts.step(batch, config.lr_schedule.start_lr))
        parts.step.check_gradients(ranks)
        seconds, unit = time.perf_counter() - started, "sample" if samples == 1 else "samples"
        log.info("one step with %d %s on %s: loss %.4g, %.1f s", samples, unit, world.device, loss, seconds)
        is_finite = bool(parts.step.gradient_norm.isfinite())  # otherwise the check of all values names the cause
        if is_finite and world.device.type == "cpu" and run.device != "cuda" and not run.enable_benchy:
            started = time.perf_counter()
            parts.step(batch, config.lr_schedule.start_lr)
            updating = time.perf_counter()
            parts.step.optimizer.step()  # its time does not grow with the batch
            update = time.perf_counter() - updating
            passes = max(0.0, updating - started - update) * run.global_batch_size / samples
            total = (ranks * update + passes) * run.total_steps
            line = f"all {run.total_steps} steps would take about {format_duration(total)} on this CPU"
            if total < HOUR:
                log.info(line)
            else:
                log.warning("%s; use a GPU, more ranks, or a smaller config such as demo", line)
