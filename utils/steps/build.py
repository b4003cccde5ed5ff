"""Builds network, loss and step from the config."""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from networks import LOSSES, METRICS, NETWORKS, build_loss, build_network, initialize
from networks.calibration import CalibrationFit
from networks.losses import Metric, NetworkWithLoss
from networks.norms import ghost_batch
from networks.ops import plan
from utils.config import Config
from utils.data.loaders import DataSplits, open_loaders
from utils.data.loaders.base import meta_batch
from utils.data.task import CLASSES, task_of
from utils.distributed.world import World
from utils.errors import UserError, value_errors_for_users
from utils.lookup import build_user_class, find_function, lookup
from utils.optim.optimizers import build_optimizer, check_name, describe_optimizer
from utils.optim.schedules import warn_of_long_warmup
from utils.steps import kernels, own_network
from utils.steps.backends import conv3d_fault, log_backends
from utils.steps.eager import EagerStep
from utils.steps.size import ModelSize
from utils.volumes.opened import Volumes

log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """The parts of a training run: its size, the loaders of both splits and the step."""

    size: ModelSize
    loaders: DataSplits
    step: EagerStep


@contextmanager
def assemble(
    volumes: Volumes, world: World, step_class: type[EagerStep], size: ModelSize | None = None
) -> Iterator[Parts]:
    """Builds and closes the parts of a run, on every rank; `size`: that of a run with larger batches than `volumes`."""
    config = volumes.config
    with world.raise_together():
        model = network_with_loss(config)
    size = size or model_size(config)
    reserve = size.reserve(world.device)
    with open_loaders(volumes, world, reserve) as loaders, closing(step(config, world, model, step_class)) as built:
        yield Parts(size, loaders, built)


def network(config: Config) -> nn.Module:
    """The config's network with torch's default weights; ValueError if its options contradict each other."""
    norm = config.network.norm
    ghost, batch = ghost_batch(norm), (config.local_batch_size or 0) // config.accumulation_steps
    if ghost is not None and (batch < ghost or batch % ghost):
        part = "micro-batch" if config.accumulation_steps > 1 else "batch"
        fault = f"network.norm {norm}: the {part} of {batch} samples per rank is not a multiple of {ghost}"
        raise ValueError(f"{fault}; raise local_batch_size, or use a smaller ghost batch")
    name, samples = config.network.name, task_of(config).network_options
    given: dict[str, object] = {} if norm == "none" else {"norm": norm}
    if config.network.conditions:
        assert config.network.condition_ranges, "Volumes.open reads them from the files"
        given["conditions"] = config.network.condition_ranges
    if "." in name:
        samples.pop("added", None)  # of the U-Net alone
        return own_network.build(config, samples, {**given, **config.network.options})
    options = {name: value for name, value in {**given, **samples}.items() if value}  # not every network has all
    lookup(NETWORKS, "network.name", name, "; a class of your own is named my_module.MyNetwork")
    return build_network(name, **{**options, **config.network.options})


def network_without_values(config: Config) -> nn.Module:
    """The config's network on torch's meta device: its shapes, without memory for its weights."""
    # Not every constructor works without values, and those on a CPU draw them.
    device = torch.device("cpu" if own_network.is_checked(config) else "meta")
    with torch.random.fork_rng(devices=[]), device:
        return network(config).to("meta")


def model_size(config: Config) -> ModelSize:
    """The size of a training run with this config, whose batch sizes are resolved."""
    return ModelSize(config, network_without_values(config))


def loss(config: Config) -> nn.Module:
    """The loss of a config returned by `Volumes.open`."""
    keys = {"lambda_rho": config.lambda_rho, "weights": config.channel_weights}
    options = {key: value for key, value in keys.items() if value}
    options |= config.loss_options
    density = (task_of(config).density or ()) if config.lambda_rho else ()
    scale = dict(zip(("density_channel", "density_log_scale"), density, strict=False))
    if "." in config.loss:
        offered = {**scale, "channels": config.volume_channels[1]}
        return build_user_class("loss", config.loss, nn.Module, offered, options)
    lookup(LOSSES, "loss", config.loss, "; a class of your own is named my_module.MyLoss")
    return build_loss(config.loss, task_of(config).name, **{**scale, **options})


def metrics(config: Config) -> dict[str, Metric]:
    task, found = task_of(config), dict[str, Metric]()
    for name in config.metrics:
        if "." in name:
            found[name] = find_function("metrics", name)
        elif task.name == CLASSES:
            found[name] = lookup(METRICS, "metrics", name, "; one of your own is named my_module.f")
        else:
            raise UserError(f"metrics: {name} is no metric of {task.name}; name one of your own, my_module.f")
    return found


def network_with_loss(config: Config) -> NetworkWithLoss:
    """What a step trains and measures. torch's default initial weights are drawn with the config's seed."""
    torch.manual_seed(config.seed)
    with value_errors_for_users():
        check_name(config.optimizer)
        density = task_of(config).density
        calibration = CalibrationFit(*density) if density else None
        return NetworkWithLoss(network(config), loss(config), metrics(config), calibration)


def preflight_batch(config: Config) -> int:
    """Samples of the step that a preflight trains: of volumes as few as the network accepts."""
    if not task_of(config).is_3d:
        return (config.local_batch_size or 1) // config.accumulation_steps
    # Batch norm needs two values per channel, which one sample may not have at the bottleneck.
    return ghost_batch(config.network.norm) or (1 if config.network.norm in ("none", "group") else 2)


