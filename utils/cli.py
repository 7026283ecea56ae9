"""The command line that all scripts share: types of values, common flags, --config files, errors in one line.

Light on purpose (no torch): `--help` and a mistyped flag answer at once.
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
    """The user's input cannot be used: flags, files, data. The process ends with this one line and exit code 2."""


class RunError(Exception):
    """The run cannot go on: full disk, no memory, divergence. The process ends with this one line and exit code 1."""


def is_first_process() -> bool:
    """True on rank 0, also before the process group exists."""
    return (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough for the one line of ours; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:150]


def refuse(problems: list[str], what: str) -> None:
    """Raises InputError where there are problems (`file: what is wrong; what to do`); rank 0 lists several first."""
    if len(problems) > 1:
        if is_first_process():
            print("\n".join(problems), flush=True)
        places = ", ".join(problem.split(": ")[0] for problem in problems[:3])
        raise InputError(f"{places}, ...: {len(problems)} {what}, all listed above")
    if problems:
        raise InputError(problems[0])


def with_flags(args: argparse.Namespace, **values) -> argparse.Namespace:
    """A copy of the flags with some other values: flags themselves are final once parsed."""
    return argparse.Namespace(**vars(args) | values)


# --- types of arguments -----------------------------------------------------------------------------------------------


