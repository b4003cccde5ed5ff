"""The command that submit_pm.sh gives to srun, without Slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import TOP
from trainings import YAML

from utils import cli
from utils import config as configs

TASK = ["bash", "-c", 'source ./export_DDP_vars.sh && exec "$@"', "_"]
TRAIN = [*TASK, "python", "train.py"]
IMAGE = {"CONTAINER_IMAGE": "some/image:1"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "12"}
RECORD = f"{sys.executable} -c 'from utils.errors import record_exit_code as record; {{}}'; exit {{}}"


class Submission:
    """submit_pm.sh in a batch job, with an srun that executes SRUN_THEN and a scontrol that refuses to requeue;
    both record their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, folder / "srun.log"
        commands = {
            "srun": 'printf "%s\\0" "$@" >"$0.log"; eval "${SRUN_THEN:-}"',
            "scontrol": 'echo "$@" >>"$0.log"; echo " JobState=RUNNING "; [ "$1" != requeue ]',
        }
        for name, script in commands.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    def run(self, *arguments: str, where: str = str(TOP), **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
        # As in a batch job, the shell of the script is Slurm's task.
        script = 'SLURM_TASK_PID=${SLURM_TASK_PID:-$$} exec bash "$0" "$@"'
        command = ["bash", "-c", script, str(TOP / "submit_pm.sh"), *arguments]
        return subprocess.run(command, cwd=where, env={**environment, **variables}, capture_output=True, text=True)

    def command(self, *arguments: str, **variables: str) -> list[str]:
        """The arguments of srun after its own options."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        given = self.written.read_text().split("\0")[:-1]
        assert given[:4] == ["-u", "-K1", "-X", "--cpu-bind=cores"]
        return given[4:]

    def options(self, *arguments: str, **variables: str) -> cli.Options:
        """What train.py reads in its arguments."""
        command = self.command(*arguments, **variables)
        return cli.parse(command[command.index("train.py") + 1 :])


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    return Submission(tmp_path)


def test_arguments_and_settings_reach_the_command(submission: Submission, tmp_path: Path) -> None:
    arguments = ["--config=short", "--num_epochs", "3", "a b", "$x\n"]
    assert submission.command(*arguments) == [*TRAIN, *arguments]
    graph = submission.command(TRAIN_SCRIPT="train_graph.py", PYTHON="python3.11", SLURM_CPUS_PER_TASK="32")
    assert graph == ["--cpus-per-task=32", *TASK, "python3.11", "train_graph.py"]
    # Only a training run gets the flags of one: predict.py refused --set expdir=…
    variables = {"DATA_DIR": str(tmp_path), "SCRATCH": str(tmp_path), "SLURM_ARRAY_TASK_ID": "1"}
    predict = submission.command("--input=a.h5", **variables, TRAIN_SCRIPT="predict.py")
    assert predict == [*TASK, "python", "predict.py", "--input=a.h5"]


def test_data_and_log_directories_become_settings_without_a_container(submission: Submission, tmp_path: Path) -> None:
    """Every path of config base is replaced, and the user's arguments come last, so that they win.

    Directories may have any name: without quotes, YAML reads '/x/run #1' as /x/run.
    """
    base = {key: str(value) for key, value in configs.load(YAML, "base").model_dump().items()}
    paths = [key for key, value in base.items() if value.startswith("/data/")]
    assert len(paths) == 6
    for script in ("export_DDP_vars.sh", "train.py"):
        (tmp_path / script).touch()
    for name in ("plain", "run #1: 'a' \"$HOME\" `id` $(id) 50%d back\\slash ü\nb\n\n", "-x", "*"):
        (tmp_path / name).mkdir()
        options = submission.options("--config=base", where=str(tmp_path), DATA_DIR=name, LOGS_DIR=f"{name}/logs")
        config = configs.load(YAML, "base", options.overrides).model_dump()
        assert options.overrides.keys() == {"expdir", *paths}
        assert config["expdir"] == f"{tmp_path}/{name}/logs"
        assert all(config[path] == f"{tmp_path}/{name}/{base[path][6:]}" for path in paths)
    assert submission.options("--set=expdir=mine", LOGS_DIR=str(tmp_path / "logs")).overrides == {"expdir": "mine"}


def test_files_with_the_names_of_the_published_data_set_are_found(submission: Submission, tmp_path: Path) -> None:
    """A config that names files in /data, under either name, still reads them in a container."""
    published = {}
    for part, name in (("train", "downsamp_2048crop_train"), ("val", "downsamp_1024crop_valid")):
        for key, ending in (("", ".h5"), ("_npy_data", "_data.npy"), ("_npy_label", "_label.npy")):
            published[f"{part}_path{key}"] = name + ending
            (tmp_path / (name + ending)).touch()

    def keys(**variables: str) -> dict[str, object]:
        return submission.options(DATA_DIR=str(tmp_path), **variables).overrides

    assert keys() == {name: f"{tmp_path}/{file}" for name, file in published.items()}
    assert keys(**IMAGE) == {name: f"/data/{file}" for name, file in published.items()}
    (tmp_path / "val.h5").touch()
    assert keys()["val_path"] == f"{tmp_path}/val.h5"
    assert "val_path" not in keys(**IMAGE)


def test_logs_go_to_the_scratch_file_system_if_there_is_one(submission: Submission, tmp_path: Path) -> None:
    logs = f"{tmp_path}/nbody-unet/logs"
    assert f"log directory {logs}\n" in submission.run(SCRATCH=str(tmp_path)).stdout
    assert submission.options(SCRATCH=str(tmp_path)).overrides == {"expdir": logs}
    shifter = submission.command(SCRATCH=str(tmp_path), **IMAGE)
    assert (f"--volume={logs}:/logs" in shifter, shifter[-1]) == (True, "train.py")
    for variables in ({"SCRATCH": str(tmp_path), "LOGS_DIR": ""}, {"SCRATCH": "/no/such/place"}):
        assert submission.command(**variables) == TRAIN


def test_each_task_of_an_array_gets_its_own_run_directory(submission: Submission) -> None:
    """All tasks have the same command line, and Slurm does not replace a variable's name in it."""
    cases = {(): "00-12", ("--run_num=a b",): "a b-12", ("--run_num", "1", "--run_num=2", "--run_num", "3"): "3-12"}
    for arguments, run_num in cases.items():
        assert submission.options("--config=short", *arguments, **ARRAY).run_num == run_num
    assert submission.command("--config=short")[-1] == "--config=short"


def test_the_exit_code_is_that_of_the_first_rank_that_failed(submission: Submission, tmp_path: Path) -> None:
    """srun reports the highest code, for example 143 of a rank that -K1 ended after another one's exit code 2."""
    logs = tmp_path / "logs"
    podman = {"CONTAINER_RUNTIME": "podman-hpc", "LOGS_DIR": str(logs), **IMAGE}
    mounted = f'[ "${{TRAIN_EXIT_FILE%%.*}}" = /logs/ ] && ln -s 2 "{logs}/${{TRAIN_EXIT_FILE##*/}}"; exit 143'
    cases: list[tuple[str, int, dict[str, str]]] = [
        (RECORD.format("record(2); record(1)", 143), 2, {"LOGS_DIR": str(logs)}),
        (mounted, 2, podman),
        (RECORD.format("record(75)", 143), 75, {}),
        (RECORD.format("record(0)", 143), 143, {}),
        ("exit 75", 1, {}),  # ranks that could not connect to one that failed to start
        ("trap : USR1; kill -s USR1 $PPID; sleep 1; exit 75", 75, {}),
        (RECORD.format("record(1)", 0), 0, {}),  # torchrun has restarted the ranks
    ]
    for step, code, variables in cases:
        done = submission.run(SRUN_THEN=step, **variables)
        assert done.returncode == code, (step, variables, done.stderr)
        assert "Traceback" not in done.stderr
    assert not [path for folder in (TOP, logs) for path in folder.glob(".exit*")]


def test_each_runtime_gets_gpus_code_data_and_logs(submission: Submission, tmp_path: Path) -> None:
    image, logs = IMAGE["CONTAINER_IMAGE"], tmp_path / "logs"
    variables = {**IMAGE, "DATA_DIR": str(tmp_path), "LOGS_DIR": str(logs)}
    code, mounts = f"{TOP}:{TOP}", [f"{tmp_path}:/data", f"{logs}:/logs"]
    shifter = submission.command(**variables)
    volumes = [f"--volume={mount}" for mount in mounts]
    assert shifter == ["shifter", f"--image={image}", "--module=gpu,nccl-cu13-plugin", *volumes, *TRAIN]
    podman = submission.command(**variables, CONTAINER_RUNTIME="podman-hpc")
    head = ["podman-hpc", "run", "--rm", "--net", "host", "--ipc", "host", "--gpu", "--nccl-cu13", f"--volume={code}"]
    assert podman[: len(head) + 3] == [*head, *volumes, f"--workdir={TOP}"]
    assert podman[-len(TRAIN) - 1 :] == [image, *TRAIN]
    assert {"SLURM_*", "MASTER_*", "NCCL_*", "NVIDIA_TF32_OVERRIDE", "BENCHY_*", "TRAIN_EXIT_FILE"} <= set(podman)
    binds = [f"--bind={mount}" for mount in (code, *mounts)]
    apptainer = ["apptainer", "exec", "--nv", *binds, f"--pwd={TOP}", image, *TRAIN]
    assert submission.command(**variables, CONTAINER_RUNTIME="apptainer") == apptainer
    pyxis = [f"--container-image={image}", f"--container-workdir={TOP}"]
    pyxis += [f"--container-mounts={','.join((code, *mounts))}"]
    assert submission.command(**variables, CONTAINER_RUNTIME="pyxis") == [*pyxis, *TRAIN]


def test_image_cuda_version_and_options_become_options_of_the_runtime(submission: Submission) -> None:
    """The CUDA version of the image chooses NERSC's plug-in for NCCL."""
    job_image = {"SLURM_SPANK__SLURM_SPANK_OPTION_shifter_image": "other/image:1"}
    plugin, image = "--module=gpu,nccl-cu13-plugin", "--image=some/image:1"
    for variables, command in (
        (job_image, ["shifter", plugin]),
        ({**job_image, **IMAGE}, ["shifter", image, plugin]),
        ({**job_image, "CONTAINER_RUNTIME": "none"}, []),
        ({**IMAGE, "CONTAINER_CUDA": "12"}, ["shifter", image, "--module=gpu,nccl-plugin"]),
        ({**IMAGE, "CONTAINER_OPTIONS": "--one  --two=2"}, ["shifter", image, "--one", "--two=2"]),
    ):
        assert submission.command(**variables) == [*command, *TRAIN]


def test_nsys_wraps_the_command_and_writes_to_the_log_directory(submission: Submission, tmp_path: Path) -> None:
    """Fixed: without nsys, each rank ended with an error of bash."""
    profile = {"ENABLE_PROFILING": "1", "SLURM_NTASKS": "1", "PROFILE_OUTPUT": "baseline"}
    done = submission.run(**profile)
    assert (done.returncode, done.stderr.count("\n"), "needs nsys" in done.stderr) == (2, 1, True)
    (tmp_path / "nsys").write_text("")
    (tmp_path / "nsys").chmod(0o755)
    nsys = ["nsys", "profile", "--trace=cuda,cublas,nvtx", "--kill", "none", "-c", "cudaProfilerApi", "-f", "true"]
    command = submission.command("--config=short", **profile)
    assert command == [*TASK, *nsys, "-o", "baseline", "python", "train.py", "--config=short"]
    assert "baseline-rank%q{SLURM_PROCID}" in submission.command(**profile | {"SLURM_NTASKS": "2"})
    logs = str(tmp_path / "50%d")
    assert f"{tmp_path}/50%%d/baseline" in submission.command(**profile, LOGS_DIR=logs), "nsys expands %d"
    assert "/logs/profile" in submission.command(**{**profile, "PROFILE_OUTPUT": "", "LOGS_DIR": logs}, **IMAGE)


@pytest.mark.parametrize(
    ("variables", "message", "requeued"),
    [
        (ARRAY, "cannot be requeued; submit the same command again", "6_12"),
        # NERSC forbids chains of jobs in its debug QOS.
        ({"SLURM_JOB_QOS": "gpu_debug"}, "MAX_REQUEUES=0 is reached; the same command resumes (QOS gpu_debug)", ""),
        ({"SLURM_RESTART_COUNT": "100"}, "MAX_REQUEUES=100 is reached; the same command resumes", ""),
        ({"SLURM_TASK_PID": "1"}, "stopped; the same command resumes", ""),  # inside an allocation
    ],
)
def test_a_job_that_cannot_be_requeued_prints_the_reason(
    submission: Submission, tmp_path: Path, variables: dict[str, str], message: str, requeued: str
) -> None:
    done = submission.run(SRUN_THEN=RECORD.format("record(75)", 75), **variables)
    assert (done.returncode, message in done.stderr) == (75, True), done.stderr
    log = tmp_path / "scontrol.log"
    asked = re.findall(r"^requeue (.*)", log.read_text() if log.exists() else "", re.MULTILINE)
    assert asked == [requeued] * bool(requeued)


def test_a_benchmark_gets_no_stop_signal(submission: Submission) -> None:
    """It has nothing to save."""
    done = submission.run("--enable_benchy", SRUN_THEN="trap 'exit 9' USR1; kill -s USR1 $PPID; sleep 1")
    assert (done.returncode, "a benchmark has nothing to save" in done.stderr) == (0, True)


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
        ({"CONTAINER_RUNTIME": "podman-hpc", **IMAGE, "LOGS_DIR": "{}/a:b"}, "podman-hpc cannot mount /"),
        ({"CONTAINER_RUNTIME": "apptainer", **IMAGE, "LOGS_DIR": "{}/a,b"}, "apptainer cannot mount /"),
        ({"CONTAINER_RUNTIME": "pyxis", **IMAGE, "LOGS_DIR": "{}/a b"}, "pyxis cannot mount /"),
    ],
)
def test_invalid_settings_are_rejected_before_the_step(
    submission: Submission, tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    done = submission.run(**{name: value.format(tmp_path) for name, value in variables.items()})
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert not submission.written.exists()
