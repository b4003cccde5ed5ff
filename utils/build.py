"""Builds the objects of a run from its config. The only module of utils that imports networks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from networks import build_loss, build_metrics, build_network, initialise
from networks.norms import ghost_batch
from networks.physical import DENSITY_FLOOR, PhysicalNetwork
from networks.tail import NetworkWithFusedTail
from utils import cli
from utils import config as configs
from utils.config import Config
from utils.config.sections import ProfileConfig
from utils.data import Loaders, get_loader
from utils.data.channels import Channel, check_physical_units, volume_channels
from utils.data.datasets import get_dataset
from utils.data.files.attributes import FLOOR, Simulation, warn_of_other_simulation
from utils.data.files.hdf5 import FieldReader, Volume
from utils.data.splits import check_data, open_boxes, training_simulation, with_file_values
from utils.distributed.devices import choose_device
from utils.distributed.launch import Launch, lasting_jobs
from utils.distributed.rendezvous import digest
from utils.distributed.signals import Signals
from utils.distributed.world import World
from utils.errors import UserError, value_errors_for_users
from utils.evaluation.callback import build_evaluation, evaluation_grid
from utils.inference.export import ExportedNetwork
from utils.inference.options import InferenceOptions
from utils.inference.sliding_window import SlidingWindowPredictor, forward_pass
from utils.inference.window_grid import build_window_grid
from utils.optim.optimizers import build_optimizer, describe_optimizer
from utils.optim.schedules import build_schedule
from utils.profiling import preflight
from utils.profiling.benchmark import Benchmark, BenchmarkOptions, Settings
from utils.profiling.memory import training_memory
from utils.profiling.profiler import Profiler
from utils.runs.choice import LOCK, Choice, Request, choose
from utils.runs.directory import RunDirectory, run_directory
from utils.runs.logger import Logger
from utils.steps.backends import backends as backends
from utils.steps.eager import Combine, EagerStep, Metric, NetworkWithLoss, StepOptions, weights_difference
from utils.training.callbacks import Callbacks, Evaluation, NullEvaluation
from utils.training.checkpoint import FOLDER, read_weights
from utils.training.checkpoint import resolve_weights as resolve_weights
from utils.training.checkpointer import build_checkpointer
from utils.training.loggers import check_loggers
from utils.training.options import TrainerOptions
from utils.training.resume import Start, find_start
from utils.training.state import TrainState
from utils.training.trainer import Trainer

DEFAULT_BATCH_SIZES = {"cpu": 4, "cuda": 32}  # windows per rank and forward pass


def identity(config: Config, options: cli.Options) -> dict[str, str]:
    """Distinguishes a training from others. All of its ranks have the same, and compare it when they connect."""
    directory = Path(config.expdir, options.config, options.run_num)  # without the device, which may differ
    return {"config": digest(configs.to_yaml(config, options.config)), "run directory": str(directory.absolute())}


# --- networks --------------------------------------------------------------------------------------------------------


def network(config: Config) -> nn.Module:
    """The config's network with torch's default weights; ValueError if its options contradict each other."""
    norm = config.network.norm
    options: dict[str, object]
    # Variants are passed only if they are set: not every network has them.
    variants: dict[str, object] = {
        "norm": None if norm == "none" else norm,
        "space_to_depth": config.network.space_to_depth,
    }
    if config.dataset.name is not None:
        dataset = get_dataset(config.dataset.name)
        options = {"shape": dataset.shape, "classes": dataset.classes}
        variants["vocabulary"] = dataset.vocabulary
    else:
        options = {
            "crop": config.data_size,
            "in_channels": config.N_in_channels,
            "out_channels": config.N_out_channels,
            "width": config.network.width,
            "scales": config.scales,
        }
        variants["fused"] = config.fused_pointwise  # the loss of a classifier refuses it
    options |= {name: value for name, value in variants.items() if value}
    ghost, batch = ghost_batch(norm), (config.local_batch_size or 0) // config.accumulation_steps
    if ghost is not None and (batch < ghost or batch % ghost):
        part = "micro-batch" if config.accumulation_steps > 1 else "batch"
        raise ValueError(
            f"network.norm {norm}: the {part} of {batch} samples per rank is not a multiple of {ghost}; raise "
            f"local_batch_size, or use a smaller ghost batch"
        )
    return build_network(config.network.name, **options)


def loss(config: Config) -> nn.Module:
    """The config's loss."""
    options = {"lambda_rho": config.lambda_rho, "fused": config.fused_pointwise, "weights": config.channel_weights}
    return build_loss(config.loss, config.is_classification, **options)


