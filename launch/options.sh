# shellcheck shell=bash
# Sourced by run.sh: reads flags and the site file, and refuses what cannot work.

declare -A VALUE=(
  [mode]='' [nodes]=1 [gpus-per-node]='' [procs-per-node]='' [cpus-per-proc]='' [launcher]=torchrun [rdzv]=static
  [max-restarts]=0 [max-requeues]=20 [signal-before]=180 [time]='' [partition]='' [account]='' [qos]='' [array]=''
  [exclusive]=no [container]='' [mounts]='' [name]='' [run-dir]='' [python]='' [setup]='' [calibrate]=no
  [calibrate-with]='' [preflight]=yes [dry-run]=no [site]=''
)
declare -A FROM=()  # site or flag; what is not in it has its default
declare -A ENV=()   # variables of every rank
declare -A ENV_FROM=()
PASSED=()           # names that sbatch takes from this shell
SBATCH_EXTRA=()
TRAIN=()
SECRET='key|token|secret|passw|credential'

die() {
  echo "error: $*" | masked >&2
  exit 2
}

set_option() { # NAME VALUE ORIGIN
  [[ -v VALUE[$1] ]] || die "$(origin_name "$1" "$3") is not an option of run.sh; see run.sh --help"
  # A flag wins over the site file, whichever was read first.
  [[ $3 == site && ${FROM[$1]-} == flag ]] && return
  VALUE[$1]=$2 FROM[$1]=$3
}

origin_name() { # the option as the person wrote it
  local name=${1//-/_}
  if [[ $2 == site ]]; then echo "RUN_${name^^}"; else echo "--$1"; fi
}

set_env() { # NAME VALUE ORIGIN
  [[ $1 =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "$3 must set NAME=VALUE with a plain name, got '$1'; write NCCL_DEBUG=WARN"
  case $1 in
    RUN_* | SLURM_* | RANK | LOCAL_RANK | WORLD_SIZE | LOCAL_WORLD_SIZE | MASTER_ADDR | MASTER_PORT)
      die "$3 must leave $1 to the launcher, got '$1'; take it out" ;;
  esac
  if [[ ${1,,} =~ $SECRET ]]; then
    die "$3 must hold no secret, got $1; log in on the compute nodes (~/.netrc), or use --pass-env $1"
  fi
  [[ $2 != *$'\n'* ]] || die "$3 must set one line, got several for $1; write it on one line"
  ENV[$1]=$2 ENV_FROM[$1]=${3%% *}
}

read_site() { # FILE: lines NAME=value, taken as they are; RUN_<OPTION> sets an option
  local line name number=0
  [[ -f $1 && -r $1 ]] || die "--site must be a readable file, got '$1'; examples are in launch/sites"
  while IFS= read -r line || [[ $line ]]; do
    line=${line%$'\r'}
    number=$((number + 1))
    [[ $line =~ ^[[:space:]]*(#|$) ]] && continue
    [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || die "$1:$number must be NAME=value or a # comment, got '$line'; correct it"
    name=${line%%=*}
    if [[ $name == RUN_* ]]; then
      name=${name#RUN_} name=${name,,}
      set_option "${name//_/-}" "${line#*=}" site
    elif [[ ${ENV_FROM[$name]-} != --env ]]; then
      set_env "$name" "${line#*=}" "site $1:$number"
    fi
  done <"$1"
}

parse() {
  local name value
  while (($#)); do
    case $1 in
      --) TRAIN=("${@:2}"); break ;;
      -h | --help) usage; exit 0 ;;
      --slurm | --local) set_option mode "${1#--}" flag ;;
      --dry-run | --exclusive | --calibrate) set_option "${1#--}" yes flag ;;
      --no-preflight) set_option preflight no flag ;;
      --*)
        name=${1#--}
        case ${name%%=*} in
          slurm | local | dry-run | exclusive | calibrate | no-preflight) die "--${name%%=*} must stand alone, got '$1'; take the value out" ;;
        esac
        if [[ $name == *=* ]]; then
          value=${name#*=} name=${name%%=*}
        else
          (($# > 1)) || die "$1 must have a value, got none; see run.sh --help"
          value=$2
          shift
        fi
        case $name in
          env)
            [[ $value == *=* ]] || die "--env must be NAME=VALUE, got '$value'; a variable of this shell is passed by --pass-env"
            set_env "${value%%=*}" "${value#*=}" --env ;;
          pass-env) PASSED+=("$value") ;;
          sbatch) SBATCH_EXTRA+=("$value") ;;
          mode | dry-run | exclusive | calibrate | preflight) die "--$name must have no value, got '$value'; see run.sh --help" ;;
          *) set_option "$name" "$value" flag ;;
        esac ;;
      *) die "arguments of training must stand behind --, got '$1'; write: run.sh OPTIONS -- $1" ;;
    esac
    shift
  done
  if [[ ${VALUE[site]} ]]; then read_site "${VALUE[site]}"; fi
}

