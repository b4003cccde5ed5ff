"""A real Slurm of two nodes on this machine, brought up once for the tests that ask for it."""

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


def why_not() -> str | None:
    """The reason why this machine cannot have a Slurm of its own."""
    if os.geteuid() != 0:
        return "a Slurm of its own needs root"
    if not Path("/etc/debian_version").exists() or shutil.which("apt-get") is None:
        return "a Slurm of its own needs Debian's packages"
    return None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    # slurm.conf takes no paths with spaces, and a socket's path must be short: not under pytest's own directory.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = Cluster(folder / "cluster", free_ports(1 + NODES))
    # A pytest that is asked to end takes the cluster down, too.
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
