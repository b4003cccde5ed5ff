"""Trains the network of a named config.

python train.py --config=demo
torchrun --nproc-per-node=4 train.py --config=short --num_epochs 3
srun -n 8 python train.py --config=bs512_opt
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from networks import build_loss, build_metrics, build_network, initialise
from networks.norms import ghost_batch
from utils import cli
from utils import config as configs
from utils.config import Config
from utils.data import attach_pending_work, batch_like, build_loaders, open_box
from utils.data.datasets import find_dataset
from utils.data.files.hdf5 import Volume
from utils.distributed import world as distributed
from utils.distributed.signals import NullSignals, StopSignals
from utils.distributed.world import World
from utils.errors import UserError, one_line_errors, value_errors_for_users
from utils.evaluation import callback as during
from utils.evaluation.callback import NullEvaluation, VolumeEvaluation
from utils.evaluation.statistics import VolumeStatistics
from utils.inference.channels import input_channels, target_channels
from utils.inference.sliding_window import SlidingWindowPredictor
from utils.inference.window_grid import WindowGrid, build_window_grid
from utils.optim.optimizers import build_optimizer
from utils.optim.schedules import build_schedule
from utils.profiling import preflight
from utils.profiling import profiler as profiling
from utils.profiling.benchmark import Benchmark, read_settings
from utils.profiling.memory import out_of_memory_for_users, training_memory
from utils.runs import logger as logs
from utils.runs import summary as report
from utils.steps.eager import EagerStep, Metric, StepOptions
from utils.training import resume
from utils.training.checkpoint import FOLDER, Checkpoint, Checkpointer, NullCheckpointer, TrainState, read_weights
from utils.training.trainer import SaveOften, Trainer

# What a run leaves for the eye.
KINDS = {".html": "report", ".gif": "film"}


def main(argv: Sequence[str] | None = None, make_step: type[EagerStep] = EagerStep) -> None:
    """Reads the command line and trains; bad input ends in one line and exit code 2, a stop signal in exit code 75."""
    with one_line_errors():
        options = cli.parse(argv)
        config = configs.load(options.yaml_config, options.config, options.overrides)
        if options.preflight:
            check(options, config, make_step)
            return
        signals = NullSignals() if config.enable_benchy else StopSignals(config.stop_signal)
        seconds = config.timeouts
        with signals, distributed.connect(config.device, seconds.rendezvous, seconds.collective, seconds.hang) as world:
            logs.configure_logging(world.is_root)
            config = config.for_world(world.size)
            with out_of_memory_for_users():
                run(options, config, world, make_step, signals)


def run(options: cli.Options, config: Config, world: World, make_step: type[EagerStep], signals: StopSignals) -> None:
    """Assembles one training, or benchmark, and carries it out."""
    make_step.check(world, config.noddp)
    backends = set_backends(config, world.device)
    settings = read_settings(world) if config.enable_benchy else None
    torch.manual_seed(config.seed)  # for weights that are torch's own choice, the same on every rank
    with value_errors_for_users():
        network, loss = build_model(config), build_objective(config)
        metrics = build_metrics(config.metrics, config.is_classification)
    with world.raise_together():
        evaluated = plan_evaluation(config)
    directory = logs.run_directory(config, options.config, options.run_num, world.size)
    saved = resume.find(directory, options.resume, world) if settings is None else None
    changed = resume.changes(saved, config) if saved else []
    profiler = build_profiler(config, world, directory)
    with build_loaders(
        config,
        world,
        lambda: training_memory(config, lambda: build_model(config), lambda n: batch_like(config, n)).reserve,
    ) as loaders:
        step = build_step(config, world, network, loss, make_step, metrics)
        attach_pending_work(loaders.train, step.pending_work)
        schedule = build_schedule(config)
        torch.manual_seed(config.seed + world.rank)
        position = begin(step, saved, options, world)
        resumed = position.step if saved else None
        complete = saved is not None and position.epoch >= config.num_epochs
        # One that was interrupted and is given fewer epochs now has no summary to write: it may still resume.
        interrupted = saved is not None and position.epoch < saved.weights["config"]["num_epochs"]
        if complete and (interrupted or report.is_finished(directory, position.step, world)):
            for line in how_it_begins(options, config, saved, changed, position):
                logging.getLogger().info(line)
            logging.getLogger().info("DONE ---- rank %d", world.rank)
            return
        with closing(logs.open_run(config, options.config, directory, world, resumed, complete)) as run_logs:
            run_logs.info(f"Run directory: {directory}")
            for note in (*backends, *loaders.notes, *without_effect(config, world)):
                run_logs.info(note)
            run_logs.info(f"Configuration {options.config}:\n{configs.to_yaml(config, options.config)}")
            if settings is not None:
                benchmark = Benchmark(
                    step=step,
                    loader=loaders.train,
                    world=world,
                    logs=run_logs,
                    rate=schedule.peak,
                    global_batch_size=config.global_batch_size,
                    settings=settings,
                    dtype=getattr(torch, config.precision) if config.enable_amp else torch.float32,
                    exchanges=world.size > 1 and not config.noddp,
                )
                benchmark.run(logs.provenance(world))
            else:
                with world.raise_together():
                    if world.is_root and options.resume == "no" and saved is None:
                        resume.discard(directory)
                for line in how_it_begins(options, config, saved, changed, position):
                    run_logs.info(line)
                if complete:
                    run_logs.info("The summary of this training is missing: it is written now, and nothing is trained")
                start = ["weights of --init_from"] if options.init_from and saved is None else []
                saved = None  # as large as the state itself
                kept, folder = resume.comparable(config), directory / FOLDER
                saving = (
                    Checkpointer(folder, kept, config.checkpoint.keep_last) if world.is_root else NullCheckpointer()
                )
                with world.raise_together():
                    if world.is_root:
                        during.forget_after(directory / during.FOLDER, -1 if resumed is None else resumed)
                        report.forget_summary(directory)
                evaluation = build_evaluation(config, evaluated, step, world, directory, run_logs)
                trainer = Trainer(
                    step=step,
                    loaders=loaders,
                    schedule=schedule,
                    world=world,
                    logs=run_logs,
                    saving=saving,
                    profiler=profiler,
                    num_epochs=config.num_epochs,
                    global_batch_size=config.global_batch_size,
                    log_interval=config.log_interval,
                    signals=signals,
                    position=position,
                    save_often=SaveOften(config.checkpoint.every_steps, config.checkpoint.every_minutes),
                    max_consecutive_skips=config.max_consecutive_skips,
                    metrics=config.metrics,
                    evaluation=evaluation,
                )
                result = trainer.fit()
                final = {"hparam/final loss": result.final_loss, "hparam/best loss": result.best_loss}
                final |= {f"hparam/{name}": value for name, value in result.metrics.items()}
                run_logs.hparams(config, final, result.steps + 1)
                find_baselines = report.label_baselines if config.is_classification else report.baseline_losses
                baselines = find_baselines(loaders.valid, world) if config.report_baselines else {}
                with world.raise_together():
                    if world.is_root:
                        pictures = []
                        try:
                            if config.report_pictures:
                                pictures = report.draw(
                                    step, loaders.valid, directory, run_logs, result.steps, config.is_classification
                                )
                                pictures += during.draw(directory)
                        except OSError as error:  # what counts is done
                            run_logs.warning(f"Cannot draw pictures in {directory}: {error.strerror or error}")
                        table = report.closing_table(result, baselines, directory, *start)
                        run_logs.info(
                            "\n  ".join(
                                [
                                    "Result:",
                                    *table,
                                    *(f"{KINDS.get(path.suffix, 'picture')}: {path}" for path in pictures),
                                ]
                            )
                        )
                        if saving.fault is not None:
                            raise UserError(
                                f"the trained network is not in {folder}: {saving.fault}; fix that, and the same "
                                f"command resumes from the newest checkpoint there"
                            )
                        run_logs.flush()
                        report.write_summary(directory, result, run_logs)
    logging.getLogger().info("DONE ---- rank %d", world.rank)


def plan_evaluation(config: Config) -> tuple[Volume, WindowGrid] | None:
    """The validation box and how it will be cut, where evaluation.every_epochs asks for it; UserError if it cannot be.

    Before anything is written: what cannot be evaluated at an epoch's end must not begin.
    """
    options = config.evaluation
    if not options.every_epochs:
        return None
    volume = open_box(config, "valid")
    try:
        return volume, build_window_grid((volume.box,) * 3, options.tile or config.data_size, options.step)
    except UserError as error:
        raise UserError(f"evaluation.tile, evaluation.step: {error}") from None


def build_evaluation(
    config: Config,
    planned: tuple[Volume, WindowGrid] | None,
    step: EagerStep,
    world: World,
    directory: Path,
    run_logs: logs.NullLogger,
) -> NullEvaluation:
    """What evaluation.every_epochs asks for: predictions of the whole validation box, judged by physics."""
    if planned is None:
        return NullEvaluation()
    assert config.local_batch_size is not None
    volume, tiling = planned
    options = config.evaluation
    inputs, targets = (
        input_channels(config.N_in_channels, config.transform),
        target_channels(config.N_out_channels, config.transform),
    )
    read, target = during.volume_planes(volume)
    # As much at once as in training, or less.
    batch_size = max(1, config.local_batch_size * config.data_size**3 // tiling.x.tile**3)
    painter = SlidingWindowPredictor(step.predict, read, tiling, (len(inputs), len(targets)), batch_size, world)
    vectors = config.vector_channels.targets
    return VolumeEvaluation(
        painter,
        target,
        lambda: VolumeStatistics(targets, inputs, tiling.shape, volume.cell, world, vectors),
        every_epochs=options.every_epochs,
        budget=options.budget,
        num_epochs=config.num_epochs,
        folder=directory / during.FOLDER,
        world=world,
        logs=run_logs,
        about={"input": volume.path, "cell": volume.cell, "run": str(directory)},
    )


def begin(step: EagerStep, saved: Checkpoint | None, options: cli.Options, world: World) -> TrainState:
    """Gives the step what it starts with, and says where that is; raises UserError where it does not fit."""
    source: object = saved.path if saved else options.init_from
    try:
        if saved is not None:
            step.load_state({"network": saved.weights["network"], **saved.training})
            resume.restore_random(saved, world)
            return saved.position
        if options.init_from is not None:
            with world.raise_together():
                step.load_weights(read_weights(Path(options.init_from))["network"])
    except UserError:
        raise
    except ValueError as error:
        remedy = "give it a --run_num of its own" if saved else "name a run of the same network"
        raise UserError(f"{source} does not fit this training: {error}; {remedy}") from None
    return TrainState()


def how_it_begins(
    options: cli.Options, config: Config, saved: Checkpoint | None, changed: list[str], position: TrainState
) -> list[str]:
    """Lines for the log."""
    if saved is None:
        return [f"Weights of {options.init_from}"] if options.init_from else []
    lines = [f"Going on from {saved.path}, after step {position.step}"]
    if changed:
        lines.append(f"Changed since: {', '.join(changed)}; the learning rate follows the schedule as it is now")
    if options.init_from:
        lines.append("--init_from has no effect: this training has a checkpoint of its own; give a --run_num")
    if position.epoch >= config.num_epochs:
        lines.append("This training is complete; raise num_epochs, start anew with --resume=no, or give a --run_num")
    return lines


def build_step(
    config: Config,
    world: World,
    network: nn.Module,
    loss: nn.Module,
    make_step: type[EagerStep],
    metrics: Sequence[Metric] = (),
) -> EagerStep:
    """Network, loss and optimizer in a step; the same weights on every rank, from the config's seed."""
    start = config.weight_init
    generator = torch.Generator().manual_seed(config.seed)
    initialise(network, generator, start.conv_init, start.conv_scale, start.conv_bias)
    network.to(world.device)
    if config.channels_last:
        network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload] # its stubs lack it
    choice = config.optimizer
    if config.enable_apex and choice.name == "adam":
        choice = choice.model_copy(update={"name": "apex_adam"})
    with value_errors_for_users():
        rate, capturable = config.lr_schedule.start_lr, make_step.capturable and world.device.type == "cuda"
        optimizer = build_optimizer(choice, network.named_parameters(), rate, capturable)
    return make_step(
        network,
        loss,
        optimizer,
        world,
        StepOptions(
            enable_amp=config.enable_amp,
            precision=config.precision,
            accumulation_steps=config.accumulation_steps,
            clip_grad_norm=config.clip_grad_norm,
            enable_jit=config.enable_jit,
            compiler=config.compiler,
            noddp=config.noddp,
            ddp=config.ddp,
            log_noise_scale=config.log_noise_scale,
            bucket_cap_mb=config.bucket_cap_mb,
            disable_broadcast_buffers=config.disable_broadcast_buffers,
            static_graph=config.static_graph,
            gradient_compression=config.gradient_compression,
            ema_decay=config.ema_decay,
        ),
        metrics,
    )


