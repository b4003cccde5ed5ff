"""Hands work from the loader to the step: kernels that fill the next batch run alongside the training on this one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple


class Work(NamedTuple):
    """A unit of work.

    key: equal keys mean equal work.
    enqueue: enqueues the same kernels on the same memory, on the current stream, for equal keys.
    """

    key: Hashable
    enqueue: Callable[[], None]


class PendingWork:
    """Holds at most one unit of work, handed from the loader to the step.

    With each batch the loader offers the work that fills the next one. A step that records CUDA graphs takes it into
    its graph, alongside its own kernels. If nobody has taken it when the next batch is requested, the loader does the
    work itself: before the first graph is recorded, or if a batch was not trained on.
    """

    def __init__(self) -> None:
        self._work: Work | None = None

    def offer(self, work: Work) -> None:
        self._work = work

    def take(self) -> Work | None:
        """The offered work, which the caller must then do; None if there is none."""
        work, self._work = self._work, None
        return work
