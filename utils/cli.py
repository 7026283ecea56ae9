"""Command-line handling for all scripts: argument types, common flags, --config files and error messages.

This module does not import torch, so --help and flag errors appear immediately.
"""

import argparse
import difflib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


class InputError(Exception):
    """Raised for unusable flags, files or data; run_main() exits with code 2."""


class RunError(Exception):
    """Raised when a run cannot continue, for example on a full disk; run_main() exits with code 1."""


def is_first_process() -> bool:
    """Return whether this process is rank 0, even before the process group is created."""
    return (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:150]


def refuse(problems: list[str], what: str) -> None:
    """Raise InputError if there are problems; rank 0 first prints all of them if there are several.

    problems: messages like "file: what is wrong; what to do". what: text after the problem count in the error message,
    such as "rows cannot be used".
    """
    if len(problems) > 1:
        if is_first_process():
            print("\n".join(problems), flush=True)
        places = ", ".join(problem.split(": ")[0] for problem in problems[:3])
        raise InputError(f"{places}, ...: {len(problems)} {what}, all listed above")
    if problems:
        raise InputError(problems[0])


def with_flags(args: argparse.Namespace, **values) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | values)


# --- types of arguments -----------------------------------------------------------------------------------------------


def whole(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, not {text!r}")
        return int(text)

    return parse


def real(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            limits = f"above {low:g}" if above else f"from {low:g}"
            raise argparse.ArgumentTypeError(f"must be a number {limits} to {high:g}, not {text!r}")
        return value

    return parse


def pattern(form: str, meaning: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(form, text):
            raise argparse.ArgumentTypeError(f"must be {meaning}, not {text!r}")
        return text

    return parse


def step_range(text: str) -> str:
    steps = re.fullmatch(r"([1-9]\d{0,17}):([1-9]\d{0,17})", text)
    if not steps or int(steps[1]) > int(steps[2]):
        raise argparse.ArgumentTypeError(f"must be the first and the last step, as 10:12, not {text!r}")
    return text


# --- parser -----------------------------------------------------------------------------------------------------------


ADVANCED = "rarely changed: keys of a --config file (also accepted as --KEY)"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _format_action_invocation(self, action: argparse.Action) -> str:
        text = super()._format_action_invocation(action)
        return text.replace("--", "") if action.container.title == ADVANCED else text

    def _get_help_string(self, action: argparse.Action) -> str:
        nothing = action.default is None or action.default is False or action.default == []
        return action.help if nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """ArgumentParser with a --config flag. On an error, rank 0 prints one line and every rank exits with code 2.

    Flags must not be required, because the command line is first parsed without the config file.
    """

    def __init__(self, doc: str, sections: tuple[str, ...] = ()):
        """doc: description in one line, then examples. sections: config-file keys that hold groups of flags."""
        description, _, examples = doc.partition("\n")
        super().__init__(description=description, epilog=examples, allow_abbrev=False, formatter_class=HelpFormatter)
        self.add_argument(
            "--config", metavar="FILE", help="YAML or JSON file of flags; the command line takes precedence"
        )
        self.advanced = self.add_argument_group(ADVANCED)
        self.source = ""
        self.sections = sections

    def format_help(self) -> str:
        self._action_groups.sort(key=lambda group: group is self.advanced)
        return super().format_help()

    def error(self, message: str):
        unknown = re.match(r"unrecognized arguments: --([\w-]+)", message)
        if unknown:
            names = [option.removeprefix("--") for option in self._option_string_actions]
            near = difflib.get_close_matches(unknown[1], names, n=1)
            key, dashes = ("key", "") if self.source else ("flag", "--")
            message = f"unknown {key} {dashes}{unknown[1]}" + (f"; did you mean {dashes}{near[0]}?" if near else "")
        sys.exit(print_error(InputError(f"{self.source}{message}; see --help")))

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        words = sys.argv[1:] if argv is None else argv
        args = self.parse_args(words)
        if args.config:
            path = args.config
            if path.startswith("config/") and not Path(path).exists():
                # the published guide for the cascade calls the configs/ folder config/
                path = path.replace("config/", "configs/", 1)
            # the command line has already been parsed without errors, so any error here is in the config file
            self.source = f"{path}: "
            try:
                # command-line flags come last, so they override the config file
                args = self.parse_args([*self.config_words(path), *words])
            except InputError as error:
                sys.exit(print_error(error))
            args.config, self.source = path, ""
        trains = not (getattr(args, "eval_only", False) or getattr(args, "predict", None))
        if trains and getattr(args, "wandb", None) and importlib.util.find_spec("wandb") is None:
            self.error("--wandb: it is not installed; pip install -r requirements-wandb.txt")
        if getattr(args, "deterministic", False):
            # makes cuBLAS deterministic; must be set before torch first uses cuBLAS
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if getattr(args, "profile", None):
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        return args

    def given(self, argv: list[str] | None = None) -> set[str]:
        words = sys.argv[1:] if argv is None else argv
        actions = (self._option_string_actions.get(word.partition("=")[0]) for word in words)
        return {action.dest for action in actions if action}

    def config_words(self, path: str) -> list[str]:
        """Convert a config file to command-line arguments, so its values are checked like flags."""
        words = []
        values = read_config(path)
        for section in self.sections:
            inner = values.pop(section, None) or {}
            if not isinstance(inner, dict):
                raise InputError(f"{path}: {section}: must hold `flag: value` lines; correct the file")
            values |= inner
        for key, value in values.items():
            flag = f"--{key}"
            if key == "script":
                # the args.yaml of a run is a valid config file, but its key `script` is not a flag
                continue
            if value is False and flag in self._option_string_actions:
                # a flag without a --no- form is off by default, so `false` needs no argument
                if f"--no-{key}" in self._option_string_actions:
                    words.append(f"--no-{key}")
            elif isinstance(value, bool):
                words.append(flag)
            elif value is not None:
                items = value if isinstance(value, list) else [value]
                words += [flag, *(item if isinstance(item, str) else json.dumps(item) for item in items)]
        return words


def read_config(path: str) -> dict:
    """Read a mapping from a YAML or JSON file; JSON may have // comments. Raises InputError if the file is unusable."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".json"):
            text = re.sub(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*', lambda found: found[1] or "", text)
        values = yaml.safe_load(text) or {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its name") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = f":{line + 1}" if line is not None else ""
        raise InputError(f"{path}{place}: not valid YAML or JSON; correct the file") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold `flag: value` lines; correct the file")
    return values


def add_common_arguments(
    parser: Parser,
    output_dir: str,
    num_epochs: int | None,
    learning_rate: float,
    batch_size: int,
    batch_of_all: bool = False,
    least_epochs: int = 1,
) -> None:
    """Add the flags that all scripts share, with names from the published training guides as aliases.

    num_epochs: default for --num_epochs; None omits the flag. batch_of_all: whether --batch_size is the total over all
    GPUs rather than per GPU. least_epochs: smallest allowed --num_epochs.
    """
    parser.usage = "%(prog)s [--config FILE] [flags]"
    advanced = parser.advanced.add_argument
    add = parser.add_argument_group("run").add_argument
    text = "run folder: checkpoints, log, figures, summary"
    add("--output_dir", "--checkpoint_dir", "--log_dir", metavar="DIR", default=output_dir, help=text)
    if num_epochs:
        add(
            "--num_epochs",
            "--epochs",
            type=whole(least_epochs),
            default=num_epochs,
            help="passes over the training set",
        )
    add(
        "--seed",
        type=whole(-(10**18)),
        default=0,
        help="seed of initial weights, sample order and all other randomness",
    )
    add("--max_steps", type=whole(0), default=0, help="stop when the run has made N optimizer steps; 0: no limit")
    add("--resume_from", metavar="auto|PATH", help="auto: newest intact checkpoint of the run, if any; or a file")
    add("--overwrite", action="store_true", help="delete the run in the output folder and start again")
    add("--eval_only", action="store_true", help="evaluate --resume_from, or best.pt of the run, without training")
    text = f"evaluate every N steps{' as well as after each epoch' if num_epochs else ''}"
    add("--eval_every_steps", "--eval_interval", type=whole(0), default=0, help=text)
    text = "save every N steps and after evaluations; default: every 500 steps, at most once a minute"
    add("--save_every", "--ckpt_interval", type=whole(0), help=text)
    add("--keep_last", type=whole(1), default=2, help="number of checkpoints to keep besides best.pt")

    add = parser.add_argument_group("optimization").add_argument
    text, product = "samples PER GPU in a forward pass; fixed for the run", "batch size x accumulation x GPUs"
    if batch_of_all:
        text = "samples over ALL GPUs in a forward pass; with --effective_batch_size: PER GPU"
        product = "batch size x accumulation"
    add("--batch_size", "--train_batch_size", type=whole(1), default=batch_size, help=text)
    text = "forward passes PER GPU in one optimizer step"
    add("--gradient_accumulation_steps", type=whole(1), default=1, help=text)
    text = f"global batch: samples over ALL GPUs in an optimizer step; default: {product} at the first start"
    add("--effective_batch_size", type=whole(1), metavar="N", help=text)
    text = "peak learning rate before any scaling"
    add("--learning_rate", "--lr", type=real(0, above=True), default=learning_rate, help=text)
    add("--grad_clip", "--grad_clip_norm", type=real(0), default=1.0, help="maximum gradient norm; 0: no clipping")
    advanced("--max_bad_steps", type=whole(1), default=10, help="stop after skipping N non-finite steps in a row")

    add = parser.add_argument_group("speed and memory").add_argument
    yes_no = argparse.BooleanOptionalAction
    precisions = ("auto", "no", "bf16", "fp16")
    shares = pattern(r"equal|auto|[1-9]\d{0,5}(,[1-9]\d{0,5})*", "equal, auto or one whole number per process, as 2,1")
    add(
        "--mixed_precision",
        choices=precisions,
        default="auto",
        help="auto: bf16 if the GPU supports it, else fp16",
    )
    advanced("--auto_batch", action=yes_no, help="halve the batch until it fits into memory; default: on GPUs only")
    text = "how GPUs divide a step: equal, auto (by measured speed), or 2,1 if the first is twice as fast as the second"
    advanced("--gpu_shares", type=shares, default="equal", help=text)
    add("--num_workers", type=whole(0), default=4, help="data loading workers PER GPU")
    add("--compile", action="store_true", help="torch.compile the model: the first steps are slow, later ones faster")
    add(
        "--deterministic",
        action="store_true",
        help="bit-identical results for any number of processes on the same kind of device; slower",
    )
    text = "write a profiler trace of steps A to B for ui.perfetto.dev"
    add("--profile", type=step_range, metavar="A:B", help=text)

    add = parser.add_argument_group("logging and launch").add_argument
    add("--log_every", "--summary_interval", type=whole(1), default=10, help="optimizer steps between log lines")
    text = "also log to Weights & Biases"
    add("--wandb", "--wandb_project", metavar="PROJECT", nargs="?", const=Path(output_dir).name, help=text)
    add("--world_size", type=whole(1), help="when started by plain `python`: start N processes with torchrun")
    advanced(
        "--dist_timeout", type=whole(1), default=600, help="seconds a rank waits for a stuck rank before it gives up"
    )
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


# --- start and exit ---------------------------------------------------------------------------------------------------


def print_error(error: Exception) -> int:
    code = 2 if isinstance(error, InputError) else 1
    first = is_first_process()
    if first:
        print("error: " + " ".join(str(error).splitlines()), file=sys.stderr, flush=True)
    # on SIGTERM, exit with `code` instead of 143: srun returns the largest exit code of all ranks, and 143 would look
    # like a time limit
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    if not first:
        # launchers kill all ranks when one rank exits, so let rank 0 print the error first
        time.sleep(5)
    elif os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        # srun kills the other ranks when rank 0 exits, so give them time to install the SIGTERM handler
        time.sleep(2)
    return code


def launch_workers(world_size: int | None) -> None:
    """Restart the script under torchrun with `world_size` processes, if `world_size` is above 1.

    Does nothing in a process started by torchrun, or by srun as one of several tasks.
    """
    if (world_size or 1) > 1 and "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        command = [sys.executable, str(Path(__file__).with_name("torchrun.py")), "--standalone"]
        command += [f"--nproc_per_node={world_size}", *sys.argv]
        if os.name == "nt":
            # on Windows, os.execv would give the shell its prompt back while the script is still running
            sys.exit(subprocess.call(command))
        os.execv(sys.executable, command)


def run_main(main: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> None:
    try:
        code = main(args) or 0
    except (InputError, RunError) as error:
        code = print_error(error)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        # skip Python's shutdown, during which threads of torch 2.13 sometimes abort the process
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
