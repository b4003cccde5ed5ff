"""How a loader's work rides along in a step: what fills the next batch runs beside the training on this one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple


class Work(NamedTuple):
    """`enqueue` puts the same kernels on the same memory in the current stream whenever `key` is the same."""

    key: Hashable
    enqueue: Callable[[], None]


class PendingWork:
    """A place for one piece of work between who has it done and who may do it.

    A loader offers, with each batch, the work that fills the next one. A step that records CUDA graphs takes it into
    the graph, beside its own kernels. What has not been taken when the next batch is asked for the loader does itself:
    before the first graph, or when a batch was only looked at.
    """

    def __init__(self) -> None:
        self._work: Work | None = None

    def offer(self, work: Work) -> None:
        self._work = work

    def take(self) -> Work | None:
        """What is offered, if anything is, which then is the taker's to do."""
        work, self._work = self._work, None
        return work
