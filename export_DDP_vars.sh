# shellcheck shell=bash
# Who this task of an srun step is among the ranks, in the variables that PyTorch's launchers set, and what a GPU node
# of Perlmutter's kind needs in the environment:
#
#   srun -n 8 bash -c 'source ./export_DDP_vars.sh; exec "$@"' _ python train.py --config=short
#
# With `exec` Slurm's signals reach Python: a shell in between would die of them, and the run would count as failed.
# Outside a step nothing is set. What is set already is kept, but for the three variables that differ between tasks.

# First name of Slurm's compressed list, for containers, which have no scontrol: r[1-2]n[3,5]-ib,x -> r1n3-ib
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
  # Ranks of one node meet without its name, which may not resolve inside a container.
  if [ "${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}" = 1 ] || [ -z "$list" ]; then
    echo 127.0.0.1
    return
  fi
  if command -v scontrol >/dev/null; then hosts=$(scontrol show hostnames "$list" 2>/dev/null) || hosts=; fi
  if [ -n "$hosts" ]; then echo "${hosts%%$'\n'*}"; else _ddp_first_host "$list"; fi
}

# On Perlmutter GPU 0 and its network card belong to the last NUMA domain, GPU 3 and its own to the first, whereas Slurm
# gives a node's first task the first domain's cores: there the list of visible GPUs is reversed, so that the task with
# local rank i, which takes the i-th of the list, computes beside its cores. Only where the task sees all GPUs, in order.
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
  # hsn0, hsn1, …: HPE Slingshot. These are the settings of NERSC's NCCL module for containers and of ALCF's page on NCCL;
  # elsewhere NCCL finds its way by itself. The plug-in that takes NCCL to Slingshot comes with a module
  # (CONTAINER_OPTIONS in submit_pm.sh), which also selects it.
  compgen -G "$sys/class/net/hsn*" >/dev/null || return 0
  # NCCL's ranks find each other over Slingshot, not over the first interface there is.
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME-hsn}"
  # A ring may leave a node through another card than it came in by: Slingshot joins all of them in one network.
  export NCCL_CROSS_NIC="${NCCL_CROSS_NIC-1}"
  # A card reads the memory of the GPU behind the same host bridge; without GDRCopy's device, which podman-hpc does not
  # bring along by itself, libfabric fails at that.
  if [ -e "$dev/gdrdrv" ]; then export NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL-PHB}"; fi
  # libfabric may otherwise deadlock with CUDA's allocations: when it registers host memory with CUDA, and when its
  # cache of registrations watches memory through hooks in malloc.
  export FI_CXI_DISABLE_HOST_REGISTER="${FI_CXI_DISABLE_HOST_REGISTER-1}"
  export FI_MR_CACHE_MONITOR="${FI_MR_CACHE_MONITOR-userfaultfd}"
  # The default completion queue is too small for large jobs.
  export FI_CXI_DEFAULT_CQ_SIZE="${FI_CXI_DEFAULT_CQ_SIZE-131072}"
}

# A batch script, too, has SLURM_PROCID=0 and SLURM_NTASKS, but no peers: only steps have this number.
if [ -n "${SLURM_STEP_ID:-}" ] && [ -n "${SLURM_PROCID:-}" ]; then
  export RANK=$SLURM_PROCID
  export LOCAL_RANK=${SLURM_LOCALID:-0}
  export WORLD_SIZE=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-1}} # a step may be smaller than its job
  if [ -z "${MASTER_ADDR:-}" ]; then MASTER_ADDR=$(_ddp_master_addr); fi
  # Two jobs may share a node: the port comes from the job's number, as in utils/distributed/world.py.
  if [ -z "${MASTER_PORT:-}" ]; then MASTER_PORT=$((15000 + ${SLURM_JOB_ID:-0} * 7 % 15000)); fi
  export MASTER_ADDR MASTER_PORT

  # HDF5 locks the files it opens; on parallel file systems that may be switched off, and opening fails.
  export HDF5_USE_FILE_LOCKING="${HDF5_USE_FILE_LOCKING-FALSE}"
  # As torchrun does: beside its loader's threads a rank on a GPU has little for the CPU to do, and a team of as many
  # threads as it has cores would wait for each other at every operation.
  export OMP_NUM_THREADS="${OMP_NUM_THREADS-1}"
  # TORCH_NCCL_ASYNC_ERROR_HANDLING keeps PyTorch's default, with which a dead peer ends a rank. The advice to switch it
  # off for CUDA graphs is of a time when its thread disturbed their recording; utils/steps/graph.py records per thread.
  _ddp_interconnect "${SYSFS:-/sys}" "${DEVFS:-/dev}" # tests have others
  _ddp_visible_gpus "${SYSFS:-/sys}"
fi
unset -f _ddp_first_host _ddp_master_addr _ddp_interconnect _ddp_visible_gpus
