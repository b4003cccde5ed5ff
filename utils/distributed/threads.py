"""PyTorch's CPU threads per rank: this rank's share of the cores, unless the user has set a number."""

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Cores = tuple[str, Sequence[int], float]  # host, physical cores that a rank may use, limit of CPU seconds per second


def set_threads(rank: int, hosts: Sequence[str], gather: Callable[[Any], list[Any]]) -> None:
    """Sets PyTorch's number of threads; `gather` returns the values of all ranks. Every rank calls it."""
    everywhere = gather((physical_cores(), cpu_limit()))
    if not is_set_by_user(os.environ):
        torch.set_num_threads(share([(host, *cores) for host, cores in zip(hosts, everywhere, strict=True)], rank))


def is_set_by_user(env: Mapping[str, str]) -> bool:
    """True if the user has set a number that PyTorch reads; OMP_NUM_THREADS=1 may be torchrun's, for several ranks."""
    set_by_torchrun = "TORCHELASTIC_RUN_ID" in env and env.get("LOCAL_WORLD_SIZE") != "1"
    ignored = ("", "1") if set_by_torchrun else ("",)
    return env.get("OMP_NUM_THREADS", "") not in ignored or bool(env.get("MKL_NUM_THREADS"))


def share(everywhere: Sequence[Cores], rank: int) -> int:
    """The cores of `rank`, at least one; a core that several ranks may use is divided among them."""
    host, cores, limit = everywhere[rank]
    neighbors = [place for place in everywhere if place[0] == host]
    users = Counter(core for _, usable, _ in neighbors for core in usable)
    cores_of_rank = sum(1 / users[core] for core in cores)
    return max(1, math.floor(min(cores_of_rank, limit / len(neighbors)) + 1e-6))


def usable_cpus() -> list[int]:
    """Hardware threads that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(system: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Cores that this process may use; each is the number of its first hardware thread."""
    cores = set()
    for cpu in usable_cpus():
        try:
            siblings = (system / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()  # such as 3,67 or 6-7
            cores.add(int(re.split("[,-]", siblings)[0]))
        except (OSError, ValueError):
            cores.add(cpu)
    return sorted(cores)


def cpu_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """CPU seconds per second that the control groups of this process (version 2) allow, for example in a container."""
    limit = math.inf
    for group in control_groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):  # no file; no limit ("max 100000")
            quota, period = (int(word) for word in (group / "cpu.max").read_text().split())
            limit = min(limit, quota / period)
    return limit


def control_groups(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """The control group of version 2 that this process is in, and those above it, which also limit it."""
    listing = proc / "self" / "cgroup"
    match = re.search(r"^0::/*(.*)$", listing.read_text(), re.MULTILINE) if listing.exists() else None
    group = cgroups / match[1] if match else cgroups
    return [path for path in (group, *group.parents) if path.is_relative_to(cgroups)]
