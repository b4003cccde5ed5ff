"""Provenance of a result: command, commit, versions, machines."""

from __future__ import annotations

import logging
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from utils import git_commit
from utils.distributed.threads import usable_cpus
from utils.distributed.world import World
from utils.files import read_json

log = logging.getLogger(__name__)


def provenance(world: World) -> dict[str, Any]:
    """The record that is stored with every result. Every rank calls it."""
    hosts = world.gather_json(socket.gethostname())
    return {
        "command": command(),
        "git_commit": git_commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hostnames": hosts,
        "world_size": world.size,
        "launcher": world.launch.launcher,
        "device": device_name(world.device),
        "cpu_count": len(usable_cpus()),
        "cpu_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": versions(),
    }


def command() -> list[str]:
    """The command line of this process."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def read_provenance(path: Path) -> dict[str, Any]:
    """The record in a provenance.json; with a warning an empty one, if the file is missing or damaged."""
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        log.warning("Cannot read %s: %s; the earlier provenance is lost", path, error)
        return {}


def versions() -> dict[str, str]:
    """Versions of Python, PyTorch and the libraries that results depend on."""
    import h5py
    import numpy as np

    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "h5py": h5py.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(cudnn),
    }


def device_name(device: torch.device) -> str:
    """The model of a GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else platform.processor() or platform.machine()