# --- training --------------------------------------------------------------------------------------------------------


def resolve(config: Config, world: World) -> Config:
    """The config with the batch sizes of this world and the transform of its files. Every rank calls it."""
    with world.raise_together():
        return with_file_values(config.for_world(world.size), get_loader(config.data_loader_config).reads)


class TrainingModules(NamedTuple):
    """Network, loss and metrics of a step, and how it computes the loss in training."""

    network: nn.Module
    loss: nn.Module
    metrics: Sequence[Metric] = ()
    combine: Combine = NetworkWithLoss


def model(config: Config) -> TrainingModules:
    """Network, loss and metrics. torch's default initial weights are drawn with the config's seed on every rank."""
    torch.manual_seed(config.seed)
    with value_errors_for_users():
        metrics = build_metrics(config.metrics, config.is_classification)
        combine = NetworkWithFusedTail if config.fused_tail else NetworkWithLoss
        return TrainingModules(network(config), loss(config), metrics, combine)


def loaders(config: Config, world: World) -> Loaders:
    """The loaders of both splits for this rank. Every rank calls it, and all fail if one does."""

    def training_bytes() -> int:
        return training_memory(config, network).reserve

    spec = get_loader(config.data_loader_config)
    checked = check_data(config, spec.reads, world)
    built = spec.build(config, world, training_bytes)
    return replace(built, notes=(*checked.notes, *built.notes), warnings=tuple(checked.warnings))


def step(config: Config, world: World, modules: TrainingModules, step_class: type[EagerStep] = EagerStep) -> EagerStep:
    """The step that trains `parts`, with the same initial weights on every rank.

    Afterwards torch's generators differ between ranks: dropout must not be the same on all of them.
    """
    start, module = config.weight_init, modules.network
    generator = torch.Generator().manual_seed(config.seed)
    initialise(module, generator, start.conv_init, start.conv_scale, start.conv_bias)
    module.to(world.device)
    if config.channels_last:
        module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload] # its stubs lack it
    choice = config.optimizer
    capturable = step_class.capturable and world.device.type == "cuda"
    with value_errors_for_users():
        optimizer = build_optimizer(choice, module.named_parameters(), config.lr_schedule.start_lr, capturable)
    train_step = step_class(
        module, modules.loss, optimizer, world, step_options(config), modules.metrics, modules.combine
    )
    train_step.notes = [describe_optimizer(choice.name, optimizer)]
    torch.manual_seed(config.seed + world.rank)
    return train_step


def step_options(config: Config) -> StepOptions:
    """The config's keys about the step."""
    return StepOptions(**{field.name: getattr(config, field.name) for field in fields(StepOptions)})


def options_without_effect(config: Config, world: World) -> list[str]:
    """Lines for the log: options of the config that this run cannot use."""
    notes = []
    reasons = {
        "there is no GPU": world.device.type != "cuda",
        "channels_last is false": not config.channels_last,
        "torch.compile fuses these operations": config.enable_jit,
    }
    no_bfloat16 = {
        "enable_amp is false": not config.enable_amp,
        "precision is not bfloat16": config.precision != "bfloat16",
    }
    for name, found in (("fused_pointwise", reasons), ("fused_tail", reasons | no_bfloat16)):
        why = next((reason for reason, holds in found.items() if holds), None)
        if getattr(config, name) and why is not None:
            notes.append(f"{name} has no effect: {why}")
    if config.deterministic and world.device.type == "cpu":
        notes.append("deterministic has no effect on a CPU, where training always is")
    if config.profile != ProfileConfig() and not config.enable_manual_profiling:
        notes.append("the section profile (--profiler) has no effect: enable_manual_profiling is false")
    if config.enable_apex and config.optimizer.name not in ("adam", "apex_adam"):
        notes.append(f"enable_apex has no effect: optimizer.name is {config.optimizer.name}")
    if (config.lr_schedule.warmup_steps or config.lr_schedule.warmup_epochs) and not config.warms_up:
        why = f"global_batch_size {config.global_batch_size} does not exceed base_batch_size {config.base_batch_size}"
        why = "lr_schedule.scaling is none" if config.lr_schedule.scaling == "none" else why
        notes.append(f"lr_schedule's warm-up has no effect: {why}")
    exchanges = world.size > 1 and not config.noddp
    if not exchanges:
        for name in ("gradient_compression", "static_graph"):
            if getattr(config, name) not in ("none", False):
                notes.append(f"{name} has no effect: no gradients are exchanged")
    if exchanges and world.device.type == "cuda" and "nccl" not in dist.get_backend_config():
        notes.append("ranks share a GPU, which NCCL refuses: gloo exchanges gradients through the host")
    if config.enable_amp and config.precision == "float16" and world.device.type == "cpu":
        notes.append("float16 is very slow on a CPU; bfloat16, the default of --enable_amp, is not")
    return notes


