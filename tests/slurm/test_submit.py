"""submit_pm.sh on a real Slurm of two nodes with two ranks each: warnings, preemption, requeue, failures."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import GENEROUS, TOP, start_ranks
from slurm_cluster import Cluster, Job, Unavailable, private_cluster
from trainings import assert_same_training, directory

from utils import config as configs
from utils.run.checkpoint import saved_steps

pytestmark = pytest.mark.slurm

FOUR_RANKS = "--nodes=2 --ntasks=4 --ntasks-per-node=2"
STEPS = 192  # of 24 epochs
NO_GPUS = "--gpus-per-node=0 --cpus-per-task=1"
LOGS = "lögs #1: 'a' \"$HOME\" %s\\n \n"  # a name with characters of YAML and of shells


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # SIGTERM to pytest also stops the cluster.
    previous = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("SIGTERM", 128 + signal.SIGTERM))
    try:
        with private_cluster() as cluster:
            yield cluster
    except Unavailable as reason:
        pytest.skip(str(reason))
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.fixture(scope="module")
def flags(data_flags: list[str]) -> list[str]:
    return ["--config=test", *data_flags, "--set=report_baselines=false", "--num_epochs=24"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, flags: list[str]) -> Path:
    """The same run on four ranks without Slurm and without interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    ranks = start_ranks(["train.py", *flags, f"--set=expdir={folder}"], 4, folder)
    assert [rank.end().returncode for rank in ranks] == [0] * 4, ranks[0].text
    return directory(folder, 4)


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path, flags: list[str]) -> tuple[Job, list[int]]:
    """A training run in its third epoch, and the process ids of its ranks, which are suspended there."""
    job = cluster.submit(tmp_path, FOUR_RANKS, *flags, LOGS_DIR=str(tmp_path / LOGS))
    job.wait_for("epoch 3/")
    ranks = [pid for rank in range(4) for pid in job.processes(RANK=str(rank))]
    assert len(ranks) == 4, job.output
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    return job, ranks


def has_pending_signal(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return re.search(r"^ShdPnd:\s*0*[1-9a-f]", status, re.MULTILINE) is not None


def resume(ranks: list[int]) -> None:
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)


def stopped_after(job: Job, by: str) -> int:
    """The step after which all ranks stopped; rank 0 may learn of the signal from another rank."""
    (step,) = re.findall(rf"Stopping after step (\d+): (?:{by}|a signal to another rank)$", job.output, re.MULTILINE)
    assert 0 < int(step) < STEPS
    return int(step)


@pytest.mark.parametrize("by", ["SIGTERM", *(pytest.param(by, marks=pytest.mark.slow) for by in ("SIGUSR1", "node"))])
def test_an_interrupted_training_run_is_requeued_and_resumes(
    cluster: Cluster, training: tuple[Job, list[int]], uninterrupted: Path, tmp_path: Path, by: str
) -> None:
    """After a preemption, a warning of the time limit, or the failure of a node. Both starts write to one file."""
    (job, ranks), run = training, directory(tmp_path / LOGS, 4)
    newest = saved_steps(run / "checkpoints")[0]
    saved = [newest, newest + 8]  # the next one may have been half written when the ranks were suspended
    if by == "SIGTERM":
        cluster.preempt()  # Slurm sends SIGCONT and SIGTERM to the ranks
    elif by == "SIGUSR1":
        job.signal_shell("USR1")
        job.wait_until(lambda: all(map(has_pending_signal, ranks)), "SIGUSR1 for all ranks")
        resume(ranks)
    else:
        bring_back = cluster.freeze("node2", job)
        resume(sorted(set(ranks) & set(job.processes(SLURMD_NODENAME="node1"))))
        job.wait_until(lambda: job.state == "PENDING", "requeue")
        bring_back()
    job.is_requeued()
    job.ends("COMPLETED")
    if by == "node":
        assert "Stopping" not in job.output
    else:
        saved = [stopped_after(job, by)]
        assert job.output.count("Avg train loss=") == 24
    (step,) = re.findall(r"Resuming from (?s:.*), after step (\d+)$", job.output, re.MULTILINE)
    assert int(step) in saved
    assert_same_training(uninterrupted, run, STEPS)


