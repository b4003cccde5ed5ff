"""Diagnosis of a run that has to stop: which rank is the cause, and the line that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist

from utils.errors import EXIT_HANG, EXIT_INTERRUPTED, EXIT_USER_ERROR, LocalError, UserError

Phase = Literal["start", "data", "step", "validation", "prediction", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)  # in their order within a step
UNTIMED = ("start", "save")  # staging, compilation and slow storage have no time limit
# Kinds of events, the most likely cause first, and for how many seconds a more likely cause may still be reported.
WAITS = {"failed": 1.0, "agreed": 5.0, "consequence": 2.0}
# Errors of gloo, NCCL and the store about a lost peer; gloo begins each message with the path of its source file.
PEER_GONE = ("gloo", "nccl", "tcpstore", "by peer", "broken pipe", "socket closed")


class Event(NamedTuple):
    """An incident that stops the run; without a text if the rank prints its error itself."""

    kind: str
    rank: int
    text: str = ""
    code: int = 1
    time: float = 0.0  # when it was read


@dataclass
class RankStatus:
    """A rank's last report, and the times of its last heartbeat and its last progress."""

    host: str
    heard: float
    changed: float
    heartbeat: int = 0
    state: Literal["running", "failed", "left"] = "running"
    step: int = 0
    phase: Phase = "start"
    calls: int = 0  # of Watchdog.progress

    def update(self, report: Mapping[str, Any], now: float) -> None:
        """Stores a report, a dict of the other fields."""
        if report["heartbeat"] != self.heartbeat:
            self.heard = now
        if any(report[name] != getattr(self, name) for name in ("state", "step", "phase", "calls")):
            self.changed = now
        for name, value in report.items():
            setattr(self, name, value)

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def is_timed(self) -> bool:
        return self.phase not in UNTIMED

    @property
    def position(self) -> tuple[int, int]:
        return self.step, PHASES.index(self.phase)

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})"


class Diagnosis(NamedTuple):
    """The rank that is the cause, the line to print, if any, and the exit code of all ranks."""

    rank: int
    message: str
    code: int
    kind: Literal["died", "failed", "hangs", "silent"]


def decide(
    statuses: Mapping[int, RankStatus], events: Iterable[Event], now: float, hang_seconds: float
) -> Diagnosis | None:
    """Finds the most likely cause once more likely ones have had time to be reported; without events, a hang."""
    cause = min(events, key=lambda event: (list(WAITS).index(event.kind), event.time, event.rank), default=None)
    if cause is None:
        return find_hang(statuses, now, hang_seconds)
    if now < cause.time + WAITS[cause.kind]:
        return None
    status = statuses[cause.rank]
    # Rank 0 itself prints errors that usually occur on all ranks: bad input, an interrupt.
    is_printed = not cause.text or (cause.rank == 0 and cause.code != 1)
    what = f"rank {cause.rank} (host {status.host}) failed at {status}: {cause.text}"
    message = "" if is_printed else f"error: {what}; stopping all ranks"
    return Diagnosis(cause.rank, message, cause.code, "failed")


def diagnose_death(rank: int, status: RankStatus) -> Diagnosis:
    hint = "killed, out of memory or a node failure? See the launcher's output"
    message = f"error: rank {rank} (host {status.host}) died, last seen at {status}: {hint}"
    return Diagnosis(rank, message, 1, "died")


def find_hang(statuses: Mapping[int, RankStatus], now: float, hang_seconds: float) -> Diagnosis | None:
    """If no rank has made progress for hang_seconds (0: no limit), names one without heartbeats, else the last one.

    A single rank without progress is no hang: it may wait for another one that is in an untimed phase.
    """
    running = {rank: status for rank, status in statuses.items() if status.is_running}
    last_change = max((status.changed for status in statuses.values()), default=now)
    if not hang_seconds or now - last_change < hang_seconds or not any(each.is_timed for each in running.values()):
        return None
    # A write to slow storage may hold the GIL, and so the heartbeat.
    silent = {rank for rank, status in running.items() if status.phase != "save" and now - status.heard >= hang_seconds}
    rank, status = min(running.items(), key=lambda item: (item[0] not in silent, item[1].position, item[0]))
    if not status.is_timed and not silent:
        return None
    ahead = max(running.values(), key=lambda other: other.position)
    others = f", the others wait for it at {ahead}" if ahead.position > status.position else ""
    if not others and len(running) > 1 and not silent:
        others = ", and so do all others"
    reason = "no heartbeat: it is suspended or its machine is gone" if silent else "its stacks are above"
    what = f"rank {rank} (host {status.host}) hangs at {status} for {hang_seconds:g} s"
    message = f"error: {what}{others}; {reason}; exit code {EXIT_HANG}"
    return Diagnosis(rank, message, EXIT_HANG, "silent" if silent else "hangs")


def find_absent(statuses: Mapping[int, RankStatus], now: float, seconds: float) -> Diagnosis | None:
    """Names the ranks that have not written a report within `seconds`."""
    absent = [rank for rank, status in statuses.items() if not status.heartbeat and now - status.heard > seconds]
    if not absent:
        return None
    names = ", ".join(map(str, absent))
    message = f"error: no heartbeat from rank {names} within {seconds:g} s of the start; see the output of that rank"
    return Diagnosis(absent[0], message, EXIT_USER_ERROR, "silent")


def describe(error: BaseException, rank: int) -> Event:
    """The event that an exception is."""
    text = " ".join(f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].split())[:400].rstrip(": ")
    if isinstance(error, KeyboardInterrupt):
        return Event("failed", rank, text, EXIT_INTERRUPTED)
    if isinstance(error, LocalError):
        return Event("failed", rank, "", EXIT_USER_ERROR)
    if isinstance(error, UserError):
        return Event("agreed", rank, " ".join(str(error).split())[:400], EXIT_USER_ERROR)
    reason: BaseException | None = error
    while reason is not None:
        is_peer_gone = isinstance(reason, RuntimeError) and any(part in str(reason).lower() for part in PEER_GONE)
        if isinstance(reason, dist.DistError) or is_peer_gone:
            return Event("consequence", rank, text)
        reason = reason.__cause__
    return Event("failed", rank, text)