def claim_directory(config: Config, options: cli.Options, world: World) -> contextlib.AbstractContextManager[Choice]:
    """Chooses and locks the run directory for the duration of a `with` block. A benchmark needs none."""
    path = run_directory(config, options.config, options.run_num, world.size)
    if config.enable_benchy:
        return contextlib.nullcontext(Choice(path, "no"))
    check_loggers(config.loggers, world)
    everywhere = world.gather_json(lasting_jobs())
    jobs, restarted = (
        tuple(sorted({job for found in part for job in found})) for part in zip(*everywhere, strict=True)
    )
    request = Request(config, options.config, path, options.resume, options.init_from, jobs, restarted)
    return RunDirectory(partial(choose, request), world)


def start(config: Config, options: cli.Options, chosen: Choice, world: World) -> Start:
    """The start of the training in its directory. A benchmark starts from scratch and reads no checkpoint."""
    return find_start(chosen.path, chosen.resume, options.init_from, config.model_dump(), world)


def trainer(
    config: Config,
    train_step: EagerStep,
    data_loaders: Loaders,
    world: World,
    signals: Signals,
    callbacks: Callbacks,
    state: TrainState,
) -> Trainer:
    """The training loop over the built parts."""
    options = TrainerOptions(**{field.name: getattr(config, field.name) for field in fields(TrainerOptions)})
    return Trainer(train_step, data_loaders, build_schedule(config), world, options, signals, callbacks, state)


def callbacks(
    config: Config,
    volume: Volume | None,
    train_step: EagerStep,
    world: World,
    directory: Path,
    logger: Logger,
    profiler: Profiler,
) -> Callbacks:
    """The objects that log, save, profile and evaluate a training; `volume` None: no evaluation."""
    about = config.model_dump(), training_simulation(config)
    checkpointer = build_checkpointer(directory / FOLDER, *about, config.checkpoint.keep_last, world, directory / LOCK)
    evaluation: Evaluation = NullEvaluation()
    if volume:
        evaluation = build_evaluation(config, volume, train_step.predict, world, directory, logger)
    return Callbacks(logger, checkpointer, profiler, evaluation)


def evaluation_volume(config: Config, world: World) -> Volume | None:
    """The validation volume that evaluation.every_epochs asks for; UserError if it cannot be evaluated.

    Called before anything is written: a training must not begin if its evaluations are bound to fail.
    """
    if not config.evaluation.every_epochs:
        return None
    with world.raise_together():
        (volume,) = open_boxes(config, "valid", get_loader(config.data_loader_config).reads)
        evaluation_grid(config, volume)
    return volume


def benchmark(
    config: Config, train_step: EagerStep, data_loaders: Loaders, world: World, logger: Logger, settings: Settings
) -> Benchmark:
    """The benchmark of the step and the training loader."""
    options = BenchmarkOptions(
        lr=build_schedule(config).peak,
        global_batch_size=config.global_batch_size,
        dtype=getattr(torch, config.precision) if config.enable_amp else torch.float32,
        exchanges_gradients=world.size > 1 and not config.noddp,
    )
    return Benchmark(train_step, data_loaders.train, world, logger, settings, options)


