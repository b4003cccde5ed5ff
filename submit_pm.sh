#!/usr/bin/env bash
# Batch job that trains with one rank per GPU. Submit it from the repository's root. All arguments go to train.py:
#
#   sbatch -n 8 submit_pm.sh --config=bs512_opt
#   sbatch -N 8 ./submit_pm.sh --config=bs512_opt
#   sbatch -n 1 ./submit_pm.sh --config=short --num_epochs 3
#   ENABLE_PROFILING=1 PROFILE_OUTPUT=baseline sbatch -n 1 submit_pm.sh --config=short --enable_manual_profiling
#   salloc -n 4 …; bash submit_pm.sh --config=short        # inside an allocation
#
# These jobs may run for 30 minutes, the limit of the debug QOS, which a job on Perlmutter gets without -q. To ask for
# more, or for one or two GPUs of a shared node instead of whole nodes:
#
#   sbatch -q regular -t 4:00:00 -n 8 submit_pm.sh --config=bs512_opt
#   sbatch -q shared -n 1 --gpus-per-node=1 submit_pm.sh --config=short
#   sbatch -q shared -n 2 --ntasks-per-node=2 --gpus-per-node=2 submit_pm.sh --config=short
#
# Before its time limit and when it is preempted, the run saves a checkpoint; the job requeues itself and resumes.
# The job's exit code is that of the run; 75 means that a checkpoint is saved and the same command resumes from it.
#
# The options below fit Perlmutter (64 cores, 128 threads and 4 GPUs per node). sbatch's command line and its variables,
# such as SBATCH_ACCOUNT, SBATCH_QOS and SBATCH_RESERVATION, override them. On another cluster for example:
# sbatch -C '' --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=16 ...
#
#SBATCH --job-name=nbody-unet
#SBATCH --output=%x-%j.out
#
# No --qos: a cluster without a QOS of that name would refuse the job.
#SBATCH --time=00:30:00
#SBATCH --constraint=gpu
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#
# Not --gpus-per-task=1: each rank would see only its own GPU, so that NCCL could not copy directly between the GPUs of
# a node. On the command line, Slurm accepts it for 4 or more tasks only. --gpu-bind=single:1 hides the other GPUs.
#SBATCH --gpus-per-node=4
#
# Slurm sends the warning of the time limit to this shell only (B:), 120 to 180 seconds before the limit. Without
# append mode a job that is requeued would truncate its output file.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# shellcheck disable=SC2329 # called by the traps
set -u

# Settings. The environment at submission overrides these defaults.
TRAIN_SCRIPT=${TRAIN_SCRIPT:-train.py} # or train_graph.py
PYTHON=${PYTHON:-python}
DATA_DIR=${DATA_DIR:-} # directory with the data: the program reads it in place of /data in the config's paths
# directory of the runs and profiles, in place of the config's expdir. LOGS_DIR= (empty) leaves the latter
if [ -d "${SCRATCH:-}" ]; then LOGS_DIR=${LOGS_DIR-$SCRATCH/nbody-unet/logs}; fi
LOGS_DIR=${LOGS_DIR:-}
CONTAINER_IMAGE=${CONTAINER_IMAGE:-}
CONTAINER_RUNTIME=${CONTAINER_RUNTIME:-} # the names below; default: shifter if there is an image, else none
CONTAINER_CUDA=${CONTAINER_CUDA:-13}     # CUDA version of the image, 12 or 13: chooses NERSC's plug-in for NCCL
# CONTAINER_OPTIONS: options of the runtime for GPUs and network (defaults below), separated by spaces
STOP_SIGNAL=${STOP_SIGNAL:-USR1} # requests the ranks to save and stop: stop_signal of the config
# maximum number of restarts, regardless of their reason. NERSC forbids chains of jobs in the debug QOS
case ${SLURM_JOB_QOS:-} in
*debug*) MAX_REQUEUES=${MAX_REQUEUES:-0} ;;
*) MAX_REQUEUES=${MAX_REQUEUES:-100} ;;
esac

EXIT_USER_ERROR=2
EXIT_AGAIN=75

