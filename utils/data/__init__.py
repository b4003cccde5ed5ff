"""Loaders: each carries out the same sample plan. A new one is a module here and a line in LOADERS."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

from utils.config import Config
from utils.data.feeder import Batch
from utils.data.native import NativeLoader
from utils.data.plan import SamplePlan
from utils.data.shared import share_volume
from utils.data.synthetic import SyntheticLoader
from utils.data.volumes import Volume, open_volume, stage
from utils.distributed import World
from utils.errors import UserError


class Loader(Protocol):
    """This rank's batches; a batch is valid until the next one is asked for."""

    def __len__(self) -> int: ...

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]: ...

    def close(self) -> None: ...


class Loaders(NamedTuple):
    train: Loader
    valid: Loader


def build_loaders(config: Config, world: World) -> Loaders:
    """The config's loaders for this rank; every rank calls it, and fails with the others.

    `config` has its batch sizes resolved for the world (`Config.for_world`).
    """
    build = find_loader(config.data_loader_config)
    return Loaders(build(config, world, "train"), build(config, world, "valid"))


def find_loader(name: str) -> Callable[[Config, World, str], Loader]:
    """What builds the loader `name`; UserError for one that there is not."""
    if name not in LOADERS:
        known = ", ".join(LOADERS)
        raise UserError(f"unknown data_loader_config {name}; known: {known}; choose one with --data_loader_config")
    return LOADERS[name]


def sample_plan(config: Config, split: str) -> SamplePlan:
    """The plan of one split, 'train' or 'valid'."""
    train = split == "train"
    return SamplePlan(
        samples=config.Nsamples if train else config.Nsamples_val,
        box=config.box_size[0 if train else 1],
        crop=config.data_size,
        seed=config.seed,
        split=split,
        augment=config.symmetries != "none",
    )


def open_split(config: Config, split: str) -> Volume:
    """The volume of one split, checked against the config."""
    train = split == "train"
    return open_volume(
        config.train_path if train else config.val_path,
        (config.N_in_channels, config.N_out_channels),
        config.box_size[0 if train else 1],
    )


def _lowmem(config: Config, world: World, split: str) -> Loader:
    """Crops from the file, mapped where it can be."""
    return _native(_staged(config, world, split), config, world, split)


def _inmem(config: Config, world: World, split: str) -> Loader:
    """Crops from one copy in the node's memory."""
    return _native(share_volume(_staged(config, world, split), world), config, world, split)


def _staged(config: Config, world: World, split: str) -> Volume:
    with world.agreed():
        volume = open_split(config, split)
    if config.use_cache is None:
        return volume
    with world.agreed():
        if world.is_node_leader:
            stage(volume.path, config.use_cache)
    with world.agreed():
        # The leader has staged it: this finds the copy, and copies nothing.
        copy = stage(volume.path, config.use_cache)
        return open_volume(copy, (config.N_in_channels, config.N_out_channels), volume.box)


def _native(volume: Volume, config: Config, world: World, split: str) -> Loader:
    assert config.local_batch_size is not None
    return NativeLoader(
        volume,
        sample_plan(config, split),
        batch_size=config.local_batch_size,
        rank=world.rank,
        world_size=world.size,
        threads=config.num_data_workers,
        device=world.device,
        vectors=(config.vector_channels.inputs, config.vector_channels.targets),
        symmetry_mode=config.symmetries,
    )


def _synthetic(config: Config, world: World, split: str) -> Loader:
    assert config.local_batch_size is not None
    return SyntheticLoader(
        samples=config.Nsamples if split == "train" else config.Nsamples_val,
        crop=config.data_size,
        channels=(config.N_in_channels, config.N_out_channels),
        batch_size=config.local_batch_size,
        drop_last=split == "train",
        rank=world.rank,
        world_size=world.size,
        seed=config.seed,
        device=world.device,
    )


LOADERS: dict[str, Callable[[Config, World, str], Loader]] = {
    "lowmem": _lowmem,
    "inmem": _inmem,
    "synthetic": _synthetic,
}
