#!/usr/bin/env bash
# Show what this machine has, then train on all its GPUs. All other words go to the script as they are.
#   ./launch_distributed_training.sh --config configs/default_config.yaml
#   --num_gpus N               instead of all GPUs; without GPUs: N processes on the CPU, or one
#   --deepspeed | --torchrun   DeepSpeed or DDP; left out: DeepSpeed where it is installed (train_mimic_cxr.py), else DDP
#   --script FILE              instead of train_mimic_cxr.py
#   --debug                    a trial of 2 steps
# Several nodes: set NNODES, NODE_RANK and MASTER_ADDR (and MASTER_PORT, default 29500), and run this on each.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
if [[ ! ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} ]]; then PATH=$here/.venv/bin:$PATH; fi
fail() { echo "error: $1" >&2 && exit 2; }

script=train_mimic_cxr.py processes='' ddp='' words=()
while (($#)); do
  case $1 in
    --num_gpus=* | --script=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      continue
      ;;
    --num_gpus) processes=${2:-} && shift ;;
    --script) script=${2:-} && shift ;;
    --deepspeed) words+=(--use_deepspeed) ;;
    --torchrun | --use_ddp) ddp=1 ;;
    --debug) words+=(--max_steps 2 --log_every 1) ;;
    -h | --help) sed -n '2,8s/^# //p' "$0" && exit ;;
    *) words+=("$1") ;;
  esac
  shift || fail "--num_gpus and --script need a value"
done
[[ $processes =~ ^([1-9][0-9]{0,2})?$ ]] || fail "--num_gpus must be a whole number, not '$processes'"
if [[ ! -f $script ]]; then script=$here/$script; fi
[[ -f $script ]] || fail "no file $script; check --script"

# Only guide 1's script follows the settings in the report.
if [[ $script == *train_mimic_cxr.py ]]; then
  words+=(${ddp:+--use_ddp})
  (cd "$here" && python3 -m utils.hardware_utils --nodes "${NNODES:-1}" ${processes:+--gpus "$processes"} ${ddp:+--no_deepspeed})
fi
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Seconds that torchrun leaves its processes to save after a SIGTERM.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
exec python3 "$here/utils/torchrun.py" ${processes:+--nproc_per_node="$processes"} \
  "$script" ${words[@]+"${words[@]}"}
