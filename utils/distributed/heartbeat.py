"""Heartbeat: if a rank hangs, fails or is gone, stop the run on all ranks and report which one.

A thread of each rank writes a report (phase and step) to the process group's store. Rank 0 reads the reports of all
ranks, and the other ranks read that of rank 0. The first rank that finds a cause writes the diagnosis to the store, and
all ranks end. Together the ranks write at most RANKS_PER_SECOND reports per second, and rank 0 reads as many, so that
its work does not grow with their number. The threads run while the main thread waits in a collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist

from utils.distributed.flight_recorder import write_collectives
from utils.distributed.launch import Launch
from utils.errors import EXIT_HANG, EXIT_USER_ERROR, LocalError, Stopped, UserError, record_exit_code
from utils.progress import Progress

Phase = Literal["start", "data", "step", "validation", "prediction", "save", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)  # in their order within a step
TICK = 0.25  # seconds between two reads
RANKS_PER_SECOND = 512
SILENT_SECONDS = 30.0  # without a heartbeat, after which a rank is gone
LOST_SECONDS = 1.5  # the same after a rank has lost a connection: then another one is gone for sure
LOST_LIMIT = 10.0  # for rank 0 to find out which one
GAP = 5.0  # a thread that did not run for longer was suspended, probably together with all other ranks
READ_SECONDS = 3.0  # for the other ranks to read a diagnosis from the store, which rank 0's process may hold
LEAVING_SECONDS = 10.0  # the same at a normal end
LEAVE_SECONDS = 5.0  # for another rank to report its normal end
REPORT_SECONDS = 15.0  # for a thread to end the process
END, READ = "heartbeat: end", "heartbeat: read"  # keys of the diagnosis and of the number of ranks that know it
# Errors of gloo, NCCL and the store about a lost peer; gloo begins each message with the path of its source file.
PEER_GONE = ("gloo", "nccl", "tcpstore", "by peer", "broken pipe", "socket closed")


class Diagnosis(NamedTuple):
    """The end of the run: the rank that is the cause, the line about it, and the exit code of all ranks."""

    kind: Literal["ended", "failed", "gone", "hangs"]  # ended: rank 0 is done
    rank: int
    line: str = ""
    code: int = 0


@dataclass
class Status:
    """A rank's last report, and the times of its last heartbeat and its last progress."""

    heard: float
    changed: float
    host: str = "unknown"
    beat: int = 0
    state: Literal["running", "lost a peer", "left"] = "running"
    step: int = 0
    phase: Phase = "start"
    collectives: int = 0  # that the rank has entered
    calls: int = 0  # of Heartbeat.progress and Progress.advance

    def update(self, report: dict[str, Any], now: float) -> None:
        """Stores a report, a dict of the other fields."""
        if report["beat"] != self.beat:
            self.heard = now
        if any(report[name] != getattr(self, name) for name in ("state", "step", "phase", "calls")):
            self.changed = now
        for name, value in report.items():
            setattr(self, name, value)

    @property
    def position(self) -> tuple[int, int, int]:
        return self.step, PHASES.index(self.phase), self.collectives

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})"


