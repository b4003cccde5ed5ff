"""Twenty kills: wherever a training is cut off, it ends with the bits of one left in peace."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import soak


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    """Of one rank or of all, in the midst of saves too; survivors end by themselves."""
    kills = soak(20, seed=5, folder=tmp_path)
    assert len(kills) == 20
    assert any(kill.inside_a_save for kill in kills)
    assert {len(kill.victims) for kill in kills} == {1, 2}
