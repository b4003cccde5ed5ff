"""Stopping on a signal: batch systems warn before they kill, and a warned training saves and ends in order.

A signal reaches ranks at different moments. At each step's end they exchange what they wish for, and all stop, or save,
after the same step.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import time
from types import TracebackType

import torch
import torch.distributed as dist

from utils.distributed import World

# Slurm and torchrun both signal a rank that runs under both: so soon after the first, it is the same signal.
SAME_SIGNAL_SECONDS = 1.0


class Wish(enum.IntEnum):
    """What a rank wants to happen after this step; the greatest of all ranks' happens."""

    GO_ON = 0
    SAVE = 1
    STOP = 2


class StopSignals:
    """Within it, SIGTERM and the signal named are remembered, as `received`; the same one again ends the process.

    A thread waits for them: the main one may be stuck in a library, where Python runs no handler of its own.
    """

    def __init__(self, name: str = "SIGUSR1") -> None:
        self._numbers = {signal.SIGTERM, signal.Signals[name]}
        self._previous: dict[signal.Signals, object] = {}
        self._first: dict[int, float] = {}
        self.received: str | None = None

    def __enter__(self) -> StopSignals:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The C-level handler writes the signal's number there at once, whatever thread it came to.
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            # The same one may come once more while the process ends: it must not change the exit code.
            now = signal.SIG_IGN if self.received else handler
            signal.signal(number, now)  # type: ignore[arg-type] # what signal.signal itself returned
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _listen(self) -> None:
        while received := os.read(self._reader, 64):
            for number in received:
                if number in self._numbers:
                    self._take(number)

    def _take(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if now - self._first.setdefault(number, now) > SAME_SIGNAL_SECONDS:
            sys.stderr.write(f"{name} again: ends at once, without saving\n")
            sys.stderr.flush()
            os._exit(128 + number)
        self.received = self.received or name


class NoSignals(StopSignals):
    """Catches nothing: signals do what they do by themselves."""

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Agreement:
    """The ranks' wishes, exchanged without making them wait: an answer is about the wishes of the step before."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, wish: Wish) -> Wish:
        """Every rank calls it at the same moments; the same answer on all of them."""
        if self._world.size == 1:
            return wish
        answer = self._answer()
        if answer is Wish.STOP:
            return answer
        wishes = torch.tensor(int(wish))
        work = dist.all_reduce(wishes, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._asked = (wishes, work)
        return answer

    def _answer(self) -> Wish:
        if self._asked is None:
            return Wish.GO_ON
        (wishes, work), self._asked = self._asked, None
        work.wait()
        return Wish(int(wishes))

    def close(self) -> None:
        """Waits for what is still under way; not after an error, when the others may never answer."""
        self._answer()
