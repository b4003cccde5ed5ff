"""Fills batches on the device while it computes: on a stream of its own, one batch ahead of the consumer."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from typing import NamedTuple

import torch

from utils.pending_work import PendingWork, Work

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


class CudaPrefetcher:
    """Has slots on the device filled on a stream of its own, one batch ahead of the consumer.

    With `beside` set, a batch's fill is offered there with the batch before, and left to whoever takes it: work on the
    consumer's stream, which is in order with all that reads the slots.
    """

    def __init__(self, device: torch.device, shapes: list[tuple[int, ...]], channels_last: bool = False) -> None:
        self.beside: PendingWork | None = None
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
        ahead: deque[_Filled] = deque()
        previous: torch.cuda.Event | None = None
        try:
            for number, (size, fill) in enumerate(fills):
                index = number % DEVICE_SLOTS
                slot = Batch(*(part[:size] for part in self._slots[index]))
                offered = self.beside is not None and bool(ahead)
                if offered:
                    assert self.beside is not None
                    self.beside.offer(Work((index, size), functools.partial(fill, slot)))
                    yield from self._give(ahead, consumer, released)
                if offered and self._taken():
                    ahead.append(_Filled(index, slot, None))
                    continue
                if offered:
                    # What was taken before may still run on the consumer's stream, and fills come in order.
                    self._stream.wait_stream(consumer)
                filled = torch.cuda.Event()
                event = released[index]
                with torch.cuda.stream(self._stream):
                    if event is not None:
                        self._stream.wait_event(event)
                    fill(slot)
                    filled.record(self._stream)
                ahead.append(_Filled(index, slot, filled))
                if len(ahead) == 2:
                    yield from self._give(ahead, consumer, released)
                if previous is not None:
                    previous.synchronize()  # issued a step ago; the host memory it read is rewritten next
                previous = filled
            while ahead:
                yield from self._give(ahead, consumer, released)
        finally:
            if self.beside is not None:
                self.beside.take()
            # Left early, too: the next epoch rewrites the memory that is being read.
            self._stream.synchronize()
            fills.close()

    def _taken(self) -> bool:
        assert self.beside is not None
        return self.beside.take() is None

    def _give(
        self, ahead: deque[_Filled], consumer: torch.cuda.Stream, released: list[torch.cuda.Event | None]
    ) -> Generator[Batch, None, None]:
        index, batch, filled = ahead.popleft()
        if filled is not None:
            consumer.wait_event(filled)
        yield batch
        event = torch.cuda.Event()
        event.record(consumer)
        released[index] = event


class _Filled(NamedTuple):
    """A slot that is filled, or will be: `event` tells when; None where work on the consumer's own stream does it."""

    place: int
    batch: Batch
    event: torch.cuda.Event | None


def copies(batches: Generator[Batch, None, None]) -> Fills:
    """Fills that copy pinned host batches."""
    with closing(batches):
        for batch in batches:
            yield len(batch.inputs), functools.partial(_copy, batch)


def _copy(batch: Batch, slot: Batch) -> None:
    for target, source in zip(slot, batch, strict=True):
        target.copy_(source, non_blocking=True)
