"""Diagnosis: the rank that is gone, fails or hangs, from the reports of the ranks and the time."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist

from utils.config.sections import TimeoutsConfig
from utils.distributed.pulse import Report
from utils.errors import EXIT_HANG, EXIT_USER_ERROR, LocalError

TICK = 0.25  # seconds between two reads of rank 0, and between two looks of each rank at its own progress
RANKS_PER_SECOND = 512
LOST_SECONDS = 2.0  # the same after a rank has lost a connection: then another one is gone for sure
# Errors of gloo, NCCL and the store about a lost peer; gloo begins each message with the path of its source file.
PEER_GONE = ("gloo", "nccl", "tcpstore", "by peer", "broken pipe", "socket closed")


class Diagnosis(NamedTuple):
    """The end of the run: the rank that is the cause, the line about it, and the exit code of all ranks."""

    rank: int
    line: str
    code: int  # 0: rank 0 has left
    hangs: bool = False


class Diagnoser:
    """Finds the cause: rank 0 among all ranks, the others watch rank 0. Callers give the time, `now`."""

    def __init__(self, rank: int, size: int, timeouts: TimeoutsConfig, first: int = 0) -> None:
        """Rank 0 watches `size` ranks from `first` on."""
        self.interval = max(TICK, size / RANKS_PER_SECOND)  # seconds between reports of a rank other than 0
        self.hang_seconds, self.silent_seconds, self.is_lost = timeouts.hang, timeouts.silence or math.inf, False
        self.ranks = range(first, first + size) if rank == 0 else range(1)
        self._reports = dict.fromkeys(self.ranks, Report())
        self._heard = dict.fromkeys(self.ranks, 0.0)  # in the order of their times
        self._changed = 0.0  # the last progress of any rank
        self._detects_hangs = rank == 0
        self._lost_seconds = LOST_SECONDS + max(0.0, (self.interval if rank == 0 else TICK) - 2 * TICK)

    def add(self, now: float, reports: Mapping[int, Report], is_lost: bool) -> None:
        """Adds reports of some ranks. `is_lost`: a rank has lost its connection to another one."""
        self.is_lost |= is_lost
        for rank, report in reports.items():
            last, self._reports[rank] = self._reports[rank], report
            if report.beat != last.beat:
                del self._heard[rank]
                self._heard[rank] = now
            if report.state != last.state:
                self._changed = now
            elif report.calls != last.calls:
                self._changed = max(self._changed, now - report.idle)

    def cause(self, now: float) -> Diagnosis | None:
        """The diagnosis of a silent rank or, if no rank makes progress, of the one furthest behind."""
        seconds = now - self._changed
        hangs = self._detects_hangs and 0 < self.hang_seconds <= seconds
        limit = self._lost_seconds if self.is_lost else self.silent_seconds
        if hangs:  # a rank that is gone seems to hang if that limit is the shorter one, as it may be at the start
            limit = min(limit, self.silent_seconds / 2 + 2 * self.interval)
        for rank, heard in self._heard.items():  # the longest silent first
            silence, report = now - heard, self._reports[rank]
            if silence <= limit:
                break
            if report.state != "left":
                return self.gone(rank, f"sends no heartbeat for {silence:.0f} s")
        if not hangs:
            return None
        running = [rank for rank, report in self._reports.items() if report.state != "left"]
        rank = min(running, key=lambda rank: (self._reports[rank].position, rank))
        report, ahead = self._reports[rank], max(self._reports[rank].position for rank in running)
        others = "the others wait for it; " if ahead > report.position else ""
        line = f"rank {rank} (host {report.host}) hangs at {report} for {seconds:.0f} s; {others}"
        return Diagnosis(rank, f"{line}exit code {EXIT_HANG}, and the stacks of all ranks", EXIT_HANG, hangs=True)

    def gone(self, rank: int, what: str) -> Diagnosis:
        report = self._reports[rank]
        hint = "killed, suspended, or its machine gone? See the launcher's output"
        line = f"rank {rank} (host {report.host}) {what}, last seen at {report}: {hint}; exit code {EXIT_HANG}"
        return Diagnosis(rank, line, EXIT_HANG)

    def reading_ranks(self, now: float, diagnosis: Diagnosis) -> int:
        """Number of ranks other than 0 that will read the end of the run: after a failure those heard lately."""
        limit = self._lost_seconds + (0.0 if self.is_lost else self.interval)
        return sum(not diagnosis.code or now - heard <= limit for rank, heard in self._heard.items() if rank > 0)


def failure(rank: int, report: Report, error: BaseException) -> Diagnosis:
    if isinstance(error, LocalError):  # prints its own line
        return Diagnosis(rank, "", EXIT_USER_ERROR)
    text = " ".join(f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].split())[:400].rstrip(": ")
    name, place = f"rank {rank} (host {report.host})", f"at {report}"
    if is_peer_gone(error):
        line = f"{name} lost its connection to another rank {place}: {text}; exit code {EXIT_HANG}"
        return Diagnosis(rank, line, EXIT_HANG)
    return Diagnosis(rank, f"{name} failed {place}: {text}; stopping all ranks", 1)


def is_peer_gone(error: BaseException) -> bool:
    """True for errors that are the consequence of the end of another rank."""
    reason: BaseException | None = error
    while reason is not None:
        is_runtime = isinstance(reason, RuntimeError) and any(part in str(reason).lower() for part in PEER_GONE)
        if isinstance(reason, dist.DistError) or is_runtime:
            return True
        reason = reason.__cause__
    return False
