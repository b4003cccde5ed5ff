"""Out-of-memory errors of PyTorch and numpy as one line with the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from utils.errors import LocalError

TRAINING_REMEDY = (
    "lower local_batch_size, raise accumulation_steps, or, if the loader is resident, use --data_loader_config=lowmem"
)


@contextlib.contextmanager
def out_of_memory_for_users(remedy: str = TRAINING_REMEDY) -> Iterator[None]:
    """Converts PyTorch's out-of-memory error, which is a paragraph long, to a LocalError in one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0].strip()
        raise LocalError(f"no device memory left ({reason}); {remedy}") from error
    except (MemoryError, RuntimeError) as error:  # of numpy, and of torch on the CPU
        _, _, reason = str(error).partition("DefaultCPUAllocator: ")
        if not reason and not isinstance(error, MemoryError):
            raise
        raise LocalError(f"no memory left ({(reason or str(error)).split('. ')[0].strip()}); {remedy}") from error
