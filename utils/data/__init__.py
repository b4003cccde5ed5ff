"""Loaders. All read the same sample plan; a new one is a module in utils/data/loaders and a line in LOADERS."""

from __future__ import annotations

from utils.config import Config, did_you_mean
from utils.data.loader import Batch, Loader, Loaders, LoaderSpec
from utils.data.loaders import auto, classification, dali, gpu_resident, synthetic, threaded
from utils.data.volumes import check_data, with_file_values
from utils.distributed.world import World
from utils.errors import UserError

__all__ = ["LOADERS", "Batch", "Loader", "LoaderSpec", "Loaders", "get_loader", "open_loaders", "resolve_config"]

LOADERS = {
    "lowmem": LoaderSpec(threaded.build_lowmem),
    "inmem": LoaderSpec(threaded.build_inmem),
    "dali-lowmem": LoaderSpec(dali.build, reads="npy", requires=dali.import_dali),
    "resident": LoaderSpec(gpu_resident.build, on_device=True),
    "synthetic": LoaderSpec(synthetic.build, reads=None),
    "classification": LoaderSpec(classification.build, reads="classification"),
    "auto": LoaderSpec(auto.build, on_device=True),
}


def get_loader(name: str) -> LoaderSpec:
    """The loader `name`; UserError if the name is unknown."""
    if name not in LOADERS:
        known = ", ".join(LOADERS)
        hint = did_you_mean(name, LOADERS) or "; choose one with --data_loader_config"
        raise UserError(f"unknown data_loader_config {name}; known: {known}{hint}")
    return LOADERS[name]


def resolve_config(config: Config, world: World) -> Config:
    """The config with the batch sizes of this world and the transform of its files. Every rank calls it."""
    with world.raise_together():
        return with_file_values(config.for_world(world.size), get_loader(config.data_loader_config).reads)


def open_loaders(config: Config, world: World, reserve: int = 0) -> Loaders:
    """Checks the data and builds the loaders of both splits for this rank. All ranks call it, and all fail if one does.

    `reserve` is the number of bytes that training needs on the device, for loaders that keep volumes there.
    """
    spec = get_loader(config.data_loader_config)
    check_data(config, spec.reads, world)
    return spec.build(config, world, reserve) if spec.on_device else spec.build(config, world)
