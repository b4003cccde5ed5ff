"""The pulse of a rank: its main thread feeds the heartbeat, moves the progress bar, and stops after a signal."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

Phase = Literal["start", "data", "step", "validation", "prediction", "evaluation", "pictures", "save", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)  # in their order within a step


class Report(NamedTuple):
    """The state of a rank. Its main thread sets it; the heartbeat adds beat, idle and collectives, and writes it."""

    host: str = "unknown"
    state: Literal["running", "lost a peer", "left"] = "running"
    step: int = 0
    phase: Phase = "start"
    calls: int = 0  # of Pulse.advance and Progress.advance
    idle: float = 0.0  # seconds since the last of them
    beat: int = 0
    collectives: int = 0  # that the rank has entered

    @property
    def position(self) -> tuple[int, int, int]:
        return self.step, PHASES.index(self.phase), self.collectives

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})"


class Pulse:
    """Where the main thread is. The heartbeat ends a run whose ranks all stop calling it."""

    def __init__(self) -> None:
        self.report = Report(socket.gethostname())
        self._show: Callable[[int, str], object] = lambda count, text: None
        self._stop: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def using(
        self, show: Callable[[int, str], object] | None = None, stop: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """For the block, `advance` calls `show`, which may be that of a progress bar, and `meet` calls `stop`."""
        usual = self._show, self._stop
        self._show, self._stop = show or self._show, stop or self._stop
        try:
            yield
        finally:
            self._show, self._stop = usual

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """The main thread enters a phase, by default of the same step."""
        last = self.report
        self.report = last._replace(step=last.step if step is None else step, phase=phase, calls=last.calls + 1)

    def advance(self, count: int = 0, text: str = "") -> None:
        """Reports progress of this rank; `count` and `text` are those of the progress bar."""
        self.report = self.report._replace(calls=self.report.calls + 1)
        self._show(count, text)

    def meet(self) -> None:
        """Reports progress at a point that all ranks reach; raises Stopped on all of them after a stop signal."""
        self.advance()
        self._stop()
