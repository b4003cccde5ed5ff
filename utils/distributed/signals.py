"""Stopping on a signal: batch systems warn before they kill, and a warned training saves and ends in order.

A signal reaches ranks at different moments. At each step's end they exchange what they wish for, and all stop, or save,
after the same step.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import select
import signal
import sys
import threading
import time
from types import TracebackType

import torch
import torch.distributed as dist

from utils.distributed.world import World
from utils.errors import EXIT_INTERRUPTED, launched_rank

log = logging.getLogger(__name__)

# Slurm and torchrun both signal a rank that runs under both: so soon after the first, it is the same signal.
SAME_SIGNAL_SECONDS = 1.0
INTERRUPT_SECONDS = 15.0  # for what Ctrl-C has interrupted to end by itself, a save that is under way with it
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Request(enum.IntEnum):
    """What a rank wants to happen after this step; the greatest of all ranks' happens."""

    GO_ON = 0
    SAVE = 1
    STOP = 2


class StopSignals:
    """Within it, SIGTERM and the signal named are remembered, as `received`; the same one again ends the process.

    A thread waits for them: the main one may be stuck in a library, where Python runs no handler of its own. SIGINT
    remains Python's KeyboardInterrupt, which may strike where a lock has just been taken that the way out asks for: the
    thread sees to it that the process ends all the same.
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
        for number in self._numbers:
            signal.siginterrupt(number, False)  # libraries' system calls go on after it
        if "TORCHELASTIC_RUN_ID" in os.environ:
            # The kernel sends SIGTERM when torchrun is gone, killed or by a signal that it does not pass on.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            # The same one may come once more while the process ends: it must not change the exit code.
            now = signal.SIG_IGN if self.received else handler
            signal.signal(number, now)  # type: ignore[arg-type] # what signal.signal itself returned
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._writer, bytes(1))  # closing it would not do: a forked child may hold it, too
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _listen(self) -> None:
        poll, deadline = select.poll(), None
        poll.register(self._reader, select.POLLIN)
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000
            if not poll.poll(left):
                if launched_rank() == 0:
                    os.write(2, b"interrupted\n")  # sys.stderr has a lock, too
                os._exit(EXIT_INTERRUPTED)
            for number in os.read(self._reader, 64):
                if number == 0:
                    return
                if number in self._numbers:
                    self._take(number)
                elif number == signal.SIGINT and deadline is None:
                    deadline = time.monotonic() + INTERRUPT_SECONDS

    def _take(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if now - self._first.setdefault(number, now) > SAME_SIGNAL_SECONDS:
            sys.stderr.write(f"{name} again: ends at once, without saving\n")
            sys.stderr.flush()
            os._exit(128 + number)
        if self.received is None:
            self.received = name
            log.info("%s: it will save what there is and stop; the same signal once more ends it at once", name)


class NullSignals(StopSignals):
    """Catches nothing: signals do what they do by themselves."""

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class StopCoordinator:
    """The ranks' wishes, exchanged without making them wait: an answer is about the wishes of some steps before.

    Of the step before on few ranks; gloo hands a number around all ranks twice, one after another, and on many ranks
    that takes the time of several steps.
    """

    RANKS_A_STEP = 32

    def __init__(self, world: World) -> None:
        self._world = world
        self._every, self._calls, self._wish = max(1, world.size // self.RANKS_A_STEP), 0, Request.GO_ON
        self._asked: tuple[torch.Tensor, dist.Work] | None = None

    def ask(self, wish: Request) -> Request:
        """Every rank calls it at the same moments; the same answer on all of them."""
        if self._world.size == 1:
            return wish
        self._wish, self._calls = max(self._wish, wish), self._calls + 1
        if self._calls % self._every:
            return Request.GO_ON
        wish, self._wish = self._wish, Request.GO_ON
        answer = self._answer()
        if answer is Request.STOP:
            return answer
        wishes = torch.tensor(int(wish))
        work = dist.all_reduce(wishes, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._asked = (wishes, work)
        return answer

    def _answer(self) -> Request:
        if self._asked is None:
            return Request.GO_ON
        (wishes, work), self._asked = self._asked, None
        work.wait()
        return Request(int(wishes))

    def close(self) -> None:
        """Waits for what is still under way; not after an error, when the others may never answer."""
        self._answer()
