#!/usr/bin/env bash
# Trains on one machine or many: checks everything, then submits one Slurm job, or runs the same scripts here.
set -euo pipefail
LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=options.sh
source "$LAUNCH/options.sh"
# shellcheck source=plan.sh
source "$LAUNCH/plan.sh"
# shellcheck source=local.sh
source "$LAUNCH/local.sh"
# shellcheck source=masked.sh
source "$LAUNCH/masked.sh"

usage() {
  cat <<'TEXT'
run.sh [--site FILE] --slurm|--local [--dry-run] --name NAME [OPTIONS] -- ARGUMENTS OF dbsp-train

Where
  --slurm | --local     submit a Slurm job, or run on this machine (nodes become groups of processes)
  --dry-run             print everything that would be done, and do nothing
  --site FILE           settings of a cluster: NAME=value lines; RUN_NODES=2 is --nodes 2; see launch/sites
  --name NAME           run folder runs/NAME; a run that has a checkpoint there goes on from it
  --run-dir DIR         the same by path
Processes
  --nodes N             machines (1)
  --gpus-per-node G     GPUs of each, one process for each GPU
  --procs-per-node P    processes of each machine, without GPUs
  --cpus-per-proc C     CPU cores of each process
  --launcher L          torchrun (default), srun (one task for each process) or deepspeed
  --rdzv R              static (default) or c10d: how torchrun's agents find each other
  --max-restarts N      restarts of failed workers inside a job, c10d only (0)
Slurm
  --partition P  --account A  --qos Q  --time T  --exclusive
  --signal-before S     seconds before the time limit to save, stop and requeue (180)
  --max-requeues K      at most so many restarts of one job (20)
  --array SPEC          tasks such as 0-2%2; {task} in the arguments of training is the task's number
  --sbatch=OPTION       any other option of sbatch; may be given again
  --container IMAGE     image for pyxis     --mounts SRC:DST[:ro][,...]   more folders for it
Environment
  --python PATH         interpreter that has dbsp_megatron (default: the active or the repository's environment)
  --setup COMMAND       run on every node first, such as 'module load cuda'
  --env NAME=VALUE      variable of every rank; may be given again
  --pass-env NAME       variable of this shell to pass to the job; nothing else of it is passed
Checks
  --calibrate           first measure kernels and links for the latency model
  --calibrate-with ARGS arguments of tools/fit_latency.py for it
  --no-preflight        do not ask the trainer whether the configuration fits the processes

Ends with 0 when submitted (--slurm) or trained to the last step (--local), 1 when training failed, 2 when an option or
the configuration is wrong, 75 when it stopped before the last step, 130 after Ctrl-C.
TEXT
}

write_launch_files() {
  local temporary=$RUN/launch/.launch.env.$$
  mkdir -p "$RUN/launch/logs"
  (umask 077 && launch_env >"$temporary")
  mv "$temporary" "$RUN/launch/launch.env"
}

submit() {
  local job
  quoted "${SBATCH[@]}" >"$RUN/launch/sbatch.txt"
  # The job's own flags count, not variables such as SBATCH_EXPORT of this shell.
  job=$(env -u SBATCH_EXPORT -u SLURM_EXPORT_ENV "${SBATCH[@]}") || die "sbatch must accept the job, got a refusal (its words are above); correct the options"
  job=${job%%;*}
  echo "$job" >"$RUN/launch/job_id"
  echo "job $job; log: $RUN/launch/logs/job_$job${VALUE[array]:+_TASK}.log"
  echo "stop and requeue: scancel --batch --signal=USR1 $job; cancel: scancel $job"
}

parse "$@"
validate
read -ra CALIBRATE_WITH <<<"${VALUE[calibrate-with]}"
default_env
sbatch_command
if [[ ${VALUE[dry-run]} == yes ]]; then
  describe | masked
  exit 0
fi
job=$(submitted_job)
if [[ $job ]]; then die "--name must be a run that is not in the queue, got ${RUN##*/} with job $job; wait for it, or scancel $job"; fi
checked=$(preflight) || exit 2
echo "$checked"
mkdir -p "$RUN/launch/logs" || die "the run folder must be writable, got '$RUN'; choose another --run-dir"
if [[ ${VALUE[mode]} == local ]]; then
  # Held by what is started here, too: a run has one launcher at a time.
  exec 9>"$RUN/launch/.lock"
  flock --nonblock 9 || die "--name must be a run that is not going on, got ${RUN##*/}; wait for it, or stop it by Ctrl-C"
fi
write_launch_files
if [[ ${VALUE[mode]} == slurm ]]; then submit; else run_local; fi
