"""The launcher's view of this process: its rank, the number of ranks, and how an entry script runs and exits.

The launcher is identified by the environment: torchrun (or `export_DDP_vars.sh`) sets RANK, LOCAL_RANK and WORLD_SIZE;
several ranks of `mpiexec` have the variables of their MPI; inside an `srun` step Slurm's own variables are used;
otherwise there is one rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import re
import socket
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from utils.errors import LocalError, UserError, record_exit_code

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# As set by Open MPI; MVAPICH; MPICH and Intel MPI; Cray's PMI; PALS. The first one that is set counts.
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "PMIX_RANK")
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
MPI_LOCAL_RANKS = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
)
MPI_LOCAL_SIZES = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
)
# Differ between two starts of mpiexec: Open MPI 4, Open MPI 5, PALS, MVAPICH. MPICH sets none: then the batch job.
MPI_JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PALS_APID", "MPIRUN_ID", "PBS_JOBID", "SLURM_JOB_ID")
RESTART_COUNTS = {"slurm": "SLURM_RESTART_COUNT", "torchrun": "TORCHELASTIC_RESTART_COUNT"}
DEFAULT_PORT = 29500
HOW_TO_START = "start through torchrun, srun or mpiexec"


@dataclass(frozen=True)
class Launch:
    """Rank, number of ranks and rendezvous address, as set by the launcher.

    job: the launcher's name for this start, the same on all ranks; may be empty.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    job: str = ""


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Reads the launcher's variables; raises UserError if they are incomplete or inconsistent."""
    env = os.environ if environment is None else environment
    if any(name in env for name in TORCHRUN_VARIABLES):
        launch = _read_torchrun(env)
    elif _is_mpi_rank(env):
        launch = _read_mpi(env)
    elif _is_in_slurm_step(env):
        launch = _read_slurm(env)
    else:
        return Launch("single process")
    if not 0 <= launch.rank < launch.world_size or not 0 <= launch.local_rank < launch.world_size:
        raise LocalError(
            f"the rank environment is inconsistent: rank {launch.rank} (local {launch.local_rank}) of "
            f"{launch.world_size}; {HOW_TO_START}"
        )
    if not 0 < launch.master_port < 2**16:
        raise LocalError(f"MASTER_PORT must be between 1 and 65535, not {launch.master_port}")
    return replace(launch, job=_job(env, launch))


def _read_torchrun(env: Mapping[str, str]) -> Launch:
    missing = [name for name in TORCHRUN_VARIABLES if name not in env]
    if missing:
        raise LocalError(
            f"the rank environment is incomplete: {', '.join(missing)} missing; {HOW_TO_START}, "
            f"or unset {', '.join(name for name in TORCHRUN_VARIABLES if name in env)}"
        )
    rank, local_rank, size = (_integer(env, name) for name in TORCHRUN_VARIABLES)
    if size > 1 and not env.get("MASTER_ADDR"):
        raise LocalError("the rank environment is incomplete: MASTER_ADDR missing; set it to the first node's name")
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    address = env.get("MASTER_ADDR") or "127.0.0.1"
    return Launch(launcher, rank, local_rank, size, address, _integer(env, "MASTER_PORT", DEFAULT_PORT))


def _is_in_slurm_step(env: Mapping[str, str]) -> bool:
    """True for a task of srun. A batch script also has SLURM_PROCID=0 and SLURM_NTASKS, but no other ranks."""
    return "SLURM_STEP_ID" in env and "SLURM_PROCID" in env


def _slurm_tasks(env: Mapping[str, str]) -> int:
    return _integer(env, "SLURM_STEP_NUM_TASKS", _integer(env, "SLURM_NTASKS", 1))


def _read_slurm(env: Mapping[str, str]) -> Launch:
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    # On a single node use the loopback address: the node's name may not resolve inside a container.
    one_node = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1"
    return Launch(
        "slurm",
        _integer(env, "SLURM_PROCID"),
        _integer(env, "SLURM_LOCALID"),
        _slurm_tasks(env),
        env.get("MASTER_ADDR") or ("" if one_node else first_host(nodes)) or "127.0.0.1",
        _integer(env, "MASTER_PORT", _slurm_port(env)),
    )


def _slurm_port(env: Mapping[str, str]) -> int:
    """A port derived from job and step, because jobs may share a node, and steps a job; as in export_DDP_vars.sh."""
    step = env["SLURM_STEP_ID"]
    number = int(step) if step.isdecimal() else 0
    return 15000 + (_integer(env, "SLURM_JOB_ID", 0) * 7 + number * 1009) % 15000


def _is_mpi_rank(env: Mapping[str, str]) -> bool:
    """True for one of several ranks of mpiexec; raises UserError if their number is unknown."""
    rank, size = _first_set(env, MPI_RANKS), _first_set(env, MPI_SIZES)
    if rank and not size and not _is_in_slurm_step(env):
        raise _incomplete(rank, MPI_SIZES)
    if not size or _integer(env, size) <= 1:
        return False
    # srun sets variables of PMI and PALS as well (--mpi=pmi2, --mpi=cray_shasta), with its own values. But mpiexec in a
    # Slurm allocation starts its daemons in a step, so that each rank has its daemon's SLURM_PROCID.
    is_mpiexec = size != "PMI_SIZE" or "MPI_LOCALRANKID" in env
    return is_mpiexec or not _is_in_slurm_step(env) or _integer(env, size) != _slurm_tasks(env)


