"""The operations that compute a config's network, and their Triton kernels, compiled before the first step."""

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from networks.losses import NetworkWithLoss
from networks.ops import plan
from networks.ops.launch import Launch, collected
from utils.config import Config
from utils.data.loaders.base import memory_format, meta_batch
from utils.data.task import task_of
from utils.distributed.devices import cache_directory
from utils.distributed.world import World

log = logging.getLogger(__name__)


def setting(config: Config, device: torch.device) -> plan.Setting:
    """The setting of a plan for training, validation and evaluation."""
    obstacle = "enable_jit is true" if config.enable_jit else "" if config.channels_last else "channels_last is false"
    dtype = getattr(torch, config.precision) if config.enable_amp else torch.float32
    return plan.Setting(config.kernels, config.data_size, dtype, device, obstacle)


def apply(model: NetworkWithLoss, chosen: plan.Setting) -> None:
    """Makes the plan of a network and its loss, and gives each layer its operation."""
    plan.apply(model.network, plan.make(model.network, chosen, model.loss), chosen.dtype, model.loss)


def compile_kernels(config: Config, world: World, build_model: Callable[[], NetworkWithLoss]) -> None:
    """Compiles what `launches` finds; each rank of a node a part of it, into a cache that all of them read."""
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
    # The ranks of a node are numbered from 0; every rank knows the largest number.
    ranks = 1 + max(world.gather_json(world.local_rank))
    in_parallel(needed[world.local_rank :: ranks])
    world.barrier()
    in_parallel(needed)
    if needed:
        log.info("Kernels ready after %.1f sec", time.perf_counter() - started)


def launches(config: Config, chosen: plan.Setting, build_model: Callable[[], NetworkWithLoss]) -> list[Launch]:
    """The launches of a step's forward and backward pass that need kernels of their own, from a pass without data."""
    form, gpus = memory_format(config.channels_last), [chosen.device] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=gpus), torch.device("meta"):
        model = build_model()
    parts = meta_batch(config, (config.local_batch_size or 1) // config.accumulation_steps)
    batch = [part.contiguous(memory_format=form) if part.dim() == 5 else part for part in parts]
    model.to(memory_format=form)  # type: ignore[call-overload] # its stubs lack it
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