must_count() { # OPTION LOWEST REMEDY
  local value=${VALUE[$1]}
  if ! [[ $value =~ ^(0|[1-9][0-9]{0,5})$ ]] || ((value < $2)); then
    die "$(origin_name "$1" "${FROM[$1]-flag}") must be a whole number >= $2, got '$value'; $3"
  fi
}

must_be_one_of() { # OPTION WORD...
  local name=$1 word
  shift
  for word; do if [[ ${VALUE[$name]} == "$word" ]]; then return; fi; done
  die "$(origin_name "$name" "${FROM[$name]-flag}") must be one of: $*, got '${VALUE[$name]}'; choose one of them"
}

time_seconds() { # M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as sbatch takes it
  local days=0 rest=$1 a b c
  if [[ $rest =~ ^([0-9]+)-([0-9]+)(:[0-9]+)?(:[0-9]+)?$ ]]; then
    days=${rest%%-*}
    IFS=: read -r a b c <<<"${rest#*-}"
  elif [[ $rest =~ ^[0-9]+(:[0-9]+)?$ ]]; then
    IFS=: read -r b c <<<"$rest"
  elif [[ $rest =~ ^[0-9]+:[0-9]+:[0-9]+$ ]]; then
    IFS=: read -r a b c <<<"$rest"
  else
    return 1
  fi
  echo $((10#$days * 86400 + 10#${a:-0} * 3600 + 10#${b:-0} * 60 + 10#${c:-0}))
}

validate() {
  [[ ${VALUE[mode]} ]] || die "--slurm or --local must be given, got neither; a site file can say RUN_MODE=slurm"
  must_be_one_of mode slurm local
  must_count nodes 1 "1 is this many machines"
  validate_processes
  validate_launcher
  validate_slurm
  validate_run
  validate_training
}

validate_processes() {
  local gpus=${VALUE[gpus-per-node]} procs=${VALUE[procs-per-node]}
  [[ $gpus || $procs ]] || die "--gpus-per-node must be given, got nothing; without GPUs give --procs-per-node"
  if [[ $gpus ]]; then must_count gpus-per-node 1 "without GPUs give --procs-per-node only"; fi
  if [[ $procs ]]; then must_count procs-per-node 1 "it is the number of processes of one node"; fi
  if [[ $gpus && $procs && $gpus != "$procs" ]]; then
    die "--procs-per-node must equal --gpus-per-node $gpus (one process drives one GPU), got $procs; leave it out"
  fi
  PROCS=${gpus:-$procs}
  # shellcheck disable=SC2034 # read by plan.sh
  WORLD=$((VALUE[nodes] * PROCS))
  if [[ ${VALUE[cpus-per-proc]} ]]; then must_count cpus-per-proc 1 "leave it out for the cluster's default"; fi
}

validate_launcher() {
  must_be_one_of launcher torchrun srun deepspeed
  must_be_one_of rdzv static c10d
  must_count max-restarts 0 "0 leaves restarts to requeueing"
  if [[ ${VALUE[launcher]} != torchrun && ${VALUE[rdzv]} == c10d ]]; then
    die "--rdzv must be static with --launcher ${VALUE[launcher]}, got c10d; use --launcher torchrun"
  fi
  if ((${VALUE[max-restarts]} > 0)) && [[ ${VALUE[rdzv]} != c10d ]]; then
    die "--max-restarts must be 0 with --rdzv static (new workers would meet the old ones' ports), got" \
      "${VALUE[max-restarts]}; use --launcher torchrun --rdzv c10d, or leave restarts to --max-requeues"
  fi
}

check_ranges() { # each task is asked about before anything starts
  local part first last total=0
  for part in $(tr , ' ' <<<"${VALUE[array]%%%*}"); do
    part=${part%%:*} first=${part%%-*} last=${part##*-}
    ((${#last} <= 7 && 10#$first <= 10#$last)) || die "--array must go upwards to at most 9999999, got '$part'; correct it"
    total=$((total + 10#$last - 10#$first + 1))
  done
  ((total <= 1000)) || die "--array must span at most 1000 numbers, got $total; submit several arrays"
}

validate_slurm() {
  local option seconds
  must_count signal-before 1 "it is in seconds before the time limit"
  must_count max-requeues 0 "0 never goes on by itself"
  if [[ ${VALUE[time]} ]]; then
    seconds=$(time_seconds "${VALUE[time]}") ||
      die "--time must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, got '${VALUE[time]}'; write 4:00:00 for four hours"
    ((seconds > ${VALUE[signal-before]})) ||
      die "--signal-before must be below --time ${VALUE[time]} ($seconds s), got ${VALUE[signal-before]}; lower it"
  fi
  if [[ ${VALUE[array]} ]]; then
    [[ ${VALUE[array]} =~ ^[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?(,[0-9]+(-[0-9]+(:[1-9][0-9]*)?)?)*(%[1-9][0-9]*)?$ ]] ||
      die "--array must be task numbers such as 0-3, 1,5 or 0-8:2%2, got '${VALUE[array]}'; correct it"
    check_ranges
    [[ ${TRAIN[*]-} == *'{task}'* ]] ||
      die "--array must have {task} in the arguments of training, got none: all tasks would be the same; write --config {task}.yaml"
  fi
  for option in partition account qos container mounts; do
    if [[ ${VALUE[$option]} =~ [[:space:]] ]]; then die "--$option must hold no blanks, got '${VALUE[$option]}'; correct it"; fi
  done
  if [[ ${VALUE[container]} && ${VALUE[mode]} == local ]]; then
    die "--container must not be given with --local, got '${VALUE[container]}'; start run.sh inside the container"
  fi
  if [[ ${VALUE[mounts]} && ! ${VALUE[container]} ]]; then die "--mounts must come with --container, got '${VALUE[mounts]}'; name an image"; fi
  if [[ ${VALUE[mode]} == slurm && ${VALUE[dry-run]} == no ]] && ! command -v sbatch >/dev/null; then
    die "--slurm must find sbatch, got none on PATH; run on a login node, or use --local or --dry-run"
  fi
}

validate_run() {
  local name
  if [[ ${VALUE[run-dir]} && ${VALUE[name]} ]]; then die "--name must not be given with --run-dir, got '${VALUE[name]}'; use one of them"; fi
  RUN=${VALUE[run-dir]:-${VALUE[name]:+runs/${VALUE[name]}}}
  [[ $RUN ]] || die "--name must be given, got nothing; it names the folder runs/NAME (or give --run-dir)"
  [[ $RUN == /* ]] || RUN=$PWD/$RUN
  RUN=${RUN%/}
  [[ $RUN =~ ^[A-Za-z0-9._/+-]+$ ]] || die "the run folder must consist of letters, digits and . _ + - /, got '$RUN'; choose another name"
  name=${RUN##*/}
  if [[ ${VALUE[name]} == */* || $name == . || $name == .. ]]; then die "--name must be one folder name, got '${VALUE[name]:-$name}'; use --run-dir for a path"; fi
  for name in ${PASSED[@]+"${PASSED[@]}"}; do
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ && -v $name ]] || die "--pass-env must name a variable that is set here, got '$name'; export it first"
  done
  PYTHON=${VALUE[python]}
  if [[ ! $PYTHON && ${VALUE[container]} ]]; then PYTHON=python3; fi
  if [[ ! $PYTHON && ${VIRTUAL_ENV-} ]]; then PYTHON=$VIRTUAL_ENV/bin/python; fi
  if [[ ! $PYTHON && -x $LAUNCH/../.venv/bin/python ]]; then PYTHON=$(cd "$LAUNCH/.." && pwd)/.venv/bin/python; fi
  PYTHON=${PYTHON:-$(command -v python3 || true)}
  if [[ ! ${VALUE[container]} ]]; then
    # Not resolved further: what makes a virtual environment is the path that it is called by.
    [[ $PYTHON == */* ]] || PYTHON=$(command -v "$PYTHON" || echo "$PYTHON")
    [[ $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON
    [[ -x $PYTHON ]] || die "--python must be an interpreter, got '$PYTHON'; give the python of the environment that has dbsp_megatron"
  fi
  VALUE[python]=$PYTHON
}

validate_training() {
  local word name
  ((${#TRAIN[@]})) || die "arguments of training must stand behind --, got none; write: run.sh OPTIONS -- --config FILE"
  for word in "${TRAIN[@]}"; do
    name=${word%%=*}
    case ${name//-/_} in
      __run.name | __run.root | __name) die "$name must be given to run.sh, not behind --, got '$word'; use --name or --run-dir" ;;
      __run.stop_file) die "$name must be left to run.sh, got '$word'; take it out" ;;
      __dry_run | __world_size) die "$name must be given to run.sh, not behind --, got '$word'; use run.sh --dry-run" ;;
      __sp.calibration | __sp_calibration)
        if [[ ${VALUE[calibrate]} == yes ]]; then die "$name must not be given with --calibrate, got '$word'; use one of them"; fi ;;
    esac
    if [[ $word == --* && $name =~ ($SECRET)$ && $name != *tokens ]]; then
      die "arguments of training must hold no secret, got $name; use the environment (--pass-env) or ~/.netrc"
    fi
  done
}
