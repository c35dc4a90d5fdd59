# shellcheck shell=bash
# Sourced by run.sh: what follows from the options. launch.env, the sbatch command, the preflight and --dry-run's text.

default_env() { # what every rank gets unless the site or --env say otherwise
  local name
  local -A defaults=(
    [OMP_NUM_THREADS]=${VALUE[cpus-per-proc]:-1}
    [PYTHONUNBUFFERED]=1
    # Without the working folder on sys.path: a folder of ours would hide a published package of the same name.
    [PYTHONSAFEPATH]=1
    # The flight recorder: who waited in which collective, written by every rank when one times out.
    [TORCH_NCCL_DUMP_ON_TIMEOUT]=1
    [TORCH_FR_BUFFER_SIZE]=2000
  )
  # Restarted workers of torchrun would else be sent to a store that died with the former ones.
  if ((${VALUE[max-restarts]} > 0)); then defaults[TORCH_DISABLE_SHARE_RDZV_TCP_STORE]=1; fi
  for name in "${!defaults[@]}"; do
    if [[ ! -v ENV[$name] ]]; then ENV["$name"]=${defaults[$name]} ENV_FROM["$name"]=default; fi
  done
}

sorted_env() { printf '%s\n' "${!ENV[@]}" | LC_ALL=C sort; }

quoted() { printf '%q ' "$@" | sed 's/ $//'; }

launch_env() { # the file that job.sbatch and worker.sh source
  local name
  echo "# Written by launch/run.sh, readable by its owner only."
  printf '%s=%q\n' RUN_LAUNCH "$LAUNCH" RUN_FOLDER "$RUN" RUN_ARRAY "${VALUE[array]}" RUN_NODES "${VALUE[nodes]}" RUN_PROCS "$PROCS" \
    RUN_GPUS "${VALUE[gpus-per-node]}" RUN_LAUNCHER "${VALUE[launcher]}" RUN_RDZV "${VALUE[rdzv]}" \
    RUN_MAX_RESTARTS "${VALUE[max-restarts]}" RUN_MAX_REQUEUES "${VALUE[max-requeues]}" RUN_PYTHON "$PYTHON" \
    RUN_WORKDIR "$PWD" RUN_SETUP "${VALUE[setup]}" RUN_CONTAINER "${VALUE[container]}" RUN_MOUNTS "$(mounts)" \
    RUN_CALIBRATE "${VALUE[calibrate]}"
  echo "RUN_CALIBRATE_ARGS=(${VALUE[calibrate-with]:+$(quoted "${CALIBRATE_WITH[@]}")})"
  echo "RUN_ARGS=($(quoted "${TRAIN[@]}"))"
  echo "RUN_ENV=("
  for name in $(sorted_env); do printf '  %q\n' "$name=${ENV[$name]}"; done
  echo ")"
}

mounts() { # the container sees the scripts, the working folder and the run under their own paths
  local path all=${VALUE[mounts]}
  if [[ ! ${VALUE[container]} ]]; then return; fi
  for path in "${LAUNCH%/*}" "$PWD" "$RUN"; do
    if [[ ,$all, != *",$path:$path,"* ]]; then all+=${all:+,}$path:$path; fi
  done
  echo "$all"
}

