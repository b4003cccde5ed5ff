"""Ranks watch over each other: one that dies, fails or hangs ends them all within seconds, with a line that names it.

Otherwise the others wait for it in a collective, for ever (NCCL), or each ends with a traceback of its own about a peer
that closed its connection (gloo). Every rank keeps a TCP connection to a hub, a thread of rank 0, and says each second
where it is; a connection that ends without a goodbye is a rank that died. Threads can do this while the main thread
waits in a collective, which gives the interpreter's lock away.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from utils.distributed.hub import (
    BEAT,
    FOREIGN,
    GAP,
    LONGEST_LINE,
    PHASES,
    TICK,
    UNTIMED,
    WAITS,
    Diagnosis,
    Event,
    Hub,
    RankStatus,
    decide,
    describe,
    find_hang,
)
from utils.errors import LocalError, Stopped

TELLING_SECONDS = 15.0  # for the cause to print its own account
LEAVING_SECONDS = 10.0  # that rank 0 waits for the last rank at a regular end


class Watchdog:
    """The lone rank's: notices when it hangs."""

    def __init__(self, hang_seconds: float, rank: int = 0) -> None:
        self.rank, self.hang_seconds = rank, hang_seconds
        self.verdict: Diagnosis | None = None
        self._place = (0, 0, 0)
        self._over = threading.Event()  # a verdict, or all have left
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @property
    def exit_code(self) -> int:
        return self.verdict.code if self.verdict else 1

    def start(self) -> None:
        self._thread.start()

    def progress(self, phase: str, step: int | None = None) -> None:
        """Where the main thread is now, by default in the same step; every call is progress, at one place, too."""
        self._place = (self._place[0] if step is None else step, PHASES.index(phase), self._place[2] + 1)

    def failed(self, error: BaseException) -> bool:
        """Tells the others of an exception on its way out: whether this rank is the cause, and so prints it."""
        self.leave()
        return True

    def leave(self) -> None:
        """A regular end: this rank may go without alarm."""
        self._over.set()

    def _run(self) -> None:
        looked = time.monotonic()
        member = RankStatus(socket.gethostname(), looked, looked)
        while not self._over.wait(TICK):
            now = time.monotonic()
            if now - looked > GAP:
                member.changed = now
            looked = now
            member.hear(self._place, now)
            verdict = find_hang({self.rank: member}, now, self.hang_seconds)
            if verdict is not None:
                self._end(verdict, speaks=True)

    def _end(self, verdict: Diagnosis, speaks: bool) -> None:
        """Ends the process, from this thread, since the main thread may never come back from a collective."""
        self.verdict, guilty = verdict, verdict.rank == self.rank
        if verdict.hang and guilty:
            write_stacks(verdict.message.removeprefix("error: ").split(" for ")[0])
        elif verdict.hang:
            time.sleep(1)  # the stacks come first
        if speaks and verdict.message:
            write(f"{verdict.message}\n".encode())
        self._over.set()
        # A launcher that sees one rank end stops the others: the cause has to be told of before that.
        time.sleep(TELLING_SECONDS if guilty and not verdict.hang else 2 if guilty or self.rank == 0 else 1)
        flushing = threading.Thread(target=flush, daemon=True)  # it waits for ever if the main thread is in a write
        flushing.start()
        flushing.join(1)
        os._exit(verdict.code)


