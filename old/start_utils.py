"""What a run was started with: a line of starts.jsonl for each start, so that verify.py can repeat its steps.

A line holds the step it began at, the script and its flags, the processes, and the versions that its numbers may depend
on. The newest line that begins before a step is the start that computed it.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import torch

from old.cli_utils import asked_values
from old.distributed_utils import Ranks
from old.manifest_utils import write_atomically

STARTS = "starts.jsonl"
ROOT = Path(__file__).resolve().parents[1]
# Variables that choose other kernels; no other part of the environment is written down.
NUMERIC = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE")


def note_start(run_folder: Path, step: int, args: Namespace, ranks: Ranks) -> None:
    """Rank 0: add this start to starts.jsonl. step: of the checkpoint it goes on from, 0 for none. Raises OSError."""
    start = {
        "step": step,
        "script": Path(sys.argv[0]).name,
        "folder": str(Path.cwd()),
        "processes": ranks.world_size,
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in NUMERIC if name in os.environ},
        "versions": versions(ranks.device),
        "args": asked_values(args),
    }
    lines = [json.dumps(line) + "\n" for line in [*read_starts(run_folder), start]]
    text = "".join(lines)
    write_atomically(run_folder / STARTS, lambda file: file.write(text.encode()))


def read_starts(run_folder: Path) -> list[dict]:
    """The starts of a run, in their order; none for a run of before there was starts.jsonl."""
    try:
        text = (run_folder / STARTS).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []

    starts = []
    for line in text.splitlines():
        try:
            start = json.loads(line)
        except ValueError:
            continue
        if isinstance(start, dict) and isinstance(start.get("step"), int):
            starts.append(start)
    return starts


def versions(device: torch.device) -> dict[str, str]:
    """What a number may depend on beside flags and data: python, the pinned libraries, this project, the device."""
    found = {"python": platform.python_version()}
    for name in pinned_packages():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # optional on this system
            continue
    # the version with its build, such as 2.13.0+cu130
    found["torch"] = str(torch.__version__)
    found["files"] = hash_of_project()
    if commit := commit_of_project():
        found["commit"] = commit
    found["device"] = describe_device(device)
    return found


def pinned_packages() -> list[str]:
    """The names in requirements.txt."""
    try:
        text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    except OSError:
        return ["torch", "numpy"]
    return re.findall(r"^([\w-]+)==", text, re.MULTILINE)


def hash_of_project() -> str:
    """Twelve letters that change with any line of the project's scripts, helpers and tasks."""
    sha256 = hashlib.sha256()
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("old/*.py"), *ROOT.glob("tasks/**/*.py")]):
        sha256.update(path.relative_to(ROOT).as_posix().encode())
        sha256.update(path.read_bytes())
    return sha256.hexdigest()[:12]


def commit_of_project() -> str:
    """The git commit that is checked out; "" where the project is not in git."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def describe_device(device: torch.device) -> str:
    """The device and what chooses its kernels."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return f"{name}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return f"CPU, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def start_of(starts: list[dict], step: int) -> dict | None:
    """The start that computed a step; None where that is not known."""
    for start in reversed(starts):
        if start["step"] < step:
            return start
    return None


def changed_versions(before: dict, now: dict) -> dict[str, tuple[str, str]]:
    """{name: (before, now)} of the versions that differ."""
    return {
        name: (before.get(name, "none"), now.get(name, "none"))
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    }
