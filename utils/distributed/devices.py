"""The device of each rank: its own GPU, or the CPU on all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from utils.distributed.launch import Launch
from utils.errors import UserError


def uses_gpus(name: str) -> bool:
    """True if ranks on machines like this one run on GPUs; `name` is auto, cpu or cuda."""
    return name == "cuda" or (name == "auto" and torch.cuda.is_available())


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank; `name` is auto, cpu or cuda."""
    if not uses_gpus(name):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "device is cuda, but PyTorch finds no CUDA device; use --set device=cpu (train.py) or --device cpu"
        )
    # Slurm's --gpus-per-task=1 shows each rank a single device, number 0, whatever its local rank.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


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
    answers = [
        answer.decode(errors="replace") for answer in store.multi_get([f"device of rank {rank}" for rank in ranks])
    ]
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
