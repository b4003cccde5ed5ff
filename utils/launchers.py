"""The environment variables of launchers, and the rank of this process according to them."""

import os

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# Rank, number of ranks, local rank and local number, as set by Flux (three); Open MPI; MVAPICH; MPICH, Intel MPI; Cray.
MPIS = (
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
MPI_RANKS = tuple(rank for rank, *_ in MPIS)
OTHER_RANKS = ("PALS_RANKID", "PMIX_RANK")


def launched_rank() -> int:
    """The rank of this process according to the launcher's environment variables; needs no process group."""
    # In a step of mpiexec's daemons SLURM_PROCID is that of the daemon; outside a step that of the batch script.
    slurm = ("SLURM_PROCID",) if "SLURM_STEP_ID" in os.environ else ()
    for name in ("RANK", *MPI_RANKS, *slurm, *OTHER_RANKS):
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return 0
