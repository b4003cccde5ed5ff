"""The loader `classification`: keeps a split of a data set in device memory and gathers each batch from there."""

import logging
from collections.abc import Generator

import torch

from utils.data.datasets import ClassificationData, open_dataset
from utils.data.loaders.base import Batch, DataSplits, Loader, build_splits
from utils.data.plan import ShufflePlan, rank_batches
from utils.distributed.world import World
from utils.errors import UserError
from utils.volumes.opened import SAMPLES_KEYS, Volumes

log = logging.getLogger(__name__)


def build(volumes: Volumes, world: World, reserve: int = 0) -> DataSplits:
    config, size = volumes.config, volumes.config.local_batch_size
    assert size is not None
    with world.raise_together():
        dataset, splits = open_dataset(config.dataset)

    def make(split: str) -> Loader:
        samples, available = getattr(config, key := SAMPLES_KEYS[split]), len(splits[split].labels)
        if samples > available:
            raise UserError(f"{key} {samples} is more than the {available} {split} samples of {config.dataset.name}")
        plan = ShufflePlan(samples, available, config.seed, split)
        return ClassificationLoader(splits[split], plan, batch_size=size, scale=dataset.scale, world=world)

    loaders = build_splits(make, world)
    counts = ", ".join(f"{len(data.labels)} {split}" for split, data in splits.items())
    log.info("%s: %s samples", config.dataset.name, counts)
    return loaders


class ClassificationLoader(Loader):
    """Gathers one rank's part of a plan: images as float32 times `scale`, or int64 word indices; int64 labels.

    Work is enqueued on the stream that is current when a batch is requested; the host, which copies only the epoch's
    order to the device, never waits.
    """

    def __init__(
        self, data: ClassificationData, plan: ShufflePlan, *, batch_size: int, scale: float, world: World
    ) -> None:
        device = world.device
        self._plan, self._scale = plan, scale
        self.batches = rank_batches(plan.samples, batch_size, world.rank, world.size, drop_last=plan.split == "train")
        self._mine = slice(world.rank, None, world.size)
        self._inputs = torch.from_numpy(data.inputs).to(device)
        self._labels = torch.from_numpy(data.labels).to(device)
        self._order = torch.empty(len(range(plan.samples)[self._mine]), dtype=torch.int64, device=device)
        self._raw = self._inputs.new_empty((batch_size, *data.inputs.shape[1:]))
        self._is_image = self._raw.dtype == torch.uint8
        self._values = torch.empty_like(self._raw, dtype=torch.float32) if self._is_image else self._raw
        self._targets = torch.empty(batch_size, dtype=torch.int64, device=device)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        order = torch.from_numpy(self._plan.epoch(epoch)[self._mine].copy())
        if self._order.is_cuda:
            order = order.pin_memory()  # PyTorch keeps this memory until the copy has finished
        self._order.copy_(order, non_blocking=True)
        start = first_batch * len(self._targets)
        for batch in self.batches[first_batch:]:
            size = len(range(self._plan.samples)[batch])
            gathered, rows = Batch(self._values[:size], self._targets[:size]), self._order[start : start + size]
            raw = torch.index_select(self._inputs, 0, rows, out=self._raw[:size])
            if self._is_image:
                torch.mul(raw, self._scale, out=gathered.inputs)
            torch.index_select(self._labels, 0, rows, out=gathered.targets)
            yield gathered
            start += size
