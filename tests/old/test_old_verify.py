"""A trial of verify.py, part of the soak: planted differences are found, clean repetitions are equal.

In a small run: an edited checkpoint, edited moments of the optimizer, another seed, a changed line of the log, changed
and exchanged data, and a linear layer that rounds another way from some step on, as another library might.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import ROOT

# the fixtures of the two small runs come with the helpers
from test_contract import (  # noqa: F401
    SCRIPTS,
    TASKS,
    edit_checkpoint,
    ended_well,
    finished,
    lines,
    load_checkpoint,
    run_script,
    run_task,
    scale_weights,
    small_run,
)

VERIFY = ROOT / "tests/old/verify_in_fork.py"


def change_file(path: Path) -> None:
    """Two learning histories of each of some goals change places."""
    with h5py.File(path, "r+") as file:
        for goal in range(20):
            for dataset in file[str(goal)].values():
                dataset[...] = dataset[...][:, [1, 0, *range(2, dataset.shape[1])]]


def exchange_histories(path: Path) -> None:
    """Other two learning histories of each goal change places."""
    with h5py.File(path, "r+") as file:
        for goal in file.values():
            for dataset in goal.values():
                dataset[...] = dataset[...][:, [0, 2, 1]]


def each_step(run_folder: Path) -> list[tuple]:
    """(loss, gradient norm) of each step of a run, read here and not by verify.py."""
    values = []
    for line in lines(run_folder):
        if "steps" in line:
            values += zip(line["steps"]["loss"], line["steps"]["grad_norm"], strict=True)
    return values


def first_difference(first: Path, second: Path) -> int:
    """The first step whose numbers differ."""
    pairs = zip(each_step(first), each_step(second), strict=True)
    return next(step for step, (one, other) in enumerate(pairs, start=1) if one != other)


def scale_moments(contents: dict) -> None:
    """A first moment of the optimizer that is another."""

    def scale(value) -> None:
        for name, part in value.items():
            if name == "exp_avg" and isinstance(part, dict):
                for moment in part.values():
                    moment.mul_(1.01)
            elif name == "exp_avg":
                part.mul_(1.01)
            elif isinstance(part, dict):
                scale(part)

    scale(contents["optimizer"])


def edit_start(run_folder: Path, **flags) -> None:
    """Let a run say that it was started with other flags."""
    path = run_folder / "starts.jsonl"
    start = json.loads(path.read_text().splitlines()[0])
    start["args"] |= flags
    path.write_text(json.dumps(start) + "\n")


def edit_log(run_folder: Path, step: int) -> None:
    """Change the loss of one step in the log by its last bit."""
    path = run_folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        losses = record.get("steps", {}).get("loss", [])
        place = step - 1 - record["step"] + len(losses)
        if losses and 0 <= place < len(losses):
            losses[place] = float(np.nextafter(losses[place], 9.0))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def planted(finished, run_task, run_script, tmp_path, darkroom_data):  # noqa: F811
    """planted(task) yields (what was planted, run folder, flags and environment of verify.py, the first wrong step)."""

    def copy(task: str, name: str) -> Path:
        return Path(shutil.copytree(finished(task), tmp_path / name))

    def change_data(task: str, number: int, change: Callable) -> tuple[list[str], int]:
        """(flags that lead to changed data, the first step that is another with them)."""
        folder = Path(shutil.copytree(darkroom_data, tmp_path / f"data{number}"))
        change(next(folder.glob("datasets/*.hdf5")))
        flags = ["--data", str(folder)]
        other = tmp_path / f"other{number}"
        ended_well(run_task(task, other, flags))
        return flags, first_difference(finished(task), other)

    def plant(task: str):
        first, last = sorted(finished(task).glob("step_*.pt"))[-2:]
        middle = load_checkpoint(first)["step"]
        end = load_checkpoint(last)["step"]
        evaluations = [line["step"] for line in lines(finished(task)) if "val/loss" in line]
        evaluated = middle in evaluations

        run_folder = copy(task, "weights")
        edit_checkpoint(run_folder / first.name, scale_weights)
        yield "edited weights", run_folder, [], {}, middle if evaluated else middle + 1
        run_folder = copy(task, "moments")
        edit_checkpoint(run_folder / first.name, scale_moments)
        yield "edited moments", run_folder, [], {}, middle + 2

        run_folder = copy(task, "seed")
        edit_start(run_folder, seed=1)
        yield "other seed, from the start", run_folder, ["--steps", f"0:{end}"], {}, 1
        yield "other seed, resumed", run_folder, [], {}, middle + 1

        for step in (2, middle + 1):
            run_folder = copy(task, f"log{step}")
            edit_log(run_folder, step)
            yield "edited log", run_folder, ["--steps", f"0:{end}"], {}, step

        for begin, number in ((middle, 2), (middle, 3), (0, 2), (0, 3)):
            flags = ["--steps", f"{begin}:{end}"]
            yield "other rounding", finished(task), flags, {"PLANT": f"linear:{number}"}, begin + number

        flags, step = change_data(task, 1, change_file)
        yield "changed file", finished(task), ["--steps", f"0:{end}", "--", *flags], {}, step
        flags, step = change_data(task, 2, exchange_histories)
        yield "exchanged files", finished(task), ["--steps", f"0:{end}", "--", *flags], {}, step

    return plant


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
def test_twelve_planted_differences(task, planted, run_script):  # noqa: F811
    """Each is found, and the first wrong step is the right one."""
    wrong = []
    for what, run_folder, flags, environment, expected in planted(task):
        done = run_script([VERIFY, run_folder, *flags], **environment)
        verdict = (done.stdout or done.stderr).splitlines()[-1]
        found = re.match(r"differs: (?:before )?step (\d+)", verdict)
        right = done.code == 1 and found and int(found[1]) == expected
        print(f"{'right' if right else 'WRONG'} {task}: {what}, step {expected}: {verdict}")
        if not right:
            wrong.append(verdict + done.stderr)
    assert not wrong


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
def test_four_clean_repetitions(task, finished, run_script):  # noqa: F811
    """From the start and from the middle, whole and in part: equal to the bit."""
    end = max(line["step"] for line in lines(finished(task)))
    for window in (f"0:{end}", f"0:{end - 2}", f"1:{end - 1}", f"{end // 2}:{end}"):
        done = run_script([VERIFY, finished(task), "--steps", window])
        print(task, window, done.stdout.splitlines()[-1], f"{done.seconds:.1f} s")
        assert done.code == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == "equal to the bit"


@pytest.mark.soak
@pytest.mark.parametrize("task", TASKS)
def test_another_number_of_processes(task, finished, run_script):  # noqa: F811
    """By two processes what one has trained: within 1e-5."""
    end = max(line["step"] for line in lines(finished(task)))
    for window in (f"0:{end}", f"{end // 2}:{end}"):
        done = run_script([VERIFY, finished(task), "--steps", window, "--world_size", "2"])
        print(task, window, done.stdout)
        assert done.code == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1].startswith("equal within 1e-05")
