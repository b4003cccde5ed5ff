"""The control groups of this process, which limit its memory and its CPU time."""

from __future__ import annotations

import re
from pathlib import Path


def control_groups(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """The control group of version 2 that this process is in, and those above it, which also limit it."""
    listing = proc / "self" / "cgroup"
    match = re.search(r"^0::/*(.*)$", listing.read_text(), re.MULTILINE) if listing.exists() else None
    group = cgroups / match[1] if match else cgroups
    return [path for path in (group, *group.parents) if path.is_relative_to(cgroups)]
