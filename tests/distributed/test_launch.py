"""Launchers' environments, errors before the ranks are connected, exits, and the same run under each launcher."""

import json
import os
import resource
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from processes import GENEROUS, TOP, Program, free_port, is_free, rank_variables, run
from trainings import directory, metrics

from utils.distributed.launch import Launch, allow_open_files, read_launch
from utils.errors import LocalError, UserError, one_line_errors
from utils.launchers import launched_rank

# Rank 5 of 8 ranks on two nodes.
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
SLURM_STEP = {
    "SLURM_JOB_ID": "3003",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NODELIST": "nid[000001-000004]",
    "SLURM_STEP_NODELIST": "nid[000003-000004]",
}
STEP_PORT = 15000 + (3003 * 7 + 2 * 1009) % 15000
BATCH_SCRIPT = {key: value for key, value in SLURM_STEP.items() if "STEP" not in key}


def names(pattern: str) -> dict[str, str]:
    roles = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return {pattern.format(role): value for role, value in zip(roles, ("5", "8", "1", "4"), strict=True)}


CRAY = {**names("PMI_{}"), "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1"}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {**CRAY, "PALS_APID": "1a2b", "PBS_JOBID": "17.pbs"}
OPEN_MPI = names("OMPI_COMM_WORLD_{}")
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_ID": "f2xY"}
FLUX |= {"FLUX_JOB_NNODES": "2", "PMI_RANK": "5", "PMI_SIZE": "8"}
# The variables, and the name of the start, from which the port is derived.
MPI: dict[str, tuple[dict[str, str], str]] = {
    "Open MPI 4": ({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "7", "PMIX_NAMESPACE": "7"}, "7"),
    "Open MPI 5": ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node1-9@1"}, "prterun-node1-9@1"),
    "MVAPICH": ({**names("MV2_COMM_WORLD_{}"), "MPIRUN_ID": "4711"}, "4711"),
    "MPICH": (HYDRA, ""),
    "PALS": (PALS, "1a2b"),
    "Flux": (FLUX, "f2xY"),
}


def slurm(address: str = "nid000003", port: int = STEP_PORT) -> Launch:
    return Launch("slurm", 5, 1, 8, address, port)


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch("single process", 0, 0, 1)),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, Launch("torchrun", 5, 1, 8, "node1", 29400)),
        # export_DDP_vars.sh sets these inside a Slurm step; they take precedence over Slurm's own.
        ({**SLURM_STEP, **TORCHRUN, "RANK": "2"}, Launch("environment", 2, 1, 8, "node1", 29400)),
        (SLURM_STEP, slurm()),
        ({**SLURM_STEP, "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1234"}, slurm("elsewhere", 1234)),
        ({**SLURM_STEP, "SLURM_STEP_NUM_NODES": "1"}, slurm("127.0.0.1")),
        ({**SLURM_STEP, "SLURM_STEP_ID": "interactive"}, slurm(port=21021)),
        # `srun --mpi=cray_shasta` and `--mpi=pmi2` set variables of MPI as well, the latter without local ranks.
        ({**SLURM_STEP, **CRAY}, slurm()),
        # A batch script also has SLURM_PROCID=0 and SLURM_NTASKS=16, but no other ranks.
        ({**BATCH_SCRIPT, "SLURM_PROCID": "0"}, Launch("single process")),
    ],
)
def test_the_launcher_is_found_from_the_environment(environment: dict[str, str], launch: Launch) -> None:
    assert read_launch(environment) == launch


