"""Who this process is among the ranks, which device it has, and how the ranks talk.

The launcher is found from the environment: torchrun (or `export_DDP_vars.sh`) sets RANK, LOCAL_RANK
and WORLD_SIZE; inside an `srun` step Slurm's own variables serve; otherwise there is one rank.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
import resource
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from utils.distributed.watchdog import Watchdog, join
from utils.errors import LocalError, Stopped, UserError

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process."""

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """The rank environment, whole; raises LocalError where it is half set or contradicts itself."""
    env = os.environ if environment is None else environment
    if any(name in env for name in TORCHRUN_VARIABLES):
        missing = [name for name in TORCHRUN_VARIABLES if name not in env]
        if missing:
            raise LocalError(
                f"the rank environment is half set: {', '.join(missing)} missing; start through torchrun or srun, "
                f"or unset {', '.join(name for name in TORCHRUN_VARIABLES if name in env)}"
            )
        rank, local_rank, size = (_integer(env, name) for name in TORCHRUN_VARIABLES)
        if size > 1 and not env.get("MASTER_ADDR"):
            raise LocalError("the rank environment is half set: MASTER_ADDR missing; set it to the first node's name")
        launch = Launch(
            "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment",
            rank,
            local_rank,
            size,
            env.get("MASTER_ADDR") or "127.0.0.1",
            _integer(env, "MASTER_PORT", DEFAULT_PORT),
        )
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        # Only inside a step: a batch script, too, carries SLURM_PROCID=0 and SLURM_NTASKS, but has no peers.
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
        # Ranks of one node meet without its name, which may not resolve inside a container.
        one_node = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1"
        launch = Launch(
            "slurm",
            _integer(env, "SLURM_PROCID"),
            _integer(env, "SLURM_LOCALID"),
            _integer(env, "SLURM_STEP_NUM_TASKS", _integer(env, "SLURM_NTASKS", 1)),
            env.get("MASTER_ADDR") or ("" if one_node else first_host(nodes)) or "127.0.0.1",
            # Two jobs may share a node: the port comes from the job's number.
            _integer(env, "MASTER_PORT", 15000 + (_integer(env, "SLURM_JOB_ID", 0) * 7) % 15000),
        )
    else:
        return Launch("single process")
    if not 0 <= launch.rank < launch.world_size or not 0 <= launch.local_rank < launch.world_size:
        raise LocalError(
            f"the rank environment contradicts itself: rank {launch.rank} (local {launch.local_rank}) of "
            f"{launch.world_size}; start through torchrun or srun"
        )
    if not 0 < launch.master_port < 2**16:
        raise LocalError(f"MASTER_PORT must be between 1 and 65535, not {launch.master_port}")
    return launch


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise LocalError(f"the rank environment is half set: {name} missing; start through torchrun or srun")
        return default
    try:
        return int(text)
    except ValueError:
        raise LocalError(f"{name} must be a whole number, not {text!r}; start through torchrun or srun") from None


def restarted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher has started this very job before; both kinds count how often."""
    env = os.environ if environment is None else environment
    return any(env.get(name, "0") not in ("", "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def first_host(nodelist: str) -> str:
    """First name in Slurm's compressed list: 'nid[001004-001007,2]' -> 'nid001004', 'r[1-2]n[3,5]-ib' -> 'r1n3-ib'."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group()) if first else ""


class Node(NamedTuple):
    """The ranks that share a host, and the one of them that reads for all."""

    ranks: tuple[int, ...]
    source: int
    group: dist.ProcessGroup | None  # None where the rank is alone


