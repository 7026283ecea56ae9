"""Does a one-line mistake turn a test red? Makes those of mutations.txt, each alone, and runs their tests.

    python tests/old/mutations.py                     # all of them, in about an hour on two idle cores
    python tests/old/mutations.py --only clip         # those whose name holds this word

Each mistake is made in a copy of the tree. One that no test sees is a survivor and is named at the end.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 480


class Mutation(NamedTuple):
    """A mistake: in `file`, `old` (which stands there once) becomes `new`. tests: pytest's arguments."""

    name: str
    file: str
    tests: list[str]
    old: str
    new: str


def read_mutations(path: Path) -> list[Mutation]:
    """The mistakes of mutations.txt, whose first lines say how they are written."""
    mutations = []
    file = name = old = ""
    tests: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        # what a line is, its first sign and its indentation tell
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if text.startswith("- "):
            old = text[2:]
        elif text.startswith("+"):
            mutations.append(Mutation(name, file, tests, old, text[2:]))
        elif line.startswith(" "):
            name = text
        else:
            file, _, arguments = line.partition(" | ")
            files, _, chosen = arguments.partition(" -k ")
            tests = [f"tests/old/{stem}.py" for stem in files.split()]
            tests += ["-k", chosen] if chosen else []
    return mutations


def copy_tree(folder: Path) -> None:
    """What git tracks, as it is now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def try_mutation(mutation: Mutation) -> str:
    """ "caught", "SURVIVED" or "not made", and how long it took."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        path = folder / mutation.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""

        # the mistake
        if text.count(mutation.old) != 1:
            return f"not made: the line stands {text.count(mutation.old)} times in {mutation.file}"
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")

        # its tests, to the first that fails
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not soak", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *mutation.tests],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            # a mistake that hangs a run is seen, too
            return f"caught: nothing ends within {SECONDS} s"
    seconds = time.monotonic() - begun
    outcomes = {0: "SURVIVED", 1: "caught"}
    if done.returncode not in outcomes:
        return f"not made: pytest ended with {done.returncode}: {done.stdout[-200:]}"
    return f"{outcomes[done.returncode]}, {seconds:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="those whose name or file holds this")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    options = parser.parse_args()
    mutations = read_mutations(ROOT / "tests/old/mutations.txt")
    chosen = [mutation for mutation in mutations if options.only in f"{mutation.name} {mutation.file}"]
    missed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutation, outcome in zip(chosen, pool.map(try_mutation, chosen), strict=True):
            print(f"{mutation.file}: {mutation.name}: {outcome}", flush=True)
            if not outcome.startswith("caught"):
                missed.append(f"{mutation.file}: {mutation.name}")
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught", *missed, sep="\n  ")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
