#!/usr/bin/env bash
# Train the X-ray to CT cascade on 4 GPUs of this machine; --help lists the launcher's flags, all others are the script's.
#   bash train_4gpu.sh --config configs/multi_view_config.json --method accelerate --wandb
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
if ! command -v accelerate >/dev/null; then PATH=$here/.venv/bin:$PATH; fi
exec python "$here/utils/launch_4gpu.py" "$@"
