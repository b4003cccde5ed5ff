#!/usr/bin/env bash
# A real Slurm of two nodes on one Debian machine, for tests. It needs no systemd, cgroups or database.
#
#   sudo tests/slurm/cluster.sh up     installs missing packages; starts munged, slurmctld and one slurmd per node
#   . "$SLURM_CLUSTER_DIR/env"         sets SLURM_CONF for sinfo, srun, sbatch, scancel
#   sudo tests/slurm/cluster.sh down   stops what `up` started; SLURM_CLUSTER_KEEP=1 keeps the logs
#   sudo tests/slurm/cluster.sh node NAME   restarts the slurmd of a node after it was killed
#
# All files are in SLURM_CLUSTER_DIR, except the packages and one marked line in /etc/hosts. A second cluster can run
# alongside with another directory and another SLURM_CLUSTER_PORT.
set -euo pipefail

d=${SLURM_CLUSTER_DIR:-${TMPDIR:-/tmp}/slurm-cluster}
nodes=2
cpus=256                          # per node; may exceed those of the machine
gpus=4                            # per node
port=${SLURM_CLUSTER_PORT:-17800} # slurmctld's; node i listens on port + i
export SLURM_CONF=$d/slurm.conf
PATH=$PATH:/usr/sbin:/sbin # directories of the daemons

fail() {
  echo "cluster.sh: $*" >&2
  exit "${status:-1}"
}

packages_missing() {
  ! { command -v slurmctld && command -v slurmd && command -v munged; } >/dev/null
}

install_packages() {
  local policy=/usr/sbin/policy-rc.d made='' failed=''
  if [ ! -e "$policy" ]; then # prevents the packages from starting daemons
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    made=1
  fi
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; } >"$d/log/apt.log" 2>&1 ||
    failed=1
  [ -z "$made" ] || rm -f "$policy"
  if [ -n "$failed" ]; then
    tail -n 5 "$d/log/apt.log" >&2
    status=69 fail "cannot install Debian's slurm-wlm"
  fi
}

configure() {
  local host mem n g
  host=$(hostname -s)
  mem=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
  (umask 077 && head -c 1024 /dev/urandom >"$d/munge/key")
  echo AutoDetect=off >"$d/gres.conf"
  for ((g = 0; g < gpus; g++)); do # slurmd requires a character device per GPU: a clone of /dev/null
    mknod -m 666 "$d/dev/gpu$g" c 1 3
    echo "Name=gpu File=$d/dev/gpu$g" >>"$d/gres.conf"
  done
  cat >"$SLURM_CONF" <<CONF
ClusterName=test
# Training runs derive their port from the job id, so two clusters on one machine need different first ids.
FirstJobId=$((1000 + RANDOM))
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$d/munge/socket
CredType=cred/munge
StateSaveLocation=$d/state
SlurmdSpoolDir=$d/spool-%n
SlurmctldPidFile=$d/slurmctld.pid
SlurmdPidFile=$d/slurmd-%n.pid
SlurmctldLogFile=$d/log/slurmctld.log
SlurmdLogFile=$d/log/slurmd-%n.log
MailProg=/bin/true
# no cgroups, no pinning, no accounting; more CPUs than the machine has
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1
ReturnToService=2
GresTypes=gpu
# sbatch refuses a job that exceeds a limit of its partition, as it does at most sites
EnforcePartLimits=ALL
# seconds from SIGTERM to SIGKILL, Slurm's default
KillWait=30
MinJobAge=3600
SlurmdTimeout=60
# Jobs of partition "high" preempt those of "low". Their GraceTime is long, as on real sites: on a busy machine the
# ranks may need many seconds to save, and the second SIGTERM, at the end of that time, would end them.
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobCompType=jobcomp/none
CONF
  for ((n = 1; n <= nodes; n++)); do
    mkdir -p "$d/spool-node$n" # slurmd creates it too late
    echo "NodeName=node$n NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + n)) CPUs=$cpus RealMemory=$mem" \
      "Gres=gpu:$gpus Feature=gpu State=UNKNOWN" >>"$SLURM_CONF"
  done
  cat >>"$SLURM_CONF" <<'CONF'
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=off DefaultTime=10 State=UP
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=requeue GraceTime=300 Default=YES DefaultTime=10 MaxTime=30 State=UP
CONF
  printf 'export SLURM_CONF=%q\n' "$SLURM_CONF" >"$d/env"
}

