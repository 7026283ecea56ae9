"""Run folders in odd states: nothing is deleted or cut that should not be, and no start is mistaken for a resume.

A toy run goes through what the five scripts share (lock, load, log, save); test_contract.py repeats some by the real
scripts.
"""

import copy
import itertools
import json
import os
import random
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import tree

import checkpoint_utils as ckpt
import manifest_utils
from cli_utils import InputError, RunError
from distributed_utils import Ranks
from logging_utils import RunLog
from loop_utils import Progress, TrainingRun, keep_best, resume

ONE = Ranks(0, 0, 1, torch.device("cpu"), "python")
ARGS = "dist_timeout: 600\nkeep_last: 2\nmax_bad_steps: 10\n"


def toy_run(folder: Path, last: int, resume: str | None = None, overwrite: bool = False) -> int:
    """Train a number up to step `last` in a run folder, as the five scripts do; returns the step it began at."""
    args = Namespace(log_every=1, wandb=False, overwrite=overwrite, keep_last=2, max_bad_steps=10, dist_timeout=600)
    args.mixed_precision, args.compile = "no", False
    lock = ckpt.lock_run_folder(folder, bool(resume) or overwrite, wait=0, overwrite=overwrite)
    contents = ckpt.load_checkpoint(resume, folder, "toy", resume=True)
    begun = step = contents["step"] if contents else 0
    value = contents["model"]["value"] if contents else torch.zeros(64)
    log = RunLog(folder, ONE, ["loss", "skipped"], last, 1, "no")
    log.open(args, contents)
    while step < last:
        step += 1
        value = value + step
        log.step(torch.tensor([float(value[0]), 0.0]), 1, 1e-3)
        log.write_interval(step, 1)
        parts = {"format": "toy", "model": {"value": value}, "log": log.pending(step)}
        ckpt.save_checkpoint(folder, parts, step, args.keep_last)
        if step == 3:
            ckpt.mark_best(folder, step)
    (folder / "summary.json").write_text("{}")
    log.close()
    del lock
    return begun


def toy_training(folder: Path, step: int) -> TrainingRun:
    """A run of toy_run's at a step, as the shared loop sees it."""
    return TrainingRun(
        run_folder=folder,
        progress=Progress(step=step),
        last_step=9,
        planned_steps=9,
        effective_batch_size=1,
        precision="no",
        log=None,
        contents=dict,
    )


