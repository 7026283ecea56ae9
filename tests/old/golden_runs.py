"""Do two versions of this project compute the same, bit for bit? Tiny runs of the script on old/, by both trees.

    git worktree add ../before <commit>
    python tests/old/golden_runs.py ../before            # minutes on two cores

Both trees run on the same data, by 1 and 2 processes, in fp32. Compared are metrics.jsonl and summary.json but for
times, the files of the run folder, the keys of a checkpoint, the flags with their defaults, and one error line. Then a
run is begun by the old tree and resumed by this one: the lines that follow must be those of the old tree's
uninterrupted run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("compressed_ad",)
SCRIPTS = {
    "compressed_ad": "train.py",
}
# The flag of each script that names the run folder.
RUN_FOLDER_FLAGS = {
    "compressed_ad": "--output_dir",
}
# Data sets as small as can be.
SAMPLE_SIZES = {
    "compressed_ad": "--streams 2 --steps 100",
}
# A wrong value of each script, for its error line.
WRONG = {
    "compressed_ad": "--tf_n_head 3",
}
# What depends on the clock or the machine.
TIMES = ("samples_per_s", "data_wait", "peak_memory_gb", "tflops", "mfu", "seconds")
# Parts of a checkpoint whose keys are compared, too.
PARTS = ("state", "run", "split", "log", "settings")
# Prints the flags of the script that it is given, with their other names, defaults and choices.
FLAGS = """
import importlib.util, json, sys
sys.path.insert(0, ".")
actions = {}
import argparse
real = argparse.ArgumentParser.parse_known_args
def note(parser, *rest):
    # the first parser looks for --config alone
    if len(parser._actions) < 5:
        return real(parser, *rest)
    for action in parser._actions:
        choices = list(action.choices) if action.choices else None
        actions[action.dest] = [sorted(action.option_strings), repr(action.default), choices, str(action.nargs)]
    print(json.dumps(actions))
    sys.exit(0)
argparse.ArgumentParser.parse_known_args = note

# the script as a module that is not __main__
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
script = importlib.util.module_from_spec(spec)
sys.modules["script"] = script
spec.loader.exec_module(script)
script.parse_args([])
"""


def task_flags(task: str, data: Path, processes: int) -> list[str]:
    """The flags of a tiny run; its global batch is the same for any number of processes."""
    folder = data / task
    flags = {
        # 8 steps, 2 evaluations
        "compressed_ad": f"--data {folder} --tf_n_embd 16 --tf_n_layer 2 --tf_n_head 2 --encoder_n_layer 1 "
        f"--tf_dim_feedforward 32 --n_transit 20 --n_latent 4 --batch_size {8 // processes} --num_warmup_steps 2 "
        "--train_timesteps 8 --eval_interval 4 --eval_episodes 2 --val_episodes 2 --eval_seeds 1",
    }
    words = f"{flags[task]} --num_workers 0 --log_every 1 --seed 3 --world_size {processes}".split()
    return words


def run_script(tree: Path, task: str, words: list[str], fails: bool = False) -> subprocess.CompletedProcess:
    """Run a tree's script. Raises RuntimeError where it fails and should not."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, SCRIPTS[task], *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode and not fails:
        raise RuntimeError(f"{tree}: {' '.join(command)}\n{done.stderr[-2000:]}")
    return done


def print_flags(tree: Path, task: str) -> str:
    """What FLAGS prints for a tree's script."""
    command = [sys.executable, "-c", FLAGS, SCRIPTS[task]]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True).stdout


def without_times(record: dict) -> dict:
    return {name: value for name, value in record.items() if not any(word in name for word in TIMES)}


def read_lines(run_folder: Path) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    return [without_times(json.loads(line)) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def describe(run_folder: Path) -> dict:
    """All of a run folder that must not change."""
    import torch

    files = [path.relative_to(run_folder).as_posix() for path in run_folder.rglob("*") if path.is_file()]
    checkpoint = torch.load(run_folder / "last.pt", weights_only=True)
    keys = {part: sorted(checkpoint[part]) for part in PARTS if part in checkpoint}
    return {
        "lines": read_lines(run_folder),
        "summary": without_times(json.loads((run_folder / "summary.json").read_text())),
        "files": sorted(name for name in files if "tfevents" not in name),
        "checkpoint": sorted(checkpoint),
        "parts": keys,
    }


def differing(task: str, old_tree: Path, data: Path, out: Path) -> list[str]:
    """What of a task's runs, flags and error line differs between the trees."""
    wrong = []
    for processes in (1, 2):
        folders = []
        for name, tree in (("old", old_tree), ("new", ROOT)):
            run_folder = out / f"{name}_{task}_{processes}"
            words = [*task_flags(task, data, processes), RUN_FOLDER_FLAGS[task], str(run_folder)]
            run_script(tree, task, words)
            folders.append(describe(run_folder))
        wrong += [f"{name} by {processes}" for name in folders[0] if folders[0][name] != folders[1][name]]

    # flags with their defaults and choices, and the line of a wrong value
    old_flags = print_flags(old_tree, task)
    if old_flags != print_flags(ROOT, task) or not old_flags:
        wrong.append("flags")
    words = [*task_flags(task, data, 1), *WRONG[task].split(), RUN_FOLDER_FLAGS[task], str(out / "none")]
    errors = [run_script(tree, task, words, fails=True) for tree in (old_tree, ROOT)]
    if len({(done.returncode, done.stderr) for done in errors}) > 1 or not errors[0].returncode:
        wrong.append("error line")
    return wrong


def resumed_differs(task: str, stop_at: int, old_tree: Path, data: Path, out: Path) -> bool:
    """Whether a run begun by the old tree and resumed by this one has other lines than the old tree's own."""
    words = [*task_flags(task, data, 2), RUN_FOLDER_FLAGS[task]]
    whole = out / f"whole_{task}"
    halves = out / f"halves_{task}"
    run_script(old_tree, task, [*words, str(whole)])
    run_script(old_tree, task, [*words, str(halves), "--max_steps", str(stop_at)])
    run_script(ROOT, task, [*words, str(halves), "--resume_from", "auto"])
    after = [[line for line in read_lines(folder) if line["step"] > stop_at] for folder in (whole, halves)]
    return after[0] != after[1] or not after[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old_tree", type=Path, help="another checkout of this project")
    options = parser.parse_args()
    old_tree = options.old_tree.resolve()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        out = Path(folder) / "out"

        # the same runs by both trees
        for task in TASKS:
            command = [sys.executable, "-m", "tools.sample_data", task, str(data / task), *SAMPLE_SIZES[task].split()]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            wrong = differing(task, old_tree, data, out)
            print(f"{task}: {'equal' if not wrong else 'DIFFERS in ' + ', '.join(wrong)}", flush=True)
            failed += bool(wrong)
            shutil.rmtree(out)

        # begun by one and resumed by the other
        wrong = resumed_differs("compressed_ad", 4, old_tree, data, out)
        print(f"begun there and resumed here: {'DIFFERS' if wrong else 'equal'}", flush=True)
        failed += wrong
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
