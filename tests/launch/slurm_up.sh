#!/usr/bin/env bash
# Brings up a small real Slurm cluster on this host: munged, slurmctld and one slurmd for each node, every node with a host
# name and a network of its own, so that a script that says "localhost" fails as it does on a cluster. Needs root.
#   slurm_up.sh FOLDER [NODES]     a second call restarts only what died
# Afterwards: export SLURM_CONF=FOLDER/etc/slurm.conf
set -euo pipefail
lab=$1
nodes=${2:-3}
cpus=4 gpus=2 # claimed; this host may have fewer
prefix=198.18.213
control=$prefix.1
host=$(hostname -s)
mkdir -p "$lab"/{etc,log,run,spool,state,pids,dev}
chmod 755 "$lab" "$lab"/{etc,log,run,spool,state,pids,dev}
exec 9>"$lab/lock"
flock -w 100 9

# ---- process ids are kept with their start times: a recycled id is never taken for ours
start_time() { [[ -r /proc/$1/stat ]] && sed 's/.*) //' "/proc/$1/stat" | awk '{print $20}'; }
alive() {
  local pid started
  [[ -s $lab/pids/$1 ]] || return 1
  read -r pid started <"$lab/pids/$1"
  [[ -d /proc/$pid && $(start_time "$pid") == "$started" && $(sed 's/.*) //' "/proc/$pid/stat" | cut -c1) != Z ]]
}
launch() {
  local name=$1 pid
  shift
  if alive "$name"; then return; fi
  setsid "$@" </dev/null >>"$lab/log/$name.out" 2>&1 9>&- &
  pid=$!
  echo "$pid $(start_time "$pid")" >"$lab/pids/$name"
}

# ---- network: a bridge, and behind it one namespace for each node
if ! ip link show slbr0 >/dev/null 2>&1; then
  ip link add slbr0 type bridge
  ip addr add "$control/24" dev slbr0
  ip link set slbr0 up
fi
known() { grep -qxF "$1 # slurmlab" /etc/hosts || echo "$1 # slurmlab" >>/etc/hosts; }
for i in $(seq "$nodes"); do
  known "$prefix.$((10 + i)) node$i"
  [[ -e /run/netns/slnode$i ]] && continue
  ip netns add "slnode$i"
  ip link add "slv$i" type veth peer name eth0 netns "slnode$i"
  ip link set "slv$i" master slbr0 up
  ip -n "slnode$i" link set lo up
  ip -n "slnode$i" addr add "$prefix.$((10 + i))/24" dev eth0
  ip -n "slnode$i" link set eth0 up
done

# ---- configuration
if [[ ! -s $lab/etc/munge.key ]]; then (umask 077 && head -c 1024 /dev/urandom >"$lab/etc/munge.key"); fi
# Slurm takes devices only, so the GPUs are copies of /dev/null.
for ((i = 0; i < gpus; i++)); do [[ -c $lab/dev/nvidia$i ]] || mknod "$lab/dev/nvidia$i" c 1 3; done
echo "NodeName=node[1-$nodes] Name=gpu File=$lab/dev/nvidia[0-$((gpus - 1))]" >"$lab/etc/gres.conf"
printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >"$lab/etc/cgroup.conf"
cat >"$lab/etc/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$host($control)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# Requeued jobs wait for as long as a credential lives: 2 minutes if left alone.
AuthInfo=socket=$lab/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool/%n
SlurmctldPidFile=$lab/run/slurmctld.pid
SlurmdPidFile=$lab/run/slurmd-%n.pid
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdLogFile=$lab/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
ReturnToService=2
SlurmctldTimeout=30
# How soon a dead node is noticed.
SlurmdTimeout=10
InactiveLimit=0
KillWait=10
MinJobAge=3600
WaitTime=0
UnkillableStepTimeout=30
MailProg=/bin/true
GresTypes=gpu
$(for i in $(seq "$nodes"); do
  echo "NodeName=node$i NodeHostname=node$i NodeAddr=$prefix.$((10 + i)) Port=$((17000 + i)) CPUs=$cpus Boards=1" \
    "SocketsPerBoard=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=8000 Gres=gpu:$gpus State=UNKNOWN"
done)
PartitionName=main Nodes=node[1-$nodes] Default=YES MaxTime=UNLIMITED DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=urgent Nodes=node[1-$nodes] Default=NO MaxTime=UNLIMITED DefaultTime=10 PriorityTier=10 PreemptMode=OFF
CONF
export SLURM_CONF=$lab/etc/slurm.conf

# ---- daemons
launch munged munged --foreground --force --socket="$lab/run/munge.socket" --key-file="$lab/etc/munge.key" \
  --log-file="$lab/log/munged.log" --pid-file="$lab/run/munged.pid" --seed-file="$lab/run/munge.seed"
for _ in $(seq 200); do munge -n --socket="$lab/run/munge.socket" >/dev/null 2>&1 && break; sleep 0.1; done
launch slurmctld slurmctld -D -f "$SLURM_CONF"
for _ in $(seq 200); do scontrol ping 2>/dev/null | grep -q UP && break; sleep 0.1; done
for i in $(seq "$nodes"); do
  mkdir -p "$lab/spool/node$i"
  # shellcheck disable=SC2016 # expanded by the inner shell
  launch "slurmd-node$i" ip netns exec "slnode$i" unshare --uts sh -c 'hostname "$1" && exec slurmd -D -N "$1" -f "$2"' sh "node$i" "$SLURM_CONF"
done

# ---- until every node is usable
for _ in $(seq 600); do
  states=$(sinfo -h -N -p main -o '%N %t' 2>/dev/null | sort -u || true)
  if (($(grep -cE ' (idle|mix|alloc|comp)$' <<<"$states") == nodes)); then
    echo "slurm_up: ready, SLURM_CONF=$SLURM_CONF"
    exit 0
  fi
  # A node that an earlier life left down comes back only when told so.
  while read -r name state; do
    if [[ $state =~ ^(down|drain|drng) ]] && alive "slurmd-$name"; then scontrol update nodename="$name" state=resume 2>/dev/null || true; fi
  done <<<"$states"
  sleep 0.2
done
echo "slurm_up: nodes are not ready: $states" >&2
tail -n 15 "$lab"/log/*.out "$lab"/log/*.log >&2
exit 1
