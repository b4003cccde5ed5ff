"""Fills batches on the device while it computes: on a stream of its own, one batch ahead of the consumer."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from typing import NamedTuple

import torch

# The batch in use, the one being filled, and one whose kernels may still run: the host need not wait for them.
DEVICE_SLOTS = 3


class Batch(NamedTuple):
    """inputs [N, C_in, D, D, D] and targets [N, C_out, D, D, D], on the run's device."""

    inputs: torch.Tensor
    targets: torch.Tensor


# Enqueues on the current stream what writes a batch.
Fill = Callable[[Batch], None]
Fills = Generator[tuple[int, Fill], None, None]


def memory_format(channels_last: bool) -> torch.memory_format:
    return torch.channels_last_3d if channels_last else torch.contiguous_format


class StreamFeeder:
    """Has slots on the device filled on a stream of its own, one batch ahead of the consumer."""

    def __init__(self, device: torch.device, shapes: list[tuple[int, ...]], channels_last: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        form = memory_format(channels_last)
        self._slots = [
            Batch(*(torch.empty(shape, device=device, memory_format=form) for shape in shapes))
            for _ in range(DEVICE_SLOTS)
        ]

    def feed(self, fills: Fills) -> Generator[Batch, None, None]:
        """One batch for each (size, fill): a slot's first `size` samples, after `fill` has written them.

        All fills come on one stream, in order. What a fill reads in host memory may be rewritten two requests later.
        """
        consumer = torch.cuda.current_stream(self._device)
        # Kernels of the epoch before, which may have been left early, may still read the slots.
        self._stream.wait_stream(consumer)
        released: list[torch.cuda.Event | None] = [None] * DEVICE_SLOTS
        ahead: deque[tuple[int, Batch, torch.cuda.Event]] = deque()
        previous: torch.cuda.Event | None = None
        try:
            for number, (size, fill) in enumerate(fills):
                index = number % DEVICE_SLOTS
                slot = Batch(*(part[:size] for part in self._slots[index]))
                filled = torch.cuda.Event()
                event = released[index]
                with torch.cuda.stream(self._stream):
                    if event is not None:
                        self._stream.wait_event(event)
                    fill(slot)
                    filled.record(self._stream)
                ahead.append((index, slot, filled))
                if len(ahead) == 2:
                    yield from self._give(ahead, consumer, released)
                if previous is not None:
                    previous.synchronize()  # issued a step ago; the host memory it read is rewritten next
                previous = filled
            while ahead:
                yield from self._give(ahead, consumer, released)
        finally:
            # Left early, too: the next epoch rewrites the memory that is being read.
            self._stream.synchronize()
            fills.close()

    def _give(
        self,
        ahead: deque[tuple[int, Batch, torch.cuda.Event]],
        consumer: torch.cuda.Stream,
        released: list[torch.cuda.Event | None],
    ) -> Generator[Batch, None, None]:
        index, batch, filled = ahead.popleft()
        consumer.wait_event(filled)
        yield batch
        event = torch.cuda.Event()
        event.record(consumer)
        released[index] = event


def copies(batches: Generator[Batch, None, None]) -> Fills:
    """Fills that copy pinned host batches."""
    with closing(batches):
        for batch in batches:
            yield len(batch.inputs), functools.partial(_copy, batch)


def _copy(batch: Batch, slot: Batch) -> None:
    for target, source in zip(slot, batch, strict=True):
        target.copy_(source, non_blocking=True)
