"""submit_pm.sh on a real Slurm: two nodes, two ranks on each, and everything that Slurm does to a job."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from slurm_cluster import TOP, Cluster, Job

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

FOUR_RANKS = "--nodes=2 --ntasks=4 --ntasks-per-node=2"
EPOCHS, STEPS_PER_EPOCH = 50, 8  # some seconds
NO_GPUS = "--gpus-per-node=0 --cpus-per-task=1"


def train(cluster: Cluster, folder: Path, data_flags: list[str], options: str = FOUR_RANKS) -> Job:
    arguments = ["--config=test", *data_flags, "--set=report_baselines=false", "--num_epochs", str(EPOCHS)]
    return cluster.submit(folder, options, *arguments, LOGS_DIR=str(folder / "logs"))


def checkpoints(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint."""
    found = (folder / "logs/test/4GPU/00/checkpoints").glob("step_*")
    return {int(path.name.removeprefix("step_")): path for path in found}


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    path = checkpoints(folder)[EPOCHS * STEPS_PER_EPOCH]
    return torch.load(path / "weights.pt", weights_only=True)["network"]


def dumped(folder: Path) -> list[dict[str, Any]]:
    """What `stand_in.py dump` of each rank says."""
    files = {int(path.stem): path for path in folder.glob("*.json")}
    return [json.loads(files[rank].read_text()) for rank in sorted(files)]


@pytest.fixture(scope="session", autouse=True)
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that waits for its time limit's warning while the other tests run: Slurm looks every half minute."""
    options = f"--ntasks=1 --nodelist=node1 --partition=high {NO_GPUS}"
    job = cluster.stand_in(tmp_path_factory.mktemp("limited"), options, "wait")
    job.prints("rank 0 waits")
    # The shipped script asks for a warning 120 s before: the next time that Slurm looks.
    cluster.run("scontrol", "update", f"JobId={job.number}", "EndTime=now+2minutes")
    return job


