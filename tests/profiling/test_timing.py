"""Tests of utils.profiling.timing."""

from __future__ import annotations

import torch

from utils.profiling.timing import peak_caveat, repeat

CPU = torch.device("cpu")


def test_number_of_calls_fits_into_the_given_time_within_its_limits() -> None:
    calls = []
    assert len(repeat(lambda: calls.append(1), CPU, seconds=0.0)) == 3
    assert len(calls) == 5, "two more calls as a warm-up and to estimate the duration"
    assert len(repeat(lambda: None, CPU, seconds=10.0, most=7)) == 7


def test_a_share_of_the_peak_above_one_has_a_caveat() -> None:
    assert peak_caveat(0.3, None, 1.0) == peak_caveat() == ""
    assert peak_caveat(0.3, 1.02).startswith("more than 100 %: the peak is that of one matrix product")
