"""The command that submit_pm.sh gives to srun, without Slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import TOP
from trainings import YAML

from utils import cli
from utils import config as configs
from utils.data.loaders import open_volumes
from utils.volumes.opened import PATH_KEYS, npy_keys

TASK = ["bash", "-c", 'DDP_NETWORK_SETTINGS=0 source ./export_DDP_vars.sh && exec "$@"', "_"]
TRAIN = [*TASK, "python", "train.py"]
IN_LOGS = [*TRAIN, "--set", "expdir=$LOGS_DIR"]
IMAGE = {"CONTAINER_IMAGE": "some/image:1"}
FILE_KEYS = [key for split in PATH_KEYS.values() for key in (split, *npy_keys(split))]
ARRAY = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "12"}
RECORD = f"{sys.executable} -c 'from utils.errors import record_exit_code as record; {{}}'; exit {{}}"


class Submission:
    """submit_pm.sh in a batch job, with an srun that executes SRUN_THEN and a scontrol that refuses to requeue;
    both record their arguments, srun also the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, folder / "srun.log"
        commands = {
            "srun": 'printf "%s\\0" "$@" >"$0.log"; env -0 >"$0.env"; eval "${SRUN_THEN:-}"',
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
        self.done = done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stderr
        given = self.written.read_text().split("\0")[:-1]
        assert given[:4] == ["-u", "-K1", "-X", "--cpu-bind=cores"]
        return given[4:]

    def options(self, *arguments: str, **variables: str) -> cli.Options:
        command = self.command(*arguments, **variables)
        return cli.parse(command[command.index("train.py") + 1 :])

    @property
    def environment(self) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in (self.folder / "srun.env").read_text().split("\0")[:-1])


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


@pytest.mark.parametrize("runtime", ["none", "shifter", "podman-hpc", "apptainer"])
def test_the_same_files_are_read_and_written_with_and_without_a_container(
    submission: Submission, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, runtime: str
) -> None:
    """DATA_DIR stands for /data, under either name of a file; LOGS_DIR replaces expdir. Other paths stay.

    Fixed: without a container, DATA_DIR/train.h5 replaced the train_path of an imported config; in a container, its
    expdir was used in place of the announced directory. Directories may have any name that can be mounted.
    """
    folder = tmp_path / "run #1 'a' $HOME `id` $(id) 50%d"
    data, logs, file = folder / "data", folder / "logs", tmp_path / "own.yaml"
    data.mkdir(parents=True)
    train, valid = "downsamp_2048crop_train", "downsamp_1024crop_valid"
    for name in (f"{train}.h5", f"{train}_label.npy", f"{valid}.h5", "val.h5"):
        (data / name).touch()
    file.write_text("own: {train_path: /other/train.h5, val_path: [/data/a/b.h5, /database/val.h5], expdir: ./runs}")
    seen = r"/data(?=/)|/logs$" if runtime != "none" else "(?!)"  # what is mounted in a container

    def on_host(path: Any) -> str:
        return re.sub(f"^({seen})", lambda match: str(folder) + match[0], str(path))

    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: exists(on_host(path)))
    caplog.set_level("INFO")

    def used(*arguments: str) -> tuple[dict[str, Any], str]:
        """The paths on the host that a job uses, by config key, and the log directory that it prints."""
        variables = {**IMAGE, "CONTAINER_RUNTIME": runtime, "DATA_DIR": str(data), "LOGS_DIR": str(logs)}
        options = submission.options(*arguments, **variables)
        for name in ("DATA_DIR", "LOGS_DIR"):
            monkeypatch.setenv(name, submission.environment[name])
        config = configs.load(options.yaml_config, options.config, options.overrides)
        config = open_volumes(config.for_world(1)).config
        paths = {key: [on_host(path) for path in config.paths(key)] for key in (*FILE_KEYS, "expdir")}
        return paths, submission.done.stdout.removeprefix("submit_pm.sh: log directory ").partition(" in place of")[0]

    names = [f"{train}.h5", "train_data.npy", f"{train}_label.npy", "val.h5", "val_data.npy", "val_label.npy"]
    wanted = {key: [f"{data}/{name}"] for key, name in zip(FILE_KEYS, names, strict=True)}
    assert used(f"--yaml_config={YAML}", "--config=base") == ({**wanted, "expdir": [str(logs)]}, str(logs))
    assert f": train_path /data/train.h5 -> {os.environ['DATA_DIR']}/{train}.h5" in caplog.text
    own, announced = used(f"--yaml_config={file}")
    assert (own["train_path"], own["val_path"]) == (["/other/train.h5"], [f"{data}/a/b.h5", "/database/val.h5"])
    assert (own["expdir"], announced) == ([str(logs)], str(logs))
    mine, announced = used(f"--yaml_config={file}", "--set=train_path=/my.h5", "--set", "expdir=mine")
    assert (mine["train_path"], mine["expdir"], announced) == (["/my.h5"], ["mine"], "mine\n")
    assert len(caplog.records) == (3 if runtime == "none" else 1), "one line if a path is replaced"


