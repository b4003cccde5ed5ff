"""The command that submit_pm.sh gives to srun, without Slurm."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from utils import cli
from utils import config as configs

TOP = Path(__file__).parent.parent.parent
TASK = ["bash", "-c", 'source ./export_DDP_vars.sh && exec "$@"', "_"]


class Submission:
    """submit_pm.sh in a batch job, with an srun that executes SRUN_THEN and a scontrol that prints JOB; both record
    their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, folder / "srun.log"
        commands = {
            "srun": 'printf "%s\\0" "$@" >"$0.log"; eval "${SRUN_THEN:-}"',
            "scontrol": 'echo "$@" >>"$0.log"; echo "${JOB:-}"',
        }
        for name, script in commands.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    def run(self, *arguments: str, where: str = str(TOP), **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
        # As in a batch job, the shell of the script is Slurm's task.
        command = ["bash", "-c", 'SLURM_TASK_PID=$$ exec bash "$0" "$@"', str(TOP / "submit_pm.sh"), *arguments]
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
    assert cli.parse(added).overrides == expected
    assert len(expected) == 7


def test_files_with_the_names_of_the_published_data_set_are_found(submission: Submission, tmp_path: Path) -> None:
    """A config that names files in /data, under either name, still reads them in a container."""
    long_names = {"train": "downsamp_2048crop_train", "val": "downsamp_1024crop_valid"}
    endings = {"": ".h5", "_npy_data": "_data.npy", "_npy_label": "_label.npy"}
    pairs = list(itertools.product(long_names, endings))
    plain = {f"{part}_path{key}": part + endings[key] for part, key in pairs}
    published = {f"{part}_path{key}": long_names[part] + endings[key] for part, key in pairs}
    for file in published.values():
        (tmp_path / file).touch()

    def keys(*arguments: str, **variables: str) -> dict[str, object]:
        command = submission.command(*arguments, DATA_DIR=str(tmp_path), **variables)
        return cli.parse(command[command.index("train.py") + 1 :]).overrides

    container = {"CONTAINER_IMAGE": "some/image:1"}
    assert keys() == {name: f"{tmp_path}/{file}" for name, file in published.items()}
    assert keys(**container) == {name: f"/data/{file}" for name, file in published.items()}
    assert keys("--set", "val_path=mine.h5", **container)["val_path"] == "mine.h5"
    (tmp_path / "val.h5").touch()
    assert keys()["val_path"] == f"{tmp_path}/val.h5"
    assert "val_path" not in keys(**container)
    for file in published.values():
        (tmp_path / file).unlink()
    assert keys() == {name: f"{tmp_path}/{file}" for name, file in plain.items()}
    assert keys(**container) == {}


def test_only_a_training_gets_the_flags_of_a_training(submission: Submission, tmp_path: Path) -> None:
    """predict.py refused --set expdir=…"""
    variables = {"TRAIN_SCRIPT": "predict.py", "DATA_DIR": str(tmp_path), "SCRATCH": str(tmp_path)}
    assert submission.command("--input=a.h5", **variables) == [*TASK, "python", "predict.py", "--input=a.h5"]


def test_logs_go_to_the_scratch_file_system_if_there_is_one(submission: Submission, tmp_path: Path) -> None:
    logs = f"{tmp_path}/nbody-unet/logs"
    assert f"log directory {logs}\n" in submission.run(SCRATCH=str(tmp_path)).stdout
    flag = ["--set", f'expdir="{logs}"']
    assert submission.command(SCRATCH=str(tmp_path)) == [*TASK, "python", "train.py", *flag]
    shifter = submission.command(SCRATCH=str(tmp_path), CONTAINER_IMAGE="some/image:1")
    assert f"--volume={logs}:/logs" in shifter
    assert shifter[-1] == "train.py"
    other = submission.command(SCRATCH=str(tmp_path), LOGS_DIR=str(tmp_path / "mine"))
    assert other[-1] == f'expdir="{tmp_path}/mine"'
    for variables in ({"SCRATCH": str(tmp_path), "LOGS_DIR": ""}, {"SCRATCH": "/no/such/place"}, {"SCRATCH": ""}):
        assert submission.command(**variables) == [*TASK, "python", "train.py"]


def test_directories_may_have_any_name(submission: Submission, tmp_path: Path) -> None:
    """The path arrives unchanged in the config: without quotes, YAML reads '/x/run #1' as /x/run."""
    names = [
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
    ]
    for script in ("export_DDP_vars.sh", "train.py"):
        (tmp_path / script).touch()
    for name in names:
        (tmp_path / name).mkdir()
        command = submission.command(where=str(tmp_path), DATA_DIR=name, LOGS_DIR=f"{name}/logs")
        overrides = cli.parse(command[command.index("train.py") + 1 :]).overrides
        config = configs.load(str(TOP / "config/UNet.yaml"), "base", overrides)
        assert config.expdir == f"{tmp_path}/{name}/logs"
        assert config.train_path_npy_data == f"{tmp_path}/{name}/train_data.npy"


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


def test_image_cuda_version_and_options_become_options_of_the_runtime(submission: Submission) -> None:
    """The CUDA version of the image chooses NERSC's plug-in for NCCL."""
    rest = [*TASK, "python", "train.py"]
    image = {"CONTAINER_IMAGE": "some/image:1"}
    job_image = {"SLURM_SPANK__SLURM_SPANK_OPTION_shifter_image": "other/image:1"}
    assert submission.command(**job_image) == ["shifter", "--module=gpu,nccl-cu13-plugin", *rest]
    assert submission.command(**job_image, **image)[:2] == ["shifter", "--image=some/image:1"]
    assert submission.command(**job_image, CONTAINER_RUNTIME="none") == rest
    plugins = {"12": ("--module=gpu,nccl-plugin", "--nccl"), "13": ("--module=gpu,nccl-cu13-plugin", "--nccl-cu13")}
    for version, (shifter, podman) in plugins.items():
        assert shifter in submission.command(**image, CONTAINER_CUDA=version)
        assert podman in submission.command(**image, CONTAINER_CUDA=version, CONTAINER_RUNTIME="podman-hpc")
    given = submission.command(**image, CONTAINER_OPTIONS="--one  --two=2")
    assert given == ["shifter", "--image=some/image:1", "--one", "--two=2", *rest], "in place of the default ones"


def test_each_runtime_gets_gpus_code_data_and_logs(submission: Submission, tmp_path: Path) -> None:
    image, logs = "some/image:1", tmp_path / "logs"
    variables = {"CONTAINER_IMAGE": image, "DATA_DIR": str(tmp_path), "LOGS_DIR": str(logs)}
    rest, code, mounts = [*TASK, "python", "train.py"], f"{TOP}:{TOP}", [f"{tmp_path}:/data", f"{logs}:/logs"]
    shifter = submission.command(**variables)
    volumes = [f"--volume={mount}" for mount in mounts]
    assert shifter == ["shifter", f"--image={image}", "--module=gpu,nccl-cu13-plugin", *volumes, *rest]
    podman = submission.command(**variables, CONTAINER_RUNTIME="podman-hpc")
    head = ["podman-hpc", "run", "--rm", "--net", "host", "--ipc", "host", "--gpu", "--nccl-cu13", f"--volume={code}"]
    assert podman[: len(head) + 3] == [*head, *volumes, f"--workdir={TOP}"]
    assert podman[-len(rest) - 1 :] == [image, *rest]
    names = {name for flag, name in itertools.pairwise(podman) if flag == "--env"}
    assert {"SLURM_*", "MASTER_*", "NCCL_*", "NVIDIA_TF32_OVERRIDE", "BENCHY_*", "WANDB_*", "TRAIN_EXIT_FILE"} <= names
    binds = [f"--bind={mount}" for mount in (code, *mounts)]
    for name in ("apptainer", "singularity"):
        expected = [name, "exec", "--nv", *binds, f"--pwd={TOP}", image, *rest]
        assert submission.command(**variables, CONTAINER_RUNTIME=name) == expected
    pyxis = [f"--container-image={image}", f"--container-workdir={TOP}"]
    pyxis += [f"--container-mounts={','.join((code, *mounts))}"]
    assert submission.command(**variables, CONTAINER_RUNTIME="pyxis") == [*pyxis, *rest]


def test_directories_that_a_runtime_cannot_mount_are_refused(submission: Submission, tmp_path: Path) -> None:
    refused = {"shifter": ":", "podman-hpc": ":", "apptainer": ",", "singularity": ",", "pyxis": " "}
    for runtime, character in refused.items():
        variables = {"CONTAINER_RUNTIME": runtime, "CONTAINER_IMAGE": "some/image:1"}
        folder = tmp_path / f"a{character}b"
        folder.mkdir(exist_ok=True)
        done = submission.run(DATA_DIR=str(folder), **variables)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), (runtime, character)
        assert f"{runtime} cannot mount {tmp_path}/a" in done.stderr


