"""Stop signals: a batch system warns a run before it kills it, and the run saves and exits."""

import contextlib
import ctypes
import enum
import logging
import os
import select
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from utils.distributed import rendezvous
from utils.distributed.launch import in_script
from utils.distributed.world import World
from utils.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE, record_exit_code
from utils.launchers import launched_rank

log = logging.getLogger(__name__)

# Slurm and torchrun both signal a rank that runs under both. A second one within this time is the same signal.
SAME_SIGNAL_SECONDS = 1.0
INTERRUPT_SECONDS = 15.0  # for a program to exit after Ctrl-C, including a save in progress
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Request(enum.IntEnum):
    """Request of a rank after a step. All ranks follow the largest one."""

    CONTINUE = 0
    SAVE = 1
    STOP = 2


class Signals(contextlib.nullcontext[Any]):
    """Catches no signals: they keep their default effect."""

    received: str | None = None  # the name of the first signal


class StopSignals(Signals):
    """Catches SIGTERM and the named signal as a request to stop; a second one of the same kind ends the process.

    A thread waits for the signals, because the main thread may be blocked in a library, where Python runs no handlers.
    SIGINT still raises KeyboardInterrupt. If that happens right after a lock was acquired that the exit needs, too, the
    thread ends the process. A program that calls `main` in a thread of its own keeps its signals.
    """

    _thread: threading.Thread | None = None

    def __init__(self, name: str = "SIGUSR1") -> None:
        self._numbers = {signal.SIGTERM, signal.Signals[name]}
        self._previous: dict[signal.Signals, object] = {}
        self._first: dict[int, float] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            log.warning("Not in the main thread: signals end this process without saving; checkpoints are kept")
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # The C-level handler writes the signal's number to the pipe at once, in whichever thread it runs.
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
        for number in self._numbers:
            signal.siginterrupt(number, False)  # libraries' system calls are restarted after it
        if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            # The kernel sends SIGTERM when torchrun ends, possibly without passing a signal on.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is None:
            return
        is_complete = in_script.is_set() and error[0] is None
        for number, handler in self._previous.items():
            # A signal while the process exits must not change the exit code.
            restored = signal.SIG_IGN if self.received or is_complete else handler
            signal.signal(number, restored)  # type: ignore[arg-type] # a return value of signal.signal
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._writer, bytes(1))  # closing it is not enough: a forked child may hold it as well
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _listen(self) -> None:
        poll, deadline = select.poll(), float("inf")
        poll.register(self._reader, select.POLLIN)
        while True:
            if self.received and rendezvous.waiting.is_set():
                # The job should be started again, as after a save: nothing has begun, so nothing is lost.
                _exit(f"{self.received}: stopping before all ranks have connected", EXIT_RESUMABLE)
            left = deadline - time.monotonic()
            if left <= 0:
                _exit("interrupted", EXIT_INTERRUPTED)
            left = min(left, 0.2) if self.received else left  # the rendezvous may begin after the signal
            ready = poll.poll(None if left == float("inf") else left * 1000)
            for number in os.read(self._reader, 64) if ready else b"":
                if number == 0:
                    return
                if number in self._numbers:
                    self._receive(number)
                elif number == signal.SIGINT:
                    deadline = min(deadline, time.monotonic() + INTERRUPT_SECONDS)

    def _receive(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if now - self._first.setdefault(number, now) > SAME_SIGNAL_SECONDS:
            sys.stderr.write(f"{name} again: exiting at once, without saving\n")
            sys.stderr.flush()
            os._exit(128 + number)
        if self.received is None:
            self.received = name
            log.info("%s: saving and stopping; the same signal again exits at once", name)


def _exit(line: str, code: int) -> None:
    """Ends the process from the thread that waits for signals; rank 0 prints the line."""
    if launched_rank() == 0:
        os.write(2, f"{line}\n".encode())  # sys.stderr has a lock
    # Slurm also sends SIGTERM if another rank has failed, whose exit code counts.
    if code != EXIT_RESUMABLE:
        record_exit_code(code)
    os._exit(code)


class StopCoordinator:
    """Exchanges requests without waiting: an answer is to those of a step earlier, on many ranks of several."""

    RANKS_PER_STEP = 32  # gloo's ring passes a number twice around all ranks

    def __init__(self, world: World) -> None:
        self._world = world
        self._interval = max(1, world.size // self.RANKS_PER_STEP)  # in calls
        self._calls, self._request = 0, Request.CONTINUE
        self._pending: tuple[torch.Tensor, Any] | None = None  # requests, and the exchange in progress

    def exchange(self, request: Request) -> Request:
        """Every rank calls it after the same steps and gets the same answer."""
        if self._world.size == 1:
            return request
        self._request, self._calls = max(self._request, request), self._calls + 1
        if self._calls % self._interval:
            return Request.CONTINUE
        answer = self.finish()
        if answer is Request.STOP:
            return answer
        requests = torch.tensor(int(self._request))
        self._request = Request.CONTINUE
        self._pending = requests, dist.all_reduce(requests, dist.ReduceOp.MAX, async_op=True)
        return answer

    def finish(self) -> Request:
        """The answer of the exchange in progress, if any. Do not call it after an error: others may never answer."""
        if self._pending is None:
            return Request.CONTINUE
        (requests, work), self._pending = self._pending, None
        work.wait()
        return Request(int(requests))
