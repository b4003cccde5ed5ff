"""A real Slurm of two nodes on this machine, started once for the tests that use it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from slurm_cluster import Cluster, Unavailable, private_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    # SIGTERM to pytest also stops the cluster.
    previous = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", 128 + signal.SIGTERM))
    try:
        with private_cluster() as cluster:
            yield cluster
    except Unavailable as reason:
        pytest.skip(str(reason))
    finally:
        signal.signal(signal.SIGTERM, previous)
