"""The command that submit_pm.sh gives to srun, without Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from utils import cli
from utils import config as configs

TOP = Path(__file__).parent.parent.parent
TASK = ["bash", "-c", 'source ./export_DDP_vars.sh && exec "$@"', "_"]


class Submission:
    """submit_pm.sh in the environment of a job, with an srun that records its arguments and executes SRUN_THEN."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, folder / "arguments"
        srun = folder / "srun"
        record = f"printf '%s\\0' \"$@\" >{shlex.quote(str(self.written))}"
        srun.write_text(f'#!/bin/sh\n{record}\neval "${{SRUN_THEN:-}}"\n')
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
    assert added[::2] == ["--set_string"] * (len(added) // 2)
    base = configs.load(str(TOP / "config/UNet.yaml"), "base").model_dump()
    expected = {name: f"{tmp_path}/{value[6:]}" for name, value in base.items() if str(value).startswith("/data/")}
    expected |= {name: f"{tmp_path}/logs" for name, value in base.items() if value == "/logs"}
    assert dict(text.split("=", 1) for text in added[1::2]) == expected
    assert len(expected) == 7


def test_directories_may_have_any_name(submission: Submission, tmp_path: Path) -> None:
    """The program read '/x/run #1' as YAML, and wrote to /x/run."""
    names = (
        "run #1",
        "a: b",
        "it's",
        'say "x"',
        " $HOME `id` $(id) ",
        "50%d",
        "ü",
        "back\\slash",
        "-x",
        "*",
        "a\nb\n\n",
    )
    for script in ("export_DDP_vars.sh", "train.py"):
        (tmp_path / script).touch()
    for name in names:
        (tmp_path / name).mkdir()
        command = submission.command(where=str(tmp_path), DATA_DIR=name, LOGS_DIR=f"{name}/logs")
        keys = cli.parse(command[command.index("train.py") + 1 :]).overrides
        assert keys["expdir"] == f"{tmp_path}/{name}/logs"
        assert keys["train_path_npy_data"] == f"{tmp_path}/{name}/train_data.npy"
    for runtime in ("shifter", "podman-hpc"):
        container = {"CONTAINER_RUNTIME": runtime, "CONTAINER_IMAGE": "some/image:1"}
        done = submission.run(where=str(tmp_path), DATA_DIR="a: b", **container)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "cannot mount DATA_DIR or LOGS_DIR if its path contains : or ;" in done.stderr


def test_each_task_of_an_array_gets_its_own_run_directory(submission: Submission) -> None:
    """All tasks have the same command line, and Slurm does not replace a variable's name in it."""
    task = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "12"}
    cases = {(): "00-12", ("--run_num=a b",): "a b-12", ("--run_num", "1", "--run_num=2", "--run_num", "3"): "3-12"}
    for arguments, run_num in cases.items():
        command = submission.command("--config=short", *arguments, **task)
        assert command[-len(arguments) - 2 :] == ["--config=short", *arguments, f"--run_num={run_num}"]
        assert cli.parse(command[command.index("train.py") + 1 :]).run_num == run_num
    assert submission.command("--config=short")[-1] == "--config=short"
    assert submission.command("--input=a.h5", **task, TRAIN_SCRIPT="predict.py")[-1] == "--input=a.h5"


def test_the_exit_code_is_that_of_the_first_rank_that_failed(submission: Submission, tmp_path: Path) -> None:
    """srun reports the highest code, for example 143 of a rank that -K1 ended after another one's exit code 2."""
    record = f"{sys.executable} -c 'from utils.errors import record_exit_code as record; {{}}'; exit {{}}"
    logs = tmp_path / "logs"
    podman = {"CONTAINER_RUNTIME": "podman-hpc", "CONTAINER_IMAGE": "some/image:1", "LOGS_DIR": str(logs)}
    mounted = f'[ "${{TRAIN_EXIT_FILE%%.*}}" = /logs/ ] && ln -s 2 "{logs}/${{TRAIN_EXIT_FILE##*/}}"; exit 143'
    cases: list[tuple[str, int, dict[str, str]]] = [
        (record.format("record(2); record(1)", 143), 2, {}),
        (record.format("record(2); record(1)", 143), 2, {"LOGS_DIR": str(logs)}),
        (mounted, 2, podman),
        (record.format("record(75)", 143), 75, {}),
        (record.format("record(0)", 143), 143, {}),
        ("exit 75", 1, {}),  # ranks that could not connect to one that failed to start
        ("trap : USR1; kill -s USR1 $PPID; sleep 1; exit 75", 75, {}),
        (record.format("record(1)", 0), 0, {}),  # torchrun has restarted the ranks
        (record.format("record(2)", 143), 143, {"LOGS_DIR": "/proc"}),  # not writable
    ]
    for step, code, variables in cases:
        done = submission.run(SRUN_THEN=step, **variables)
        assert done.returncode == code, (step, variables, done.stderr)
        assert "Traceback" not in done.stderr
    assert not [path for folder in (TOP, logs) for path in folder.glob(".exit*")]


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
        ({"MAX_REQUEUES": "1" * 20}, "MAX_REQUEUES must be an integer"),
        ({"SLURM_RESTART_COUNT": "a[$(exit 1)]\n2"}, "SLURM_RESTART_COUNT must be an integer, not a[$(exit 1)] 2"),
        ({"SLURM_NTASKS": "-1"}, "SLURM_NTASKS must be an integer"),
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
    assert message in done.stderr.splitlines()[-1]
    assert not submission.written.exists()
