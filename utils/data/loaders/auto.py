"""The loader `auto`: chooses the fastest of the other loaders that fits. They all load the same batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from utils.config import Config
from utils.data.files.shared_memory import free_shared_memory
from utils.data.loader import Loaders, TrainingBytes
from utils.data.loaders import dali, gpu_resident, threaded
from utils.data.plan import SPLITS
from utils.data.splits import of_both_splits, open_split, open_split_npy
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import GIB

CANDIDATES = {
    "resident": gpu_resident.build,
    "dali-lowmem": dali.build,
    "inmem": threaded.build_inmem,
    "lowmem": threaded.build_lowmem,
}


def build(config: Config, world: World, training_bytes: TrainingBytes) -> Loaders:
    name, reason = choose(config, world, training_bytes)
    loaders = CANDIDATES[name](config, world, training_bytes)
    return replace(loaders, notes=(f"data_loader_config auto: {name}, {reason}", *loaders.notes))


def choose(config: Config, world: World, training_bytes: TrainingBytes) -> tuple[str, str]:
    """The loader that `auto` stands for, and the reason; the same on every rank.

    On a GPU nothing is faster than the device's own memory. If that is too small, DALI augments crops on the GPU and
    reads longer rows. Otherwise the CPU cores that augment crops are the limit: mapped files and memory are then
    equally fast (benchmarks/results/loaders.json), and only a file that is chunked or must be converted is better read
    into memory first.
    """
    with world.raise_together():
        both = of_both_splits({split: open_split(config, split) for split in SPLITS})
    reasons = []
    if world.device.type == "cuda":
        fault = _fault(world, lambda: gpu_resident.check_memory(config, world, both, training_bytes))
        if fault is None:
            return "resident", "the volumes fit into device memory alongside the training"
        reasons.append(fault)
        fault = _fault(world, lambda: _check_dali(config))
        if fault is None:
            return "dali-lowmem", "; ".join([*reasons, "NVIDIA DALI is installed and the .npy files exist"])
        reasons.append(fault)
    if all(volume.mapped for volume in both):
        return "lowmem", "; ".join([*reasons, "the files are contiguous and mapped"])
    size = sum(volume.bytes for volume in both)
    free = min(world.gather_json(free_shared_memory(world)))
    room = f"as float32 they are {size / GIB:.2f} GiB, memory has room for {free / GIB:.2f} GiB"
    return ("inmem" if size <= free else "lowmem"), "; ".join(
        [*reasons, f"the files are chunked or must be converted; {room}"]
    )


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
