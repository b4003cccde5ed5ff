"""Rendezvous: the ranks of a run find each other in a store, before there is a process group."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from utils.config.sections import TimeoutsConfig
from utils.distributed.devices import RankDevice, choose_devices
from utils.distributed.identity import describe_differences, identify
from utils.distributed.launch import Launch
from utils.distributed.watchdog import ProcessGroupWatchdog
from utils.errors import EXIT_USER_ERROR, LocalError, UserError, record_exit_code

LIMIT_SECONDS = 3.0  # after the rendezvous timeout, for errors that are more precise than "no answer"
REFUSAL_SECONDS = 3.0  # for which rank 0, whose process may hold the store, waits until the others have read a refusal
MAX_PAUSE = 0.2  # seconds between two queries; several hundred ranks query one store
OTHER_PROGRAM = "another program may use this MASTER_PORT: choose another one, and start all ranks again"
waiting = threading.Event()  # is set while this rank waits for the others; a stop signal then ends the process


def rendezvous(
    device: str, launch: Launch, timeouts: TimeoutsConfig, identity: Mapping[str, str]
) -> tuple[dist.Store, RankDevice, ProcessGroupWatchdog]:
    """Connects to the store of all ranks of the run with this identity; raises UserError if that is not possible."""
    address = f"{launch.master_addr}:{launch.master_port}"
    try:
        # The rendezvous would repeat the query for an unknown name until its timeout.
        socket.getaddrinfo(launch.master_addr, None)
    except OSError as error:
        raise LocalError(
            f"cannot resolve MASTER_ADDR of {address} ({error.strerror}); set it to the first node"
        ) from None
    failure = f"rank {launch.rank} of {launch.world_size} could not connect to the other ranks at {address}"
    remedy = "check MASTER_ADDR, that no other run uses MASTER_PORT, and that all ranks were started"
    # Store operations block without a time limit if the process at that address does not answer.
    limit = threading.Timer(timeouts.rendezvous + LIMIT_SECONDS, _give_up, [f"{failure} (no answer); {remedy}"])
    limit.daemon = True
    limit.start()
    waiting.set()
    try:
        store = open_store(launch, timeouts.rendezvous)
        own = identify(launch, identity)
        store = store_of_this_start(store, launch.rank, launch.world_size, timeouts.rendezvous, own)
        chosen = choose_devices(device, launch, store)
        watchdog = ProcessGroupWatchdog(launch, store, timeouts.hang, timeouts.rendezvous)
    except (dist.DistError, OSError) as error:
        raise LocalError(f"{failure} ({str(error).splitlines()[0]}); {remedy}") from None
    finally:
        waiting.clear()
        limit.cancel()
    return store, chosen, watchdog


def _give_up(message: str) -> None:
    record_exit_code(EXIT_USER_ERROR)
    os.write(2, f"error: {message}\n".encode())
    os._exit(EXIT_USER_ERROR)


def open_store(launch: Launch, seconds: float) -> dist.Store:
    """The store of torchrun, or else of rank 0. On a single node rank 0 and gloo listen on the loopback alone."""
    holds_store = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, listener = launch.master_addr, None
    if is_loopback(address):
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if holds_store:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, launch.master_port), family=family).detach()
    try:
        return dist.TCPStore(
            address,
            launch.master_port,
            is_master=holds_store,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,  # store_of_this_start waits for them
            master_listen_fd=listener,
        )
    except RuntimeError as error:  # PyTorch 2.8 raises no DistError if another program answers
        raise ConnectionError(str(error)) from None


def is_loopback(address: str) -> bool:
    """True for addresses that other machines cannot use.

    Names are not resolved: Debian resolves the host's own name to 127.0.1.1, and other machines to another address.
    """
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def store_of_this_start(
    store: dist.Store, rank: int, size: int, seconds: float, identity: Mapping[str, str]
) -> dist.Store:
    """A part of the store for the ranks of this start; returns when rank 0 has accepted all of them.

    Rank 0 publishes a random name for the start, with its identity. The other ranks call under that name, each with a
    random number and with what differs from rank 0. Rank 0's answer lists the numbers of the ranks that it has accepted
    or refused: it is no answer to a second process with the same rank, or to one that comes later.

    torchrun's store may live through all restarts of the ranks (pytorch/pytorch#135712). Without the name, gloo, NCCL
    and the watchdog would read the addresses of dead ranks there. The restart count does not identify the start,
    because each node's agent has its own count. A rank may read the name of an earlier start, until rank 0 replaces it.
    """
    deadline = time.monotonic() + seconds
    if rank == 0:
        return dist.PrefixStore(_accept_ranks(store, size, identity, deadline), store)
    return dist.PrefixStore(_call_root(store, rank, identity, deadline), store)


def _accept_ranks(store: dist.Store, size: int, identity: Mapping[str, str], deadline: float) -> str:
    """Rank 0's part of store_of_this_start; returns the name of the start."""
    start, calls = f"start {secrets.token_hex(8)}", dict[int, list[str]]()
    missing = list(range(1, size))
    store.set("start", json.dumps([start, identity]))
    for _ in _until(deadline):
        for rank in missing:
            if store.check([f"{start}, rank {rank}"]):
                calls[rank] = _read(store, f"{start}, rank {rank}", str, str)
        missing = [rank for rank in missing if rank not in calls]
        refusal = next((difference for _, difference in calls.values() if difference), "")
        if refusal or not missing:
            store.set(f"{start}, answer", json.dumps([refusal, [number for number, _ in calls.values()]]))
            break
    else:
        ranks = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        raise TimeoutError(f"nothing from rank {ranks}")
    if not refusal:
        return start
    for _ in _until(time.monotonic() + REFUSAL_SECONDS):
        if store.add(f"{start}, refusals read", 0) >= len(calls):
            break
    raise UserError(refusal)


def _call_root(store: dist.Store, rank: int, identity: Mapping[str, str], deadline: float) -> str:
    """The part of the other ranks in store_of_this_start; returns the name of the start."""
    number, called, difference = secrets.token_hex(8), "", ""
    for _ in _until(deadline):
        start, expected = _read(store, "start", str, dict)
        if start != called:
            called, difference = start, describe_differences(rank, identity, expected)
            store.set(f"{start}, rank {rank}", json.dumps([number, difference]))
        if not store.check([f"{start}, answer"]):
            continue
        refusal, numbers = _read(store, f"{start}, answer", str, list)
        if number in numbers and not refusal:
            return start
        if number in numbers:
            store.add(f"{start}, refusals read", 1)
            # The other run's output should say so as well; rank 0 prints the line for its own run.
            raise LocalError(refusal) if refusal == difference else UserError(refusal)
    if difference:
        raise LocalError(difference)
    raise TimeoutError("no answer from rank 0")


def _read(store: dist.Store, key: str, *types: type) -> list[Any]:
    """The list of values of these types that another rank has written."""
    try:
        values = json.loads(store.get(key))
        if [type(value) for value in values] == [*types]:
            return values
    except (ValueError, TypeError, RecursionError):
        pass
    raise LocalError(f"the store holds something other than what a rank writes; {OTHER_PROGRAM}")


def _until(deadline: float) -> Iterator[None]:
    """Yields until the deadline, at first in short intervals."""
    pause = 0.01
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, MAX_PAUSE)
