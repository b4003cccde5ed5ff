"""Fixtures of the benchmarks' tests: quick processes instead of those that studies start."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import processes
import pytest

from benchmarks import common


@pytest.fixture
def run_forked(tmp_path: Path) -> Callable[..., str]:
    """Stands in for `failure_of`: runs a real training on one rank, but forked, so that it need not import torch."""

    def failure_of(command: Sequence[str], log: Path, limit: float) -> str:
        assert command[0] == sys.executable
        done = processes.run(command[1:], tmp_path / "output")
        return common.failure_reason(done.returncode, done.stdout + done.stderr)

    return failure_of


@pytest.fixture
def run_or_draw(run_forked: Callable[..., str], volume_file: Callable[..., Path]) -> Callable[..., str]:
    """As `run_forked`, but a simulation writes random values with the attributes of a simulated box."""
    pytest.importorskip("colossus", reason="colossus, which simulations need, is not installed")
    from simulation import simulate

    def failure_of(command: Sequence[str], *rest: Any, **options: Any) -> str:
        if "simulation" not in command:
            return run_forked(command, *rest, **options)
        options = simulate.parse(command[3:])
        Path(options.output).parent.mkdir(exist_ok=True, parents=True)
        path = volume_file(options.output, options.grid, seed=options.seed + round(100 * options.redshift))
        with h5py.File(path, "r+") as file:
            file.attrs.update(simulate.file_attributes(options))
        return ""

    return failure_of
