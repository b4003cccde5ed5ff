"""The loader `synthetic`: one random batch, yielded again and again: the speed of a step whose input costs nothing."""

from collections.abc import Generator

import torch

from utils.config import Config
from utils.data.loaders.base import Batch, CropLoader, DataSplits, build_splits, memory_format, sample_plan
from utils.data.plan import SamplePlan
from utils.distributed.world import World
from utils.volumes.opened import Volumes


def build(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    config, boxes = volumes.config, [(volumes.config.data_size,) * 3]
    return build_splits(lambda split: SyntheticLoader(sample_plan(config, split, boxes), config, world), world)


class SyntheticLoader(CropLoader):
    """Uniform values in [-1, 1); every rank has a different batch."""

    def __init__(self, plan: SamplePlan, config: Config, world: World) -> None:
        super().__init__(plan, config, world)
        generator = torch.Generator().manual_seed((plan.seed * 1_000_003 + world.rank) % 2**63)
        values = [2 * torch.rand(shape, generator=generator) - 1 for shape in self.shapes]
        # Copied into a tensor of that format, because `to` does not change the strides of a single channel.
        form, device = memory_format(config.channels_last), world.device
        self._batch = Batch(*(torch.empty(v.shape, device=device, memory_format=form).copy_(v) for v in values))

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        for rows in self.batches[first_batch:]:
            yield self._batch.first(len(range(self.plan.samples)[rows]))
