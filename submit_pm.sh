#!/usr/bin/env bash
# Trains as a batch job, one rank a GPU. Submit from the repository's top; all arguments go to train.py unchanged:
#
#   sbatch -n 8 submit_pm.sh --config=bs512_opt
#   sbatch -N 8 ./submit_pm.sh --config=bs512_opt
#   sbatch -n 1 ./submit_pm.sh --config=short --num_epochs 3
#   ENABLE_PROFILING=1 PROFILE_OUTPUT=baseline sbatch -n 1 submit_pm.sh --config=short --enable_manual_profiling
#   salloc -n 4 …; bash submit_pm.sh --config=short        # inside an allocation
#
# Before its time limit, or when it is preempted, the training saves its state; the job queues itself again and goes on.
# It ends with the training's exit code; 75 means: saved, run me again.
#
# sbatch's command line, and variables such as SBATCH_ACCOUNT, SBATCH_QOS and SBATCH_RESERVATION, which sbatch takes by
# itself, go before the lines that follow; they fit Perlmutter (a node: 64 cores, 128 threads, 4 GPUs). On another
# cluster perhaps: sbatch -C '' --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=16 ...
#
#SBATCH --job-name=nbody-unet
#SBATCH --output=%x-%j.out
#SBATCH --time=04:00:00
#SBATCH --constraint=gpu
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#
# Not --gpus-per-task=1, with which Slurm refuses fewer than 4 tasks, and which hides the node's other GPUs from a rank,
# so that NCCL cannot copy between them directly. --gpu-bind=single:1 does that where it is wanted.
#SBATCH --gpus-per-node=4
#
# The time limit's warning comes to this shell alone (B:), so many seconds before, or up to a minute earlier. A job that
# starts again would empty its output file, did it not append to it.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# shellcheck disable=SC2329 # the traps call them
set -u

# Settings: the environment at submission goes before what stands here.
TRAIN_SCRIPT=${TRAIN_SCRIPT:-train.py} # or train_graph.py
PYTHON=${PYTHON:-python}
DATA_DIR=${DATA_DIR:-} # holds train.h5, val.h5 and their .npy twins; what the configs call /data
LOGS_DIR=${LOGS_DIR:-} # what the configs call /logs
CONTAINER_IMAGE=${CONTAINER_IMAGE:-}
CONTAINER_RUNTIME=${CONTAINER_RUNTIME:-} # shifter, podman-hpc or none; by default shifter if an image is named, else none
STOP_SIGNAL=${STOP_SIGNAL:-USR1}         # what asks the ranks to save and stop: the config's stop_signal
MAX_REQUEUES=${MAX_REQUEUES:-100}        # times that the job has run before, for whatever reason
# CONTAINER_OPTIONS: what the runtime needs for GPUs and network (below); several are separated by spaces

EXIT_USER_ERROR=2
EXIT_AGAIN=75

fail() {
  echo "submit_pm.sh: $*" >&2
  exit "$EXIT_USER_ERROR"
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "runs inside a job: sbatch -n 4 submit_pm.sh ..., or inside salloc"
# Slurm runs a copy of this file: where the repository is, only the working directory tells.
for file in export_DDP_vars.sh "$TRAIN_SCRIPT"; do
  [ -f "$file" ] || fail "no $file in $PWD; submit from the repository's top"
done
[[ $MAX_REQUEUES =~ ^[0-9]+$ ]] || fail "MAX_REQUEUES must be a whole number, not $MAX_REQUEUES"
stop_number=$(kill -l "$STOP_SIGNAL" 2>/dev/null)
[[ $stop_number =~ ^[0-9]+$ ]] || fail "STOP_SIGNAL must be a signal's name such as USR2, not $STOP_SIGNAL"
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi

# --- the command of a rank ---

command=("$PYTHON" "$TRAIN_SCRIPT")
if [ "${ENABLE_PROFILING:-0}" = 1 ]; then
  output=${PROFILE_OUTPUT:-profile}
  if [ "${SLURM_NTASKS:-1}" -gt 1 ]; then output+='-rank%q{SLURM_PROCID}'; fi # which nsys expands
  command=(nsys profile '--trace=cuda,cublas,nvtx' --kill none -c cudaProfilerApi -f true -o "$output" "${command[@]}")
fi

if [ -n "$DATA_DIR" ]; then DATA_DIR=$(realpath -e -- "$DATA_DIR") || fail "DATA_DIR: no such directory"; fi
if [ -n "$LOGS_DIR" ]; then
  mkdir -p -- "$LOGS_DIR" || fail "LOGS_DIR: cannot make it"
  LOGS_DIR=$(realpath -e -- "$LOGS_DIR")
fi

# sbatch --image=... tells Shifter itself, through its plug-in.
job_image=${SLURM_SPANK_SHIFTER_IMAGE:-${SLURM_SPANK__SLURM_SPANK_OPTION_shifter_image:-}}
if [ -z "$CONTAINER_RUNTIME" ]; then
  CONTAINER_RUNTIME=none
  if [ -n "$CONTAINER_IMAGE$job_image" ]; then CONTAINER_RUNTIME=shifter; fi
fi
container=()
volumes=(${DATA_DIR:+--volume="$DATA_DIR:/data"} ${LOGS_DIR:+--volume="$LOGS_DIR:/logs"})
case $CONTAINER_RUNTIME in
shifter)
  [ -n "$CONTAINER_IMAGE$job_image" ] || fail "shifter needs CONTAINER_IMAGE=..., or sbatch --image=..."
  read -r -a options <<<"${CONTAINER_OPTIONS---module=gpu,nccl-plugin}"
  # Shifter keeps the environment and the working directory, and becomes the command: signals reach it.
  container=(shifter ${CONTAINER_IMAGE:+--image="$CONTAINER_IMAGE"} "${options[@]}" "${volumes[@]}")
  ;;
