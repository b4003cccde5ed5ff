"""Where the ranks' watch is decided: a thread of rank 0 that hears all ranks, and finds the one that ends them all."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import re
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch.distributed as dist

from utils.errors import EXIT_HANG, EXIT_INTERRUPTED, EXIT_USER_ERROR, LocalError, UserError

log = logging.getLogger(__name__)

PHASES = ("start", "data", "step", "validation", "prediction", "save")  # in their order within a step
UNTIMED = ("start", "save")  # staging, compiling and slow storage take what they take
TICK = 0.5  # seconds between two looks
BEAT = 1.0  # seconds between two messages
GAP = 2.0  # a thread that did not run for so long was suspended, and probably all others with it
# The kinds of events, the likeliest cause first, each with the seconds in which a likelier one may still be told of.
WAITS = {"died": 0.0, "failed": 1.0, "agreed": 5.0, "consequence": 2.0}
FOREIGN_SECONDS = 10.0  # for a connection to say whose it is
FOREIGN = 64  # such connections, beside those of the ranks
LONGEST_LINE = 4096
# What gloo, NCCL and the store say of a peer that is gone; gloo begins each text with its source file's path.
PEER_GONE = re.compile(r"gloo|NCCL|TCPStore|by peer|Broken pipe|Socket closed", re.IGNORECASE)


@dataclass
class RankStatus:
    """A rank as the watch sees it; its place is the step, the phase's number, and the number of its reports."""

    host: str
    heard: float
    changed: float
    place: tuple[int, int, int] = (0, 0, 0)
    left: bool = False

    def hear(self, place: Sequence[int], now: float) -> None:
        step, phase, reports = place
        if (step, phase, reports) != self.place:
            self.place, self.changed = (step, phase, reports), now
        self.heard = now

    @property
    def timed(self) -> bool:
        return PHASES[self.place[1]] not in UNTIMED

    def __str__(self) -> str:
        return f"step {self.place[0]} ({PHASES[self.place[1]]})"


@dataclass(frozen=True)
class Event:
    """Something that ends the run; without a text where the rank itself tells of it."""

    kind: str
    rank: int
    time: float
    text: str = ""
    code: int = 1


@dataclass(frozen=True)
class Diagnosis:
    """Which rank is the cause, the line to print, if any, and the exit code of all."""

    rank: int
    message: str
    code: int
    hang: bool = False


def decide(
    members: Mapping[int, RankStatus], events: Sequence[Event], now: float, hang_seconds: float
) -> Diagnosis | None:
    """The likeliest cause of what has happened, once likelier ones had their time; else the rank that hangs."""
    if not events:
        return find_hang(members, now, hang_seconds)
    cause = min(events, key=lambda event: (list(WAITS).index(event.kind), event.time, event.rank))
    if now < cause.time + WAITS[cause.kind]:
        return None
    member = members[cause.rank]
    what = f"failed at {member}: {cause.text}"
    if cause.kind == "died":
        what = f"ended without a word, last seen at {member}: killed, out of memory or a node failure?"
        what += " See the launcher's output"
    # Rank 0 prints by itself what usually comes to all ranks: bad input, an interrupt.
    told = cause.kind != "died" and (not cause.text or (cause.rank == 0 and cause.code != 1))
    message = "" if told else f"error: rank {cause.rank} (host {member.host}) {what}; the others end, too"
    return Diagnosis(cause.rank, message, cause.code)


def find_hang(members: Mapping[int, RankStatus], now: float, hang_seconds: float) -> Diagnosis | None:
    """Where no rank has got on for hang_seconds (0: never): one that went silent, else the one furthest behind.

    A single rank that waits for another says nothing: the other may be where it may take its time, or just be back.
    """
    here = {rank: member for rank, member in members.items() if not member.left}
    progress = max((member.changed for member in members.values()), default=now)
    if not here or not hang_seconds or now - progress < hang_seconds:
        return None
    silent = {rank for rank, member in here.items() if member.timed and now - member.heard >= hang_seconds}
    rank, member = min(here.items(), key=lambda item: (item[0] not in silent, item[1].place[:2], item[0]))
    if not member.timed:
        return None
    ahead = max(here.values(), key=lambda other: other.place[:2])
    others = f", the others wait for it at {ahead}" if ahead.place[:2] > member.place[:2] else ""
    if not others and len(here) > 1 and not silent:
        others = ", and so do all others"
    why = "it does not answer: stopped, or its machine is gone" if rank in silent else "its stacks are above"
    what = f"rank {rank} (host {member.host}) hangs at {member} for {hang_seconds:g} s"
    return Diagnosis(rank, f"error: {what}{others}; {why}; exit code {EXIT_HANG}", EXIT_HANG, hang=True)


def describe(error: BaseException) -> tuple[str, str, int]:
    """Kind, text and exit code of the event that an exception is."""
    text = " ".join(f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].split())[:400].rstrip(": ")
    if isinstance(error, KeyboardInterrupt):
        return "failed", text, EXIT_INTERRUPTED
    if isinstance(error, LocalError):
        return "failed", "", EXIT_USER_ERROR
    if isinstance(error, UserError):
        return "agreed", " ".join(str(error).split())[:400], EXIT_USER_ERROR
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, dist.DistError) or (isinstance(reason, RuntimeError) and PEER_GONE.search(str(reason))):
            return "consequence", text, 1
        reason = reason.__cause__
    return "failed", text, 1


