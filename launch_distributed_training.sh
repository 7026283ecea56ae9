#!/usr/bin/env bash
# Detect this machine, choose the engine, and train on all its GPUs. Flags that are not among these go to the script.
#   ./launch_distributed_training.sh --config configs/default_config.yaml
#   --num_gpus N    instead of all GPUs; without GPUs: N CPU processes     --dry_run  print the command, do not run it
#   --elastic, --elastic=MIN:MAX  GPUs may come and go, see docs/elastic.md (DDP; not PRS-Med and survival)
#   --deepspeed | --torchrun  force DeepSpeed or DDP     --script FILE  default train_mimic_cxr.py     --debug  a try
# Several nodes: the files in configs/slurm, srun, or NNODES, NODE_RANK, MASTER_ADDR set and this started on each.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
again=("$here/${0##*/}" "$@")
# shellcheck source=launch_functions.sh
source "$here/launch_functions.sh"

# --- the command line -------------------------------------------------------------------------------------------------

script=$here/train_mimic_cxr.py
processes=all
deepspeed=''
torchrun=''
elastic=''
debug=''
dry_run=''
words=()
while (($#)); do
  case $1 in
    --num_gpus=*)
      processes=${1#*=}
      ;;
    --num_gpus)
      processes=${2:-}
      if (($# > 1)); then shift; fi
      ;;
    --script=*)
      script=${1#*=}
      ;;
    --script)
      if (($# < 2)); then fail "--script needs a value"; fi
      script=$2
      shift
      ;;
    --deepspeed | --use_deepspeed) deepspeed=1 ;;
    --torchrun | --use_ddp) torchrun=1 ;;
    --elastic) elastic=auto ;;
    --elastic=*)
      elastic=${1#*=}
      check_range --elastic "$elastic"
      ;;
    --debug) debug=1 ;;
    --dry_run) dry_run=1 ;;
    -h | --help)
      sed -n '2,7s/^# //p' "$0"
      exit 0
      ;;
    *) words+=("$1") ;;
  esac
  shift
done

# start COMMAND WORD...: run this in place of the launcher; --dry_run prints it instead.
start() {
  if [[ $dry_run ]]; then
    print_command "$@"
    exit 0
  fi
  become "$@"
}

# --- nothing wrong may go on from here --------------------------------------------------------------------------------

if [[ $processes != all ]]; then check_number --num_gpus "$processes" 1 9999; fi
check_variables 1 99999 SLURM_STEP_NUM_NODES SLURM_NNODES NNODES SLURM_CPUS_PER_TASK
check_variables 1 9999999 SLURM_STEP_NUM_TASKS
check_variables 0 9999999 SLURM_PROCID SLURM_NODEID NODE_RANK
check_variables 0 4294967295 SLURM_JOB_ID
check_variables 1 65535 MASTER_PORT
check_threads

# A script is looked for in the working folder first, then beside this launcher.
if [[ ! -f $script ]]; then script=$here/${script#"$here/"}; fi
if [[ ! -f $script ]]; then fail "no file $script; check --script"; fi

# Only the first takes the flags of an engine; those that have moved are started by utils/torchrun.py.
mimic='' moved=''
case ${script##*/} in
  train_mimic_cxr.py) mimic=1 ;;
  train_prs_med.py | train_survival_distributed.py) moved=1 ;;
esac
if [[ $deepspeed ]] && [[ -z $mimic || $torchrun ]]; then
  fail "--deepspeed: not with --torchrun or another script"
fi

# ZeRO's optimizer state belongs to a number of ranks.
if [[ $elastic ]]; then
  if [[ $deepspeed ]]; then fail "--elastic: not with --deepspeed; leave one out"; fi
  if [[ $moved ]]; then fail "--elastic: not with ${script##*/}; see docs/elastic.md"; fi
  torchrun=1
fi

# A flag for the data of another guide means that --script was forgotten.
if [[ $mimic ]]; then
  for word in ${words[@]+"${words[@]}"}; do
    other=''
    case ${word%%=*} in
      --csv_path) other=train_survival_distributed.py ;;
      --data_root) other=train_prs_med.py ;;
      --dataset_path) other=train_accelerate.py ;;
      --data) other=train.py ;;
    esac
    if [[ $other ]]; then fail "${word%%=*} belongs to another script; add --script $other"; fi
  done
fi

# --- nodes and tasks --------------------------------------------------------------------------------------------------

nodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-${NNODES:-1}}}
tasks=${SLURM_STEP_NUM_TASKS:-1}
task_cpus=${SLURM_CPUS_PER_TASK:-}

