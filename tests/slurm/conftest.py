"""A real Slurm of two nodes on this machine, started once for the tests that use it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import NODES, Cluster, free_ports

UNAVAILABLE = 69  # cluster.sh's exit code where the packages cannot be installed


def unavailable_reason() -> str | None:
    """The reason why this machine cannot run its own Slurm, or None."""
    if os.geteuid() != 0:
        return "a private Slurm needs root"
    if not Path("/etc/debian_version").exists() or shutil.which("apt-get") is None:
        return "a private Slurm needs Debian's packages"
    return None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    # Not in pytest's directory: slurm.conf allows no spaces in paths, and a socket's path must be short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = Cluster(folder / "cluster", free_ports(1 + NODES))
    # SIGTERM to pytest also stops the cluster.
    previous = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", 128 + signal.SIGTERM))
    try:
        up = cluster.script("up")
        if up.returncode == UNAVAILABLE:
            pytest.skip(next(line for line in up.stdout.splitlines() if line.startswith("cluster.sh:")))
        assert up.returncode == 0, up.stdout
        yield cluster
    finally:
        down = cluster.script("down")
        signal.signal(signal.SIGTERM, previous)
        assert down.returncode == 0, down.stdout
        shutil.rmtree(folder)
