#!/usr/bin/env bash
# Stops what slurm_up.sh started, by process id and start time, and removes its networks and names.
#   slurm_down.sh FOLDER
set -uo pipefail
lab=$1
export SLURM_CONF=$lab/etc/slurm.conf
start_time() { [[ -r /proc/$1/stat ]] && sed 's/.*) //' "/proc/$1/stat" | awk '{print $20}'; }
mine() { [[ -d /proc/$1 && $(start_time "$1") == "$2" && $(sed 's/.*) //' "/proc/$1/stat" | cut -c1) != Z ]]; }

# Jobs first: their processes outlive a killed slurmd.
if scontrol ping 2>/dev/null | grep -q UP; then
  squeue -h -o %A 2>/dev/null | sort -u | xargs -r scancel 2>/dev/null
  for _ in $(seq 150); do [[ $(squeue -h -o %A 2>/dev/null) ]] || break; sleep 0.1; done
fi
# What still lives in a node's own namespace: steps, tasks, orphaned workers.
ours=$(readlink /proc/$$/ns/uts)
orphans=()
for file in "$lab"/pids/slurmd-*; do
  [[ -s $file ]] || continue
  read -r pid started <"$file"
  mine "$pid" "$started" || continue
  space=$(readlink "/proc/$pid/ns/uts")
  [[ $space == "$ours" ]] && continue
  for process in /proc/[0-9]*; do
    other=${process#/proc/}
    if [[ $other != "$pid" && $(readlink "$process/ns/uts" 2>/dev/null) == "$space" ]]; then orphans+=("$other:$(start_time "$other")"); fi
  done
done
# Daemons in reverse order of their start.
for file in "$lab"/pids/slurmd-* "$lab/pids/slurmctld" "$lab/pids/munged"; do
  [[ -s $file ]] || continue
  read -r pid started <"$file"
  if mine "$pid" "$started"; then
    kill -TERM "$pid"
    for _ in $(seq 50); do mine "$pid" "$started" || break; sleep 0.1; done
    if mine "$pid" "$started"; then kill -KILL "$pid"; fi
  fi
  rm -f "$file"
done
for entry in ${orphans[@]+"${orphans[@]}"}; do if mine "${entry%:*}" "${entry#*:}"; then kill -KILL "${entry%:*}"; fi; done
for name in $(ip netns list 2>/dev/null | awk '$1 ~ /^slnode[0-9]+$/ {print $1}'); do ip netns del "$name"; done
ip link del slbr0 2>/dev/null
# In place: in a container the file may be a mount.
kept=$(grep -v ' # slurmlab$' /etc/hosts) && printf '%s\n' "$kept" >/etc/hosts
exit 0
