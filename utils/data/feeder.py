"""Brings host batches to the device while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import NamedTuple

import torch

# The batch in use, the one being copied, and one whose kernels may still run: the host need not wait for them.
DEVICE_SLOTS = 3


class Batch(NamedTuple):
    """inputs [N, C_in, D, D, D] and targets [N, C_out, D, D, D], on the run's device."""

    inputs: torch.Tensor
    targets: torch.Tensor


class DeviceFeeder:
    """Copies pinned batches to the device on a stream of its own, one batch ahead of the consumer."""

    def __init__(self, device: torch.device, shapes: list[tuple[int, ...]]) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._slots = [Batch(*(torch.empty(shape, device=device) for shape in shapes)) for _ in range(DEVICE_SLOTS)]

    def feed(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """The same batches on the device; the host memory of one may be rewritten two requests later."""
        consumer = torch.cuda.current_stream(self._device)
        # Kernels of the epoch before, which may have been left early, may still read the slots.
        self._stream.wait_stream(consumer)
        released: list[torch.cuda.Event | None] = [None] * DEVICE_SLOTS
        ahead: deque[tuple[int, Batch, torch.cuda.Event]] = deque()
        previous: torch.cuda.Event | None = None
        try:
            for number, host in enumerate(batches):
                index = number % DEVICE_SLOTS
                slot = Batch(*(part[: len(host.inputs)] for part in self._slots[index]))
                copied = torch.cuda.Event()
                event = released[index]
                with torch.cuda.stream(self._stream):
                    if event is not None:
                        self._stream.wait_event(event)
                    for target, source in zip(slot, host, strict=True):
                        target.copy_(source, non_blocking=True)
                    copied.record(self._stream)
                ahead.append((index, slot, copied))
                if len(ahead) == 2:
                    yield from self._give(ahead, consumer, released)
                if previous is not None:
                    previous.synchronize()  # issued a step ago; the threads rewrite its host memory next
                previous = copied
            while ahead:
                yield from self._give(ahead, consumer, released)
        finally:
            # Left early, too: the next epoch's threads rewrite the host memory that is being copied.
            self._stream.synchronize()
            batches.close()

    def _give(
        self,
        ahead: deque[tuple[int, Batch, torch.cuda.Event]],
        consumer: torch.cuda.Stream,
        released: list[torch.cuda.Event | None],
    ) -> Generator[Batch, None, None]:
        index, batch, copied = ahead.popleft()
        consumer.wait_event(copied)
        yield batch
        event = torch.cuda.Event()
        event.record(consumer)
        released[index] = event
