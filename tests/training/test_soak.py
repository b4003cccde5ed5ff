"""Wherever a training run is stopped, it ends with the bits of an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import END, SAVE, START, KillTest, PlannedKill, Unavailable, soak
from soak_random import random_run
from storm_growth import growth, measure


def test_three_kills(tmp_path: Path) -> None:
    """kill -9 of either rank, whose survivor ends without a signal, and of both, between two saves."""
    plan = [PlannedKill([1], steps=5), PlannedKill([0, 1], steps=7), PlannedKill([0], steps=4)]
    kills = KillTest(tmp_path, epochs=3, pictures=False).run("killed", plan)
    assert all(set(kill.victims) <= set(planned.victims) for kill, planned in zip(kills, plan, strict=True))


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    """At random moments, during the start, saves and the end phase too, of one rank or of both."""
    kills = soak(20, seed=5, folder=tmp_path)
    assert len(kills) == 20
    assert {START, SAVE, END} <= {kill.phase for kill in kills}
    assert {len(kill.victims) for kill in kills} == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("srun", marks=pytest.mark.slurm)])
def test_kills_under_a_launcher(tmp_path: Path, launcher: str) -> None:
    """torchrun restarts the ranks itself; srun ends the survivor on the other node."""
    try:
        assert len(soak(6, seed=4, folder=tmp_path, launcher=launcher)) == 6
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2002, 2005])  # one rank, two ranks
def test_random_stops_of_a_random_config(tmp_path: Path, seed: int) -> None:
    random_run(seed, tmp_path)


@pytest.mark.slow
def test_only_the_records_grow(tmp_path: Path) -> None:
    """8,100 steps, 9 evaluations and 108 checkpoints; about 60 bytes per step are usual, and vary by a few."""
    (samples,) = measure(8100, 1, tmp_path)
    found = growth(samples)
    assert found.steps == 6000
    assert found.bytes_per_step < 80, samples
    assert found.descriptors == found.threads == 0, samples
    assert max(found.records_per_step.values()) < 1000, samples