def build_model(config: Config) -> nn.Module:
    """The bare network, with torch's default weights."""
    options: dict[str, object]
    if config.dataset.name is None:
        options = {
            "crop": config.data_size,
            "in_channels": config.N_in_channels,
            "out_channels": config.N_out_channels,
            "width": config.network.width,
            "scales": config.scales,
            "space_to_depth": config.network.space_to_depth,
            "fused": config.fused_pointwise,
        }
    else:
        dataset = find_dataset(config.dataset.name)
        options = {"shape": dataset.shape, "classes": dataset.classes, "vocabulary": dataset.vocabulary}
    norm = config.network.norm
    ghost, batch = ghost_batch(norm), (config.local_batch_size or 0) // config.accumulation_steps
    if ghost is not None and (batch < ghost or batch % ghost):
        part = "a rank's micro-batch" if config.accumulation_steps > 1 else "a rank's batch"
        raise ValueError(
            f"network.norm {norm}: {part} of {batch} is no multiple of {ghost}; raise local_batch_size, or take a "
            f"smaller ghost batch"
        )
    return build_network(config.network.name, **options, norm=norm)


def build_objective(config: Config) -> nn.Module:
    """The loss."""
    options = {"lambda_rho": config.lambda_rho, "fused": config.fused_pointwise, "weights": config.channel_weights}
    return build_loss(config.loss, config.is_classification, **options)


