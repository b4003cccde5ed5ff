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
from trainings import assert_same_training, directory


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, volume_file) -> list[str]:
    folder = tmp_path_factory.mktemp("launchers")
    train, valid = (volume_file(folder / f"{name}.h5", seed=seed) for seed, name in enumerate(("train", "valid")))
    settings = {
        "train_path": train,
        "val_path": valid,
        "expdir": folder / "runs",
        "device": "cpu",
        "report_baselines": "false",
    }
    return ["train.py", "--config=test", *(f"--set={key}={value}" for key, value in settings.items())]


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, **variables}


def expdir(arguments: Sequence[str]) -> Path:
    return Path(next(text for text in arguments if "expdir=" in text).split("expdir=")[1])


def valid_losses(arguments: list[str], ranks: int, run_num: str) -> list[float]:
    run = directory(expdir(arguments), ranks, run_num)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["world_size"] == len(provenance["hostnames"]) == ranks
    return [record["Loss/valid"] for record in records if "Loss/valid" in record]


RUN: dict[str, Any] = {"cwd": TOP, "capture_output": True, "text": True, "timeout": GENEROUS}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def torchrun(arguments: list[str]) -> Path:
    """The run directory of two ranks that torchrun has started."""
    launched = subprocess.run([*TORCHRUN, *arguments, "--run_num=torchrun"], env=environment(), **RUN)
    assert launched.returncode == 0, launched.stderr
    assert launched.stderr.count("Avg train loss") == 2, "only rank 0 logs, once per epoch"
    return directory(expdir(arguments), 2, "torchrun")


@pytest.mark.usefixtures("torchrun")
def test_torchrun_slurm_and_a_single_process_give_the_same_losses(arguments: list[str], tmp_path: Path) -> None:
    # The rendezvous port is derived from the job id.
    job = str(next(number for number in range(free_port(), 2**31) if is_free(15000 + number * 7 % 15000)))
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": job, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step["SLURM_STEP_NODELIST"] = "localhost"
    tasks = [
        Program(
            [*arguments, "--run_num=slurm"],
            tmp_path / task,
            environment=environment(**step, SLURM_PROCID=task, SLURM_LOCALID=task),
        )
        for task in "01"
    ]
    programs = [Program(arguments, tmp_path / "alone"), *tasks]
    assert [program.end().returncode for program in programs] == [0, 0, 0], [program.text for program in programs]
    losses = valid_losses(arguments, 1, "00")
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    for name in ("torchrun", "slurm"):
        assert valid_losses(arguments, 2, name) == pytest.approx(losses, rel=1e-4)


# --- mpiexec ---------------------------------------------------------------------------------------------------------

# Open MPI otherwise refuses to run as root, and to start more ranks than there are cores.
MPIEXEC = {"mpiexec.openmpi": ["--allow-run-as-root", "--oversubscribe"], "mpiexec.mpich": []}
MPIEXECS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name in MPIEXEC
]


def mpiexec(name: str, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of subprocess.Popen."""
    command = [name, *MPIEXEC[name], "-n", str(ranks), sys.executable, *arguments]
    # The port is derived from Open MPI's job; MPICH gives its ranks no name of the job.
    port = {} if "openmpi" in name else {"MASTER_PORT": str(free_port())}
    return {"args": command, "env": environment(**port)}


@pytest.mark.slow
@pytest.mark.parametrize("name", MPIEXECS)
def test_four_ranks_of_mpiexec_that_are_stopped_and_resumed_give_the_bits_of_torchrun(
    arguments: list[str], tmp_path: Path, name: str
) -> None:
    """mpiexec passes SIGUSR1 on, and exits with the ranks' exit code."""
    arguments = [*arguments, f"--set=expdir={tmp_path}", "--num_epochs=40"]
    whole = subprocess.run([*TORCHRUN, "--nproc-per-node=4", *arguments], env=environment(), **RUN)
    assert whole.returncode == 0, whole.stderr
    stopped, output = mpiexec(name, 4, [*arguments, "--run_num=parts"]), tmp_path / "output"
    with output.open("w") as stream, subprocess.Popen(**stopped, cwd=TOP, stderr=stream) as program:
        wait_until(lambda: "epoch 2/" in output.read_text(), output.read_text, lambda: program.poll() is None)
        program.send_signal(signal.SIGUSR1)
        assert program.wait(GENEROUS) == 75, output.read_text()
    assert "Stopping after step" in output.read_text()
    resumed = subprocess.run(**mpiexec(name, 4, [*arguments, "--run_num=parts"]), **RUN)
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming from" in resumed.stderr
    runs = [directory(tmp_path, 4, run_num) for run_num in ("00", "parts")]
    assert_same_training(*runs, steps=320)