@dataclass(eq=False)
class Peer:
    """A connection to the hub; without a rank until it has shown the token."""

    socket: socket.socket
    since: float
    rank: int | None = None
    rest: bytes = b""


class Hub:
    """A thread of rank 0 that hears all ranks and decides for them."""

    def __init__(
        self, listener: socket.socket, token: str, size: int, hang_seconds: float, join_seconds: float
    ) -> None:
        self._listener, self._token, self._size = listener, token, size
        self._hang_seconds, self._join_seconds = hang_seconds, join_seconds
        self._members: dict[int, RankStatus] = {}
        self._events: list[Event] = []
        self._peers: list[Peer] = []
        self._started = self._looked = self._told = time.monotonic()
        self._finish = self._bye = False
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="watch hub", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Returns once all ranks have left; those that have not in the end are told not to mind."""
        self._thread.join(seconds)
        self._finish = True
        self._thread.join(TICK + 2)
        for connection in (self._listener, *(peer.socket for peer in self._peers)):
            connection.close()

    def _run(self) -> None:
        while not self._finish:
            for key, _ in self._selector.select(TICK):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            if (self._events or self._bye or now - self._looked >= TICK) and self._look(now):
                break
        self._tell(closing=True)  # after a verdict nobody reads on

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                log.warning("The watch of the ranks cannot take a connection: %s", error.strerror or error)
                time.sleep(TICK)  # the same again at once would not help: perhaps too many files are open
            return
        connection.setblocking(False)
        peer = Peer(connection, time.monotonic())
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        foreign = [peer for peer in self._peers if peer.rank is None]
        if len(foreign) > self._size + FOREIGN:
            self._drop(foreign[0])

    def _drop(self, peer: Peer) -> None:
        self._peers.remove(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()

    def _read(self, peer: Peer) -> None:
        if peer not in self._peers:  # dropped since
            return
        try:
            data = peer.socket.recv(LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        try:
            for line in lines:
                self._hear(peer, json.loads(line), time.monotonic())
            if len(peer.rest) > LONGEST_LINE:
                raise ValueError
        except (ValueError, TypeError, LookupError, RecursionError):
            peer.rest = b""
            if peer.rank is None:
                data = b""
        if not data:
            self._drop(peer)
            if peer.rank is not None and not self._members[peer.rank].left:
                self._events.append(Event("died", peer.rank, time.monotonic()))

    def _hear(self, peer: Peer, message: dict[str, Any], now: float) -> None:
        if peer.rank is None:
            rank = message["rank"]
            known = hmac.compare_digest(message["token"], self._token)
            if not known or rank not in range(self._size) or rank in self._members:
                raise ValueError
            peer.rank, self._members[rank] = rank, RankStatus(message["host"], now, now)
        member = self._members[peer.rank]
        member.hear(message["at"], now)
        if "failed" in message:
            kind, text, code = message["failed"]
            self._events.append(Event(kind, peer.rank, now, text, code))
        if "failed" in message or "bye" in message:  # its connection may end now
            member.left = self._bye = True
            member.changed = now  # those that waited for it have yet to follow

    def _look(self, now: float) -> bool:
        """Tells all what they have to know by now; whether that was the last word."""
        if now - self._looked > GAP:
            for member in self._members.values():
                member.heard = member.changed = now
        self._looked, self._bye = now, False
        for peer in list(self._peers):
            if peer.rank is None and now - peer.since > FOREIGN_SECONDS:
                self._drop(peer)
        verdict = decide(self._members, self._events, now, self._hang_seconds)
        absent = [str(rank) for rank in range(self._size) if rank not in self._members]
        if absent and verdict is None and now - self._started > self._join_seconds:
            what = f"of {self._size} ranks, {', '.join(absent)} did not come within {self._join_seconds:g} s"
            verdict = Diagnosis(-1, f"error: {what}; see what they say, or whether they were started", EXIT_USER_ERROR)
        if verdict is not None:
            self._tell(verdict=astuple(verdict))
        elif not absent and now - self._told >= BEAT:
            self._told, root = now, self._members[0]
            # Another machine's rank: if rank 0 dies with its machine, that one can still tell of it.
            there = [rank for rank, member in self._members.items() if rank and not member.left]
            speaker = min(there, key=lambda rank: (self._members[rank].host == root.host, rank), default=1)
            self._tell(at=root.place, speaker=speaker)
        agreed = [event for event in self._events if event.kind == "agreed"]
        gone = not absent and all(member.left for member in self._members.values())
        return verdict is not None or (gone and agreed == self._events and len(agreed) in (0, self._size))

    def _tell(self, **message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        # Rank 0 last: it may end as soon as it knows, and the hub with it.
        for peer in sorted(self._peers, key=lambda peer: -(peer.rank or 0)):
            if peer.rank is not None:
                with contextlib.suppress(OSError):  # gone, or stopped and its buffer full
                    peer.socket.send(line)