def run_preflight(options: cli.Options, config: Config, step_class: type[EagerStep]) -> None:
    """Runs --preflight on the first rank."""
    alone = World(Launch("preflight"), torch.device("cpu"))

    def check(config: Config) -> None:
        if step_class.capturable:  # an eager step runs on every device; a login node may lack the run's
            ranks = config.global_batch_size // (config.local_batch_size or 1)
            world = World(Launch("preflight", world_size=ranks), choose_device(config.device, 0))
            step_class.check(world, step_options(config))
        loss(config)
        evaluation_volume(config, alone)
        check_loggers(config.loggers, alone)

    preflight.run(options, config, network, check, lambda config: step(config, alone, model(config)))


# --- trained networks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedNetwork:
    """A network read from a checkpoint, in evaluation mode, with the config that made it."""

    network: nn.Module
    config: Config
    record: dict[str, Any]  # epoch, step and final_loss of the checkpoint
    simulation: Simulation  # of the training data

    @property
    def channels(self) -> tuple[tuple[Channel, ...], tuple[Channel, ...]]:
        """Input and target channels."""
        return volume_channels(self.config)


def load_trained(checkpoint: str | Path, device: torch.device) -> TrainedNetwork:
    """The network of a weights.pt, of a checkpoint's directory, or of a run's best checkpoint; UserError for others."""
    content = read_weights(Path(checkpoint))
    if "config" not in content:
        raise UserError(f"{checkpoint} has no config of its network; give weights that train.py has written")
    config = configs.validate(content["config"], str(checkpoint))
    if config.is_classification:
        raise UserError(f"{checkpoint} holds a classifier ({config.network.name}); give one trained on volumes")
    # Options that change how a layer computes, but not what: a prediction needs none of them.
    plain = {
        "fused_pointwise": False,
        "network": config.network.model_copy(update={"space_to_depth": []}),
        "accumulation_steps": 1,
        "local_batch_size": ghost_batch(config.network.norm) or 1,
    }
    with value_errors_for_users():
        module = network(config.model_copy(update=plain))
    try:
        module.load_state_dict(content["network"])
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = weights_difference(module, content["network"]) or " ".join(str(error).split())
        raise UserError(f"{checkpoint} does not match the network in its config: {reason}") from None
    record = {str(key): content[key] for key in ("epoch", "step", "final_loss") if key in content}
    return TrainedNetwork(module.to(device).eval(), config, record, content.get("simulation", {}))


def predictor(
    trained: TrainedNetwork, volume: FieldReader, options: InferenceOptions, world: World
) -> SlidingWindowPredictor:
    """Predicts `volume` window by window; UserError if the windows do not suit the network or the box."""
    config = trained.config
    window, divisor = options.window or config.data_size, 2**config.scales
    if world.is_root:
        warn_of_other_simulation(volume.path, volume.simulation, trained.simulation)
    if window % divisor:
        raise UserError(f"--window {window} is not a multiple of {divisor} (2**scales of the network)")
    grid = build_window_grid(volume.shape, window, options.overlap, periodic=options.wraps(volume.attributes))
    batch_size = options.batch_size or DEFAULT_BATCH_SIZES[world.device.type]
    channel_counts = (config.N_in_channels, config.N_out_channels)
    predict = forward_pass(trained.network, options.precision, world.device)
    return SlidingWindowPredictor(predict, volume.planes, grid, channel_counts, batch_size, world)


def exported_network(trained: TrainedNetwork, units: str) -> ExportedNetwork:
    """The network to export in `units` "physical" or "channel"; UserError if the physical values are unknown."""
    inputs, targets = trained.channels
    physical = units == "physical"
    if physical:
        check_physical_units((*inputs, *targets), "give --units channel")
    floor = trained.simulation.get(FLOOR)  # of the training data, as predict.py's inputs have it
    if not isinstance(floor, float) or not 0 < floor < 1:
        floor = DENSITY_FLOOR
    return ExportedNetwork(
        module=PhysicalNetwork(trained.network, inputs, targets, floor).eval() if physical else trained.network,
        inputs=inputs,
        targets=targets,
        divisor=2**trained.config.scales,
        density_floor=floor if physical else None,
    )
