"""Stops of real runs whose last checkpoint cannot be saved: exit code 2 with the reason, not 75."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from disks import fill, small_disk
from log_lines import messages
from processes import Completed, Program, free_port, rank_variables
from trainings import directory

from utils.training.checkpoint import FOLDER, saved_steps

# One epoch that never ends, and a line for each step: nothing is saved but at the stop.
ENDLESS = ["--set=Nsamples=1000000", "--set=report_baselines=false", "--set=log_interval=1"]


def stopped(folder: Path, output: Path, flags: list[str], ranks: int, is_full: bool) -> list[Completed]:
    """The ends of the ranks of a run that has made a step; a signal to the last one stops them."""
    port = free_port()
    programs = [
        Program(
            ["train.py", "--config=test", *flags, *ENDLESS, f"--set=expdir={folder}"],
            output / f"{is_full} rank {rank}",
            environment={**os.environ, **(rank_variables(rank, ranks, port) if ranks > 1 else {})},
        )
        for rank in range(ranks)
    ]
    programs[0].wait_for(r"epoch 1/2, step \d+/")
    filler = fill(folder) if is_full else None
    programs[-1].signal(signal.SIGTERM)
    ends = [program.end() for program in programs]
    if filler:
        filler.unlink()
    return ends


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_that_cannot_save_is_not_reported_as_saved(tmp_path: Path, data_flags: list[str], ranks: int) -> None:
    """A fixed bug: on a full disk a stopped job exited with 75, and was requeued again and again."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        folder = directory(disk, ranks) / FOLDER
        ends = stopped(disk, tmp_path, data_flags, ranks, is_full=True)
        assert [end.returncode for end in ends] == [2] * ranks, ends[0].stderr
        (error,) = [line for end in ends for line in end.stderr.splitlines() if line.startswith("error")]
        assert error.startswith("error: " if ranks == 1 else "error: rank 0: ")
        assert f" is not in {folder}: No space left on device; run the command again" in error
        assert sum("earlier ones are kept" in line for line in messages(ends[0].stderr, "WARNING")) == 1
        assert saved_steps(folder) == []
        ends = stopped(disk, tmp_path, data_flags, ranks, is_full=False)
        assert [end.returncode for end in ends] == [75] * ranks, ends[0].stderr
        assert len(saved_steps(folder)) == 1
