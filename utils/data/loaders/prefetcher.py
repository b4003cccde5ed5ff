"""Fills batches on the device while it computes: on a separate stream, one batch ahead of the consumer."""

import functools
import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

import torch

from utils.data.loaders.base import Batch, memory_format

# The batch in use, the one being filled, and one that queued kernels may still read, so that the host need not wait.
DEVICE_SLOTS = 3

# Enqueues the kernels that write a batch, on the current stream.
Fill = Callable[[Batch], None]
Fills = Generator[tuple[int, Fill], None, None]


class _Slot:
    """Memory for a batch on the device, and the events after its latest fill and the kernels that read that batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.filled, self.released = torch.cuda.Event(), torch.cuda.Event()  # passed until they are recorded


class CudaPrefetcher:
    """Fills slots on the device on a stream of its own, one batch ahead of the consumer; batches are float32."""

    def __init__(self, device: torch.device, shapes: Sequence[tuple[int, ...]], channels_last: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        form = memory_format(channels_last)
        self._slots = [
            _Slot(Batch(*(torch.empty(s, dtype=torch.float32, device=device, memory_format=form) for s in shapes)))
            for _ in range(DEVICE_SLOTS)
        ]

    def prefetch(self, fills: Fills) -> Generator[Batch, None, None]:
        """Yields a batch for each (size, fill): the first `size` samples of a slot, written by `fill`.

        Fills run in order. The host memory that a fill reads may be rewritten two requests later.
        """
        consumer = torch.cuda.current_stream(self._device)
        # Kernels of the previous epoch, which may have ended early, may still read the slots.
        self._stream.wait_stream(consumer)
        ahead: tuple[_Slot, int] | None = None
        try:
            for slot, (size, fill) in zip(itertools.cycle(self._slots), fills, strict=False):
                slot.filled = torch.cuda.Event()
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(slot.released)  # by the kernels that read the slot's previous batch
                    fill(slot.batch.first(size))
                    slot.filled.record(self._stream)
                if ahead is not None:
                    yield from _lend(*ahead, consumer)
                    # Enqueued one step ago; the host memory that it read is rewritten next.
                    ahead[0].filled.synchronize()
                ahead = slot, size
            if ahead is not None:
                yield from _lend(*ahead, consumer)
        finally:
            # Also if the epoch ends early, because the next one rewrites the memory that the fills read.
            self._stream.synchronize()
            fills.close()


def _lend(slot: _Slot, size: int, consumer: torch.cuda.Stream) -> Generator[Batch, None, None]:
    """Yields a slot's batch; what the consumer has enqueued when it requests the next one may read it."""
    consumer.wait_event(slot.filled)
    yield slot.batch.first(size)
    slot.released = torch.cuda.Event()
    slot.released.record(consumer)


class HostPrefetcher:
    """Takes the place of CudaPrefetcher without a GPU: fills each batch when it is requested, in new memory."""

    def __init__(self, device: torch.device, shapes: Sequence[tuple[int, ...]], channels_last: bool = False) -> None:
        self._shapes, self._form = shapes, memory_format(channels_last)

    def prefetch(self, fills: Fills) -> Generator[Batch, None, None]:
        with closing(fills):
            for size, fill in fills:
                batch = Batch(*(torch.empty((size, *shape[1:]), memory_format=self._form) for shape in self._shapes))
                fill(batch)
                yield batch


def copies(batches: Generator[Batch, None, None]) -> Fills:
    """Fills that copy pinned host batches."""
    with closing(batches):
        for batch in batches:
            yield len(batch.inputs), functools.partial(_copy, batch)


def _copy(batch: Batch, slot: Batch) -> None:
    for target, source in zip(slot, batch, strict=True):
        target.copy_(source, non_blocking=True)
