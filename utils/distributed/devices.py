"""The device of each rank: its own GPU, or the CPU on all ranks; errors about its memory."""

import contextlib
import logging
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from utils.errors import LocalError, UserError

log = logging.getLogger(__name__)

CACHE_VARIABLE = "TRITON_CACHE_DIR"
TRAINING_REMEDY = (
    "lower local_batch_size, raise accumulation_steps, or, if the loader is resident, use --data_loader_config=lowmem"
)


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
    use_writable_cache()
    return device


def use_writable_cache() -> None:
    """Replaces a directory for Triton's cache that cannot be written by a temporary one."""
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="triton_")
        log.warning("%s; Triton's cache is %s", error, os.environ[CACHE_VARIABLE])


def cache_directory() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".triton" / "cache")


def device_identity(device: torch.device) -> str:
    """`cpu`, or the UUID of a GPU: its index depends on which GPUs a rank sees."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_state(device: torch.device) -> list[torch.Tensor]:
    """State of torch's generators on the host and on the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextlib.contextmanager
def random_numbers(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Context with seeded global generators of torch, Python and NumPy, from which users' networks may draw."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for seeds in (torch.manual_seed, random.seed, np.random.seed):
            seeds(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def tf32_products(wanted: bool) -> Iterator[None]:
    """Context in which products of matrices on a GPU use TF32 only if `wanted` and if the process allows it."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = before and wanted
    try:
        yield
    finally:
        matmul.allow_tf32 = before


@contextlib.contextmanager
def out_of_memory_for_users(remedy: str = TRAINING_REMEDY) -> Iterator[None]:
    """Converts PyTorch's out-of-memory error, which is a paragraph long, to a LocalError in one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0].strip()
        raise LocalError(f"no device memory left ({reason}); {remedy}") from error
    except (MemoryError, RuntimeError) as error:  # of numpy, and of torch on the CPU
        if isinstance(error.__context__, KeyboardInterrupt):  # an interrupted allocation, not a full memory
            raise error.__context__ from None
        _, _, reason = str(error).partition("DefaultCPUAllocator: ")
        if not reason and not isinstance(error, MemoryError):
            raise
        raise LocalError(f"no memory left ({(reason or str(error)).split('. ')[0].strip()}); {remedy}") from error
