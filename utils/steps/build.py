"""Builds network, loss and step from the config."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from networks import build_loss, build_metrics, build_network, initialize
from networks.losses import NetworkWithLoss
from networks.norms import ghost_batch
from networks.tail import NetworkWithFusedTail
from utils.config import Config
from utils.config.sections import ProfileConfig
from utils.data.datasets import get_dataset
from utils.distributed.world import World
from utils.errors import UserError, value_errors_for_users
from utils.optim.optimizers import build_optimizer, check_optimizer, describe_optimizer
from utils.steps.backends import log_backends
from utils.steps.eager import EagerStep

log = logging.getLogger(__name__)


def network(config: Config) -> nn.Module:
    """The config's network with torch's default weights; ValueError if its options contradict each other."""
    norm = config.network.norm
    ghost, batch = ghost_batch(norm), (config.local_batch_size or 0) // config.accumulation_steps
    if ghost is not None and (batch < ghost or batch % ghost):
        part = "micro-batch" if config.accumulation_steps > 1 else "batch"
        raise ValueError(
            f"network.norm {norm}: the {part} of {batch} samples per rank is not a multiple of {ghost}; raise "
            f"local_batch_size, or use a smaller ghost batch"
        )
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
    return build_network(config.network.name, **options)


def loss(config: Config) -> nn.Module:
    """The config's loss."""
    options = {"lambda_rho": config.lambda_rho, "fused": config.fused_pointwise, "weights": config.channel_weights}
    return build_loss(config.loss, config.is_classification, **options)


def model(config: Config) -> NetworkWithLoss:
    """Network, loss and metrics. torch's default initial weights are drawn with the config's seed on every rank."""
    torch.manual_seed(config.seed)
    with value_errors_for_users():
        check_optimizer(config.optimizer.name)
        metrics = build_metrics(config.metrics, config.is_classification)
        kind = NetworkWithFusedTail if config.fused_tail else NetworkWithLoss
        return kind(network(config), loss(config), metrics)


def check_norm(config: Config, world: World) -> None:
    """Raises UserError for a norm that these ranks cannot compute."""
    if config.network.norm == "sync_batch" and world.size > 1 and world.device.type == "cpu":
        raise UserError(
            "network.norm sync_batch needs GPUs: PyTorch does not synchronize batch norms of several ranks on CPUs; "
            "use ghost(n), over groups of n samples, or one rank"
        )


def step(config: Config, world: World, model: NetworkWithLoss, step_class: type[EagerStep] = EagerStep) -> EagerStep:
    """The step that trains `model`, with the same initial weights on every rank.

    Afterward torch's generators differ between ranks: dropout must not be the same on all of them.
    """
    check_norm(config, world)
    start, module = config.weight_init, model.network
    generator = torch.Generator().manual_seed(config.seed)
    initialize(module, generator, start.conv_init, start.conv_scale, start.conv_bias)
    module.to(world.device)
    if config.channels_last:
        module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload] # its stubs lack it
    capturable = step_class.capturable and world.device.type == "cuda"
    with value_errors_for_users():
        optimizer = build_optimizer(
            config.optimizer, module.named_parameters(), config.lr_schedule.start_lr, capturable
        )
    train_step = step_class(model, optimizer, config, world)
    torch.manual_seed(config.seed + world.rank)
    return train_step


def log_settings(config: Config, step: EagerStep, world: World) -> None:
    """Logs how the step computes, and the options that have no effect in this run."""
    log.info(describe_optimizer(config.optimizer.name, step.optimizer))
    log_backends(config, world)
    for line in options_without_effect(config, world):
        log.info(line)


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
    for name, conditions in (("fused_pointwise", reasons), ("fused_tail", reasons | no_bfloat16)):
        why = next((reason for reason, holds in conditions.items() if holds), None)
        if getattr(config, name) and why is not None:
            notes.append(f"{name} has no effect: {why}")
    if config.deterministic and world.device.type == "cpu":
        notes.append("deterministic has no effect on a CPU, where training is always deterministic")
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
