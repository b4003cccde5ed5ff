"""The same command without a launcher, under torchrun and mpiexec and in a Slurm step trains alike. Real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from processes import GENEROUS, TOP, Program, free_port, is_free, wait_until
from trainings import assert_same_training, directory, metrics

RUN: dict[str, Any] = {"cwd": TOP, "stderr": subprocess.PIPE, "text": True, "timeout": GENEROUS}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]


@pytest.fixture
def arguments(tmp_path: Path, data_flags: list[str]) -> list[str]:
    return ["train.py", "--config=test", *data_flags, f"--set=expdir={tmp_path}", "--set=report_baselines=false"]


def valid_losses(run: Path, ranks: int) -> list[float]:
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["world_size"] == len(provenance["hostnames"]) == ranks
    return [record["Loss/valid"] for record in metrics(run) if "Loss/valid" in record]


def test_torchrun_slurm_and_a_single_process_give_the_same_losses(arguments: list[str], tmp_path: Path) -> None:
    launched = subprocess.run([*TORCHRUN, "--standalone", *arguments, "--run_num=torchrun"], **RUN)
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


@pytest.mark.slow
def test_restarted_ranks_return_to_their_run_although_another_one_is_finished(
    arguments: list[str], tmp_path: Path
) -> None:
    """Two torchruns with the same command and the same run id, `none`: a restart must not find the first run.

    Rank 1 dies before the first checkpoint, and after it.
    """
    command = [*TORCHRUN, "--max-restarts=2", "--monitor-interval=0.1"]
    script = str(TOP / "tests/training/dying_training.py")
    for deaths, name in (([], "00"), ([[1, 0, 1], [1, 1, 11]], "00-2")):
        environment = {**os.environ, "PYTHONPATH": str(TOP), "DEATHS": json.dumps(deaths)}
        words = [*command, f"--master-port={free_port()}", script, *arguments[1:]]
        ended = subprocess.run(words, env=environment, **RUN)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count(f"Run directory: {directory(tmp_path, 2, name)}") == 1 + len(deaths)
    assert ended.stderr.count("Resuming from ") == 1, "the first restart has no checkpoint yet"
    assert "after step 8" in ended.stderr
    assert_same_training(directory(tmp_path, 2), directory(tmp_path, 2, "00-2"))


# Open MPI otherwise refuses to run as root, and to start more ranks than there are cores.
MPIEXEC = {"mpiexec.openmpi": ["--allow-run-as-root", "--oversubscribe"], "mpiexec.mpich": []}
MPIEXECS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name in MPIEXEC
]


def mpiexec(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of subprocess.Popen."""
    # The port is derived from Open MPI's job; MPICH gives its ranks no name of the job.
    port = {} if "openmpi" in name else {"MASTER_PORT": str(free_port())}
    command = [name, *MPIEXEC[name], "-n", "4", sys.executable, *arguments]
    return {"args": command, "env": {**os.environ, **port}}


@pytest.mark.slow
@pytest.mark.parametrize("name", MPIEXECS)
def test_four_ranks_of_mpiexec_that_are_stopped_and_resumed_give_the_bits_of_torchrun(
    arguments: list[str], tmp_path: Path, name: str
) -> None:
    """mpiexec passes SIGUSR1 on, and exits with the ranks' exit code."""
    arguments = [*arguments, "--num_epochs=40"]
    whole = subprocess.run([*TORCHRUN, "--standalone", "--nproc-per-node=4", *arguments], **RUN)
    assert whole.returncode == 0, whole.stderr
    output, parts = tmp_path / "output", [*arguments, "--run_num=parts"]
    with output.open("w") as stream, subprocess.Popen(**mpiexec(name, parts), cwd=TOP, stderr=stream) as program:
        wait_until(lambda: "epoch 2/" in output.read_text(), output.read_text, lambda: program.poll() is None)
        program.send_signal(signal.SIGUSR1)
        assert program.wait(GENEROUS) == 75, output.read_text()
    resumed = subprocess.run(**mpiexec(name, parts), **RUN)
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming from" in resumed.stderr
    assert_same_training(directory(tmp_path, 4), directory(tmp_path, 4, "parts"), steps=320)
