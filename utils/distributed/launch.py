"""The launcher's view of this process: its rank, the number of ranks, and how an entry script runs and exits.

The launcher is identified by the environment: torchrun (or `export_DDP_vars.sh`) sets RANK, LOCAL_RANK and WORLD_SIZE;
inside an `srun` step Slurm's own variables are used; otherwise there is one rank. `mpiexec` is not supported.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from utils.errors import LocalError, UserError, record_exit_code

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# Number of ranks, as set by Open MPI; MPICH, Intel MPI and PALS; MVAPICH.
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
DEFAULT_PORT = 29500


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
    """Reads the launcher's variables; raises UserError if they are incomplete, inconsistent or not supported."""
    env = os.environ if environment is None else environment
    if any(name in env for name in TORCHRUN_VARIABLES):
        launch = _read_torchrun(env)
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        # Only inside a step: a batch script also has SLURM_PROCID=0 and SLURM_NTASKS, but no other ranks.
        launch = _read_slurm(env)
        _reject_mpiexec(env, launch.world_size)
    else:
        _reject_mpiexec(env, 1)
        return Launch("single process")
    if not 0 <= launch.rank < launch.world_size or not 0 <= launch.local_rank < launch.world_size:
        raise LocalError(
            f"the rank environment is inconsistent: rank {launch.rank} (local {launch.local_rank}) of "
            f"{launch.world_size}; start through torchrun or srun"
        )
    if not 0 < launch.master_port < 2**16:
        raise LocalError(f"MASTER_PORT must be between 1 and 65535, not {launch.master_port}")
    return replace(launch, job=_job(env, launch.world_size))


def _read_torchrun(env: Mapping[str, str]) -> Launch:
    missing = [name for name in TORCHRUN_VARIABLES if name not in env]
    if missing:
        raise LocalError(
            f"the rank environment is incomplete: {', '.join(missing)} missing; start through torchrun or srun, "
            f"or unset {', '.join(name for name in TORCHRUN_VARIABLES if name in env)}"
        )
    rank, local_rank, size = (_integer(env, name) for name in TORCHRUN_VARIABLES)
    if size > 1 and not env.get("MASTER_ADDR"):
        raise LocalError("the rank environment is incomplete: MASTER_ADDR missing; set it to the first node's name")
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
    address = env.get("MASTER_ADDR") or "127.0.0.1"
    return Launch(launcher, rank, local_rank, size, address, _integer(env, "MASTER_PORT", DEFAULT_PORT))


def _read_slurm(env: Mapping[str, str]) -> Launch:
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    # On a single node use the loopback address: the node's name may not resolve inside a container.
    one_node = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1"
    return Launch(
        "slurm",
        _integer(env, "SLURM_PROCID"),
        _integer(env, "SLURM_LOCALID"),
        _integer(env, "SLURM_STEP_NUM_TASKS", _integer(env, "SLURM_NTASKS", 1)),
        env.get("MASTER_ADDR") or ("" if one_node else first_host(nodes)) or "127.0.0.1",
        _integer(env, "MASTER_PORT", _slurm_port(env)),
    )


def _slurm_port(env: Mapping[str, str]) -> int:
    """A port derived from job and step, because jobs may share a node, and steps a job; as in export_DDP_vars.sh."""
    step = env["SLURM_STEP_ID"]
    number = int(step) if step.isdecimal() else 0
    return 15000 + (_integer(env, "SLURM_JOB_ID", 0) * 7 + number * 1009) % 15000


def _job(env: Mapping[str, str], world_size: int) -> str:
    """torchrun's run id, or Slurm's job and step."""
    if "TORCHELASTIC_RUN_ID" in env:
        return f"torchrun {env['TORCHELASTIC_RUN_ID']}"
    tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS"))
    if "SLURM_STEP_ID" in env and tasks == str(world_size):  # ranks that a user numbered may belong to several steps
        return f"slurm {env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    return ""


def _reject_mpiexec(env: Mapping[str, str], world_size: int) -> None:
    """Raises UserError for ranks of mpiexec: each would run alone. Slurm's PMI sets the same variables in its steps."""
    for name in MPI_SIZES:
        size = env.get(name, "")
        if size.isdecimal() and int(size) not in (0, 1, world_size):
            raise UserError(f"{name} is {size}, but mpiexec is not supported; start the ranks with torchrun or srun")


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
            raise LocalError(f"the rank environment is incomplete: {name} missing; start through torchrun or srun")
        return default
    try:
        return int(text)
    except ValueError:
        raise LocalError(f"{name} must be an integer, not {text!r}; start through torchrun or srun") from None


def restarted(environment: Mapping[str, str] | None = None) -> bool:
    """True if the launcher has restarted this job; Slurm and torchrun both count restarts."""
    env = os.environ if environment is None else environment
    return any(env.get(name, "0") not in ("", "0") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


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
