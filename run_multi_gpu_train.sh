#!/usr/bin/env bash
# Train PRS-Med on every GPU of this machine, or on NUM_GPUS of them; without GPUs, in NUM_GPUS CPU processes (default 2).
#   ./run_multi_gpu_train.sh [--dry_run] [DATA [NUM_GPUS]] [-- flags of train_prs_med.py]
#   ./run_multi_gpu_train.sh data 4 -- --batch_size 4
# Several nodes: set NNODES, NODE_RANK, MASTER_ADDR (and MASTER_PORT, default 29500) and run this on each.
# Nodes that may come and go: NNODES=MIN:MAX, MASTER_ADDR (a node that stays), RDZV_ID (a word, the same on every node),
# MAX_RESTARTS (default 3), `-- --resume_from auto`. Trusted networks only: who reaches the port can run code here.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=launch_functions.sh
source "$here/launch_functions.sh"

dry_run=''
words=()
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
    --dry_run) dry_run=1 ;;
    -h | --help) sed -n '2,7s/^# //p' "$0" && exit ;;
    -*) fail "unknown option $1; flags for train_prs_med.py follow --" ;;
    *) words+=("$1") ;;
  esac
  shift
done
if ((${#words[@]} > 2)); then fail "too many arguments (${words[*]}); see --help"; fi

# One process per GPU, each with its share of the cores.
gpus=$(count_gpus)
processes=${words[1]:-$((gpus ? gpus : 2))}
check_number NUM_GPUS "$processes" 1 9999
if ((gpus && processes > gpus)); then fail "$processes GPUs asked for, but there are $gpus; ask for at most $gpus"; fi
check_threads
threads=$(($(count_cores) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads ? threads : 1))}

# Where they meet.
nodes=${NNODES:-1} port=${MASTER_PORT:-29500}
check_number MASTER_PORT "$port" 1 65535
if [[ $nodes == *:* ]]; then
  check_range NNODES "$nodes"
  check_variables 0 9999 MAX_RESTARTS
  # A machine alone needs no word that others know.
  if [[ ! ${MASTER_ADDR:-} ]]; then RDZV_ID=${RDZV_ID:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}; fi
  [[ ${RDZV_ID:-} =~ ^[A-Za-z0-9_-]{1,64}$ ]] || fail "RDZV_ID must be a word, the same on every node, not '${RDZV_ID:-}'"
  check_host MASTER_ADDR "${MASTER_ADDR:=127.0.0.1}"
  # Or a restart may hang on the store of the start before.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  meeting=(--nnodes="$nodes" --max_restarts="${MAX_RESTARTS:-3}" --rdzv_id="$RDZV_ID")
  meeting+=(--rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$port")
elif check_number NNODES "$nodes" 1 99999 && ((nodes > 1)); then
  check_number NODE_RANK "${NODE_RANK:-}" 0 $((nodes - 1))
  check_host MASTER_ADDR "${MASTER_ADDR:-}"
  meeting=(--nnodes="$nodes" --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="$port")
elif [[ ${MASTER_PORT:-} ]]; then
  meeting=(--master_addr=127.0.0.1 --master_port="$port")
else
  meeting=(--standalone)
fi

if ! command -v torchrun >/dev/null; then PATH=$here/.venv/bin:$PATH; fi
command=(python "$here/utils/torchrun.py" --nproc_per_node="$processes" "${meeting[@]}")
command+=("$here/train_prs_med.py" --data_root "${words[0]:-data}" "${@:2}")
if [[ ! $dry_run ]]; then become "${command[@]}"; fi
print_command "${command[@]}"
