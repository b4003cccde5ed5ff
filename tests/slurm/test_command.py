"""The command that submit_pm.sh gives to srun, without Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from utils import config as configs

TOP = Path(__file__).parent.parent.parent
TASK = ["bash", "-c", 'source ./export_DDP_vars.sh; exec "$@"', "_"]


class Submission:
    """submit_pm.sh in the environment of a job, with an srun that only records its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, folder / "arguments"
        srun = folder / "srun"
        srun.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >{shlex.quote(str(self.written))}\n")
        srun.chmod(0o755)

    def run(self, *arguments: str, where: str = str(TOP), **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
        command = ["bash", str(TOP / "submit_pm.sh"), *arguments]
        return subprocess.run(command, cwd=where, env={**environment, **variables}, capture_output=True, text=True)

    def command(self, *arguments: str, **variables: str) -> list[str]:
        """The arguments of srun after its own options."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        given = self.written.read_text().split("\0")[:-1]
        assert given[:4] == ["-u", "-K1", "-X", "--cpu-bind=cores"]
        return given[4:]


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    return Submission(tmp_path)


def test_arguments_and_settings_reach_the_command(submission: Submission) -> None:
    arguments = ["--config=short", "--num_epochs", "3", "a b", "$x\n"]
    assert submission.command(*arguments) == [*TASK, "python", "train.py", *arguments]
    graph = submission.command(TRAIN_SCRIPT="train_graph.py", PYTHON="python3.11", SLURM_CPUS_PER_TASK="32")
    assert graph == ["--cpus-per-task=32", *TASK, "python3.11", "train_graph.py"]


def test_data_and_log_directories_become_settings_without_a_container(submission: Submission, tmp_path: Path) -> None:
    """Every path of config base is replaced, and the user's arguments come last, so that they win."""
    command = submission.command("--config=base", DATA_DIR=str(tmp_path), LOGS_DIR=str(tmp_path / "logs"))
    assert command[-1] == "--config=base"
    added = command[command.index("train.py") + 1 : -1]
    assert added[::2] == ["--set"] * (len(added) // 2)
    base = configs.load(str(TOP / "config/UNet.yaml"), "base").model_dump()
    expected = {name: f"{tmp_path}/{value[6:]}" for name, value in base.items() if str(value).startswith("/data/")}
    expected |= {name: f"{tmp_path}/logs" for name, value in base.items() if value == "/logs"}
    assert dict(text.split("=", 1) for text in added[1::2]) == expected
    assert len(expected) == 7


def test_shifter_runs_the_command(submission: Submission, tmp_path: Path) -> None:
    places = {"DATA_DIR": str(tmp_path), "LOGS_DIR": str(tmp_path / "logs")}
    volumes = [f"--volume={tmp_path}:/data", f"--volume={tmp_path}/logs:/logs"]
    rest = [*TASK, "python", "train.py", "--config=short"]
    command = submission.command("--config=short", CONTAINER_IMAGE="some/image:1", **places)
    assert command == ["shifter", "--image=some/image:1", "--module=gpu,nccl-plugin", *volumes, *rest]
    job_image = {"SLURM_SPANK__SLURM_SPANK_OPTION_shifter_image": "some/image:1"}
    assert submission.command("--config=short", **job_image) == ["shifter", "--module=gpu,nccl-plugin", *rest]
    command = submission.command("--config=short", **job_image, CONTAINER_OPTIONS="")
    assert command == ["shifter", *rest]
    assert submission.command("--config=short", **job_image, CONTAINER_RUNTIME="none") == rest


def test_podman_runs_the_command(submission: Submission, tmp_path: Path) -> None:
    """The command names all that is to reach the container: podman passes on nothing else."""
    podman = {"CONTAINER_RUNTIME": "podman-hpc", "CONTAINER_IMAGE": "some/image:1"}
    command = submission.command("--config=short", **podman, DATA_DIR=str(tmp_path))
    start = ["podman-hpc", "run", "--rm", "--net", "host", "--ipc", "host", "--gpu", "--nccl"]
    assert command[: len(start)] == start
    assert command[command.index("some/image:1") + 1 :] == [*TASK, "python", "train.py", "--config=short"]
    assert {f"--volume={tmp_path}:/data", f"--volume={TOP}:{TOP}", f"--workdir={TOP}"} <= set(command)
    passed = {command[place + 1] for place, text in enumerate(command) if text == "--env"}
    assert {"SLURM_*", "MASTER_*", "NCCL_*", "BENCHY_*", "NVIDIA_TF32_OVERRIDE", "CUDA_VISIBLE_DEVICES"} <= passed
    other = submission.command(**podman, CONTAINER_OPTIONS="--gpu --nccl-cu13")
    assert other[7:9] == ["--gpu", "--nccl-cu13"]


def test_nsys_wraps_the_command(submission: Submission) -> None:
    nsys = ["nsys", "profile", "--trace=cuda,cublas,nvtx", "--kill", "none", "-c", "cudaProfilerApi", "-f", "true"]
    profile = {"ENABLE_PROFILING": "1", "PROFILE_OUTPUT": "baseline"}
    command = submission.command("--config=short", SLURM_NTASKS="1", **profile)
    assert command == [*TASK, *nsys, "-o", "baseline", "python", "train.py", "--config=short"]
    assert "baseline-rank%q{SLURM_PROCID}" in submission.command(**profile)
    assert "nsys" not in submission.command(ENABLE_PROFILING="0")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"where": "/"}, "submit from the repository's root"),
        ({"SLURM_JOB_ID": ""}, "must run inside a job"),
        ({"TRAIN_SCRIPT": "trian.py"}, "no trian.py in"),
        ({"DATA_DIR": "/no/such/place"}, "DATA_DIR"),
        ({"LOGS_DIR": "/dev/null/logs"}, "LOGS_DIR"),
        ({"MAX_REQUEUES": "many"}, "MAX_REQUEUES must be an integer"),
        ({"STOP_SIGNAL": "10"}, "STOP_SIGNAL must be a signal's name such as USR2, not 10"),
        ({"CONTAINER_RUNTIME": "docker"}, "CONTAINER_RUNTIME must be shifter, podman-hpc or none, not docker"),
        ({"CONTAINER_RUNTIME": "shifter"}, "shifter needs CONTAINER_IMAGE"),
        ({"CONTAINER_RUNTIME": "podman-hpc"}, "podman-hpc needs CONTAINER_IMAGE"),
    ],
)
def test_invalid_settings_are_rejected_before_the_step(
    submission: Submission, variables: dict[str, str], message: str
) -> None:
    done = submission.run(**variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert not submission.written.exists()
