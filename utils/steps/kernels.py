"""Compiles the Triton kernels of a training step before its first one, in parallel, on all ranks of a node."""

import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from networks import fused
from utils.config import Config
from utils.data.loaders.base import memory_format, meta_batch
from utils.distributed.devices import cache_directory
from utils.distributed.world import World
from utils.steps import build

log = logging.getLogger(__name__)


def compile_kernels(config: Config, world: World) -> None:
    """Compiles what `launches` finds; each rank of a node a part of it, into a cache that all of them read."""
    if world.device.type != "cuda" or config.enable_jit or config.is_classification or fused.kernels() is None:
        return
    started = time.perf_counter()
    try:
        needed = launches(config, world.device)
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


def launches(config: Config, device: torch.device) -> list[fused.Launch]:
    """The launches of a step's forward and backward pass that need kernels of their own, from a pass without data."""
    form = memory_format(config.channels_last)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device("meta"):
        model = build.network_with_loss(config)
        model.to(memory_format=form)  # type: ignore[call-overload] # its stubs lack it
    parts = meta_batch(config, (config.local_batch_size or 1) // config.accumulation_steps)
    batch = [part.contiguous(memory_format=form) if part.dim() == 5 else part for part in parts]
    dtype = getattr(torch, config.precision) if config.enable_amp else None
    with fused.dry_run(device, dtype) as made:
        model.train()(*batch).backward()
    return list({fused.signature(launch): launch for launch in made}.values())


def in_parallel(needed: list[fused.Launch]) -> None:
    """Compiles the kernels, in threads if this version of Triton can, or reads them from Triton's cache."""
    with contextlib.ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(torch.get_num_threads()))
        with contextlib.suppress(ImportError):
            from triton.runtime._async_compile import AsyncCompileMode

            opened.enter_context(AsyncCompileMode(pool))
        for kernel, arguments, options in needed:
            kernel.warmup(*arguments, grid=(1,), **options)
