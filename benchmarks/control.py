"""The control plane on many ranks, for benchmarks/scaling.py: heartbeats through the store, and the start of the ranks.

A process is rank 0 and holds the store. Others send the heartbeats of all other ranks, with the program's code and
connections. Up to 128 ranks also start as processes of their own. PyTorch's store looks up the name of each peer: with
a slow name service the connections of thousands of ranks take minutes.
"""

import argparse
import itertools
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import common
from utils.config.sections import TimeoutsConfig
from utils.distributed.diagnosis import TICK
from utils.distributed.heartbeat import LOST as LOST_KEY
from utils.distributed.heartbeat import Heartbeat
from utils.distributed.launch import Launch, allow_open_files
from utils.distributed.world import connect

CLIENTS, HANG, MOST_PROCESSES, TRIALS, LIMIT = 4, 15.0, 128, 3, 200.0
# The last rank is silent, as if its machine were gone; another rank has lost its connection to it; all ranks hang.
RUNNING, SILENT, LOST, HANGING = EVENTS = ("none", "silence", "lost connection", "hang")
LOADS = ("messages/s at the store", "CPU of rank 0's heartbeat, %", "CPU of its process, %")
FORK = multiprocessing.get_context("fork")


class Simulated(Heartbeat):
    """A heartbeat that ends no process, and counts its messages to the store."""

    messages, cpu_seconds, ended = 0, 0.0, 0.0  # the latter: the time of the diagnosis

    def beat(self, seconds: float, event: str) -> None:
        """Sends a report as in this event, `seconds` after the start."""
        self._now = seconds
        if event != HANGING:
            self.pulse.enter("step", self._beats)
        if self.rank < self._size - 1 or event not in (SILENT, LOST):
            self._exchange()

    def _exchange(self) -> None:
        super()._exchange()
        self.messages, self.cpu_seconds = self.messages + 3, time.thread_time()  # set; multi_get waits for the keys

    def _end(self, *_: Any, **__: Any) -> None:
        self.ended = time.monotonic()
        self._over.set()


def heartbeat(rank: int, size: int, port: int, store: dist.Store, hang: float = 0.0) -> Simulated:
    return Simulated(TimeoutsConfig(hang=hang), Launch("", rank, 0, size, "127.0.0.1", port), store)


def send(rank: int, size: int, listener: socket.socket, ready: Any, _: Any, event: Any, messages: Any, __: int) -> None:
    """Sends the heartbeats of every CLIENTS-th rank from `rank` on, evenly over the interval."""
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    beats = [heartbeat(number, size, port, store) for number in range(rank, size, CLIENTS)]
    ready.wait()
    if not beats:
        return
    started, pause = time.monotonic(), beats[0].diagnoser.interval / len(beats)
    for number, beat in enumerate(itertools.cycle(beats)):
        time.sleep(max(0.0, number * pause - (time.monotonic() - started)))
        beat.beat(time.monotonic() - started, EVENTS[event.value])
        messages[rank] = 3 * number


def observe(
    rank: int, size: int, listener: socket.socket, ready: Any, results: Any, event: Any, messages: Any, chosen: int
) -> None:
    """Rank 0: the load of the store and of this rank per second; the seconds until the event is noticed."""
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    root = heartbeat(0, size, port, store, HANG)
    ready.wait()
    root.start()
    loads = []
    for seconds in (root.diagnoser.interval + 1.0, 2 * root.diagnoser.interval + 4.0):
        time.sleep(seconds)
        loads.append((time.monotonic(), sum(messages) + root.messages, root.cpu_seconds, time.process_time()))
    seconds, sent, thread, process = (after - before for before, after in zip(*loads, strict=True))
    event.value, started = chosen, time.monotonic()
    if EVENTS[chosen] == LOST:
        store.set(LOST_KEY, "yes")
    while not root.ended:
        time.sleep(TICK / 10)
    noticed = root.ended - started - HANG * (EVENTS[chosen] == HANGING)
    results.put((sent / seconds, 100 * thread / seconds, 100 * process / seconds, noticed))
    time.sleep(LIMIT)  # the others need the store until they are killed


def start(rank: int, size: int, listener: socket.socket, ready: Any, results: Any, lazy: str) -> None:
    """Connects one rank: the seconds until it has passed a barrier, and the number of its sockets."""
    port = listener.getsockname()[1]
    listener.close()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, TORCH_GLOO_LAZY_INIT=lazy)
    ready.wait()
    started = time.monotonic()
    with connect("cpu") as world:
        world.barrier()
        seconds = time.monotonic() - started
        results.put((seconds, sum(entry.is_socket() for entry in Path("/proc/self/fd").iterdir())))


def together(mains: Sequence[Callable[..., None]], size: int, *shared: Any, count: int = 1) -> list[tuple[float, ...]]:
    """Runs each function as a process, with its number as the rank; returns `count` results."""
    ready, results = FORK.Barrier(len(mains) + 1, timeout=LIMIT), FORK.Queue()
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        given = (size, listener, ready, results, *shared)
        processes = [FORK.Process(target=main, args=(rank, *given)) for rank, main in enumerate(mains)]
        for process in processes:
            process.start()
    ready.wait()  # here, too: the port is free only when all processes have closed their listener
    try:
        return [results.get(timeout=LIMIT) for _ in range(count)]
    finally:
        for process in reversed(processes):  # rank 0, which holds the store, at the end
            process.join(LIMIT if count == len(mains) else 0)
            process.kill()


def heartbeat_row(size: int) -> dict[str, float]:
    """The load of the heartbeats, the median over the events; the seconds until each event is noticed."""
    loads, seconds = [], {}
    for chosen, name in enumerate(EVENTS[1:], start=1):
        event, messages = FORK.Value("i", 0), FORK.RawArray("q", CLIENTS + 1)
        ((*load, noticed),) = together([observe, *[send] * CLIENTS], size, event, messages, chosen)
        loads.append(load)
        seconds[f"s until noticed: {name}"] = noticed
        sys.stderr.write(f"{size} ranks, {name}: {load} {noticed:.1f} s\n")
    return {"ranks": size, **dict(zip(LOADS, map(statistics.median, zip(*loads, strict=True)), strict=True)), **seconds}


def start_row(size: int) -> dict[str, float]:
    """The start of `size` ranks with connections between all of gloo's ranks, and with connections on first use.

    The time is that of the slowest rank until its first barrier, the sockets are those of the median rank.
    """
    row: dict[str, float] = {"ranks": size}
    for name, lazy in (("mesh", "0"), ("lazy", "1")):
        trials = [zip(*together([start] * size, size, lazy, count=size), strict=True) for _ in range(TRIALS)]
        seconds, sockets = zip(*((max(times), statistics.median(opened)) for times, opened in trials), strict=True)
        row |= {f"s to the first barrier, {name}": statistics.median(seconds), f"sockets, {name}": max(sockets)}
    return row


def main(options: argparse.Namespace) -> None:
    """Measures and stores the result."""
    allow_open_files()
    heartbeats = [heartbeat_row(size) for size in options.control]
    starts = [start_row(size) for size in options.control if size <= MOST_PROCESSES]
    text = "\n\n".join(
        common.table([*rows[0]], [[f"{value:.4g}" for value in row.values()] for row in rows], left=0)
        for rows in (heartbeats, starts)
        if rows
    )
    options.output = options.output.parent
    common.publish("control", options, {"heartbeats": heartbeats, "starts": starts}, text)
