"""The command line of train.py: common flags, --config files, value checks, and how a run ends.

Light on purpose (no torch): `--help` and a mistyped flag answer at once.
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import re
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from utils.cli import InputError, RunError

# How many values a config file may stand for.
MOST_VALUES = 100_000


def is_first_process() -> bool:
    """True on rank 0, also before the process group exists, and where the rank cannot be read."""
    rank = os.environ.get("RANK")
    if not rank and "SLURM_STEP_NUM_TASKS" in os.environ:
        rank = os.environ.get("SLURM_PROCID")
    return re.fullmatch("0*[1-9][0-9]*", rank or "0") is None


def environment_number(name: str, low: int, high: int) -> int:
    """The whole number in an environment variable that a launcher has set. Raises InputError for anything else."""
    text = os.environ.get(name, "")
    if re.fullmatch("0|[1-9][0-9]{0,9}", text) is None or not low <= int(text) <= high:
        raise InputError(f"{name} must be a whole number from {low} to {high}, not {text!r}")
    return int(text)


# --- types of arguments -----------------------------------------------------------------------------------------------


def whole(low: int) -> Callable[[str], int]:
    """argparse type: a whole number >= low."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {low}, not {text!r}")
        return value

    return parse


def seed_number(text: str) -> int:
    """argparse type: a whole number of 64 bits, negative ones included."""
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not -(2**63) <= value < 2**64:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise argparse.ArgumentTypeError(f"must be a whole number from -2^63 to 2^64 - 1, not {shown!r}")
    return value


def step_range(text: str) -> str:
    """argparse type: `A:B`, the first and the last of at most 100 optimizer steps."""
    first, _, last = text.partition(":")
    valid = re.fullmatch("[0-9]{1,18}:[0-9]{1,18}", text) is not None
    if not valid or not 1 <= int(first) <= int(last) < int(first) + 100:
        reason = "must be the first and the last of at most 100 steps, as 20:25 (in a YAML file in quotes)"
        raise argparse.ArgumentTypeError(f"{reason}, not {text!r}")
    return text


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """argparse type: a finite number in [low, high], or in (low, high] with `above`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            limits = f"above {low:g}" if above else f"at least {low:g}"
            if high < math.inf:
                limits += f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be a number {limits}, not {text!r}")
        return value

    return parse


# --- the parser -------------------------------------------------------------------------------------------------------


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults in the help, where there is one, and the examples as they stand."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """ArgumentParser that reports a mistake as one line, from one process, with exit code 2.

    doc: a script's docstring, whose first line describes it and whose rest, with the commands, ends the help.
    """

    def __init__(self, doc: str | None = None, **kwargs):
        if doc:
            description, _, examples = doc.partition("\n")
            kwargs |= {"description": description, "epilog": "examples:\n" + examples.strip("\n")}
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)

    def parse_args(self, args=None, namespace=None):
        parsed, extra = self.parse_known_args(args, namespace)
        if extra:
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(extra[0].split("=")[0], flags, n=1)
            advice = f", nearest is {near[0]}" if near else ""
            self.error(f"unknown argument {extra[0]!r}{advice}")

        # An empty word is a variable that a job script never set; as a path it would be the working folder.
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            if value == "" or (isinstance(value, list) and "" in value):
                name = "/".join(action.option_strings) or action.dest
                self.error(f"argument {name}: must not be empty")
        return parsed

    def error(self, message: str):
        # A flag that has several names is told by one.
        message = re.sub(r"^argument (--[\w-]+)(/--[\w-]+)+:", r"argument \1:", message)
        if is_first_process():
            print(f"error: {message}; see --help", file=sys.stderr)
        sys.exit(2)


def add_common_arguments(parser: argparse.ArgumentParser, also: dict[str, str] | None = None) -> None:
    """Add the flags that every script has. also: {flag: a guide's name for it}."""
    _add_run_arguments(parser)
    _add_speed_arguments(parser)
    _add_safety_arguments(parser)

    add = parser.add_argument_group("logging").add_argument
    add("--log_every", type=whole(1), default=10, help="optimizer steps between log lines")
    add("--wandb", action="store_true", help="log to Weights & Biases too (WANDB_MODE=offline needs no account)")
    add("--wandb_project", default="medical-multi-gpu", help="W&B project name")

    text = "profile optimizer steps A to B: traces and a table in the run folder's profile/"
    add("--profile", type=step_range, metavar="A:B", help=text)

    add = parser.add_argument_group("launch").add_argument
    text = "with plain `python`: start so many processes (one per GPU) through torchrun; launchers set it by themselves"
    add("--world_size", type=whole(1), help=text)
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)

    # A guide's own name is another name of the same flag.
    for name, other in (also or {}).items():
        action = parser._option_string_actions[f"--{name}"]
        action.option_strings.append(f"--{other}")
        parser._option_string_actions[f"--{other}"] = action


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    add("--config", metavar="FILE", help="YAML or JSON file that sets any flag; the command line wins over it")
    add("--seed", type=seed_number, default=0, help="initial weights, sample order, and all else that is drawn")
    text = "stop after so many optimizer steps in all; 0: the whole training"
    add("--max_steps", type=whole(0), default=0, help=text)
    text = "auto: go on from the output folder's newest intact checkpoint, or start; PATH: a checkpoint or run folder"
    add("--resume_from", metavar="auto|PATH", help=text)
    add("--overwrite", action="store_true", help="delete the run in the output folder and start afresh")
    add("--eval_only", action="store_true", help="no training: evaluate --resume_from, or best.pt of the run")


