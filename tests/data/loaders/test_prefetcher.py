"""The prefetcher on a simulated device: in whatever order the streams run, every kernel reads its own batch.

A CUDA stream runs its work in order, at any time; only events order two streams. The simulation queues the work and
runs it as late as possible, as soon as possible, or at random.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from utils.data.loaders import prefetcher as prefetching
from utils.data.loaders.base import Batch
from utils.data.loaders.prefetcher import CudaPrefetcher, Fills, copies

SHAPE = (2, 3)
HOST_BUFFERS = 3  # as in ThreadedCropLoader


class Event:
    def __init__(self) -> None:
        self.done = True  # an event that was never recorded blocks nothing
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.done, self.stream = False, stream
        stream.add(lambda: setattr(self, "done", True))

    def synchronize(self) -> None:
        while not self.done:
            assert self.stream is not None
            self.stream.advance()


class Stream:
    """Queued work: functions, and events to wait for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.work: deque[Callable[[], None] | Event] = deque()

    def add(self, item: Callable[[], None] | Event) -> None:
        self.work.append(item)
        self.device.run_some()

    def wait_event(self, event: Event) -> None:
        if not event.done:
            self.add(event)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def ready(self) -> bool:
        return bool(self.work) and (not isinstance(self.work[0], Event) or self.work[0].done)

    def advance(self) -> None:
        """Runs one item, and before it only the work it waits for."""
        item = self.work.popleft()
        if isinstance(item, Event):
            item.synchronize()
        else:
            item()

    def synchronize(self) -> None:
        while self.work:
            self.advance()


class Device:
    """Two streams. After each queued item, each stream runs its ready items, with its own probability per item."""

    def __init__(self, consumer: float, copier: float, seed: int = 0) -> None:
        self.consumer, self.copier = Stream(self), Stream(self)
        self.current = self.consumer
        self._probabilities = ((self.consumer, consumer), (self.copier, copier))
        self._random = random.Random(seed)

    def run_some(self) -> None:
        for stream, probability in self._probabilities:
            while stream.ready() and self._random.random() < probability:
                stream.advance()

    def torch(self) -> Any:
        """The part of torch that prefetcher.py uses."""

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            self.current = chosen
            try:
                yield
            finally:
                self.current = self.consumer

        def empty(shape: tuple[int, ...], **_: object) -> Tensor:
            return Tensor(self, np.full(shape, np.nan))

        cuda = SimpleNamespace(
            Stream=lambda _: self.copier, Event=Event, current_stream=lambda _: self.current, stream=stream
        )
        return SimpleNamespace(cuda=cuda, empty=empty, float32=None)


class Tensor:
    """Memory; a copy reads its source when it runs, not when it is enqueued."""

    def __init__(self, device: Device, values: np.ndarray) -> None:
        self.device, self.values = device, values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, selection: slice) -> Tensor:
        return Tensor(self.device, self.values[selection])

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        assert non_blocking
        self.device.current.add(lambda: np.copyto(self.values, source.values))


class HostLoader:
    """Batches of equal numbers, as from ThreadedCropLoader: a request for batch n rewrites the memory of n - 2."""

    def __init__(self, device: Device) -> None:
        self._buffers = [Batch(*(Tensor(device, np.zeros(SHAPE)) for _ in range(2))) for _ in range(HOST_BUFFERS)]
        self.closed = 0

    def epoch(self, numbers: list[int], last_size: int) -> Fills:
        return copies(self._batches(numbers, last_size))

    def _batches(self, numbers: list[int], last_size: int) -> Generator[Batch, None, None]:
        def assemble(index: int) -> None:
            for part in self._buffers[index % HOST_BUFFERS]:
                part.values[...] = numbers[index]

        try:
            assemble(0)
            for index in range(len(numbers)):
                if index + 1 < len(numbers):
                    assemble(index + 1)
                size = last_size if index == len(numbers) - 1 else SHAPE[0]
                yield Batch(*(part[:size] for part in self._buffers[index % HOST_BUFFERS]))
        finally:
            self.closed += 1


# The streams' probabilities and a seed: run as late as possible, as soon as possible, and in between.
SCHEDULES = [(*each, 0) for each in itertools.product((0, 1), repeat=2)]
SCHEDULES += [(*each, seed) for each in ((0, 0.6), (0.6, 0), (0.6, 0.6), (0.6, 1), (1, 0.6)) for seed in range(8)]


def consume(device: Device, prefetcher: CudaPrefetcher, loader: HostLoader, end_after: int) -> None:
    """Reads three epochs, the first only up to `end_after`; a kernel queued with each batch checks it."""
    read: list[tuple[int, int, bool]] = []

    def kernel(number: int, size: int, batch: Batch) -> None:
        for part in batch:
            good = part.values.shape == (size, SHAPE[1]) and bool((part.values == number).all())
            read.append((number, size, good))

    expected = []
    for epoch, end in enumerate((end_after, 7, 7)):
        numbers = [100 * epoch + index for index in range(7)]
        batches = prefetcher.prefetch(loader.epoch(numbers, last_size=1))
        for index, number in enumerate(numbers[:end]):
            batch = next(batches)
            size = 1 if index == 6 else SHAPE[0]
            device.consumer.add(lambda number=number, size=size, batch=batch: kernel(number, size, batch))
            expected += [(number, size, True)] * 2
        if end == 7:
            assert next(batches, None) is None
        batches.close()
        assert loader.closed == epoch + 1
    device.consumer.synchronize()
    assert read == expected


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_kernel_reads_its_own_batch(monkeypatch: pytest.MonkeyPatch, schedule: tuple[float, float, int]) -> None:
    """Over three epochs, of which the first may end early; the host waits for nothing in between."""
    for end_after in (1, 2, 3, 4, 7):
        device = Device(*schedule)
        monkeypatch.setattr(prefetching, "torch", device.torch())
        prefetcher = CudaPrefetcher("cuda", [SHAPE, SHAPE])
        consume(device, prefetcher, HostLoader(device), end_after)


def test_the_host_waits_for_no_kernel_during_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host gets three batches before any of their kernels has run."""
    device = Device(consumer=0, copier=1)
    monkeypatch.setattr(prefetching, "torch", device.torch())
    batches = CudaPrefetcher("cuda", [SHAPE, SHAPE]).prefetch(HostLoader(device).epoch(list(range(7)), last_size=2))
    run: list[int] = []
    for number in range(3):
        next(batches)
        device.consumer.add(lambda number=number: run.append(number))
    assert run == []
    batches.close()


def test_a_fill_that_fails_ends_only_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a kernel that cannot be compiled."""
    device = Device(consumer=0, copier=0)
    monkeypatch.setattr(prefetching, "torch", device.torch())
    prefetcher, loader = CudaPrefetcher("cuda", [SHAPE, SHAPE]), HostLoader(device)

    def fail(_: Batch) -> None:
        raise ZeroDivisionError

    def failing() -> Fills:
        with closing(loader.epoch(list(range(7)), last_size=2)) as fills:
            for number, (size, fill) in enumerate(fills):
                yield size, fail if number == 2 else fill

    batches = prefetcher.prefetch(failing())
    next(batches)
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert device.current is device.consumer
    assert loader.closed == 1
    consume(device, prefetcher, HostLoader(device), 7)
