"""The loader `classification`: keeps a split of a data set in device memory and gathers each batch from there.

Only the epoch's order is copied from the host to the device.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from utils.config import Config
from utils.data.datasets import ClassificationData, Dataset, get_dataset, open_dataset
from utils.data.loader import Batch, Loader, Loaders, TrainingBytes
from utils.data.loaders.crops import CPU
from utils.data.plan import ShufflePlan, rank_batches
from utils.data.sources import build_splits, split_of
from utils.distributed.world import World
from utils.errors import UserError


def build(config: Config, world: World, training_bytes: TrainingBytes) -> Loaders:
    assert config.local_batch_size is not None
    batch_size = config.local_batch_size
    with world.raise_together():
        dataset, splits = open_splits(config)
        plans = {split: shuffle_plan(config, split, len(data.labels)) for split, data in splits.items()}
    return build_splits(
        lambda split: ClassificationLoader(
            splits[split],
            plans[split],
            batch_size=batch_size,
            rank=world.rank,
            world_size=world.size,
            device=world.device,
            scale=dataset.scale,
        ),
        world,
        f"{config.dataset.name}: {', '.join(f'{len(data.labels)} {split}' for split, data in splits.items())} samples",
    )


def open_splits(config: Config) -> tuple[Dataset, dict[str, ClassificationData]]:
    """The config's data set, and the data of its splits."""
    name, directory = config.dataset.name, config.dataset.directory
    assert name is not None
    return get_dataset(name), open_dataset(name, directory, config.dataset.verify)


def shuffle_plan(config: Config, split: str, available: int) -> ShufflePlan:
    """The order of one split's samples; UserError if the config requests more than the `available` ones."""
    samples = split_of(config, split).samples
    if samples > available:
        key = "Nsamples" if split == "train" else "Nsamples_val"
        raise UserError(f"{key} {samples} is more than the {available} {split} samples of {config.dataset.name}")
    return ShufflePlan(samples, available, config.seed, split)


class ClassificationLoader(Loader):
    """Carries out one rank's part of a plan: images as float32 times `scale`, or int64 word indices; int64 labels.

    All work is enqueued on the stream that is current when a batch is requested, behind what the consumer has enqueued
    there; the host waits for none of it.
    """

    def __init__(
        self,
        data: ClassificationData,
        plan: ShufflePlan,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device = CPU,
        scale: float = 1.0,
    ) -> None:
        assert plan.available == len(data.inputs) == len(data.labels)
        self._plan = plan
        self._scale = scale
        self._batches = rank_batches(plan.samples, batch_size, rank, world_size, drop_last=plan.split == "train")
        self._mine = slice(rank, None, world_size)
        self._inputs = torch.from_numpy(data.inputs).to(device)
        self._labels = torch.from_numpy(data.labels).to(device)
        self._order = torch.empty(len(range(plan.samples)[self._mine]), dtype=torch.int64, device=device)
        shape = (batch_size, *data.inputs.shape[1:])
        is_image = self._inputs.dtype == torch.uint8
        self._raw = torch.empty(shape, dtype=torch.uint8, device=device) if is_image else None
        self._values = torch.empty(shape, dtype=torch.float32 if is_image else torch.int64, device=device)
        self._targets = torch.empty(batch_size, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        order = torch.from_numpy(self._plan.epoch(epoch)[self._mine].copy())
        if self._order.is_cuda:
            order = order.pin_memory()  # PyTorch frees it only after it has been read
        self._order.copy_(order, non_blocking=True)
        start = first_batch * len(self._targets)
        for batch in self._batches[first_batch:]:
            size = len(range(self._plan.samples)[batch])
            yield self._gather(self._order[start : start + size])
            start += size

    def _gather(self, rows: torch.Tensor) -> Batch:
        batch = Batch(self._values[: len(rows)], self._targets[: len(rows)])
        if self._raw is None:
            torch.index_select(self._inputs, 0, rows, out=batch.inputs)
        else:
            raw = torch.index_select(self._inputs, 0, rows, out=self._raw[: len(rows)])
            torch.mul(raw, self._scale, out=batch.inputs)
        torch.index_select(self._labels, 0, rows, out=batch.targets)
        return batch