def _add_speed_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("speed and memory").add_argument
    text = "auto: bf16 on GPUs that have it, fp16 on older, no on CPU; no: fp32, TF32 off"
    add("--mixed_precision", choices=("auto", "no", "bf16", "fp16"), default="auto", help=text)
    text = "batches per GPU summed into one step; on OOM double it and halve the batch size, the result stays the same"
    add("--gradient_accumulation_steps", type=whole(1), default=1, help=text)
    text = "samples of a step over ALL GPUs, however many: accumulation follows, batch size is the most PER GPU at once"
    add("--effective_batch_size", type=whole(1), metavar="N", help=text)
    text = "fit the batch to memory, the effective one stays; left out: on GPUs, not on CPU"
    add("--auto_batch", action=argparse.BooleanOptionalAction, help=text)
    text = "data loading processes PER GPU; 0: the training process itself"
    add("--num_workers", type=whole(0), default=4, help=text)

    # How the model is run.
    add("--compile", action="store_true", help="torch.compile the model: slow first steps, faster later ones")
    text = "the same bits in each run on the same GPUs, slower; see docs/determinism.md"
    add("--deterministic", action="store_true", help=text)
    text = "no training: print the memory and FLOPs of a step; needs no GPU, data or weights"
    add("--rehearse", action="store_true", help=text)
    text = "with --rehearse: GiB that the GPU reports; left out: this machine's, else 80"
    add("--gpu_memory", type=number(0, above=True), metavar="GIB", help=text)


def _add_safety_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("safety").add_argument
    add("--grad_clip", type=number(0), default=1.0, help="largest gradient norm; 0: no clipping")
    text = "stop after so many steps in a row with a non-finite loss or gradient (each is skipped)"
    add("--max_bad_steps", type=whole(1), default=10, help=text)
    text = "optimizer steps between checkpoints, besides those at epoch ends or evaluations; 0: only those"
    add("--save_every", type=whole(0), default=500, help=text)
    add("--keep_last", type=whole(1), default=2, help="checkpoints kept beside best.pt")
    text = "steps between checks that all ranks hold the same weights, as before each checkpoint; 0: none"
    add("--check_every", type=whole(0), default=500, help=text)
    text = "seconds after which ranks give up on one that is dead or stuck and end the job"
    add("--dist_timeout", type=whole(1), default=600, help=text)


# --- config files -----------------------------------------------------------------------------------------------------


def without_comments(text: str) -> str:
    """JSON without the // comments outside its strings; lines and columns stay where they are."""
    return re.sub(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*', lambda found: found[1] or "", text)


def check_aliases(path: str, root) -> None:
    """InputError when a few lines of YAML stand for more than 100 000 values, by aliases of aliases."""
    waiting = [root]
    count = 0
    while waiting:
        value = getattr(waiting.pop(), "value", None)
        count += 1
        if count > MOST_VALUES:
            raise InputError(f"{path}: its aliases stand for more than {MOST_VALUES} values; write them out")
        if isinstance(value, list):
            for entry in value:
                waiting.extend(entry if isinstance(entry, tuple) else [entry])


def read_config(path: str) -> dict:
    """A YAML or JSON (with // comments) mapping. Raises InputError naming file and line."""
    try:
        values = _parse_config(path)
    except OSError as error:
        reason = f"cannot read the config ({error.strerror})"
        raise InputError(f"{path}: {reason}; {_nearest_config(path, error)}") from None
    except RecursionError:
        raise InputError(f"{path}: nested too deeply for a config; correct the file") from None

    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold `flag: value` lines, not a {type(values).__name__}; correct the file")
    return values


def _parse_config(path: str):
    """What a config file stands for. Raises InputError for what is not valid, OSError and RecursionError."""
    import yaml

    kind = "JSON" if path.endswith(".json") else "YAML"
    try:
        text = Path(path).read_text(encoding="utf-8")
        if kind == "JSON":
            return json.loads(without_comments(text))
        check_aliases(path, yaml.compose(text, yaml.SafeLoader))
        return yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); correct the file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise InputError(f"{path}{line}: not valid YAML; correct the file") from None
    except ValueError as error:
        # A number of thousands of digits, or a 31st of February.
        raise InputError(f"{path}: not valid {kind} ({error}); correct the file") from None


