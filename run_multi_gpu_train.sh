#!/usr/bin/env bash
# Train PRS-Med on every GPU of this machine, or on NUM_GPUS of them; without GPUs, in NUM_GPUS CPU processes (default 2).
#   ./run_multi_gpu_train.sh /path/to/data              all GPUs
#   ./run_multi_gpu_train.sh /path/to/data 4            4 GPUs
#   ./run_multi_gpu_train.sh data 4 -- --batch_size 4   whatever follows `--` goes to train_prs_med.py
#   --dry_run                                           print the command instead of running it
# Several nodes: set NNODES, NODE_RANK, MASTER_ADDR (and MASTER_PORT, default 29500) and run this on each.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

dry_run='' words=()
while (($#)); do
  case $1 in
    --dry_run) dry_run=1 ;;
    -h | --help) sed -n '2,7s/^# //p' "$0" && exit 0 ;;
    --) shift && break ;;
    -*) fail "unknown option $1; flags for train_prs_med.py follow --" ;;
    *) words+=("$1") ;;
  esac
  shift
done
((${#words[@]} <= 2)) || fail "too many arguments (${words[*]}); usage: $0 [DATA [NUM_GPUS]] [-- flags for train_prs_med.py]"
data=${words[0]:-data}

gpus=0
if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true); fi
if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
  visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | awk '$1 == "" || $1 == "-1" { exit } { n++ } END { print n + 0 }')
  if ((visible < gpus)); then gpus=$visible; fi
fi
default=$gpus
if ((gpus == 0)); then default=2; fi
processes=${words[1]:-$default}
[[ $processes =~ ^[1-9][0-9]*$ ]] || fail "NUM_GPUS must be a whole number of at least 1, not '$processes'"
if ((gpus > 0 && processes > gpus)); then fail "$processes GPUs asked for, but there are $gpus; ask for at most $gpus"; fi

cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
threads=$((cores / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
here=$(cd "$(dirname "$0")" && pwd)
torchrun=torchrun
if ! command -v torchrun >/dev/null && [[ -x $here/.venv/bin/torchrun ]]; then torchrun=$here/.venv/bin/torchrun; fi

command=("$torchrun" --nproc_per_node="$processes")
if ((${NNODES:-1} > 1)); then
  command+=(--nnodes="$NNODES" --node_rank="${NODE_RANK:?set NODE_RANK}" --master_addr="${MASTER_ADDR:?set MASTER_ADDR}")
  command+=(--master_port="${MASTER_PORT:-29500}")
elif [[ -n ${MASTER_PORT:-} ]]; then
  command+=(--master_addr=127.0.0.1 --master_port="$MASTER_PORT")
else
  command+=(--standalone) # a free port of its own
fi
command+=("$here/train_prs_med.py" --data_root "$data" "$@")

if [[ $dry_run ]]; then
  printf '%q ' "${command[@]}" && echo
  exit 0
fi
exec "${command[@]}"
