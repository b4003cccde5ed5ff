"""The loader `synthetic`: one random batch, made once on the device and given again and again.

It shows what the rest of the step can do when input costs nothing.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from utils.data.loaders.prefetcher import Batch, memory_format
from utils.data.plan import rank_batches


class SyntheticLoader:
    """Uniform values in [-1, 1); every rank has a batch of its own."""

    def __init__(
        self,
        *,
        samples: int,
        crop: int,
        channels: tuple[int, int],
        batch_size: int,
        drop_last: bool,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
        channels_last: bool = False,
    ) -> None:
        self._batches = rank_batches(samples, batch_size, rank, world_size, drop_last)
        self._spans = [len(range(samples)[rows]) for rows in self._batches]
        generator = torch.Generator().manual_seed((seed * 1_000_003 + rank) % 2**63)
        values = [2 * torch.rand((batch_size, count, *(crop,) * 3), generator=generator) - 1 for count in channels]
        # Copied into a tensor of that format: `to` would leave the strides of a single channel as they are.
        form = memory_format(channels_last)
        self._batch = Batch(*(torch.empty(v.shape, device=device, memory_format=form).copy_(v) for v in values))

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int, first_batch: int = 0) -> Generator[Batch, None, None]:
        """The same batch for every step; the last one as short as the epoch's end makes it."""
        for span in self._spans[first_batch:]:
            yield Batch(*(part[:span] for part in self._batch))

    def close(self) -> None:
        """Nothing to give back."""