def write(text: bytes) -> None:
    """To stderr in one piece, past Python's stream, which the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, text)


def write_stacks(title: str) -> None:
    """Where all threads are, under a line of title."""
    title += "; its threads:\n"
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            write(title.encode() + file.read())
    except OSError:  # nowhere to write but here
        write(title.encode())
        faulthandler.dump_traceback(2)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class ProcessGroupWatchdog(Watchdog):
    """That of one of several ranks: tells the hub where it is, and carries out the verdict."""

    def __init__(self, connection: socket.socket, hang_seconds: float, rank: int, hub: Hub | None, host: str) -> None:
        super().__init__(hang_seconds, rank)
        self.joined = threading.Event()
        self._socket, self._hub, self._lock = connection, hub, threading.Lock()
        self._root_host, self._speaker = host, 1  # the rank that prints the line where rank 0 cannot

    def failed(self, error: BaseException) -> bool:
        if isinstance(error, SystemExit | Stopped):  # on all ranks
            self.leave()
        elif not self._over.is_set():
            self.send(failed=describe(error))
            self._over.wait(WAITS["agreed"] + 3)
        if self.verdict is None or self.verdict.rank == self.rank:
            return True
        self._thread.join(TELLING_SECONDS)  # it ends the process
        return False

    def leave(self) -> None:
        if self._hub is None:
            self._over.set()
        self.send(bye=True)
        if self._hub is None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        else:
            self._hub.finish(LEAVING_SECONDS)
            self._over.wait(TICK + 2)  # for the hub's last word
        if self.verdict is not None:
            self._thread.join(TELLING_SECONDS)  # it ends the process

    def send(self, **message: Any) -> None:
        line = json.dumps({"at": self._place, **message}).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def _run(self) -> None:
        now = looked = sent = time.monotonic()
        root, rest = RankStatus(self._root_host, now, now), b""
        data: bytes | None = None
        while data != b"":
            try:
                data = self._socket.recv(LONGEST_LINE)
            except TimeoutError:
                data = None
            except OSError:
                data = b""
            now = time.monotonic()
            if now - looked > GAP:
                root.heard = now
            looked = now
            *lines, rest = (rest + (data or b"")).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # half a line, from when the connection was full
                    self._hear(json.loads(line), root, now)
            if now - sent >= BEAT and not self._over.is_set():
                sent = now
                self.send()
                if PHASES[self._place[1]] not in UNTIMED and now - root.heard >= self.hang_seconds:
                    self._follow(find_hang({0: root}, now, self.hang_seconds))
        self._follow(decide({0: root}, [Event("died", 0, now)], now, 0))
        self._socket.close()

    def _follow(self, verdict: Diagnosis | None) -> None:
        """What this rank finds out about rank 0 by itself."""
        if verdict is not None and not self._over.is_set():
            self._end(verdict, self.rank == self._speaker)

    def _hear(self, message: dict[str, Any], root: RankStatus, now: float) -> None:
        if "closing" in message:
            self._over.set()
        elif "verdict" in message and not self._over.is_set():
            self._end(Diagnosis(*message["verdict"]), self.rank == 0)
        elif "at" in message:
            self._speaker = message["speaker"]
            root.hear(message["at"], now)
            self.joined.set()


def join(
    rank: int,
    world_size: int,
    master_addr: str,
    store: dist.Store | None,
    hang_seconds: float,
    join_seconds: float = 600,
) -> Watchdog:
    """This rank's watch, once all ranks have theirs; for several ranks, `store` is that of their rendezvous.

    A main thread that reports no progress for `hang_seconds` hangs; 0 switches that off.
    """
    if world_size == 1:
        alone = Watchdog(hang_seconds)
        alone.start()
        return alone
    hub = None
    try:
        if rank == 0:
            assert store is not None
            token, listener = secrets.token_hex(16), _listen(master_addr, world_size + FOREIGN)
            hub = Hub(listener, token, world_size, hang_seconds, join_seconds)
            store.set("watch", json.dumps([socket.gethostname(), *listener.getsockname()[:2], token]))
        assert store is not None
        host, address, port, token = json.loads(store.get("watch"))
        connection = _connect((address, master_addr), port)
    except (dist.DistError, OSError) as error:
        raise LocalError(
            f"rank {rank} of {world_size} could not reach rank 0's watch ({str(error).splitlines()[0]}); check that "
            f"MASTER_ADDR {master_addr} is the first node, and that nodes may open TCP connections to each other"
        ) from None
    watch = ProcessGroupWatchdog(connection, hang_seconds, rank, hub, host)
    watch.send(rank=rank, token=token, host=socket.gethostname())
    watch.start()
    if not watch.joined.wait(join_seconds + 10):
        raise LocalError(f"rank {rank} of {world_size} had no answer from rank 0's watch; see what rank 0 says")
    return watch


def _listen(master_addr: str, backlog: int) -> socket.socket:
    """A port where rank 0 is known to the others: only on the machine itself if that is a loopback address."""
    local = master_addr.startswith(("127.", "localhost", "::1"))
    for family, *_, address in socket.getaddrinfo(master_addr, 0, type=socket.SOCK_STREAM):
        # Debian gives a machine's own name 127.0.1.1, where no other machine comes through.
        if local or not str(address[0]).startswith(("127.", "::1")):
            with contextlib.suppress(OSError):
                return socket.create_server(address, family=family, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def _connect(hosts: Sequence[str], port: int) -> socket.socket:
    """To the address rank 0 listens at, or else as the launcher names it here."""
    error: OSError = OSError("no address")
    for host in hosts:
        if host != "0.0.0.0":
            try:
                connection = socket.create_connection((host, port), timeout=30)
                connection.settimeout(TICK)
                return connection
            except OSError as caught:
                error = caught
    raise error
