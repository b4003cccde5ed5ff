"""The operations that compute a config's network, and their Triton kernels, compiled before the first step."""

import contextlib
import contextvars
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from networks import build_loss, build_network, initialize
from networks.losses import NetworkWithLoss
from networks.ops import plan
from networks.ops.hopper import tiles
from networks.ops.launch import Launch, collected
from utils.config import Config
from utils.data.loaders.base import memory_format, meta_batch
from utils.data.task import task_of
from utils.distributed.devices import cache_directory
from utils.distributed.world import World
from utils.errors import UserError
from utils.log import once_per_job

log = once_per_job(__name__)

TRIAL_SIDE = 16  # of the grid of the small network with which kernels are tried
TRIAL_ERROR = 0.02  # of its gradients; bfloat16 rounds them by 0.005


def setting(config: Config, device: torch.device) -> plan.Setting:
    """The setting of a plan for training, validation and evaluation."""
    obstacle = "enable_jit is true" if config.enable_jit else "" if config.channels_last else "channels_last is false"
    dtype = getattr(torch, config.precision) if config.enable_amp else torch.float32
    return plan.Setting(config.kernels, config.data_size, dtype, device, obstacle)


def apply(model: NetworkWithLoss, chosen: plan.Setting) -> None:
    """Makes the plan of a network and its loss, and gives each layer its operation."""
    plan.apply(model.network, plan.make(model.network, chosen, model.loss), chosen.dtype, model.loss)


def compile_kernels(config: Config, world: World, build_model: Callable[[], NetworkWithLoss]) -> None:
    """Compiles what `launches` finds; each rank of a node a part of it, into a cache that all of them read.

    Called before the plan is made: if Hopper's kernels fail on a rank, also in a trial, all ranks do without them.
    """
    chosen = setting(config, world.device)
    if not task_of(config).is_3d or plan.needs_no_kernels(chosen):
        return
    started = time.perf_counter()
    try:
        needed = launches(config, chosen, build_model)
    except Exception as error:  # a network of one's own may not support tensors without data
        log.info("Triton compiles each kernel when it is first used: %s", str(error).split("\n")[0])
        needed = []
    if needed:
        log.info("Compiling %d Triton kernels, or reading them from %s", len(needed), cache_directory())
    hopper = any(world.gather_json(any(".hopper." in kernel.fn.__module__ for kernel, *_ in needed)))
    if hopper:
        model, batch = trial()
        needed += _launches(model.to("meta"), [part.to("meta") for part in batch], chosen._replace(side=TRIAL_SIDE))
    # The ranks of a node are numbered from 0; every rank knows the largest number.
    ranks = 1 + max(world.gather_json(world.local_rank))
    actions: list[Callable[[], None]] = [lambda: in_parallel(needed[world.local_rank :: ranks])]
    actions += [lambda: in_parallel(needed), *([lambda: compare_with_pytorch(chosen)] if hopper else [])]
    faults = (_fault(action, world) for action in actions)
    fault = next(filter(None, faults), "")
    if fault and hopper:
        log.warning("The convolution kernels for Hopper GPUs fail, so cuDNN computes the convolutions: %s", fault)
        plan.fault = fault
        compile_kernels(config, world, build_model)
    elif fault:
        raise UserError(f"Triton cannot compile a kernel: {fault}; set kernels=torch")
    elif needed:
        log.info("Kernels ready after %.1f sec", time.perf_counter() - started)


def _fault(action: Callable[[], None], world: World) -> str:
    """The error of the first rank on which the action fails; empty if it fails on none."""
    text = ""
    try:
        contextvars.copy_context().run(action)  # after an error, Triton 3.6 leaves a variable set
    except Exception as error:
        text = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(world.gather_json(text)) if text), "")


def trial() -> tuple[NetworkWithLoss, list[torch.Tensor]]:
    """A small network in which Hopper's kernels compute each pass of each layer, and its inputs and targets."""
    generator, form = torch.Generator().manual_seed(0), torch.channels_last_3d
    with torch.random.fork_rng(devices=[]):
        network: Any = build_network("unet", width=tiles.BLOCK, scales=2)
    # Rounding moves nearly no activation across zero, because of the bias.
    initialize(network, generator, scale=0.005, bias=2.0)
    nn.init.zeros_(network.last.bias)
    network.to(memory_format=form)
    batch = [torch.randn(1, count, *[TRIAL_SIDE] * 3, generator=generator) for count in (4, 5)]
    batch[1] = 2 * batch[1].sign()  # outside of the network's range: rounding changes no sign in the gradient
    return NetworkWithLoss(network, build_loss("l1")), [part.contiguous(memory_format=form) for part in batch]


def compare_with_pytorch(chosen: plan.Setting) -> None:
    """ValueError if the gradients of `trial` are not those of PyTorch on a CPU."""
    # Some descriptors have strides that CUDA's documentation excludes, and that a driver may refuse.
    (model, batch), gradients = trial(), list[tuple[torch.Tensor, ...]]()
    for setting in (chosen._replace(kernels=plan.TORCH, device=torch.device("cpu")), chosen):
        apply(model.to(setting.device), setting._replace(side=TRIAL_SIDE))
        loss = model(*(part.to(setting.device) for part in batch))
        # Scaled, because the gradient of a mean underflows in float16.
        gradients.append(torch.autograd.grad(1024 * loss, [*model.parameters()]))
    errors = [(got.cpu() - expected).norm() / expected.norm() for expected, got in zip(*gradients, strict=True)]
    if not (error := float(torch.stack(errors).max())) < TRIAL_ERROR:
        raise ValueError(f"the gradients of a small network differ from PyTorch's by {100 * error:.0f} %")


def launches(config: Config, chosen: plan.Setting, build_model: Callable[[], NetworkWithLoss]) -> list[Launch]:
    """The launches of a step's forward and backward pass that need kernels of their own, from a pass without data."""
    form, gpus = memory_format(config.channels_last), [chosen.device] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=gpus), torch.device("meta"):
        model = build_model()
    parts = meta_batch(config, (config.local_batch_size or 1) // config.accumulation_steps)
    batch = [part.contiguous(memory_format=form) if part.dim() == 5 else part for part in parts]
    model.to(memory_format=form)  # type: ignore[call-overload] # its stubs lack it
    return _launches(model, batch, chosen)


def _launches(model: NetworkWithLoss, batch: Sequence[torch.Tensor], chosen: plan.Setting) -> list[Launch]:
    apply(model, chosen)
    with collected() as made:
        model.train()(*batch).backward()
    return list({launch.signature(): launch for launch in made}.values())


def in_parallel(needed: list[Launch]) -> None:
    """Compiles the kernels, in threads if this version of Triton can, or reads them from Triton's cache."""
    with contextlib.ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(torch.get_num_threads()))
        with contextlib.suppress(ImportError):
            from triton.runtime._async_compile import AsyncCompileMode

            opened.enter_context(AsyncCompileMode(pool))
        for kernel, arguments, options in needed:
            kernel.warmup(*arguments, grid=(1,), **options)
