"""Heartbeat: if a rank hangs, fails or is gone, stop the run on all ranks and report which one.

A thread of each rank writes a report (phase and step) to the process group's store. Rank 0 reads the reports of all
ranks, and the other ranks read that of rank 0. The first rank that finds a cause writes the diagnosis to the store, and
all ranks end. Together the ranks write at most RANKS_PER_SECOND reports per second, and rank 0 reads as many, so that
its work does not grow with their number. A rank that has lost its connection to another one writes that to a key of its
own. Rank 0 sees it at once, and from then on reads all reports. The threads run while the main thread waits in a
collective.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from utils.distributed.flight_recorder import write_collectives
from utils.distributed.launch import Launch
from utils.distributed.pulse import Pulse, Report
from utils.errors import EXIT_HANG, EXIT_USER_ERROR, LocalError, Stopped, UserError, record_exit_code
from utils.progress import Progress

TICK = 0.25  # seconds between two reads of rank 0, and between two looks of each rank at its own progress
RANKS_PER_SECOND = 512
SILENT_SECONDS = 30.0  # without a heartbeat, after which a rank is gone
LOST_SECONDS = 2.0  # the same after a rank has lost a connection: then another one is gone for sure
LOST_LIMIT = 10.0  # for rank 0 to find out which one
GAP = 5.0  # a thread that did not run for longer was suspended, probably together with all other ranks
PRINT_SECONDS = 1.0  # for another rank to print its error, before a launcher sees that a rank has ended
LEAVING_SECONDS = 10.0  # for which rank 0, whose process may hold the store, waits for the normal end of the others
# Keys: the diagnosis; set by a rank that has lost another one; the number of ranks that have read the diagnosis.
END, LOST, READ = "heartbeat: end", "heartbeat: lost", "heartbeat: read"
STORE_ERRORS = (dist.DistError, OSError, RuntimeError)
# Errors of gloo, NCCL and the store about a lost peer; gloo begins each message with the path of its source file.
PEER_GONE = ("gloo", "nccl", "tcpstore", "by peer", "broken pipe", "socket closed")


class Diagnosis(NamedTuple):
    """The end of the run: the rank that is the cause, the line about it, and the exit code of all ranks."""

    rank: int
    line: str
    code: int  # 0: rank 0 has left
    hangs: bool = False


class Heartbeat:
    """The heartbeat of one rank. A single rank has it as well, to notice that its main thread hangs."""

    def __init__(self, hang_seconds: float, launch: Launch | None = None, store: dist.Store | None = None) -> None:
        """The run hangs if no rank makes progress for `hang_seconds`; 0: no limit. A single rank needs no store."""
        launch = launch or Launch("single process")
        self.rank, self._size, self._hang_seconds = launch.rank, launch.world_size, hang_seconds
        self.folder = Path()  # for the last collectives; a training run sets its run directory
        self.pulse, self._beats = Pulse(), 0
        self._failure: tuple[float, Diagnosis] | None = None  # of the main thread; when it is the cause at the latest
        self._interval = max(TICK, self._size / RANKS_PER_SECOND)  # seconds between reports of a rank other than 0
        self._now = 0.0  # seconds for which the thread has run, without those of a suspension
        ranks = range(self._size) if self.rank == 0 else range(1)
        self._reports = dict.fromkeys(ranks, Report())
        self._heard = dict.fromkeys(ranks, 0.0)  # in the order of their times
        pause = self._interval if self.rank == 0 else TICK  # between the reports that this rank reads
        self._lost_seconds = LOST_SECONDS + max(0.0, pause - 2 * TICK)
        self._own = (0, 0.0)  # number and time of the last progress of this rank
        self._changed = 0.0  # the last progress of any rank
        self._lost = False  # a rank has lost its connection to another one
        count = int(RANKS_PER_SECOND * TICK)
        slices = [ranks[first : first + count] for first in range(0, len(ranks), count)]
        self._ranks, self._slices = ranks, itertools.cycle(slices)
        self._over, self._exiting = threading.Event(), threading.Event()
        self._woken = threading.Event()
        self._store: Any = dist.HashStore()
        self._closed = select.poll()
        if store is not None:
            # A connection of its own: operations on one connection wait for each other.
            self._store = store.clone()  # type: ignore[attr-defined] # missing in PyTorch's annotations
            self._store.set_timeout(timedelta(hours=1))  # `_watch_store` has a lower limit
            # An idle connection, which closes when the store's process ends. Without it PyTorch prints a stack trace.
            self._link = socket.create_connection((launch.master_addr, launch.master_port), SILENT_SECONDS)
            self._closed.register(self._link, select.POLLIN)
        if self.rank == 0:
            self._store.multi_set([END, LOST, *map(_key, ranks)], ["", "", *[json.dumps(Report())] * self._size])

    def start(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        if self.rank > 0:
            threading.Thread(target=self._watch_store, name="heartbeat store", daemon=True).start()

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Lowers the time without progress after which the run hangs to `seconds`, for the duration of the block."""
        usual = self._hang_seconds
        self._hang_seconds = min(usual or seconds, seconds)
        try:
            yield
        finally:
            self._hang_seconds = usual

    def failed(self, error: BaseException) -> None:
        """Reports an exception to the other ranks. Returns if this rank has to print it."""
        is_agreed = isinstance(error, UserError) and not isinstance(error, LocalError)
        if is_agreed or isinstance(error, SystemExit | Stopped | KeyboardInterrupt):  # on all ranks
            self.leave()
            return
        is_lost, diagnosis = _is_peer_gone(error), self._describe(error)
        if is_lost:
            self._lost, self.pulse.report = True, self.pulse.report._replace(state="lost a peer")
        self._failure = (self._now + is_lost * (LOST_LIMIT + self._interval), diagnosis)
        self._wake(SILENT_SECONDS)
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

    # --- the threads -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        last, due = time.monotonic(), 0.0
        pause = self._interval * self.rank / self._size  # the first one spreads the ranks over the interval
        while not self._over.is_set():
            now = time.monotonic()
            self._now += min(now - last, GAP)
            last = now
            self._note_progress()
            try:
                if self._closed.poll(0):
                    raise ConnectionError
                if self.rank == 0 or self._woken.is_set() or self._now > due - TICK / 2:
                    self._woken.clear()
                    due, pause = self._now + pause, self._interval
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
        while not self._over.wait(1.0):
            seconds = seconds + 1 if beats == self._beats else 0
            beats = self._beats
            if seconds > SILENT_SECONDS + self._interval:
                self._lose_store(f"does not answer for {seconds} s")

    def _lose_store(self, what: str) -> None:
        """Handles the loss of the store, which ends the run; if torchrun held the store, its end stops the ranks."""
        if self.pulse.report.state == "left" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._over.set()
            return
        diagnosis = self._gone(0, what)
        if self.rank == self._size - 1:  # the last rank is most likely on another machine
            self._print(diagnosis.line)
        self._exit(diagnosis, has_store=False)

    def _exchange(self) -> None:
        """Writes this rank's report; reads those of other ranks, or the end of the run."""
        self._beats += 1
        self._note_progress()
        calls, changed = self._own
        report = self.pulse.report._replace(
            beat=self._beats, calls=calls, idle=round(self._now - changed, 2), collectives=_collectives()
        )
        self._store.set(_key(self.rank), json.dumps(report))
        if report.state == "lost a peer":
            self._store.set(LOST, "yes")
        if end := self._read():
            self._end(Diagnosis(*json.loads(end)))
        elif report.state == "left":
            normal = Diagnosis(0, "", 0)
            if self.rank == 0:
                self._store.set(END, json.dumps(normal))
            self._end(normal)
        else:
            diagnosis = self._find_cause()
            if self._failure is not None and self._now >= self._failure[0]:
                diagnosis = self._failure[1]
            if diagnosis is not None:
                text = json.dumps(diagnosis)
                end = self._store.compare_set(END, "", text)
                self._end(Diagnosis(*json.loads(end)), speaks=end.decode() == text)

    def _read(self) -> bytes:
        """Reads the end of the run, if any, which it returns, and a slice of the reports at once."""
        ranks = self._ranks if self._lost else next(self._slices)
        end, lost, *texts = self._store.multi_get([END, LOST, *map(_key, ranks)])
        self._lost |= lost != b""
        for rank, text in zip(ranks, texts, strict=True):
            last, report = self._reports[rank], Report(*json.loads(text))
            self._reports[rank] = report
            if report.beat != last.beat:
                del self._heard[rank]
                self._heard[rank] = self._now
            if report.state != last.state:
                self._changed = self._now
            elif report.calls != last.calls:
                self._changed = max(self._changed, self._now - report.idle)
        return end

    # --- the diagnosis ------------------------------------------------------------------------------------------------

    def _find_cause(self) -> Diagnosis | None:
        """The diagnosis of a silent rank or, if no rank makes progress, of the one furthest behind."""
        seconds = self._now - self._changed
        limit = self._lost_seconds if self._lost else SILENT_SECONDS
        rank = next((rank for rank in self._heard if self._reports[rank].state != "left"), None)  # the longest silent
        if rank is not None and (silence := self._now - self._heard[rank]) > limit:
            return self._gone(rank, f"sends no heartbeat for {silence:.0f} s")
        if self.rank != 0 or not self._hang_seconds or seconds < self._hang_seconds:
            return None
        running = [rank for rank, report in self._reports.items() if report.state != "left"]
        rank = min(running, key=lambda rank: (self._reports[rank].position, rank))
        report, ahead = self._reports[rank], max(self._reports[rank].position for rank in running)
        others = "the others wait for it; " if ahead > report.position else ""
        line = f"rank {rank} (host {report.host}) hangs at {report} for {seconds:.0f} s; {others}"
        return Diagnosis(rank, f"{line}exit code {EXIT_HANG}, and the stacks of all ranks", EXIT_HANG, hangs=True)

    def _gone(self, rank: int, what: str) -> Diagnosis:
        report = self._reports[rank]
        hint = "killed, suspended, or its machine gone? See the launcher's output"
        line = f"rank {rank} (host {report.host}) {what}, last seen at {report}: {hint}; exit code {EXIT_HANG}"
        return Diagnosis(rank, line, EXIT_HANG)

    def _describe(self, error: BaseException) -> Diagnosis:
        """The diagnosis about an exception of this rank."""
        if isinstance(error, LocalError):  # prints its own line
            return Diagnosis(self.rank, "", EXIT_USER_ERROR)
        text = " ".join(f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].split())[:400].rstrip(": ")
        rank, place = f"rank {self.rank} (host {self.pulse.report.host})", f"at {self.pulse.report}"
        if _is_peer_gone(error):
            line = f"{rank} lost its connection to another rank {place}: {text}; exit code {EXIT_HANG}"
            return Diagnosis(self.rank, line, EXIT_HANG)
        return Diagnosis(self.rank, f"{rank} failed {place}: {text}; stopping all ranks", 1)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _end(self, diagnosis: Diagnosis, speaks: bool = False) -> None:
        """Ends the heartbeat, and ends the process unless the main thread does so."""
        if diagnosis.line and speaks:
            self._print(diagnosis.line)
        if diagnosis.hangs:
            self._write_stacks()
        is_own_error = self._failure is not None and diagnosis.rank == self.rank and diagnosis.code != EXIT_HANG
        if diagnosis.code == 0 or is_own_error:
            self._release_store(diagnosis)
            self._over.set()  # the main thread prints its error and ends the process
        else:
            self._exit(diagnosis)

    def _release_store(self, diagnosis: Diagnosis) -> None:
        """Counts this rank as one that has read the end of the run. Rank 0, whose process may hold the store, waits for
        the others; after a failure only for those that it has heard lately."""
        limit, seconds = math.inf, LEAVING_SECONDS
        if diagnosis.code:
            limit = self._lost_seconds + (0.0 if self._lost else self._interval)
            seconds = 2 * (PRINT_SECONDS + self._interval)
        others = sum(self._now - heard <= limit for rank, heard in self._heard.items() if rank > 0)
        deadline = time.monotonic() + seconds
        with contextlib.suppress(*STORE_ERRORS):
            if self.rank > 0:
                self._store.add(READ, 1)
            while self.rank == 0 and self._store.add(READ, 0) < others and time.monotonic() < deadline:
                time.sleep(TICK / 10)

    def _print(self, line: str) -> None:
        """Writes the line to stderr and to the run's log, without the lock of the logging module: this thread must not
        wait for one that hangs."""
        _write(f"error: {line}\n")
        with contextlib.suppress(OSError), open(self.folder / "out.log", "r+", encoding="utf-8") as log:
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
        self._over.set()
        record_exit_code(diagnosis.code)  # now, because the launcher may end this process during the delay
        if diagnosis.hangs:
            write_collectives(self.folder, self.rank)
        if has_store:
            self._release_store(diagnosis)
        # A launcher may end the others when this process ends. They read once per interval.
        is_printed = has_store and diagnosis.code == EXIT_HANG
        time.sleep(self._interval + (TICK if is_printed else PRINT_SECONDS))
        os._exit(diagnosis.code)


def _key(rank: int) -> str:
    """The store's key for a rank's report."""
    return f"heartbeat: rank {rank}"


def _collectives() -> int:
    """The number of collectives that this rank has entered. It distinguishes ranks that hang within one step."""
    with contextlib.suppress(RuntimeError):  # a backend that does not count
        group: Any = dist.group.WORLD
        return 0 if group is None else group._get_sequence_number_for_group()
    return 0


def _is_peer_gone(error: BaseException) -> bool:
    """True for errors that are the consequence of the end of another rank."""
    reason: BaseException | None = error
    while reason is not None:
        is_runtime = isinstance(reason, RuntimeError) and any(part in str(reason).lower() for part in PEER_GONE)
        if isinstance(reason, dist.DistError) or is_runtime:
            return True
        reason = reason.__cause__
    return False


def _write(text: str) -> None:
    """Writes to stderr in one piece, without Python's stream, which the main thread may have locked."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
