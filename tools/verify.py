"""Check whether two runs are bit-identical, or whether repeating some steps of a run gives the same bits.

python -m tools.verify runs/a runs/b                     compare metrics.jsonl, summary.json and model.safetensors
python -m tools.verify runs/a runs/b --tolerance 1e-6    allow relative differences of up to 1e-6
python -m tools.verify runs/a --steps 11:20              repeat steps 11 to 20 in a scratch folder, and compare the logs

Exit codes: 0 equal, 1 different, 2 invalid input. Timings are ignored. With --steps, run this tool in the folder where
the run was started, because data paths may be relative. The section "The same bits" in docs/running.md says when
repeated steps are bit-identical.
"""

import filecmp
import json
import math
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from utils.cli import InputError, Parser, read_config, real, run_main, step_range

ROOT = Path(__file__).resolve().parents[1]
TIMING_SUFFIXES = ("samples_per_s", "data_wait", "peak_memory_gb", "seconds")
# --wandb would log the repeated steps to the original run's Weights & Biases project
NOT_REPEATED = ("resume_from", "overwrite", "eval_only", "predict", "profile", "wandb")


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="two run folders to compare, or one with --steps")
    add("--tolerance", type=real(0), default=0.0, help="maximum relative difference that counts as equal")
    add("--steps", type=step_range, metavar="A:B", help="repeat these steps of one run")
    args = parser.parse(argv)
    if len(args.runs) != (1 if args.steps else 2):
        parser.error("give two run folders, or one with --steps A:B")
    return args


def find_file(folder: Path, name: str) -> Path:
    """Return folder / name. Raises InputError if the file is missing or a symbolic link: the folder is untrusted."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise InputError(f"{path}: no such file; give the folder of a run")
    return path


def read_log(folder: Path) -> list[dict]:
    path = find_file(folder, "metrics.jsonl")
    lines = []
    for row, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                raise ValueError
        except (ValueError, RecursionError):
            raise InputError(f"{path}:{row}: not a line of a run's log; resume the run, which mends it") from None
        lines.append({name: value for name, value in line.items() if not name.endswith(TIMING_SUFFIXES)})
    return lines


def read_results(folder: Path) -> list[dict]:
    if not (folder / "summary.json").is_file():
        return []
    path = find_file(folder, "summary.json")
    try:
        summary = json.loads(path.read_bytes())
        metrics = {name: value for name, value in summary.items() if "/" in name and not name.endswith(TIMING_SUFFIXES)}
        return [{"step": int(summary["steps"])} | {f"summary.json: {name}": metrics[name] for name in metrics}]
    except Exception:
        raise InputError(f"{path}: not a run's summary; resume the run, which writes it anew") from None


def relative_difference(a, b) -> float:
    if not isinstance(a, float) or not isinstance(b, float):
        return math.inf
    difference = abs(a - b) / (max(abs(a), abs(b)) or 1)
    return math.inf if math.isnan(difference) else difference


def compare_logs(one: list[dict], other: list[dict], tolerance: float) -> bool:
    first, largest = "", 0.0
    for row, (a, b) in enumerate(zip(one, other, strict=False), start=1):
        for name in a | b:
            x, y = a.get(name, "nothing"), b.get(name, "nothing")
            # repr distinguishes 0.0 from -0.0 and treats NaN as equal to NaN
            if repr(x) != repr(y):
                first = first or f"line {row}, step {a['step']}: {name} is {x!r} and {y!r}"
                largest = max(largest, relative_difference(x, y))
    if first:
        print(f"first difference: {first}\nlargest relative difference: {largest:.2e}")
    if [line["step"] for line in one] != [line["step"] for line in other]:
        print("other steps: had both runs the same global batch (--effective_batch_size) and --log_every?")
    if len(one) != len(other):
        print(f"one log is longer: {len(one)} and {len(other)} lines")
        return False
    if not first:
        print(f"equal to the bit: {len(one)} lines, {sum(map(len, one))} values")
    return not first or (tolerance > 0 and largest <= tolerance)


def same_weights(folders: list[Path], tolerance: float) -> bool:
    paths = [folder / "model.safetensors" for folder in folders]
    if not all(path.is_file() for path in paths):
        return True
    same = filecmp.cmp(*paths, shallow=False)
    print(f"model.safetensors: {'equal to the bit' if same else 'different bits'}")
    return same or tolerance > 0


def copy_checkpoint(folder: Path, before: int, copy: Path) -> None:
    from utils.checkpoint import read_run_id, read_seal

    run_id = read_run_id(folder)
    usable = {}
    for path in (*folder.glob("step_*.pt"), folder / "best.pt"):
        if path.is_file() and not path.is_symlink():
            seal = read_seal(path)
            if not seal.damage and seal.run_id == run_id and seal.step <= before:
                usable[seal.step] = path
    if not usable:
        raise InputError(
            f"{folder}: no intact checkpoint of step {before} or before; choose later steps, or begin at 1"
        )
    shutil.copyfile(usable[max(usable)], copy)


def repeat(folder: Path, first: int, last: int) -> tuple[list[dict], list[dict]]:
    """Repeat steps first..last of a run in a scratch folder; return the original and the new log lines of these steps.

    The run folder is untrusted: the new process gets only a copied checkpoint and the flags in args.yaml. The script's
    parser checks these flags.
    """
    flags = read_config(str(find_file(folder, "args.yaml")))
    scripts = {path.name: path for path in (*ROOT.glob("*.py"), *ROOT.glob("examples/*.py"))}
    name = str(flags.get("script"))
    if name not in scripts:
        raise InputError(f"{folder / 'args.yaml'}: no script {name!r} in this project; correct `script:` there")
    log = read_log(folder)
    lines = [line for line in log if first <= line["step"] <= last]
    if not lines or log[-1]["step"] < last:
        raise InputError(f"{folder}: its log has no steps {first} to {last}; choose others, at least --log_every apart")

    with tempfile.TemporaryDirectory(prefix="verify_") as scratch:
        scratch = Path(scratch)
        # the flags in `command` take precedence over this file
        config = scratch / "flags.json"
        config.write_text(json.dumps({flag: flags[flag] for flag in flags if flag not in NOT_REPEATED}))
        command = [sys.executable, scripts[name], "--config", config]
        command += ["--output_dir", scratch / "run", "--max_steps", str(last)]
        if first > 1:
            copy_checkpoint(folder, first - 1, scratch / "checkpoint.pt")
            command += ["--resume_from", scratch / "checkpoint.pt"]
        if code := subprocess.run(command).returncode:
            # the script has already printed why it failed
            sys.exit(code)
        repeated = read_log(scratch / "run")
    # --max_steps forces a log line and an evaluation at the last step; drop lines that the original log lacks
    kinds = [line.keys() for line in lines if line["step"] == last]
    again = [line for line in repeated if line["step"] < last or line.keys() in kinds]
    return lines, [line for line in again if line["step"] >= first]


def main(args: Namespace) -> int:
    folders = [Path(run) for run in args.runs]
    if args.steps:
        first, last = map(int, args.steps.split(":"))
        return 0 if compare_logs(*repeat(folders[0], first, last), args.tolerance) else 1
    logs, results = ([read(folder) for folder in folders] for read in (read_log, read_results))
    if all(results):
        logs = [log + result for log, result in zip(logs, results, strict=True)]
    equal = [compare_logs(*logs, args.tolerance), same_weights(folders, args.tolerance)]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    run_main(main, parse_args())
