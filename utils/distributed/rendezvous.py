"""Rendezvous: the ranks of a run find each other in a store, before there is a process group."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from utils.config.sections import TimeoutsConfig
from utils.distributed.devices import choose_device, device_identity
from utils.distributed.launch import Launch
from utils.errors import EXIT_USER_ERROR, LocalError, UserError, record_exit_code

LIMIT_SECONDS = 3.0  # after the rendezvous timeout, for errors that are more precise than "no answer"
REFUSAL_SECONDS = 3.0  # for which rank 0, whose process may hold the store, waits until the others have read a refusal
PAUSE = 0.05  # seconds between two queries; longer with more ranks
TOP = Path(__file__).parents[2]
waiting = threading.Event()  # is set while this rank waits for the others; a stop signal then ends the process


class Meeting(NamedTuple):
    """The ranks of this start: their store, the device of this rank, and whether any ranks share a GPU."""

    store: dist.Store
    device: torch.device
    shared: bool


def rendezvous(device: str, launch: Launch, timeouts: TimeoutsConfig, identity: Mapping[str, str]) -> Meeting:
    """Connects to the ranks of the run with this identity; raises UserError if that is not possible."""
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
        return meet(store, device, launch, timeouts.rendezvous, identify(launch, identity))
    except (dist.DistError, OSError) as error:
        raise LocalError(f"{failure} ({str(error).splitlines()[0]}); {remedy}") from None
    finally:
        waiting.clear()
        limit.cancel()


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
            wait_for_workers=False,  # `meet` waits for them
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


# --- one exchange with rank 0 ----------------------------------------------------------------------------------------


def meet(store: dist.Store, device: str, launch: Launch, seconds: float, identity: Mapping[str, str]) -> Meeting:
    """Returns when rank 0 has accepted all ranks; raises UserError if they belong to several runs.

    Rank 0 publishes a random name for the start, with its identity. The other ranks call under that name, each with a
    random number, its device, and what differs from rank 0. Rank 0 answers each number: a second process with the same
    rank, or one that comes later, gets no answer.

    torchrun's store may live through all restarts of the ranks (pytorch/pytorch#135712). Without the name, the ranks
    would read the addresses of dead ranks there. The restart count does not identify the start, because each node's
    agent has its own count. A rank may read the name of an earlier start, until rank 0 replaces it.
    """
    chosen, call = torch.device("cpu"), {"number": secrets.token_hex(8), "difference": "", "error": "", "device": ""}
    try:
        chosen = choose_device(device, launch.local_rank)
        call["device"] = device_identity(chosen)
    except UserError as error:
        call["error"] = str(error)
    take_part = _answer_calls if launch.rank == 0 else _call_root
    start, shared = take_part(store, launch, seconds, identity, call)
    return Meeting(dist.PrefixStore(start, store), chosen, shared)


def _answer_calls(
    store: dist.Store, launch: Launch, seconds: float, identity: Mapping[str, str], call: dict[str, str]
) -> tuple[str, bool]:
    """Rank 0's part of `meet`: the name of the start, and whether ranks share a GPU."""
    start, ranks = f"start {secrets.token_hex(8)}", range(1, launch.world_size)
    keys = [f"{start}, rank {rank}" for rank in ranks]
    store.set("start", json.dumps([start, identity]))
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistStoreError:
        missing = [str(rank) for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        raise TimeoutError(f"nothing from rank {', '.join(missing[:8])}{', …' * (len(missing) > 8)}") from None
    calls = [call, *map(json.loads, store.multi_get(keys))]
    refusal, gpus = find_refusal(calls), [call["device"] for call in calls if call["device"] != "cpu"]
    shared = len(set(gpus)) < len(gpus)
    answers = [json.dumps([call["number"], refusal, shared]) for call in calls[1:]]
    keys = [f"{start}, answer {rank}" for rank in ranks]
    store.multi_set(keys, answers)  # type: ignore[attr-defined] # missing in PyTorch's annotations
    if not refusal:
        return start, shared
    deadline = time.monotonic() + REFUSAL_SECONDS
    while store.add(f"{start}, refusals read", 0) < len(ranks) and time.monotonic() < deadline:
        time.sleep(PAUSE)
    raise UserError(refusal)


def _call_root(
    store: dist.Store, launch: Launch, seconds: float, identity: Mapping[str, str], call: dict[str, str]
) -> tuple[str, bool]:
    """The part of the other ranks in `meet`: the name of the start, and whether ranks share a GPU."""
    deadline, called = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        start, expected = json.loads(store.get("start"))
        if start != called:
            called, call["difference"] = start, describe_differences(launch.rank, identity, expected)
            store.set(f"{start}, rank {launch.rank}", json.dumps(call))
        if store.check([f"{start}, answer {launch.rank}"]):
            number, refusal, shared = json.loads(store.get(f"{start}, answer {launch.rank}"))
            if number == call["number"] and not refusal:
                return start, shared
            if number == call["number"]:
                store.add(f"{start}, refusals read", 1)
                # The other run's output should say so as well; rank 0 prints the line for its own run.
                raise LocalError(refusal) if refusal == call["difference"] else UserError(refusal)
        time.sleep(PAUSE * (1 + launch.world_size / 256))
    if call["difference"]:
        raise LocalError(call["difference"])
    raise TimeoutError("no answer from rank 0")


def find_refusal(calls: Sequence[Mapping[str, Any]]) -> str:
    """The reason why these ranks cannot train together, if any: other runs, or devices that differ in kind."""
    differences = [call["difference"] for call in calls if call["difference"]]
    if differences:
        return differences[0]
    errors = [call["error"] for call in calls]
    if any(errors):
        rank = next(rank for rank, error in enumerate(errors) if error)
        return errors[rank] if len(set(errors)) == 1 else f"rank {rank}: {errors[rank]}"
    without = [rank for rank, call in enumerate(calls) if call["device"] == "cpu"]
    if 0 < len(without) < len(calls):
        rank = next(rank for rank in range(len(calls)) if rank not in without)
        return (
            f"rank {without[0]} finds no CUDA device, but rank {rank} does; use --set device=cpu, or exclude the node "
            f"of rank {without[0]}"
        )
    return ""


# --- the identity of a run -------------------------------------------------------------------------------------------


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def identify(launch: Launch, known: Mapping[str, str]) -> dict[str, str]:
    """Short texts that are the same on all ranks of a run: `known` by the entry script, and those of the process."""
    return {
        **known,
        "command line": digest(shlex.join(sys.argv[1:])),
        "program": program_digest(),
        "job": launch.job,
        "number of ranks": str(launch.world_size),
    }


def program_digest() -> str:
    """Digest of the program's source files. It does not call git, which many ranks would do at the same time."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    # Editors create hidden files next to those that they edit, also links to nowhere.
    paths = sorted(path for package in ("networks", "utils") for path in (TOP / package).rglob("[!.]*.py"))
    files = {str(path.relative_to(TOP)): path.read_bytes() for path in paths}
    if script.is_file():
        files["script"] = script.read_bytes()
    return digest("".join(f"{name}\0{hashlib.sha256(data).hexdigest()}\n" for name, data in files.items()))


def describe_differences(rank: int, actual: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """One line that names what differs between a rank and rank 0; empty if nothing does."""
    names = [name for name in {**expected, **actual} if actual.get(name, "") != expected.get(name, "")]
    if not names:
        return ""
    pairs = [f"{name} ({actual.get(name) or 'none'}, not {expected.get(name) or 'none'})" for name in names]
    return (
        f"rank {rank} belongs to another run than rank 0: it differs in {', '.join(pairs)}; start all ranks with the "
        "same command and program in the same directory, and give each of several runs a MASTER_PORT of its own"
    )