def build_profiler(config: Config, world: World, directory: Path) -> profiling.NullProfiler:
    """What --enable_manual_profiling asks for; raises UserError, on every rank, where it cannot be had."""
    if not config.enable_manual_profiling:
        return profiling.NullProfiler()
    profile, on_gpu = config.profile, world.device.type == "cuda"
    with_nsys = profile.profiler == "nsys" or (profile.profiler == "auto" and on_gpu)
    if with_nsys and not on_gpu:
        raise UserError(
            f"profile.profiler nsys needs a GPU, and this training runs on {world.device}; use --profiler=torch"
        )
    first = profile.first_step
    if first is None:
        warm = min(5, config.steps_per_epoch - 1)
        first = warm + (config.steps_per_epoch if config.num_epochs > 1 else 0)
    if first >= config.total_steps:
        raise UserError(
            f"profile.first_step {first} lies beyond the training: it has {config.total_steps} steps, counted from 0; "
            f"lower it, or raise num_epochs"
        )
    if profile.ranks == "root" and not world.is_root:
        return profiling.NullProfiler()
    tool: profiling.Nsys | profiling.TorchProfiler = profiling.Nsys()
    if not with_nsys:
        tool = profiling.TorchProfiler(directory, on_gpu, world.rank if profile.ranks == "all" else None)
    return profiling.WindowProfiler(first, profile.steps, tool, world.device)