@dataclass(frozen=True)
class World:
    """All ranks of this run as one of them sees them; with a single rank every method is local."""

    launch: Launch
    device: torch.device
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(0), compare=False)  # one that is not started sees nothing

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
        """One rank a node does what is done once a node (staging, the shared copy)."""
        return self.local_rank == 0

    @functools.cached_property
    def node(self) -> Node:
        """This rank's node. All ranks ask for it together the first time, since that makes the nodes' groups."""
        places = self.gather_objects((socket.gethostname(), self.local_rank))
        nodes: dict[str, list[int]] = {}
        for rank, (host, _) in enumerate(places):
            nodes.setdefault(host, []).append(rank)
        for ranks in nodes.values():
            group: Any = None
            if len(ranks) > 1:
                # On a single node the run's own group serves: another would cost device memory.
                group = dist.group.WORLD if len(ranks) == self.size else dist.new_group(ranks)
            if self.rank in ranks:
                source = next((rank for rank in ranks if places[rank][1] == 0), ranks[0])
                node = Node(tuple(ranks), source, group)
        return node

    def broadcast_on_node(self, tensor: torch.Tensor) -> None:
        """Overwrites the tensor with the one of the node's source, on every rank of the node."""
        if self.node.group is not None:
            dist.broadcast(tensor, self.node.source, group=self.node.group)

    def barrier(self) -> None:
        if self.size > 1:
            # An object collective goes over the CPU group: unlike dist.barrier it needs no device.
            self.gather_objects(None)

    def gather_objects(self, value: Any) -> list[Any]:
        """[value of rank 0, value of rank 1, …] on every rank; for small things, outside the loop."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stacks one tensor of every rank: [...] -> [world, ...]."""
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
        """What fails on one rank fails on all of them, with the same line, instead of leaving the rest waiting.

        Every rank enters and leaves the block; collectives inside it are only safe in blocks that cannot
        fail before them.
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
            "device is cuda, but torch sees no CUDA device; use --set device=cpu, or --device cpu where that is a flag"
        )
    # Slurm's --gpus-per-task=1 shows each rank one device, number 0, whatever its local rank.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def of_this_start(store: dist.Store, rank: int, size: int, seconds: float) -> dist.Store:
    """A part of the store that no earlier start of the same job has written to, once all ranks are there.

    The store of a torchrun may live as long as its agent, through all its restarts (pytorch/pytorch#135712), and what
    gloo, NCCL and the watch find there would be the addresses of ranks that are gone. The count of restarts is no help,
    as each agent has its own. So every rank calls with a number of its own, and rank 0 answers with that number.
    """
    mine, deadline, pause = secrets.token_hex(8), time.monotonic() + seconds, 0.01
    others = range(1, size)
    if rank:
        store.set(f"call of rank {rank}", mine)
    answered = [""] * (size - 1)
    while time.monotonic() < deadline:
        if rank:
            caller, _, start = store.get(f"answer to rank {rank}").decode().partition(" ")
            if caller == mine:
                store.add(f"heard in start {start}", 1)
                return dist.PrefixStore(f"start {start}", store)
        else:
            calls = [call.decode() for call in store.multi_get([f"call of rank {other}" for other in others])]
            for other, call, before in zip(others, calls, answered, strict=True):
                if call != before:  # one of an earlier start is answered in vain
                    store.set(f"answer to rank {other}", f"{call} {mine}")
            answered = calls
            if store.add(f"heard in start {mine}", 0) == size - 1:
                return dist.PrefixStore(f"start {mine}", store)
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)
    raise TimeoutError("not all ranks have come")


class Chosen(NamedTuple):
    """This rank's device, and whether another rank has the same one."""

    device: torch.device
    shared: bool


def choose_together(name: str, launch: Launch, store: dist.Store) -> Chosen:
    """choose_device for ranks that have met but have no process group yet: all have the same kind, or all fail."""
    error = ""
    try:
        device = choose_device(name, launch.local_rank)
    except UserError as caught:
        device, error = torch.device("cpu"), str(caught)
    store.set(f"device of rank {launch.rank}", error or _identity(device))
    ranks = range(launch.world_size)
    told = [answer.decode() for answer in store.multi_get([f"device of rank {rank}" for rank in ranks])]
    if store.add("devices read", 1) == launch.world_size:
        store.set("devices read by all", "")
    if launch.rank == 0:
        store.wait(["devices read by all"])  # the store ends with rank 0
    kinds = [answer.split(" ")[0] if answer.startswith(("cpu", "cuda ")) else answer for answer in told]
    for rank, kind in enumerate(kinds):
        if kind not in ("cpu", "cuda"):
            raise UserError(kind if len(set(kinds)) == 1 else f"rank {rank}: {kind}")
    if len(set(kinds)) > 1:
        raise UserError(
            f"rank {kinds.index('cpu')} sees no CUDA device, rank {kinds.index('cuda')} does; use --set device=cpu, "
            f"or leave the first one's node out"
        )
    return Chosen(device, device.type == "cuda" and len(set(told)) < len(told))


def _identity(device: torch.device) -> str:
    """The kind of a device and, of a GPU, which one it is in the world: its number depends on what a rank sees."""
    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"


@contextlib.contextmanager
def connect(
    device: str = "auto", rendezvous_seconds: float = 600, collective_seconds: float = 1800, hang_seconds: float = 600
) -> Iterator[World]:
    """The world for the length of a run; joins the process group where there are several ranks.

    Gloo carries CPU tensors and objects, NCCL carries CUDA tensors; gloo carries all where ranks share a GPU.
    """
    launch = read_launch()
    # Rank 0 holds three connections to every rank: the store's, gloo's and the watch's.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if launch.world_size == 1:
        watch = join(0, 1, launch.master_addr, None, hang_seconds)
        with _watched(watch):
            yield World(launch, choose_device(device, launch.local_rank), watch)
        return
    os.environ.update(MASTER_ADDR=launch.master_addr, MASTER_PORT=str(launch.master_port))
    address = f"{launch.master_addr}:{launch.master_port}"
    try:
        # The rendezvous would go on asking for an unknown name until its time is up.
        socket.getaddrinfo(launch.master_addr, None)
    except OSError as error:
        raise LocalError(
            f"cannot resolve MASTER_ADDR of {address} ({error.strerror}); set it to the first node"
        ) from None
    try:
        store, rank, size = next(
            dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timedelta(seconds=rendezvous_seconds))
        )
        if "TORCHELASTIC_RUN_ID" in os.environ:
            store = of_this_start(store, rank, size, rendezvous_seconds)
        chosen = choose_together(device, launch, store)
    except (dist.DistError, TimeoutError) as error:
        raise LocalError(
            f"rank {launch.rank} of {launch.world_size} could not meet the others at {address} "
            f"({str(error).splitlines()[0]}); check MASTER_ADDR, MASTER_PORT and that all ranks were started"
        ) from None
    watch = join(rank, size, launch.master_addr, store, hang_seconds, rendezvous_seconds)
    with _watched(watch):
        # NCCL refuses two ranks on one GPU; gloo takes their tensors through the host.
        on_gpus = chosen.device.type == "cuda" and not chosen.shared
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=collective_seconds),
        )
        with _leaving_group():
            yield World(launch, chosen.device, watch)


