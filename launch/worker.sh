#!/usr/bin/env bash
# The only thing that srun, or run.sh --local, starts: once per node, or once per process with the srun launcher.
#   worker.sh LAUNCH_ENV train|calibrate         starts the launcher of this node
#   worker.sh LAUNCH_ENV train|calibrate rank    is one rank, its output in a log of its own
set -euo pipefail

RUN_ENV_FILE=$1
work=$2
# shellcheck source=/dev/null
source "$RUN_ENV_FILE"
# shellcheck source=life.sh
source "$RUN_LAUNCH/life.sh"
resolve_task

if [[ ${3-} != rank ]]; then
  cd "$RUN_WORKDIR"
  for pair in "${RUN_ENV[@]}"; do export "${pair?}"; done
  # Where NCCL's flight recorder writes what each rank was doing when a collective timed out.
  export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$RUN_LIFE_DIR/nccl_trace_rank_}
  export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$TORCH_NCCL_DEBUG_INFO_TEMP_FILE}
  if [[ $RUN_SETUP ]]; then
    # Module systems use unset variables and failing tests freely.
    set +eu
    eval "$RUN_SETUP" || exit
    set -eu
  fi
  export LOCAL_WORLD_SIZE=$RUN_PROCS
  launcher_command "$work" "$SLURM_NODEID"
  if [[ $RUN_LAUNCHER != srun ]]; then exec "${COMMAND[@]}"; fi
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID
fi

printf -v log '%s/rank_%05d.log' "$RUN_LIFE_DIR" "$RANK"
if [[ $work == calibrate ]]; then log=$RUN_LIFE_DIR/calibrate_${log##*/}; fi
rank_command "$work"
exec "${COMMAND[@]}" >>"$log" 2>&1