def test_nsys_wraps_the_command_and_writes_to_the_log_directory(submission: Submission, tmp_path: Path) -> None:
    nsys = ["nsys", "profile", "--trace=cuda,cublas,nvtx", "--kill", "none", "-c", "cudaProfilerApi", "-f", "true"]
    profile = {"ENABLE_PROFILING": "1", "SLURM_NTASKS": "1", "PROFILE_OUTPUT": "baseline"}
    command = submission.command("--config=short", **profile)
    assert command == [*TASK, *nsys, "-o", "baseline", "python", "train.py", "--config=short"]
    assert "baseline-rank%q{SLURM_PROCID}" in submission.command(**profile | {"SLURM_NTASKS": "2"})
    assert "nsys" not in submission.command(ENABLE_PROFILING="0")

    def output(**more: str) -> str:
        command = submission.command(**profile | {"LOGS_DIR": str(tmp_path / "50%d"), **more})
        return command[command.index("-o") + 1]

    assert output() == f"{tmp_path}/50%%d/baseline", "nsys expands %d"
    container = {"CONTAINER_IMAGE": "some/image:1"}
    assert output(PROFILE_OUTPUT="", **container) == "/logs/profile"
    assert output(PROFILE_OUTPUT="/elsewhere/baseline", **container) == "/elsewhere/baseline"


