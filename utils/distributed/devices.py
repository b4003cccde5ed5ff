"""The device of each rank: its own GPU, or the CPU on all ranks."""

from __future__ import annotations

import torch

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
    # Slurm's --gpus-per-task=1 shows each rank a single device, number 0, regardless of its local rank.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def device_identity(device: torch.device) -> str:
    """`cpu`, or the UUID of a GPU: its index depends on which GPUs a rank sees."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