# A training run on several nodes must be able to resolve Slurm's node names.
hosts_line() {
  local n line=127.0.0.1
  for ((n = 1; n <= nodes; n++)); do line+=" node$n"; done
  echo "$line # $d"
}

# The file may be a mount point: write it in place, one process at a time.
edit_hosts() {
  flock /etc/hosts "$@"
}

start_node() {
  slurmd -c -N "$1" -f "$SLURM_CONF"
}

up() {
  [ "$(id -u)" -eq 0 ] || status=69 fail "must be root" # EX_UNAVAILABLE
  [ -e /etc/debian_version ] || status=69 fail "needs Debian's packages"
  case $d in *[[:space:]]*) fail "slurm.conf allows no spaces: SLURM_CLUSTER_DIR=$d" ;; esac
  [ ! -e "$d/up" ] || fail "the cluster in $d is already up; run $0 down first"
  mkdir -p "$d"/{state,log,dev,munge}
  chmod 0755 "$d" "$d"/{state,log,dev,munge}
  : >"$d/up"
  trap 'clean_up' EXIT
  if packages_missing; then install_packages; fi
  configure
  local n
  # shellcheck disable=SC2016 # for the inner shell
  edit_hosts bash -c 'echo "$1" >>/etc/hosts' _ "$(hosts_line)"
  munged --force --key-file="$d/munge/key" --socket="$d/munge/socket" --pid-file="$d/munge/munged.pid" \
    --log-file="$d/log/munged.log" --seed-file="$d/munge/seed"
  slurmctld -c -f "$SLURM_CONF"
  for ((n = 1; n <= nodes; n++)); do start_node "node$n"; done
  for _ in {1..1500}; do
    if [ "$(sinfo -h -N -p low -t idle -o %N 2>/dev/null | sort -u | wc -l)" -eq "$nodes" ]; then
      trap - EXIT
      echo "ready: . $d/env"
      return
    fi
    sleep 0.2
  done
  sinfo -N -l >&2 || true
  fail "the nodes did not become idle"
}

# shellcheck disable=SC2317,SC2329 # called by the trap
clean_up() {
  tail -n 8 "$d"/log/*.log >&2 || true
  SLURM_CLUSTER_KEEP=1 down >&2
}

# True if the process is still that program of this cluster: the pid may have been reused. A zombie, which pid 1 of a
# container may need seconds to reap, has no command line.
runs() {
  tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -F -- "$d/" | grep -q -- "$2"
}

stop_daemon() {
  local pid name=$2
  pid=$(tr -dc 0-9 <"$1")
  runs "$pid" "$name" || return 0
  kill -TERM "$pid"
  for _ in {1..200}; do
    runs "$pid" "$name" || return 0
    sleep 0.05
  done
  echo "$name ($pid) ignores SIGTERM; killing it" >&2
  kill -KILL "$pid"
}

down() {
  [ -e "$d/up" ] || {
    echo "no cluster in $d"
    return
  }
  # Cancel the jobs first: their processes are not children of the daemons.
  if timeout 5 sinfo -h >/dev/null 2>&1; then
    timeout 5 squeue -h -o %A 2>/dev/null | xargs -r timeout 10 scancel 2>/dev/null || true
    for _ in {1..75}; do
      [ -n "$(timeout 5 squeue -h 2>/dev/null)" ] || break
      sleep 0.2
    done
  fi
  local file
  for file in "$d"/slurmd-*.pid; do [ ! -s "$file" ] || stop_daemon "$file" slurmd; done
  [ ! -s "$d/slurmctld.pid" ] || stop_daemon "$d/slurmctld.pid" slurmctld
  [ ! -s "$d/munge/munged.pid" ] || stop_daemon "$d/munge/munged.pid" munged
  if grep -q -x -F "$(hosts_line)" /etc/hosts; then
    # shellcheck disable=SC2016 # for the inner shell
    edit_hosts bash -c 'rest=$(grep -v -x -F "$1" /etc/hosts); printf "%s\n" "$rest" >/etc/hosts' _ "$(hosts_line)"
  fi
  rm -f "$d/up"
  [ -n "${SLURM_CLUSTER_KEEP:-}" ] || rm -rf "$d"
}

case ${1:-} in
up) up ;;
down) down ;;
node) start_node "${2:?which node}" ;;
*) fail "usage: cluster.sh up | down | node NAME" ;;
esac
