"""The loader of labelled data sets: a split lies in the device's own memory, and a batch is gathered from it there.

Nothing crosses the bus but the epoch's order.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from utils.data.datasets import Labelled
from utils.data.loaders.prefetcher import Batch
from utils.data.plan import ShufflePlan, rank_batches


class ClassificationLoader:
    """Carries out this rank's part of a plan: images as float32 times `scale`, or int64 word indices; int64 labels.

    A batch is valid until the next one is asked for: its memory is used again. All work is queued on the stream that
    is current when a batch is asked for, behind what the consumer has queued there; the host waits for none of it.
    """

    def __init__(
        self,
        data: Labelled,
        plan: ShufflePlan,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        scale: float = 1.0,
    ) -> None:
        device = device or torch.device("cpu")
        assert plan.available == len(data.inputs) == len(data.labels)
        self.plan = plan
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
        """Batches an epoch on this rank."""
        return len(self._batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch, from `first_batch` on."""
        order = torch.from_numpy(self.plan.epoch(epoch)[self._mine].copy())
        if self._order.is_cuda:
            order = order.pin_memory()  # given back, by PyTorch, no earlier than it has been read
        self._order.copy_(order, non_blocking=True)
        begin = first_batch * len(self._targets)
        for batch in self._batches[first_batch:]:
            size = len(range(self.plan.samples)[batch])
            yield self._gathered(self._order[begin : begin + size])
            begin += size

    def close(self) -> None:
        """Nothing to give back."""

    def _gathered(self, rows: torch.Tensor) -> Batch:
        batch = Batch(self._values[: len(rows)], self._targets[: len(rows)])
        if self._raw is None:
            torch.index_select(self._inputs, 0, rows, out=batch.inputs)
        else:
            raw = torch.index_select(self._inputs, 0, rows, out=self._raw[: len(rows)])
            torch.mul(raw, self._scale, out=batch.inputs)
        torch.index_select(self._labels, 0, rows, out=batch.targets)
        return batch