def _nearest_config(path: str, error: OSError) -> str:
    """What to do about a config that cannot be read: the name of one that is there, if it is like this one."""
    shipped = Path(__file__).resolve().parents[1] / "configs"
    names = [file.name for file in shipped.glob("*.*")]
    near = difflib.get_close_matches(Path(path).name, names, n=1)
    if near and isinstance(error, FileNotFoundError):
        return f"there is configs/{near[0]}"
    return "check --config"


def check_config_value(path: str, action: argparse.Action, value):
    """`value` as the command line would have parsed it; InputError names file, key and what is allowed."""

    def wrong(reason: str) -> InputError:
        return InputError(f"{path}: {action.dest}: {reason}; correct the file")

    if value is None and action.default is None:
        return None
    if isinstance(action, argparse._StoreConstAction | argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise wrong(f"must be true or false, not {value!r}")
        return value

    # A list where the flag takes several words, and as long as the flag wants it.
    exactly = action.nargs if isinstance(action.nargs, int) else None
    many = exactly is not None or action.nargs in ("+", "*")
    if many != isinstance(value, list) or (exactly is not None and len(value) != exactly):
        raise wrong(f"must be {'a list' if many else 'a single value'}, not {value!r}")
    try:
        if many:
            return [_check_item(action, item) for item in value]
        return _check_item(action, value)
    except argparse.ArgumentTypeError as error:
        raise wrong(str(error)) from None


def _check_item(action: argparse.Action, item):
    """One value of a config as the command line would have parsed it. Raises ArgumentTypeError."""
    plain = isinstance(item, int | float | str) and not isinstance(item, bool)
    if not plain or (action.type is None and not isinstance(item, str)):
        raise argparse.ArgumentTypeError(f"wrong type {type(item).__name__} ({item!r})")
    if action.type is not None:
        try:
            item = action.type(str(item))
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid value {item!r}") from None
    if action.choices is not None and item not in action.choices:
        choices = ", ".join(str(choice) for choice in action.choices)
        raise argparse.ArgumentTypeError(f"{item!r} is not one of {choices}")
    return item


def parse_arguments(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse with the precedence defaults < --config file < command line; mistakes end the process with code 2."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config")
    try:
        path = finder.parse_known_args(argv)[0].config
    except argparse.ArgumentError:
        # `--config` has no value: the full parser words the error.
        path = None
    if path:
        try:
            _set_defaults_from(path, parser)
        except RecursionError:
            end_with(InputError(f"{path}: nested too deeply for a config; correct the file"))
        except InputError as error:
            end_with(error)

    # What must be done before torch is imported is done here.
    args = parser.parse_args(argv)
    if getattr(args, "effective_batch_size", None):
        from old.batch_utils import check_accumulation

        check_accumulation(parser, args, argv)
    if "ELASTIC_RANKS" in os.environ and hasattr(args, "effective_batch_size"):
        from old.elastic_utils import check_elastic

        check_elastic(parser, args)
    if getattr(args, "rehearse", False):
        prepare_rehearsal(parser, args)
    if getattr(args, "deterministic", False):
        ask_for_fixed_order()
    return args


def _set_defaults_from(path: str, parser: argparse.ArgumentParser) -> None:
    """The values of a config file become the parser's defaults. Raises InputError."""
    actions = {}
    for action in parser._actions:
        if action.option_strings and action.dest != "help":
            actions[action.dest] = action

    # A key may be a flag's other name too.
    for action in list(actions.values()):
        for flag in action.option_strings:
            name = flag.removeprefix("--")
            if action.nargs != 0 and "-" not in name:
                actions[name] = action

    given: dict[str, str] = {}
    for key, value in read_config(path).items():
        if key not in actions or actions[key].dest in ("config", "local_rank"):
            near = difflib.get_close_matches(str(key), actions, n=1)
            advice = f"did you mean {near[0]!r}?" if near else "see --help"
            raise InputError(f"{path}: unknown key {key!r}; {advice}")
        action = actions[key]
        if action.dest in given:
            raise InputError(f"{path}: {key} means the same as {given[action.dest]}; remove one")
        given[action.dest] = key
        parser.set_defaults(**{action.dest: check_config_value(path, action, value)})
        action.required = False


# --- before torch is imported -----------------------------------------------------------------------------------------


def prepare_rehearsal(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """--rehearse: load what torch must find when it is imported. Mistakes end the process with one line and code 2."""
    from old.fake_cuda_utils import load_before_torch

    if args.eval_only:
        parser.error("--rehearse is about a training step and goes without --eval_only")
    if not is_first_process():
        # Of a launcher's processes one tells.
        sys.exit(0)
    try:
        load_before_torch()
    except InputError as error:
        end_with(error)


def ask_for_fixed_order() -> None:
    """The part of --deterministic that libraries read from the environment when they start, so before torch does."""
    # cuBLAS takes a workspace of its own for each stream; torch accepts these two settings.
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # The switches of NVLink add up in varying order, so NCCL does without them.
    os.environ["NCCL_NVLS_ENABLE"] = "0"


# --- where values come from -------------------------------------------------------------------------------------------


def value_sources(parser: argparse.ArgumentParser, args: argparse.Namespace, argv: list[str] | None) -> dict[str, str]:
    """{name: "command line", the --config file's name, or "default"} of every argument, for a banner."""
    words = sys.argv[1:] if argv is None else argv
    flags = {word.split("=")[0] for word in words}
    in_file = read_config(args.config) if args.config else {}

    sources = {}
    for action in parser._actions:
        names = [action.dest, *(flag[2:] for flag in action.option_strings)]
        if flags.intersection(action.option_strings):
            sources[action.dest] = "command line"
        elif any(name in in_file for name in names):
            sources.setdefault(action.dest, Path(args.config).name)
        else:
            sources.setdefault(action.dest, "default")
    return sources


def asked_values(args: argparse.Namespace) -> dict:
    """{flag: value} of the merged arguments."""
    own = ("config", "local_rank", "source")
    return {name: value for name, value in vars(args).items() if name not in own}


def save_args(path: Path, args: argparse.Namespace) -> None:
    """Write the merged arguments as YAML that --config reads again."""
    import yaml

    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(yaml.safe_dump(asked_values(args)), encoding="utf-8")
    os.replace(temporary, path)


# --- the end ----------------------------------------------------------------------------------------------------------


def record_failure(line: str, text: str = "", path: str = "") -> None:
    """Leave the reason why a process ends where torchrun's report looks for it (error_file).

    text: a traceback. path: the error file, this process's without one.
    """
    path = path or os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path:
        more = {"py_callstack": text or line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": line, "extraInfo": more}}, file)


def end_with(error: Exception) -> None:
    """Print the one line of an InputError or RunError (first process only) and leave with its exit code."""
    record_failure("error: " + " ".join(str(error).splitlines()))
    if is_first_process():
        print("error: " + " ".join(str(error).splitlines()), file=sys.stderr, flush=True)
    drop_unread_output()
    sys.exit(2 if isinstance(error, InputError) else 1)


def drop_unread_output() -> bool:
    """Whether nobody reads standard output any more, as behind `| head`; what is left to be written is then dropped."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        unread = bool(poll.poll(0))
    except (AttributeError, OSError, ValueError):
        # Windows has no poll, and a test's output no file
        return False
    if unread:
        # or the interpreter would try once more, and complain
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    return unread


def run_main(main: Callable[[argparse.Namespace], int | None], args: argparse.Namespace) -> None:
    """Run `main(args)` and exit with its code; InputError and RunError become one line (rank 0) and codes 2 and 1.

    Where nobody reads its output any more it ends without a word, with the code of SIGPIPE.
    """
    from old.stop_utils import StopWatch

    try:
        with StopWatch():
            code = main(args)
        sys.stdout.flush()
    except (InputError, RunError) as error:
        end_with(error)
    except BrokenPipeError:
        # another pipe, such as a worker's, is a fault
        if not drop_unread_output():
            raise
        sys.exit(141)
    except KeyboardInterrupt:
        # This is before the training loop, which saves and ends by itself.
        sys.stderr.write("interrupted\n")
        os._exit(130)
    sys.exit(code or 0)
