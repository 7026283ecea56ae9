"""What two runs logged and saved, side by side: the first step and number that differs, and the weights.

A number is a loss, a gradient norm, a learning rate or a metric; the samples of a step are compared by their digest.
Speeds, waits and memory are no part of the comparison.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from old.cli_utils import InputError
from old.figure_utils import read_records
from old.logging_utils import finite_or_none
from old.manifest_utils import MANIFEST, RESULT_FILES, Manifest, file_is, find_damage, is_own_checkpoint, read_manifest
from old.manifest_utils import read_seal, recover_manifest
from old.start_utils import changed_versions, read_starts, start_of

# How far apart two numbers may be, relative to the larger, where the last bits are not promised.
TOLERANCE = 1e-5
# And all weights together: AdamW moves a weight whose gradient is rounding alone as far as any other.
WEIGHTS_TOLERANCE = 1e-3
# What depends on the clock or the machine, by the last word of a metric's name.
SPEEDS = ("samples_per_s", "data_wait", "peak_memory_gb", "tflops", "mfu", "seconds")
# What says where a line belongs.
POSITION = ("step", "epoch", "steps")
# The numbers of a single step come first, in the order in which one causes the other.
EACH_STEP = ("batch", "loss", "grad_norm")


@dataclass
class Logged:
    """What a run's log says.

    steps: {step: {"batch", "loss", "grad_norm"}} of single steps. numbers: {step: {name: value}} of the lines at a
    step. sizes: {step: steps that its training line is the mean of}, 0 where that is not known. rates: {step:
    samples/s}.
    """

    steps: dict[int, dict] = field(default_factory=dict)
    numbers: dict[int, dict] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)

    def last_step(self) -> int:
        """The last step that the log tells of; 0 for none."""
        return max([*self.steps, *self.sizes], default=0)


class Difference(NamedTuple):
    """A number that is another in the second log. error: relative to the larger; infinite where that says nothing."""

    step: int
    name: str
    first: object
    second: object
    error: float

    def __str__(self) -> str:
        text = f"step {self.step}: {self.name} {self.first} there, {self.second} here"
        if self.name == "batch":
            return f"{text}: other samples, or another order"
        return text if math.isinf(self.error) else f"{text} (relative difference {self.error:.1e})"


# --- what a run folder holds ------------------------------------------------------------------------------------------


def read_log(run_folder: Path) -> Logged:
    """metrics.jsonl of a run. Raises InputError where there is none."""
    path = run_folder / "metrics.jsonl"
    try:
        records = read_records(path)
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise InputError(f"{path}: {reason}; name the folder of a run") from None

    logged = Logged()
    for record in records:
        add_line(logged, record)
    return logged


def add_line(logged: Logged, record: dict) -> None:
    """Add a line of metrics.jsonl to a log."""
    step = record["step"]
    each_step = record.get("steps", {})
    add_steps(logged, step, each_step)
    if "train/loss" in record:
        losses = each_step.get("loss", [])
        logged.sizes[step] = len(losses)
        logged.rates[step] = record["train/samples_per_s"]

    # the rest are numbers of the line, and the stage
    numbers = logged.numbers.setdefault(step, {})
    for name, value in record.items():
        word = name.rpartition("/")[2]
        if word not in SPEEDS and word not in POSITION:
            numbers[name] = value


def add_steps(logged: Logged, last: int, each_step: dict[str, list]) -> None:
    """Add lists of an interval's numbers, one for each step, to a log. last: the interval's last step."""
    for name, values in each_step.items():
        first = last - len(values) + 1
        for step, value in enumerate(values, start=first):
            # "" is a batch of before there were digests
            if value != "":
                logged.steps.setdefault(step, {})[name] = value


def add_pending(logged: Logged, checkpoint: dict) -> None:
    """Add the steps that a checkpoint keeps for the log's next line, where the run was killed before it."""
    interval = checkpoint["log"]
    rows = interval["rows"]
    each_step = {
        "batch": interval.get("batches", []),
        "loss": [finite_or_none(row[0]) for row in rows],
        # the gradient norm stands before the last, see end_step
        "grad_norm": [finite_or_none(row[-2]) for row in rows],
    }
    add_steps(logged, checkpoint["step"], each_step)


def manifest_of(run_folder: Path) -> Manifest:
    """The manifest of a run folder, or what its checkpoints say. Raises InputError for another folder."""
    if not run_folder.is_dir():
        raise InputError(f"{run_folder}: no such folder; name the folder of a run")
    names = [MANIFEST, *RESULT_FILES]
    present = [name for name in names if (run_folder / name).exists()]
    if not present:
        raise InputError(f"{run_folder}: holds no run; name the folder of one, such as runs/demo/compressed_ad")
    return read_manifest(run_folder) or recover_manifest(run_folder)


def saved_steps(run_folder: Path, manifest: Manifest) -> dict[int, Path]:
    """{step: a checkpoint of it}, in order; best.pt and the like where the step's own file is gone."""
    saved = {}
    for name in manifest.checkpoints:
        path = run_folder / name
        seal = read_seal(path)
        if name.startswith("step_"):
            step = path.stem.removeprefix("step_")
            saved[int(step)] = path
        elif seal:
            saved.setdefault(seal.step, path)
    return dict(sorted(saved.items()))


