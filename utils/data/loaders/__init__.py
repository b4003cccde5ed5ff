"""Loaders. All read the same sample plan; a new one is a module here and a line in LOADERS."""

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple

from utils.config import Config
from utils.data.loaders import classification, dali, gpu_resident, synthetic, threaded
from utils.data.loaders.base import Batch, DataSplits, Loader
from utils.distributed.world import World
from utils.errors import UserError
from utils.lookup import lookup
from utils.volumes.opened import Volumes, all_volumes

__all__ = ["LOADERS", "Batch", "DataSplits", "Loader", "LoaderSpec", "get_loader", "open_loaders", "open_volumes"]

log = logging.getLogger(__name__)


class LoaderSpec(NamedTuple):
    """An entry of LOADERS.

    build: build(volumes, world, reserve) returns the loaders of both splits for one rank. Every rank calls it, and all
      fail if one does. The batch sizes of `volumes.config` are resolved for the world (`Config.for_world`). `reserve`
      is the number of bytes that training needs on a GPU, for loaders that keep volumes there.
    reads: the kind of files that the loader reads, None if it reads none.
    """

    build: Callable[..., DataSplits]
    reads: Literal["hdf5", "npy", "classification"] | None = "hdf5"


def build_auto(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    """The fastest of the other loaders that can be built; they all load the same batches."""
    reasons = ""
    for name, dtype in _candidates(volumes, world):
        try:
            splits = LOADERS[name].build(volumes.changed(resident_dtype=dtype), world, reserve)
        except UserError as error:  # on all ranks
            reasons += f"; not {name}: {error}"
        else:
            stored = f" as {dtype}" if name == "resident" else ""
            log.info("data_loader_config auto: %s%s%s", name, stored, reasons)
            return splits
    log.info("data_loader_config auto: lowmem%s", reasons)
    return LOADERS["lowmem"].build(volumes, world, reserve)


def _candidates(volumes: Volumes, world: World) -> list[tuple[str, str]]:
    """The loaders to try before `lowmem`, and the type in which `resident` stores values, best first.

    On a GPU nothing is faster than its own memory; with mixed precision the network's inputs are rounded to fewer bits
    than float16 has anyway. Without a GPU mapped files are as fast as memory (benchmarks/results/loaders.json).
    """
    with world.raise_together():
        mapped = all(volume.mapped for volume in all_volumes(volumes.splits()))
    config, candidates = volumes.config, list[tuple[str, str]]()
    if world.device.type == "cuda":
        # A deterministic run must not depend on the free memory of the device.
        may_round = config.enable_amp and not config.deterministic
        dtypes = dict.fromkeys([config.resident_dtype, "float16" if may_round else config.resident_dtype])
        candidates += [("resident", dtype) for dtype in dtypes] + [("dali-lowmem", config.resident_dtype)]
    if not mapped:
        candidates.append(("inmem", config.resident_dtype))
    return candidates


LOADERS: dict[str, LoaderSpec] = {
    "lowmem": LoaderSpec(threaded.build_lowmem),
    "inmem": LoaderSpec(threaded.build_inmem),
    "dali-lowmem": LoaderSpec(dali.build, reads="npy"),
    "resident": LoaderSpec(gpu_resident.build),
    "synthetic": LoaderSpec(synthetic.build, reads=None),
    "classification": LoaderSpec(classification.build, reads="classification"),
    "auto": LoaderSpec(build_auto),
}


def get_loader(name: str) -> LoaderSpec:
    return lookup(LOADERS, "data_loader_config", name)


def open_volumes(config: Config) -> Volumes:
    """The volumes that the config's loader reads, and the config with what they state; see `Volumes.open`."""
    return Volumes.open(config, get_loader(config.data_loader_config).reads)


def open_loaders(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    """Checks the data and builds the loaders of both splits for this rank; see `LoaderSpec.build`."""
    volumes.check(world)
    loaders = get_loader(volumes.config.data_loader_config).build(volumes, world, reserve)
    volumes.release()
    return loaders
