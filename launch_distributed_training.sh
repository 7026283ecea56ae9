#!/usr/bin/env bash
# Detect this machine, choose the engine, and train on all its GPUs. Flags that are not among these go to the script.
#   ./launch_distributed_training.sh --config configs/default_config.yaml
#   --num_gpus N    instead of all GPUs; without GPUs: N CPU processes     --dry_run  print the command, do not run it
#   --deepspeed | --torchrun  force DeepSpeed or DDP     --script FILE  default train_mimic_cxr.py     --debug  a try
# Several nodes: configs/slurm/mimic_cxr.sbatch, srun, or NNODES, NODE_RANK, MASTER_ADDR set and this started on each.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) && again=("$here/${0##*/}" "$@")
# shellcheck source=launch_functions.sh
source "$here/launch_functions.sh"
start() { if [[ $on == *dry_run* ]]; then printf '%q ' "$@" && echo && exit; else become "$@"; fi; }
value() { sed -n "s/^ *\"$1\": \"\{0,1\}\([^\",]*\).*/\1/p" <<<"$facts" | sort -u | paste -sd / -; }
script=$here/train_mimic_cxr.py count=all on='' mimic='' words=('') cpus=${SLURM_CPUS_PER_TASK:-}
while (($#)); do
  case $1 in
    --num_gpus=* | --script=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
    --num_gpus) count=${2:-} && shift $(($# > 1)) ;;
    --script) (($# > 1)) || fail "--script needs a value" && script=$2 && shift ;;
    --deepspeed | --torchrun | --debug | --dry_run | --use_deepspeed | --use_ddp) on+=" ${1/use_ddp/torchrun}" ;;
    -h | --help) sed -n '2,6s/^# //p' "$0" && exit 0 ;;
    *) words+=("$1") ;;
  esac
  shift
done
[[ $count == all ]] || check_number --num_gpus "$count" 1 9999
check_variables 1 99999 SLURM_STEP_NUM_NODES SLURM_NNODES NNODES SLURM_CPUS_PER_TASK
check_variables 1 9999999 SLURM_STEP_NUM_TASKS
check_variables 0 9999999 SLURM_PROCID SLURM_NODEID NODE_RANK
check_variables 0 4294967295 SLURM_JOB_ID
check_variables 1 65535 MASTER_PORT
check_threads
[[ -f $script ]] || script=$here/${script#"$here/"} && [[ -f $script ]] || fail "no file $script; check --script"
[[ ${script##*/} != train_mimic_cxr.py ]] || mimic=1 # the others take none of the engine flags
for word in ${mimic:+"${words[@]}"}; do
  other=''
  case ${word%%=*} in
    --csv_path) other=train_survival_distributed.py ;;
    --data_root) other=train_prs_med.py ;;
    --dataset_path) other=train_accelerate.py ;;
    --data) other=train.py ;;
  esac
  [[ -z $other ]] || fail "${word%%=*} belongs to another script; add --script $other"
done
[[ $on != *deepspeed* || ($mimic && $on != *torchrun*) ]] || fail "--deepspeed: not with --torchrun or another script"
nodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-${NNODES:-1}}} tasks=${SLURM_STEP_NUM_TASKS:-1}
if [[ ${SLURM_JOB_ID:-} && -z ${SLURM_STEP_NUM_TASKS:-} ]] && ((nodes > 1)); then # in an sbatch script: once per node
  start srun -n "$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 ${cpus:+-c "$cpus"} "${again[@]}"
fi
((tasks <= nodes)) || count=$((tasks / nodes)) # srun has started a process per GPU: the script reads srun's variables
command -v torchrun >/dev/null || [[ ! -x $here/.venv/bin/torchrun ]] || PATH=$here/.venv/bin:$PATH
look=(--json --nodes "$nodes") && [[ $count == all ]] || look+=(--gpus "$count")
[[ $mimic && $on != *torchrun* ]] || look+=(--no_deepspeed)
facts=$(cd "$here" && python -m hardware_utils "${look[@]}") || fail "hardware detection failed; try: make setup"
gpus=$(value gpu_count) cores=$(value cpu_cores) engine=$(value engine) count=$(value processes_per_node)
check_number "hardware_utils: gpu_count" "$gpus" 0 9999
check_number "hardware_utils: cpu_cores" "$cores" 1 999999
check_number "hardware_utils: processes_per_node" "$count" 1 9999
[[ $engine =~ ^(python|torchrun|deepspeed)$ ]] || fail "hardware_utils: engine must be one we know, not '$engine'"
[[ -z $cpus ]] || ((tasks <= nodes)) || cores=$((cpus * count)) # a task sees its own share of the cores only
((gpus == 0 || count <= gpus || tasks > nodes)) || fail "--num_gpus $count: there are $gpus GPUs; ask for at most $gpus"
if [[ $on == *torchrun* ]]; then engine=torchrun; elif [[ $on == *deepspeed* ]]; then engine=deepspeed; fi
[[ $engine != deepspeed || $(value deepspeed_installed) == true ]] || fail "--deepspeed: it is not installed"
where=(--standalone) words[0]=$script # --standalone: on a free port
if ((nodes > 1 && tasks <= nodes)); then
  [[ ${SLURM_NODEID:-} ]] && variable=SLURM_NODEID || variable=NODE_RANK
  place=${!variable:-} names=${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}
  check_number "$variable" "$place" 0 $((nodes - 1))
  [[ $names != -* ]] || fail "SLURM_JOB_NODELIST must be a list of hosts, not '$names'"
  first=${MASTER_ADDR:-$([[ -z $names ]] || scontrol show hostnames "$names" 2>/dev/null | sed -n 1p || true)}
  check_host MASTER_ADDR "$first"
  where=(--nnodes="$nodes" --node_rank="$place" --master_addr="$first")
  where+=(--master_port="${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 20000))}")
fi
command=(torchrun --nproc_per_node="$count" "${where[@]}") # for DeepSpeed too: its own runner would orphan the workers
((tasks <= nodes)) && [[ $engine != python ]] || command=(python)
case $mimic$engine in 1deepspeed) words+=(--use_deepspeed) ;; 1torchrun) words+=(--use_ddp) ;; esac
[[ $on != *debug* ]] || if [[ $mimic ]]; then words+=(--debug); else words+=(--max_steps 2); fi
[[ ${SLURM_PROCID:-0} != 0 ]] || echo "$(sed -n '/"summary": \[/,/]/s/^ *"\(.*\)",\{0,1\}$/\1/p' <<<"$facts" | if [[ $mimic ]]; then cat; else grep -v ^Settings; fi)
Engine:   $engine x $((count * nodes)) by ${command[0]} (1: python; 2+: DeepSpeed, else DDP; torchrun forwards signals)"
# The environment; what is set stays. Threads: a share of the cores (torchrun would give 1). Memory: less fragmentation.
# NCCL: say why it failed. torchrun: 120 s to save after a SIGTERM; no stale store. Tokenizers: workers may fork.
set -a && : "${OMP_NUM_THREADS:=$((cores > count ? cores / count : 1))}" "${TOKENIZERS_PARALLELISM:=false}"
: "${PYTORCH_ALLOC_CONF:=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}" "${NCCL_DEBUG:=WARN}"
: "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:=120}" "${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:=1}"
start "${command[@]}" "${words[@]}"
