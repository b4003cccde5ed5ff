"""Rendezvous: the ranks of a run find each other in a store, before there is a process group."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from utils.config.schema import TimeoutsConfig
from utils.distributed.devices import RankDevice, choose_devices
from utils.distributed.launch import Launch
from utils.distributed.watchdog import ProcessGroupWatchdog
from utils.errors import EXIT_USER_ERROR, LocalError


def rendezvous(
    device: str, launch: Launch, timeouts: TimeoutsConfig
) -> tuple[dist.Store, RankDevice, ProcessGroupWatchdog]:
    """Connects to the store of all ranks; raises LocalError if that is not possible."""
    os.environ.update(MASTER_ADDR=launch.master_addr, MASTER_PORT=str(launch.master_port))
    address = f"{launch.master_addr}:{launch.master_port}"
    try:
        # The rendezvous would repeat the query for an unknown name until its timeout.
        socket.getaddrinfo(launch.master_addr, None)
    except OSError as error:
        raise LocalError(
            f"cannot resolve MASTER_ADDR of {address} ({error.strerror}); set it to the first node"
        ) from None
    failure = f"rank {launch.rank} of {launch.world_size} could not connect to the other ranks at {address}"
    remedy = "check MASTER_ADDR, MASTER_PORT and that all ranks were started"
    # Store operations block without a time limit if the process at that address does not answer.
    limit = threading.Timer(timeouts.rendezvous + 10, _give_up, [f"{failure} (no answer); {remedy}"])
    limit.daemon = True
    limit.start()
    try:
        store, rank, size = next(
            dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timedelta(seconds=timeouts.rendezvous))
        )
        if "TORCHELASTIC_RUN_ID" in os.environ:
            store = store_of_this_start(store, rank, size, timeouts.rendezvous)
        chosen = choose_devices(device, launch, store)
        watchdog = ProcessGroupWatchdog(launch, store, timeouts.hang, timeouts.rendezvous)
    except (dist.DistError, OSError) as error:
        raise LocalError(f"{failure} ({str(error).splitlines()[0]}); {remedy}") from None
    finally:
        limit.cancel()
    return store, chosen, watchdog


def _give_up(message: str) -> None:
    os.write(2, f"error: {message}\n".encode())
    os._exit(EXIT_USER_ERROR)


def store_of_this_start(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """A part of the store that no earlier start of the same job has written to; returns when all ranks have called it.

    torchrun's store may live through all restarts of the ranks (pytorch/pytorch#135712). Without this function gloo,
    NCCL and the watchdog would read the addresses of dead ranks there. The restart count does not identify the start,
    because each node's agent has its own count. So every rank writes a random number, and rank 0 replies to it.
    """
    own, deadline, pause = secrets.token_hex(8), time.monotonic() + seconds, 0.01
    others = range(1, size)
    if rank:
        store.set(f"call of rank {rank}", own)
    answered = [""] * (size - 1)
    while time.monotonic() < deadline:
        if rank:
            caller, _, start = store.get(f"answer to rank {rank}").decode().partition(" ")
            if caller == own:
                store.add(f"heard in start {start}", 1)
                return dist.PrefixStore(f"start {start}", store)
        else:
            calls = [call.decode() for call in store.multi_get([f"call of rank {other}" for other in others])]
            for other, call, before in zip(others, calls, answered, strict=True):
                if call != before:  # the answer to a call of an earlier start has no effect
                    store.set(f"answer to rank {other}", f"{call} {own}")
            answered = calls
            if store.add(f"heard in start {own}", 0) == size - 1:
                return dist.PrefixStore(f"start {own}", store)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)
    raise TimeoutError("not all ranks have connected")
