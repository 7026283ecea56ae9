"""Run folders in odd states: nothing is deleted or cut that should not be, and no start is mistaken for a resume.

A toy run goes through what the scripts on old/ share (lock, load, log, save); test_contract.py repeats some by the real
scripts.
"""

import contextlib
import copy
import itertools
import json
import os
import random
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import tree

from old import checkpoint_utils, manifest_utils
from old.checkpoint_utils import load_checkpoint, lock_run_folder, mark_best, restore_optimizer, settle_checkpoint
from old.cli_utils import InputError, RunError
from old.distributed_utils import Ranks
from old.logging_utils import RunLog
from old.loop_utils import Progress, TrainingRun, keep_best, resume

ONE = Ranks(0, 0, 1, torch.device("cpu"), "python")
ARGS = "dist_timeout: 600\nkeep_last: 2\nmax_bad_steps: 10\n"


TOY_ARGS = Namespace(
    log_every=1,
    wandb=False,
    keep_last=2,
    max_bad_steps=10,
    dist_timeout=600,
    mixed_precision="no",
    compile=False,
)


def toy_run(run_folder: Path, last: int, resume_from: str | None = None, overwrite: bool = False) -> int:
    """Train a number up to step `last` in a run folder, as the scripts on old/ do; returns the step it began at."""
    args = Namespace(**vars(TOY_ARGS), overwrite=overwrite)
    lock = lock_run_folder(run_folder, bool(resume_from) or overwrite, wait=0, overwrite=overwrite)
    checkpoint = load_checkpoint(resume_from, run_folder, "toy", resume=True)
    begun = checkpoint["step"] if checkpoint else 0
    value = checkpoint["model"]["value"] if checkpoint else torch.zeros(64)
    log = RunLog(run_folder, ONE, ["loss", "skipped"], last, 1, "no")
    log.open(args, checkpoint)

    # the value at a step is the sum of the steps up to there
    for step in range(begun + 1, last + 1):
        value = value + step
        log.step(torch.tensor([float(value[0]), 0.0]), 1, 1e-3)
        log.write_interval(step, 1)
        saved = {"format": "toy", "model": {"value": value}, "log": log.pending(step)}
        checkpoint_utils.save_checkpoint(run_folder, saved, step, args.keep_last)
        if step == 3:
            mark_best(run_folder, step)

    (run_folder / "summary.json").write_text("{}")
    log.close()
    del lock
    return begun


def toy_training(run_folder: Path, step: int) -> TrainingRun:
    """A run of toy_run's at a step, as the shared loop sees it."""
    return TrainingRun(
        run_folder=run_folder,
        progress=Progress(step=step),
        last_step=9,
        planned_steps=9,
        effective_batch_size=1,
        precision="no",
        log=None,
        contents=dict,
    )


def newest_step(run_folder: Path) -> int:
    """The step of the checkpoint that `auto` resumes from."""
    return load_checkpoint("auto", run_folder, "toy")["step"]


def logged(folder: Path) -> list[int]:
    """The steps of a run's log."""
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Events:
    """In place of TensorBoard's writer, which takes most of a toy run's time: an empty file of its own."""

    def __init__(self, folder: str, purge_step: int | None):
        self.path = Path(folder) / f"events.out.tfevents.{purge_step}"
        self.path.parent.mkdir(exist_ok=True)
        self.path.touch()

    def add_scalar(self, *_) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What a power failure leaves is not tested here, so nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Events)