class Heartbeat:
    """The heartbeat of one rank. A single rank has it as well, to notice that its main thread hangs."""

    def __init__(self, hang_seconds: float, launch: Launch | None = None, store: dist.Store | None = None) -> None:
        """The run hangs if no rank makes progress for `hang_seconds`; 0: no limit. A single rank needs no store."""
        launch = launch or Launch("single process")
        self.rank, self._size, self._hang_seconds = launch.rank, launch.world_size, hang_seconds
        self.folder = Path()  # for the last collectives; a training run sets its run directory
        self._report: dict[str, Any] = {"host": socket.gethostname(), "beat": 0, "state": "running"}
        self._report |= {"step": 0, "phase": "start", "collectives": 0, "calls": 0}
        self._calls = 0
        self._error: BaseException | None = None  # of the main thread
        self._error_due = 0.0  # when it is the cause, unless another one is found before
        self._interval = max(TICK, self._size / RANKS_PER_SECOND)  # seconds between reports of the same rank
        self._lost_limit = LOST_SECONDS + 2 * self._interval
        now = time.monotonic()
        self._statuses = {rank: Status(now, now) for rank in (range(self._size) if self.rank == 0 else [0])}
        self._changed = self._answered = now  # the last progress of any rank, and the last answer of the store
        self._lost = False  # a rank has lost its connection to another one
        self._next = 0  # the first rank of the next slice
        self._over, self._exiting = threading.Event(), threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._links = [self._woken]
        self._store: Any = dist.HashStore()
        if store is not None:
            # A connection of its own: operations on one connection wait for each other.
            self._store = store.clone()  # type: ignore[attr-defined] # missing in PyTorch's annotations
            self._store.set_timeout(timedelta(seconds=SILENT_SECONDS))
            # An idle connection, which closes when the store's process ends. Without it PyTorch prints a stack trace.
            self._links.append(socket.create_connection((launch.master_addr, launch.master_port), SILENT_SECONDS))
        if self.rank == 0:
            self._store.multi_set([_key(rank) for rank in self._statuses], [json.dumps(self._report)] * self._size)

    def start(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        if self.rank > 0:
            threading.Thread(target=self._watch_store, name="heartbeat store", daemon=True).start()

    def progress(self, phase: Phase, step: int | None = None) -> None:
        """Reports that the main thread enters a phase, by default of the same step; each call counts as progress."""
        self._calls += 1
        self._report.update(phase=phase, step=self._report["step"] if step is None else step)

    def failed(self, error: BaseException) -> None:
        """Reports an exception to the other ranks. Returns if this rank has to print it."""
        is_agreed = isinstance(error, UserError) and not isinstance(error, LocalError)
        if is_agreed or isinstance(error, SystemExit | Stopped | KeyboardInterrupt):  # on all ranks
            self.leave()
            return
        if _is_peer_gone(error):
            if self._over.is_set() and not self._exiting.is_set():  # torchrun's store has ended
                self._print(self._describe(error).line)
                self._exit(EXIT_HANG)
            self._lost, self._report["state"] = True, "lost a peer"
            self._error_due = time.monotonic() + LOST_LIMIT + 2 * self._interval
        self._error = error
        self._wake(SILENT_SECONDS)

    def leave(self) -> None:
        """Reports a normal end; returns when this rank may exit."""
        self._report["state"] = "left"
        self._wake(LEAVE_SECONDS if self.rank else LEAVING_SECONDS + 1)

    def _wake(self, seconds: float) -> None:
        """Lets the thread report the end of the main thread, which does not return if the thread ends the process."""
        self._waker.send(b"x")
        self._over.wait(seconds)
        if self._exiting.is_set():
            time.sleep(REPORT_SECONDS)

    # --- the threads -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            now = time.monotonic()
            if now - last > GAP:
                for status in self._statuses.values():
                    status.heard = status.changed = now
                self._changed = now
            last = now
            try:
                self._exchange(now)
                self._answered = time.monotonic()
                self._wait(self._interval if self.rank else TICK)
            except (dist.DistError, OSError, RuntimeError):
                # A rank that was suspended, and resumes after the end of the run, knows no cause.
                was_suspended = time.monotonic() - self._answered > GAP + self._interval
                self._lose_store("" if was_suspended else "has ended")

    def _wait(self, seconds: float) -> None:
        """Returns early when the main thread ends; raises ConnectionError when the store's process does."""
        ready, _, _ = select.select(self._links, [], [], 0 if self._over.is_set() else seconds)
        if self._woken in ready:
            self._woken.recv(64)
        elif ready:
            raise ConnectionError

    def _watch_store(self) -> None:
        """Ends the process if the store does not answer, because the other thread then waits for it forever."""
        last = time.monotonic()
        while not self._over.wait(1.0):
            now = time.monotonic()
            if now - last > GAP:
                self._answered = now
            last = now
            if now - self._answered > SILENT_SECONDS + self._interval:
                self._lose_store(f"does not answer for {now - self._answered:.0f} s")

    def _lose_store(self, what: str) -> None:
        """Handles the loss of the store, which ends the run; if torchrun held the store, its end stops the ranks."""
        if self._report["state"] == "left" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._over.set()
            return
        if what and self.rank == self._size - 1:  # the last rank is most likely on another machine
            self._print(self._gone(0, what).line)
        self._exit(EXIT_HANG)

    def _exchange(self, now: float) -> None:
        """Writes this rank's report; reads those of other ranks, or the end of the run."""
        calls = self._calls + Progress.advances
        self._report.update(beat=self._report["beat"] + 1, collectives=_collectives(), calls=calls)
        self._store.set(_key(self.rank), json.dumps(self._report))
        if self._store.check([END]):
            self._follow(Diagnosis(*json.loads(self._store.get(END))))
        elif self._report["state"] == "left" and self.rank:
            self._store.add(READ, 1)
            self._over.set()
        else:
            diagnosis = self._own_end(now) or self._find_cause(self._read(now), now)
            if diagnosis is not None:
                text = json.dumps(diagnosis)
                end = self._store.compare_set(END, "", text).decode()
                self._follow(Diagnosis(*json.loads(end)), speaks=end == text)

    def _read(self, now: float) -> Iterable[int]:
        """Reads a slice of the reports; returns its ranks."""
        count = int(RANKS_PER_SECOND * TICK)
        ranks = range(len(self._statuses))[self._next : self._next + count]
        self._next = ranks.stop if ranks.stop < len(self._statuses) else 0
        for rank, text in zip(ranks, self._store.multi_get([_key(rank) for rank in ranks]), strict=True):
            status = self._statuses[rank]
            status.update(json.loads(text), now)
            self._changed = max(self._changed, status.changed)
            self._lost |= status.state == "lost a peer"
        return ranks

    # --- the diagnosis ------------------------------------------------------------------------------------------------

    def _own_end(self, now: float) -> Diagnosis | None:
        """The diagnosis if this rank's main thread has ended."""
        if self._report["state"] == "left":
            return Diagnosis("ended", self.rank)
        return None if self._error is None or now < self._error_due else self._describe(self._error)

    def _find_cause(self, ranks: Iterable[int], now: float) -> Diagnosis | None:
        """The diagnosis of the rank that is silent for longest or, if no rank makes progress, furthest behind."""
        limit = self._lost_limit if self._lost else SILENT_SECONDS
        silent = [rank for rank in ranks if self._is_running(rank) and now - self._statuses[rank].heard > limit]
        if silent:
            rank = min(silent, key=lambda rank: self._statuses[rank].heard)
            return self._gone(rank, f"sends no heartbeat for {now - self._statuses[rank].heard:.0f} s")
        if self.rank != 0 or not self._hang_seconds or now - self._changed < self._hang_seconds:
            return None
        running = [rank for rank in self._statuses if self._is_running(rank)]
        if not running:
            return None
        rank = min(running, key=lambda rank: (not self._is_silent(rank, now), self._statuses[rank].position, rank))
        status, ahead = self._statuses[rank], max(self._statuses[rank].position for rank in running)
        where = f"at {status}"
        if self._is_silent(rank, now):
            where = f"and was last seen at {status},"
            others = "; it sends no heartbeat: suspended, or its machine gone?"
        elif ahead > status.position:
            others = "; the others wait for it"
        else:
            others = "; so do all others" if len(running) > 1 else ""
        line = f"rank {rank} (host {status.host}) hangs {where} for {now - self._changed:.0f} s{others}"
        return Diagnosis("hangs", rank, f"{line}; exit code {EXIT_HANG}, and the stacks of all ranks", EXIT_HANG)

    def _is_running(self, rank: int) -> bool:
        return self._statuses[rank].state != "left"

    def _is_silent(self, rank: int, now: float) -> bool:
        """True if a live rank would have sent a heartbeat in the meantime."""
        return self._is_running(rank) and now - self._statuses[rank].heard > self._lost_limit

    def _gone(self, rank: int, what: str) -> Diagnosis:
        status = self._statuses[rank]
        hint = "killed, suspended, or its machine gone? See the launcher's output"
        line = f"rank {rank} (host {status.host}) {what}, last seen at {status}: {hint}; exit code {EXIT_HANG}"
        return Diagnosis("gone", rank, line, EXIT_HANG)

    def _describe(self, error: BaseException) -> Diagnosis:
        """The diagnosis about an exception of this rank."""
        if isinstance(error, LocalError):  # prints its own line
            return Diagnosis("failed", self.rank, "", EXIT_USER_ERROR)
        text = " ".join(f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].split())[:400].rstrip(": ")
        place = f"at step {self._report['step']} ({self._report['phase']})"
        rank = f"rank {self.rank} (host {self._report['host']})"
        if _is_peer_gone(error):
            line = f"{rank} lost its connection to another rank {place}: {text}; exit code {EXIT_HANG}"
            return Diagnosis("gone", self.rank, line, EXIT_HANG)
        return Diagnosis("failed", self.rank, f"{rank} failed {place}: {text}; stopping all ranks", 1)

    def _follow(self, diagnosis: Diagnosis, speaks: bool = False) -> None:
        """Ends the heartbeat, and ends the process unless the main thread does so."""
        if diagnosis.line and speaks:
            self._print(diagnosis.line)
        if diagnosis.kind == "hangs":
            self._write_stacks()
        if self.rank:
            self._store.add(READ, 1)
        else:
            self._wait_for_readers(diagnosis)
        if diagnosis.kind == "ended" or (diagnosis.kind == "failed" and diagnosis.rank == self.rank):
            self._over.set()  # the main thread ends the process itself
        else:
            self._exit(diagnosis.code, diagnosis.kind == "hangs")

    def _wait_for_readers(self, diagnosis: Diagnosis) -> None:
        """Keeps rank 0's process, and so the store, until all other ranks know the diagnosis."""
        now, is_end = time.monotonic(), diagnosis.kind == "ended"
        deadline = now + (LEAVING_SECONDS if is_end else READ_SECONDS + self._interval)
        readers = sum(is_end or not self._is_silent(rank, now) for rank in self._statuses) - 1
        while self._store.add(READ, 0) < readers and time.monotonic() < deadline:
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
            _write(f"rank {self.rank} (host {self._report['host']}):\n{file.read().decode(errors='replace')}")

    def _exit(self, code: int, hangs: bool = False) -> None:
        """Ends the process from this thread, because the main thread may never return from a collective."""
        self._exiting.set()
        self._over.set()
        record_exit_code(code)  # now, because the launcher may end this process during the delay
        started = time.monotonic()
        if hangs:
            write_collectives(self.folder, self.rank)
        # A launcher that sees one rank exit stops the others, which may have to print.
        time.sleep(max(0.0, 1 + self._interval - (time.monotonic() - started)))
        flushing = threading.Thread(target=_flush, daemon=True)  # blocks if the main thread is in a write
        flushing.start()
        flushing.join(1)
        os._exit(code)


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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
