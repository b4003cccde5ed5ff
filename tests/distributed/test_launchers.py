"""The same command without a launcher, under torchrun and in a Slurm step trains alike. Real processes."""

import json
import os
from pathlib import Path

import pytest
from processes import Program, free_port, is_free, run
from trainings import directory, metrics

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def arguments(tmp_path: Path, data_flags: list[str]) -> list[str]:
    return ["train.py", "--config=test", *data_flags, f"--set=expdir={tmp_path}", "--set=report_baselines=false"]


def valid_losses(run: Path, ranks: int) -> list[float]:
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["world_size"] == len(provenance["hostnames"]) == ranks
    return [record["Loss/valid"] for record in metrics(run) if "Loss/valid" in record]


def test_torchrun_slurm_and_a_single_process_give_the_same_losses(arguments: list[str], tmp_path: Path) -> None:
    launched = run([*TORCHRUN, *arguments, "--run_num=torchrun"], tmp_path / "torchrun")
    assert launched.returncode == 0, launched.stderr
    assert launched.stderr.count("Avg train loss") == 2, "only rank 0 logs, once per epoch"
    # The rendezvous port is derived from the job id.
    job = str(next(number for number in range(free_port(), 2**31) if is_free(15000 + number * 7 % 15000)))
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": job, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step = {**os.environ, **step, "SLURM_STEP_NODELIST": "localhost"}
    programs = [Program(arguments, tmp_path / "alone")]
    for task in "01":
        variables = {**step, "SLURM_PROCID": task, "SLURM_LOCALID": task}
        programs.append(Program([*arguments, "--run_num=slurm"], tmp_path / task, environment=variables))
    assert [program.end().returncode for program in programs] == [0, 0, 0], [program.text for program in programs]
    losses = valid_losses(directory(tmp_path), 1)
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    for name in ("torchrun", "slurm"):
        assert valid_losses(directory(tmp_path, 2, name), 2) == pytest.approx(losses, rel=1e-4)
