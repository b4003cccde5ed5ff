"""The loader `auto`: chooses the fastest of the other loaders that fits. They all load the same batches."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

from utils.config import Config
from utils.data.files.shared_memory import free_shared_memory
from utils.data.loader import Loaders
from utils.data.loaders import dali, gpu_resident, threaded
from utils.data.plan import SPLITS
from utils.data.volumes import of_both_splits, open_split, open_split_npy
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import GIB

log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """The loader that `auto` stands for, the type of a volume in device memory, and the reason."""

    name: str
    resident_dtype: str
    reason: str


def build(config: Config, world: World, reserve: int = 0) -> Loaders:
    choice = choose(config, world, reserve)
    no_float16: str | None = None
    try:
        return _build(choice, config, world, reserve)
    except UserError as error:
        if choice.resident_dtype == config.resident_dtype:
            raise
        no_float16 = str(error)  # values beyond the type's range
    # Outside of `except`, because the error's frames hold device memory.
    return _build(choose(config, world, reserve, no_float16), config, world, reserve)


def _build(choice: Choice, config: Config, world: World, reserve: int) -> Loaders:
    unused = "" if choice.name == "resident" else gpu_resident.unused_options(config)
    log.info("data_loader_config auto: %s, %s%s", choice.name, choice.reason, unused)
    if choice.name == "resident":
        stored = config.model_copy(update={"resident_dtype": choice.resident_dtype})
        return gpu_resident.build(stored, world, reserve)
    if choice.name == "dali-lowmem":
        return dali.build(config, world)
    return (threaded.build_inmem if choice.name == "inmem" else threaded.build_lowmem)(config, world)


def choose(config: Config, world: World, reserve: int, no_float16: str | None = None) -> Choice:
    """The same choice on every rank. `no_float16` is a reason for not storing the volumes in that type.

    On a GPU nothing is faster than the device's own memory. If that is too small, DALI augments crops on the GPU and
    reads longer rows. Otherwise the CPU cores that augment crops are the limit: mapped files and memory are then
    equally fast (benchmarks/results/loaders.json), and only a file that is chunked or must be converted is better read
    into memory first.

    With mixed precision the volumes may be stored as float16: the network's inputs are rounded to fewer bits anyway,
    and targets in ±1 change by 8e-5 on average, a sixtieth of the final loss of the tutorial's recipe. A deterministic
    run must not depend on the device's memory.
    """
    with world.raise_together():
        volumes = of_both_splits({split: open_split(config, split) for split in SPLITS})
    configured, reasons = config.resident_dtype, list[str]()
    if world.device.type == "cuda":
        may_round = config.enable_amp and not config.deterministic and no_float16 is None
        for dtype in dict.fromkeys([configured, "float16" if may_round else configured]):
            stored = config.model_copy(update={"resident_dtype": dtype})
            fault = _fault(world, functools.partial(gpu_resident.check_memory, stored, world, volumes, reserve))
            if fault is None:
                reasons.append(f"the volumes fit into device memory as {dtype} in addition to the training state")
                return Choice("resident", dtype, "; ".join(reasons))
            reasons.append(fault)
        reasons += [no_float16] if no_float16 is not None else []
        fault = _fault(world, lambda: _check_dali(config))
        if fault is None:
            reasons.append("NVIDIA DALI is installed and the .npy files exist")
            return Choice("dali-lowmem", configured, "; ".join(reasons))
        reasons.append(fault)
    if all(volume.mapped for volume in volumes):
        return Choice("lowmem", configured, "; ".join([*reasons, "the files are contiguous and mapped"]))
    size = sum(volume.bytes for volume in volumes)
    free = min(world.gather_json(free_shared_memory(world)))
    room = f"as float32 they are {size / GIB:.2f} GiB, memory has room for {free / GIB:.2f} GiB"
    reasons.append(f"the files are chunked or must be converted; {room}")
    return Choice("inmem" if size <= free else "lowmem", configured, "; ".join(reasons))


def _check_dali(config: Config) -> None:
    dali.import_dali()
    for split in SPLITS:
        open_split_npy(config, split)


def _fault(world: World, check: Callable[[], None]) -> str | None:
    """The error that `check` raises on the first rank where it fails; None if it passes on all ranks."""
    try:
        check()
        fault = None
    except UserError as error:
        fault = str(error)
    return next((fault for fault in world.gather_json(fault) if fault is not None), None)