# In an sbatch script this runs on the first node only: start it once on each.
if [[ ${SLURM_JOB_ID:-} && -z ${SLURM_STEP_NUM_TASKS:-} ]] && ((nodes > 1)); then
  command=(srun -n "$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1)
  # The other nodes go on without one that fails.
  if [[ $elastic ]]; then command=(srun -n "$nodes" --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill); fi
  if [[ $task_cpus ]]; then command+=(-c "$task_cpus"); fi
  start "${command[@]}" "${again[@]}"
fi

# Where srun has started a process for each GPU, the script reads srun's variables by itself.
task_per_gpu=''
if ((tasks > nodes)); then
  if [[ $elastic ]]; then fail "--elastic: start one task a node (--ntasks-per-node=1); it starts one per GPU"; fi
  task_per_gpu=1
  processes=$((tasks / nodes))
fi

# --- what this machine has --------------------------------------------------------------------------------------------

if ! command -v torchrun >/dev/null && [[ -x $here/.venv/bin/torchrun ]]; then PATH=$here/.venv/bin:$PATH; fi
question=(--shell --nodes "$nodes")
if [[ $processes != all ]]; then question+=(--gpus "$processes"); fi
if [[ -z $mimic || $torchrun ]]; then question+=(--no_deepspeed); fi
answer=$(cd "$here" && python -m old.hardware_utils "${question[@]}") || fail "hardware detection failed; try: make setup"

# These lines set what is empty here, and nothing else.
gpu_count='' cpu_cores='' processes_per_node='' engine='' deepspeed_installed='' detected='' settings=''
take_assignments "$answer" gpu_count cpu_cores processes_per_node engine deepspeed_installed detected settings
check_number "hardware_utils: gpu_count" "$gpu_count" 0 9999
check_number "hardware_utils: cpu_cores" "$cpu_cores" 1 999999
check_number "hardware_utils: processes_per_node" "$processes_per_node" 1 9999
if [[ ! $engine =~ ^(python|torchrun|deepspeed)$ ]]; then
  fail "hardware_utils: engine must be one we know, not '$engine'"
fi
processes=$processes_per_node

# A task of srun sees its own GPU and its own share of the cores only.
if [[ $task_per_gpu ]]; then
  if [[ $task_cpus ]]; then cpu_cores=$((task_cpus * processes)); fi
elif ((gpu_count > 0 && processes > gpu_count)); then
  fail "--num_gpus $processes: there are $gpu_count GPUs; ask for at most $gpu_count"
fi

# --- the engine -------------------------------------------------------------------------------------------------------

if [[ $torchrun ]]; then engine=torchrun; fi
if [[ $deepspeed ]]; then engine=deepspeed; fi
if [[ $engine == deepspeed && $deepspeed_installed != true ]]; then fail "--deepspeed: it is not installed"; fi

words=("$script" ${words[@]+"${words[@]}"})
if [[ $engine == python || $task_per_gpu ]]; then
  command=(python)
else
  # For DeepSpeed too: its own runner would orphan the workers.
  command=(torchrun)
  if [[ $moved ]]; then command=(python "$here/utils/torchrun.py"); fi
  command+=(--nproc_per_node="$processes")
  if ((nodes > 1)); then
    # This node's number, and the first node's name and port, at which all meet.
    variable=NODE_RANK
    if [[ ${SLURM_NODEID:-} ]]; then variable=SLURM_NODEID; fi
    node_rank=${!variable:-}
    check_number "$variable" "$node_rank" 0 $((nodes - 1))
    names=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
    if [[ $names == -* ]]; then fail "SLURM_JOB_NODELIST must be a list of hosts, not '$names'"; fi
    first=${MASTER_ADDR:-}
    if [[ -z $first && $names ]]; then first=$(scontrol show hostnames "$names" 2>/dev/null | head -n 1 || true); fi
    check_host MASTER_ADDR "$first"
    port=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 20000))}
    command+=(--nnodes="$nodes" --node_rank="$node_rank" --master_addr="$first" --master_port="$port")
  else
    # On a free port of its own.
    command+=(--standalone)
  fi
fi

if [[ $elastic ]]; then
  NODES=$nodes NODE_RANK=${node_rank:-0} ENDPOINT=${first:-}:${port:-}
  elastic_command "$elastic" "$processes"
fi

command+=("${words[@]}")
if [[ $mimic && $engine == deepspeed ]]; then command+=(--use_deepspeed); fi
if [[ $mimic && $engine == torchrun ]]; then command+=(--use_ddp); fi
if [[ $debug && $mimic ]]; then command+=(--debug); fi
if [[ $debug && -z $mimic ]]; then command+=(--max_steps 2); fi

# --- say it, and start ------------------------------------------------------------------------------------------------

# Of srun's tasks one speaks. The settings are those of train_mimic_cxr.py.
if ((${SLURM_PROCID:-0} == 0)); then
  echo "$detected"
  if [[ $mimic ]]; then echo "$settings"; fi
  choice="1: python; 2+: DeepSpeed, else DDP; torchrun forwards signals"
  echo "Engine:   $engine x $((processes * nodes)) by ${command[0]} ($choice)"
fi

# The environment; what is set stays. A process takes its share of the cores, where torchrun would give it one.
threads=1
if ((cpu_cores > processes)); then threads=$((cpu_cores / processes)); fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
# Loading workers are forked.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
# Less fragmentation of GPU memory.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}
# NCCL says why it failed.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# torchrun leaves 120 s to save after a SIGTERM, and takes no store of a run before.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
start "${command[@]}"