def logged(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Events:
    """In place of TensorBoard's writer, which takes most of a toy run's time: a file of its own, and nothing in it."""

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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders to copy: a finished run of 5 steps, another one, one killed before its first save, and one from before
    the seals."""
    root = tmp_path_factory.mktemp("runs")
    toy_run(root / "run", 5)
    toy_run(root / "other", 4)
    toy_run(root / "begun", 0)
    shutil.copytree(root / "run", root / "old")
    for path in sorted((root / "old").glob("*.pt")):
        contents = torch.load(path, weights_only=True)
        del contents["run_id"], contents["log"]["run_id"]
        path.unlink()
        torch.save(contents, path)
    names = ["step_00000004.pt", "step_00000005.pt", "last.pt", "best.pt"]
    text = "".join(f"{manifest_utils.file_sha256(root / 'old' / name)}  {name}\n" for name in names)
    (root / "old" / "manifest.sha256").write_text(text)
    return root


def no_manifest(folder: Path) -> None:
    (folder / "manifest.sha256").unlink(missing_ok=True)


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.sha256").write_text("")


def unreadable_manifest(folder: Path) -> None:
    (folder / "manifest.sha256").write_bytes(os.urandom(200))


def cut_manifest(folder: Path) -> None:
    if (folder / "manifest.sha256").exists():
        text = (folder / "manifest.sha256").read_text()
        (folder / "manifest.sha256").write_text(text[: len(text) - 30])


def foreign_files(folder: Path) -> list[str]:
    """Files of another program under names that a run uses too."""
    for name in ("logs/notes.txt", "figures/photo.png", "model_best.pt", "step_00000001.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not of this run")
    return ["logs/notes.txt", "figures/photo.png", "model_best.pt", "step_00000001.pt"]


def foreign_folders(folder: Path) -> list[str]:
    for name in ("logs/notes.txt", "figures/photo.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not of this run")
    return ["logs/notes.txt", "figures/photo.png"]


BASES = ("nothing", "begun", "run", "old", "checkpoints alone")
MANIFESTS = (None, no_manifest, empty_manifest, unreadable_manifest, cut_manifest)
EXTRAS = (None, foreign_files, foreign_folders, "other run's checkpoint")


def make_state(folder: Path, runs: Path, base: str, damage, extra) -> list[str]:
    """Bring a folder into one of the states; returns the files in it that no run may touch."""
    folder.mkdir()
    if base == "checkpoints alone":
        for path in (runs / "run").glob("step_*.pt"):
            shutil.copy(path, folder)
    elif base != "nothing":
        shutil.copytree(runs / base, folder, dirs_exist_ok=True)
    if damage and base != "checkpoints alone":
        damage(folder)
    if extra == "other run's checkpoint":
        shutil.copy(runs / "other" / "step_00000004.pt", folder / "step_00000007.pt")
        # so that the name agrees with what is inside
        contents = torch.load(folder / "step_00000007.pt", weights_only=True) | {"step": 7}
        (folder / "step_00000007.pt").unlink()
        manifest_utils.write_checkpoint(folder / "step_00000007.pt", contents)
        return ["step_00000007.pt"]
    return extra(folder) if extra else []


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_ninety_folders_in_odd_states(runs, tmp_path, share):
    """Each with no flag, auto, a path of its own, another run's path, and --overwrite. In the quick suite all that are
    odd in one way, and a third of those that are in two: each pair of ways on one base or two."""
    refused = accepted = states = 0
    for number, (base, damage, extra) in enumerate(itertools.product(BASES, MANIFESTS, EXTRAS)):
        has_run = base in ("run", "old", "checkpoints alone")
        if damage and extra and number % share:
            continue
        if extra == "other run's checkpoint" and not has_run:
            # alone in a folder, it is the checkpoint of the folder's run
            continue
        states += 1
        modes = {"no flag": (None, False), "auto": ("auto", False), "overwrite": (None, True)}
        modes["other run"] = str(runs / "other" / "last.pt"), False
        if has_run:
            modes["own path"] = "step_00000004.pt", False
        for mode, (resume_from, overwrite) in modes.items():
            folder = tmp_path / f"{states}_{mode.replace(' ', '_')}"
            foreign = make_state(folder, runs, base, damage, extra)
            before = tree(folder)
            kept = {name: before[name] for name in foreign}
            metrics = logged(folder) if (folder / "metrics.jsonl").exists() else []
            resume_from = str(folder / resume_from) if mode == "own path" else resume_from
            where = base, damage, extra, mode
            try:
                begun = toy_run(folder, 9, resume_from, overwrite)
            except InputError as error:
                message = str(error)
            else:
                message = None
            if message is not None:
                refused += 1
                assert "\n" not in message
                assert tree(folder) == before, (where, message)
                assert mode != "no flag" or before, where
                continue
            accepted += 1
            after = tree(folder)
            assert all(after.get(name) == content for name, content in kept.items()), where
            if mode == "no flag":
                assert not before, where
            if mode == "auto" and has_run:
                assert begun == 5, where
            if mode == "own path":
                assert begun == 4, where
            if mode == "other run":
                assert not has_run, where
                assert begun == 4, where
            if mode == "overwrite":
                assert begun == 0, where
                assert damage is None or base in ("begun", "run", "old") or not before, where
            expected = [step for step in metrics if step <= begun] if has_run and not overwrite else []
            assert logged(folder) == expected + list(range(begun + 1, 10)), where
    print(f"{states} states: {refused} refused, {accepted} accepted")
    assert states == (90 if share == 1 else 55)
    assert refused > 100
    assert accepted > 50


class Killed(BaseException):
    pass


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


@pytest.mark.parametrize("way", ["going back", "into a new folder", "overwrite", "from best.pt"])
def test_killed_at_each_step_of_a_change_of_course(way, runs, tmp_path, monkeypatch):
    """Whenever it is killed, `auto` then follows either the old course as a whole or the new one, never a mixture."""
    outcomes = []
    for operation in itertools.count():
        folder = tmp_path / str(operation)
        if way != "into a new folder":
            shutil.copytree(runs / "run", folder)
        resume = {"going back": folder / "step_00000004.pt", "into a new folder": runs / "run" / "step_00000004.pt"}
        resume |= {"from best.pt": folder / "best.pt"}
        resume = str(resume[way]) if way in resume else None
        finished = False
        with monkeypatch.context() as patch:
            kill_before(operation, patch)
            try:
                # the new course ends at step 6, which the old one did not reach
                toy_run(folder, 6, resume, overwrite=way == "overwrite")
                finished = True
            except Killed:
                pass
        if not any(folder.glob("step_*.pt")) and way in ("overwrite", "into a new folder"):
            assert toy_run(folder, 6, "auto") == 0
        else:
            begun = toy_run(folder, 6, "auto")
            outcomes.append(begun)
        steps = logged(folder)
        assert steps == list(range(steps[0], 7))
        contents = ckpt.load_checkpoint("auto", folder, "toy")
        assert contents["step"] == 6
        assert float(contents["model"]["value"][0]) == sum(range(1, 7))
        manifest = manifest_utils.read_manifest(folder)
        assert manifest.steps() == ["step_00000005.pt", "step_00000006.pt"]
        if finished:
            break
    print(f"{way}: stopped before each of {operation} file operations; auto began at {sorted(set(outcomes))}")
    assert operation > 8


@pytest.mark.parametrize("times", [15, pytest.param(50, marks=pytest.mark.soak)])
def test_two_fresh_runs_at_once(tmp_path, times):
    """Each time, two processes start a run in one folder at the same moment: one wins, one is refused."""
    results = []
    for k in range(times):
        folder = tmp_path / str(k)
        start, go = os.pipe()
        children = []
        for _ in range(2):
            child = os.fork()
            if child == 0:
                os.close(go)
                # both go on when the parent closes its end
                os.read(start, 1)
                code = 1
                try:
                    toy_run(folder, 2)
                    code = 0
                except InputError as error:
                    code = 2 if re.search("another run is writing here|holds a run already", str(error)) else 3
                finally:
                    os._exit(code)
            children.append(child)
        os.close(start)
        os.close(go)
        results.append(sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
        assert logged(folder) == [1, 2]
    assert results == [[0, 2]] * times


def test_a_run_that_lost_its_folder(runs, tmp_path, monkeypatch):
    """Removed, or taken over by another run, between two checkpoints: one line, and the other run is left alone."""
    real = ckpt.save_checkpoint
    for takes_over in (False, True):
        folder = tmp_path / str(takes_over)

        def save(run_folder, contents, step, keep_last, takes_over=takes_over):
            if step == 3:
                ckpt.settle_checkpoint()
                shutil.rmtree(run_folder)
                if takes_over:
                    shutil.copytree(runs / "other", run_folder)
            return real(run_folder, contents, step, keep_last)

        with monkeypatch.context() as patch:
            patch.setattr(ckpt, "save_checkpoint", save)
            with pytest.raises(RunError, match="taken over by another run" if takes_over else "was removed"):
                toy_run(folder, 4)
        assert not takes_over or tree(folder) == tree(runs / "other")


def test_a_run_that_loses_its_folder_in_the_middle_of_a_save(tmp_path, monkeypatch):
    """As above: no word of a full disk, and none of a checkpoint before that is intact."""
    folder, real = tmp_path / "run", ckpt.write_checkpoint

    def write(path, contents):
        if contents["step"] == 3:
            shutil.rmtree(folder)
        return real(path, contents)

    monkeypatch.setattr(ckpt, "write_checkpoint", write)
    with pytest.raises(RunError, match="was removed while the run was writing there"):
        toy_run(folder, 4)


# --- damaged checkpoints ----------------------------------------------------------------------------------------------


def damage(path: Path, kind: str, chance: random.Random) -> None:
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


def content_of(path: Path) -> str:
    """What a checkpoint holds, to compare."""
    return repr(sorted((name, str(value)) for name, value in torch.load(path, weights_only=True)["model"].items()))


@pytest.mark.parametrize("trials", [350, pytest.param(1000, marks=pytest.mark.soak)])
def test_a_thousand_damaged_checkpoints(runs, tmp_path, trials):
    """Flipped, truncated, zeroed, swapped, renamed; in the folder and copied out; auto and path: 0 wrong loads."""
    chance = random.Random(0)
    true = {step: float(sum(range(1, step + 1))) for step in range(10)}
    counts = {"refused": 0, "loaded": 0}
    kinds = ("flip", "flip", "flip", "truncation", "zero page", "swapped", "renamed")
    for trial in range(trials):
        folder = tmp_path / "run"
        shutil.copytree(runs / ("old" if trial % 5 == 4 else "run"), folder)
        kind, name = kinds[trial % 7], chance.choice(["last.pt", "best.pt", "step_00000004.pt", "step_00000005.pt"])
        path = folder / name
        copied = chance.random() < 0.4
        if copied:
            path = Path(shutil.copy(path, tmp_path / name))
        if kind == "swapped":
            source = chance.choice([n for n in ("best.pt", "step_00000004.pt", "step_00000005.pt") if n != name])
            path.unlink()
            shutil.copy(folder / source, path)
        elif kind == "renamed":
            path = path.rename(path.with_name(f"step_{chance.randrange(6, 9):08d}.pt"))
        else:
            damage(path, kind, chance)
        resume = "auto" if not copied and chance.random() < 0.4 else str(path)
        try:
            contents = ckpt.load_checkpoint(resume, folder, "toy")
        except InputError:
            counts["refused"] += 1
        else:
            counts["loaded"] += 1
            step, match = contents["step"], re.fullmatch(r"step_0*(\d+)\.pt", path.name)
            assert set(contents["model"]["value"].tolist()) == {true[step]}, (trial, kind, name)
            assert resume == "auto" or match is None or int(match[1]) == step, (trial, kind, name)
            if resume != "auto" and not copied and kind == "swapped" and trial % 5 != 4:
                # the name means what the manifest says, whatever lies under it
                assert step == {"last.pt": 5, "best.pt": 3}.get(name, step), (trial, name)
        shutil.rmtree(folder)
        path.unlink(missing_ok=True)
    print(f"{trials} damaged checkpoints: {counts}")
    assert counts["refused"] > 0.4 * trials
    assert counts["loaded"] > 0.1 * trials


def test_checkpoints_from_before_the_seals(runs, tmp_path):
    """Loaded by auto and path, copied out too, and the run goes on in their folder."""
    old = tmp_path / "old"
    shutil.copytree(runs / "old", old)
    for name, step in (("last.pt", 5), ("best.pt", 3), ("step_00000004.pt", 4)):
        assert ckpt.load_checkpoint(str(old / name), old, "toy")["step"] == step
        copy = shutil.copy(old / name, tmp_path / f"copy_of_{name}")
        assert ckpt.load_checkpoint(str(copy), old, "toy")["step"] == step
    assert toy_run(old, 7, "auto") == 5
    assert logged(old) == list(range(1, 8))
    assert manifest_utils.read_seal(old / "last.pt").step == 7
    # the second resume finds a manifest with a run's name, and a checkpoint without
    assert toy_run(old, 7, str(old / "step_00000006.pt")) == 6


# --- the optimizer's moments ------------------------------------------------------------------------------------------


FORMATS = {"contiguous": torch.contiguous_format, "2d": torch.channels_last, "3d": torch.channels_last_3d}


def test_sixty_optimizer_states_across_memory_formats():
    """Saved with the strides of one memory format, loaded into parameters of another: the step is unfused AdamW's."""
    tried = 0
    for seed, (shape, last) in itertools.product(
        range(5), (((8, 4, 3, 3), "2d"), ((6, 3, 5, 1), "2d"), ((4, 6, 3, 3, 3), "3d"), ((8, 8, 1, 1, 1), "3d"))
    ):
        for kind, (before, now) in itertools.product(("adamw", "adam", "sgd"), (("contiguous", last),)):
            torch.manual_seed(seed)
            weight, first, second = torch.randn(3, *shape).unbind()
            before, now = (last, "contiguous") if seed % 2 else (before, now)

            def make(memory_format, fused, weight=weight, kind=kind):
                parameter = torch.nn.Parameter(weight.clone().contiguous(memory_format=FORMATS[memory_format]))
                options = {"lr": 0.01, "weight_decay": 0.1, "fused": fused}
                if kind == "sgd":
                    return parameter, torch.optim.SGD([parameter], momentum=0.9, **options)
                kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
                return parameter, kinds[kind]([parameter], **options)

            def step(parameter, optimizer, grad):
                parameter.grad = torch.empty_like(parameter).copy_(grad)
                optimizer.step()

            trained, optimizer = make(before, False)
            step(trained, optimizer, first)
            # a checkpoint does not say whether the optimizer was fused: the script that resumes does
            saved = copy.deepcopy(optimizer.state_dict())
            saved["param_groups"][0]["fused"] = True
            expected, reference = make("contiguous", False)
            moments = {
                name: value.clone(memory_format=FORMATS["contiguous"]) for name, value in saved["state"][0].items()
            }
            reference.load_state_dict(
                {"param_groups": [saved["param_groups"][0] | {"fused": False}], "state": {0: moments}}
            )
            step(expected, reference, second)

            resumed, fused = make(now, True)
            ckpt.restore_optimizer(fused, saved, weight_decay=0.1)
            step(resumed, fused, second)
            assert torch.allclose(resumed, expected, rtol=1e-6, atol=1e-7), (shape, kind, before, now)
            tried += 1
    assert tried == 60


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
            ckpt.restore_optimizer(other, wrong, 0.0)


# --- what a review found ----------------------------------------------------------------------------------------------


def test_the_log_of_another_branch_is_not_cut(runs, tmp_path):
    """A copy of a checkpoint that the folder has left, or has not seen yet, is refused; the folder stays as it was."""
    folder = tmp_path / "run"
    toy_run(folder, 8)
    copy = shutil.copy(folder / "step_00000008.pt", tmp_path / "copy.pt")
    shutil.copytree(folder, tmp_path / "twin")
    toy_run(folder, 12, str(folder / "step_00000007.pt"))
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().replace("8.0", "8.5", 1))
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
    said = capsys.readouterr().err.splitlines()
    text = "lacks lines that were logged before step_00000004.pt; the run goes on, its curves are without them"
    assert said == [f"warning: {log}: {text}"]


