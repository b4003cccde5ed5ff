"""The same command without a launcher, under torchrun and in a Slurm step trains alike. Real processes."""

import json
import os
from pathlib import Path

import pytest
from processes import Program, free_port, is_free, run
from trainings import directory, metrics

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_torchrun_slurm_and_a_single_process_give_the_same_losses(data_flags: list[str], tmp_path: Path) -> None:
    arguments = ["train.py", "--config=test", *data_flags, f"--set=expdir={tmp_path}", "--set=report_baselines=false"]
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
    losses = {}
    for name, ranks in (("00", 1), ("torchrun", 2), ("slurm", 2)):
        folder = directory(tmp_path, ranks, name)
        provenance = json.loads((folder / "provenance.json").read_text())
        assert provenance["world_size"] == len(provenance["hostnames"]) == ranks
        losses[name] = [record["Loss/valid"] for record in metrics(folder) if "Loss/valid" in record]
    assert len(losses["00"]) == 3
    assert losses["00"][-1] < losses["00"][0]
    assert losses["torchrun"] == pytest.approx(losses["00"], rel=1e-4)
    assert losses["slurm"] == pytest.approx(losses["00"], rel=1e-4)
