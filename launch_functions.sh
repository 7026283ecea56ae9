# shellcheck shell=bash
# What the launchers and the job files in configs/slurm share; they read it with `source`.

# fail TEXT: one line `error: TEXT`, exit code 2. Line breaks and the like are shown as ?.
fail() {
  local line=${1:0:300}
  printf 'error: %s\n' "${line//[[:cntrl:]]/?}" >&2
  exit 2
}

# check_number NAME VALUE LOW HIGH: ends with an error unless VALUE is a whole number from LOW to HIGH.
# Nothing from outside may reach $((...)) or ((...)) before this: they would run the command in 'x[$(command)]'.
check_number() {
  local LC_ALL=C
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,9})$ ]] || (($2 < $3 || $2 > $4)); then
    fail "$1 must be a whole number from $3 to $4, not '$2'"
  fi
}

# check_variables LOW HIGH NAME...: check_number for those of these environment variables that are set.
check_variables() {
  local low=$1 high=$2 name
  shift 2
  for name in "$@"; do
    if [[ ${!name:-} ]]; then check_number "$name" "${!name}" "$low" "$high"; fi
  done
}

# check_host NAME VALUE: ends with an error unless VALUE can be a host's name or address.
check_host() {
  local LC_ALL=C
  [[ $2 =~ ^[][A-Za-z0-9_.:%-]{1,255}$ && $2 != -* ]] || fail "$1 must be the name or address of a host, not '$2'"
}

# check_threads: OMP_NUM_THREADS is a number, or one for each level of nesting as in 4,2.
check_threads() {
  local LC_ALL=C number='[1-9][0-9]{0,4}'
  [[ -z ${OMP_NUM_THREADS:-} || $OMP_NUM_THREADS =~ ^$number(,$number)*$ ]] ||
    fail "OMP_NUM_THREADS must be a whole number from 1 to 99999, not '$OMP_NUM_THREADS'"
}

# take_assignments TEXT NAME...: evaluates lines NAME=VALUE, as Python's shlex.quote writes the values.
# The whole text is checked first: other names, and anything that a shell would run or replace, are an error.
take_assignments() {
  local LC_ALL=C text=$1 names plain quoted lines
  shift
  names=$(IFS='|' && printf '%s' "$*")
  plain='[A-Za-z0-9_.]+'
  # Between single quotes nothing is replaced. A quote in the value ends them, stands in double quotes, opens them again.
  quoted="'[^']*'(\"'\"'[^']*')*"
  lines="^(($names)=($plain|$quoted)"$'\n'")+$"
  if [[ ! $text$'\n' =~ $lines ]]; then fail "hardware_utils: cannot read its answer '$text'"; fi
  eval "$text"
}

# count_cores: the CPU cores of this machine; 1 where it does not say.
count_cores() {
  local LC_ALL=C cores
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || true)
  [[ $cores =~ ^[1-9][0-9]{0,5}$ ]] || cores=1
  printf '%s\n' "$cores"
}

# count_gpus: the GPUs that nvidia-smi lists, or as many of them as CUDA_VISIBLE_DEVICES leaves.
count_gpus() {
  local gpus=0 visible=0 device devices
  if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true); fi
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    # As CUDA reads it: what follows an empty entry or -1 does not count.
    devices=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES")
    while read -r device; do
      if [[ -z $device || $device == -1 ]]; then break; fi
      visible=$((visible + 1))
    done <<<"$devices"
    if ((visible < gpus)); then gpus=$visible; fi
  fi
  printf '%s\n' "$gpus"
}

# check_range NAME VALUE: ends with an error unless VALUE is MIN:MAX.
check_range() {
  local LC_ALL=C number='[1-9][0-9]{0,6}'
  [[ $2 =~ ^$number:$number$ ]] || fail "$1 must be MIN:MAX, such as 1:4, not '$2'"
}

# print_command COMMAND WORD...: one line that a shell would read as this command.
print_command() {
  printf '%q ' "$@"
  echo
}

# become COMMAND WORD...: run this in place of the shell, so that it gets the signals.
become() {
  command -v "$1" >/dev/null || fail "no command $1; try: make setup"
  exec "$@"
}

# train_under_slurm COMMAND WORD...: run this once on each node of a SLURM job and end with its exit code.
# Before the time limit (#SBATCH --signal=B:USR1@120) the run is told to save, and the job goes back into the queue by
# itself; so it does after a failure, up to MAX_REQUEUES times (default 30).
train_under_slurm() {
  local step code told=0 heard=-1
  check_variables 0 4294967295 SLURM_JOB_ID
  check_variables 0 999999 SLURM_RESTART_COUNT MAX_REQUEUES
  check_variables 1 99999 SLURM_NNODES SLURM_CPUS_PER_TASK
  [[ ${SLURM_JOB_ID:-} ]] || fail "this is not a SLURM job; start it by sbatch"

  local command=(srun --ntasks="${SLURM_NNODES:-1}" --ntasks-per-node=1 --kill-on-bad-exit=1)
  # srun does not take the cores of a task from sbatch by itself.
  if [[ ${SLURM_CPUS_PER_TASK:-} ]]; then command+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi

  # A SIGTERM to srun itself would kill the run: scancel hands it to the processes that srun started, and only to them.
  trap 'told=$((told + 1)); if ((told == 1)); then scancel --signal=TERM "$SLURM_JOB_ID" || true; fi' USR1
  "${command[@]}" "$@" &
  step=$!

  # USR1 ends the waiting and not the step: wait again.
  while ((heard != told)); do
    heard=$told
    code=0
    wait "$step" || code=$?
  done
  trap '' USR1
  requeue_job "$code" "$told"
  exit "$code"
}

# requeue_job CODE TOLD: put this job back into the queue if its run has to go on. TOLD: 0, or the time was up.
# As in configs/kubernetes/jobset.yaml, a run that is done or had wrong input is not repeated.
requeue_job() {
  local code=$1 told=$2 count=$((${SLURM_RESTART_COUNT:-0} + 1)) most=${MAX_REQUEUES:-30}
  if [[ $code == 0 || $code == 2 ]]; then return; fi
  if ((told == 0)); then
    # The user's scancel or Ctrl-C; or a failure that came so soon that it would only come again.
    if [[ $code == 143 || $code == 130 ]]; then return; fi
    if ((SECONDS < 600)); then
      echo "not requeued: exit code $code in the first 10 minutes"
      return
    fi
  fi

  if [[ ${SLURM_ARRAY_JOB_ID:-} ]]; then
    echo "not requeued: the tasks of an array job are not; submit this one again"
  elif ((count > most)); then
    echo "not requeued: $most times already; submit the job again, or set MAX_REQUEUES"
  else
    echo "requeue $count of at most $most, after exit code $code"
    scontrol requeue "$SLURM_JOB_ID" || echo "not requeued: scontrol refused; submit the job again" >&2
  fi
}
