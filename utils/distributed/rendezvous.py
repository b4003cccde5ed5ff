"""Rendezvous: the ranks of a run find each other in a store, before there is a process group."""

import hashlib
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
from typing import Any

import torch
import torch.distributed as dist

from utils.config.sections import TimeoutsConfig
from utils.distributed.devices import choose_device, device_identity
from utils.distributed.launch import Launch, name_ranks
from utils.errors import EXIT_USER_ERROR, LocalError, UserError, record_exit_code

LIMIT_SECONDS = 3.0  # after the rendezvous timeout, for errors that are more precise than "no answer"
REFUSAL_SECONDS = 2.0  # for which rank 0, whose process may hold the store, waits until the others have read a refusal
AGENT_SECONDS = 30.0  # for a connection to the store of torchrun
PAUSE = 0.05  # seconds between two queries; longer with more ranks
waiting = threading.Event()  # is set while this rank waits for the others; a stop signal then ends the process


# The store of the ranks of this start; the device of this rank; whether any ranks share a GPU.
Meeting = tuple[dist.Store, torch.device, bool]
# The name of the start; the reason why these ranks cannot train together, if any; whether any ranks share a GPU.
Answer = tuple[str, str, bool]
Call = dict[str, str]  # of a rank: its process and device, what differs from rank 0, and its error


def rendezvous(device: str, launch: Launch, timeouts: TimeoutsConfig, identity: Mapping[str, str]) -> Meeting:
    """Connects to the ranks of the run with this identity; raises UserError if that is not possible."""
    address = f"{launch.master_addr}:{launch.master_port}"
    failure = f"rank {launch.rank} of {launch.world_size} could not connect to the other ranks at {address}"
    remedy = "check MASTER_ADDR, that no other run uses MASTER_PORT, and that all ranks were started"
    # Store operations block without a time limit if the process at that address does not answer.
    limit = threading.Timer(timeouts.rendezvous + LIMIT_SECONDS, _give_up, [f"{failure} (no answer); {remedy}"])
    limit.daemon = True
    limit.start()
    waiting.set()
    try:
        socket.getaddrinfo(launch.master_addr, None)  # the store would query an unknown name until the timeout
        store = open_store(launch, timeouts.rendezvous)
        # Texts that are the same on all ranks of a run: those of the entry script, and those of the process.
        command = {"command line": text_digest(shlex.join(sys.argv[1:])), "number of ranks": str(launch.world_size)}
        return meet(store, device, launch, timeouts.rendezvous, {**identity, **command})
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
    is_torchruns, listener = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", None
    holds_store = launch.rank == 0 and not is_torchruns
    if launch.master_addr in ("localhost", "127.0.0.1"):
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if holds_store:
            listener = socket.create_server((launch.master_addr, launch.master_port)).detach()
    try:
        return dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            is_master=holds_store,
            # torchrun listens before it starts the ranks; without a listener it has ended.
            timeout=timedelta(seconds=min(seconds, AGENT_SECONDS) if is_torchruns else seconds),
            wait_for_workers=False,  # `meet` waits for them
            master_listen_fd=listener,
        )
    except RuntimeError as error:  # PyTorch 2.8 raises no DistError if another program answers
        raise ConnectionError(str(error)) from None


def meet(store: dist.Store, device: str, launch: Launch, seconds: float, identity: Mapping[str, str]) -> Meeting:
    """Returns when all ranks are connected; raises UserError if they belong to several runs or their devices differ.

    Rank 0 publishes a random name for the start, with its identity. The other ranks call under that name, each with its
    device, and what differs from rank 0. Rank 0 answers all at once, but no second process with the same rank.

    torchrun's store may live through all restarts of the ranks (pytorch/pytorch#135712). Without the name, the ranks
    would read the addresses of dead ranks there. The restart count does not identify the start, because each node's
    agent has its own count. A rank may read the name of an earlier start, until rank 0 replaces it.
    """
    chosen = torch.device("cpu")
    call = {"process": secrets.token_hex(8), "difference": "", "error": "", "device": ""}
    try:
        chosen = choose_device(device, launch.local_rank)
        call["device"] = device_identity(chosen)
    except UserError as error:
        call["error"] = str(error)
    exchange = _call_root if launch.rank else _answer_calls
    start, refusal, shared = exchange(store, launch, seconds, identity, call)
    if refusal:
        time.sleep(0 if launch.rank else REFUSAL_SECONDS)
        raise UserError(refusal)
    return dist.PrefixStore(start, store), chosen, shared


def _answer_calls(store: dist.Store, launch: Launch, seconds: float, identity: Mapping[str, str], call: Call) -> Answer:
    """Rank 0's part of `meet`."""
    start = secrets.token_hex(8)
    keys = {f"{start}, rank {rank}": rank for rank in range(1, launch.world_size)}
    store.set("start", json.dumps([start, identity]))
    try:
        store.wait(list(keys), timedelta(seconds=seconds))
    except dist.DistStoreError:
        missing = [rank for key, rank in keys.items() if not store.check([key])]
        raise TimeoutError(f"nothing from {name_ranks(missing)}") from None
    calls = [call, *map(json.loads, store.multi_get(list(keys)))]
    gpus = [call["device"] for call in calls if call["device"] != "cpu"]
    answer = start, find_refusal(calls), len(set(gpus)) < len(gpus)
    store.set(f"{start}, answer", json.dumps(answer))
    return answer


def _call_root(store: dist.Store, launch: Launch, seconds: float, identity: Mapping[str, str], call: Call) -> Answer:
    """The part of the other ranks in `meet`."""
    deadline, called, is_first, answer = time.monotonic() + seconds, "", False, None
    while answer is None and time.monotonic() < deadline:
        start, expected = json.loads(store.get("start"))
        if start != called:
            called, call["difference"] = start, describe_differences(launch.rank, identity, expected)
            text = json.dumps(call)
            is_first = store.compare_set(f"{start}, rank {launch.rank}", "", text).decode() == text
        if is_first and store.check([f"{start}, answer"]):
            answer = json.loads(store.get(f"{start}, answer"))
        else:
            time.sleep(PAUSE * (1 + launch.world_size / 256))
    if call["difference"]:
        # The other run's output should say so as well; rank 0 prints the line for its own run.
        raise LocalError(call["difference"])
    if answer is None:
        raise TimeoutError("no answer from rank 0")
    return answer


def find_refusal(calls: Sequence[Mapping[str, Any]]) -> str:
    """The reason why these ranks cannot train together, if any: other runs, or devices that differ in kind."""
    for rank, call in enumerate(calls):
        if call["difference"]:
            return call["difference"]
        if call["error"]:
            return call["error"] if all(call["error"] for call in calls) else f"rank {rank}: {call['error']}"
    kinds = [call["device"] == "cpu" for call in calls]
    if len(set(kinds)) > 1:
        rank = kinds.index(True)
        return (
            f"rank {rank} finds no CUDA device, but rank {kinds.index(False)} does; use --set device=cpu, or exclude "
            f"the node of rank {rank}"
        )
    return ""


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def describe_differences(rank: int, actual: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """One line that names what differs between a rank and rank 0; empty if nothing does."""
    names = [name for name in {**expected, **actual} if actual.get(name, "") != expected.get(name, "")]
    if not names:
        return ""
    pairs = [f"{name} ({actual.get(name) or 'none'}, not {expected.get(name) or 'none'})" for name in names]
    return (
        f"rank {rank} belongs to another run than rank 0: it differs in {', '.join(pairs)}; start all ranks with the "
        "same command in the same directory, and give each of several runs a MASTER_PORT of its own"
    )
