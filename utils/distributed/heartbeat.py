"""Heartbeat: if a rank hangs, fails or is gone, stop the run on all ranks and report which one.

docs/reliability.md has the limits. A thread of each rank, which runs while the main thread waits in a collective,
writes a report to the process group's store. Rank 0 reads those of all ranks, and the others that of rank 0. The first
rank that finds a cause writes the diagnosis to the store, and all ranks end. A rank that has lost its connection to
another one writes that to a key of its own; from then on rank 0 reads all reports at once instead of a slice.
"""

import contextlib
import faulthandler
import itertools
import json
import math
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.config.sections import TimeoutsConfig
from utils.distributed.diagnosis import RANKS_PER_SECOND, TICK, Diagnoser, Diagnosis, failure, is_peer_gone
from utils.distributed.launch import Launch
from utils.distributed.pulse import Pulse, Report
from utils.errors import EXIT_HANG, LocalError, Stopped, UserError, record_exit_code
from utils.progress import Progress

LOST_LIMIT = 10.0  # for rank 0 to find out which rank is gone after one has lost a connection
FAILING_SECONDS = 30.0  # for the other ranks to end after an error
GAP = 5.0  # a thread that did not run for longer was suspended, probably together with all other ranks
PRINT_SECONDS = 1.0  # for another rank to print its error, before a launcher sees that a rank has ended
LEAVING_SECONDS = 10.0  # for which rank 0, whose process may hold the store, waits for the normal end of the others
# Keys: the diagnosis; set by a rank that has lost another one; number of ranks that have read the first; a report.
END, LOST, READ, REPORT = "heartbeat: end", "heartbeat: lost", "heartbeat: read", "heartbeat: rank {}"
CONNECTION_SECONDS = 30.0
STORE_ERRORS = (dist.DistError, OSError, RuntimeError)


