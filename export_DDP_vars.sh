# shellcheck shell=bash
# Sets the rank of this task of an srun step in the variables of PyTorch's launchers, and settings for GPU nodes like
# those of Perlmutter:
#
#   srun -n 8 bash -c 'source ./export_DDP_vars.sh && exec "$@"' _ python train.py --config=short
#
# `exec` replaces the shell by Python, which so gets Slurm's signals: a shell would die of them, and the job would fail.
# Outside a step nothing is set. Variables that are already set are kept, except the three that differ between tasks.

# First name of Slurm's compressed list, for containers without scontrol: r[1-2]n[3,5]-ib,x -> r1n3-ib
_ddp_first_host() {
  local list=$1 name=
  while [[ $list =~ ^([^][,]*)\[([^],-]*)[^]]*\](.*)$ ]]; do
    name+=${BASH_REMATCH[1]}${BASH_REMATCH[2]}
    list=${BASH_REMATCH[3]}
  done
  echo "$name${list%%,*}"
}

_ddp_master_addr() {
  local list=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}}} hosts=
  # On a single node use the loopback address: the node's name may not resolve inside a container.
  if [ "${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}" = 1 ] || [ -z "$list" ]; then
    echo 127.0.0.1
    return
  fi
  if command -v scontrol >/dev/null; then hosts=$(scontrol show hostnames "$list" 2>/dev/null) || hosts=; fi
  if [ -n "$hosts" ]; then echo "${hosts%%$'\n'*}"; else _ddp_first_host "$list"; fi
}

# Jobs may share a node, and steps of a job may run at the same time: derive the port from both ids, as in
# utils/distributed/launch.py. Bash would execute commands in a text that it evaluates as a number, and read 010 as 8.
_ddp_master_port() {
  local name
  for name in SLURM_JOB_ID SLURM_STEP_ID; do
    if ! [[ ${!name:-0} =~ ^[0-9]{1,10}$ ]]; then
      printf 'error: %s must be an integer, not %q; start through srun\n' "$name" "${!name}" >&2
      return 2
    fi
  done
  echo $((15000 + (10#${SLURM_JOB_ID:-0} * 7 + 10#$SLURM_STEP_ID * 1009) % 15000))
}

# Settings of the network and the order of GPUs: the table in utils/distributed/network.py, which train.py also uses.
_ddp_network() {
  local directory=${BASH_SOURCE[0]} settings setting
  if [[ $directory == */* ]]; then directory=${directory%/*}; else directory=.; fi
  settings=$(PYTHONPATH=$directory${PYTHONPATH:+:$PYTHONPATH} "${PYTHON:-python}" -m utils.distributed.network) || return
  while read -r setting; do
    if [ -n "$setting" ]; then export "${setting?}"; fi
  done <<<"$settings"
}

# A batch script also has SLURM_PROCID=0 and SLURM_NTASKS, but no other ranks: only steps have SLURM_STEP_ID.
if [ -n "${SLURM_STEP_ID:-}" ] && [ -n "${SLURM_PROCID:-}" ]; then
  if [ -z "${MASTER_PORT:-}" ]; then MASTER_PORT=$(_ddp_master_port) || return; fi
  export RANK=$SLURM_PROCID
  export LOCAL_RANK=${SLURM_LOCALID:-0}
  export WORLD_SIZE=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-1}} # a step may be smaller than its job
  if [ -z "${MASTER_ADDR:-}" ]; then MASTER_ADDR=$(_ddp_master_addr); fi
  export MASTER_ADDR MASTER_PORT

  # HDF5 locks the files that it opens; a parallel file system may not support locks, and opening fails.
  export HDF5_USE_FILE_LOCKING="${HDF5_USE_FILE_LOCKING-FALSE}"
  # TORCH_NCCL_ASYNC_ERROR_HANDLING keeps PyTorch's default, which ends a rank if a peer dies. The advice to disable it
  # for CUDA graphs is outdated: its thread disturbed their capture, but utils/steps/graph.py captures per thread.
  if [ "${DDP_NETWORK_SETTINGS:-}" != 0 ]; then _ddp_network || return; fi
fi
unset -f _ddp_first_host _ddp_master_addr _ddp_master_port _ddp_network
