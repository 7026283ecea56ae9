#!/usr/bin/env bash
# Train the X-ray to CT cascade on 4 GPUs of this machine; all other flags are passed to train_accelerate.py.
#   bash train_4gpu.sh --config configs/multi_view_config.json --method accelerate --wandb
#   --method accelerate|torchrun   --num_gpus N   --help
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
if [[ ! ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} ]]; then PATH=$here/.venv/bin:$PATH; fi
exec python3 "$here/utils/launch_4gpu.py" "$@"
