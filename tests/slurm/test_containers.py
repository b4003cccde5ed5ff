"""The containers that submit_pm.sh starts, with stand-ins for srun and the runtimes, which check every option."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import GENEROUS, TOP, wait_until
from stand_in_runtime import RUNTIMES

STAND_IN = Path(__file__).parent / "stand_in_runtime.py"
IMAGE = "registry.example.org/some/image:1"
# runtime: options for GPUs and network
GPUS = {
    "shifter": ["gpu,nccl-cu13-plugin"],
    "podman-hpc": ["--gpu", "--nccl-cu13"],
    "apptainer": ["--nv"],
    "pyxis": [],
}
SETTINGS = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "BENCHY_OUTPUT": "weak scale",
    "NCCL_DEBUG": "INFO",
    "MASTER_PORT": "12345",
    "WANDB_MODE": "offline",
}


class ContainerJob:
    """submit_pm.sh in the environment of a job of one rank, whose program is stand_in.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data, self.logs = folder / "data#1'a'", folder / "logs"
        self.data.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        for name in RUNTIMES:
            script = programs / name
            script.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(STAND_IN), name])} "$@"\n')
            script.chmod(0o755)
        self._environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "TRAIN_SCRIPT": "tests/slurm/stand_in.py",
            "SLURM_JOB_ID": "7",
            "CONTAINER_IMAGE": IMAGE,
            "DATA_DIR": str(self.data),
            "LOGS_DIR": str(self.logs),
            **SETTINGS,
        }

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        with (self.folder / "output").open("w") as output:
            command = ["bash", "submit_pm.sh", *arguments]
            environment = {**self._environment, **variables}
            return subprocess.Popen(command, cwd=TOP, env=environment, stdout=output, stderr=output, text=True)

    def end(self, *arguments: str, **variables: str) -> int:
        return self.start(*arguments, **variables).wait(GENEROUS)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()


@pytest.fixture
def job(tmp_path: Path) -> ContainerJob:
    return ContainerJob(tmp_path)


@pytest.mark.parametrize("runtime", GPUS)
def test_the_program_has_its_files_variables_and_gpus_in_the_container(job: ContainerJob, runtime: str) -> None:
    dump = ["dump", str(job.folder), "a b", "$x"]
    assert job.end(*dump, CONTAINER_RUNTIME=runtime) == 0, job.output
    assert f"log directory {job.logs}, in the container /logs\n" in job.output
    found = json.loads((job.folder / "0.json").read_text())
    assert found["argv"][1:] == dump
    assert found["directory"] == str(TOP)
    known = found["environment"]
    assert {name: known.get(name) for name in SETTINGS} == SETTINGS
    assert known["RANK"] == "0"
    code = {} if runtime == "shifter" else {str(TOP): str(TOP)}  # Shifter mounts it without being asked
    mounts = {**code, "/data": str(job.data), "/logs": str(job.logs)}
    expected = {"runtime": runtime, "image": IMAGE, "mounts": mounts, "gpus": GPUS[runtime]}
    assert json.loads(known["STAND_IN"]) == expected


@pytest.mark.parametrize("runtime", GPUS)
def test_signals_and_the_exit_code_pass_the_container(job: ContainerJob, runtime: str) -> None:
    """srun reports 143, the code of a rank that Slurm has ended."""
    started = job.start("wait", CONTAINER_RUNTIME=runtime)
    wait_until(lambda: "rank 0 waits" in job.output or started.poll() is not None, what=lambda: job.output)
    started.send_signal(signal.SIGUSR1)
    assert started.wait(GENEROUS) == 75, job.output
    assert "rank 0 saves after SIGUSR1" in job.output
    assert list(job.logs.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shifter", "--image=x --module=gpu,nccl-plugin --gpu true"),
        ("shifter", "--image=x true"),
        ("podman-hpc", "run --rm --net host --ipc host --gpu --workdir=/ x true"),
        ("apptainer", "exec --nv --pwd=/ --volume=/a:/b x true"),
        ("apptainer", "exec --pwd=/ x true"),
        ("srun", "-u -X -K1 --cpu-bind=cores --container-image=x --container-mounts=/a:/b true"),
        ("srun", "-u -X --cpu-bind=cores true"),
    ],
)
def test_stand_ins_refuse_unknown_and_missing_options(name: str, words: str) -> None:
    with pytest.raises(SystemExit):
        RUNTIMES[name](words.split())
