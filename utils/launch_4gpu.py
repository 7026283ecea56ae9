"""Train the X-ray to CT cascade on 4 GPUs of this machine. Other flags go to train_accelerate.py as they are.

bash train_4gpu.sh --config configs/multi_view_config.json --method accelerate --wandb
train_4gpu.bat --config configs/multi_view_config.json --method accelerate --wandb       # the same under Windows
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # started by its path, from any folder
    sys.path[0] = str(ROOT)

from utils.cli import HelpFormatter, InputError, report


def processes(text: str) -> int:
    """argparse type: a whole number from 1 to 99."""
    if not re.fullmatch("[1-9][0-9]?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 99, not {text!r}")
    return int(text)


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """(the launcher's own flags, the words of the script). Raises ArgumentError."""
    description, _, examples = __doc__.partition("\n")
    options = {"allow_abbrev": False, "exit_on_error": False, "formatter_class": HelpFormatter}
    parser = argparse.ArgumentParser("train_4gpu", description=description, epilog=examples, **options)
    add = parser.add_argument
    add("--method", choices=("accelerate", "torchrun"), default="accelerate", help="the result is the same")
    add("--num_gpus", type=processes, default=4, metavar="N", help="processes, one per GPU")
    add("--cpu", action="store_true", help="CPU processes instead, --num_gpus of them")
    add("--mixed_precision", metavar="P", help="for Accelerate and the script")
    add("--dry_run", action="store_true", help="only print the command")
    args, words = parser.parse_known_args(argv)
    return args, words + (["--mixed_precision", args.mixed_precision] if args.mixed_precision else [])


def build_command(args: argparse.Namespace, words: list[str]) -> list[str]:
    """The words of `accelerate launch` or torchrun with the script and its flags."""
    script = [str(ROOT / "train_accelerate.py"), *words]
    if args.method == "torchrun":
        return ["torchrun", "--standalone", f"--nproc_per_node={args.num_gpus}", *script]
    # Accelerate has no auto; the script chooses where it is told `no`
    precision = args.mixed_precision if args.mixed_precision in ("bf16", "fp16") else "no"
    command = ["accelerate", "launch", f"--num_processes={args.num_gpus}", "--num_machines=1"]
    command += [f"--mixed_precision={precision}", "--dynamo_backend=no", "--main_process_port=0"]
    if args.num_gpus == 1:
        return [*command, *script, "--world_size", "1"]
    return [*command, "--multi_gpu", *script]


def prepare(args: argparse.Namespace) -> None:
    """Give each process its GPU, or its share of the cores. Raises InputError."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads and not re.fullmatch("[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*", threads, re.ASCII):
        raise InputError(f"OMP_NUM_THREADS must be a whole number from 1 to 99999, not {threads!r}")
    if args.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import torch

    gpus = torch.cuda.device_count()
    if not args.cpu and args.num_gpus > gpus:
        reason = f"{args.num_gpus} GPUs asked for, {gpus} found"
        raise InputError(f"{reason}; give --num_gpus with at most that many, or --cpu")
    if not threads:
        os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // args.num_gpus))
    if os.name == "nt":
        # builds of torch for Windows have no libuv
        os.environ["USE_LIBUV"] = "0"


def run(command: list[str]) -> int:
    """Run the command in this process; returns the script's own exit code."""
    from utils import torchrun

    sys.argv = command
    if command[0] == "torchrun":
        return torchrun.main()

    import psutil
    from accelerate.commands.accelerate_cli import main as accelerate

    def pass_on(number: int, _frame) -> None:
        # Ctrl-C reaches the child by itself
        for child in psutil.Process().children() if number != signal.SIGINT else ():
            child.send_signal(number)

    # for a single process, Accelerate's child, which saves; for several, torchrun sets handlers of its own
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    try:
        return torchrun.main(accelerate)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode >= 0 else 128 - error.returncode


def main() -> int:
    try:
        args, words = parse_args()
        command = build_command(args, words)
        prepare(args)
    except (InputError, argparse.ArgumentError) as error:
        message = str(error).removeprefix("argument ")
        return report(InputError(message))
    kind = "CPU processes" if args.cpu else "GPUs"
    print(f"{args.num_gpus} {kind} by {args.method}: {shlex.join(command)}", flush=True)
    return 0 if args.dry_run else run(command)


if __name__ == "__main__":
    sys.exit(main())
