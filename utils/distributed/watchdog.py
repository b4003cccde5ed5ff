"""Watchdog: if a rank dies, fails or hangs, stop the run within seconds and report which one.

Without it the other ranks wait forever in a collective (NCCL), or each one prints a traceback about a peer that closed
its connection (gloo). A thread of every rank writes a report to the process group's TCPStore several times per second
and reads from it whether the run has to stop. Rank 0 reads all reports and makes the diagnosis. Each rank also holds an
idle TCP connection to the next rank, and one to the store: the kernel closes a connection when the process at its other
end dies. The threads run while the main thread waits in a collective, because that releases the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.distributed import flight_recorder
from utils.distributed.diagnosis import (
    WAITS,
    Diagnosis,
    Event,
    Phase,
    RankStatus,
    decide,
    describe,
    diagnose_death,
    find_absent,
    find_hang,
)
from utils.distributed.launch import Launch
from utils.errors import EXIT_HANG, Stopped, record_exit_code

TICK = 0.25  # seconds between two exchanges with the store
GAP = 2.0  # a thread that did not run for longer was suspended, probably together with all other ranks
UNLINKED_SECONDS = 30.0  # without a heartbeat, after which a rank that could not be connected to counts as dead
LEAVING_SECONDS = 10.0  # for which rank 0, whose process may hold the store, waits for the last rank at a normal end
ACKNOWLEDGE_SECONDS = 3.0  # for which rank 0 waits until the others have read why the run stops
REPORT_SECONDS = 15.0  # for the rank that failed to print its traceback and exit
END, ACKNOWLEDGED = "watchdog: end", "watchdog: acknowledged"  # keys of the store


class Watchdog:
    """The watchdog of a single rank: stops the process if its main thread makes no progress."""

    def __init__(self, hang_seconds: float, rank: int = 0) -> None:
        """A main thread without progress for `hang_seconds` hangs; 0: no limit."""
        self.rank, self.hang_seconds = rank, hang_seconds
        self.diagnosis: Diagnosis | None = None
        self.folder = Path()  # for the last collectives; a training sets its run directory
        self._report: dict[str, Any] = {"host": socket.gethostname(), "heartbeat": 0, "state": "running"}
        self._report |= {"step": 0, "phase": "start", "calls": 0}  # fields of RankStatus
        self._own = make_statuses([rank])[rank]
        self._over = threading.Event()  # all ranks have left, or the run stops
        self._is_substitute = True  # prints a diagnosis that was not written to the store
        self._speaks = False  # prints the diagnosis

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def progress(self, phase: Phase, step: int | None = None) -> None:
        """Reports that the main thread enters a phase, by default of the same step; each call counts as progress."""
        step = self._report["step"] if step is None else step
        self._report.update(step=step, phase=phase, calls=self._report["calls"] + 1)

    def failed(self, error: BaseException) -> None:
        """Reports an exception to the other ranks. Returns if this rank is the cause, and so has to print it."""
        self.leave()

    def leave(self) -> None:
        """Reports a normal end; returns when this rank may exit."""
        self._over.set()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(TICK):
            now = time.monotonic()
            self._own.update(self._report, now)
            self._own.heard = now
            if now - last > GAP:
                self._own.changed = now
            last = now
            diagnosis = self._find_hang(now)
            if diagnosis is not None:
                self._announce(diagnosis, speaks=self._is_substitute)
                self._exit(diagnosis)

    def _find_hang(self, now: float) -> Diagnosis | None:
        return find_hang({self.rank: self._own}, now, self.hang_seconds)

    def _announce(self, diagnosis: Diagnosis, speaks: bool) -> None:
        """Prints the stacks on the rank that hangs, and the diagnosis on the rank that speaks."""
        self.diagnosis, self._speaks = diagnosis, speaks
        if diagnosis.code == EXIT_HANG and diagnosis.rank == self.rank:
            write(diagnosis.message.removeprefix("error: ").split(" for ")[0] + "; its threads:\n")
            faulthandler.dump_traceback(2)
        elif diagnosis.code == EXIT_HANG:
            time.sleep(1)  # the diagnosis refers to the stacks above it
        if diagnosis.message and speaks:
            write(f"{diagnosis.message}\n")

    def _exit(self, diagnosis: Diagnosis) -> None:
        """Ends the process from this thread, because the main thread may never return from a collective."""
        self._over.set()
        record_exit_code(diagnosis.code)  # now, because the launcher may end this process during the delay
        if diagnosis.code == EXIT_HANG and flight_recorder.write_collectives(self.folder, self.rank) and self._speaks:
            files = self.folder.absolute() / flight_recorder.FILE_NAME.format("*")
            write(f"the last collectives of each rank are in {files}\n")
        # A launcher that sees one rank exit stops the others: the rank that is the cause has to print first.
        delay = 1 if diagnosis.rank != self.rank else 2 if diagnosis.code == EXIT_HANG else REPORT_SECONDS
        time.sleep(delay)
        flushing = threading.Thread(target=flush, daemon=True)  # blocks if the main thread is in a write
        flushing.start()
        flushing.join(1)
        os._exit(diagnosis.code)


def write(text: str) -> None:
    """Writes to stderr in one piece, without Python's stream, which the main thread may have locked."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def open_link(address: tuple[str, int], seconds: float) -> socket.socket:
    """A connection that carries no data: it shows whether the process at the other end lives."""
    link = socket.create_connection(address, seconds)
    link.setblocking(False)
    return link