def _read_mpi(env: Mapping[str, str]) -> Launch:
    rank, size, local_rank = (_first_set(env, names) for names in (MPI_RANKS, MPI_SIZES, MPI_LOCAL_RANKS))
    if not rank or not local_rank:
        raise _incomplete(size, MPI_LOCAL_RANKS if rank else MPI_RANKS)
    # The port depends on the start, because a node may run several.
    job = _mpi_job(env)
    port = 15000 + zlib.crc32(job.encode("utf-8", "surrogateescape")) % 15000 if job else DEFAULT_PORT
    return Launch(
        "mpiexec",
        _integer(env, rank),
        _integer(env, local_rank),
        _integer(env, size),
        env.get("MASTER_ADDR") or _mpi_address(env, _integer(env, size)),
        _integer(env, "MASTER_PORT", port),
    )


def _incomplete(name: str, missing: Sequence[str]) -> UserError:
    return UserError(
        f"the rank environment is incomplete: {name} is set, but none of {', '.join(missing)}; set RANK, LOCAL_RANK, "
        "WORLD_SIZE and MASTER_ADDR for each rank, or start through torchrun"
    )


def _mpi_address(env: Mapping[str, str], size: int) -> str:
    """The loopback address on a single node, or else the first node of the batch job, where mpiexec starts rank 0."""
    if _integer(env, _first_set(env, MPI_LOCAL_SIZES), 0) == size:
        return "127.0.0.1"
    first, remedy = first_host(env.get("SLURM_JOB_NODELIST", "")), "export MASTER_ADDR=<name of rank 0's node>"
    if env.get("PBS_NODEFILE"):
        remedy = 'export MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")" before mpiexec'
        with contextlib.suppress(OSError):  # PBS writes it on the job's first node only
            first = Path(env["PBS_NODEFILE"]).read_text(errors="replace").partition("\n")[0].strip()
    if not first:
        raise LocalError(
            f"MASTER_ADDR is missing for the {size} ranks of mpiexec on several nodes; {remedy} (with Open MPI also "
            "mpiexec -x MASTER_ADDR)"
        )
    return first


def _first_set(env: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of the names that is set, or an empty text."""
    return next((name for name in names if env.get(name)), "")


def _mpi_job(env: Mapping[str, str]) -> str:
    return env.get(_first_set(env, MPI_JOBS), "")


def _job(env: Mapping[str, str], launch: Launch) -> str:
    """torchrun's run id, Slurm's job and step, or the id of mpiexec or its batch job."""
    if "TORCHELASTIC_RUN_ID" in env:
        return f"torchrun {env['TORCHELASTIC_RUN_ID']}"
    if launch.launcher == "mpiexec":
        return f"mpiexec {_mpi_job(env)}".strip()
    tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS"))
    if "SLURM_STEP_ID" in env and tasks == str(launch.world_size):  # ranks with RANK may belong to several steps
        return f"slurm {env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    return ""


def torchrun_has_ended(launch: Launch, environment: Mapping[str, str] | None = None) -> bool:
    """True if torchrun was killed before this process asked the kernel for a signal at its end.

    torchrun listens before it starts ranks. Its process id is no help: a wrapper may be between it and this process,
    and an orphan's new parent is not always process 1.
    """
    env = os.environ if environment is None else environment
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        socket.create_connection((launch.master_addr, launch.master_port), 10.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # reported by the rendezvous
    return False


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise LocalError(f"the rank environment is incomplete: {name} missing; {HOW_TO_START}")
        return default
    try:
        return int(text)
    except ValueError:
        raise LocalError(f"{name} must be an integer, not {text!r}; {HOW_TO_START}") from None


def restarted(environment: Mapping[str, str] | None = None) -> bool:
    """True if the launcher has restarted this job; Slurm and torchrun both count restarts."""
    env = os.environ if environment is None else environment
    return any(env.get(name, "0") not in ("", "0") for name in RESTART_COUNTS.values())


def lasting_jobs(environment: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """The names of this job that stay the same when a launcher restarts it, and those of launchers that have done so.

    Slurm's job, and the log directory of torchrun's agent on this node: torchrun's run id is "none" by default.
    """
    env = os.environ if environment is None else environment
    # TORCHELASTIC_ERROR_FILE is <log directory>/<run id>_<random>/attempt_<restarts>/<local rank>/error.json.
    attempt = Path(env.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    agent = attempt.parent.name if attempt.name.startswith("attempt_") else env.get("TORCHELASTIC_RUN_ID", "none")
    names = {"slurm": env.get("SLURM_JOB_ID", ""), "torchrun": "" if agent == "none" else agent}
    jobs = {launcher: f"{launcher} {name}" for launcher, name in names.items() if name}
    return list(jobs.values()), [
        job for name, job in jobs.items() if env.get(RESTART_COUNTS[name], "0") not in ("", "0")
    ]


def first_host(nodelist: str) -> str:
    """First name in Slurm's compressed list: 'nid[001004-001007,2]' -> 'nid001004', 'r[1-2]n[3,5]-ib' -> 'r1n3-ib'."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group()) if first else ""


def run_script(main: Callable[[], None]) -> None:
    """Runs an entry script's `main` and exits; with several ranks, without the interpreter's shutdown.

    Threads of a process group that DistributedDataParallel has used survive destroy_process_group. In about 1 of 60
    runs (PyTorch 2.13, gloo) one of them requested the GIL during the shutdown and aborted the process, and the batch
    system counted a completed training as failed.
    """
    faulthandler.enable()  # a traceback of a fatal signal, such as SIGBUS when a mapped file shrinks
    code = 0
    try:
        main()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    record_exit_code(code)
    if _is_single_rank():
        sys.exit(code)
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_single_rank() -> bool:
    try:
        return read_launch().world_size == 1
    except UserError:
        return True