fail() {
  echo "submit_pm.sh: ${*//$'\n'/ }" >&2
  exit "$EXIT_USER_ERROR"
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "must run inside a job: sbatch -n 4 submit_pm.sh ..., or inside salloc"
# Slurm runs a copy of this file, so the repository is the working directory.
for file in export_DDP_vars.sh "$TRAIN_SCRIPT"; do
  [ -f "$file" ] || fail "no $file in $PWD; submit from the repository's root"
done
for name in MAX_REQUEUES SLURM_NTASKS SLURM_RESTART_COUNT; do
  [[ ${!name:-0} =~ ^[0-9]{1,9}$ ]] || fail "$name must be an integer, not ${!name}"
done
stop_number=$(kill -l "$STOP_SIGNAL" 2>/dev/null)
[[ $stop_number =~ ^[0-9]+$ ]] || fail "STOP_SIGNAL must be a signal's name such as USR2, not $STOP_SIGNAL"
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi

# --- directories and container ---

# Not VARIABLE=$(realpath ...), which removes newlines at the end of a path.
if [ -n "$DATA_DIR" ]; then
  IFS= read -r -d '' DATA_DIR < <(realpath -ez -- "$DATA_DIR") || fail "DATA_DIR: no such directory"
fi
if [ -n "$LOGS_DIR" ]; then
  mkdir -p -- "$LOGS_DIR" || fail "LOGS_DIR: cannot create it"
  IFS= read -r -d '' LOGS_DIR < <(realpath -ez -- "$LOGS_DIR") || fail "LOGS_DIR: no such directory"
fi

# With sbatch --image=... Shifter's plug-in for Slurm sets the image.
job_image=${SLURM_SPANK_SHIFTER_IMAGE:-${SLURM_SPANK__SLURM_SPANK_OPTION_shifter_image:-}}
if [ -z "$CONTAINER_RUNTIME" ]; then
  CONTAINER_RUNTIME=none
  if [ -n "$CONTAINER_IMAGE$job_image" ]; then CONTAINER_RUNTIME=shifter; fi
fi
case $CONTAINER_CUDA in
12) cuda='' ;;
13) cuda=-cu13 ;;
*) fail "CONTAINER_CUDA must be 12 or 13, not $CONTAINER_CUDA" ;;
esac
# Default options for GPUs and network, and the characters that are special in the option that mounts a directory.
case $CONTAINER_RUNTIME in
none) ;;
shifter) gpus="--module=gpu,nccl$cuda-plugin" special='[:;]' ;;
podman-hpc) gpus="--gpu --nccl$cuda" special='[:]' ;;
apptainer | singularity) gpus=--nv special='[:,"\\]' ;;
pyxis) gpus='' special='[:,"$`\\[:space:]]' ;;
*) fail "CONTAINER_RUNTIME must be shifter, podman-hpc, apptainer, pyxis or none, not $CONTAINER_RUNTIME" ;;
esac

data=$DATA_DIR logs=$LOGS_DIR # paths that the ranks see
mounts=()
add_mount() { # source, destination
  [[ $1 != *$special* ]] || fail "$CONTAINER_RUNTIME cannot mount $1: the path contains one of $special"
  mounts+=("$1:$2")
}
if [ "$CONTAINER_RUNTIME" != none ]; then
  if [ "$CONTAINER_RUNTIME" != shifter ]; then
    job_image=''
    add_mount "$PWD" "$PWD"
  fi
  [ -n "$CONTAINER_IMAGE$job_image" ] || fail "$CONTAINER_RUNTIME needs CONTAINER_IMAGE=..."
  if [ -n "$DATA_DIR" ]; then add_mount "$DATA_DIR" /data && data=/data; fi
  if [ -n "$LOGS_DIR" ]; then add_mount "$LOGS_DIR" /logs && logs=/logs; fi
  read -r -a options <<<"${CONTAINER_OPTIONS-$gpus}"
fi

container=()
case $CONTAINER_RUNTIME in
shifter)
  # Shifter keeps the environment and the working directory, and replaces itself by the command, which so gets signals.
  container=(shifter ${CONTAINER_IMAGE:+--image="$CONTAINER_IMAGE"} "${options[@]}" "${mounts[@]/#/--volume=}")
  ;;
