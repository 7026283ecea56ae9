"""Repeats a part of a run and compares every number, or finds where two runs part; the run itself is not touched.

    python -m old.verify runs/demo/compressed_ad                       # from the last checkpoint but one to the newest
    python -m old.verify runs/demo/compressed_ad --steps 100:200       # steps 101 to 200, from the checkpoint before
    python -m old.verify runs/demo/compressed_ad --world_size 1        # by another number of processes: within 1e-5
    python -m old.verify runs/demo/compressed_ad -- --data /copy       # flags behind -- go to the training script
    python -m old.verify runs/first runs/second                        # two runs of the same flags

Exit code 0: equal to the bit, or within 1e-5 where processes, versions or device have changed. 1: the first step and
number that differs. 2: it could not be compared.
"""

import argparse
import signal
import sys

from old.cli_utils import InputError, Parser, RunError, end_with, whole


def window(text: str) -> tuple[int | None, int | None]:
    """argparse type: "A:B", of which either may be left out."""
    first, colon, last = text.partition(":")
    parts = [int(part) if part.isdigit() else None for part in (first, last)]
    given = [part for part in parts if part is not None]
    if not colon or len(given) != bool(first) + bool(last) or sorted(set(given)) != given:
        raise argparse.ArgumentTypeError(f"must be A:B with whole numbers and A before B, not {text!r}")
    return parts[0], parts[1]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; what stands behind -- is args.flags."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", help="run folder")
    add("other", nargs="?", help="another run folder, to be compared with the first; nothing is repeated then")
    text = "repeat from after step A to after step B; left out: from the checkpoint before the newest to the newest"
    add("--steps", type=window, default=(None, None), metavar="A:B", help=text)
    text = "repeat with so many processes and the same global batch; left out: as many as the run had"
    add("--world_size", type=whole(1), help=text)
    add("--test", action="store_true", help="also repeat the test that ends a run")
    add("--keep", action="store_true", help="keep the scratch folder with the repeated run, and say where it is")
    args = parser.parse_args(own)
    args.flags = argv[len(own) + 1 :]
    if args.other and (args.world_size or args.test or args.keep or args.flags):
        parser.error("two run folders go with --steps alone")
    return args


if __name__ == "__main__":
    # before torch is imported: --help and a mistyped flag answer at once
    ARGS = parse_args(sys.argv[1:])

import shutil
import tempfile
import time
from pathlib import Path

from old.replay_utils import Replay, plan_replay, replay
from old.verify_utils import (
    TOLERANCE,
    WEIGHTS_TOLERANCE,
    Difference,
    Logged,
    add_pending,
    compare_weights,
    damage_of,
    differences,
    load,
    manifest_of,
    other_settings,
    read_log,
    saved_steps,
)


def read_run(run_folder: Path) -> tuple[Logged, dict[int, Path]]:
    """(log, checkpoints by step) of a run; the log goes on to where its newest checkpoint is. Raises InputError."""
    manifest = manifest_of(run_folder)
    logged = read_log(run_folder)
    saved = saved_steps(run_folder, manifest)
    if saved:
        newest = max(saved)
        if newest > logged.last_step() and not damage_of(saved[newest], manifest):
            add_pending(logged, load(saved[newest]))
    if not logged.last_step():
        raise InputError(f"{run_folder}: has logged no step yet; let it go on for a while")
    return logged, saved


