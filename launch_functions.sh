# shellcheck shell=bash
# What the three launchers share; they read it with `source`.

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

# count_cores: the CPU cores of this machine; 1 where it does not say.
count_cores() {
  local LC_ALL=C cores
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || true)
  [[ $cores =~ ^[1-9][0-9]{0,5}$ ]] || cores=1
  printf '%s\n' "$cores"
}
