"""Runs a window of a training again in a scratch folder: from which checkpoint, with which flags, and until when.

The scratch folder holds the run as it was at the checkpoint: the log up to there, and links to the checkpoint and the
best ones. The script resumes it as if the run had been killed, so that nothing of the original is ever written to.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from old.cli_utils import InputError, RunError, read_config
from old.manifest_utils import Manifest, file_sha256, read_manifest, write_manifest
from old.start_utils import ROOT, read_starts
from old.verify_utils import Logged, load, read_log, saved_steps


class Script(NamedTuple):
    """A training script: its file, its flag for the run folder, and the one for samples of a GPU."""

    file: str
    folder_flag: str
    batch_flag: str = "batch_size"


# By what a checkpoint's format begins with.
SCRIPTS = {
    "compressed_ad": Script("train.py", "output_dir", "train_batch_size"),
}


@dataclass
class Part:
    """Steps that one start of the run computed: up to which, its flags, processes, and what else lay around it."""

    until: int
    args: dict
    processes: int
    threads: int | None = None
    folder: str = ""
    environment: dict = field(default_factory=dict)


@dataclass
class Replay:
    """What is repeated: steps after `after`, where the checkpoint is (None for a fresh start), to `until`."""

    run_folder: Path
    after: int
    until: int
    checkpoint: Path | None = None
    script: Script | None = None
    parts: list[Part] = field(default_factory=list)
    effective_batch_size: int = 0
    seconds: float = 0.0

    def describe(self, world_size: int | None) -> str:
        """What will be done, in one line."""
        source = self.checkpoint.name if self.checkpoint else "the start"
        processes = world_size or self.parts[0].processes
        noun = "process" if processes == 1 else "processes"
        text = f"repeating steps {self.after + 1} to {self.until} of {self.run_folder} from {source}, "
        text += f"{processes} {noun} of {self.script.file}"
        return f"{text}; the run took {self.seconds:.0f} s for them, without its evaluations" if self.seconds else text


class Replayed(NamedTuple):
    """Where the repeated run lies. refused: why the script did not resume it, as data or flags are others; or ""."""

    run_folder: Path
    refused: str = ""


# --- what is repeated -------------------------------------------------------------------------------------------------


def plan_replay(
    run_folder: Path, logged: Logged, saved: dict[int, Path], asked: tuple[int | None, int | None]
) -> Replay:
    """Choose the window and the checkpoint, and look up the run's flags. asked: (A, B), None for the default.

    Raises InputError for a window that the log does not reach, and for a run that cannot be told.
    """
    last = logged.last_step()
    reached = [step for step in saved if step <= last]
    until = asked[1]
    if until is None:
        until = reached[-1] if reached and reached[-1] > (asked[0] or 0) else last
    if until > last:
        raise InputError(f"--steps: {run_folder} has logged {last} steps only; give a window within them")

    # the nearest checkpoint at or before its begin
    before = [step for step in saved if step < until]
    begin = asked[0] if asked[0] is not None else max(before, default=0)
    if begin >= until:
        raise InputError(f"--steps: {begin} is not before step {until}, the end of the window; give another begin")
    after = max([step for step in saved if step <= begin], default=0)

    # what a checkpoint says of the run
    facts: dict = {}
    for path in saved.values():
        with contextlib.suppress(InputError):
            facts = facts or load(path)
    script = script_of(run_folder, facts)
    parts = parts_of(run_folder, after, until)

    # the batch is a property of the run
    effective_batch_size = facts.get("run", {}).get("effective_batch_size", 0)
    return Replay(
        run_folder=run_folder,
        after=after,
        until=until,
        checkpoint=saved.get(after),
        script=script,
        parts=parts,
        effective_batch_size=effective_batch_size,
        seconds=seconds_of(logged, effective_batch_size, after, until),
    )


def script_of(run_folder: Path, facts: dict) -> Script:
    """The script that made a run, by the format of its checkpoints or by its first start."""
    kind = str(facts.get("format", "")).partition("/")[0]
    if kind in SCRIPTS:
        return SCRIPTS[kind]
    for start in read_starts(run_folder):
        for script in SCRIPTS.values():
            if script.file == start["script"]:
                return script
    raise InputError(f"{run_folder}: does not say which script made it; name the folder of a run with a checkpoint")


def parts_of(run_folder: Path, after: int, until: int) -> list[Part]:
    """The window cut where the run was started anew with other flags or processes, in order."""
    parts: list[Part] = []
    end = until
    for start in reversed(read_starts(run_folder)):
        if after < end and start["step"] < end:
            part = Part(
                until=end,
                args=start["args"],
                processes=start["processes"],
                threads=start["threads"],
                folder=start["folder"],
                environment=start["environment"],
            )
            parts.insert(0, part)
            end = start["step"]

    # a run of before there was starts.jsonl, whose last flags are known
    if not parts or end > after:
        args = read_config(str(run_folder / "args.yaml"))
        summary = {}
        with contextlib.suppress(InputError):
            summary = read_config(str(run_folder / "summary.json"))
        processes = summary.get("world_size", 1)
        parts.insert(0, Part(end, args, processes))

    # starts of the same flags are one
    merged = parts[:1]
    for part in parts[1:]:
        if settings_of(part) == settings_of(merged[-1]):
            merged[-1].until = part.until
        else:
            merged.append(part)
    return merged


def settings_of(part: Part) -> tuple:
    """What makes a difference to the numbers of a part."""
    passing = ("resume_from", "overwrite", "max_steps", "wandb", "num_workers")
    flags = {name: value for name, value in part.args.items() if name not in passing}
    return flags, part.processes, part.threads, part.environment


def seconds_of(logged: Logged, samples: int, after: int, until: int) -> float:
    """How long the run computed steps of so many samples, by its own samples/s; 0 where it did not say."""
    rates = [rate for step, rate in logged.rates.items() if step > after]
    if not rates:
        return 0.0
    mean = sum(rates) / len(rates)
    return (until - after) * samples / mean


# --- the repetition ---------------------------------------------------------------------------------------------------


def replay(plan: Replay, scratch: Path, world_size: int | None, flags: list[str], test: bool) -> Replayed:
    """Run the script over the window. flags: further ones. Raises InputError or RunError with its own error line."""
    run_folder = scratch / "run"
    if plan.checkpoint:
        copy_run(plan, run_folder)

    wanted = evaluations(plan, test)
    for number, part in enumerate(plan.parts):
        last = number == len(plan.parts) - 1
        resume = bool(plan.checkpoint) or number > 0
        command = prepare(plan, part, scratch, world_size, resume)
        # an evaluation at the end of a part comes again at the begin of the next
        needed = wanted if last else {item for item in wanted if item[0] < part.until}

        environment = environment_of(part, world_size)
        with open(scratch / "replay.log", "ab") as output:
            process = start(command + flags, working_folder(part), environment, output)
        try:
            watch(process, run_folder, part.until, needed)
        finally:
            stop(process)

        # it ended by itself: of other data or flags, or of an error
        reason = ""
        if not is_saved(run_folder, part.until):
            reason = reason_of_end(process.returncode, scratch / "replay.log")
        if reason.startswith("--resume_from: a run with") or " was changed after " in reason:
            return Replayed(run_folder, reason)
        if reason:
            kind = InputError if process.returncode == 2 else RunError
            raise kind(f"{plan.script.file} did not repeat the run: {reason}")
    return Replayed(run_folder)


def start(command: list[str], folder: Path | None, environment: dict[str, str], output) -> subprocess.Popen:
    """Start the script; what it says goes into an open file."""
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def copy_run(plan: Replay, run_folder: Path) -> None:
    """Make a run folder that stands where the checkpoint is. Nothing of the original is written to."""
    run_folder.mkdir()
    original = read_manifest(plan.run_folder) or Manifest()
    manifest = Manifest(original.run_id or load(plan.checkpoint).get("run_id", ""))
    for name in ("metrics.jsonl", "args.yaml"):
        if (plan.run_folder / name).exists():
            shutil.copyfile(plan.run_folder / name, run_folder / name)

    # the best checkpoint so far belongs to where the run stands
    names = [f"step_{plan.after:08d}.pt"]
    link_or_copy(plan.checkpoint, run_folder / names[0])
    for step, path in saved_steps(plan.run_folder, Manifest(checkpoints=bests(original))).items():
        if step <= plan.after:
            link_or_copy(path, run_folder / path.name)
            names.append(path.name)
    manifest.checkpoints = {name: file_sha256(run_folder / name) for name in names}
    write_manifest(run_folder, manifest)


def bests(manifest: Manifest) -> dict[str, str]:
    """The best checkpoints of a manifest."""
    return {name: digest for name, digest in manifest.checkpoints.items() if name.endswith("best.pt")}


def link_or_copy(source: Path, target: Path) -> None:
    """Another name of a file, or a copy where there are no links."""
    try:
        target.symlink_to(source.resolve())
    except OSError:
        shutil.copyfile(source, target)


def prepare(plan: Replay, part: Part, scratch: Path, world_size: int | None, resume: bool) -> list[str]:
    """Write the flags of a part as a config, and return the command that runs it."""
    import yaml

    args = dict(part.args)
    args["overwrite"] = False
    args["wandb"] = False
    args["max_steps"] = part.until
    args["resume_from"] = "auto" if resume else None
    args["world_size"] = world_size or part.processes
    args[plan.script.folder_flag] = str(scratch / "run")
    if world_size and world_size != part.processes:
        args |= share_batch(plan, part, world_size)

    # flags of an earlier version that are gone are told by the script
    path = scratch / "replay.yaml"
    given = {name: value for name, value in args.items() if value is not None}
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return [sys.executable, str(ROOT / plan.script.file), "--config", str(path)]


def share_batch(plan: Replay, part: Part, world_size: int) -> dict:
    """The flags by which other processes make the same global batch. Raises InputError where that is not known."""
    total = plan.effective_batch_size
    if not total:
        raise InputError(f"--world_size {world_size}: {plan.run_folder} has no checkpoint to tell its global batch")

    # the accumulation follows
    flags = {"effective_batch_size": total, "gradient_accumulation_steps": 1}
    if not part.args.get("effective_batch_size"):
        # one process's part of a step
        flags[plan.script.batch_flag] = total // part.processes
    return flags


def working_folder(part: Part) -> Path | None:
    """Where the run was started, which its paths may be relative to; None where that is gone."""
    folder = Path(part.folder)
    return folder if part.folder and folder.is_dir() else None


def environment_of(part: Part, world_size: int | None) -> dict[str, str]:
    """The environment of the script: what chose other kernels in the run does so again."""
    environment = os.environ | part.environment
    if part.threads and world_size in (None, part.processes):
        environment["OMP_NUM_THREADS"] = str(part.threads)
    return environment


def evaluations(plan: Replay, test: bool) -> set[tuple[int, str]]:
    """(step, name) of the metrics in the window that must be there before the script may be stopped."""
    wanted = set()
    for step, name in evaluations_in(read_log(plan.run_folder)):
        in_window = plan.after <= step <= plan.until
        if in_window and (test or not name.startswith("test/")):
            wanted.add((step, name))
    return wanted


def evaluations_in(logged: Logged) -> set[tuple[int, str]]:
    """(step, name) of each metric of an evaluation."""
    found = set()
    for step, numbers in logged.numbers.items():
        for name in numbers:
            if "/" in name and not name.startswith("train/"):
                found.add((step, name))
    return found


def watch(process: subprocess.Popen, run_folder: Path, until: int, wanted: set[tuple[int, str]]) -> None:
    """Wait until the script has ended, or has logged and saved all that is compared."""
    said = time.time()
    while process.poll() is None:
        time.sleep(0.1)
        step = 0
        with contextlib.suppress(InputError):
            logged = read_log(run_folder)
            step = logged.last_step()
            is_there = step >= until and wanted <= evaluations_in(logged)
            if is_there and is_saved(run_folder, until):
                return

        # a long repetition is heard of
        if time.time() - said > 60:
            said = time.time()
            print(f"at step {step} of {until}", flush=True)


def is_saved(run_folder: Path, step: int) -> bool:
    """Whether a run folder's manifest has the checkpoint of a step."""
    manifest = read_manifest(run_folder)
    return manifest is not None and f"step_{step:08d}.pt" in manifest.checkpoints


def stop(process: subprocess.Popen) -> None:
    """End the script and every process of it at once: all that is compared is on the disk."""
    everyone = []
    with contextlib.suppress(psutil.NoSuchProcess):
        everyone = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.kill()
    for other in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            other.kill()
    process.wait()


def reason_of_end(code: int, output: Path) -> str:
    """Why the script ended before the end of its part: its own error line, or the last that it said."""
    text = output.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1].removeprefix("error: ")
    return lines[-1] if lines else f"exit code {code}"