def test_a_good_best_is_not_replaced_by_a_damaged_step(runs, tmp_path):
    """In a copy of the folder best.pt is a file of its own; the step it equals is damaged, the newest is not."""
    folder = tmp_path / "run"
    toy_run(folder, 3)
    toy_run(folder, 4, "auto")
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy" / "step_00000003.pt", "flip", random.Random(0))
    toy_run(tmp_path / "copy", 5, "auto")
    assert ckpt.load_checkpoint(str(tmp_path / "copy" / "best.pt"), folder, "toy")["step"] == 3


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
    real, calls = manifest_utils._sync_folder, []

    def fail(path):
        calls.append(path)
        # the second time in a save is the manifest's
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(path)

    contents = ckpt.load_checkpoint("auto", folder, "toy").plain()
    monkeypatch.setattr(manifest_utils, "_sync_folder", fail)
    ckpt.save_checkpoint(folder, contents, 4, keep_last=1)
    with pytest.raises(RunError, match="not written"):
        ckpt.settle_checkpoint()
    assert not list(folder.glob(".*.tmp"))
    monkeypatch.undo()
    assert ckpt.load_checkpoint("auto", folder, "toy")["step"] == 4


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


@pytest.mark.parametrize(
    "name", ["step_00000009.pt", "best.pt", "manifest.sha256", "args.yaml", "metrics.jsonl", ".lock"]
)
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_names_of_a_run_that_are_no_files(name, kind, runs, tmp_path):
    """A pipe would be waited for, for ever; a folder ended the run after its first validation."""
    for mode in (("auto", False), (None, True)):
        folder = tmp_path / str(mode[1])
        shutil.copytree(runs / "run", folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name) if kind == "pipe" else (folder / name).mkdir()
        with pytest.raises(InputError, match="is not what a run writes under this name"):
            toy_run(folder, 6, *mode)