def verify_run(run_folder: Path, args: argparse.Namespace) -> int:
    """Repeat a window of a run and compare; returns the exit code."""
    logged, saved = read_run(run_folder)
    plan = plan_replay(run_folder, logged, saved, args.steps)
    manifest = manifest_of(run_folder)
    if plan.checkpoint and (reason := damage_of(plan.checkpoint, manifest)):
        print(f"differs: step {plan.after}: {plan.checkpoint.name} is damaged: {reason}")
        return 1

    # in a folder of its own
    scratch = Path(tempfile.mkdtemp(prefix="verify_"))
    try:
        begun = time.time()
        print(plan.describe(args.world_size), flush=True)
        replayed = replay(plan, scratch, args.world_size, args.flags, args.test)
        if replayed.refused:
            print(f"differs: before step {plan.after + 1}: {replayed.refused}")
            return 1
        print(f"repeated {plan.until - plan.after} steps in {time.time() - begun:.0f} s", flush=True)
        return compare(run_folder, replayed.run_folder, plan, args.test)
    finally:
        if args.keep:
            print(f"kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def compare(first: Path, second: Path, plan: Replay, test: bool = True) -> int:
    """Compare two run folders over the steps of a plan, say how it ends, and return the exit code."""
    first_log, first_saved = read_run(first)
    second_log, second_saved = read_run(second)
    after = plan.after
    until = plan.until
    steps = [step for step in range(after + 1, until + 1) if step in first_log.steps and step in second_log.steps]
    if first_log.steps and second_log.steps and len(steps) < until - after:
        missing = min(set(range(after + 1, until + 1)).difference(steps))
        raise InputError(f"{first}: a log lacks step {missing}; choose other steps by --steps")
    lines = [step for step in range(after + 1, until + 1) if step in first_log.sizes and step in second_log.sizes]
    if not steps and not lines:
        raise InputError(f"{first}: no step from {after + 1} to {until} is in both logs; see --steps")

    # what differs, as far as it may
    reasons = other_settings(first, second, after, until)
    for reason in reasons:
        print(f"changed: {reason}")
    found = list(differences(first_log, second_log, after, until))
    if not test:
        found = [item for item in found if not item.name.startswith("test/")]
    weights = "no checkpoint there"
    if until in first_saved and until in second_saved:
        weights, difference = weights_at(until, first_saved[until], second_saved[until], manifest_of(first))
        found += [difference] if difference else []

    print(f"compared: {len(steps)} steps, {len(lines)} lines; weights at step {until}: {weights}")
    return conclude(found, bool(reasons))


def weights_at(step: int, first: Path, second: Path, manifest) -> tuple[str, Difference | None]:
    """(how the weights of two checkpoints compare, in words, and as a difference)."""
    if reason := damage_of(first, manifest):
        return "damaged", Difference(step, f"{first.name} is damaged ({reason}):", "one file", "another", float("inf"))
    weights = compare_weights(first, second)
    if weights is None:
        return "equal to the bit", None
    text = f"largest difference {weights.largest:.1e}, first in {weights.tensor}"
    # on the scale of the other numbers
    error = weights.error * TOLERANCE / WEIGHTS_TOLERANCE
    return text, Difference(step, f"weights of {weights.tensor}", "as saved", "others", error)


def conclude(found: list[Difference], may_differ: bool) -> int:
    """Say the verdict in one line; returns the exit code. may_differ: the last bits are not promised."""
    limit = TOLERANCE if may_differ else 0.0
    beyond = [item for item in found if item.error > limit]
    if beyond:
        print(f"differs: {beyond[0]}")
        return 1
    if found:
        largest = max(found, key=lambda item: item.error)
        where = f"largest relative difference {largest.error:.1e}, {largest.name} of step {largest.step}"
        print(f"equal within {TOLERANCE:g} ({where}; first other bits: {found[0].name} of step {found[0].step})")
        return 0
    print("equal to the bit")
    return 0


def verify_two(first: Path, second: Path, asked: tuple[int | None, int | None]) -> int:
    """Find where two runs part; returns the exit code."""
    first_log, _ = read_run(first)
    second_log, _ = read_run(second)
    last = min(first_log.last_step(), second_log.last_step())
    after = asked[0] or 0
    until = min(last, asked[1] or last)
    if after >= until:
        raise InputError(f"--steps: both runs have logged {last} steps only; give a window within them")
    print(f"comparing steps {after + 1} to {until} of {first} (there) and {second} (here)")
    return compare(first, second, Replay(first, after, until))


def main(args: argparse.Namespace) -> int:
    if args.other:
        return verify_two(Path(args.run), Path(args.other), args.steps)
    return verify_run(Path(args.run), args)


if __name__ == "__main__":
    # what is repeated ends with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(ARGS))
    except (InputError, RunError) as error:
        end_with(error)
    except KeyboardInterrupt:
        sys.exit(130)