def without_seals(run_folder: Path) -> None:
    """Turn a run into one from before the seals: no name of the run, and a manifest of names and hashes alone."""
    for path in sorted(run_folder.glob("*.pt")):
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["run_id"]
        del checkpoint["log"]["run_id"]
        path.unlink()
        torch.save(checkpoint, path)

    names = ["step_00000004.pt", "step_00000005.pt", "last.pt", "best.pt"]
    lines = [f"{manifest_utils.file_sha256(run_folder / name)}  {name}\n" for name in names]
    (run_folder / "manifest.sha256").write_text("".join(lines))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folders to copy: a finished run of 5 steps, another one, one killed before its first save, and an old one."""
    root = tmp_path_factory.mktemp("runs")
    toy_run(root / "run", 5)
    toy_run(root / "other", 4)
    toy_run(root / "begun", 0)
    shutil.copytree(root / "run", root / "old")
    without_seals(root / "old")
    return root


# --- folders in odd states --------------------------------------------------------------------------------------------


def no_manifest(folder: Path) -> None:
    """A run folder whose manifest was deleted."""
    (folder / "manifest.sha256").unlink(missing_ok=True)


def empty_manifest(folder: Path) -> None:
    """A run folder whose manifest has no line."""
    (folder / "manifest.sha256").write_text("")


def unreadable_manifest(folder: Path) -> None:
    """A run folder whose manifest is no text."""
    (folder / "manifest.sha256").write_bytes(os.urandom(200))


def cut_manifest(folder: Path) -> None:
    """A run folder whose manifest lost its end."""
    manifest = folder / "manifest.sha256"
    if manifest.exists():
        text = manifest.read_text()
        manifest.write_text(text[: len(text) - 30])


def write_foreign(folder: Path, names: list[str]) -> list[str]:
    """Write files of another program into a folder; returns their names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not of this run")
    return names


def foreign_files(folder: Path) -> list[str]:
    """Files of another program under names that a run uses too."""
    return write_foreign(folder, ["logs/notes.txt", "figures/photo.png", "model_best.pt", "step_00000001.pt"])


def foreign_folders(folder: Path) -> list[str]:
    """Files of another program in folders that a run uses too."""
    return write_foreign(folder, ["logs/notes.txt", "figures/photo.png"])


def checkpoint_of_another_run(folder: Path, runs: Path) -> list[str]:
    """A checkpoint of another run, whose name agrees with the step inside."""
    checkpoint = torch.load(runs / "other" / "step_00000004.pt", weights_only=True)
    manifest_utils.write_checkpoint(folder / "step_00000007.pt", checkpoint | {"step": 7})
    return ["step_00000007.pt"]


BASES = ("nothing", "begun", "run", "old", "checkpoints alone")
MANIFESTS = (None, no_manifest, empty_manifest, unreadable_manifest, cut_manifest)
EXTRAS = (None, foreign_files, foreign_folders, "other run's checkpoint")


class State(NamedTuple):
    """An odd state of a run folder."""

    base: str
    damage: Callable | None
    extra: Callable | str | None

    @property
    def has_run(self) -> bool:
        """Whether there is a checkpoint in the folder that belongs to it."""
        return self.base in ("run", "old", "checkpoints alone")


class Mode(NamedTuple):
    """How a run is started in a folder; own: resume_from is a file of that folder."""

    name: str
    resume_from: str | None = None
    overwrite: bool = False
    own: bool = False


def odd_states(share: int) -> list[State]:
    """All states that are odd in one way, and one in `share` of those that are odd in two."""
    states = []
    for number, (base, damage, extra) in enumerate(itertools.product(BASES, MANIFESTS, EXTRAS)):
        state = State(base, damage, extra)

        # alone in a folder, another run's checkpoint is the checkpoint of the folder's run
        alone = extra == "other run's checkpoint" and not state.has_run
        left_out = damage and extra and number % share
        if not alone and not left_out:
            states.append(state)
    return states


def make_state(folder: Path, runs: Path, state: State) -> list[str]:
    """Bring a folder into one of the states; returns the files in it that no run may touch."""
    folder.mkdir()
    if state.base == "checkpoints alone":
        for path in (runs / "run").glob("step_*.pt"):
            shutil.copy(path, folder)
    elif state.base != "nothing":
        shutil.copytree(runs / state.base, folder, dirs_exist_ok=True)

    if state.damage and state.base != "checkpoints alone":
        state.damage(folder)
    if state.extra == "other run's checkpoint":
        return checkpoint_of_another_run(folder, runs)
    return state.extra(folder) if state.extra else []


def modes_of(state: State, runs: Path) -> list[Mode]:
    """No flag, auto, --overwrite, another run's path, and a path of its own where there is one."""
    modes = [Mode("no flag"), Mode("auto", "auto"), Mode("overwrite", overwrite=True)]
    modes.append(Mode("other run", str(runs / "other" / "last.pt")))
    if state.has_run:
        modes.append(Mode("own path", "step_00000004.pt", own=True))
    return modes


