"""The launcher's view of this process: its rank, the number of ranks, and how an entry script runs and exits.

The launcher is identified by the environment: torchrun (or `export_DDP_vars.sh`) sets RANK, LOCAL_RANK and WORLD_SIZE;
several ranks of `mpiexec` have the variables of their MPI, those of `flux run` have Flux's; inside an `srun` step
Slurm's own variables are used; otherwise there is one rank.
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import re
import resource
import signal
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.errors import EXIT_INTERRUPTED, LocalError, UserError, record_exit_code
from utils.launchers import MPI_RANKS, MPIS, OTHER_RANKS, TORCHRUN_VARIABLES

# Differ between two starts: Open MPI 4, Open MPI 5, PALS, MVAPICH, Flux. MPICH sets none: then the batch job.
MPI_JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PALS_APID", "MPIRUN_ID", "FLUX_JOB_ID")
BATCH_JOBS = ("PBS_JOBID", "SLURM_JOB_ID")
RESTART_COUNTS = {"slurm": "SLURM_RESTART_COUNT", "torchrun": "TORCHELASTIC_RESTART_COUNT"}
DEFAULT_PORT = 29500
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGALRM)
EXIT_SECONDS = 600.0  # for the exit functions of libraries
in_script = threading.Event()  # set by `run_script`: the process ends with the entry script
HOW_TO_START = "start through torchrun, srun or mpiexec"


@dataclass(frozen=True)
class Launch:
    """Rank, number of ranks and rendezvous address, as set by the launcher."""

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT


def name_ranks(ranks: Sequence[int]) -> str:
    """The text "rank 3", or "ranks 4, 5, …" with at most eight of them; empty if there are none."""
    text = ", ".join([*map(str, ranks[:8]), *["…"] * (len(ranks) > 8)])
    return f"rank{'s' * (len(ranks) > 1)} {text}" if ranks else ""


def read_launch(env: Mapping[str, str] = os.environ) -> Launch:
    """Reads the launcher's variables; raises UserError if they are incomplete or inconsistent."""
    if any(name in env for name in TORCHRUN_VARIABLES):
        launch = _read_torchrun(env)
    elif (mpi := _find_mpi(env)) is not None:
        launch = _read_mpi(env, mpi)
    elif _is_in_slurm_step(env):
        launch = _read_slurm(env)
    else:
        return Launch("single process")
    if not 0 <= launch.rank < launch.world_size or not 0 <= launch.local_rank < launch.world_size:
        ranks = f"rank {launch.rank} (local {launch.local_rank}) of {launch.world_size}"
        raise LocalError(f"the rank environment is inconsistent: {ranks}; {HOW_TO_START}")
    if launch.launcher in ("slurm", "environment") and launch.world_size > 1 and _is_in_shell_of_srun(env):
        raise LocalError(
            f"this shell of srun --pty is rank {launch.rank} of {launch.world_size}, without the others; start them "
            f"all with srun -n {launch.world_size} python train.py in an allocation, or the shell with srun -n 1 --pty"
        )
    if not 0 < launch.master_port < 2**16:
        raise LocalError(f"MASTER_PORT must be between 1 and 65535, not {launch.master_port}")
    return launch


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


def _is_in_shell_of_srun(env: Mapping[str, str]) -> bool:
    """True for a command in a shell of `srun --pty`: its other tasks are shells, too, and end without a terminal.

    `srun --pty python train.py` starts all ranks, which lead their sessions. A shell gives a command a process group.
    """
    return "SLURM_PTY_PORT" in env and os.isatty(0) and os.getpgrp() != os.getsid(0)


def _slurm_tasks(env: Mapping[str, str]) -> int:
    return _integer(env, "SLURM_STEP_NUM_TASKS", _integer(env, "SLURM_NTASKS", 1))


