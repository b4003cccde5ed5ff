"""Provenance of a result: command, commit, versions, machines, and the data files of a training run."""

import platform
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from utils import STARTED, git_commit
from utils.distributed.launch import name_ranks
from utils.distributed.threads import usable_cpus
from utils.distributed.world import World
from utils.errors import UserError
from utils.files import sample_digest
from utils.volumes.opened import Volumes

DATE = "%Y-%m-%dT%H:%M:%S%z"
DIGEST = "sha256_of_samples"


def provenance(world: World) -> dict[str, Any]:
    """The record that is stored with every result. Every rank calls it."""
    return {
        "command": command(),
        "git_commit": git_commit(),
        "date": time.strftime(DATE, time.localtime(time.time() - (time.perf_counter() - STARTED))),
        "hostnames": world.hosts,
        "world_size": world.size,
        "launcher": world.launch.launcher,
        "device": device_name(world.device),
        "cpu_count": len(usable_cpus()),
        "cpu_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "h5py": h5py.__version__,
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        },
    }


def command() -> list[str]:
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)", cpus.read_text() if cpus.exists() else "", re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def data_record(volumes: Volumes, world: World) -> dict[str, dict[str, Any]]:
    """Path, size, modification time and digest of each file of a volume, by its config key. Every rank calls it.

    A resumed run notices by it other data under the same name. Raises UserError if the ranks see different files.
    Published data sets have checksums of their own. A file may be missing: the loader reports it if it needs the file.
    """
    with world.raise_together():
        record = {}
        for name, path in volumes.files():
            if path.is_file():
                status = path.stat()
                record[name] = {"path": str(path.resolve()), "bytes": status.st_size, DIGEST: sample_digest(path)}
                record[name]["modified"] = time.strftime(DATE, time.localtime(status.st_mtime))
    everywhere = world.gather_json({name: [file["bytes"], file[DIGEST]] for name, file in record.items()})
    for name, path in volumes.files():
        seen = {rank: files[name] for rank, files in enumerate(everywhere) if name in files}
        first = next(iter(seen), 0)
        others = [rank for rank, file in seen.items() if file != seen[first]]
        if others:
            change = _change(seen[first][0], seen[others[0]][0])
            fault = f"{name} {path} is another file on {name_ranks(others)} than on rank {first}: {change}"
            raise UserError(f"{fault}; use a path at which all nodes see the same file")
    return record


def data_changes(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each file whose content differs from the earlier record; it may have been moved or touched."""
    lines = []
    for name, record in now.items():
        earlier = before.get(name, {})
        if earlier.get(DIGEST, record[DIGEST]) != record[DIGEST]:
            change = _change(earlier["bytes"], record["bytes"])
            where = "" if earlier["path"] == record["path"] else f" of {earlier['path']}"
            lines.append(f"{name} {record['path']} differs from the data of the run that resumes: {change}{where}")
    return lines


def _change(before: int, now: int) -> str:
    """What differs between two files of these sizes."""
    return "other content" if before == now else f"{now} bytes instead of {before}"