@pytest.mark.slow
def test_a_canceled_training_saves_and_stays_canceled(cluster: Cluster, training: Any, tmp_path: Path) -> None:
    job, _ = training
    cluster.run("scancel", job.number)
    job.ends("CANCELLED")
    assert job.field("Restarts") == "0"
    assert stopped_after(job, "SIGTERM") in saved_steps(directory(tmp_path / LOGS, 4) / "checkpoints")


def test_a_shell_of_srun_pty_without_other_ranks_is_refused_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Fixed: rank 0 waited for ten minutes. `srun --pty` in front of the command itself starts all ranks."""
    program = "from utils.distributed.launch import read_launch; print(read_launch())"
    command = shlex.join([sys.executable, "-c", program])
    results = []
    for task, typed in (("bash", f"{command}\nexit\n"), (command, "")):
        terminal = ["script", "-qec", f"srun -n 2 --pty {task}", str(tmp_path / "typescript")]
        options: dict[str, Any] = {"cwd": TOP, "env": cluster.environment, "timeout": GENEROUS}
        results.append(subprocess.run(terminal, input=typed, capture_output=True, text=True, **options).stdout)
    assert "this shell of srun --pty is rank 0 of 2, without the others; start them all with srun -n 2" in results[0]
    assert "Launch(launcher='slurm', rank=0, local_rank=0, world_size=2" in results[1]


def test_bad_input_ends_the_job_with_exit_code_2(cluster: Cluster, tmp_path: Path) -> None:
    """The job had exit code 143, because -K1 ends the other ranks while they wait for rank 0 to print."""
    job = cluster.submit(tmp_path, FOUR_RANKS, "--config=test", "--num_epoch=3", LOGS_DIR=str(tmp_path / LOGS))
    job.ends("FAILED")
    assert job.field("ExitCode") == "2:0"
    assert job.output.count("error: unrecognized arguments: --num_epoch=3; did you mean --num_epochs?") == 1
    assert list((tmp_path / LOGS).iterdir()) == []


def test_arguments_and_variables_reach_every_rank_unchanged_on_unequal_nodes(cluster: Cluster, tmp_path: Path) -> None:
    awkward = ["--set=run name=a b", 'it\'s "x" $HOME `id` $(id)', "*", "two\nlines", "", "back\\slash", "--", "ü"]
    given = {"BENCHY_OUTPUT": "weak scale", "OMP_NUM_THREADS": "3"}
    cluster.stand_in(tmp_path, "-N2 -n3", "dump", str(tmp_path), *awkward, **given).ends("COMPLETED")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [rank["argv"] for rank in ranks] == [["tests/slurm/stand_in.py", "dump", str(tmp_path), *awkward]] * 3
    environments = [rank["environment"] for rank in ranks]
    assert [{name: rank[name] for name in given} for rank in environments] == [given] * 3
    variables = [[rank[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")] for rank in environments]
    assert variables == [["0", "0", "3", "node1"], ["1", "1", "3", "node1"], ["2", "0", "3", "node1"]]
    assert len({rank["MASTER_PORT"] for rank in environments}) == 1
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in environments} == {"0,1,2,3"}


def test_the_default_partition_accepts_the_script_without_a_time_limit_of_its_own(cluster: Cluster) -> None:
    """Its jobs may run for 30 minutes, as in Perlmutter's debug QOS. The script asked for 4 hours and was refused."""

    def answer(options: str) -> str:
        command = ["sbatch", "--test-only", *shlex.split(options), "submit_pm.sh", "--config=short"]
        return subprocess.run(command, cwd=TOP, env=cluster.environment, capture_output=True, text=True).stderr

    assert "using 128 processors on nodes node1 in partition low" in answer("")
    assert "using 64 processors on nodes node1" in answer("-q shared -n 2 --ntasks-per-node=2 --gpus-per-node=2")
    assert "Requested time limit is invalid" in answer("-q regular -t 4:00:00")


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job close to its time limit. Slurm checks limits every 30 s, so other tests run meanwhile."""
    options = f"--ntasks=1 --nodelist=node1 --partition=high {NO_GPUS}"
    job = cluster.stand_in(tmp_path_factory.mktemp("limited"), options, "wait")
    job.wait_for("rank 0 waits")
    # submit_pm.sh requests a warning 120 s before the end.
    cluster.run("scontrol", "update", f"JobId={job.number}", "EndTime=now+2minutes")
    return job


@pytest.mark.slow
@pytest.mark.usefixtures("limited")
def test_a_job_that_was_requested_to_stop_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    """The signal goes to the shell or to the ranks; the step may also end by a signal, also of a preemption."""
    options = f"{FOUR_RANKS} {NO_GPUS}"
    translated = cluster.stand_in(tmp_path, f"{options} --signal=B:TERM@120", "wait", STOP_SIGNAL="USR2")
    deaf, late, alone = (cluster.stand_in(tmp_path, options, program) for program in ("deaf", "late", "wait"))
    preempted = cluster.stand_in(tmp_path, FOUR_RANKS, "deaf")  # the only one with GPUs
    jobs = (translated, deaf, late, alone, preempted)
    for job in jobs:
        job.wait_for(" waits", 4)
    translated.signal_shell("TERM")
    deaf.signal_shell("USR1")
    late.signal_shell("USR1")
    cluster.run("scancel", "--signal=USR1", alone.number)
    cluster.preempt()
    for job in jobs:
        job.is_requeued()
    for job in jobs:
        job.ends("COMPLETED")
    assert "rank 3 saves after SIGUSR2" in translated.output
    assert "User defined signal 1" in deaf.output, "the ranks do not catch the signal"
    assert "Terminated" in late.output, "-K1 ends ranks that have saved"
    assert "rank 3 saves after SIGUSR1" in alone.output
    assert ["warned" in job.output for job in jobs] == [True, True, True, False, False]


@pytest.mark.slow
def test_a_sweep_as_a_job_array(cluster: Cluster, tmp_path: Path, flags: list[str]) -> None:
    """As docs/logging.md describes it: each task trains with its own values."""
    page = (TOP / "docs/logging.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(# train_sweep\.py: .*?)^```", page, re.DOTALL | re.MULTILINE)
    script = tmp_path / "train_sweep.py"
    script.write_text(source, encoding="utf-8")
    options = f"--array=1,4 --ntasks=1 {NO_GPUS} --output={shlex.quote(str(tmp_path / '%a.out'))}"
    given = [*flags, "--num_epochs=1", "--run_num=rates", f"--set=expdir={tmp_path}"]
    job = cluster.submit(tmp_path, options, *given, TRAIN_SCRIPT=str(script), PYTHONPATH=str(TOP))
    for task, rate, seed in (("1", 1e-4, 1), ("4", 4e-4, 0)):
        Job(cluster, f"{job.number}_{task}", tmp_path / f"{task}.out").ends("COMPLETED")
        config = configs.load(str(directory(tmp_path, 1, f"rates-{task}") / "config.yaml"), "test")
        assert (config.lr_schedule.start_lr, config.seed) == (rate, seed)


@pytest.mark.slow
def test_the_warning_of_the_time_limit_requeues_the_job(limited: Job) -> None:
    limited.wait_for("rank 0 saves after SIGUSR1")
    limited.is_requeued()
    limited.ends("COMPLETED")
    assert limited.output.index("warned") < limited.output.index("saves") < limited.output.index("is restarted")
