#!/usr/bin/env bash
# Look at this machine, choose the engine, and train on all its GPUs. All other words go to the script as they are.
#   ./launch_distributed_training.sh --config configs/default_config.yaml
#   --num_gpus N               instead of all GPUs; without GPUs: N processes on the CPU
#   --deepspeed | --torchrun   DeepSpeed or DDP; left out: DeepSpeed where it is installed (train_mimic_cxr.py), else DDP
#   --script FILE   instead of train_mimic_cxr.py     --debug   a trial of 2 steps     --dry_run   only print the command
# Several nodes: the job files in configs/slurm, srun, or NNODES, NODE_RANK, MASTER_ADDR set and this started on each.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
itself=("$here/${0##*/}" "$@")
# shellcheck source=launch_functions.sh
source "$here/launch_functions.sh"

script=$here/train_mimic_cxr.py processes='' deepspeed='' torchrun='' debug='' start=become words=()
while (($#)); do
  case $1 in
    --num_gpus=* | --script=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}"
      continue
      ;;
    --num_gpus | --script)
      if (($# < 2)); then fail "$1 needs a value"; fi
      if [[ $1 == --script ]]; then script=$2; else check_number "$1" "$2" 1 9999 && processes=$2; fi
      shift
      ;;
    --deepspeed | --use_deepspeed) deepspeed=1 ;;
    --torchrun | --use_ddp) torchrun=1 ;;
    --debug) debug=1 ;;
    --dry_run) start=print_command ;;
    -h | --help) sed -n '2,7s/^# //p' "$0" && exit ;;
    *) words+=("$1") ;;
  esac
  shift
done
if [[ ! -f $script ]]; then script=$here/$script; fi
if [[ ! -f $script ]]; then fail "no file $script; check --script"; fi
name=${script##*/} mimic=''
if [[ $name == train_mimic_cxr.py ]]; then mimic=1; fi
if [[ $deepspeed && ($torchrun || ! $mimic) ]]; then fail "--deepspeed: not with --torchrun or another script"; fi

# Bash arithmetic runs a command inside a value such as x[$(command)], so all numbers are checked first.
check_variables 1 9999999 NNODES SLURM_NNODES SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_CPUS_PER_TASK
check_variables 0 4294967295 NODE_RANK SLURM_NODEID SLURM_PROCID SLURM_JOB_ID
check_variables 1 65535 MASTER_PORT
check_threads
nodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-${NNODES:-1}}} tasks=${SLURM_STEP_NUM_TASKS:-1}

# An sbatch script runs on the first node only: start this once on each.
if [[ ${SLURM_JOB_ID:-} && ! ${SLURM_STEP_NUM_TASKS:-} ]] && ((nodes > 1)); then
  cores=${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}
  "$start" srun --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 ${cores:+"$cores"} "${itself[@]}"
  exit
fi
# Under srun with a task per GPU only the script is left to start, with the cores of its task.
if ((tasks > nodes)); then
  processes=$((tasks / nodes))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
fi

# Detect.
if ! command -v torchrun >/dev/null && [[ -x $here/.venv/bin/torchrun ]]; then PATH=$here/.venv/bin:$PATH; fi
question=(--shell --nodes "$nodes" ${processes:+--gpus "$processes"})
if [[ $torchrun || ! $mimic ]]; then question+=(--no_deepspeed); fi
answer=$(cd "$here" && python -m utils.hardware_utils "${question[@]}") || fail "hardware detection failed; try: make setup"
gpu_count='' cpu_cores='' processes_per_node='' engine='' deepspeed_installed='' detected='' settings=''
take_assignments "$answer" gpu_count cpu_cores processes_per_node engine deepspeed_installed detected settings
check_number "hardware_utils: gpu_count" "$gpu_count" 0 9999
check_number "hardware_utils: cpu_cores" "$cpu_cores" 1 999999
check_number "hardware_utils: processes_per_node" "$processes_per_node" 1 9999
processes=$processes_per_node threads=$((cpu_cores / processes_per_node))
if ((gpu_count > 0 && processes > gpu_count && tasks <= nodes)); then
  fail "--num_gpus $processes: there are $gpu_count GPUs; ask for at most $gpu_count"
fi

# Choose the engine.
if [[ $deepspeed ]]; then engine=deepspeed; fi
if [[ $torchrun ]]; then engine=torchrun; fi
if [[ $engine == deepspeed && $deepspeed_installed != true ]]; then fail "--deepspeed: it is not installed"; fi
words=("$script" ${words[@]+"${words[@]}"} ${debug:+--max_steps 2})
if [[ $debug && $mimic ]]; then words+=(--log_every 1); fi
if [[ $mimic && $engine == deepspeed ]]; then words+=(--use_deepspeed); fi
if [[ $mimic && $engine == torchrun ]]; then words+=(--use_ddp); fi

# What starts the processes, and where they meet.
command=(python)
if ((processes * nodes > 1 && tasks <= nodes)); then
  command=(python "$here/utils/torchrun.py")
  if ((nodes > 1)); then
    rank=${SLURM_NODEID:-${NODE_RANK:-}} first=${MASTER_ADDR:-} hosts=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
    if [[ ! $first && $hosts ]]; then first=$(scontrol show hostnames "$hosts" 2>/dev/null | head -n 1 || true); fi
    check_number NODE_RANK "$rank" 0 $((nodes - 1))
    check_host MASTER_ADDR "$first"
    command+=(--nnodes="$nodes" --node_rank="$rank" --master_addr="$first")
    command+=(--master_port="${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 20000))}")
  else
    command+=(--standalone)
  fi
  command+=(--nproc_per_node="$processes")
fi

# Of srun's tasks only the first speaks.
if ((${SLURM_PROCID:-0} == 0)); then
  printf '%s\n' "$detected" ${mimic:+"$settings"} "Engine: $engine x $((processes * nodes))"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads ? threads : 1))}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}
# Seconds that torchrun leaves its processes to save after a SIGTERM.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
"$start" "${command[@]}" "${words[@]}"
