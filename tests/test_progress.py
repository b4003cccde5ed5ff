"""Tests of utils.progress where stderr is not a terminal: lines at limited intervals, none on silent ranks."""

from __future__ import annotations

from utils import progress
from utils.progress import Progress, format_duration


def test_durations_are_formatted_as_hours_minutes_seconds() -> None:
    for seconds, text in ((0, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (-5, "0:00")):
        assert format_duration(seconds) == text


def test_lines_are_rate_limited_and_show_the_time_left(monkeypatch, capsys) -> None:
    clock = iter(range(0, 1000, 4))  # each call returns four seconds more
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with Progress("reading", total=10, unit="slabs") as shown:
        for _ in range(10):
            shown.advance(note="x")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("reading: 10 slabs in ")
    assert lines[0].startswith("reading: 3/10 slabs, 0:")
    assert lines[0].endswith("left x")


def test_other_ranks_and_live_only_progress_print_no_lines(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    for rank, live_only, printed in (("0", False, True), ("0", True, False), ("1", False, False)):
        monkeypatch.setenv("RANK", rank)
        with Progress("reading", total=3, live_only=live_only) as shown:
            shown.advance()
        assert bool(capsys.readouterr().err) is printed