podman-hpc)
  [ -n "$CONTAINER_IMAGE" ] || fail "podman-hpc needs CONTAINER_IMAGE=..."
  read -r -a options <<<"${CONTAINER_OPTIONS---gpu --nccl}"
  # podman-hpc becomes podman, which hands signals on to the container's first process (--sig-proxy, its default), the
  # shell below that becomes Python. A process that Slurm signals itself, too, gets the same signal twice at once.
  # Nothing of the environment and no directory comes along unasked; --env-host would bring LD_LIBRARY_PATH and the like.
  container=(podman-hpc run --rm --net host --ipc host "${options[@]}" "${volumes[@]}"
    --volume="$PWD:$PWD" --workdir="$PWD")
  for name in 'SLURM_*' 'MASTER_*' 'NCCL_*' 'OFI_NCCL_*' 'FI_*' 'TORCH*' 'PYTORCH_*' 'OMP_*' 'BENCHY_*' \
    CUDA_VISIBLE_DEVICES NVIDIA_TF32_OVERRIDE HDF5_USE_FILE_LOCKING; do
    container+=(--env "$name")
  done
  container+=("$CONTAINER_IMAGE")
  ;;
none)
  # Nothing is mounted on /data and /logs: the training is told where they are, before the arguments, which so can say
  # otherwise.
  if [ -n "$LOGS_DIR" ]; then command+=(--set "expdir=$LOGS_DIR"); fi
  if [ -n "$DATA_DIR" ]; then
    for part in train val; do
      command+=(--set "${part}_path=$DATA_DIR/$part.h5")
      for kind in data label; do
        command+=(--set "${part}_path_npy_$kind=$DATA_DIR/${part}_$kind.npy")
      done
    done
  fi
  ;;
*) fail "CONTAINER_RUNTIME must be shifter, podman-hpc or none, not $CONTAINER_RUNTIME" ;;
esac

# --- the step, and the signals ---

# In the job's own words; a job that is being cancelled, requeued or timed out is no longer RUNNING.
running() { [[ $(scontrol show job "$job" 2>/dev/null) == *' JobState=RUNNING '* ]]; }
preempted() { [[ $(scontrol show job "$job" 2>/dev/null) =~ ' PreemptTime='[0-9] ]]; }

step='' stop_asked='' interrupted=''
case " $* " in *' --enable_benchy '*) benchmark=1 ;; *) benchmark='' ;; esac

# To srun, which passes it on to every rank. No TERM: srun would end the step at once.
ask_to_stop() {
  stop_asked=1
  if [ -n "$step" ]; then kill -s "$STOP_SIGNAL" "$step" 2>/dev/null; fi
}

# The time limit's warning; where preemption sends what --signal says (send_user_signal), that of a preemption, too.
on_warning() {
  interrupted=1
  if [ -n "$benchmark" ]; then
    echo "submit_pm.sh: warned, but a benchmark has nothing to save" >&2
  else
    echo "submit_pm.sh: warned, asks the ranks to save and stop" >&2
    ask_to_stop
  fi
}

# Either a warning that is a TERM (--signal=B:TERM@120), or Slurm ends the job and has told the ranks itself: a second
# signal would end them before they have saved.
on_term() {
  interrupted=1
  if running; then on_warning; fi
}

trap on_warning USR1
trap on_term TERM
trap 'interrupted=1' INT # Ctrl-C, which srun gets from the terminal, too

# -K1: where one rank fails the others end, too. -X: Ctrl-C goes to the ranks at once.
# --cpus-per-task: since Slurm 22.05 srun no longer takes it from the job.
# --cpu-bind: the i-th task of a node on cores of its own, those of the i-th NUMA domain of Perlmutter's four;
# export_DDP_vars.sh gives it the GPU there. Clusters that cannot bind say so and go on.
srun -u -K1 -X --cpu-bind=cores ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${container[@]}" \
  bash -c 'source ./export_DDP_vars.sh; exec "$@"' _ "${command[@]}" "$@" &
step=$!
if [ -n "$stop_asked" ]; then ask_to_stop; fi # the warning came before there was a step

# A signal ends `wait`, not what it waits for.
while
  interrupted=''
  wait "$step"
  status=$?
  [ -n "$interrupted" ]
do :; done

# --- the end ---

# A step that was asked to stop may also end by a signal: by that very one or a preemption's TERM before the program
# could catch it, or because -K1 ended ranks that had saved and were on their way out after the first one's 75.
resumable() {
  case $status in
  "$EXIT_AGAIN") ;;
  137 | 143 | "$((128 + stop_number))") [ -n "$stop_asked" ] || preempted ;;
  *) return 1 ;;
  esac
}

if resumable; then
  if [ "${SLURM_TASK_PID:-}" != $$ ]; then
    echo "submit_pm.sh: stopped; the same command goes on from there" >&2 # inside an allocation: not ours to requeue
  elif ! running; then
    : # cancelled by the user, or Slurm requeues the job itself
  elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_REQUEUES" ]; then
    echo "submit_pm.sh: stopped, and not queued again: it was MAX_REQUEUES=$MAX_REQUEUES times" >&2
  else
    echo "submit_pm.sh: stopped, queued again" >&2
    # Slurm ends this shell. If it ended by itself, Slurm might hear of that when the job already waits for its next start,
    # and take the job for failed.
    trap 'exit "$status"' TERM
    if scontrol requeue "$job"; then
      sleep 300 &
      wait
    fi
    echo "submit_pm.sh: cannot be requeued; submitted again it goes on from there" >&2
  fi
fi
exit "$status"
