"""PyTorch's flight recorder: the last collectives of each rank, written to the run directory after a hang."""

import contextlib
import faulthandler
from pathlib import Path

from utils.files import atomic_write

RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}  # the second one in CUDA builds only
RECORD = "flight_recorder_rank{}.json"
LIMIT_SECONDS = 10.0


def write_collectives(folder: Path, rank: int) -> None:
    """Writes the last collectives of this rank to a file; ends the process if that takes too long.

    PyTorch waits for the recorder's lock without releasing the GIL, and a stuck NCCL or CUDA call may hold that lock.
    No Python thread runs then, and faulthandler's timer ends the process.
    """
    import torch.distributed as dist  # takes a second; other users of this module may not need it
    from torch._C import _distributed_c10d as c10d

    if not dist.is_initialized():
        return
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=2)
    dumps = {name: getattr(c10d, function, None) for name, function in RECORDERS.items()}
    with contextlib.suppress(OSError, RuntimeError):
        parts = [f'"{name}": '.encode() + dump() for name, dump in dumps.items() if dump is not None]
        with atomic_write([folder / RECORD.format(rank)]) as (partial,):
            partial.write_bytes(b"{" + b",\n".join(parts) + b"}\n")
    faulthandler.cancel_dump_traceback_later()
