"""Wherever a training run is stopped, it ends with the bits of an uninterrupted one."""

from pathlib import Path

import pytest
from soak import END, FLAGS, SAVE, START, PlannedStop, StopTest, Unavailable, random_run, soak


def test_three_kills(tmp_path: Path) -> None:
    """kill -9 of either rank, whose survivor ends without a signal, and of both, between two saves."""
    test = StopTest(tmp_path, [*FLAGS, "--num_epochs=8", "--set=log_interval=1", "--set=report_pictures=false"])
    # A fifth of the lines is a few steps after the start; many steps are left, so that no kill comes too late.
    kills = test.run("killed", [PlannedStop(victims, lines=test.lines // 5) for victims in ([1], [0, 1], [0])])
    assert [kill.victims for kill in kills] == [{1}, {0, 1}, {0}]


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    """At random moments, during the start, saves and the end phase, too, of one rank or of both."""
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
@pytest.mark.parametrize("seed", [2003, 2005])  # one rank, two ranks
def test_random_stops_of_a_random_config(tmp_path: Path, seed: int) -> None:
    random_run(seed, tmp_path)
