"""The ranks of a run: rendezvous, devices, process group, and the collectives that the program uses."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from utils.config.schema import TimeoutsConfig
from utils.distributed.launch import Launch, read_launch
from utils.distributed.watchdog import ProcessGroupWatchdog, Watchdog
from utils.errors import EXIT_USER_ERROR, LocalError, Stopped, UserError

DEFAULT_TIMEOUTS = TimeoutsConfig()


class Node(NamedTuple):
    """The ranks on one host, and the one of them that reads data for all."""

    ranks: tuple[int, ...]
    source: int
    group: dist.ProcessGroup | None  # None on a node with a single rank


@dataclass(frozen=True)
class World:
    """All ranks of a run, as seen by one of them. With a single rank every method is local."""

    launch: Launch
    device: torch.device
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(0), compare=False)  # the default is not started

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def local_rank(self) -> int:
        return self.launch.local_rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    @property
    def is_root(self) -> bool:
        return self.rank == 0

    @property
    def is_node_leader(self) -> bool:
        """True on the one rank per node that stages files and makes shared copies."""
        return self.local_rank == 0

    @functools.cached_property
    def node(self) -> Node:
        """This rank's node. The first access is collective, because it creates the process groups of the nodes."""
        places = self.gather_objects((socket.gethostname(), self.local_rank))
        nodes: dict[str, list[int]] = {}
        for rank, (host, _) in enumerate(places):
            nodes.setdefault(host, []).append(rank)
        for ranks in nodes.values():
            group: Any = None
            if len(ranks) > 1:
                # On a single node use the default group: another one would cost device memory.
                group = dist.group.WORLD if len(ranks) == self.size else dist.new_group(ranks)
            if self.rank in ranks:
                source = next((rank for rank in ranks if places[rank][1] == 0), ranks[0])
                node = Node(tuple(ranks), source, group)
        return node

    def broadcast_on_node(self, tensor: torch.Tensor) -> None:
        """Overwrites the tensor on every rank of the node with that of the node's source."""
        if self.node.group is not None:
            dist.broadcast(tensor, self.node.source, group=self.node.group)

    def barrier(self) -> None:
        if self.size > 1:
            # An object collective uses the CPU group: unlike dist.barrier it needs no device.
            self.gather_objects(None)

    def gather_objects(self, value: Any) -> list[Any]:
        """[value of rank 0, value of rank 1, …] on every rank; for small objects, outside the training loop."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stacks one tensor per rank: [...] -> [world, ...]."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, on every rank."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raises on all ranks what is raised on one of them, with the same message, so that no rank waits for it.

        Every rank enters and leaves the block. A collective inside the block is safe only if nothing before it in the
        block can fail.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        line = None if error is None else str(error) if isinstance(error, UserError) else repr(error)
        lines = self.gather_objects(line)
        failed = [rank for rank, line in enumerate(lines) if line is not None]
        if error is not None and not isinstance(error, UserError):
            raise error
        if failed:
            where = "" if len(failed) == self.size else f"rank {failed[0]}: "
            raise UserError(where + lines[failed[0]])


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank; `name` is auto, cpu or cuda."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "device is cuda, but PyTorch finds no CUDA device; use --set device=cpu (train.py) or --device cpu"
        )
    # Slurm's --gpus-per-task=1 shows each rank a single device, number 0, whatever its local rank.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


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


class RankDevice(NamedTuple):
    """The device of this rank, and whether another rank has the same one."""

    device: torch.device
    shared: bool


def choose_devices(name: str, launch: Launch, store: dist.Store) -> RankDevice:
    """Calls choose_device on all ranks, which have no process group yet; raises UserError if their kinds differ."""
    error = ""
    try:
        device = choose_device(name, launch.local_rank)
    except UserError as caught:
        device, error = torch.device("cpu"), str(caught)
    store.set(f"device of rank {launch.rank}", error or _identity(device))
    ranks = range(launch.world_size)
    answers = [answer.decode() for answer in store.multi_get([f"device of rank {rank}" for rank in ranks])]
    if store.add("devices read", 1) == launch.world_size:
        store.set("devices read by all", "")
    if launch.rank == 0:
        store.wait(["devices read by all"])  # rank 0's process may hold the store
    kinds = [answer.split(" ")[0] if answer.startswith(("cpu", "cuda ")) else answer for answer in answers]
    for rank, kind in enumerate(kinds):
        if kind not in ("cpu", "cuda"):
            raise UserError(kind if len(set(kinds)) == 1 else f"rank {rank}: {kind}")
    if len(set(kinds)) > 1:
        without, with_device = kinds.index("cpu"), kinds.index("cuda")
        raise UserError(
            f"rank {without} finds no CUDA device, but rank {with_device} does; use --set device=cpu, or exclude the "
            f"node of rank {without}"
        )
    return RankDevice(device, device.type == "cuda" and len(set(answers)) < len(answers))


def _identity(device: torch.device) -> str:
    """The kind of a device and the UUID of a GPU: its index depends on which GPUs a rank sees."""
    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"


@contextlib.contextmanager
def connect(device: str = "auto", timeouts: TimeoutsConfig = DEFAULT_TIMEOUTS) -> Iterator[World]:
    """The world for the duration of a run; joins the process group if there are several ranks.

    Gloo carries CPU tensors and objects, NCCL carries CUDA tensors; gloo carries all if ranks share a GPU.
    """
    launch = read_launch()
    if launch.world_size == 1:
        watchdog = Watchdog(timeouts.hang)
        with _watched(watchdog):
            yield World(launch, choose_device(device, launch.local_rank), watchdog)
        return
    # Rank 0 holds at least four connections per rank: gloo's, and two each to the store and from the watchdog.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    store, chosen, watchdog = _rendezvous(device, launch, timeouts)
    with _watched(watchdog):
        # Otherwise the rendezvous timeout, after which the watchdog names an absent rank, would hold here as well.
        store.set_timeout(timedelta(seconds=timeouts.collective))
        # NCCL refuses two ranks on one GPU; gloo copies their tensors through the host.
        on_gpus = chosen.device.type == "cuda" and not chosen.shared
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeouts.collective),
        )
        with _leaving_group():
            yield World(launch, chosen.device, watchdog)


def _rendezvous(
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


@contextlib.contextmanager
def _leaving_group() -> Iterator[None]:
    """Destroys the process group if all ranks leave together; after the loss of a rank that could block forever."""
    try:
        yield
    except LocalError:
        raise
    except (UserError, Stopped) as end:
        # NCCL waits for the destruction of every CUDA graph with its kernels, and the error's frames hold the step.
        traceback.clear_frames(end.__traceback__)
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextlib.contextmanager
def _watched(watchdog: Watchdog) -> Iterator[None]:
    """Runs the watchdog, and reports to it how this rank ends. Does not return if another rank is the cause."""
    watchdog.start()
    try:
        yield
    except BaseException as error:
        watchdog.failed(error)
        raise
    watchdog.leave()


def hostnames(world: World) -> list[str]:
    """The host of each rank, in rank order."""
    return world.gather_objects(socket.gethostname())
