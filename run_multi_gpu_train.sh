#!/usr/bin/env bash
# Train PRS-Med on every GPU of this machine, or on NUM_GPUS of them; without GPUs, in NUM_GPUS CPU processes (default 2).
#   ./run_multi_gpu_train.sh /path/to/data              all GPUs
#   ./run_multi_gpu_train.sh /path/to/data 4            4 GPUs
#   ./run_multi_gpu_train.sh data 4 -- --batch_size 4   whatever follows `--` goes to train_prs_med.py
#   --elastic, --elastic=MIN:MAX                        GPUs may come and go, see docs/elastic.md
#   --dry_run                                           print the command instead of running it
# Several nodes: set NNODES, NODE_RANK, MASTER_ADDR (and MASTER_PORT, default 29500) and run this on each.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=launch_functions.sh
source "$here/launch_functions.sh"

dry_run=''
elastic=''
words=()
while (($#)); do
  case $1 in
    --dry_run) dry_run=1 ;;
    --elastic) elastic=auto ;;
    --elastic=*)
      elastic=${1#*=}
      check_elastic "$elastic"
      ;;
    -h | --help)
      sed -n '2,8s/^# //p' "$0"
      exit 0
      ;;
    --)
      shift
      break
      ;;
    -*) fail "unknown option $1; flags for train_prs_med.py follow --" ;;
    *) words+=("$1") ;;
  esac
  shift
done
if ((${#words[@]} > 2)); then
  fail "too many arguments (${words[*]}); usage: $0 [DATA [NUM_GPUS]] [-- flags for train_prs_med.py]"
fi
data=${words[0]:-data}

# One process per GPU; without GPUs, CPU processes.
gpus=$(count_gpus)
default=$gpus
if ((gpus == 0)); then default=2; fi
processes=${words[1]:-$default}
check_number NUM_GPUS "$processes" 1 9999
if ((gpus > 0 && processes > gpus)); then fail "$processes GPUs asked for, but there are $gpus; ask for at most $gpus"; fi

nodes=${NNODES:-1}
check_number NNODES "$nodes" 1 99999
check_variables 1 65535 MASTER_PORT
check_threads

# Each process takes its share of the cores.
threads=$(($(count_cores) / processes))
if ((threads < 1)); then threads=1; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}

torchrun=torchrun
if ! command -v torchrun >/dev/null && [[ -x $here/.venv/bin/torchrun ]]; then torchrun=$here/.venv/bin/torchrun; fi
command=("$torchrun" --nproc_per_node="$processes")
if ((nodes > 1)); then
  check_number NODE_RANK "${NODE_RANK:-}" 0 $((nodes - 1))
  check_host MASTER_ADDR "${MASTER_ADDR:-}"
  command+=(--nnodes="$nodes" --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR")
  command+=(--master_port="${MASTER_PORT:-29500}")
elif [[ -n ${MASTER_PORT:-} ]]; then
  command+=(--master_addr=127.0.0.1 --master_port="$MASTER_PORT")
else
  # On a free port of its own.
  command+=(--standalone)
fi
command+=("$here/train_prs_med.py" --data_root "$data" "$@")

if [[ $elastic ]]; then
  PATH=$PATH:$here/.venv/bin
  NODES=$nodes ENDPOINT=${MASTER_ADDR:-}:${MASTER_PORT:-29500}
  elastic_command "$elastic" "$processes" "$here/train_prs_med.py" --data_root "$data" "$@"
fi

if [[ $dry_run ]]; then
  print_command "${command[@]}"
  exit 0
fi
become "${command[@]}"
