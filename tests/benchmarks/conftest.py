"""A fixture that the benchmarks' tests share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO

import pytest
from processes import run


@pytest.fixture
def run_forked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """Stands in for `run_group`: runs a real training on one rank, but forked, so that it need not import torch."""
    output = tmp_path_factory.mktemp("training") / "output"

    def run_group(
        command: Sequence[str], environment: Mapping[str, str], log: IO[bytes], limit: float | None, grace: float
    ) -> int:
        assert command[0] == sys.executable
        done = run(command[1:], output, environment=environment)
        log.write((done.stdout + done.stderr).encode())
        return done.returncode

    return run_group
