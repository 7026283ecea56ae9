#!/usr/bin/env bash
# Train PRS-Med with NUM_GPUS processes; default: one per GPU of this machine, or one on the CPU.
#   ./run_multi_gpu_train.sh [DATA [NUM_GPUS]] [flags of train_prs_med.py]
#   ./run_multi_gpu_train.sh data 4 --batch_size 4
# Several nodes: set NNODES, NODE_RANK and MASTER_ADDR (and MASTER_PORT, default 29500) and run this on each node.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
if [[ ! ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} ]]; then PATH=$here/.venv/bin:$PATH; fi
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then sed -n '2,5s/^# //p' "$0" && exit; fi

data=data processes=()
if [[ ${1:--} != -* ]]; then data=$1 && shift; fi
if [[ ${1:--} != -* ]]; then
  [[ $1 =~ ^[1-9][0-9]{0,2}$ ]] || { echo "error: NUM_GPUS must be a whole number, not '$1'" >&2 && exit 2; }
  processes=(--nproc_per_node="$1") && shift
fi
if [[ ${1:-} == -- ]]; then shift; fi
exec python3 "$here/utils/torchrun.py" ${processes[@]+"${processes[@]}"} \
  "$here/train_prs_med.py" --data_root "$data" "$@"
