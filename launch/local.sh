# shellcheck shell=bash
# Sourced by run.sh: --local, the nodes as groups of processes on this machine, with the scripts of the Slurm job.

free_port() { # a port that nobody listens on, the search starting at another place for each process
  local port
  for ((port = 20000 + ($$ + RUN_LIFE) % 10000; port < 32000; port++)); do
    if ! (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
      echo "$port"
      return
    fi
  done
  return 1
}

run_local() {
  local task
  set +e # what fails is judged
  trap on_interrupt INT
  trap on_usr1 USR1
  trap on_term TERM HUP
  EXIT_CODE=0 WORST=0
  for task in $(if [[ ${VALUE[array]} ]]; then task_numbers; else echo none; fi); do
    run_task "$task"
    WORST=$((EXIT_CODE > WORST ? EXIT_CODE : WORST))
    if [[ $asked == stop ]]; then return 130; fi
  done
  return "$WORST"
}

run_task() { # NUMBER|none: sets EXIT_CODE
  local restarts=0
  unset SLURM_ARRAY_TASK_ID
  if [[ $1 != none ]]; then export SLURM_ARRAY_TASK_ID=$1; fi
  export RUN_ENV_FILE=$RUN/launch/launch.env
  # shellcheck source=/dev/null
  source "$RUN_ENV_FILE"
  # shellcheck source=life.sh
  source "$LAUNCH/life.sh"
  resolve_task
  while :; do
    asked='' pids=() EXIT_CODE=1
    begin_life "$restarts" || return
    CODE=0
    if [[ $RUN_CALIBRATE == yes ]]; then
      say "measuring kernels and links"
      run_step calibrate "$RUN_NODES"
      if ((!CODE)) && [[ ! -e $RUN_FOLDER/calibration.json ]]; then CODE=1; fi
    fi
    if [[ $asked ]]; then
      CODE=0
    elif ((!CODE)); then
      # shellcheck disable=SC2034 # read by judge_life
      TRAINING=yes
      : >>"$RUN_LIFE_DIR/rank_00000.log"
      setsid tail -n +1 -F "$RUN_LIFE_DIR/rank_00000.log" 2>/dev/null &
      follower=$!
      run_step train "$RUN_NODES"
      sleep 0.5
      kill "$follower" 2>/dev/null
      wait "$follower" 2>/dev/null
    fi
    judge_life "$CODE" "$asked"
    if [[ $OUTCOME == "done" ]]; then asked=''; fi
    if [[ $OUTCOME != requeue ]]; then return; fi
    restarts=$((restarts + 1))
  done
}

# The first Ctrl-C asks, the second one ends. The processes are in sessions of their own, so that only we get it.
on_interrupt() {
  if [[ $asked == stop ]]; then
    end_processes
  else
    say "stopping after this step; Ctrl-C again ends at once"
    asked=stop
    : >"$RUN_STOP_FILE"
    end_measuring
  fi
}

on_usr1() {
  asked=${asked:-requeue}
  : >"$RUN_STOP_FILE"
  end_measuring
}

# Nothing in it looks for a stop file.
end_measuring() { if [[ ! ${TRAINING-} ]]; then end_processes; fi; }

on_term() {
  asked=stop
  end_processes
}

end_processes() { # each is the leader of its own process group
  local pid
  for pid in ${pids[@]+"${pids[@]}"}; do kill -TERM -- "-$pid" 2>/dev/null; done
}

run_step() { # WORK NODES: sets CODE, that of the first process to fail
  local work=$1 nodes=$2 node proc per_node=1 index failed=0 hosts=() devices=() visible=() running=()
  if [[ $RUN_LAUNCHER == srun ]]; then per_node=$RUN_PROCS; fi
  MASTER_ADDR=127.0.0.1 MASTER_PORT=$(free_port) || { say "no free port between 20000 and 32000"; CODE=1; return; }
  export MASTER_ADDR MASTER_PORT
  for ((node = 0; node < nodes; node++)); do hosts+=("node$node"); done
  write_hostfile "$work" "${hosts[@]}"
  IFS=, read -ra devices <<<"${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((nodes * RUN_PROCS - 1)))}"
  pids=()
  for ((node = 0; node < nodes; node++)); do
    visible=()
    # Nodes share this machine, but not its GPUs.
    if [[ $RUN_GPUS ]]; then visible=("CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${devices[*]:node * RUN_PROCS:RUN_PROCS}")"); fi
    for ((proc = 0; proc < per_node; proc++)); do
      setsid env ${visible[@]+"${visible[@]}"} SLURM_JOB_ID=$$ SLURM_NODEID="$node" SLURM_LOCALID="$proc" \
        SLURM_PROCID=$((node * per_node + proc)) SLURM_NTASKS=$((nodes * per_node)) SLURM_RESTART_COUNT="$RUN_RESTARTS" \
        bash "$RUN_LAUNCH/worker.sh" "$RUN_ENV_FILE" "$work" </dev/null &
      pids+=($!)
    done
  done
  # Looked at in turn, not waited for in turn: the first to fail may be the last one started.
  running=("${pids[@]}")
  while ((${#running[@]})); do
    sleep 0.2
    for index in "${!running[@]}"; do
      if kill -0 "${running[index]}" 2>/dev/null; then continue; fi
      wait "${running[index]}"
      CODE=$?
      unset "running[index]"
      if ((CODE && !failed)); then
        failed=$CODE
        # As srun --kill-on-bad-exit does: the others would wait for it until the time-out.
        end_processes
      fi
    done
  done
  CODE=$failed
  pids=()
}