def check(options: cli.Options, config: Config, make_step: type[EagerStep]) -> None:
    """--preflight: on the first rank alone; the others have nothing to add."""
    launch = distributed.read_launch()
    if launch.rank > 0:
        return
    ranks = options.preflight_ranks or launch.world_size
    if make_step.capturable:  # a plain step is at home on every device, and a login node may have another than the run
        here = World(distributed.Launch("preflight"), distributed.choose_device(config.device, 0))
        make_step.check(here, config.noddp)
    config = config.for_world(ranks)
    named = configs.read_file(options.yaml_config)
    base = configs.load(options.yaml_config, "base") if "base" in named else None
    directory = logs.run_directory(config, options.config, options.run_num, ranks)
    with value_errors_for_users():
        build_objective(config)
        plan_evaluation(config)
        anew = resume.starts_anew(options.resume)
        plot = None
        if options.plot is not None:
            plot = functools.partial(preflight.plot_rates, config, options.config, Path(options.plot))
        preflight.show(preflight.report(config, base, directory, ranks, lambda: build_model(config), anew, plot))


def without_effect(config: Config, world: World) -> list[str]:
    """What the config asks for and this run has no use for, for the log."""
    notes = []
    if config.fused_pointwise:
        reasons = {
            "there is no GPU": world.device.type != "cuda",
            "channels_last is false": not config.channels_last,
            "the compiler fuses by itself": config.enable_jit,
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why is not None:
            notes.append(f"fused_pointwise has no effect: {why}")
    if config.enable_apex and config.optimizer.name not in ("adam", "apex_adam"):
        notes.append(f"enable_apex has no effect: optimizer.name is {config.optimizer.name}")
    if config.lr_schedule.scaling == "none" and (config.lr_schedule.warmup_steps or config.lr_schedule.warmup_epochs):
        notes.append("lr_schedule's warm-up has no effect: its scaling is none")
    if world.size == 1 or config.noddp:
        asked = [
            name
            for name, value in (
                ("gradient_compression", config.gradient_compression != "none"),
                ("static_graph", config.static_graph),
            )
            if value
        ]
        if asked:
            notes.append(f"{' and '.join(asked)}: no effect, since no gradients are exchanged")
    if world.size > 1 and world.device.type == "cuda" and "nccl" not in dist.get_backend_config():
        notes.append("ranks share a GPU, which NCCL refuses: gloo exchanges gradients, through the host")
    if config.enable_amp and config.precision == "float16" and world.device.type == "cpu":
        notes.append("float16 is very slow on a CPU; bfloat16, the default of --enable_amp, is not")
    return notes


def set_backends(config: Config, device: torch.device) -> list[str]:
    """cuDNN's search, which pays since shapes stay the same, and TF32; returns what to log of it.

    Through PyTorch's older switches: its compiler still reads them, and refuses to once the newer ones are written.
    """
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = config.tf32
    if device.type != "cuda":
        return []
    overridden = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
    precision = "TF32" if config.tf32 and not overridden else "IEEE"
    why = " (NVIDIA_TF32_OVERRIDE=0)" if overridden else ""
    search = "on" if config.cudnn_benchmark else "off"
    return [f"cuDNN {torch.backends.cudnn.version()}, search {search}; float32 convolutions: {precision}{why}"]


if __name__ == "__main__":
    distributed.run_script(main)
