"""Do two versions of this project compute the same, bit for bit? Tiny runs of train.py, by both trees.

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
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "train.py"
# A data set as small as can be.
SAMPLE_SIZE = "--streams 2 --steps 100"
# A wrong value, for its error line.
WRONG = "--tf_n_head 3"
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


def script_flags(data: Path, processes: int) -> list[str]:
    """The flags of 8 tiny steps with 2 evaluations; the global batch is the same for any number of processes."""
    return (
        f"--data {data} --tf_n_embd 16 --tf_n_layer 2 --tf_n_head 2 --encoder_n_layer 1 "
        f"--tf_dim_feedforward 32 --n_transit 20 --n_latent 4 --batch_size {8 // processes} --num_warmup_steps 2 "
        "--train_timesteps 8 --eval_interval 4 --eval_episodes 2 --val_episodes 2 --eval_seeds 1 "
        f"--num_workers 0 --log_every 1 --seed 3 --world_size {processes}"
    ).split()


def run_script(tree: Path, words: list[str], fails: bool = False) -> subprocess.CompletedProcess:
    """Run a tree's script. Raises RuntimeError where it fails and should not."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, SCRIPT, *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode and not fails:
        raise RuntimeError(f"{tree}: {' '.join(command)}\n{done.stderr[-2000:]}")
    return done


def print_flags(tree: Path) -> str:
    """What FLAGS prints for a tree's script."""
    command = [sys.executable, "-c", FLAGS, SCRIPT]
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


def differing(old_tree: Path, data: Path, out: Path) -> list[str]:
    """What of the runs, flags and error line differs between the trees."""
    wrong = []
    for processes in (1, 2):
        folders = []
        for name, tree in (("old", old_tree), ("new", ROOT)):
            run_folder = out / f"{name}_{processes}"
            run_script(tree, [*script_flags(data, processes), "--output_dir", str(run_folder)])
            folders.append(describe(run_folder))
        wrong += [f"{name} by {processes}" for name in folders[0] if folders[0][name] != folders[1][name]]

    # flags with their defaults and choices, and the line of a wrong value
    old_flags = print_flags(old_tree)
    if old_flags != print_flags(ROOT) or not old_flags:
        wrong.append("flags")
    words = [*script_flags(data, 1), *WRONG.split(), "--output_dir", str(out / "none")]
    errors = [run_script(tree, words, fails=True) for tree in (old_tree, ROOT)]
    if len({(done.returncode, done.stderr) for done in errors}) > 1 or not errors[0].returncode:
        wrong.append("error line")
    return wrong


def resumed_differs(stop_at: int, old_tree: Path, data: Path, out: Path) -> bool:
    """Whether a run begun by the old tree and resumed by this one has other lines than the old tree's own."""
    words = [*script_flags(data, 2), "--output_dir"]
    halves = out / "halves"
    run_script(old_tree, [*words, str(halves), "--max_steps", str(stop_at)])
    run_script(ROOT, [*words, str(halves), "--resume_from", "auto"])
    after = [[line for line in read_lines(folder) if line["step"] > stop_at] for folder in (out / "old_2", halves)]
    return after[0] != after[1] or not after[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old_tree", type=Path, help="another checkout of this project")
    options = parser.parse_args()
    old_tree = options.old_tree.resolve()
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder, "data"), Path(folder, "out")
        command = [sys.executable, "-m", "tools.sample_data", "compressed_ad", str(data), *SAMPLE_SIZE.split()]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

        # the same runs by both trees
        wrong = differing(old_tree, data, out)
        print(f"compressed_ad: {'equal' if not wrong else 'DIFFERS in ' + ', '.join(wrong)}", flush=True)

        # begun by one and resumed by the other
        differs = resumed_differs(5, old_tree, data, out)
        print(f"begun there and resumed here: {'DIFFERS' if differs else 'equal'}", flush=True)
    sys.exit(bool(wrong or differs))


if __name__ == "__main__":
    main()
