"""Files brought into the page cache before training: crops are read in random order, which is slow from a disk.

A parallel file system gives a file several times faster from start to end than in crops, and the first epoch would be
the one to pay for the difference.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from utils.distributed.world import World
from utils.errors import UserError
from utils.progress import Progress

PROBES = 256
CACHED_ENOUGH = 0.99
BLOCK = 2**24  # bytes a read
PAGE = mmap.PAGESIZE
MADV_WILLNEED = 3
MADV_POPULATE_READ = 22  # of Linux 5.14; older kernels refuse it
MIB, GIB = 2**20, 2**30


def warm_page_cache(paths: Sequence[str], world: World) -> str:
    """Reads the files once a node, unless they are cached or do not fit; every rank calls it and waits.

    Returns what was done in words for the log, on other ranks than a node's first nothing. Give all files that
    training will read: they have to fit together.
    """
    told = ""
    with world.raise_together():
        if world.is_node_leader:
            told = _warm(list(dict.fromkeys(paths)), silent=not world.is_root)
    return told


def _warm(paths: list[str], silent: bool) -> str:
    sizes, cached = {}, set()
    for path in paths:
        with _one_line(path):
            sizes[path] = os.path.getsize(path)
            if (cached_fraction(path) or 0.0) >= CACHED_ENOUGH:
                cached.add(path)
    total, available = sum(sizes.values()), available_memory()
    if len(cached) < len(paths) and available is not None and total > available:
        names = " and ".join(os.path.basename(path) for path in paths)
        fit = "does not fit" if len(paths) == 1 else "do not fit"
        return f"{names}: {_size(total)} {fit} the {_size(available)} of memory available: read as crops are needed"
    told = []
    for path in paths:
        name, size = os.path.basename(path), _size(sizes[path])
        if path in cached:
            told.append(f"{name}: {size} already in the page cache")
            continue
        with _one_line(path):
            seconds = _read(path, sizes[path], silent)
        speed = sizes[path] / 1e9 / max(seconds, 1e-9)
        told.append(f"{name}: {size} read into the page cache in {seconds:.2f} s ({speed:.1f} GB/s)")
    return "; ".join(told)


def _read(path: str, size: int, silent: bool) -> float:
    """Reads a file from start to end, and throws it away; returns the seconds that took."""
    buffer, done = memoryview(bytearray(BLOCK)), 0
    name = f"reading {os.path.basename(path)} into the page cache"
    started = time.perf_counter()
    with open(path, "rb", buffering=0) as file, Progress(name, size // MIB, "MiB", silent=silent) as progress:
        while count := file.readinto(buffer):
            done += count
            progress.advance(done // MIB - progress.done)
    return time.perf_counter() - started


@contextlib.contextmanager
def _one_line(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def map_cached_pages(paths: Sequence[str], arrays: Iterable[np.ndarray]) -> None:
    """Enters mapped arrays into this process's page table, if their files are cached; does nothing where it cannot.

    Else the first epoch would pay for that, with a fault for every few pages.
    """
    if all((cached_fraction(path) or 0.0) >= CACHED_ENOUGH for path in paths):
        for array in arrays:
            _advise(array, MADV_POPULATE_READ)


def read_ahead(array: np.ndarray) -> None:
    """Has the kernel begin to read a mapped array that will be wanted soon, in large pieces; a hint, and no more."""
    _advise(array, MADV_WILLNEED)


def _advise(array: np.ndarray, advice: int) -> None:
    start = array.ctypes.data // PAGE * PAGE
    size = array.ctypes.data + array.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)


def cached_fraction(path: str) -> float | None:
    """The part of a file that lies in the page cache, from a sample of its pages; None where that cannot be seen."""
    if not hasattr(os, "preadv") or not hasattr(os, "RWF_NOWAIT"):
        return None
    pages = -(-os.path.getsize(path) // PAGE)
    probes = min(PROBES, pages)
    # Looking at a page that is not there makes the kernel fetch it: each time others are looked at.
    draw = random.Random()
    found, buffers = 0, [bytearray(1)]
    with open(path, "rb", buffering=0) as file:
        for probe in range(probes):
            place = int((probe + draw.random()) * pages / probes)
            try:
                found += os.preadv(file.fileno(), buffers, place * PAGE, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    return None
                raise
    return found / probes if probes else 1.0


def drop_from_page_cache(path: str) -> None:
    """Takes a file out of the page cache, for measurements; pages that a process has mapped stay. Linux alone."""
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())  # pages not yet written cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def available_memory(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that files may take in memory: what the machine has, and this process's control groups (version 2) allow.

    What is cached already counts as available. None where there is no telling.
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
    """This process's group and those above it."""
    try:
        lines = Path(proc, "self", "cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    top = Path(cgroups)
    return [top / own, *(top / parent for parent in Path(own).parents)]


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"