sbatch_command() { # sets SBATCH
  local tasks=1 option log=job_%j.log export=NONE
  if [[ ${VALUE[launcher]} == srun ]]; then tasks=$PROCS; fi
  if [[ ${VALUE[array]} ]]; then log=job_%A_%a.log; fi
  # A name without a value is taken from the submitting shell, so that no secret stands in a command line.
  if ((${#PASSED[@]})); then export=$(IFS=,; echo "${PASSED[*]}"); fi
  SBATCH=(sbatch --parsable "--job-name=${RUN##*/}" "--nodes=${VALUE[nodes]}" "--ntasks-per-node=$tasks" --requeue --open-mode=append
    "--output=$RUN/launch/logs/$log" "--signal=B:USR1@${VALUE[signal-before]}" "--export=$export" "--chdir=$PWD")
  # NONE loads the login environment by itself.
  if ((${#PASSED[@]})); then SBATCH+=(--get-user-env); fi
  if [[ ${VALUE[gpus-per-node]} ]]; then SBATCH+=("--gpus-per-node=${VALUE[gpus-per-node]}"); fi
  if [[ ${VALUE[cpus-per-proc]} ]]; then SBATCH+=("--cpus-per-task=$((${VALUE[cpus-per-proc]} * PROCS / tasks))"); fi
  for option in partition account qos time array; do
    if [[ ${VALUE[$option]} ]]; then SBATCH+=("--$option=${VALUE[$option]}"); fi
  done
  if [[ ${VALUE[exclusive]} == yes ]]; then SBATCH+=(--exclusive); fi
  SBATCH+=(${SBATCH_EXTRA[@]+"${SBATCH_EXTRA[@]}"} "$LAUNCH/job.sbatch" "$RUN/launch/launch.env")
}

task_numbers() { # of --array, one a line; without an array one empty line
  local part first last step
  if [[ ! ${VALUE[array]} ]]; then
    echo
    return
  fi
  for part in $(tr , ' ' <<<"${VALUE[array]%%%*}"); do
    step=1
    if [[ $part == *:* ]]; then step=${part#*:} part=${part%%:*}; fi
    first=${part%%-*} last=${part##*-}
    seq "$first" "$step" "$last"
  done
}

# Asks the trainer itself whether the configuration fits this many processes. Its text goes to standard output.
preflight() {
  local task words text
  if [[ ${VALUE[preflight]} == no ]]; then
    echo "not checked (--no-preflight)"
    return
  fi
  if [[ ${VALUE[container]} ]] && ! command -v "$PYTHON" >/dev/null; then
    echo "not checked: $PYTHON is in the container only"
    return
  fi
  while read -r task; do
    words=("${TRAIN[@]//'{task}'/$task}")
    text=$(PYTHONSAFEPATH=1 env -u RANK -u WORLD_SIZE "$PYTHON" -m dbsp_megatron.train "${words[@]}" --dry-run --world-size "$WORLD" 2>&1) || {
      grep -m1 '^error: ' <<<"$text" | sed "s/^error: /error: ${task:+task $task: }/" >&2 || tail -n 5 <<<"$text" >&2
      return 2
    }
    echo "${task:+task $task:$'\n'}$text"
  done < <(task_numbers)
}

submitted_job() { # number of the job that this run has in the queue, if any
  local job
  if [[ ! -s $RUN/launch/job_id ]] || ! command -v squeue >/dev/null; then return; fi
  job=$(<"$RUN/launch/job_id")
  if [[ $(squeue --noheader --states=all --jobs "$job" --format %T 2>/dev/null) =~ PENDING|RUNNING|CONFIGURING|COMPLETING|REQUEUED|SUSPENDED ]]; then echo "$job"; fi
}

describe() { # --dry-run
  local name checked
  checked=$(preflight) || exit 2
  echo "== options (value, from)"
  for name in $(printf '%s\n' "${!VALUE[@]}" | LC_ALL=C sort); do
    printf '%-16s %-28s %s\n' "$name" "${VALUE[$name]:--}" "${FROM[$name]-default}"
  done
  echo "== processes"
  echo "${VALUE[nodes]} nodes x $PROCS = $WORLD processes"
  echo "$checked"
  echo "== environment of every rank (value, from)"
  for name in $(sorted_env); do printf '%-32s %s\n' "$name=${ENV[$name]}" "${ENV_FROM[$name]}"; done
  for name in ${PASSED[@]+"${PASSED[@]}"}; do printf '%-32s %s\n' "$name=***" "this shell, by --pass-env"; done
  echo "== one node runs"
  (
    set -- # sourced code must not see our arguments
    RUN_ENV_FILE=$RUN/launch/launch.env
    # shellcheck source=/dev/null
    source <(launch_env)
    # shellcheck source=life.sh
    source "$LAUNCH/life.sh"
    # Shown as written: they are known on the nodes only.
    # shellcheck disable=SC2016,SC2034
    { MASTER_ADDR='$MASTER_ADDR' MASTER_PORT='$MASTER_PORT' RUN_LIFE='$LIFE' RUN_STOP_FILE=$RUN/launch/'stop.$LIFE' RUN_LIFE_DIR=$RUN/launch/logs/'life_$LIFE'; }
    resolve_task
    for work in $(if [[ $RUN_CALIBRATE == yes ]]; then echo calibrate; fi) train; do
      # shellcheck disable=SC2016
      launcher_command "$work" '$SLURM_NODEID'
      echo "$work: ${COMMAND[*]}"
      rank_command "$work"
      echo "$work, each rank: $(quoted "${COMMAND[@]}" | sed 's/\\\$/$/g')"
    done
  )
  echo "== files"
  echo "run folder    $RUN${VALUE[array]:+/${RUN##*/}-TASK for each task}"
  echo "checkpoints   in checkpoints/; a start goes on from: $(newest_of "$RUN")"
  echo "launch files  in launch/: launch.env, sbatch.txt, job_id, stop.LIFE, logs/job_*.log, logs/life_LIFE/rank_*.log"
  if [[ ${VALUE[mode]} == slurm ]]; then describe_slurm; fi
  echo "nothing was written or started"
}

newest_of() {
  local found
  found=$(find "$1/checkpoints" -maxdepth 1 -type d -name 'step_*' 2>/dev/null | sort | tail -n 1)
  if [[ $found ]]; then echo "${found##*/}"; else echo "nothing, so step 0"; fi
}

describe_slurm() {
  echo "== sbatch command"
  quoted "${SBATCH[@]}"
  echo
  echo "== sbatch says"
  if command -v sbatch >/dev/null; then
    # Its last two words are the script and the script's argument.
    "${SBATCH[@]:0:${#SBATCH[@]}-2}" --test-only "${SBATCH[@]: -2}" 2>&1 || true
  else
    echo "not asked: no sbatch on this machine"
  fi
  echo "== batch script"
  cat "$LAUNCH/job.sbatch"
}
