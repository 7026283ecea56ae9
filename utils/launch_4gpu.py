"""Train the X-ray-to-CT cascade on 4 GPUs with Accelerate or torchrun.

bash train_4gpu.sh --config configs/multi_view_config.json --method accelerate --wandb
train_4gpu.bat --config configs/multi_view_config.json --method torchrun --wandb       # on Windows
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# when run as a script, import from the project root
if not __package__:
    sys.path[0] = str(ROOT)

from utils import torchrun
from utils.cli import Parser, whole


def build_command(words: list[str]) -> list[str]:
    parser = Parser(__doc__)
    parser.add_argument(
        "--method", choices=("accelerate", "torchrun"), default="accelerate", help="launcher; both give the same result"
    )
    parser.add_argument(
        "--num_gpus", type=whole(1), default=4, help="processes, one per GPU; without GPUs they use the CPU"
    )
    args, words = parser.parse_known_args(words)
    words = [str(ROOT / "train_accelerate.py"), *(["--config", args.config] if args.config else []), *words]
    if args.method == "torchrun" or args.num_gpus == 1:
        return [f"--nproc_per_node={args.num_gpus}", *words]
    # the training script handles mixed precision itself
    launch = ["accelerate", "launch", "--multi_gpu", f"--num_processes={args.num_gpus}", "--num_machines=1"]
    return [*launch, "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", *words]


if __name__ == "__main__":
    sys.exit(torchrun.main(build_command(sys.argv[1:])))