def _read_slurm(env: Mapping[str, str]) -> Launch:
    rank, local_rank = (_integer(env, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", ""))
    # On a single node use the loopback address: the node's name may not resolve inside a container.
    one_node = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1"
    # Jobs may share a node, and steps a job; as in export_DDP_vars.sh.
    step = int(env["SLURM_STEP_ID"]) if env["SLURM_STEP_ID"].isdecimal() else 0
    port = 15000 + (_integer(env, "SLURM_JOB_ID", 0) * 7 + step * 1009) % 15000
    address = env.get("MASTER_ADDR") or ("" if one_node else first_host(nodes)) or "127.0.0.1"
    return Launch("slurm", rank, local_rank, _slurm_tasks(env), address, _integer(env, "MASTER_PORT", port))


def _find_mpi(env: Mapping[str, str]) -> Sequence[str] | None:
    """The entry of MPIS for one of several ranks of mpiexec; raises UserError for a rank of an unknown MPI."""
    in_step = _is_in_slurm_step(env)
    for mpi in MPIS:
        if all(env.get(name) for name in mpi[:3]):
            size = _integer(env, mpi[1])
            # srun sets the variables of Cray's PMI as well, with its own values. But mpiexec in a Slurm allocation
            # starts its daemons in a step, so that each rank has its daemon's SLURM_PROCID.
            is_srun = in_step and mpi == MPIS[-1] and size == _slurm_tasks(env)
            return mpi if size > 1 and not is_srun else None
    rank = next(filter(env.get, MPI_RANKS + OTHER_RANKS), None)
    if rank and not in_step:
        raise UserError(
            f"the rank environment is incomplete: {rank} is set, but no known variables of the number of ranks and the "
            f"local rank, such as {MPIS[0][1]} and {MPIS[0][2]}; set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR for "
            "each rank, or start through torchrun"
        )
    return None


def _read_mpi(env: Mapping[str, str], mpi: Sequence[str]) -> Launch:
    rank, size, local_rank = (_integer(env, name) for name in mpi[:3])
    # The port depends on the start, because a node may run several.
    job = next(filter(None, map(env.get, (*MPI_JOBS, *BATCH_JOBS))), None)
    port = 15000 + zlib.crc32(job.encode("utf-8", "surrogateescape")) % 15000 if job else DEFAULT_PORT
    one_node = env.get(mpi[3]) == str(size) or env.get("FLUX_JOB_NNODES") == "1"
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if one_node else _mpi_address(env))
    return Launch("mpiexec", rank, local_rank, size, address, _integer(env, "MASTER_PORT", port))


def _mpi_address(env: Mapping[str, str]) -> str:
    """The first node of the batch job, where mpiexec starts rank 0."""
    nodes = Path(env.get("PBS_NODEFILE", ""))  # on some systems only the job's first node has it
    first = nodes.read_text().split()[0] if nodes.is_file() else first_host(env.get("SLURM_JOB_NODELIST", ""))
    if not first:
        raise LocalError(
            "MASTER_ADDR is missing for the ranks of mpiexec on several nodes; export it as the name of rank 0's node, "
            'such as MASTER_ADDR="$(head -n 1 "$PBS_NODEFILE")", before mpiexec (with Open MPI also -x MASTER_ADDR); '
            'with Flux MASTER_ADDR="$(flux hostlist -n 0)" in a shell of each rank'
        )
    return first


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except KeyError:
        raise LocalError(f"the rank environment is incomplete: {name} missing; {HOW_TO_START}") from None
    except ValueError:
        raise LocalError(f"{name} must be an integer, not {env[name]!r}; {HOW_TO_START}") from None


def lasting_jobs(env: Mapping[str, str] = os.environ) -> tuple[list[str], list[str]]:
    """Slurm's job and torchrun's log directory, which restarts keep, and those of launchers that have restarted it."""
    # TORCHELASTIC_ERROR_FILE is <log directory>/<run id>_<random>/attempt_<restarts>/<local rank>/error.json.
    attempt = Path(env.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    agent = attempt.parent.name if attempt.name.startswith("attempt_") else env.get("TORCHELASTIC_RUN_ID", "none")
    names = {"slurm": env.get("SLURM_JOB_ID"), "torchrun": "" if agent == "none" else agent}
    jobs = {launcher: f"{launcher} {name}" for launcher, name in names.items() if name}
    restarted = [job for launcher, job in jobs.items() if env.get(RESTART_COUNTS[launcher], "0") not in ("", "0")]
    return list(jobs.values()), restarted


def first_host(nodelist: str) -> str:
    """First name in Slurm's compressed list: 'nid[001004-001007,2]' -> 'nid001004', 'r[1-2]n[3,5]-ib' -> 'r1n3-ib'."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group()) if first else ""


def allow_open_files() -> None:
    """Raises the number of open files to the limit: of volumes, and rank 0 holds three connections per rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_script(main: Callable[[], None]) -> None:
    """Runs an entry script's `main` and exits; with several ranks, without the interpreter's shutdown.

    Threads of a process group that DistributedDataParallel has used survive destroy_process_group. In about 1 of 60
    runs (PyTorch 2.13, gloo) one of them requested the GIL during the shutdown and aborted the completed process.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed (`2>&-`): another file could get stderr's number, and its lines
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 # open until the end
    allow_open_files()
    faulthandler.enable()  # a traceback of a fatal signal, such as SIGBUS when a mapped file shrinks
    in_script.set()
    try:
        code = _exit_code_of(main)
    except KeyboardInterrupt:  # a second one, while the first was reported
        code = EXIT_INTERRUPTED
    if code in (0, EXIT_INTERRUPTED):  # a signal while the interpreter shuts down must not change that
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    record_exit_code(code)
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)  # the heartbeat does not watch the exit functions
    with contextlib.suppress(UserError):  # of an incomplete environment
        if read_launch().world_size == 1:
            sys.exit(code)
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _exit_code_of(main: Callable[[], None]) -> int:
    try:
        main()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(stop.code + "\n")
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0
