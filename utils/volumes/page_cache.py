"""Reads files into the page cache before training: from start to end is several times faster than crop by crop."""

import contextlib
import ctypes
import logging
import mmap
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from utils.distributed.threads import control_groups
from utils.distributed.world import World
from utils.files import GIB, copy_file

log = logging.getLogger(__name__)

MADV_WILLNEED = 3
MADV_POPULATE_READ = 22  # since Linux 5.14; older kernels refuse it


def warm_page_cache(paths: Sequence[str], arrays: Iterable[np.ndarray], world: World) -> None:
    """Reads the files into the page cache, once per node, if they fit in memory together; every rank calls it."""
    paths = list(dict.fromkeys(paths))  # training and validation may read the same file
    names = ", ".join(map(os.path.basename, paths))
    with world.raise_together():
        size, available = sum(os.path.getsize(path) for path in paths), available_memory()
        text = f"{names}: {size / GIB:.2f} GiB"
        if world.is_node_leader and size > available:
            log.info("%s do not fit in the %.2f GiB of free memory; crops are read from disk", text, available / GIB)
        elif world.is_node_leader:
            started = time.perf_counter()
            for path in paths:
                copy_file(path, os.devnull, f"reading {os.path.basename(path)} into the page cache")
            log.info("%s read into the page cache in %.2f s", text, time.perf_counter() - started)
    if size <= available:
        for array in arrays:  # otherwise the first epoch would take a page fault for every few pages
            advise(array, MADV_POPULATE_READ)


def advise(array: np.ndarray, advice: int) -> None:
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    # A view with the channels last has gaps between its values.
    steps = sum((side - 1) * stride for side, stride in zip(array.shape, array.strides, strict=True))
    size = array.ctypes.data + steps + array.itemsize - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory available on this machine and in this process's control groups, with files that are cached."""
    available = _meminfo(proc, "MemAvailable")
    for group in control_groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or not visible in this container
            limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
            files = re.findall(r"^(?:in)?active_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
            available = min(available, max(0, limit - used + sum(map(int, files))))
    return available


def memory_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that a process on this machine and in this process's control groups can have, if no other uses any."""
    limit = _meminfo(proc, "MemTotal")
    for group in control_groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):
            limit = min(limit, int((group / "memory.max").read_text()))
    return limit


def _meminfo(proc: Path, name: str) -> int:
    meminfo = proc / "meminfo"
    match = re.search(rf"^{name}: *(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    return 1024 * int(match[1]) if match else sys.maxsize