def check_output(config: Config) -> None:
    """ValueError unless output and targets have one shape; only networks of one's own need memory, for one sample."""
    own_network.check_measures(config, loss(config), metrics(config), torch.device("cpu"))
    if own_network.is_checked(config):
        own_network.check_output(config, network(config), torch.device("cpu"))
        return
    batch = meta_batch(config, config.local_batch_size or 1)
    loss(config)(network_without_values(config)(*batch.network_inputs), batch.targets)


def check(config: Config, world: World, step_class: type[EagerStep] = EagerStep) -> None:
    """Raises UserError if the ranks of this world cannot train with this config."""
    step_class.check(config, world)
    if world.device.type == "cuda" and torch.__version__ < "2.9" and (fault := conv3d_fault(config)):
        raise UserError(fault)  # with wrong values; later versions of PyTorch are only slow
    if config.network.norm == "sync_batch" and world.size > 1 and world.device.type == "cpu":
        fault = "network.norm sync_batch needs GPUs: PyTorch does not synchronize batch norms of several ranks on CPUs"
        raise UserError(f"{fault}; use ghost(n), over groups of n samples, or one rank")


def kernel_plan(config: Config, device: torch.device) -> dict[str, str]:
    """The choices for the layers and the loss of the config's training on a device, as text."""
    chosen = plan.make(network_without_values(config), kernels.setting(config, device), loss(config))
    return {name: str(choice) for name, choice in chosen.items()}


def step(config: Config, world: World, model: NetworkWithLoss, step_class: type[EagerStep] = EagerStep) -> EagerStep:
    """The step that trains `model`, with the same initial weights on every rank."""
    module = model.network
    _initialize(config, module)
    model.to(world.device)
    if config.channels_last:
        module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload] # its stubs lack it
    if own_network.is_checked(config):
        own_network.check_output(config, module, world.device)
    own_network.check_measures(config, model.loss, model.metrics, world.device)
    kernels.compile_kernels(config, world, partial(network_with_loss, config))
    kernels.apply(model, kernels.setting(config, world.device))
    capturable, lr = step_class.capturable and world.device.type == "cuda", config.lr_schedule.start_lr
    with value_errors_for_users():
        optimizer = build_optimizer(config.optimizer, dict(module.named_parameters()), lr, capturable)
    train_step = step_class(model, optimizer, config, world)
    log.info(describe_optimizer(config.optimizer.name, optimizer))
    torch.manual_seed(config.seed + world.rank)  # dropout must not be the same on all ranks
    return train_step


def _initialize(config: Config, network: nn.Module) -> None:
    """Draws the initial weights, unless a user's network is to keep those of its constructor."""
    start, is_user = config.weight_init, "." in config.network.name
    is_kept = is_user and start.conv_init == "auto"
    if is_user:
        source = "the constructor's, not drawn" if is_kept else "drawn in place of the constructor's"
        log.info("initial weights: %s (weight_init.conv_init is %s)", source, start.conv_init)
    if not is_kept:
        kind = "normal" if start.conv_init == "auto" else start.conv_init
        initialize(network, torch.Generator().manual_seed(config.seed), kind, start.conv_scale, start.conv_bias)


def log_settings(config: Config, world: World) -> None:
    """Logs the backends, the augmentation, a long warm-up, and the options without effect in this run."""
    log_backends(config, world)
    if world.device.type == "cuda" and (chosen := kernel_plan(config, world.device)):
        log.info("Kernels: %s", plan.describe(chosen))
    if task_of(config).is_3d:
        log.info("symmetries: %s", config.symmetries)
    warn_of_long_warmup(config)
    for line in options_without_effect(config, world):
        log.info(line)


def options_without_effect(config: Config, world: World) -> Iterator[str]:
    """Lines for the log: options of the config that this run cannot use."""
    on_gpu, exchanges = world.device.type == "cuda", world.size > 1 and not config.noddp
    for key in ("enable_apex", "enable_fused"):
        if getattr(config, key) and config.optimizer.name != "apex_adam":
            yield f"{key} has no effect: adam is always torch's fused Adam; --set optimizer.name=apex_adam uses apex's"
    if on_gpu and config.enable_jit and config.kernels != plan.TORCH:
        yield f"kernels {config.kernels} has no effect: torch.compile (--enable_jit) compiles PyTorch's operations"
    if config.deterministic and not on_gpu:
        yield "deterministic has no effect on a CPU, where training is always deterministic"
    if config.profile != type(config.profile)() and not config.enable_manual_profiling:
        yield "the section profile (--profiler) has no effect: enable_manual_profiling is false"
    if (config.lr_schedule.warmup_steps or config.lr_schedule.warmup_epochs) and not config.warms_up:
        yield "lr_schedule's warm-up has no effect: it needs lr_schedule.scaling, and a batch above base_batch_size"
    if config.network.adds_vectors and ("." in config.network.name or not task_of(config).network_options.get("added")):
        yield "network.adds_vectors has no effect: not unet, or no vector has the quantity and transform of a target's"
    if config.integrity.every and world.size > 1 and not exchanges:
        yield "integrity has no effect: no gradients are exchanged, so that the ranks train different networks"
    if exchanges and on_gpu and "nccl" not in dist.get_backend_config():
        yield "ranks share a GPU, which NCCL refuses: gloo exchanges gradients through the host"
    if config.enable_amp and config.precision == "float16" and not on_gpu:
        yield "float16 is very slow on a CPU; bfloat16, the default of --enable_amp, is not"
