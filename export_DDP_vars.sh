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

# On Perlmutter GPU 0 and its network card belong to the last NUMA domain, and GPU 3 to the first one, whereas Slurm
# binds the first task of a node to the cores of the first domain. So reverse the list of visible GPUs: local rank i
# uses the i-th GPU of the list, which then belongs to the domain of its cores. Only if the task sees all GPUs in order.
_ddp_visible_gpus() {
  local sys=$1 device domain last='' ascending='' descending=''
  local -i number=0
  for device in "$sys"/bus/pci/devices/*; do
    # NVIDIA; VGA or 3D controllers
    [[ $(cat "$device/vendor" 2>/dev/null) == 0x10de && $(cat "$device/class" 2>/dev/null) == 0x030[02]* ]] || continue
    domain=$(cat "$device/numa_node" 2>/dev/null) || return 0
    if [ -n "$last" ] && [ "$domain" -ge "$last" ]; then return 0; fi
    last=$domain ascending+=,$number descending=,$number$descending number+=1
  done
  if [ "${CUDA_VISIBLE_DEVICES:-}" = "${ascending#,}" ] && [ "$number" -gt 1 ]; then
    export CUDA_VISIBLE_DEVICES=${descending#,}
  fi
}

_ddp_interconnect() {
  local sys=$1 dev=$2
  # hsn0, hsn1, …: HPE Slingshot. These are the settings of NERSC's NCCL module for containers and of ALCF's page on
  # NCCL. Other networks need none. The module with NCCL's plug-in for Slingshot (CONTAINER_OPTIONS in submit_pm.sh)
  # also selects that plug-in.
  compgen -G "$sys/class/net/hsn*" >/dev/null || return 0
  # NCCL's ranks connect over Slingshot, not over the first network interface.
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME-hsn}"
  # A ring may enter and leave a node through different cards: Slingshot connects all cards to one network.
  export NCCL_CROSS_NIC="${NCCL_CROSS_NIC-1}"
  # A card reads the memory of the GPU behind the same host bridge. Without GDRCopy's device, which podman-hpc does not
  # pass to a container by default, libfabric fails to do so.
  if [ -e "$dev/gdrdrv" ]; then export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL-PHB}"; fi
  # Otherwise libfabric may deadlock with CUDA's allocations: when it registers host memory with CUDA, and when its
  # registration cache monitors memory through hooks in malloc.
  export FI_CXI_DISABLE_HOST_REGISTER="${FI_CXI_DISABLE_HOST_REGISTER-1}"
  export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR-userfaultfd}"
  # The default completion queue is too small for large jobs.
  export FI_CXI_DEFAULT_CQ_SIZE="${FI_CXI_DEFAULT_CQ_SIZE-131072}"
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
  _ddp_interconnect "${SYSFS:-/sys}" "${DEVFS:-/dev}" # tests set SYSFS and DEVFS
  _ddp_visible_gpus "${SYSFS:-/sys}"
fi
unset -f _ddp_first_host _ddp_master_addr _ddp_master_port _ddp_interconnect _ddp_visible_gpus