def check_accepted(state: State, mode: Mode, empty: bool, begun: int) -> None:
    """Assert that a run which started in a folder was allowed to, and began where it should."""
    if mode.name == "no flag":
        assert empty
    if mode.name == "auto" and state.has_run:
        assert begun == 5
    if mode.name == "own path":
        assert begun == 4
    if mode.name == "other run":
        assert not state.has_run
        assert begun == 4
    if mode.name == "overwrite":
        assert begun == 0
        assert state.damage is None or state.base in ("begun", "run", "old") or empty


@pytest.mark.parametrize(("share", "count"), [(3, 55), pytest.param(1, 90, marks=pytest.mark.soak)])
def test_ninety_folders_in_odd_states(runs, tmp_path, share, count):
    """Each with no flag, auto, a path of its own, another run's path, and --overwrite. In the quick suite all that are
    odd in one way, and a third of those that are in two: each pair of ways on one base or two."""
    states = odd_states(share)
    assert len(states) == count

    refused = accepted = 0
    for number, state in enumerate(states):
        for mode in modes_of(state, runs):
            print(f"{number}: {state}, {mode}")
            folder = tmp_path / f"{number}_{mode.name.replace(' ', '_')}"
            foreign = make_state(folder, runs, state)
            before = tree(folder)
            steps = logged(folder) if (folder / "metrics.jsonl").exists() else []
            resume_from = str(folder / mode.resume_from) if mode.own else mode.resume_from

            reason = None
            try:
                begun = toy_run(folder, 9, resume_from, mode.overwrite)
            except InputError as error:
                reason = str(error)

            # refused in one line, and every byte as it was
            if reason is not None:
                refused += 1
                assert "\n" not in reason
                assert tree(folder) == before
                assert mode.name != "no flag" or before
                continue

            # accepted: what is not its own is still there, and its log has each step once
            accepted += 1
            after = tree(folder)
            assert {name: after.get(name) for name in foreign} == {name: before[name] for name in foreign}
            check_accepted(state, mode, empty=not before, begun=begun)
            kept = [step for step in steps if step <= begun] if state.has_run and not mode.overwrite else []
            assert logged(folder) == [*kept, *range(begun + 1, 10)]

    print(f"{len(states)} states: {refused} refused, {accepted} accepted")
    assert refused > 100
    assert accepted > 50


# --- kills ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of a kill: nothing catches it but the test."""


def kill_before(operation: int, monkeypatch) -> None:
    """From the given file operation on, none is carried out, as after a kill."""
    left = operation

    def guarded(real):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*args, **kwargs)

        return call

    for name in ("replace", "link", "fsync", "unlink"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))


WAYS = ("going back", "into a new folder", "overwrite", "from best.pt")


@pytest.mark.parametrize("way", WAYS)
def test_killed_at_each_step_of_a_change_of_course(way, runs, tmp_path, monkeypatch):
    """Whenever it is killed, `auto` then follows either the old course as a whole or the new one, never a mixture."""
    beginnings = set()
    for operation in itertools.count():
        folder = tmp_path / str(operation)
        if way != "into a new folder":
            shutil.copytree(runs / "run", folder)
        checkpoints = {
            "going back": folder / "step_00000004.pt",
            "into a new folder": runs / "run" / "step_00000004.pt",
            "from best.pt": folder / "best.pt",
        }
        resume_from = str(checkpoints[way]) if way in checkpoints else None

        # the new course ends at step 6, which the old one did not reach
        finished = False
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            kill_before(operation, patch)
            toy_run(folder, 6, resume_from, overwrite=way == "overwrite")
            finished = True

        if not any(folder.glob("step_*.pt")) and way in ("overwrite", "into a new folder"):
            assert toy_run(folder, 6, "auto") == 0
        else:
            beginnings.add(toy_run(folder, 6, "auto"))

        # the folder is that of a run without a kill
        steps = logged(folder)
        assert steps == list(range(steps[0], 7))
        checkpoint = load_checkpoint("auto", folder, "toy")
        assert checkpoint["step"] == 6
        assert float(checkpoint["model"]["value"][0]) == sum(range(1, 7))
        manifest = manifest_utils.read_manifest(folder)
        assert manifest.steps() == ["step_00000005.pt", "step_00000006.pt"]
        if finished:
            break
    print(f"{way}: stopped before each of {operation} file operations; auto began at {sorted(beginnings)}")
    assert operation > 8


