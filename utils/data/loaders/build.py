"""Shared by the loaders' build functions: plans and options of a config, and a loader for each split."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from utils.config import Config
from utils.data.datasets import get_dataset
from utils.data.files.hdf5 import Volume
from utils.data.loader import Loader, Loaders
from utils.data.loaders.crops import CropOptions
from utils.data.plan import SPLITS, Box, SamplePlan
from utils.data.volumes import Files, channel_counts, split_settings
from utils.distributed.world import World
from utils.files import GIB

log = logging.getLogger(__name__)


def meta_batch(config: Config, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets with the shapes and types of a batch of `samples`, on torch's meta device."""
    if config.dataset.name is not None:
        dataset = get_dataset(config.dataset.name)
        dtype = torch.float32 if dataset.vocabulary is None else torch.int64
        inputs = torch.empty((samples, *dataset.shape), dtype=dtype, device="meta")
        return inputs, torch.empty(samples, dtype=torch.int64, device="meta")
    shapes = [(samples, channels, *(config.data_size,) * 3) for channels in channel_counts(config)]
    return torch.empty(shapes[0], device="meta"), torch.empty(shapes[1], device="meta")


def sample_plan(config: Config, split: str, boxes: Iterable[Box]) -> SamplePlan:
    """The plan of one split, 'train' or 'valid', for volumes of these shapes."""
    return SamplePlan(
        samples=split_settings(config, split).samples,
        boxes=tuple(boxes),
        crop=config.data_size,
        seed=config.seed,
        split=split,
        augment=config.symmetries != "none",
    )


def crop_options(config: Config, world: World, split: str, boxes: Iterable[Box]) -> CropOptions:
    """The options of this rank's crop loader for one split with volumes of these shapes."""
    assert config.local_batch_size is not None
    return CropOptions(
        plan=sample_plan(config, split, boxes),
        batch_size=config.local_batch_size,
        rank=world.rank,
        world_size=world.size,
        threads=config.num_data_workers,
        device=world.device,
        vectors=(config.vector_channels.inputs, config.vector_channels.targets),
        symmetry_mode=config.symmetries,
        channels_last=config.channels_last,
    )


def build_splits(build: Callable[[str], Loader], world: World) -> Loaders:
    """Builds the loaders of both splits. If one fails on any rank, all ranks fail and close what they have built."""
    with contextlib.ExitStack() as built:
        with world.raise_together():
            loaders = []
            for split in SPLITS:
                loaders.append(build(split))
                built.callback(loaders[-1].close)
        built.pop_all()
    return Loaders(loaders[0], loaders[1])


def build_crop_loaders(
    config: Config,
    world: World,
    volumes: Mapping[str, Sequence[Files]],
    loader: Callable[[Sequence[Files], CropOptions], Loader],
) -> Loaders:
    """Builds a loader for the volumes of each split, see `build_splits`."""

    def build(split: str) -> Loader:
        boxes = [volume.shape for volume in volumes[split]]
        return loader(volumes[split], crop_options(config, world, split, boxes))

    return build_splits(build, world)


def load_volumes(
    volumes: Mapping[str, list[Volume]], load: Callable[[list[Volume]], list[Volume]], place: str
) -> dict[str, list[Volume]]:
    """The volumes of each split as `load` returns them; logs size and speed."""
    loaded, lines = {}, []
    for split, opened in volumes.items():
        started = time.perf_counter()
        loaded[split] = load(opened)
        seconds = time.perf_counter() - started
        names = ", ".join(os.path.basename(volume.path) for volume in opened)
        size = sum(volume.bytes for volume in opened)
        speed = f"{size / 1e9 / seconds:.1f} GB/s"
        lines.append(f"{names}: {size / GIB:.2f} GiB read into {place} in {seconds:.2f} s ({speed})")
    log.info("; ".join(lines))
    return loaded