def whole(low: int) -> Callable[[str], int]:
    """argparse type: a whole number >= low."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, not {text!r}")
        return int(text)

    return parse


def real(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """argparse type: a finite number in [low, high], or in (low, high] with `above`."""

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
    """argparse type: a text that the regular expression `form` matches as a whole."""

    def parse(text: str) -> str:
        if not re.fullmatch(form, text):
            raise argparse.ArgumentTypeError(f"must be {meaning}, not {text!r}")
        return text

    return parse


def window(text: str) -> str:
    """argparse type: two steps A:B of which the first is not after the last."""
    found = re.fullmatch(r"([1-9]\d{0,17}):([1-9]\d{0,17})", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"must be the first and the last step, as 10:12, not {text!r}")
    return text


# --- the parser -------------------------------------------------------------------------------------------------------


ADVANCED = "rarely changed: keys of a --config file (--KEY works, too)"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults in the help, and the examples as they stand."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        text = super()._format_action_invocation(action)
        return text.replace("--", "") if action.container.title == ADVANCED else text

    def _get_help_string(self, action: argparse.Action) -> str:
        nothing = action.default is None or action.default is False or action.default == []
        return action.help if nothing else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """ArgumentParser with --config, which reports a mistake as one line, from one process, with exit code 2.

    Every flag needs a default: a script must start without any.
    """

    def __init__(self, doc: str, sections: tuple[str, ...] = ()):
        """doc: a line, and examples. sections: keys of a --config file below which flags stand, as in a guide."""
        description, _, examples = doc.partition("\n")
        super().__init__(description=description, epilog=examples, allow_abbrev=False, formatter_class=HelpFormatter)
        self.add_argument("--config", metavar="FILE", help="YAML or JSON that sets any flag; the command line wins")
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
        sys.exit(report(InputError(f"{self.source}{message}; see --help")))

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        """Defaults < --config < command line."""
        words = sys.argv[1:] if argv is None else argv
        args = self.parse_args(words)
        if args.config:
            path = args.config
            if path.startswith("config/") and not Path(path).exists():
                # as guide 3 names the folder
                path = path.replace("config/", "configs/", 1)
            # the command line alone was right, so that a mistake from here on is the file's; its words come first
            self.source = f"{path}: "
            args = self.parse_args([*self.config_words(path), *words])
            args.config, self.source = path, ""
        trains = not (getattr(args, "eval_only", False) or getattr(args, "predict", None))
        if trains and getattr(args, "wandb", None) and importlib.util.find_spec("wandb") is None:
            self.error("--wandb: it is not installed; pip install -r requirements-wandb.txt")
        if getattr(args, "deterministic", False):
            # cuBLAS reads this when torch first uses it: one workspace, whose sums have one order
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if getattr(args, "profile", None):
            # torch's profiler would print lines of its own
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        return args

    def given(self, argv: list[str] | None = None) -> set[str]:
        """The names of the flags that the command line itself gives."""
        words = sys.argv[1:] if argv is None else argv
        actions = (self._option_string_actions.get(word.partition("=")[0]) for word in words)
        return {action.dest for action in actions if action}

    def config_words(self, path: str) -> list[str]:
        """A config file as the words of a command line, so that both are checked alike."""
        words = []
        values = read_config(path)
        for section in self.sections:
            inner = values.pop(section, None) or {}
            if not isinstance(inner, dict):
                sys.exit(report(InputError(f"{path}: {section}: must hold `flag: value` lines; correct the file")))
            values |= inner
        for key, value in values.items():
            flag = f"--{key}"
            if key == "script":
                # args.yaml of a run names its script beside the flags
                continue
            if isinstance(value, bool):
                # `key: false` is --no-key where there is such a flag, and nothing where a switch is off anyway
                off = f"--no-{key}"
                known = flag in self._option_string_actions
                words += [flag] if value or not known else [off] * (off in self._option_string_actions)
            elif value is not None:
                values = value if isinstance(value, list) else [value]
                words += [flag, *(item if isinstance(item, str) else json.dumps(item) for item in values)]
        return words


def read_config(path: str) -> dict:
    """A YAML or JSON mapping; JSON may hold // comments. A mistake ends the process with one line."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".json"):
            text = re.sub(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*', lambda found: found[1] or "", text)
        values = yaml.safe_load(text) or {}
    except OSError as error:
        sys.exit(report(InputError(f"{path}: cannot be read ({error.strerror}); check its name")))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = f":{line + 1}" if line is not None else ""
        sys.exit(report(InputError(f"{path}{place}: not valid YAML or JSON; correct the file")))
    if not isinstance(values, dict):
        sys.exit(report(InputError(f"{path}: must hold `flag: value` lines; correct the file")))
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
    """The flags that mean the same in every script, with the guide's defaults; each guide's names are synonyms.

    num_epochs: None where the guide counts steps. batch_of_all: --batch_size is that of all GPUs, as guide 2 has it.
    least_epochs: 0 where a model that was not trained by steps says something.
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
    add("--seed", type=whole(-(10**18)), default=0, help="of initial weights, sample order and all other random draws")
    add("--max_steps", type=whole(0), default=0, help="stop after N optimizer steps in all; 0: at the end")
    add("--resume_from", metavar="auto|PATH", help="auto: the folder's newest intact checkpoint, or start; or a file")
    add("--overwrite", action="store_true", help="delete the run in the output folder and start afresh")
    add("--eval_only", action="store_true", help="no training: evaluate --resume_from, or best.pt of the run")
    text = f"evaluate every N steps{', besides after each epoch' if num_epochs else ''}"
    add("--eval_every_steps", "--eval_interval", type=whole(0), default=0, help=text)
    text = "save every N steps and after evaluations; if unset every 500 steps, at most once a minute"
    add("--save_every", "--ckpt_interval", type=whole(0), help=text)
    add("--keep_last", type=whole(1), default=2, help="checkpoints kept beside best.pt")

    add = parser.add_argument_group("optimization").add_argument
    text, product = "samples PER GPU and forward pass; fixed for the run", "batch size x accumulation x GPUs"
    if batch_of_all:
        text = "samples over ALL GPUs and forward pass; with --effective_batch_size PER GPU"
        product = "batch size x accumulation"
    add("--batch_size", "--train_batch_size", type=whole(1), default=batch_size, help=text)
    text = "forward passes PER GPU summed into one step"
    add("--gradient_accumulation_steps", type=whole(1), default=1, help=text)
    text = f"samples of a step over ALL GPUs, however many; default: {product} at the first start"
    add("--effective_batch_size", type=whole(1), metavar="N", help=text)
    text = "peak learning rate, before any scaling"
    add("--learning_rate", "--lr", type=real(0, above=True), default=learning_rate, help=text)
    add("--grad_clip", "--grad_clip_norm", type=real(0), default=1.0, help="largest gradient norm; 0: no clipping")
    advanced("--max_bad_steps", type=whole(1), default=10, help="stop after N non-finite steps in a row, all skipped")

    add = parser.add_argument_group("speed and memory").add_argument
    yes_no = argparse.BooleanOptionalAction
    precisions = ("auto", "no", "bf16", "fp16")
    shares = pattern(r"equal|auto|[1-9]\d{0,5}(,[1-9]\d{0,5})*", "equal, auto or one whole number per process, as 2,1")
    add("--mixed_precision", choices=precisions, default="auto", help="auto: bf16 where the GPU has it, else fp16")
    advanced("--auto_batch", action=yes_no, help="halve the batch until it fits the memory; left out: on GPUs only")
    text = "how GPUs share a step: equal, auto (by measured speed), or as 2,1 for one twice as fast as the other"
    advanced("--gpu_shares", type=shares, default="equal", help=text)
    add("--num_workers", type=whole(0), default=4, help="data loading processes PER GPU")
    add("--compile", action="store_true", help="torch.compile the model: slow first steps, faster later ones")
    add("--deterministic", action="store_true", help="the same bits at any number of processes of one kind; slower")
    text = "write a trace of steps A to B for ui.perfetto.dev"
    add("--profile", type=window, metavar="A:B", help=text)

    add = parser.add_argument_group("logging and launch").add_argument
    add("--log_every", "--summary_interval", type=whole(1), default=10, help="optimizer steps between log lines")
    text = "log to Weights & Biases, too"
    add("--wandb", "--wandb_project", metavar="PROJECT", nargs="?", const=Path(output_dir).name, help=text)
    add("--world_size", type=whole(1), help="with plain `python`: start N processes through torchrun")
    advanced(
        "--dist_timeout", type=whole(1), default=600, help="seconds after which a rank gives up on one that is stuck"
    )
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)


# --- the end ----------------------------------------------------------------------------------------------------------


def report(error: Exception) -> int:
    """Print the one line of an InputError or RunError (first process only); returns its exit code."""
    code = 2 if isinstance(error, InputError) else 1
    first = is_first_process()
    if first:
        print("error: " + " ".join(str(error).splitlines()), file=sys.stderr, flush=True)
    # A launcher ends all processes when the first has failed, so the one that says why must go first. srun then
    # returns the largest exit code: a process ended by SIGTERM would turn 2 into 143, a job stopped by its time limit.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    if not first:
        time.sleep(5)
    elif os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        # the others are not all here yet
        time.sleep(2)
    return code


def launch_workers(world_size: int | None) -> None:
    """Replace a plain `python script.py --world_size N` by torchrun with N processes of it."""
    if (world_size or 1) > 1 and "RANK" not in os.environ and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        command = [sys.executable, str(Path(__file__).with_name("torchrun.py")), "--standalone"]
        command += [f"--nproc_per_node={world_size}", *sys.argv]
        if os.name == "nt":
            # where execv would return to the prompt at once
            sys.exit(subprocess.call(command))
        os.execv(sys.executable, command)


def run_main(main: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> None:
    """Run `main(args)` and exit with its code; InputError and RunError become one line."""
    try:
        code = main(args) or 0
    except (InputError, RunError) as error:
        code = report(error)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        # all is written; torch 2.13's threads abort in one of some dozen shutdowns of Python
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
