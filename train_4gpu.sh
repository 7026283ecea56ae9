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

method=accelerate
count=4
cpu=''
dry_run=''
precision=no
words=()
while (($#)); do
  case $1 in
    --method=*) method=${1#*=} ;;
    --num_gpus=*) count=${1#*=} ;;
    --method | --num_gpus)
      if (($# < 2)); then fail "$1 needs a value"; fi
      if [[ $1 == --method ]]; then method=$2; else count=$2; fi
      shift
      ;;
    --cpu) cpu=1 ;;
    --dry_run) dry_run=1 ;;
    -h | --help)
      sed -n '2,8s/^# //p' "$0"
      exit 0
      ;;
    --mixed_precision)
      precision=${2:-no}
      words+=("$1")
      ;;
    --mixed_precision=*)
      precision=${1#*=}
      words+=("$1")
      ;;
    *) words+=("$1") ;;
  esac
  shift
done
if [[ $method != accelerate && $method != torchrun ]]; then
  fail "--method must be accelerate or torchrun, not '$method'"
fi
check_number --num_gpus "$count" 1 99
check_threads

# accelerate knows no auto; the script does.
if [[ $precision != bf16 && $precision != fp16 ]]; then precision=no; fi

if [[ $cpu ]]; then
  export CUDA_VISIBLE_DEVICES=-1
else
  gpus=$(count_gpus)
  if ((count > gpus)); then
    fail "$count GPUs asked for, $gpus found; give --num_gpus with at most that many, or --cpu"
  fi
fi

script=train_accelerate.py
if [[ ! -f $script ]]; then script=$here/$script; fi
if ! command -v "$method" >/dev/null && [[ -x $here/.venv/bin/$method ]]; then PATH=$here/.venv/bin:$PATH; fi

# Each process takes its share of the cores.
threads=$(($(count_cores) / count))
if ((threads < 1)); then threads=1; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

if [[ $method == accelerate ]]; then
  command=(accelerate launch --num_processes="$count" --num_machines=1 --mixed_precision="$precision")
  command+=(--dynamo_backend=no --main_process_port=0)
  if ((count > 1)); then command+=(--multi_gpu); fi
else
  command=(torchrun --standalone --nproc_per_node="$count")
fi
command+=("$script" ${words[@]+"${words[@]}"})

# Said as train_4gpu.bat says it: words with blanks in double quotes.
line=''
for word in "${command[@]}"; do
  if [[ -z $word || $word == *' '* ]]; then word="\"$word\""; fi
  line+=" $word"
done
kind=GPUs
if [[ $cpu ]]; then kind="CPU processes"; fi
echo "$count $kind by $method:$line"
if [[ $dry_run ]]; then exit 0; fi
become "${command[@]}"