def test_a_job_of_a_debug_qos_is_not_requeued(submission: Submission, tmp_path: Path) -> None:
    """NERSC forbids chains of jobs in its debug QOS."""
    step = f"{sys.executable} -c 'from utils.errors import record_exit_code as record; record(75)'; exit 75"
    for variables in ({"SLURM_JOB_QOS": "gpu_debug"}, {"SLURM_JOB_QOS": "gpu_regular", "MAX_REQUEUES": "0"}):
        done = submission.run(SRUN_THEN=step, JOB=" JobState=RUNNING ", **variables)
        assert done.returncode == 75
        assert (
            f"not requeued: MAX_REQUEUES=0 is reached; the same command resumes (QOS {variables['SLURM_JOB_QOS']})"
            in done.stderr
        )
    assert "requeue" not in (tmp_path / "scontrol.log").read_text()


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
        ({"CONTAINER_RUNTIME": "docker"}, "must be shifter, podman-hpc, apptainer, pyxis or none, not docker"),
        ({"CONTAINER_CUDA": "11"}, "CONTAINER_CUDA must be 12 or 13, not 11"),
        ({"CONTAINER_RUNTIME": "shifter"}, "shifter needs CONTAINER_IMAGE"),
    ],
)
def test_invalid_settings_are_rejected_before_the_step(
    submission: Submission, variables: dict[str, str], message: str
) -> None:
    done = submission.run(**variables)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert not submission.written.exists()
