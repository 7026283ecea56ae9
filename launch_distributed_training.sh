#!/usr/bin/env bash
# Report this machine's hardware, then train on all its GPUs. All other flags are passed to the script.
#   ./launch_distributed_training.sh --config configs/default_config.yaml
#   --num_gpus N               number of processes; default: one per GPU, or one on the CPU
#   --deepspeed | --torchrun   DeepSpeed or DDP; default: DDP, or DeepSpeed for train_mimic_cxr.py if it is installed
#   --script FILE              training script; default: train_mimic_cxr.py
#   --debug                    run only 2 steps
# Several nodes: set NNODES, NODE_RANK and MASTER_ADDR (and MASTER_PORT, default 29500) and run this on each node.
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

# Only train_mimic_cxr.py uses the settings of the report.
if [[ $script == *train_mimic_cxr.py ]]; then
  words+=(${ddp:+--use_ddp})
  (cd "$here" && python3 -m utils.hardware_utils --nodes "${NNODES:-1}" ${processes:+--gpus "$processes"} ${ddp:+--no_deepspeed})
fi
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Seconds that torchrun gives its processes to save after a SIGTERM.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
exec python3 "$here/utils/torchrun.py" ${processes:+--nproc_per_node="$processes"} \
  "$script" ${words[@]+"${words[@]}"}
