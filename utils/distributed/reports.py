"""The reports of all ranks and the end of the run, in the process group's store."""

import contextlib
import itertools
import json
import select
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from utils.distributed.diagnosis import RANKS_PER_SECOND, TICK, Diagnosis
from utils.distributed.launch import Launch
from utils.distributed.pulse import Report

# Keys: the diagnosis; set by a rank that has lost another one; the number of ranks that have read the diagnosis; the
# report of a rank.
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
        self._closed = select.poll()
        if store is not None:
            # A connection of its own: operations on one connection wait for each other.
            self._store = store.clone()  # type: ignore[attr-defined] # missing in PyTorch's annotations
            self._store.set_timeout(timedelta(hours=1))  # `Heartbeat._watch_store` has a lower limit
            # An idle connection, which closes when the store's process ends. Without it PyTorch prints a stack trace.
            self._link = socket.create_connection((launch.master_addr, launch.master_port), CONNECTION_SECONDS)
            self._closed.register(self._link, select.POLLIN)
        if launch.rank == 0:
            reports = [json.dumps(Report())] * len(ranks)
            self._store.multi_set([END, LOST, *map(REPORT.format, ranks)], ["", "", *reports])

    def check(self) -> None:
        """Raises ConnectionError if the store's process has ended."""
        if self._closed.poll(0):
            raise ConnectionError

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
