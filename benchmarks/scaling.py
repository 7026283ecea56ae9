"""The guides' speed-up tables, measured on this machine: samples/s by the number of GPUs.

    python benchmarks/scaling.py --gpus 1,2,4,8 --script train_mimic_cxr.py --config configs/default_config.yaml
    python benchmarks/scaling.py --gpus 1,2 --script train.py --data data/demo/compressed_ad/search

All flags that --help does not list are the script's own. The batch of each GPU stays the same, as in the guides, so the
effective batch grows. Without GPUs it starts CPU processes, each with the same number of threads. Each number of GPUs
is one run of --steps optimizer steps in a folder that is deleted afterwards.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from gpu import SCRIPTS, Failed, environment, find_gpus, run_command, samples_per_s, training_lines

# A guide's number, and the speed-up over one GPU that it expects. Guides 0 and 3 have no such table.
GUIDES = {
    "train_mimic_cxr.py": ("guide 1", {1: 1.0, 2: 1.9, 4: 3.5, 8: 6.5}),
    "train_survival_distributed.py": ("guide 2", {1: 1.0, 2: 1.8, 4: 3.5, 8: 6.5}),
    "train.py": ("guide 4", {1: 1.0, 2: 1.85, 4: 3.6, 8: 6.5}),
}


def batch_of_all(flags: list[str], processes: int) -> list[str]:
    """The survival script's flags, whose --batch_size is that of all GPUs: as many samples for each GPU as given."""
    each = int(flags[flags.index("--batch_size") + 1]) if "--batch_size" in flags else 6
    return [*flags, "--batch_size", str(each * processes)]


def speed_ups(rates: dict[int, float], script: str) -> list[dict]:
    """A row for each number of GPUs: samples/s, speed-up over the smallest number, efficiency, the guide's figure."""
    fewest = min(rates)
    rows = []
    for gpus, rate in sorted(rates.items()):
        speed_up = rate / rates[fewest] * fewest
        guide = GUIDES.get(script, ("", {}))[1].get(gpus)
        row = {"gpus": gpus, "samples_per_s": rate, "speed_up": speed_up, "efficiency": speed_up / gpus, "guide": guide}
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpus", required=True, help="numbers of GPUs, such as 1,2,4,8")
    parser.add_argument("--script", choices=SCRIPTS.values(), required=True)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run")
    parser.add_argument("--warm_up", type=int, default=10, help="of these, the first that do not count")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    args, flags = parser.parse_known_args()
    if args.steps < 2 * args.warm_up:
        parser.error(f"--steps {args.steps}: at least twice --warm_up, {2 * args.warm_up}")
    if not all(word.isdigit() and int(word) for word in args.gpus.split(",")):
        parser.error(f"--gpus {args.gpus}: must be numbers such as 1,2,4,8")

    counts = sorted({int(word) for word in args.gpus.split(",")})
    there = len(find_gpus())
    kind = "GPUs" if there else "processes"
    if there and counts[-1] > there:
        print(f"this machine has {there} GPUs; larger numbers are left out", flush=True)
        counts = [count for count in counts if count <= there]
    if not counts:
        parser.error(f"--gpus {args.gpus}: this machine has {there}; give smaller numbers")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    rates = {}
    for count in counts:
        command = [sys.executable]
        if count > 1:
            command += ["utils/torchrun.py", "--standalone", f"--nproc_per_node={count}"]
        is_survival = args.script == "train_survival_distributed.py"
        command += [args.script, *(batch_of_all(flags, count) if is_survival else flags)]
        command += ["--max_steps", args.steps, "--log_every", args.warm_up, "--save_every", 0]
        # each process has the same share of the cores, whatever their number
        variables = environment(min(count, there)) | {"OMP_NUM_THREADS": str(max(1, cores // counts[-1]))}
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            try:
                run_command([*command, "--output_dir", run], Path(folder) / "log", variables, args.limit)
            except Failed as error:
                print(f"error: {args.script}, {count} {kind}: {error}", file=sys.stderr)
                return 1
            # the first line is of the warm-up
            lines = training_lines(run)[1:]
        if not lines:
            print(f"error: {args.script}: the data end before --steps; give more, or fewer steps", file=sys.stderr)
            return 1
        rates[count] = samples_per_s(lines)
        print(f"{count} {kind}: {rates[count]:.2f} samples/s", flush=True)

    rows = speed_ups(rates, args.script)
    print(f"{kind:>9}   samples/s  speed-up  efficiency  {GUIDES.get(args.script, ['no guide'])[0]:>8}")
    for row in rows:
        guide = f"{row['guide']:.2f}" if row["guide"] else "-"
        cells = f"{row['gpus']:>9}  {row['samples_per_s']:>10.2f}  {row['speed_up']:>8.2f}  {row['efficiency']:>10.0%}"
        print(f"{cells}  {guide:>8}")
    if args.script == "train.py":
        print("guide 4's figures are for 128, 128, 96 and 64 samples a GPU; here the batch of a GPU is kept")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
