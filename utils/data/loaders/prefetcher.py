"""Fills batches on the device while it computes: on a separate stream, one batch ahead of the consumer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch

from utils.data.loader import Batch, memory_format
from utils.pending_work import PendingWork, Work

# The batch in use, the one being filled, and one that queued kernels may still read, so that the host need not wait.
DEVICE_SLOTS = 3

# Enqueues the kernels that write a batch, on the current stream.
Fill = Callable[[Batch], None]
Fills = Generator[tuple[int, Fill], None, None]


class CudaPrefetcher:
    """Fills slots on the device on a stream of its own, one batch ahead of the consumer.

    If `pending_work` is set, the fill of each batch is offered there along with the previous batch. Whoever takes it
    runs it on the consumer's stream, which orders it with all kernels that read the slots. If nobody has taken it when
    the batch is requested, it runs on the prefetcher's stream.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: Sequence[tuple[int, ...]],
        channels_last: bool = False,
        dtypes: Sequence[torch.dtype] = (torch.float32, torch.float32),
    ) -> None:
        self.pending_work: PendingWork | None = None
        self._device = device
        self._stream = torch.cuda.Stream(device)
        options: dict[str, Any] = {"device": device, "memory_format": memory_format(channels_last)}
        self._slots = [
            # Zeros, because a fill need not write the padding of its samples.
            Batch(
                *(
                    torch.empty(shape, dtype=dtype, **options).zero_()
                    for shape, dtype in zip(shapes, dtypes, strict=True)
                )
            )
            for _ in range(DEVICE_SLOTS)
        ]

    def prefetch(self, fills: Fills) -> Generator[Batch, None, None]:
        """Yields a batch for each (size, fill): the first `size` samples of a slot, written by `fill`.

        Fills run in order. The host memory that a fill reads may be rewritten two requests later.
        """
        pending_work = self.pending_work
        slots = _Slots(self._slots, self._stream, torch.cuda.current_stream(self._device))
        ahead: _Filled | None = None
        previous: torch.cuda.Event | None = None
        try:
            for number, (size, fill) in enumerate(fills):
                slot = slots.slot(number, size)
                if ahead is None or pending_work is None:
                    filled = slots.fill(slot, fill)
                    if ahead is not None:
                        yield from slots.lend(ahead)
                else:
                    pending_work.offer(Work((slot.number, size), functools.partial(fill, slot.batch)))
                    yield from slots.lend(ahead)
                    if pending_work.take() is None:
                        ahead = slot
                        continue
                    # Earlier fills that were taken may still run on the consumer's stream, and fills must run in order.
                    slots.wait_for_consumer()
                    filled = slots.fill(slot, fill)
                if previous is not None:
                    previous.synchronize()  # enqueued one step ago; the host memory that it read is rewritten next
                ahead, previous = filled, filled.event
            if ahead is not None:
                yield from slots.lend(ahead)
        finally:
            if pending_work is not None:
                pending_work.take()
            # Also if the epoch ends early, because the next one rewrites the memory that the fills read.
            self._stream.synchronize()
            fills.close()


class _Filled(NamedTuple):
    """A slot that is filled once `event` has passed; None: it is filled by work on the consumer's own stream."""

    number: int
    batch: Batch
    event: torch.cuda.Event | None


class _Slots:
    """The slots during one epoch: written on `stream`, read on `consumer`."""

    def __init__(self, slots: list[Batch], stream: torch.cuda.Stream, consumer: torch.cuda.Stream) -> None:
        self._slots, self._stream, self._consumer = slots, stream, consumer
        self._released: list[torch.cuda.Event | None] = [None] * len(slots)
        # Kernels of the previous epoch, which may have ended early, may still read the slots.
        self.wait_for_consumer()

    def wait_for_consumer(self) -> None:
        """Later fills wait for all work that the consumer's stream has now."""
        self._stream.wait_stream(self._consumer)

    def slot(self, number: int, size: int) -> _Filled:
        """The memory for batch `number`."""
        index = number % len(self._slots)
        return _Filled(index, Batch(*(part[:size] for part in self._slots[index])), None)

    def fill(self, slot: _Filled, fill: Fill) -> _Filled:
        """Enqueues a fill behind the kernels that read this slot's previous batch."""
        filled, released = torch.cuda.Event(), self._released[slot.number]
        with torch.cuda.stream(self._stream):
            if released is not None:
                self._stream.wait_event(released)
            fill(slot.batch)
            filled.record(self._stream)
        return slot._replace(event=filled)

    def lend(self, filled: _Filled) -> Generator[Batch, None, None]:
        """Yields the batch; what the consumer has enqueued when it requests the next one may read it."""
        if filled.event is not None:
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
