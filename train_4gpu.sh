#!/usr/bin/env bash
# Train the X-ray to CT cascade on 4 GPUs of this machine.
#   bash train_4gpu.sh --config configs/multi_view_config.json --method accelerate --wandb
#   --method accelerate|torchrun   what starts the processes (default accelerate; the result is the same)
#   --num_gpus N                   processes, one per GPU (default 4)
#   --cpu                          CPU processes instead (with --num_gpus N)
#   --mixed_precision P, --checkpoint_dir DIR and all else go to train_accelerate.py as they are
#   --dry_run                      print the command instead of running it
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=launch_functions.sh
source "$here/launch_functions.sh"

method=accelerate count=4 cpu='' dry_run='' precision=no words=()
while (($#)); do
  case $1 in
    --method=* | --num_gpus=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
    --method | --num_gpus) (($# > 1)) || fail "$1 needs a value" ;;&
    --method) method=$2 && shift ;;
    --num_gpus) count=$2 && shift ;;
    --cpu) cpu=1 ;;
    --dry_run) dry_run=1 ;;
    -h | --help) sed -n '2,8s/^# //p' "$0" && exit 0 ;;
    *) words+=("$1") ;;
  esac
  case $1 in
    --mixed_precision) precision=${2:-no} ;;
    --mixed_precision=*) precision=${1#*=} ;;
  esac
  shift
done
[[ $method == accelerate || $method == torchrun ]] || fail "--method must be accelerate or torchrun, not '$method'"
check_number --num_gpus "$count" 1 99
check_threads
[[ $precision == bf16 || $precision == fp16 ]] || precision=no # accelerate knows no auto; the script does

if [[ $cpu ]]; then
  export CUDA_VISIBLE_DEVICES=-1
else
  gpus=0
  if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true); fi
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | awk '$1 == "" || $1 == "-1" { exit } { n++ } END { print n + 0 }')
    if ((visible < gpus)); then gpus=$visible; fi
  fi
  ((count <= gpus)) || fail "$count GPUs asked for, $gpus found; give --num_gpus with at most that many, or --cpu"
fi

script=train_accelerate.py
[[ -f $script ]] || script=$here/$script
command -v "$method" >/dev/null || [[ ! -x $here/.venv/bin/$method ]] || PATH=$here/.venv/bin:$PATH
cores=$(count_cores)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > count ? cores / count : 1))}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
if [[ $method == accelerate ]]; then
  command=(accelerate launch --num_processes="$count" --num_machines=1 --mixed_precision="$precision")
  command+=(--dynamo_backend=no --main_process_port=0)
  ((count == 1)) || command+=(--multi_gpu)
else
  command=(torchrun --standalone --nproc_per_node="$count")
fi
command+=("$script" ${words[@]+"${words[@]}"})
text=''
for word in "${command[@]}"; do
  if [[ -z $word || $word == *' '* ]]; then word="\"$word\""; fi
  text+=" $word"
done
if [[ $cpu ]]; then echo "$count CPU processes by $method:$text"; else echo "$count GPUs by $method:$text"; fi
[[ -z $dry_run ]] || exit 0
become "${command[@]}"
