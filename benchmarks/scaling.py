"""The guides' speed-up tables, measured on this machine: samples/s by the number of GPUs.

    python benchmarks/scaling.py --gpus 1,2,4,8 --script train_mimic_cxr.py --config configs/default_config.yaml
    python benchmarks/scaling.py --gpus 1,2 --script train.py --data data/demo/compressed_ad/search --json scaling.json

All flags that are not listed by --help are the script's own. The batch of each GPU stays the same, as in the guides, so
the effective batch grows. Without GPUs it starts CPU processes, each with the same number of threads. Each number of
GPUs is one run of --steps optimizer steps in a folder that is deleted afterwards.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from gpu import Failed, environment, find_gpus, last_words, mean_rate, read_records, run_process
from gpu_sizes import OUT_FLAG, ROOT, SCRIPTS


class Guide(NamedTuple):
    """A guide's number, and the speed-up over one GPU that it expects, by the number of GPUs."""

    number: int | None
    speed_ups: dict[int, float]


# Guides 0 and 3 have no such table.
GUIDES = {
    "train_mimic_cxr.py": Guide(1, {1: 1.0, 2: 1.9, 4: 3.5, 8: 6.5}),
    "train_survival_distributed.py": Guide(2, {1: 1.0, 2: 1.8, 4: 3.5, 8: 6.5}),
    "train.py": Guide(4, {1: 1.0, 2: 1.85, 4: 3.6, 8: 6.5}),
}

# Guide 4's table takes 128, 128, 96 and 64 samples a GPU.
NOTES = {"train.py": "guide 4's figures are for 128, 128, 96 and 64 samples a GPU; here the batch of a GPU is kept"}


def numbers(text: str) -> list[int]:
    """Parse 1,2,4 into a list. Raises ArgumentTypeError for what is no list of positive whole numbers."""
    counts = []
    for part in text.split(","):
        count = int(part) if part.isdigit() else 0
        if not count:
            raise argparse.ArgumentTypeError(f"{text!r} is no list such as 1,2,4,8")
        counts.append(count)
    return counts


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Returns (own arguments, the script's flags)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--gpus", type=numbers, required=True, help="numbers of GPUs, such as 1,2,4,8")
    parser.add_argument("--script", choices=SCRIPTS.values(), required=True)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run (default 40)")
    parser.add_argument("--warm_up", type=int, default=10, help="of these, the first that do not count (default 10)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    args, flags = parser.parse_known_args()
    if args.steps < 2 * args.warm_up:
        parser.error(f"--steps {args.steps}: at least twice --warm_up, {2 * args.warm_up}")
    return args, flags


def total_batch(script: str, flags: list[str], processes: int) -> list[str]:
    """The script's flags for so many processes; survival's --batch_size counts all of them together."""
    if script != "train_survival_distributed.py":
        return flags
    if "--batch_size" not in flags:
        return [*flags, "--batch_size", str(6 * processes)]
    flags = list(flags)
    place = flags.index("--batch_size") + 1
    flags[place] = str(int(flags[place]) * processes)
    return flags


def measure(args: argparse.Namespace, flags: list[str], processes: int, threads: int) -> float:
    """Samples/s of all processes together. Raises Failed with the script's last words."""
    task = {script: task for task, script in SCRIPTS.items()}[args.script]
    command = [sys.executable]
    if processes > 1:
        command += [ROOT / "utils/torchrun.py", "--standalone", f"--nproc_per_node={processes}"]
    command += [ROOT / args.script, *total_batch(args.script, flags, processes)]
    command += ["--max_steps", args.steps, "--log_every", args.warm_up, "--save_every", "0"]
    variables = environment(processes, on_cpu=False)
    variables["OMP_NUM_THREADS"] = str(threads)

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        run_folder = Path(folder) / "run"
        command += [OUT_FLAG[task], run_folder]
        ended = run_process(command, log, args.limit, variables, Path.cwd())
        if ended.code:
            raise Failed(f"{processes} processes: exit code {ended.code}: {last_words(log)}")
        records = read_records(run_folder / "metrics.jsonl")

    # The first log line is of the warm-up.
    training = [record for record in records if "train/loss" in record]
    if len(training) < 2:
        raise Failed(f"{processes} processes: only {len(training)} log lines; give more data or fewer --steps")
    return mean_rate(training[1:])


def speed_ups(rates: dict[int, float], script: str) -> list[dict]:
    """One row for each number of GPUs: samples/s, speed-up over the smallest number, efficiency, the guide's figure."""
    fewest = min(rates)
    guide = GUIDES.get(script, Guide(None, {}))
    rows = []
    for gpus, rate in sorted(rates.items()):
        speed_up = rate / rates[fewest] * fewest
        row = {
            "gpus": gpus,
            "samples_per_s": rate,
            "speed_up": speed_up,
            "efficiency": speed_up / gpus,
            "guide": guide.number,
            "guide_speed_up": guide.speed_ups.get(gpus),
        }
        rows.append(row)
    return rows


def table(rows: list[dict], kind: str) -> str:
    """The rows beside the guide's figures."""
    guide = rows[0]["guide"]
    title = "-" if guide is None else f"guide {guide}"
    lines = [f"{kind:>9}  {'samples/s':>10}  {'speed-up':>8}  {'efficiency':>10}  {title:>8}"]
    for row in rows:
        expected = "-" if row["guide_speed_up"] is None else f"{row['guide_speed_up']:.2f}"
        cells = f"{row['gpus']:>9}  {row['samples_per_s']:>10.2f}  {row['speed_up']:>8.2f}"
        lines.append(f"{cells}  {row['efficiency']:>10.0%}  {expected:>8}")
    return "\n".join(lines)


def cores() -> int:
    """CPU cores that this process may use; 1 where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def measure_all(args: argparse.Namespace, flags: list[str], counts: list[int], kind: str) -> dict[int, float]:
    """Samples/s of each number of GPUs or processes. Raises Failed and TimeoutError."""
    # Each process has the same share of the cores, whatever their number.
    threads = max(1, cores() // max(counts))
    rates = {}
    for count in counts:
        rates[count] = measure(args, flags, count, threads)
        print(f"{count} {kind}: {rates[count]:.2f} samples/s", flush=True)
    return rates


def main() -> int:
    args, flags = parse_args()
    there = len(find_gpus())
    kind = "GPUs" if there else "processes"
    counts = [count for count in args.gpus if count <= there or not there]
    for count in sorted(set(args.gpus) - set(counts)):
        print(f"{count} GPUs: left out, this machine has {there}", flush=True)
    if not counts:
        print(f"error: --gpus: this machine has {there}; give smaller numbers", file=sys.stderr)
        return 2

    try:
        rates = measure_all(args, flags, counts, kind)
    except (Failed, TimeoutError) as error:
        print(f"error: {args.script}: {error}", file=sys.stderr)
        return 1

    # The table is written to a file too where one is asked for.
    rows = speed_ups(rates, args.script)
    print(table(rows, kind))
    if args.script in NOTES:
        print(NOTES[args.script])
    if args.json:
        text = json.dumps(rows, indent=1)
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
