"""A stop of a real run whose last checkpoint cannot be saved: exit code 2 with the reason, not 75."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from disks import fill, small_disk
from processes import Program, free_port, rank_variables
from trainings import directory

from utils.training.checkpoint import FOLDER, saved_steps

# One epoch that never ends, and a line for each step: nothing is saved but at the stop.
ENDLESS = ["--set=Nsamples=1000000", "--set=report_baselines=false", "--set=log_interval=1"]


def test_a_stop_that_cannot_save_is_not_reported_as_saved(tmp_path: Path, data_flags: list[str]) -> None:
    """A fixed bug: on a full disk a stopped job exited with 75, and was requeued again and again."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        folder = directory(disk, 2) / FOLDER
        command = ["train.py", "--config=test", *data_flags, *ENDLESS, f"--set=expdir={disk}"]
        for is_full, code in ((True, 2), (False, 75)):
            port = free_port()
            programs = [
                Program(
                    command, tmp_path / f"{is_full} {rank}", environment={**os.environ, **rank_variables(rank, 2, port)}
                )
                for rank in range(2)
            ]
            programs[0].wait_for(r"epoch 1/2, step \d+/")
            filler = fill(disk) if is_full else None
            programs[1].signal(signal.SIGTERM)
            ends = [program.end() for program in programs]
            assert [end.returncode for end in ends] == [code] * 2, ends[0].stderr
            if filler:
                filler.unlink()
                (error,) = [line for end in ends for line in end.stderr.splitlines() if line.startswith("error")]
                assert f" is not in {folder}: No space left on device; run the command again" in error
                assert error.startswith("error: rank 0: ")
            assert len(saved_steps(folder)) == (not is_full)