@pytest.fixture(scope="session")
def uninterrupted(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, data_flags: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(cluster, folder, data_flags).ends("COMPLETED")
    return folder


# --- training, and what interrupts it ---


def test_trains(uninterrupted: Path) -> None:
    run = uninterrupted / "logs/test/4GPU/00"
    assert (run / "provenance.json").is_file()
    (output,) = uninterrupted.glob("*.out")
    assert output.read_text().count("Avg train loss=") == EPOCHS, "rank 0 alone logs"
    assert final_weights(uninterrupted)


def goes_on_to_the_same_end(job: Job, folder: Path, uninterrupted: Path) -> None:
    job.ends("COMPLETED")
    assert "Going on from" in job.output
    assert job.output.count("cluster configuration lacks support") == 2, "both runs' output is kept"
    expected, weights = final_weights(uninterrupted), final_weights(folder)
    assert expected.keys() == weights.keys()
    for name, value in expected.items():
        assert torch.equal(value, weights[name]), name


def test_a_warned_training_saves_is_queued_again_and_goes_on(
    cluster: Cluster, uninterrupted: Path, tmp_path: Path, data_flags: list[str]
) -> None:
    job = train(cluster, tmp_path, data_flags)
    job.prints("epoch 3/")
    job.signal_shell("USR1")
    job.is_requeued()
    assert ": SIGUSR1" in job.output
    goes_on_to_the_same_end(job, tmp_path, uninterrupted)


def test_a_preempted_training_saves_is_queued_again_and_goes_on(
    cluster: Cluster, uninterrupted: Path, tmp_path: Path, data_flags: list[str]
) -> None:
    job = train(cluster, tmp_path, data_flags)
    job.prints("epoch 3/")
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--gpus-per-node=4", "--output=/dev/null", "--wrap=sleep 1")
    job.is_requeued()
    assert ": SIGTERM" in job.output
    goes_on_to_the_same_end(job, tmp_path, uninterrupted)


def test_a_training_whose_node_is_gone_goes_on_from_its_last_checkpoint(
    cluster: Cluster, uninterrupted: Path, tmp_path: Path, data_flags: list[str]
) -> None:
    job = train(cluster, tmp_path, data_flags)
    job.prints("epoch 3/")
    bring_back = cluster.freeze("node2", job)
    job.until(lambda: job.state == "PENDING", 30, "requeue")
    bring_back()
    job.is_requeued()
    goes_on_to_the_same_end(job, tmp_path, uninterrupted)


def test_a_cancelled_training_saves_and_stays_cancelled(
    cluster: Cluster, tmp_path: Path, data_flags: list[str]
) -> None:
    job = train(cluster, tmp_path, data_flags)
    job.prints("epoch 3/")
    cluster.run("scancel", job.number)
    job.ends("CANCELLED")
    assert job.field("Restarts") == "0"
    (line,) = (line for line in job.output.splitlines() if "Stopping after step" in line)
    assert int(line.split("step ")[1].split(":")[0]) in checkpoints(tmp_path)


def test_a_rank_that_dies_fails_the_job_at_once(cluster: Cluster, tmp_path: Path, data_flags: list[str]) -> None:
    job = train(cluster, tmp_path, data_flags)
    job.prints("epoch 3/")
    for pid in job.processes(SLURM_PROCID="2"):
        os.kill(pid, signal.SIGKILL)
    job.ends("FAILED", seconds=20)
    assert "task 2: Killed" in job.output
    assert "error: rank 2 (host " in job.output


# --- how it ends ---


def test_the_time_limits_own_warning(limited: Job) -> None:
    limited.prints("rank 0 saves after SIGUSR1", seconds=60)
    limited.is_requeued()
    limited.ends("COMPLETED")
    assert "rank 0 goes on" in limited.output
    assert limited.output.index("warned") < limited.output.index("saves") < limited.output.index("goes on")


def test_a_rank_that_fails_says_why_and_ends_the_others(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.stand_in(tmp_path, FOUR_RANKS, "exit", "1", "3")
    job.ends("FAILED", seconds=20)
    assert "error: rank 1 is out of luck" in job.output
    assert "Exited with exit code 3" in job.output


@pytest.mark.parametrize("code", [2, 76])
def test_other_codes_are_the_jobs(cluster: Cluster, tmp_path: Path, code: int) -> None:
    job = cluster.stand_in(tmp_path, "--ntasks=1", "exit", "0", str(code))
    job.ends("FAILED")
    assert job.field("ExitCode") == f"{code}:0"


def test_a_warning_that_is_a_term_is_passed_on_as_the_stop_signal(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.stand_in(tmp_path, f"{FOUR_RANKS} --signal=B:TERM@120", "wait", STOP_SIGNAL="USR2")
    job.until(lambda: job.output.count("waits") == 4, 30, "start")
    job.signal_shell("TERM")
    job.is_requeued()
    assert job.output.count("saves after SIGUSR2") == 4
    job.ends("COMPLETED")


@pytest.mark.parametrize("program", ["deaf", "late"])
def test_a_step_that_ends_by_a_signal_after_a_warning_is_queued_again(
    cluster: Cluster, tmp_path: Path, program: str
) -> None:
    """The warning came before the program could catch it; or -K1 ended ranks that had saved and were still ending."""
    job = cluster.stand_in(tmp_path, FOUR_RANKS, program)
    job.until(lambda: job.output.count("waits") == 4, 30, "start")
    job.signal_shell("USR1")
    job.is_requeued()
    assert ("User defined signal 1" if program == "deaf" else "Terminated") in job.output
    job.ends("COMPLETED")


def test_a_signal_that_comes_to_the_ranks_alone(cluster: Cluster, tmp_path: Path) -> None:
    """sbatch --signal=USR1@120, or scancel --signal."""
    job = cluster.stand_in(tmp_path, FOUR_RANKS, "wait")
    job.until(lambda: job.output.count("waits") == 4, 30, "start")
    cluster.run("scancel", "--signal=USR1", job.number)
    job.is_requeued()
    assert "warned" not in job.output
    job.ends("COMPLETED")


def test_a_program_that_dies_of_a_preemption_is_queued_again(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.stand_in(tmp_path, FOUR_RANKS, "deaf")
    job.until(lambda: job.output.count("waits") == 4, 30, "start")
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--gpus-per-node=4", "--output=/dev/null", "--wrap=true")
    job.is_requeued()
    job.ends("COMPLETED")


def test_a_program_that_dies_of_a_signal_of_its_own_is_not(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.stand_in(tmp_path, FOUR_RANKS, "deaf")
    job.until(lambda: job.output.count("waits") == 4, 30, "start")
    for pid in job.processes(SLURM_PROCID="3"):
        os.kill(pid, signal.SIGTERM)
    job.ends("FAILED")
    assert job.field("Restarts") == "0"


def test_a_benchmark_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.stand_in(tmp_path, "--ntasks=1", "wait", "--enable_benchy")
    job.prints("waits")
    job.signal_shell("USR1")
    job.prints("a benchmark has nothing to save")
    cluster.run("scancel", job.number)
    job.ends("CANCELLED")
    assert "SIGUSR1" not in job.output


def test_array_jobs_queue_the_task_again(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.stand_in(tmp_path, f"--array=3,7%2 --ntasks=1 {NO_GPUS} --output={tmp_path}/%a.out", "wait")
    tasks = {name: Job(cluster, f"{job.number}_{name}", tmp_path / f"{name}.out") for name in ("3", "7")}
    for task in tasks.values():
        task.prints("waits")
    tasks["7"].signal_shell("USR1")
    tasks["7"].is_requeued()
    tasks["7"].ends("COMPLETED")
    assert tasks["3"].state == "RUNNING"
    cluster.run("scancel", job.number)


def test_requeues_are_limited(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.stand_in(tmp_path, "--ntasks=1", "wait", MAX_REQUEUES="0")
    job.prints("waits")
    job.signal_shell("USR1")
    job.ends("FAILED")
    assert job.field("ExitCode") == "75:0"
    assert "MAX_REQUEUES=0" in job.output


def test_a_job_that_must_not_be_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.stand_in(tmp_path, "--ntasks=1 --no-requeue", "wait")
    job.prints("waits")
    job.signal_shell("USR1")
    job.ends("FAILED")
    assert job.field("ExitCode") == "75:0"
    assert "cannot be requeued" in job.output


# --- what reaches a rank ---

AWKWARD = ["--set=run name=a b", "it's", 'say "x"', "$HOME `id` $(id)", "*", "two\nlines", "", "back\\slash", "--", "ü"]


def test_arguments_arrive_whole(cluster: Cluster, tmp_path: Path) -> None:
    cluster.stand_in(tmp_path, FOUR_RANKS, "dump", str(tmp_path), *AWKWARD).ends("COMPLETED")
    ranks = dumped(tmp_path)
    assert [rank["argv"] for rank in ranks] == [["tests/slurm/stand_in.py", "dump", str(tmp_path), *AWKWARD]] * 4
    ports = {rank["environment"]["MASTER_PORT"] for rank in ranks}
    assert len(ports) == 1


def test_variables_reach_the_ranks_and_nsys_wraps_the_command(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    nsys = tmp_path / "bin" / "nsys"
    nsys.write_text('#!/bin/sh\nexport NSYS="$*"\nwhile [ "$1" != -o ]; do shift; done\nshift 2\nexec "$@"\n')
    nsys.chmod(0o755)
    given = {"BENCHY_OUTPUT": "weak scale", "NVIDIA_TF32_OVERRIDE": "0", "OMP_NUM_THREADS": "3"}
    path = f"{nsys.parent}:{cluster.environment['PATH']}"
    profile = {"ENABLE_PROFILING": "1", "PROFILE_OUTPUT": "baseline", "PATH": path}
    cluster.stand_in(tmp_path, FOUR_RANKS, "dump", str(tmp_path), **given, **profile).ends("COMPLETED")
    options = "profile --trace=cuda,cublas,nvtx --kill none -c cudaProfilerApi -f true -o"
    ranks = dumped(tmp_path)
    assert len(ranks) == 4
    for rank in ranks:
        environment = rank["environment"]
        assert {name: environment[name] for name in given} == given
        assert environment["NSYS"].startswith(f"{options} baseline-rank%q{{SLURM_PROCID}} ")
        assert rank["argv"][1:] == ["dump", str(tmp_path)]


def test_unequal_nodes(cluster: Cluster, tmp_path: Path) -> None:
    cluster.stand_in(tmp_path, "-N2 -n3", "dump", str(tmp_path)).ends("COMPLETED")
    ranks = [rank["environment"] for rank in dumped(tmp_path)]
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"3"}
    assert {rank["MASTER_ADDR"] for rank in ranks} == {"node1"}


def test_sizes_and_gpus(cluster: Cluster, tmp_path: Path) -> None:
    """Four ranks a node, each of which sees all its GPUs, or its own where Slurm is told so."""
    cases = {"-n 1": 1, "-n 8": 8, "-N 2": 8, "-n 2 --gpu-bind=single:1": 2, "-n 4 --gpus-per-task=1": 4}
    jobs = []
    for number, options in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        jobs.append(cluster.stand_in(tmp_path, options, "dump", str(tmp_path / str(number))))
    for number, (options, ranks) in enumerate(cases.items()):
        jobs[number].ends("COMPLETED")
        found = [rank["environment"] for rank in dumped(tmp_path / str(number))]
        assert [rank["WORLD_SIZE"] for rank in found] == [str(ranks)] * ranks
        assert [int(rank["LOCAL_RANK"]) for rank in found] == [rank % 4 for rank in range(ranks)]
        assert {rank["MASTER_ADDR"] for rank in found} == {"node1" if ranks > 4 else "127.0.0.1"}
        gpus = [rank["CUDA_VISIBLE_DEVICES"] for rank in found]
        assert gpus == ([str(rank) for rank in range(ranks)] if "gpu" in options else ["0,1,2,3"] * ranks)


def test_two_jobs_on_one_node_do_not_meet(cluster: Cluster, tmp_path: Path) -> None:
    jobs = [cluster.stand_in(tmp_path, f"-n 2 --nodelist=node1 {NO_GPUS}", "wait") for _ in range(2)]
    for job in jobs:
        job.prints("waits")
    ports = set()
    for job in jobs:
        (pid, *_) = job.processes(SLURM_PROCID="1", RANK="1")
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        ports |= {variable for variable in variables if variable.startswith("MASTER_PORT=")}
    assert len(ports) == 2
    cluster.run("scancel", *(job.number for job in jobs))


def test_containers(cluster: Cluster, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    places = {"DATA_DIR": str(data), "LOGS_DIR": str(tmp_path / "logs")}
    job = cluster.stand_in(tmp_path, "-n 2 --image=some/image:1", "dump", str(tmp_path), **places)
    job.ends("COMPLETED")
    ranks = dumped(tmp_path)
    assert [rank["argv"][1:] for rank in ranks] == [["dump", str(tmp_path)]] * 2
    expected = f"--module=gpu,nccl-plugin --volume={data}:/data --volume={tmp_path}/logs:/logs"
    assert {rank["environment"]["SHIFTER_OPTIONS"] for rank in ranks} == {expected}
    assert (tmp_path / "logs").is_dir()


# --- inside an allocation ---


def allocate(cluster: Cluster, *command: str) -> subprocess.Popen[str]:
    """At a terminal, as far as Slurm can tell."""
    inner = ["salloc", *FOUR_RANKS.split(), *NO_GPUS.split(), *command]
    return subprocess.Popen(
        ["script", "--quiet", "--return", "--command", shlex.join(inner), "/dev/null"],
        cwd=TOP,
        env={**cluster.environment, "TRAIN_SCRIPT": "tests/slurm/stand_in.py"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def number_once_ranks_wait(process: subprocess.Popen[str]) -> str:
    """The job's number."""
    lines: list[str] = []
    while sum("waits" in line for line in lines) < 4:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    return next(line.split()[-1] for line in lines if "Granted job allocation" in line)


def test_inside_an_allocation(cluster: Cluster, tmp_path: Path) -> None:
    by_hand = 'srun bash -c \'source ./export_DDP_vars.sh; exec "$@"\' _ "$PYTHON" "$TRAIN_SCRIPT" dump "$1/by_hand"'
    (tmp_path / "by_hand").mkdir()
    process = allocate(cluster, "bash", "-c", f'bash submit_pm.sh dump "$1" && {by_hand}', "_", str(tmp_path))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    for folder in (tmp_path, tmp_path / "by_hand"):
        assert [rank["environment"]["LOCAL_RANK"] for rank in dumped(folder)] == ["0", "1", "0", "1"]


def test_inside_an_allocation_nothing_is_requeued(cluster: Cluster) -> None:
    process = allocate(cluster, "bash", "submit_pm.sh", "wait")
    job = Job(cluster, number_once_ranks_wait(process), Path(os.devnull))
    shells = (
        pid for pid in job.processes() if Path(f"/proc/{pid}/cmdline").read_text().startswith("bash\0submit_pm.sh")
    )
    os.kill(next(shells), signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "the same command goes on from there" in output
    job.ends("FAILED")


def test_ctrl_c_ends_all_ranks(cluster: Cluster) -> None:
    process = allocate(cluster, "bash", "submit_pm.sh", "deaf")
    number_once_ranks_wait(process)
    started = time.monotonic()
    output, _ = process.communicate("\x03", timeout=60)
    assert process.returncode == 130, output
    assert output.count("KeyboardInterrupt") == 4, output
    assert time.monotonic() - started < 20
