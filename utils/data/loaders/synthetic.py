"""The loader `synthetic`: one random batch, created once on the device and yielded again and again.

It measures the speed of a step whose input costs nothing.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from utils.config import Config
from utils.data.loader import Batch, Loader, Loaders, memory_format
from utils.data.loaders.build import build_splits, crop_options
from utils.data.loaders.crops import CropOptions
from utils.data.volumes import channel_counts
from utils.distributed.world import World


def build(config: Config, world: World) -> Loaders:
    channels, boxes = channel_counts(config), [(config.data_size,) * 3]
    return build_splits(lambda split: SyntheticLoader(channels, crop_options(config, world, split, boxes)), world)


class SyntheticLoader(Loader):
    """Uniform values in [-1, 1); every rank has a different batch."""

    def __init__(self, channels: tuple[int, int], options: CropOptions) -> None:
        self._sizes = [len(range(options.plan.samples)[rows]) for rows in options.batches()]
        generator = torch.Generator().manual_seed((options.plan.seed * 1_000_003 + options.rank) % 2**63)
        values = [2 * torch.rand(shape, generator=generator) - 1 for shape in options.shapes(channels)]
        # Copied into a tensor of that format, because `to` does not change the strides of a single channel.
        form, device = memory_format(options.channels_last), options.device
        self._batch = Batch(*(torch.empty(v.shape, device=device, memory_format=form).copy_(v) for v in values))

    def __len__(self) -> int:
        return len(self._sizes)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        """Yields the same batch for every step; the last one may be shorter."""
        for size in self._sizes[first_batch:]:
            yield Batch(*(part[:size] for part in self._batch))