podman-hpc)
  # podman forwards signals to the first process of the container (--sig-proxy, its default), the shell below, which
  # replaces itself by Python. A process that Slurm also signals directly gets the same signal twice at once.
  # The container gets only the directories and variables named here; --env-host would also pass LD_LIBRARY_PATH.
  container=(podman-hpc run --rm --net host --ipc host "${options[@]}" "${mounts[@]/#/--volume=}" --workdir="$PWD")
  for name in 'SLURM_*' 'MASTER_*' 'NCCL_*' 'OFI_NCCL_*' 'FI_*' 'TORCH*' 'PYTORCH_*' 'OMP_*' 'BENCHY_*' 'WANDB_*' \
    CUDA_VISIBLE_DEVICES NVIDIA_TF32_OVERRIDE HDF5_USE_FILE_LOCKING TRAIN_EXIT_FILE DATA_DIR LOGS_DIR 'DDP_*' \
    NERSC_HOST CLUSTER_NAME PBS_O_HOST; do
    container+=(--env "$name")
  done
  container+=("$CONTAINER_IMAGE")
  ;;
apptainer | singularity)
  # Keeps the variables that the image does not set, except PATH and LD_LIBRARY_PATH. Forwards signals like podman.
  container=("$CONTAINER_RUNTIME" exec "${options[@]}" "${mounts[@]/#/--bind=}" --pwd="$PWD" "$CONTAINER_IMAGE")
  ;;
pyxis)
  # Options of srun. Keeps the variables that the image does not set. The task enters the container before it starts the
  # command, which so gets signals.
  container=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD" "${options[@]}"
    --container-mounts="$(IFS=, && echo "${mounts[*]}")")
  ;;
esac

# --- command of each rank ---

command=("$PYTHON" "$TRAIN_SCRIPT")
if [ "${ENABLE_PROFILING:-0}" = 1 ]; then
  if [ "$CONTAINER_RUNTIME" = none ] && ! command -v nsys >/dev/null; then
    fail "ENABLE_PROFILING=1 needs nsys, which is not in PATH: load its module, or omit the variable and add --profiler=torch"
  fi
  output=${PROFILE_OUTPUT:-profile}
  if [ -n "$LOGS_DIR" ] && [[ $output != /* ]]; then output=${logs//%/%%}/$output; fi # nsys expands %
  if [ "${SLURM_NTASKS:-1}" -gt 1 ]; then output+='-rank%q{SLURM_PROCID}'; fi
  command=(nsys profile '--trace=cuda,cublas,nvtx' --kill none -c cudaProfilerApi -f true -o "$output" "${command[@]}")
fi

# Only the training scripts have these flags. The user's arguments follow and win, the last one of a kind.
if [[ ${TRAIN_SCRIPT##*/} == train*.py ]]; then
  expdir='' run_num=00 previous=''
  if [ -n "$LOGS_DIR" ]; then
    # shellcheck disable=SC2016 # the program expands it: YAML reads some names of directories as something else
    command+=(--set 'expdir=$LOGS_DIR')
    expdir="$LOGS_DIR in place of the config's expdir${mounts:+, in the container /logs}"
  fi
  for argument in "$@"; do
    if [[ $argument =~ ^(--set=)?\ *expdir\ *=\ *(.*) ]]; then expdir=${BASH_REMATCH[2]}; fi
    if [[ $previous$argument =~ ^--run_num=?(.*) ]]; then run_num=${BASH_REMATCH[1]}; fi
    previous=''
    if [ "$argument" = --run_num ]; then previous=$argument; fi
  done
  if [ -n "$expdir" ]; then echo "submit_pm.sh: log directory $expdir"; fi
  # The tasks of an array have the same arguments, but need run directories of their own.
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then set -- "$@" --run_num="$run_num-$SLURM_ARRAY_TASK_ID"; fi
fi

# srun reports the highest exit code of all ranks, often that of a rank that -K1 ended. So the first rank that fails
# leaves its own code here, as the target of a link. All nodes and containers see this directory.
exit_link=${LOGS_DIR:-.}/.exit-$job-${SLURM_RESTART_COUNT:-0}-$$
export TRAIN_EXIT_FILE=${logs:-.}/${exit_link##*/} DATA_DIR=$data LOGS_DIR=$logs

# --- job step and signals ---

# A job that is being canceled, requeued or timed out is no longer RUNNING.
running() { [[ $(scontrol show job "$job" 2>/dev/null) == *' JobState=RUNNING '* ]]; }
preempted() { [[ $(scontrol show job "$job" 2>/dev/null) =~ ' PreemptTime='[0-9] ]]; }

step='' stop_asked='' interrupted=''
case " $* " in *' --enable_benchy '*) benchmark=1 ;; *) benchmark='' ;; esac