def test_logs_go_to_the_scratch_file_system_if_there_is_one(submission: Submission, tmp_path: Path) -> None:
    logs = f"{tmp_path}/nbody-unet/logs"
    assert f"log directory {logs} in place of the config's expdir\n" in submission.run(SCRATCH=str(tmp_path)).stdout
    shifter = submission.command(SCRATCH=str(tmp_path), **IMAGE)
    assert (f"--volume={logs}:/logs" in shifter, shifter[-1]) == (True, "expdir=$LOGS_DIR")
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
    assert shifter == ["shifter", f"--image={image}", "--module=gpu,nccl-cu13-plugin", *volumes, *IN_LOGS]
    podman = submission.command(**variables, CONTAINER_RUNTIME="podman-hpc")
    head = ["podman-hpc", "run", "--rm", "--net", "host", "--ipc", "host", "--gpu", "--nccl-cu13", f"--volume={code}"]
    assert podman[: len(head) + 3] == [*head, *volumes, f"--workdir={TOP}"]
    assert podman[-len(IN_LOGS) - 1 :] == [image, *IN_LOGS]
    passed = {"SLURM_*", "MASTER_*", "NCCL_*", "BENCHY_*", "NVIDIA_TF32_OVERRIDE", "TRAIN_EXIT_FILE", "DATA_DIR"}
    assert passed | {"LOGS_DIR"} <= set(podman)
    binds = [f"--bind={mount}" for mount in (code, *mounts)]
    apptainer = ["apptainer", "exec", "--nv", *binds, f"--pwd={TOP}", image, *IN_LOGS]
    assert submission.command(**variables, CONTAINER_RUNTIME="apptainer") == apptainer
    pyxis = [f"--container-image={image}", f"--container-workdir={TOP}"]
    pyxis += [f"--container-mounts={','.join((code, *mounts))}"]
    assert submission.command(**variables, CONTAINER_RUNTIME="pyxis") == [*pyxis, *IN_LOGS]


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
def test_invalid_settings_are_rejected(submission: Submission, tmp_path: Path, variables: Any, message: str) -> None:
    done = submission.run(**{name: value.format(tmp_path) for name, value in variables.items()})
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert not submission.written.exists()


@pytest.mark.parametrize("published", [True, False])
def test_both_names_of_the_data_work_without_a_job(monkeypatch: pytest.MonkeyPatch, published: bool) -> None:
    """Fixed: in the tutorial's container, commands without a job failed. YAML files find either name of the data."""
    pairs = [("train", "downsamp_2048crop_train"), ("val", "downsamp_1024crop_valid")]
    ends = [".h5", "_data.npy", "_label.npy"]
    short, long = ([f"/data/{pair[n]}{end}" for pair in pairs for end in ends] for n in (0, 1))
    named, present = (short, long) if published else (long, short)
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: path in present)
    for paths in (named, present):
        config = configs.Config(**dict(zip(FILE_KEYS, paths, strict=True))).for_world(1)
        assert [path for key in FILE_KEYS for path in open_volumes(config).config.paths(key)] == present