@pytest.mark.parametrize("mpi", MPI)
def test_ranks_of_mpiexec_use_the_variables_of_their_mpi(mpi: str) -> None:
    """Also in an allocation of Slurm, where mpiexec starts its daemons in a step with one task per node."""
    variables, job = MPI[mpi]
    daemons = {**SLURM_STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    # srun itself sets the variables of PALS.
    for step in [{}] if mpi == "PALS" else [{}, daemons, {**daemons, "SLURM_STEP_NUM_TASKS": "8"}]:
        environment, start = {**step, **variables, "MASTER_ADDR": "node1"}, job or step.get("SLURM_JOB_ID", "")
        port = 15000 + zlib.crc32(start.encode()) % 15000 if start else 29500
        assert read_launch(environment) == Launch("mpiexec", 5, 1, 8, "node1", port)
        assert read_launch({**environment, "MASTER_PORT": "1234"}).master_port == 1234
        assert read_launch({**environment, **TORCHRUN}).launcher == "environment"
    single = {name: "1" if "SIZE" in name or "NRANKS" in name else value for name, value in variables.items()}
    assert read_launch(single) == Launch("single process")
    assert read_launch({**SLURM_STEP, **single}).launcher == "slurm"


def test_ranks_of_mpiexec_know_the_address_of_rank_0(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("x3005c0s7b0n0.hsn.cm\nx3005c0s7b1n0.hsn.cm\n")
    pbs = {**PALS, "PBS_NODEFILE": str(nodes)}
    assert read_launch(pbs).master_addr == "x3005c0s7b0n0.hsn.cm"
    assert read_launch({**pbs, "PMI_LOCAL_SIZE": "8"}).master_addr == "127.0.0.1", "all ranks are on one node"
    assert read_launch({**FLUX, "FLUX_JOB_NNODES": "1"}).master_addr == "127.0.0.1"
    with pytest.raises(LocalError, match=r"MASTER_ADDR is missing .*flux hostlist -n 0"):
        read_launch(FLUX)
    assert read_launch({**HYDRA, "SLURM_JOB_NODELIST": "nid[000001-000002]"}).master_addr == "nid000001"
    nodes.unlink()  # PBS may write it on the job's first node only
    with pytest.raises(LocalError, match=r"MASTER_ADDR is missing .* MASTER_ADDR=.*head -n 1.* before mpiexec"):
        read_launch(pbs)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PMIX_RANK": "0"}, "incomplete: PMIX_RANK is set, but no .*; set RANK, "),  # of an unknown MPI
        ({"RANK": "5", "WORLD_SIZE": "8"}, "incomplete: LOCAL_RANK missing"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "incomplete: MASTER_ADDR missing"),
        ({"SLURM_PROCID": "5", "SLURM_STEP_ID": "2"}, "incomplete: SLURM_LOCALID missing"),
        ({**TORCHRUN, "RANK": "8"}, "inconsistent: rank 8 .* of 8"),
        ({**TORCHRUN, "RANK": "five"}, "RANK must be an integer, not 'five'"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT must be between 1 and 65535, not 99999"),
    ],
)
def test_an_incomplete_or_inconsistent_environment_is_rejected(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_launch(environment)


def test_rank_is_known_before_the_ranks_meet(monkeypatch: Any) -> None:
    """Each variable takes precedence over the earlier ones. A batch script has SLURM_PROCID without a step."""
    variables = {"SLURM_PROCID": ("4", 0), "SLURM_STEP_ID": ("0", 4), "PMI_RANK": ("1", 1), "RANK": ("3", 3)}
    for name, (value, rank) in variables.items():
        monkeypatch.setenv(name, value)
        assert launched_rank() == rank
    monkeypatch.setenv("RANK", "x")
    assert launched_rank() == 1


@pytest.mark.parametrize(
    ("rank", "error", "printed"), [(0, UserError, True), (1, UserError, False), (1, LocalError, True)]
)
def test_rank_0_prints_errors_of_all_ranks_and_the_others_wait(
    monkeypatch: Any, capsys: Any, rank: int, error: type[UserError], printed: bool
) -> None:
    """torchrun stops all ranks when one exits: if rank 1 exited first, no rank would print the line."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as stop, one_line_errors():
        raise error("wrong\nin two lines")
    assert stop.value.code == 2
    assert capsys.readouterr().err == ("error: wrong in two lines\n" if printed else "")
    assert bool(waited) != printed


ENDING = """
import os, sys
from utils.distributed.launch import run_script
class Last:
    def __del__(self): os.write(1, b" shut down")
sys.modules["last"] = Last()
def main(): {}
run_script(main)
"""


@pytest.mark.parametrize(
    ("ranks", "redirection", "ending", "code", "output", "error"),
    [
        (1, "", "print('done', end=''); sys.exit(75)", 75, "done shut down", ""),
        # Fixed: it ended with exit code 1, without a line.
        (1, "2>&-", "sys.stderr.write('lost'); print('done', end=''); sys.exit(75)", 75, "done shut down", ""),
        (2, "", "print('done', end=''); sys.exit(75)", 75, "done", ""),
        (2, "", "sys.exit('a reason')", 1, "", "a reason\n"),
        (2, "", "print('lost', end=''); raise ValueError('broken')", 1, "lost", "ValueError: broken\n"),
    ],
)
def test_one_of_several_ranks_skips_the_interpreters_shutdown_but_loses_no_output(
    ranks: int, redirection: str, ending: str, code: int, output: str, error: str
) -> None:
    """A thread of the process group may abort the process in the shutdown."""
    environment = {**os.environ, **rank_variables(ranks - 1, ranks, 1234), "PYTHONPATH": str(TOP)}
    command = ["bash", "-c", f'exec "$@" {redirection}', "_", sys.executable, "-c", ENDING.format(ending)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stdout) == (code, output)
    assert done.stderr.endswith(error)
    assert bool(done.stderr) is bool(error)


def test_one_rank_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    """Fixed: the limit was raised for several ranks only, and 80 chunked volumes exceeded one of 64."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_torchrun_slurm_and_a_single_process_give_the_same_losses(data_flags: list[str], tmp_path: Path) -> None:
    arguments = ["train.py", "--config=test", *data_flags, f"--set=expdir={tmp_path}", "--set=report_baselines=false"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launched = run([*torchrun, *arguments, "--run_num=torchrun"], tmp_path / "torchrun")
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
    losses = {}
    for name, ranks in (("00", 1), ("torchrun", 2), ("slurm", 2)):
        folder = directory(tmp_path, ranks, name)
        provenance = json.loads((folder / "provenance.json").read_text())
        assert provenance["world_size"] == len(provenance["hostnames"]) == ranks
        losses[name] = [record["Loss/valid"] for record in metrics(folder) if "Loss/valid" in record]
    assert len(losses["00"]) == 3
    assert losses["00"][-1] < losses["00"][0]
    assert losses["torchrun"] == pytest.approx(losses["00"], rel=1e-4)
    assert losses["slurm"] == pytest.approx(losses["00"], rel=1e-4)