@contextlib.contextmanager
def _leaving_group() -> Iterator[None]:
    """Leaves the process group where all ranks end together; where one is gone, that could take for ever."""
    try:
        yield
    except LocalError:
        raise
    except (UserError, Stopped) as end:
        # NCCL waits for the end of every CUDA graph that holds its kernels, and the error's frames hold the step.
        traceback.clear_frames(end.__traceback__)
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextlib.contextmanager
def _watched(watch: Watchdog) -> Iterator[None]:
    """This rank ends in order, or says what it ends of; where another rank is the cause, it does not come back."""
    try:
        yield
    except BaseException as error:
        if not watch.failed(error):
            os._exit(watch.exit_code)
        raise
    watch.leave()


def run_script(main: Callable[[], None]) -> None:
    """Runs an entry script's `main`; one of several ranks then leaves without taking Python down around it.

    Threads of a process group that DistributedDataParallel has used live on after it is destroyed. Some 1 of 60 runs
    (PyTorch 2.13, gloo) was aborted while the interpreter ended, with one of them asking for it; and a batch system
    takes a training that is done for one that has failed.
    """
    code = 0
    try:
        main()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    if _alone():
        sys.exit(code)
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _alone() -> bool:
    try:
        return read_launch().world_size == 1
    except UserError:
        return True


def hostnames(world: World) -> list[str]:
    """The node of each rank, in rank order."""
    return world.gather_objects(socket.gethostname())