def test_a_value_that_is_not_finite_is_never_the_best(tmp_path):
    toy_run(tmp_path, 2)
    training = toy_training(tmp_path, step=1)
    for value, best in ((float("nan"), None), (0.9, 0.9), (float("inf"), 0.9)):
        keep_best(training, value, planned=True)
        assert training.progress.best == best
    saved = vars(training.progress) | {"best": float("nan")}
    resumed = Progress()
    resume(resumed, {"run": {}, "state": saved}, {}, tmp_path)
    assert resumed.step == 1
    assert resumed.best is None


def test_folds_are_overwritten_all_or_none(runs, tmp_path):
    """A kill while --overwrite deletes the folds of a cross-validation: the next start finishes that first."""
    folder = tmp_path / "folds"
    for name in ("fold_1", "fold_2"):
        shutil.copytree(runs / "run", folder / name)
    (folder / "args.yaml").write_text(ARGS)
    real, calls = Path.unlink, []

    def unlink(self, missing_ok=False):
        calls.append(self)
        if len(calls) == 5:
            raise Killed
        real(self, missing_ok=missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(Killed):
            ckpt.begin_afresh(folder, (folder / "fold_1", folder / "fold_2"))
    ckpt.finish_deleting(folder)
    assert [toy_run(folder / name, 2, "auto") for name in ("fold_1", "fold_2")] == [0, 0]