class ReportStore:
    """The connection of one rank's heartbeat to the store; most methods raise STORE_ERRORS if the store is gone."""

    def __init__(self, ranks: Sequence[int], launch: Launch, store: dist.Store | None = None) -> None:
        """Reads the reports of `ranks`. A single rank needs no store."""
        self._ranks, count = ranks, int(RANKS_PER_SECOND * TICK)
        self._slices = itertools.cycle([ranks[first : first + count] for first in range(0, len(ranks), count)])
        self._store: Any = dist.HashStore()
        self.closed = select.poll()
        if store is not None:
            # A connection of its own: operations on one connection wait for each other.
            self._store = store.clone()  # type: ignore[attr-defined] # missing in PyTorch's annotations
            self._store.set_timeout(timedelta(hours=1))  # `Heartbeat._watch_store` has a lower limit
            # An idle connection, which closes when the store's process ends. Without it PyTorch prints a stack trace.
            self._link = socket.create_connection((launch.master_addr, launch.master_port), CONNECTION_SECONDS)
            self.closed.register(self._link, select.POLLIN)
        if launch.rank == 0:
            reports = [json.dumps(Report())] * len(ranks)
            self._store.multi_set([END, LOST, *map(REPORT.format, ranks)], ["", "", *reports])

    def write(self, rank: int, report: Report) -> None:
        self._store.set(REPORT.format(rank), json.dumps(report))
        if report.state == "lost a peer":
            self._store.set(LOST, "yes")

    def read(self, reads_all: bool) -> tuple[Diagnosis | None, dict[int, Report], bool]:
        """The end of the run, if any; the reports of a slice of the ranks, or of all; True if one has lost a peer."""
        ranks = self._ranks if reads_all else next(self._slices)
        end, lost, *texts = self._store.multi_get([END, LOST, *map(REPORT.format, ranks)])
        reports = {rank: Report(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}
        return Diagnosis(*json.loads(end)) if end else None, reports, lost != b""

    def end(self, diagnosis: Diagnosis) -> tuple[Diagnosis, bool]:
        """Ends the run; returns the diagnosis of the first rank that did so, and True on that rank."""
        text = json.dumps(diagnosis)
        end = self._store.compare_set(END, "", text).decode()
        return Diagnosis(*json.loads(end)), end == text

    def release(self, rank: int, others: int, seconds: float) -> None:
        """Counts a rank that knows the end of the run. Rank 0, whose process may hold the store, waits for `others`."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(*STORE_ERRORS):
            if rank > 0:
                self._store.add(READ, 1)
            while rank == 0 and self._store.add(READ, 0) < others and time.monotonic() < deadline:
                time.sleep(TICK / 10)


class Heartbeat:
    """The heartbeat of one rank. A single rank has it as well, to notice that its main thread hangs."""

    def __init__(self, timeouts: TimeoutsConfig, launch: Launch, store: dist.Store | None = None) -> None:
        self.rank, self._size = launch.rank, launch.world_size
        self.log = Path(os.devnull)  # for the diagnosis; a training run sets its own
        self.pulse, self._beats = Pulse(), 0
        self._timeouts, self.diagnoser = timeouts, Diagnoser(self.rank, self._size, timeouts)
        self._reports = ReportStore(self.diagnoser.ranks, launch, store)
        self._failure: tuple[float, Diagnosis] | None = None  # of the main thread; when it is the cause at the latest
        self._now = 0.0  # seconds for which the thread has run, without those of a suspension
        self._own = (0, 0.0)  # number and time of the last progress of this rank
        self._over, self._exiting, self._woken = threading.Event(), threading.Event(), threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        if self.rank > 0:
            threading.Thread(target=self._watch_store, name="heartbeat store", daemon=True).start()

    def failed(self, error: BaseException) -> None:
        """Reports an exception to the other ranks. Returns if this rank has to print it."""
        is_agreed = isinstance(error, UserError) and not isinstance(error, LocalError)
        if is_agreed or isinstance(error, SystemExit | Stopped | KeyboardInterrupt):  # on all ranks
            self.leave()
            return
        is_lost, diagnosis = is_peer_gone(error), failure(self.rank, self.pulse.report, error)
        if is_lost:
            self.diagnoser.is_lost, self.pulse.report = True, self.pulse.report._replace(state="lost a peer")
        self._failure = (self._now + is_lost * (LOST_LIMIT + self.diagnoser.interval), diagnosis)
        self._wake(FAILING_SECONDS)
        if is_lost:  # the thread has ended together with torchrun's store
            self._print(diagnosis.line)
            self._exit(diagnosis, has_store=False)

    def leave(self) -> None:
        """Reports a normal end; returns when this rank may exit."""
        self.pulse.report = self.pulse.report._replace(state="left")
        self._wake(LEAVING_SECONDS + 1)

    def _wake(self, seconds: float) -> None:
        """Lets the thread report the end of the main thread, which does not return if the thread ends the process."""
        self._woken.set()
        self._over.wait(seconds)
        if self._exiting.is_set():
            threading.Event().wait()

    def _beat(self) -> None:
        last, due, armed = time.monotonic(), 0.0, -1.0
        pause = self.diagnoser.interval * self.rank / self._size  # the first one spreads the ranks over the interval
        while not self._over.is_set():
            now = time.monotonic()
            self._now += min(now - last, GAP)
            last = now
            self._note_progress()
            if self._size > 1 and self._now > armed + 1 and self.diagnoser.hang_seconds:
                # A call in C that never releases the GIL stops this thread, but not faulthandler's, whose clock goes on
                # while the process is suspended: a single rank has no such limit, so that Ctrl-Z does not end it.
                faulthandler.dump_traceback_later(self.diagnoser.hang_seconds + FAILING_SECONDS, exit=True, file=2)
                armed = self._now
            try:
                if self._reports.closed.poll(0):
                    raise ConnectionError  # the store's process has ended
                if self.rank == 0 or self._woken.is_set() or self._now > due - TICK / 2:
                    self._woken.clear()
                    due, pause = self._now + pause, self.diagnoser.interval
                    self._exchange()
            except STORE_ERRORS:
                self._lose_store("has ended")
            self._woken.wait(TICK)

    def _note_progress(self) -> None:
        calls = self.pulse.report.calls + Progress.advances
        if calls != self._own[0]:
            self._own = calls, self._now

    def _watch_store(self) -> None:
        """Ends the process if the store does not answer, because the other thread then waits for it forever."""
        beats, seconds = 0, 0  # for which this process has run since that beat
        limit = self.diagnoser.interval + (self._timeouts.silence or self._timeouts.hang or math.inf)
        while not self._over.wait(1.0):
            seconds = seconds + 1 if beats == self._beats else 0
            beats = self._beats
            if seconds > limit:
                self._lose_store(f"does not answer for {seconds} s")

    def _lose_store(self, what: str) -> None:
        """Handles the loss of the store, which ends the run; if torchrun held the store, its end stops the ranks."""
        if self.pulse.report.state == "left" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._stop()
            return
        diagnosis = self.diagnoser.gone(0, what)
        if self.rank in (self._size - 1, diagnosis.rank):  # the last rank is most likely on another machine
            self._print(diagnosis.line)
        self._exit(diagnosis, has_store=False)

    def _exchange(self) -> None:
        """Writes this rank's report; reads those of other ranks, or the end of the run."""
        self._beats += 1
        self._note_progress()
        calls, changed = self._own
        idle = round(self._now - changed, 2)
        report = self.pulse.report._replace(beat=self._beats, calls=calls, idle=idle, collectives=_collectives())
        self._reports.write(self.rank, report)
        end, reports, is_lost = self._reports.read(reads_all=self.diagnoser.is_lost)
        self.diagnoser.add(self._now, reports, is_lost)
        if end is not None and end.code == 0 and report.state != "left":
            # The store ends with rank 0. This rank may still hang, so it watches itself.
            self._reports.release(self.rank, 0, 0)
            self.diagnoser = Diagnoser(0, 1, self._timeouts, first=self.rank)
            self._reports = ReportStore(self.diagnoser.ranks, Launch("single process"))
        elif end is not None:
            self._end(end)
        elif report.state == "left":
            normal = Diagnosis(0, "", 0)
            if self.rank == 0:
                self._reports.end(normal)
            self._end(normal)
        else:
            diagnosis = self.diagnoser.cause(self._now)
            if self._failure is not None and self._now >= self._failure[0]:
                diagnosis = self._failure[1]
            if diagnosis is not None:
                agreed, is_first = self._reports.end(diagnosis)
                self._end(agreed, speaks=is_first)

    def _end(self, diagnosis: Diagnosis, speaks: bool = False) -> None:
        """Ends the heartbeat, and ends the process unless the main thread does so."""
        if diagnosis.line and speaks:
            self._print(diagnosis.line)
        if diagnosis.hangs:
            self._write_stacks()
        is_own_error = self._failure is not None and diagnosis.rank == self.rank and diagnosis.code != EXIT_HANG
        if diagnosis.code == 0 or is_own_error:
            self._release_store(diagnosis)
            self._stop()  # the main thread prints its error and ends the process
        else:
            self._exit(diagnosis)

    def _stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._over.set()

    def _release_store(self, diagnosis: Diagnosis) -> None:
        seconds = 2 * (PRINT_SECONDS + self.diagnoser.interval) if diagnosis.code else LEAVING_SECONDS
        self._reports.release(self.rank, self.diagnoser.reading_ranks(self._now, diagnosis), seconds)

    def _print(self, line: str) -> None:
        """Writes the line to stderr and the run's log, without the lock of `logging`, which another thread may keep."""
        _write(f"error: {line}\n")
        with contextlib.suppress(OSError), open(self.log, "r+", encoding="utf-8") as log:
            log.seek(0, os.SEEK_END)
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 - {__name__} - ERROR - {line}\n")

    def _write_stacks(self) -> None:
        """Writes the stacks of all threads in one piece, because several ranks do so at the same time."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            _write(f"rank {self.rank} (host {self.pulse.report.host}):\n{file.read().decode(errors='replace')}")

    def _exit(self, diagnosis: Diagnosis, has_store: bool = True) -> None:
        """Ends the process from this thread, because the main thread may never return from a collective."""
        self._exiting.set()
        self._stop()
        record_exit_code(diagnosis.code)  # now, because the launcher may end this process during the delay
        if has_store:
            self._release_store(diagnosis)
        # A launcher may end the others when this process ends. They read once per interval.
        time.sleep(self.diagnoser.interval + (TICK if has_store and diagnosis.code == EXIT_HANG else PRINT_SECONDS))
        os._exit(diagnosis.code)


def _collectives() -> int:
    """The number of collectives that this rank has entered. It distinguishes ranks that hang within one step."""
    with contextlib.suppress(RuntimeError):  # a backend that does not count
        group: Any = dist.group.WORLD
        return 0 if group is None else group._get_sequence_number_for_group()
    return 0


def _write(text: str) -> None:
    """Writes to stderr in one piece, without Python's stream, which the main thread may have locked."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