# srun forwards the signal to every rank. Not TERM: srun would end the step at once.
ask_to_stop() {
  stop_asked=1
  if [ -n "$step" ]; then kill -s "$STOP_SIGNAL" "$step" 2>/dev/null; fi
}

# Warning of the time limit, and of a preemption if Slurm is configured with send_user_signal.
on_warning() {
  interrupted=1
  if [ -n "$benchmark" ]; then
    echo "submit_pm.sh: warned; a benchmark has nothing to save" >&2
  else
    echo "submit_pm.sh: warned; requesting the ranks to save and stop" >&2
    ask_to_stop
  fi
}

# Either a warning (--signal=B:TERM@120), or Slurm ends the job and has signaled the ranks itself. Then a second signal
# would end them before they have saved.
on_term() {
  interrupted=1
  if running; then on_warning; fi
}

trap on_warning USR1
trap on_term TERM
trap 'interrupted=1' INT # Ctrl-C, which the terminal also sends to srun

# -K1: if one rank fails, Slurm ends the others. -X: Ctrl-C goes to the ranks at once.
# --cpus-per-task: since Slurm 22.05 srun does not inherit it from the job.
# --cpu-bind: binds the i-th task of a node to separate cores, on Perlmutter those of the i-th of four NUMA domains;
# the program selects the GPU of that domain. A cluster that cannot bind prints a message and runs the step.
# DDP_NETWORK_SETTINGS=0: not in this shell, which would die of a signal meanwhile. The program applies them itself.
srun -u -K1 -X --cpu-bind=cores ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${container[@]}" \
  bash -c 'DDP_NETWORK_SETTINGS=0 source ./export_DDP_vars.sh && exec "$@"' _ "${command[@]}" "$@" &
step=$!
if [ -n "$stop_asked" ]; then ask_to_stop; fi # the warning came before the step started

# A signal interrupts `wait`, but not the step.
while
  interrupted=''
  wait "$step"
  status=$?
  [ -n "$interrupted" ]
do :; done
recorded=''
if [ "$status" != 0 ] && recorded=$(readlink -- "$exit_link"); then status=$recorded; fi
rm -f -- "$exit_link"

# --- requeue or exit ---

# A recorded 75 proves that the state is saved. Ranks that have not connected yet have nothing to save: the requested
# signal, or a preemption's TERM, ends them, or they exit with 75. But so they do after the TERM of -K1.
resumable() {
  case ${recorded:-"unrecorded $status"} in
  "$EXIT_AGAIN") ;;
  "unrecorded $EXIT_AGAIN" | 'unrecorded 143' | "unrecorded $((128 + stop_number))") [ -n "$stop_asked" ] || preempted ;;
  *) return 1 ;;
  esac
}

if resumable; then
  if [ "${SLURM_TASK_PID:-}" != $$ ]; then
    echo "submit_pm.sh: stopped; the same command resumes" >&2 # the allocation belongs to the user
  elif ! running; then
    : # the user has canceled the job, or Slurm requeues it
  elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_REQUEUES" ]; then
    echo "submit_pm.sh: stopped, not requeued: MAX_REQUEUES=$MAX_REQUEUES is reached;" \
      "the same command resumes${SLURM_JOB_QOS:+ (QOS $SLURM_JOB_QOS)}" >&2
  else
    echo "submit_pm.sh: stopped, requeued" >&2
    # Slurm ends this shell. If the shell exited by itself, Slurm might process that exit after the requeue, and mark
    # the job as failed.
    trap 'exit "$status"' TERM
    if scontrol requeue "$job"; then
      sleep 300 &
      wait
    fi
    echo "submit_pm.sh: cannot be requeued; submit the same command again to resume" >&2
  fi
elif [ "$status" = "$EXIT_AGAIN" ]; then
  status=1 # another rank has failed and could not record its code
fi
exit "$status"