def start_when_told(folder: Path, start: int, go: int) -> int:
    """Fork a process that starts a toy run once `go` is closed; its exit code is 2 for a refusal. Returns its id."""
    child = os.fork()
    if child:
        return child

    os.close(go)
    os.read(start, 1)
    code = 1
    try:
        toy_run(folder, 2)
        code = 0
    except InputError as error:
        code = 2 if re.search("another run is writing here|holds a run already", str(error)) else 3
    finally:
        os._exit(code)


@pytest.mark.parametrize("times", [15, pytest.param(50, marks=pytest.mark.soak)])
def test_two_fresh_runs_at_once(tmp_path, times):
    """Each time, two processes start a run in one folder at the same moment: one wins, one is refused."""
    for number in range(times):
        folder = tmp_path / str(number)
        start, go = os.pipe()
        children = [start_when_told(folder, start, go) for _ in range(2)]
        os.close(start)
        os.close(go)

        statuses = [os.waitpid(child, 0)[1] for child in children]
        assert sorted(os.waitstatus_to_exitcode(status) for status in statuses) == [0, 2]
        assert logged(folder) == [1, 2]


@pytest.mark.parametrize(("taken_over", "error"), [(False, "was removed"), (True, "taken over by another run")])
def test_a_run_that_lost_its_folder(runs, tmp_path, monkeypatch, taken_over, error):
    """Removed, or taken over by another run, between two checkpoints: one line, and the other run is left alone."""
    folder = tmp_path / "run"
    real_save = checkpoint_utils.save_checkpoint

    def save(run_folder, checkpoint, step, keep_last):
        if step == 3:
            settle_checkpoint()
            shutil.rmtree(run_folder)
            if taken_over:
                shutil.copytree(runs / "other", run_folder)
        return real_save(run_folder, checkpoint, step, keep_last)

    monkeypatch.setattr(checkpoint_utils, "save_checkpoint", save)
    with pytest.raises(RunError, match=error):
        toy_run(folder, 4)
    assert not taken_over or tree(folder) == tree(runs / "other")


def test_a_run_that_loses_its_folder_in_the_middle_of_a_save(tmp_path, monkeypatch):
    """As above: no word of a full disk, and none of a checkpoint before that is intact."""
    folder = tmp_path / "run"
    real_write = checkpoint_utils.write_checkpoint

    def write(path, checkpoint):
        if checkpoint["step"] == 3:
            shutil.rmtree(folder)
        return real_write(path, checkpoint)

    monkeypatch.setattr(checkpoint_utils, "write_checkpoint", write)
    with pytest.raises(RunError, match="was removed while the run was writing there"):
        toy_run(folder, 4)


# --- damaged checkpoints ----------------------------------------------------------------------------------------------


def damage(path: Path, kind: str, chance: random.Random) -> None:
    """Flip a bit of a file, cut off its end, or fill a page of it with zeros, at a random place."""
    content = bytearray(path.read_bytes())
    path.unlink()
    if kind == "flip":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif kind == "truncation":
        del content[chance.randrange(len(content)) :]
    elif kind == "zero page":
        first = chance.randrange(0, len(content), 4096)
        content[first : first + 4096] = bytes(len(content[first : first + 4096]))
    path.write_bytes(content)


NAMES = ["last.pt", "best.pt", "step_00000004.pt", "step_00000005.pt"]
KINDS = ("flip", "flip", "flip", "truncation", "zero page", "swapped", "renamed")


