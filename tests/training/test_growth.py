"""A long training does not need more and more memory, file descriptors or threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from storm_growth import growth, measure


@pytest.mark.slow
def test_only_the_records_grow(tmp_path: Path) -> None:
    """4,100 steps in 41 epochs with 5 evaluations and 54 checkpoints; finds a leak of 100 bytes per step."""
    (samples,) = measure(4100, 1, tmp_path)
    found = growth(samples)
    assert found.steps == 2000
    assert found.bytes_per_step < 80, samples
    assert found.descriptors == found.threads == 0, samples
    assert max(found.records_per_step.values()) < 1000, samples