def damage_of(path: Path, manifest: Manifest) -> str:
    """Why a checkpoint is not what the run wrote; "" for a good one."""
    reason = find_damage(path)
    if reason:
        return reason
    seal = read_seal(path)
    if seal and seal.run_id != manifest.run_id:
        return "it is of another run"

    # the manifest must know it, too
    digest = manifest.checkpoints[path.name]
    if not file_is(path, digest) and not is_own_checkpoint(path, manifest):
        return "its sha256 is not the manifest's"
    return ""


def load(path: Path) -> dict:
    """A checkpoint on the CPU, of which only what is looked at is read. Raises InputError."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).partition("\n")[0][:120] or type(error).__name__
        raise InputError(f"{path}: not a readable checkpoint ({reason}); name another window with --steps") from None


# --- what differs -----------------------------------------------------------------------------------------------------


def differences(first: Logged, second: Logged, after: int, until: int) -> Iterator[Difference]:
    """Every number that is not the same to the bit, by step; of steps after `after`, and evaluations at it too."""
    for step in range(after, until + 1):
        if step > after:
            own = first.steps.get(step, {})
            other = second.steps.get(step, {})
            yield from unequal(step, own, other, EACH_STEP)

        # means of another number of steps, where a run was stopped within an interval, say nothing
        own_size = first.sizes.get(step, 0)
        other_size = second.sizes.get(step, 0)
        same_interval = own_size == other_size or not own_size or not other_size
        own = first.numbers.get(step, {})
        other = second.numbers.get(step, {})
        names = list(own)
        if step == after or not same_interval:
            names = [name for name in names if not name.startswith("train/")]
        yield from unequal(step, own, other, names)


def unequal(step: int, first: dict, second: dict, names: Iterable[str]) -> Iterator[Difference]:
    """The numbers that both have and that differ, and those of each step that one of them lacks."""
    for name in names:
        if name in EACH_STEP and (name in first) != (name in second):
            yield Difference(step, name, first.get(name), second.get(name), math.inf)
        if name not in first or name not in second:
            continue
        value = first[name]
        other = second[name]
        if value != other:
            # a metric near zero is what is left of larger numbers
            is_metric = name not in EACH_STEP and not name.startswith("train/")
            error = relative_error(value, other, least=1.0 if is_metric else 0.0)
            yield Difference(step, name, value, other, error)


def relative_error(first, second, least: float) -> float:
    """|first - second| relative to the larger, or to `least` if that is more; infinite for no finite numbers."""
    for value in (first, second):
        if not isinstance(value, int | float):
            return math.inf
    largest = max(abs(first), abs(second), least)
    return abs(first - second) / largest


class WeightDifference(NamedTuple):
    """The first tensor of two checkpoints that differs, and the largest difference of all of them.

    error: relative to the norm of all weights.
    """

    tensor: str
    largest: float
    error: float


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint, under whichever name its script keeps them."""
    contents = load(path)
    return contents["net"] if "net" in contents else contents["model"]


def compare_weights(first: Path, second: Path) -> WeightDifference | None:
    """How the trained weights of two checkpoints differ; None where they are equal to the bit."""
    one = weights_of(first)
    other = weights_of(second)
    shapes = {name: value.shape for name, value in one.items()}
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other or other[name].shape != shapes[name]:
            return WeightDifference(name, math.inf, math.inf)

    tensor = ""
    largest = 0.0
    squares = 0.0
    norm = 0.0
    for name, value in one.items():
        value = value.double()
        norm += float(value.square().sum())
        if torch.equal(one[name], other[name]):
            continue

        tensor = tensor or name
        apart = value - other[name].double()
        largest = max(largest, float(apart.abs().max()))
        squares += float(apart.square().sum())

    if not tensor:
        return None
    error = math.sqrt(squares / norm) if norm else math.inf
    return WeightDifference(tensor, largest, error)


# --- what may make the last bits differ ------------------------------------------------------------------------------


def other_settings(first: Path, second: Path, after: int, until: int) -> list[str]:
    """What was not the same when the runs in two folders computed some steps, such as a library's version.

    The last bits may then differ. A GPU without --deterministic is among these.
    """
    first_starts = read_starts(first)
    second_starts = read_starts(second)

    # each start of either that computed some of the steps
    begins = {after}
    for start in first_starts + second_starts:
        if after < start["step"] < until:
            begins.add(start["step"])

    reasons: dict[str, None] = {}
    for step in sorted(begins):
        there = start_of(first_starts, step + 1)
        here = start_of(second_starts, step + 1)
        if there is None or here is None:
            reasons["versions: not written down by a run of an earlier version of this project"] = None
        else:
            reasons |= dict.fromkeys(compare_starts(there, here))
    return list(reasons)


def compare_starts(there: dict, here: dict) -> list[str]:
    """What differs between two starts, of all that numbers may depend on beside flags and data."""
    changed = changed_versions(there["versions"], here["versions"])
    if "files" not in changed:
        # another commit of the same files
        changed.pop("commit", None)
    for name in ("processes", "threads"):
        if there[name] != here[name]:
            changed[name] = (there[name], here[name])
    found = [f"{name}: {before} there, {now} here" for name, (before, now) in changed.items()]

    on_gpu = not here["versions"]["device"].startswith("CPU")
    deterministic = all(start["args"].get("deterministic") for start in (there, here))
    if on_gpu and not deterministic:
        found.append("a GPU without --deterministic: some kernels add in varying order")
    return found