def do_harm(path: Path, kind: str, run_folder: Path, chance: random.Random) -> Path:
    """Swap, rename or damage a checkpoint of a run folder, or a copy of it; returns its path, which may be new."""
    if kind == "swapped":
        others = [name for name in ("best.pt", "step_00000004.pt", "step_00000005.pt") if name != path.name]
        path.unlink()
        shutil.copy(run_folder / chance.choice(others), path)
        return path
    if kind == "renamed":
        return path.rename(path.with_name(f"step_{chance.randrange(6, 9):08d}.pt"))
    damage(path, kind, chance)
    return path


@pytest.mark.parametrize("trials", [350, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_thousand_damaged_checkpoints(runs, tmp_path, trials):
    """Flipped, truncated, zeroed, swapped, renamed; in the folder and copied out; auto and path: 0 wrong loads."""
    chance = random.Random(0)
    value_at = {step: float(sum(range(1, step + 1))) for step in range(10)}
    refused = loaded = 0
    for trial in range(trials):
        folder = tmp_path / "run"
        old = trial % 5 == 4
        shutil.copytree(runs / ("old" if old else "run"), folder)
        kind = KINDS[trial % 7]
        name = chance.choice(NAMES)
        print(f"{trial}: {name} {kind}")

        # harm it, in the folder or copied out
        path = folder / name
        copied = chance.random() < 0.4
        if copied:
            path = Path(shutil.copy(path, tmp_path / name))
        path = do_harm(path, kind, folder, chance)

        resume_from = "auto" if not copied and chance.random() < 0.4 else str(path)
        try:
            checkpoint = load_checkpoint(resume_from, folder, "toy")
        except InputError:
            refused += 1
        else:
            # what is loaded is what was saved at this step, and the step that the name says
            loaded += 1
            step = checkpoint["step"]
            assert set(checkpoint["model"]["value"].tolist()) == {value_at[step]}
            named = re.fullmatch(r"step_0*(\d+)\.pt", path.name)
            assert resume_from == "auto" or named is None or int(named[1]) == step

            # the name means what the manifest says, whatever lies under it
            if resume_from != "auto" and not copied and kind == "swapped" and not old:
                assert step == {"last.pt": 5, "best.pt": 3}.get(name, step)
        shutil.rmtree(folder)
        path.unlink(missing_ok=True)
    print(f"{trials} damaged checkpoints: {refused} refused, {loaded} loaded")
    assert refused > 0.4 * trials
    assert loaded > 0.1 * trials


def test_checkpoints_from_before_the_seals(runs, tmp_path):
    """Loaded by auto and path, copied out too, and the run goes on in their folder."""
    old = tmp_path / "old"
    shutil.copytree(runs / "old", old)
    for name, step in (("last.pt", 5), ("best.pt", 3), ("step_00000004.pt", 4)):
        assert load_checkpoint(str(old / name), old, "toy")["step"] == step
        copy = shutil.copy(old / name, tmp_path / f"copy_of_{name}")
        assert load_checkpoint(str(copy), old, "toy")["step"] == step
    assert toy_run(old, 7, "auto") == 5
    assert logged(old) == list(range(1, 8))
    assert manifest_utils.read_seal(old / "last.pt").step == 7
    # the second resume finds a manifest with a run's name, and a checkpoint without
    assert toy_run(old, 7, str(old / "step_00000006.pt")) == 6


# --- the optimizer's moments ------------------------------------------------------------------------------------------


FORMATS = {"contiguous": torch.contiguous_format, "2d": torch.channels_last, "3d": torch.channels_last_3d}
SHAPES = [((8, 4, 3, 3), "2d"), ((6, 3, 5, 1), "2d"), ((4, 6, 3, 3, 3), "3d"), ((8, 8, 1, 1, 1), "3d")]


def make_optimizer(kind: str, weight: torch.Tensor, memory_format: str, fused: bool):
    """A parameter of these values in a memory format, and its optimizer."""
    parameter = torch.nn.Parameter(weight.clone().contiguous(memory_format=FORMATS[memory_format]))
    options = {"lr": 0.01, "weight_decay": 0.1, "fused": fused}
    if kind == "sgd":
        return parameter, torch.optim.SGD([parameter], momentum=0.9, **options)
    if kind == "adam":
        return parameter, torch.optim.Adam([parameter], **options)
    return parameter, torch.optim.AdamW([parameter], **options)


def make_step(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
    """Update a parameter by a gradient, which takes the parameter's memory format."""
    parameter.grad = torch.empty_like(parameter).copy_(gradient)
    optimizer.step()


def contiguous_state(saved: dict) -> dict:
    """An optimizer's state with contiguous moments, for an optimizer that is not fused."""
    moments = {name: value.clone(memory_format=torch.contiguous_format) for name, value in saved["state"][0].items()}
    return {"param_groups": [saved["param_groups"][0] | {"fused": False}], "state": {0: moments}}


@pytest.mark.parametrize(("shape", "other"), SHAPES)
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("seed", range(5))
def test_optimizer_states_across_memory_formats(seed, kind, shape, other):
    """Saved with the strides of one memory format, loaded into parameters of another: the step is unfused AdamW's."""
    torch.manual_seed(seed)
    weight, first, second = torch.randn(3, *shape).unbind()
    before = other if seed % 2 else "contiguous"
    now = "contiguous" if seed % 2 else other

    # a checkpoint does not say whether the optimizer was fused: the script that resumes does
    trained, optimizer = make_optimizer(kind, weight, before, fused=False)
    make_step(trained, optimizer, first)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["fused"] = True

    expected, reference = make_optimizer(kind, weight, "contiguous", fused=False)
    reference.load_state_dict(contiguous_state(saved))
    make_step(expected, reference, second)

    resumed, fused = make_optimizer(kind, weight, now, fused=True)
    restore_optimizer(fused, saved, weight_decay=0.1)
    make_step(resumed, fused, second)
    assert torch.allclose(resumed, expected, rtol=1e-6, atol=1e-7)


def test_the_state_of_another_optimizer():
    """One line, whether the groups, the moments or their shapes do not fit."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(4)
    optimizer.step()
    saved = optimizer.state_dict()

    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 2))])
    for wrong in (saved, {"state": {}, "param_groups": []}, {"state": {}}):
        with pytest.raises(InputError, match="the state of another optimizer"):
            restore_optimizer(other, wrong, 0.0)


# --- what a review found ----------------------------------------------------------------------------------------------


def test_the_log_of_another_branch_is_not_cut(runs, tmp_path):
    """A copy of a checkpoint that the folder has left, or has not seen yet, is refused; the folder stays as it was."""
    folder = tmp_path / "run"
    toy_run(folder, 8)
    copy = shutil.copy(folder / "step_00000008.pt", tmp_path / "copy.pt")
    shutil.copytree(folder, tmp_path / "twin")
    toy_run(folder, 12, str(folder / "step_00000007.pt"))
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().replace("8.0", "8.5", 1))

    for target, checkpoint in ((folder, copy), (tmp_path / "twin", folder / "last.pt")):
        before = tree(target)
        with pytest.raises(InputError, match="of another branch of the run"):
            toy_run(target, 14, str(checkpoint))
        assert {name: tree(target)[name] for name in before} == before


def test_a_log_changed_by_hand_is_not_called_another_branch(tmp_path):
    """An editor that saves other line ends: what to do is said, and nothing is touched."""
    folder = tmp_path / "run"
    toy_run(folder, 4)
    log = folder / "metrics.jsonl"
    content = log.read_bytes()
    log.write_bytes(content.replace(b"\n", b"\r\n"))
    before = tree(folder)
    with pytest.raises(InputError, match=r"was changed after step_00000004\.pt was written; move it away"):
        toy_run(folder, 6, "auto")
    assert tree(folder) == before


@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_log_that_lost_lines_is_said(left, tmp_path, capsys):
    folder = tmp_path / "run"
    toy_run(folder, 4)
    log = folder / "metrics.jsonl"
    kept = b"".join(log.read_bytes().splitlines(keepends=True)[:left])
    log.write_bytes(kept) if left else log.unlink()
    assert toy_run(folder, 6, "auto") == 4
    assert logged(folder) == [*range(1, left + 1), 5, 6]
    reason = "lacks lines that were logged before step_00000004.pt; the run goes on, its curves are without them"
    assert capsys.readouterr().err.splitlines() == [f"warning: {log}: {reason}"]


def test_a_good_best_is_not_replaced_by_a_damaged_step(runs, tmp_path):
    """In a copy of the folder best.pt is a file of its own; the step it equals is damaged, the newest is not."""
    folder = tmp_path / "run"
    toy_run(folder, 3)
    toy_run(folder, 4, "auto")
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy" / "step_00000003.pt", "flip", random.Random(0))
    toy_run(tmp_path / "copy", 5, "auto")
    assert load_checkpoint(str(tmp_path / "copy" / "best.pt"), folder, "toy")["step"] == 3


def test_the_last_intact_copy_is_found(tmp_path):
    """One step, damaged, and last.pt good: `auto` resumes from that; only best.pt good: it is named."""
    folder = tmp_path / "run"
    toy_run(folder, 3)
    shutil.copytree(folder, tmp_path / "copy")
    for name in ("step_00000002.pt", "step_00000003.pt"):
        damage(tmp_path / "copy" / name, "flip", random.Random(0))
    assert toy_run(tmp_path / "copy", 4, "auto") == 3
    assert manifest_utils.find_damage(tmp_path / "copy" / "step_00000003.pt") == ""


def test_a_failed_save_deletes_nothing_that_counts(tmp_path, monkeypatch):
    """The disk fails after the manifest took its place: what it names stays."""
    folder = tmp_path / "run"
    toy_run(folder, 3)
    real_sync = manifest_utils._sync_folder
    calls = []

    def fail(path):
        calls.append(path)
        # the second time in a save is the manifest's
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real_sync(path)

    checkpoint = load_checkpoint("auto", folder, "toy").plain()
    monkeypatch.setattr(manifest_utils, "_sync_folder", fail)
    checkpoint_utils.save_checkpoint(folder, checkpoint, 4, keep_last=1)
    with pytest.raises(RunError, match="not written"):
        settle_checkpoint()
    assert not list(folder.glob(".*.tmp"))
    monkeypatch.undo()
    assert newest_step(folder) == 4


def test_a_symbolic_link_as_checkpoint(runs, tmp_path):
    """A link to best.pt, whose step has lost its own name, becomes a checkpoint and not a link to what follows."""
    folder = tmp_path / "run"
    shutil.copytree(runs / "run", folder)
    (tmp_path / "mine.pt").symlink_to(folder / "best.pt")
    assert toy_run(folder, 4, str(tmp_path / "mine.pt")) == 3
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert toy_run(folder, 5, "auto") == 4


def test_results_without_checkpoints_are_not_started_anew(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs / "run", folder)
    for path in (*folder.glob("*.pt"), folder / "manifest.sha256"):
        path.unlink()
    (folder / "args.yaml").write_text(ARGS)
    before = tree(folder)
    with pytest.raises(InputError, match="no checkpoint to resume"):
        toy_run(folder, 6, "auto")
    assert tree(folder) == before
    assert toy_run(folder, 6, overwrite=True) == 0


RUN_NAMES = ["step_00000009.pt", "best.pt", "manifest.sha256", "args.yaml", "metrics.jsonl", ".lock"]


@pytest.mark.parametrize("name", RUN_NAMES)
@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize(("resume_from", "overwrite"), [("auto", False), (None, True)])
def test_names_of_a_run_that_are_no_files(name, kind, resume_from, overwrite, runs, tmp_path):
    """A pipe would be waited for, for ever; a folder ended the run after its first validation."""
    folder = tmp_path / "run"
    shutil.copytree(runs / "run", folder)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    with pytest.raises(InputError, match="is not what a run writes under this name"):
        toy_run(folder, 6, resume_from, overwrite)


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path):
    toy_run(tmp_path, 2)
    training = toy_training(tmp_path, step=1)
    for value, best in ((float("nan"), None), (0.9, 0.9), (float("inf"), 0.9)):
        keep_best(training, value, planned=True)
        assert training.progress.best == best

    # a checkpoint of before that check
    saved = vars(training.progress) | {"best": float("nan")}
    resumed = Progress()
    resume(resumed, {"run": {}, "state": saved}, {}, tmp_path)
    assert resumed.step == 1
    assert resumed.best is None
