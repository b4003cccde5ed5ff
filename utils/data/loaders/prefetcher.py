"""Fills batches on the device while it computes: on a separate stream, one batch ahead of the consumer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from utils.data.loader import Batch, memory_format

# The batch in use, the one being filled, and one that queued kernels may still read, so that the host need not wait.
DEVICE_SLOTS = 3

# Enqueues the kernels that write a batch, on the current stream.
Fill = Callable[[Batch], None]
Fills = Generator[tuple[int, Fill], None, None]


class CudaPrefetcher:
    """Fills slots on the device on a stream of its own, one batch ahead of the consumer; batches are float32."""

    def __init__(self, device: torch.device, shapes: Sequence[tuple[int, ...]], channels_last: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        form = memory_format(channels_last)
        self._slots = [
            Batch(*(torch.empty(shape, dtype=torch.float32, device=device, memory_format=form) for shape in shapes))
            for _ in range(DEVICE_SLOTS)
        ]

    def prefetch(self, fills: Fills) -> Generator[Batch, None, None]:
        """Yields a batch for each (size, fill): the first `size` samples of a slot, written by `fill`.

        Fills run in order. The host memory that a fill reads may be rewritten two requests later.
        """
        slots = _Slots(self._slots, self._stream, torch.cuda.current_stream(self._device))
        ahead: _Filled | None = None
        try:
            for number, (size, fill) in enumerate(fills):
                filled = slots.fill(number, size, fill)
                if ahead is not None:
                    yield from slots.lend(ahead)
                    ahead.event.synchronize()  # enqueued one step ago; the host memory that it read is rewritten next
                ahead = filled
            if ahead is not None:
                yield from slots.lend(ahead)
        finally:
            # Also if the epoch ends early, because the next one rewrites the memory that the fills read.
            self._stream.synchronize()
            fills.close()


class _Filled(NamedTuple):
    """A slot that is filled once `event` has passed."""

    number: int
    batch: Batch
    event: torch.cuda.Event


class _Slots:
    """The slots during one epoch: written on `stream`, read on `consumer`."""

    def __init__(self, slots: list[Batch], stream: torch.cuda.Stream, consumer: torch.cuda.Stream) -> None:
        self._slots, self._stream, self._consumer = slots, stream, consumer
        self._released: list[torch.cuda.Event | None] = [None] * len(slots)
        # Kernels of the previous epoch, which may have ended early, may still read the slots.
        self._stream.wait_stream(self._consumer)

    def fill(self, number: int, size: int, fill: Fill) -> _Filled:
        """Enqueues the fill of batch `number` behind the kernels that read its slot's previous batch."""
        index = number % len(self._slots)
        batch, filled = Batch(*(part[:size] for part in self._slots[index])), torch.cuda.Event()
        released = self._released[index]
        with torch.cuda.stream(self._stream):
            if released is not None:
                self._stream.wait_event(released)
            fill(batch)
            filled.record(self._stream)
        return _Filled(index, batch, filled)

    def lend(self, filled: _Filled) -> Generator[Batch, None, None]:
        """Yields the batch; what the consumer has enqueued when it requests the next one may read it."""
        self._consumer.wait_event(filled.event)
        yield filled.batch
        event = torch.cuda.Event()
        event.record(self._consumer)
        self._released[filled.number] = event


def copies(batches: Generator[Batch, None, None]) -> Fills:
    """Fills that copy pinned host batches."""
    with closing(batches):
        for batch in batches:
            yield len(batch.inputs), functools.partial(_copy, batch)


def _copy(batch: Batch, slot: Batch) -> None:
    for target, source in zip(slot, batch, strict=True):
        target.copy_(source, non_blocking=True)
