# shellcheck shell=bash
# Sourced by job.sbatch, worker.sh and run.sh, after launch.env: one life of a run, from its folder to the verdict.
# A run may have several lives: each start of the job, by requeueing or by hand, is one.

: "${RUN_FOLDER:?}" "${RUN_LAUNCH:?}" "${RUN_ENV_FILE:?}"

say() { echo "launch: $*"; }

# shellcheck source=masked.sh
source "$RUN_LAUNCH/masked.sh"

# The trainer writes done.json at its last step. One that lay there before the life began says nothing about it.
done_mark() { stat -c '%Y %i %s' "$RUN_FOLDER/done.json" 2>/dev/null; }
is_done() { [[ -e $RUN_FOLDER/done.json && $(done_mark) != "$DONE_BEFORE" ]]; }

# With an array, each task is a run of its own in the folder of all.
resolve_task() {
  local index
  if [[ ${SLURM_ARRAY_TASK_ID-} && ${RUN_ARRAY-} ]]; then
    RUN_FOLDER=$RUN_FOLDER/${RUN_FOLDER##*/}-$SLURM_ARRAY_TASK_ID
    for index in "${!RUN_ARGS[@]}"; do RUN_ARGS[index]=${RUN_ARGS[index]//'{task}'/$SLURM_ARRAY_TASK_ID}; done
  fi
  RUN_STATE=$RUN_FOLDER/launch
  GIVEN_ARGS=("${RUN_ARGS[@]}")
  RUN_ARGS+=(--run.root "${RUN_FOLDER%/*}" --run.name "${RUN_FOLDER##*/}")
  if [[ $RUN_CALIBRATE == yes ]]; then RUN_ARGS+=(--sp.calibration "$RUN_FOLDER/calibration.json"); fi
}

newest_checkpoint() {
  local path newest=
  for path in "$RUN_FOLDER"/checkpoints/step_*; do if [[ -d $path ]]; then newest=${path##*/}; fi; done
  echo "$newest"
}

# A folder of its own for every life: neither logs nor a stop file of an earlier one are met again.
begin_life() { # RESTARTS
  local number=0
  RUN_RESTARTS=$1
  mkdir -p "$RUN_STATE/logs" || return 1
  # A launcher or node can die after the work was done: then there is nothing left to start.
  if ((RUN_RESTARTS > 0)) && [[ -e $RUN_FOLDER/done.json ]]; then
    say "the run is done already"
    exit 0
  fi
  until mkdir "$RUN_STATE/logs/life_$number" 2>/dev/null; do
    [[ -d $RUN_STATE/logs/life_$number ]] || return 1
    number=$((number + 1))
  done
  export RUN_LIFE=$number RUN_LIFE_DIR=$RUN_STATE/logs/life_$number RUN_STOP_FILE=$RUN_STATE/stop.$number
  DONE_BEFORE=$(done_mark) CALIBRATED_BEFORE=
  if [[ -e $RUN_FOLDER/calibration.json ]]; then CALIBRATED_BEFORE=yes; fi
  # Set when training itself is started.
  TRAINING=
  # The life before was ended by a signal while it measured, and had nothing to show for it.
  MEASURED_IN_VAIN=
  if [[ -e $RUN_STATE/logs/life_$((number - 1))/measured_in_vain ]]; then MEASURED_IN_VAIN=yes; fi
  FIRST_CHECKPOINT=$(newest_checkpoint)
  say "life $number of $RUN_FOLDER: ${RUN_NODES} x ${RUN_PROCS} processes, restart $RUN_RESTARTS of at most $RUN_MAX_REQUEUES," \
    "from ${FIRST_CHECKPOINT:-the start}, logs in $RUN_LIFE_DIR"
}

# Decides by what lies in the run folder: a launcher's exit code says how the launcher ended, not how the work did.
judge_life() { # CODE ASKED_TO_STOP(empty|requeue|stop): sets OUTCOME (done|requeue|failed|stopped) and EXIT_CODE
  local code=$1 asked=$2 newest progress=yes
  newest=$(newest_checkpoint)
  # The first calibration is kept by the lives that follow, as checkpoints are.
  if [[ $newest == "$FIRST_CHECKPOINT" ]] && [[ $CALIBRATED_BEFORE || ! -e $RUN_FOLDER/calibration.json ]]; then progress=; fi
  EXIT_CODE=$code
  if is_done; then
    OUTCOME="done"
    # A signal took the launcher after the last step: 128 and more, or 1 of torchrun when we were told to stop.
    # Other codes: a rank found something wrong after it.
    if [[ $code -ge 128 || $asked ]]; then EXIT_CODE=0; fi
    say "done; the launcher ended with $code"
  elif [[ $asked == requeue && ! $progress && $TRAINING ]]; then
    OUTCOME=failed EXIT_CODE=75
    say "not requeued: no new checkpoint in this life; give more time, or a larger --signal-before"
  elif [[ $asked == requeue && ! $progress && $MEASURED_IN_VAIN ]]; then
    OUTCOME=failed EXIT_CODE=75
    say "not requeued: two lives in a row ended before kernels and links were measured; give more time, or leave --calibrate out"
  elif [[ $asked == requeue ]] && ((RUN_RESTARTS >= RUN_MAX_REQUEUES)); then
    OUTCOME=stopped EXIT_CODE=75
    say "not requeued: restarts $RUN_RESTARTS reached --max-requeues; submit again to go on from ${newest:-the start}"
  elif [[ $asked == requeue ]]; then
    OUTCOME=requeue
    if [[ ! $progress ]]; then : >"$RUN_LIFE_DIR/measured_in_vain"; fi
    say "stopped with ${newest:-no checkpoint yet}, to be requeued"
  elif [[ $asked == stop ]] || ((code == 0)); then
    OUTCOME=stopped
    say "stopped before the last step at ${newest:-no checkpoint}; submit again to go on"
  else
    OUTCOME=failed
    say "failed with $code before the last step; newest checkpoint: ${newest:-none}"
  fi
  # Nothing but a finished run may look like one.
  if [[ $OUTCOME != "done" ]] && ((EXIT_CODE == 0)); then EXIT_CODE=75; fi
  if [[ $OUTCOME == failed ]]; then show_failure; fi
  echo "$OUTCOME $EXIT_CODE" >"$RUN_LIFE_DIR/outcome"
}

# Ranks follow each other into failure: the first log with an error in it, oldest first, is the one to read.
show_failure() {
  local log found=
  while IFS= read -r log; do
    found=${found:-$log}
    if grep -qE 'Error|error:|stopped responding' "$log"; then
      found=$log
      break
    fi
  done < <(find "$RUN_LIFE_DIR" -maxdepth 1 -name '*rank_*.log' -size +0 -printf '%T@ %p\n' 2>/dev/null | sort -n | cut -d' ' -f2-)
  if [[ ! $found ]]; then return; fi
  say "first rank log with an error, or else the first to end: $found"
  tail -n 12 "$found" | masked | sed 's/^/  | /'
}

# Wait for a process although traps interrupt waiting. Traps set INTERRUPTED.
# shellcheck disable=SC2034 # CODE is for the caller
wait_for() { # PID: sets CODE
  local status
  CODE=0
  while :; do
    INTERRUPTED=
    wait "$1"
    status=$?
    # 127: an earlier round has its status already.
    if ((status != 127)); then CODE=$status; fi
    if [[ ! $INTERRUPTED ]]; then return 0; fi
  done
}

# What one node runs (the srun launcher: one process), for work = train or calibrate. Sets COMMAND.
launcher_command() { # WORK NODE_RANK
  local worker=("$RUN_LAUNCH/worker.sh" "$RUN_ENV_FILE" "$1")
  case $RUN_LAUNCHER in
    srun) COMMAND=(bash "${worker[@]}" rank) ;;
    torchrun)
      COMMAND=("$RUN_PYTHON" -m torch.distributed.run --nnodes "$RUN_NODES" --nproc-per-node "$RUN_PROCS" --max-restarts "$RUN_MAX_RESTARTS")
      if [[ $RUN_RDZV == c10d ]]; then
        COMMAND+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$1-$RUN_LIFE")
        # The agents would compare the endpoint with their host names, and a node's name in Slurm may be another.
        if [[ $2 == 0 ]]; then COMMAND+=(--rdzv-conf is_host=1); else COMMAND+=(--rdzv-conf is_host=0); fi
      else
        COMMAND+=(--node-rank "$2" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
      fi
      COMMAND+=(--no-python bash "${worker[@]}" rank) ;;
    deepspeed)
      COMMAND=("$RUN_PYTHON" -m deepspeed.launcher.runner --hostfile "$RUN_LIFE_DIR/hostfile.$1" --no_ssh --node_rank "$2"
        --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" --no_python --no_local_rank bash "${worker[@]}" rank) ;;
  esac
}

# What one rank runs. Sets COMMAND.
rank_command() { # WORK
  if [[ $1 == calibrate ]]; then
    COMMAND=("$RUN_PYTHON" "${RUN_LAUNCH%/*}/tools/fit_latency.py" --output "$RUN_FOLDER/calibration.json")
    # Behind -- stands what is to be trained: that is what it measures.
    COMMAND+=(${RUN_CALIBRATE_ARGS[@]+"${RUN_CALIBRATE_ARGS[@]}"} -- "${GIVEN_ARGS[@]}")
  else
    COMMAND=("$RUN_PYTHON" -m dbsp_megatron.train "${RUN_ARGS[@]}" --run.stop_file "$RUN_STOP_FILE")
  fi
}

write_hostfile() { # WORK HOST...
  local host work=$1
  shift
  for host; do echo "$host slots=$RUN_PROCS"; done >"$RUN_LIFE_DIR/hostfile.$work"
}
