"""Reads files into the page cache before training, because crops are read in random order, which is slow from a disk.

A parallel file system reads a file from start to end several times faster than in crops. Without this the first epoch
would be that much slower.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from utils.distributed.world import World
from utils.errors import os_errors_for_users
from utils.files import GIB, MIB
from utils.progress import Progress

PROBES = 256
CACHED_ENOUGH = 0.99
BLOCK = 2**24  # bytes per read
PAGE = mmap.PAGESIZE
MADV_WILLNEED = 3
MADV_POPULATE_READ = 22  # since Linux 5.14; older kernels refuse it


def warm_page_cache(paths: Sequence[str], world: World) -> str:
    """Reads the files once per node unless they are cached or do not fit in memory; every rank calls it and waits.

    Returns a line for the log on the first rank of each node, and an empty string on the others. Pass all files that
    training reads, since they must fit together.
    """
    note = ""
    with world.raise_together():
        if world.is_node_leader:
            note = _warm(list(dict.fromkeys(paths)))
    return note


def _warm(paths: list[str]) -> str:
    sizes, cached = {}, set()
    for path in paths:
        with os_errors_for_users(f"cannot read {path}"):
            sizes[path] = os.path.getsize(path)
            if (cached_fraction(path) or 0.0) >= CACHED_ENOUGH:
                cached.add(path)
    total, available = sum(sizes.values()), available_memory()
    if len(cached) < len(paths) and available is not None and total > available:
        names = " and ".join(os.path.basename(path) for path in paths)
        fit = "does not fit" if len(paths) == 1 else "do not fit"
        return f"{names}: {_size(total)} {fit} in the {_size(available)} of available memory; crops are read from disk"
    notes = []
    for path in paths:
        name, size = os.path.basename(path), _size(sizes[path])
        if path in cached:
            notes.append(f"{name}: {size} already in the page cache")
            continue
        with os_errors_for_users(f"cannot read {path}"):
            seconds = _read(path, sizes[path])
        speed = sizes[path] / 1e9 / max(seconds, 1e-9)
        notes.append(f"{name}: {size} read into the page cache in {seconds:.2f} s ({speed:.1f} GB/s)")
    return "; ".join(notes)


def _read(path: str, size: int) -> float:
    """Reads a file from start to end and discards the data; returns the seconds it took."""
    buffer, done = memoryview(bytearray(BLOCK)), 0
    name = f"reading {os.path.basename(path)} into the page cache"
    started = time.perf_counter()
    with open(path, "rb", buffering=0) as file, Progress(name, size // MIB, "MiB") as progress:
        while count := file.readinto(buffer):
            done += count
            progress.advance(done // MIB - progress.done)
    return time.perf_counter() - started


def map_cached_pages(paths: Sequence[str], arrays: Iterable[np.ndarray]) -> None:
    """Enters mapped arrays into this process's page table if their files are cached and the kernel supports it.

    Otherwise the first epoch would take a page fault for every few pages.
    """
    if all((cached_fraction(path) or 0.0) >= CACHED_ENOUGH for path in paths):
        for array in arrays:
            _advise(array, MADV_POPULATE_READ)


def read_ahead(array: np.ndarray) -> None:
    """Hints to the kernel that a mapped array will be read soon, so that it reads large pieces ahead."""
    _advise(array, MADV_WILLNEED)


def _advise(array: np.ndarray, advice: int) -> None:
    start = array.ctypes.data // PAGE * PAGE
    size = array.ctypes.data + array.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def cached_fraction(path: str) -> float | None:
    """Fraction of a file that is in the page cache, from a sample of its pages; None if the system cannot report it."""
    if not hasattr(os, "preadv") or not hasattr(os, "RWF_NOWAIT"):
        return None
    pages = -(-os.path.getsize(path) // PAGE)
    probes = min(PROBES, pages)
    # Probing an uncached page makes the kernel fetch it, so each call probes other pages.
    generator = random.Random()
    found, buffers = 0, [bytearray(1)]
    with open(path, "rb", buffering=0) as file:
        for probe in range(probes):
            page = int((probe + generator.random()) * pages / probes)
            try:
                found += os.preadv(file.fileno(), buffers, page * PAGE, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    return None
                raise
    return found / probes if probes else 1.0


def drop_from_page_cache(path: str) -> None:
    """Drops a file from the page cache, for measurements; pages that a process has mapped stay. Linux only."""
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())  # pages not yet written cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def available_memory(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """Bytes of memory available to the machine and to this process's control groups (version 2); None if unknown.

    Cached files count as available.
    """
    try:
        meminfo = Path(proc, "meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in meminfo)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    for group in _control_groups(proc, cgroups):
        try:
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used -= int(parts["active_file"]) + int(parts["inactive_file"])
        except (OSError, KeyError, ValueError):
            continue  # no limit ("max"), or no such group in this container
        available = min(available, max(limit - used, 0))
    return available


def _control_groups(proc: str, cgroups: str) -> list[Path]:
    """This process's control group and its parents."""
    try:
        lines = Path(proc, "self", "cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    top = Path(cgroups)
    return [top / own, *(top / parent for parent in Path(own).parents)]


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
