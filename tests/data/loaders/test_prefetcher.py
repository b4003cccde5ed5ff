"""The prefetcher on a simulated device: in whatever order the streams run, every kernel reads its own batch.

A CUDA stream runs its work in order, at any time; only events order two streams. The simulation queues the work and
runs it as late as possible, as soon as possible, or at random.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from utils.data.loaders import prefetcher as prefetching
from utils.data.loaders.base import Batch
from utils.data.loaders.prefetcher import CudaPrefetcher, copies

SHAPE = (2, 3)
HOST_BUFFERS = 3  # as in ThreadedCropLoader


class Event:
    done, stream = True, None  # an event that was never recorded blocks nothing

    def record(self, stream: Any) -> None:
        self.done, self.stream = False, stream
        stream.add(lambda: setattr(self, "done", True))

    def synchronize(self) -> None:
        while not self.done:
            self.stream.advance()


class Stream:
    """Queued work: functions, and events to wait for."""

    def __init__(self, run_some: Callable[[], None]) -> None:
        self.work: deque[Any] = deque()
        self.run_some = run_some

    def add(self, item: Any) -> None:
        self.work.append(item)
        self.run_some()

    def wait_event(self, event: Event) -> None:
        if not event.done:
            self.add(event)

    def wait_stream(self, stream: "Stream") -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def ready(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], Event) or self.work[0].done)

    def advance(self) -> None:
        """Runs one item, and before it only the work it waits for."""
        item = self.work.popleft()
        item.synchronize() if isinstance(item, Event) else item()

    def synchronize(self) -> None:
        while self.work:
            self.advance()


class Device:
    """Two streams. After each queued item, each stream runs its ready items, with its own probability per item."""

    def __init__(self, monkeypatch: Any, consumer: float, copier: float, seed: int = 0) -> None:
        self.consumer, self.copier = Stream(self.run_some), Stream(self.run_some)
        self.current = self.consumer
        self.probabilities = ((self.consumer, consumer), (self.copier, copier))
        self.random = random.Random(seed)
        cuda = {"Stream": lambda _: self.copier, "current_stream": lambda _: self.current, "stream": self.stream}
        empty = lambda shape, **_: Tensor(self, np.full(shape, np.nan))  # noqa: E731
        torch = SimpleNamespace(cuda=SimpleNamespace(Event=Event, **cuda), empty=empty, float32=None)
        monkeypatch.setattr(prefetching, "torch", torch)

    def run_some(self) -> None:
        for stream, probability in self.probabilities:
            while stream.ready() and self.random.random() < probability:
                stream.advance()

    @contextmanager
    def stream(self, chosen: Stream) -> Iterator[None]:
        self.current = chosen
        try:
            yield
        finally:
            self.current = self.consumer


class Tensor:
    """Memory; a copy reads its source when it runs, not when it is enqueued."""

    def __init__(self, device: Device, values: np.ndarray) -> None:
        self.device, self.values = device, values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, selection: slice) -> "Tensor":
        return Tensor(self.device, self.values[selection])

    def copy_(self, source: "Tensor", non_blocking: bool = False) -> None:
        assert non_blocking
        self.device.current.add(lambda: np.copyto(self.values, source.values))


class HostLoader:
    """Batches of equal numbers, as from ThreadedCropLoader: a request for batch n rewrites the memory of n - 2."""

    def __init__(self, device: Device) -> None:
        self.buffers = [Batch(*(Tensor(device, np.zeros(SHAPE)) for _ in range(2))) for _ in range(HOST_BUFFERS)]
        self.closed = 0

    def batches(self, numbers: list[int]) -> Generator[Batch, None, None]:
        def assemble(index: int) -> Batch:
            for part in self.buffers[index % HOST_BUFFERS]:
                part.values[...] = numbers[index]
            return self.buffers[index % HOST_BUFFERS]

        try:
            following = assemble(0)
            for index in range(len(numbers)):
                batch, size = following, 1 if index == len(numbers) - 1 else SHAPE[0]
                if index + 1 < len(numbers):
                    following = assemble(index + 1)
                yield Batch(*(part[:size] for part in batch))
        finally:
            self.closed += 1


# The streams' probabilities and a seed: run as late as possible, as soon as possible, and in between.
SCHEDULES = [(*chances, 0) for chances in itertools.product((0, 1), repeat=2)]
SCHEDULES += [(*chances, seed) for chances in ((0, 0.6), (0.6, 0), (0.6, 0.6), (0.6, 1), (1, 0.6)) for seed in range(8)]


def consume(device: Device, prefetcher: CudaPrefetcher, loader: HostLoader, end_after: int) -> None:
    """Reads three epochs, the first up to `end_after`; queues a kernel with each batch, which checks it."""
    lazy = device.probabilities[0] == (device.consumer, 0)
    read: list[tuple[int, tuple[int, ...], bool]] = []

    def kernel(number: int, batch: Batch) -> None:
        read.extend((number, part.values.shape, bool((part.values == number).all())) for part in batch)

    expected = []
    for epoch, end in enumerate((end_after, 7, 7)):
        numbers = [100 * epoch + index for index in range(7)]
        batches = prefetcher.prefetch(copies(loader.batches(numbers)))
        for index, number in enumerate(numbers[:end]):
            batch = next(batches)
            assert not (lazy and epoch == 0 and index < 4 and read), "the host has waited for a kernel"
            device.consumer.add(lambda number=number, batch=batch: kernel(number, batch))
            expected += [(number, (1 if index == 6 else SHAPE[0], SHAPE[1]), True)] * 2
        if end == 7:
            assert next(batches, None) is None
        batches.close()
        assert loader.closed == epoch + 1
    device.consumer.synchronize()
    assert read == expected


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_kernel_reads_its_own_batch(monkeypatch: Any, schedule: tuple[float, float, int]) -> None:
    for end_after in (1, 2, 3, 4, 7):
        device = Device(monkeypatch, *schedule)
        consume(device, CudaPrefetcher("cuda", [SHAPE, SHAPE]), HostLoader(device), end_after)
