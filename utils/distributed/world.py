"""The ranks of a run: process group, and the collectives that the program uses."""

import contextlib
import gc
import io
import json
import math
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from utils.config.sections import TimeoutsConfig
from utils.distributed.devices import choose_device, synchronize
from utils.distributed.heartbeat import Heartbeat
from utils.distributed.launch import Launch, read_launch
from utils.distributed.network import configure, logged_network
from utils.distributed.rendezvous import rendezvous
from utils.distributed.threads import set_threads
from utils.errors import LocalError, Stopped, UserError, as_local_error
from utils.launchers import launched_rank
from utils.log import once_per_job, warn_once

log = once_per_job(__name__)

DEFAULT_TIMEOUTS = TimeoutsConfig()
BROADCAST_BYTES = 2**26
SLOW = 2.0  # times the median over the ranks
COLLECTIVE_SECONDS = 1800.0  # the limit of one collective operation; usually the heartbeat ends a run earlier


class World:
    """All ranks of a run, as seen by one of them. With a single rank every method is local."""

    def __init__(self, launch: Launch, device: torch.device, heartbeat: Heartbeat | None = None) -> None:
        self.launch, self.device = launch, device
        self.rank, self.local_rank, self.size = launch.rank, launch.local_rank, launch.world_size
        self.is_root = self.rank == 0
        self.is_node_leader = self.local_rank == 0  # the one rank per node that stages files and makes shared copies
        self.heartbeat = heartbeat or Heartbeat(DEFAULT_TIMEOUTS, Launch("single process"))  # which is not started
        self.pulse = self.heartbeat.pulse

    @cached_property
    def hosts(self) -> list[str]:
        """The host of each rank; `connect` gathers them."""
        return self.gather_json(socket.gethostname())

    def barrier(self) -> None:
        self.gather_json(None)  # unlike dist.barrier it uses the CPU group, and so needs no device

    def gather_json(self, value: Any) -> list[Any]:
        """[value of rank 0, value of rank 1, …] on every rank; for small JSON values, outside the training loop.

        Tuples become lists. torch's object collectives would unpickle, and so execute, data of any process there.
        """
        text = json.dumps(value).encode()
        sizes = self.gather(torch.tensor(len(text)))
        padded = bytearray(text.ljust(int(sizes.max())))  # JSON ignores spaces at the end
        return [json.loads(row.numpy().tobytes()) for row in self.gather(torch.frombuffer(padded, dtype=torch.uint8))]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stacks one tensor per rank: [...] -> [world, ...]."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0: host tensors, numbers and texts in dicts, lists and tuples; reading runs no code."""
        if self.size == 1:
            return value
        file = io.BytesIO()
        if self.is_root:
            torch.save(value, file)
        length = torch.tensor(file.tell())
        dist.broadcast(length, src=0)
        file = file if self.is_root else io.BytesIO(bytes(int(length)))
        device = self.device if length > BROADCAST_BYTES else torch.device("cpu")  # NCCL connects with the first tensor
        for part in torch.frombuffer(file.getbuffer(), dtype=torch.uint8).split(BROADCAST_BYTES):
            sent = part.to(device)
            dist.broadcast(sent, src=0)
            part.copy_(sent)
        return value if self.is_root else torch.load(file, map_location="cpu", weights_only=True)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def exchange(self, values: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends parts of a flat tensor, of the sizes `sent` by rank; returns the ranks' parts, in their order."""
        if self.size == 1:
            return values
        if values.is_complex():  # gloo has no complex numbers
            sent, received = ([2 * size for size in sizes] for sizes in (sent, received))
            result = self.exchange(torch.view_as_real(values).flatten(), sent, received)
            return torch.view_as_complex(result.view(-1, 2))
        result = values.new_empty(sum(received))
        dist.all_to_all_single(result, values, [*received], [*sent])
        return result

    def shift(self, tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
        """The tensor, of the same shape, of the rank `by` before this one; the last rank is before rank 0."""
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.rank + by) % self.size] = received[(self.rank - by) % self.size] = tensor.numel()
        values = self.exchange(tensor.flatten().contiguous(), sent, received)
        return torch.empty_like(tensor).copy_(values.view(tensor.shape))

    def check_fabric(self, limit: float) -> None:
        """Times matrix products and transfers between neighbors, for `limit` seconds at most; logs ranks that are slow.

        Every rank calls it. Of a rank's two links the better one counts: a slow neighbor has two slow ones.
        """
        side, count = (4096, 2**24) if self.device.type == "cuda" else (512, 2**18)
        matrix, values = torch.ones(side, side, device=self.device), torch.ones(count, device=self.device)
        actions = (lambda: matrix @ matrix, lambda: self.shift(values), lambda: self.shift(values, -1))
        least, end = [math.inf] * len(actions), time.perf_counter() + limit / 4
        while math.inf in least or not any(self.gather_json(time.perf_counter() > end)):
            for index, action in enumerate(actions):
                self.barrier()
                started = time.perf_counter()
                action()
                synchronize(self.device)
                least[index] = min(least[index], time.perf_counter() - started)
        product, before, after = torch.tensor(self.gather_json(least)).T
        links = torch.maximum(before.roll(-1), after)  # of each rank and the next one
        for what, times in (("matrix products", product), ("transfers", torch.minimum(links, links.roll(1)))):
            ratios = [*zip(self.hosts, (times / times.median()).tolist(), strict=True)]
            slow = [f"{rank} ({host}, {x:.1f} times the median)" for rank, (host, x) in enumerate(ratios) if x > SLOW]
            if slow:
                log.warning("Fabric: %s are slow on rank %s; try sbatch --exclude=HOST", what, ", ".join(slow))
        speed = values.nbytes / 1e9 / links.median()
        log.info("Fabric: %.3g s per matrix product, %.3g GB/s between neighbors", product.median(), speed)

    @contextlib.contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raises on all ranks what is raised on one of them, with the same message, so that no rank waits for it.

        Every rank enters and leaves the block. A collective in it is safe only if nothing before it can fail.
        """
        error: BaseException | None = None
        try:
            yield
        except Exception as caught:
            error = as_local_error(caught)
        line = None if error is None else str(error) if isinstance(error, UserError) else repr(error)
        lines = self.gather_json(line)
        failed = [rank for rank, line in enumerate(lines) if line is not None]
        if error is not None and not isinstance(error, UserError):
            raise error
        error = None  # its frames hold this one, and perhaps device memory, for the time of a reference cycle
        if failed:
            where = "" if len(failed) == self.size else f"rank {failed[0]}: "
            raise UserError(where + lines[failed[0]])


@contextlib.contextmanager
def connect(
    device: str = "auto",
    timeouts: TimeoutsConfig = DEFAULT_TIMEOUTS,
    identity: Mapping[str, str] = MappingProxyType({}),
    nccl: bool = False,
) -> Iterator[World]:
    """The world for the duration of a run; joins the process group if there are several ranks.

    `identity` holds short texts that are the same on all ranks of a run, and differ from those of other runs. Gloo
    carries all tensors; with `nccl`, NCCL carries those on CUDA devices, unless ranks share a GPU.
    """
    launch = read_launch()
    if launch.world_size == 1:
        heartbeat = Heartbeat(timeouts, launch)
        with _beating(heartbeat):
            world = World(launch, choose_device(device, launch.local_rank), heartbeat)
            set_threads(world.rank, world.hosts, world.gather_json)
            yield world
        return
    node = configure(launch)  # before CUDA and NCCL read their variables
    store, chosen, shared = rendezvous(device, launch, timeouts, identity)
    heartbeat = Heartbeat(timeouts, launch, store)
    with _beating(heartbeat):
        limit = timedelta(seconds=COLLECTIVE_SECONDS)
        store.set_timeout(limit)
        # NCCL refuses two ranks on one GPU; gloo copies their tensors through the host.
        nccl = nccl and chosen.type == "cuda" and not shared
        # The kernels of a step would otherwise delay an exchange that is to overlap with them; see GraphStep's stream.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        # Gloo connects two ranks when they first exchange something, instead of all ranks at the start.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        if not nccl:
            _lower_debug_level()
        # Gloo's own limit is that of a collective.
        heartbeat.diagnoser.hang_seconds = min(timeouts.hang or timeouts.rendezvous, timeouts.rendezvous)
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        with logged_network(node, launch.rank) if nccl else contextlib.nullcontext():
            dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=limit)
            world = World(launch, chosen, heartbeat)
            set_threads(world.rank, world.hosts, world.gather_json)
            if nccl and node.several:
                dist.all_reduce(torch.zeros((), device=chosen))  # NCCL connects with the first tensor
        heartbeat.diagnoser.hang_seconds = timeouts.hang
        with _leaving_group():
            yield world


def _lower_debug_level() -> None:
    """PyTorch's DistributedDataParallel ends ranks by SIGSEGV if gloo carries its tensors at the level DETAIL."""
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        if launched_rank() == 0:
            warn_once("TORCH_DISTRIBUTED_DEBUG=DETAIL ends ranks by SIGSEGV in DistributedDataParallel: using INFO")
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
        dist.set_debug_level_from_env()


@contextlib.contextmanager
def _leaving_group() -> Iterator[None]:
    """Destroys the process group if all ranks leave together; after the loss of a rank that could block forever."""
    together = True
    try:
        yield
    except BaseException as end:
        together = isinstance(end, UserError | Stopped) and not isinstance(end, LocalError)
        if together:
            traceback.clear_frames(end.__traceback__)  # they hold the step
        raise
    finally:
        if together:
            # NCCL waits for the destruction of every CUDA graph with its kernels; reference cycles may hold the step.
            gc.collect()
            dist.destroy_process_group()


@contextlib.contextmanager
def _beating(heartbeat: Heartbeat) -> Iterator[None]:
    """Runs the heartbeat, and reports how this rank ends. Does not return if another rank is the cause."""
    heartbeat.start()
    try:
        yield
    except BaseException as caught:
        error = as_local_error(caught)
        heartbeat.failed(error)
        raise error  # noqa: B904
    heartbeat.leave()
