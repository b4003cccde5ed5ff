"""The loader `auto`: the fastest of the other loaders that can be built. They all load the same batches.

On a GPU nothing is faster than the device's own memory. If that is too small, DALI augments crops on the GPU and reads
longer rows. Otherwise the CPU cores that augment crops are the limit: mapped files and memory are then equally fast
(benchmarks/results/loaders.json). Only a file that is chunked or must be converted is better read into memory first.

With mixed precision the volumes may be stored as float16: the network's inputs are rounded to fewer bits anyway, and
targets in ±1 change by 8e-5 on average, a sixtieth of the final loss of the tutorial's recipe. A deterministic run must
not depend on the device's memory.
"""

import logging

from utils.data.loaders import dali, gpu_resident, threaded
from utils.data.loaders.base import DataSplits
from utils.distributed.world import World
from utils.errors import UserError
from utils.volumes.opened import Volumes, all_volumes

log = logging.getLogger(__name__)


def build(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    reasons = ""
    for name, dtype in _candidates(volumes, world):
        builder = {"resident": gpu_resident.build, "dali-lowmem": dali.build, "inmem": threaded.build_inmem}[name]
        try:
            splits = builder(volumes.changed(resident_dtype=dtype), world, reserve)
        except UserError as error:  # on all ranks
            reasons += f"; not {name}: {error}"
        else:
            stored = f" as {dtype}" if name == "resident" else ""
            log.info("data_loader_config auto: %s%s%s", name, stored, reasons)
            return splits
    log.info("data_loader_config auto: lowmem%s", reasons)
    return threaded.build_lowmem(volumes, world)


def _candidates(volumes: Volumes, world: World) -> list[tuple[str, str]]:
    """The loaders to try before `lowmem`, and the type in which `resident` stores values, best first."""
    with world.raise_together():
        mapped = all(volume.mapped for volume in all_volumes(volumes.splits()))
    config, candidates = volumes.config, list[tuple[str, str]]()
    if world.device.type == "cuda":
        may_round = config.enable_amp and not config.deterministic
        dtypes = dict.fromkeys([config.resident_dtype, "float16" if may_round else config.resident_dtype])
        candidates += [("resident", dtype) for dtype in dtypes] + [("dali-lowmem", config.resident_dtype)]
    if not mapped:
        candidates.append(("inmem", config.resident_dtype))
    return candidates
