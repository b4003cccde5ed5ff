"""Stops of real runs whose last checkpoint cannot be saved: exit code 2 with the reason, not 75."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disks import fill, small_disk
from log_lines import messages
from processes import Completed, Program, free_port, rank_variables
from trainings import directory

from utils.training.checkpoint import FOLDER, saved_steps

# One epoch that never ends, and a line for each step: nothing is saved but at the stop.
ENDLESS = ["--set=Nsamples=1000000", "--set=report_baselines=false", "--set=log_interval=1"]


class Training:
    """Processes of one run, each stopped by SIGTERM."""

    def __init__(self, expdir: Path, output: Path, flags: list[str], ranks: int) -> None:
        self.folder = directory(expdir, ranks) / FOLDER
        self._flags, self._output, self._ranks = [*flags, *ENDLESS, f"--set=expdir={expdir}"], output, ranks
        self._starts = 0

    @contextmanager
    def running(self, *flags: str) -> Iterator[list[Program]]:
        """The ranks of a training run that has made a step."""
        port, self._starts = free_port(), self._starts + 1
        programs = [
            Program(
                ["train.py", "--config=test", *self._flags, *flags],
                self._output / f"start {self._starts} rank {rank}",
                environment={**os.environ, **(rank_variables(rank, self._ranks, port) if self._ranks > 1 else {})},
            )
            for rank in range(self._ranks)
        ]
        try:
            programs[0].wait_for(r"epoch 1/2, step \d+/")
            yield programs
        finally:
            for program in programs:
                program.kill()


def stop(programs: list[Program]) -> list[Completed]:
    """The ends of the ranks after a signal to the last one."""
    programs[-1].signal(signal.SIGTERM)
    return [program.end() for program in programs]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_that_cannot_save_is_not_reported_as_saved(tmp_path: Path, data_flags: list[str], ranks: int) -> None:
    """A fixed bug: on a full disk a stopped job exited with 75, and was requeued up to 100 times to do the same again.

    First without any checkpoint, then, on one rank, with an earlier one.
    """
    with small_disk(tmp_path / "disk", "4m") as disk:
        training = Training(disk, tmp_path, data_flags, ranks)
        for _ in range(3 - ranks):
            earlier = saved_steps(training.folder)
            with training.running() as programs:
                filler = fill(disk)
                ends = stop(programs)
            assert [end.returncode for end in ends] == [2] * ranks, ends[0].stderr
            (error,) = [line for end in ends for line in end.stderr.splitlines() if line.startswith("error")]
            assert error.startswith("error: " if ranks == 1 else "error: rank 0: ")
            assert f" is not in {training.folder}: No space left on device; run the command again" in error
            (warning,) = [line for line in messages(ends[0].stderr, "WARNING") if "checkpoint" in line]
            assert warning.endswith(": No space left on device; earlier ones are kept"), "the run does not continue"
            assert saved_steps(training.folder) == earlier
            filler.unlink()
            with training.running() as programs:
                resumed = f"Resuming from {training.folder}" in programs[0].text
                ends = stop(programs)
            assert resumed == bool(earlier)
            assert [end.returncode for end in ends] == [75] * ranks, ends[0].stderr
            assert saved_steps(training.folder)[0] > max(earlier, default=0)