def make_statuses(ranks: Iterable[int]) -> dict[int, RankStatus]:
    now = time.monotonic()
    return {rank: RankStatus("unknown", now, now) for rank in ranks}


def key(rank: int) -> str:
    """The store's key for a rank's report."""
    return f"watchdog: rank {rank}"


class ProcessGroupWatchdog(Watchdog):
    """The watchdog of one of several ranks.

    One thread talks to the store. The other one notices if that blocks, because the store's process is suspended.
    """

    def __init__(self, launch: Launch, store: dist.Store, hang_seconds: float, join_seconds: float) -> None:
        """A rank that writes no report within `join_seconds` is reported."""
        super().__init__(hang_seconds, launch.rank)
        flight_recorder.enable()
        self._size, self._join_seconds = launch.world_size, join_seconds
        # A connection of its own: operations on one connection wait for each other.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined] # missing in PyTorch's annotations
        # Shows the end of the store's process. Store operations show it as well, but then C++ prints a stack trace.
        self._store_link = open_link((launch.master_addr, launch.master_port), join_seconds)
        # For the link of the previous rank. It is never accepted: the kernel resets it when this process ends.
        address = self._store_link.getsockname()[0]  # of the network interface that leads to rank 0
        self._listener = socket.create_server((address, 0), family=self._store_link.family, backlog=16)
        self._store.set(f"watchdog: address of rank {self.rank}", json.dumps(self._listener.getsockname()[:2]))
        self._next = (self.rank + 1) % self._size
        self._next_link: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._next_link = open_link(json.loads(self._store.get(f"watchdog: address of rank {self._next}")), 5.0)
        # If the store's process is suspended, the other thread decides when to stop, and not the store's own timeout.
        self._store.set_timeout(timedelta(days=365))
        self._is_substitute = self.rank == self._size - 1  # the last rank may be on another machine than rank 0
        self._statuses = make_statuses({0, self._next} if self.rank else range(self._size))
        self._event: Event | None = None
        self._events: dict[int, Event] = {}  # by rank
        self._leaving_deadline, self._store_lost = float("inf"), False
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for link in (self._store_link, self._next_link, self._woken):
            if link is not None:
                self._selector.register(link, selectors.EVENT_READ)

    def start(self) -> None:
        threading.Thread(target=self._exchange_all, name="watchdog store", daemon=True).start()
        super().start()

    def failed(self, error: BaseException) -> None:
        if isinstance(error, SystemExit | Stopped):  # on all ranks
            self.leave()
        elif not self._over.is_set():
            self._event = describe(error, self.rank)
            self._report["state"] = "failed"
            self._waker.send(b"x")
            self._over.wait(WAITS["agreed"] + 3)
        if self.diagnosis is not None and self.diagnosis.rank != self.rank:
            time.sleep(REPORT_SECONDS)  # the other thread exits
            os._exit(self.diagnosis.code)

    def leave(self) -> None:
        self._leaving_deadline = time.monotonic() + LEAVING_SECONDS
        self._report["state"] = "left"
        self._waker.send(b"x")
        self._over.wait(2.0 if self.rank else LEAVING_SECONDS + ACKNOWLEDGE_SECONDS + 1)
        if self.diagnosis is not None:
            time.sleep(REPORT_SECONDS)  # the other thread exits

    def _find_hang(self, now: float) -> Diagnosis | None:
        """Finds a hang of rank 0 by the age of its last report, because store operations may block."""
        if self._store_lost:
            return super()._find_hang(now)
        root = self._statuses[0]
        if not root.heartbeat:
            return find_absent({0: root}, now - GAP, self._join_seconds)
        if now - root.heard < self.hang_seconds:
            return None
        return find_hang({0: root, self.rank: self._own}, now, self.hang_seconds)

    def _exchange_all(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            now = time.monotonic()
            if now - last > GAP:
                for status in self._statuses.values():
                    status.heard = status.changed = now
            last = now
            try:
                self._exchange(now)
                if self._over.is_set():
                    return
                ready = self._wait(TICK)
                if ready:
                    time.sleep(0.05)  # if the process that holds the store dies, several links close one after another
                    ready |= self._wait(0)
                if self._store_link in ready:
                    raise ConnectionError
                if self._woken in ready:
                    self._woken.recv(64)
                self._check_next(self._next_link in ready)
            except (dist.DistError, OSError, RuntimeError):
                self._lose_store()

    def _wait(self, seconds: float) -> set[object]:
        """The sockets that become readable: links that close, or `_woken`."""
        return {key.fileobj for key, _ in self._selector.select(seconds)}

    def _lose_store(self) -> None:
        if self._report["state"] == "left":
            self._over.set()
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._watch_next_only()
        else:
            diagnosis = diagnose_death(0, self._statuses[0])
            self._announce(diagnosis, speaks=self._is_substitute)
            self._exit(diagnosis)

    def _watch_next_only(self) -> None:
        """Watches the next rank after torchrun's agent, which holds the store, has ended.

        Ranks on the agent's node receive SIGTERM, save and leave. Ranks on other nodes learn of it by their links only.
        """
        self._store_lost, deadline = True, float("inf")
        self._selector.unregister(self._store_link)
        while self._report["state"] == "running" and time.monotonic() < deadline:
            ready = self._wait(TICK)
            if self._next_link is not None and self._next_link in ready:
                self._selector.unregister(self._next_link)
                deadline = time.monotonic() + LEAVING_SECONDS  # if the next rank has left, this one leaves as well
        if self._report["state"] == "running":
            diagnosis = diagnose_death(self._next, self._statuses[self._next])
            self._announce(diagnosis, speaks=True)
            self._exit(diagnosis)
        self._over.set()

    def _exchange(self, now: float) -> None:
        """Writes this rank's report; reads those of other ranks, or the end of the run."""
        leaving = self._report["state"] == "left" and self.rank != 0
        self._report["heartbeat"] += 1
        self._store.set(key(self.rank), json.dumps([self._report, self._event]))
        if leaving:
            self._over.set()
        elif self._store.check([END]):
            self._follow(self._store.get(END))
        else:
            self._read_reports(now)
            if self.rank == 0:
                self._decide(now)

    def _read_reports(self, now: float) -> None:
        """Rank 0 reads all reports, the others those of rank 0 and of the next rank."""
        written = [r for r, status in self._statuses.items() if status.heartbeat or self._store.check([key(r)])]
        texts = self._store.multi_get([key(rank) for rank in written])
        for rank, text in zip(written, texts, strict=True):
            report, event = json.loads(text)
            self._statuses[rank].update(report, now)
            if event is not None:
                self._events.setdefault(rank, Event(*event)._replace(time=now))

    def _check_next(self, closed: bool) -> None:
        """Stops the run if the next rank dies."""
        status = self._statuses[self._next]
        if closed and self._next_link is not None:
            self._selector.unregister(self._next_link)
            self._read_reports(time.monotonic())  # the rank may have left before
        is_dead = closed or (self._next_link is None and time.monotonic() - status.heard > UNLINKED_SECONDS)
        if is_dead and status.is_running:
            self._publish(diagnose_death(self._next, status))

    def _decide(self, now: float) -> None:
        """Rank 0 stops the run on an event or a hang, or once all ranks have left."""
        statuses, events = self._statuses, list(self._events.values())
        diagnosis = decide(statuses, events, now, self.hang_seconds)
        diagnosis = diagnosis or find_absent(statuses, now, self._join_seconds)
        agreed = len(events) in (0, self._size) and all(event.kind == "agreed" for event in events)
        all_left = not any(status.is_running for status in statuses.values())
        if diagnosis is not None or (all_left and agreed) or now > self._leaving_deadline:
            self._publish(diagnosis)

    def _publish(self, diagnosis: Diagnosis | None) -> None:
        """Ends the watchdogs of all ranks, and the run if there is a diagnosis; the first call of any rank counts."""
        text = json.dumps(diagnosis)
        end = self._store.compare_set(END, "", text)
        self._follow(end, speaks=end == text.encode())

    def _follow(self, end: bytes, speaks: bool = False) -> None:
        fields = json.loads(end)
        diagnosis = None if fields is None else Diagnosis(*fields)
        if self.rank != 0:
            self._store.add(ACKNOWLEDGED, 1)
        if diagnosis is not None:
            self._announce(diagnosis, speaks)
        if self.rank == 0:
            self._wait_for_acknowledgements(diagnosis)
        if diagnosis is not None:
            self._exit(diagnosis)
        self._over.set()

    def _wait_for_acknowledgements(self, diagnosis: Diagnosis | None) -> None:
        """Keeps rank 0's process, and so the store, until the ranks that still run know why the run stops."""
        dead = diagnosis.rank if diagnosis is not None and diagnosis.kind in ("died", "silent") else 0
        waiting = [rank for rank, status in self._statuses.items() if status.state != "left"]
        expected, deadline = len(set(waiting) - {0, dead}), time.monotonic() + ACKNOWLEDGE_SECONDS
        while self._store.add(ACKNOWLEDGED, 0) < expected and time.monotonic() < deadline:
            time.sleep(TICK / 10)
