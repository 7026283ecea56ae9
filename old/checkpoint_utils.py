"""Checkpoints that survive a kill at any moment: atomic save, checked load, exact resume, retention, export of weights.

A run folder holds `step_00000120.pt` files, hard links `last.pt` and `best.pt` to two of them, and a manifest. A
checkpoint counts once it is in the manifest, and nothing in a run folder is deleted or cut before the manifest says so.
"""

import functools
import hashlib
import os
import random
import re
import secrets
import sys
import time
from pathlib import Path

import numpy as np
import torch

from old.async_save_utils import WRITER
from old.cli_utils import InputError, RunError
from old.distributed_utils import agree_on_errors, broadcast_object, gather_objects, print_main, world
from old.manifest_utils import (
    MANIFEST,
    RESULT_FILES,
    Manifest,
    delete_obsolete,
    # What is asked of files, and how they are written.
    file_is,
    file_sha256,
    find_damage,
    identify,
    is_checkpoint_name,
    is_own_checkpoint,
    link,
    misnamed,
    prepare_link,
    read_manifest,
    read_seal,
    recover_manifest,
    write_atomically,
    write_checkpoint,
    write_manifest,
)

# What takes long says so.
from old.phase_utils import doing

# --- state of the random generators -----------------------------------------------------------------------------------


def get_rng_state() -> dict:
    """State of this process's generators (torch CPU and GPU, NumPy, random) as tensors and numbers."""
    # Libraries still draw from NumPy's own generator.
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "python": list(random.getstate()),
    }


def restore_rng(states: list[dict]) -> None:
    """Take this rank's state out of a checkpoint's list; at another world size the generators stay as seeded."""
    rank, world_size = world()
    if len(states) != world_size:
        return

    state = states[rank]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


# --- save -------------------------------------------------------------------------------------------------------------


def trained_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model: the trained tensors (and buffers).

    Names are those of the plain module, whatever wrapped it (no `module.` of DDP, no `_orig_mod.` of torch.compile).
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    state = {}
    for name, value in model.state_dict().items():
        if name not in frozen:
            state[name.removeprefix("module.").replace("_orig_mod.", "")] = value
    return state


def load_trained(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Put the weights of trained_state into an unwrapped model.

    Raises InputError when a name or a shape does not fit.
    """
    state = model.state_dict()
    lacking = sorted(trained_state(model).keys() - weights.keys())
    unlike = [name for name, value in weights.items() if name not in state or state[name].shape != value.shape]
    wrong = lacking + unlike
    if wrong:
        reason = f"checkpoint of another model ({wrong[0]} does not fit)"
        raise InputError(f"--resume_from: {reason}; give the flags it was trained with")
    model.load_state_dict(weights, strict=False)


def save_checkpoint(run_folder: Path, contents: dict, step: int, keep_last: int) -> Path:
    """All ranks call it; rank 0 writes `step_<step>.pt` with every rank's random state and `last.pt`, drops old ones.

    It returns once rank 0 has a copy of the contents in its RAM (see CheckpointWriter), and a thread writes that; the
    file is there after settle_checkpoint. Without room for a copy it is written here.
    contents: dicts, lists, tensors, numbers and strings only. Raises RunError on all ranks when rank 0 could not write
    the checkpoint before this one, or when the run folder was taken away.
    """
    path = run_folder / f"step_{step:08d}.pt"
    rng = gather_objects(get_rng_state())
    with agree_on_errors():
        if world()[0] == 0:
            WRITER.wait()
            more = {"step": step, "rng": rng}
            snapshot = WRITER.copy(contents)
            if snapshot is None:
                _write(run_folder, path, contents | more, keep_last)
            else:
                WRITER.start(functools.partial(_write, run_folder, path, snapshot | more, keep_last))
    WRITER.unsettled = True
    return path


def prepare_checkpoint(model: torch.nn.Module, copies: int = 3) -> None:
    """Rank 0, before training: take the memory for the copies that save_checkpoint makes, in a thread.

    copies: how often the trained parameters' bytes are in a checkpoint: they and AdamW's two moments.
    """
    if world()[0] == 0:
        size = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        WRITER.prepare(copies * size, torch.cuda.is_available())


def settle_checkpoint() -> None:
    """All ranks call it: the checkpoint that was begun is on the disk, or all raise the error of its write."""
    if WRITER.unsettled:
        WRITER.unsettled = False
        with agree_on_errors():
            WRITER.wait()


def _write(run_folder: Path, path: Path, contents: dict, keep_last: int) -> None:
    """Write a checkpoint and what goes with it. Raises RunError."""
    try:
        _save(run_folder, path, contents, keep_last)
    except OSError as error:
        raise _not_written(path, error) from None


def _not_written(path: Path, error: OSError) -> RunError:
    """What to tell of a file that could not be written."""
    if not path.parent.is_dir():
        return _removed(path.parent)
    reason = f"not written ({error.strerror or error}), the checkpoint before is intact"
    return RunError(f"{path}: {reason}; make room, then go on with --resume_from auto")


def _removed(run_folder: Path) -> RunError:
    """What to tell of a run folder that is gone."""
    return RunError(f"{run_folder}: was removed while the run was writing there; start again")


def _manifest_of_this_run(run_folder: Path, run_id: str | None) -> Manifest:
    """The manifest to enter a checkpoint into. Raises RunError when the folder is gone or another run has it.

    run_id: what begin_run gave, None for a caller that has no log.
    """
    if not run_folder.is_dir():
        if run_id is not None:
            raise _removed(run_folder)
        run_folder.mkdir(parents=True)
    manifest = read_manifest(run_folder) or recover_manifest(run_folder)
    if run_id is not None and manifest.run_id not in ("", run_id):
        raise RunError(f"{run_folder}: was taken over by another run while this one was writing there; start again")
    manifest.run_id = run_id or manifest.run_id or secrets.token_hex(8)
    return manifest


def _save(run_folder: Path, path: Path, contents: dict, keep_last: int) -> None:
    """Write a checkpoint, enter it into the manifest, and delete those that it replaces. Raises OSError."""
    manifest = _manifest_of_this_run(run_folder, contents.get("log", {}).get("run_id"))
    saved_before = manifest.checkpoints.pop(path.name, None)
    digest = write_checkpoint(path, contents | {"run_id": manifest.run_id})

    # From the manifest on, the new file counts and the oldest ones do not.
    manifest.checkpoints |= {path.name: digest, "last.pt": digest}
    outdated = [name for name in manifest.obsolete if name not in manifest.checkpoints and is_checkpoint_name(name)]
    manifest.obsolete = [name for name in outdated if (run_folder / name).exists()]
    for name in manifest.steps()[:-keep_last]:
        del manifest.checkpoints[name]
        manifest.obsolete.append(name)

    try:
        _write_with_links(run_folder, manifest, path, ("last.pt",))
    except OSError:
        # The disk is full: leave no file that is in no manifest.
        on_disk = read_manifest(run_folder)
        if saved_before is None and on_disk and path.name not in on_disk.checkpoints:
            path.unlink()
        raise
    delete_obsolete(run_folder, manifest)


def _write_with_links(run_folder: Path, manifest: Manifest, path: Path, names: tuple[str, ...]) -> None:
    """Write the manifest and make a checkpoint's other names; what needs room on the disk comes before it."""
    links = {}
    try:
        for name in names:
            links[name] = prepare_link(path, run_folder / name)
        write_manifest(run_folder, manifest)
        for name, temporary in links.items():
            os.replace(temporary, run_folder / name)
    finally:
        for temporary in links.values():
            temporary.unlink(missing_ok=True)


def mark_best(run_folder: Path, step: int) -> str:
    """All ranks call it: `best.pt` becomes another name (hard link) of the checkpoint of `step`; returns its sha256."""
    path = run_folder / f"step_{step:08d}.pt"
    settle_checkpoint()
    with agree_on_errors():
        if world()[0] == 0:
            manifest = read_manifest(run_folder)
            if manifest is None or path.name not in manifest.checkpoints:
                raise RunError(f"{path}: was removed while the run was writing there; start again")
            manifest.checkpoints["best.pt"] = manifest.checkpoints[path.name]
            try:
                _write_with_links(run_folder, manifest, path, ("best.pt",))
            except OSError as error:
                raise _not_written(run_folder / "best.pt", error) from None
    return best_sha256(run_folder)


def best_sha256(run_folder: Path) -> str | None:
    """The manifest's sha256 of best.pt, on all ranks; None without one. A lost manifest leaves the file's own."""
    digest = None
    if world()[0] == 0:
        manifest = read_manifest(run_folder)
        if manifest is not None:
            digest = manifest.checkpoints.get("best.pt")
        elif (run_folder / "best.pt").is_file():
            digest = file_sha256(run_folder / "best.pt")
    return broadcast_object(digest)


def export_weights(state_dict: dict, path: Path) -> None:
    """All ranks call it: rank 0 writes the tensors as safetensors, readable without this project."""
    from safetensors.torch import save

    with agree_on_errors():
        if world()[0] == 0:
            tensors = {name: value.detach().cpu().contiguous() for name, value in state_dict.items()}
            try:
                write_atomically(path, lambda file: file.write(save(tensors)))
            except OSError as error:
                raise _not_written(path, error) from None


# --- load -------------------------------------------------------------------------------------------------------------


class _Part(dict):
    """A dict of a checkpoint. A key that is not there is an InputError: another version of the script wrote it."""

    path: Path

    def __missing__(self, key):
        reason = f"lacks {key!r}, so another version of this script wrote it"
        raise InputError(f"{self.path}: {reason}; use that version, or start afresh")


class Checkpoint(_Part):
    """What a checkpoint file holds, on the CPU; `path` is the file that was read."""

    def __init__(self, contents: dict, path: Path):
        super().__init__(contents)
        self.path = path
        for key, value in contents.items():
            if type(value) is dict:
                self[key] = _Part(value)
                self[key].path = path

    def plain(self) -> dict:
        """The same as dicts that torch.save writes without naming a class."""
        return {key: dict(value) if isinstance(value, _Part) else value for key, value in self.items()}


def find_newest(run_folder: Path) -> Path | None:
    """The newest intact checkpoint of a run folder, None in one without any; damaged ones are named and passed over.

    Without a readable manifest the checkpoints are checked by what is in them. Raises InputError when there are
    checkpoints and none can be used.
    """
    manifest = read_manifest(run_folder)
    if manifest is None or not manifest.steps():
        manifest = recover_manifest(run_folder)

    for name in reversed(manifest.steps()):
        # last.pt or best.pt may be another copy of the same checkpoint.
        digest = manifest.checkpoints[name]
        copies = [other for other, its in manifest.checkpoints.items() if its == digest and other != name]
        for path in (run_folder / other for other in (name, *copies)):
            if file_sha256(path) == digest or is_own_checkpoint(path, manifest):
                return path
        if (run_folder / name).exists():
            reason = "is damaged (its sha256 is not the manifest's); trying the one before"
            print_main(f"warning: {run_folder / name} {reason}", file=sys.stderr)

    # No step is left: what is can be named, but it is not where the run stands.
    for name, digest in manifest.checkpoints.items():
        if file_is(run_folder / name, digest):
            raise InputError(f"{run_folder}: of its checkpoints only {name} is intact; name it with --resume_from")
    if manifest.checkpoints:
        raise InputError(f"{run_folder}: no intact checkpoint is left; start afresh with --overwrite")
    return None


def checkpoint_to_use(resume_from: str | None, run_folder: Path) -> Path:
    """The checkpoint that an evaluation is of: the one that is named, or best.pt of the named or of this run folder."""
    if resume_from in (None, "auto"):
        return run_folder / "best.pt"
    path = Path(resume_from)
    return path / "best.pt" if path.is_dir() else path


@doing("reading the checkpoint")
def load_checkpoint(resume_from: str | None, run_folder: Path, format: str, resume: bool = False) -> Checkpoint | None:
    """All ranks: the checkpoint that `--resume_from` means, on the CPU; None without flag or anything to resume.

    Rank 0 decides which file. `format` is what the script wrote as contents["format"]. resume: a training will go on
    from it in run_folder, which must then hold the same run or none. Raises InputError on all ranks for a missing,
    damaged or foreign file.
    """
    if resume_from is None:
        return None

    # Rank 0 looks, all take what it found.
    settle_checkpoint()
    choice = None
    with agree_on_errors():
        if world()[0] == 0:
            choice = find_newest(run_folder) if resume_from == "auto" else _resolve(Path(resume_from))
            if choice is None and resume:
                _check_no_results(run_folder)
    choice = broadcast_object(choice)
    if choice is None:
        return None

    checkpoint = None
    with agree_on_errors():
        checkpoint = _read(choice, format)
        if resume and world()[0] == 0:
            _check_same_folder(checkpoint, run_folder)
    print_main(f"loaded {choice} (step {checkpoint['step']})")
    return checkpoint


def _check_same_folder(checkpoint: Checkpoint, run_folder: Path) -> None:
    """InputError for a folder that holds the checkpoints of another run."""
    if _is_of_run(checkpoint, run_folder):
        return
    if any(is_checkpoint_name(path.name) for path in run_folder.glob("*.pt")):
        raise InputError(f"{run_folder}: holds another run than {checkpoint.path}; choose an empty output folder")


def _check_no_results(run_folder: Path) -> None:
    """InputError for a folder with the results of a run whose checkpoints are gone: `auto` would start it anew."""
    metrics = run_folder / "metrics.jsonl"
    manifest = read_manifest(run_folder)

    # What a kill left while --overwrite deleted it is no result.
    gone = ["args.yaml", "starts.jsonl", "metrics.jsonl"]
    if manifest:
        gone += manifest.obsolete
    results = [name for name in RESULT_FILES if name not in gone and (run_folder / name).exists()]

    # A run that was killed before its first checkpoint leaves a manifest.
    if manifest is None and metrics.is_file() and metrics.stat().st_size:
        results.append(metrics.name)
    if results:
        reason = f"holds {results[0]} and no checkpoint to resume"
        raise InputError(f"{run_folder}: {reason}; choose another folder, or --overwrite it")


def _read(path: Path, format: str) -> Checkpoint:
    """Load a checkpoint file. Raises InputError for one of another program, script or step."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a readable checkpoint ({reason}); choose another --resume_from") from None

    # It can be read: is it what was asked for?
    if not isinstance(contents, dict) or not {"step", "rng", "format"} <= contents.keys():
        raise InputError(f"{path}: not a checkpoint of this project; choose another --resume_from")
    if contents["format"] != format:
        raise InputError(f"{path}: checkpoint of {contents['format']}, not of {format}; choose another --resume_from")
    reason = misnamed(path.name, contents["step"])
    if reason:
        raise InputError(f"{path}: {reason}; choose another --resume_from")
    return Checkpoint(contents, path)


def _resolve(path: Path) -> Path:
    """The file that a path given by the user means. Raises InputError for a damaged or missing one."""
    try:
        is_folder = path.is_dir()
        is_file = path.is_file()
    except OSError as error:
        raise InputError(f"--resume_from {path}: {error.strerror}; check --resume_from") from None
    if is_folder:
        newest = find_newest(path)
        if newest is None:
            raise InputError(f"{path}: holds no intact checkpoint; check --resume_from")
        return newest
    if not is_file:
        raise InputError(f"{path}: no such checkpoint; check --resume_from")

    # The file, its own seal and the manifest must say the same.
    reason = find_damage(path)
    digest = file_sha256(path)
    manifest = read_manifest(path.parent)
    expected = manifest.checkpoints.get(path.name, digest) if manifest else digest
    meant = digest == expected or (not reason and _was_linked_early(path, digest, manifest))
    if not meant and not is_own_checkpoint(path, manifest):
        # The manifest is written before best.pt and last.pt are linked: a kill in between leaves the old link.
        for name in manifest.steps():
            if manifest.checkpoints[name] == expected and file_is(path.parent / name, expected):
                return path.parent / name
        reason = reason or "it is another checkpoint than the manifest names"

    if reason.startswith("not a readable checkpoint"):
        raise InputError(f"{path}: {reason}; choose another --resume_from")
    if reason:
        raise InputError(f"{path}: damaged ({reason}); choose another, or --resume_from auto")
    return path


def _was_linked_early(path: Path, digest: str, manifest: Manifest) -> bool:
    """Runs from before the seals linked best.pt first and then wrote the manifest."""
    return read_seal(path) is None and digest in manifest.checkpoints.values()


def _is_of_run(contents: Checkpoint, run_folder: Path) -> bool:
    """Whether a checkpoint is of the run that a folder holds."""
    manifest = read_manifest(run_folder)
    if manifest and manifest.run_id and contents.get("run_id"):
        return contents["run_id"] == manifest.run_id

    # One of them is from before runs had names.
    if contents.path.parent.resolve() == run_folder.resolve():
        return True
    return manifest is not None and file_sha256(contents.path) in manifest.checkpoints.values()


def check_same_run(contents: dict, now: dict) -> None:
    """InputError when a checkpoint cannot be gone on with exactly; contents["run"] holds what `now` must equal."""
    for name, value in now.items():
        before = contents["run"].get(name)
        if before != value:
            advice = "give the same again"
            if "batch" in name:
                advice = "keep the product of batch size, --gradient_accumulation_steps and the number of processes"
                advice += f", or give --effective_batch_size {before}"
            raise InputError(f"--resume_from: a run with {name.replace('_', ' ')} {before}, now {value}; {advice}")


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict, weight_decay: float) -> None:
    """Load an optimizer's state_dict; its moments take the memory layout of their parameters.

    A run on a GPU writes the moments of convolutions as channels_last, and the fused optimizers pair elements by their
    place in memory. weight_decay: as the flags say now. Raises InputError for the state of another optimizer.
    """
    try:
        optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:
            group["weight_decay"] = weight_decay
            for parameter in group["params"]:
                _match_layout(optimizer.state.get(parameter, {}), parameter)
    except (KeyError, ValueError, TypeError) as error:
        detail = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        reason = f"the state of another optimizer ({detail})"
        raise InputError(f"--resume_from: {reason}; give the flags of the run") from None


def _match_layout(state: dict, parameter: torch.nn.Parameter) -> None:
    """Give an optimizer's moments the memory layout of their parameter. Raises ValueError for another shape."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if value.shape != parameter.shape:
                raise ValueError(f"{name} of shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
            state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def restore_scaler(scaler: torch.amp.GradScaler, saved: dict, precision: str) -> None:
    """Go on with the loss scale of an fp16 run; other precisions have none, and fp16 after them starts anew."""
    if precision == "fp16" and saved.get("scale", 1.0) != 1.0:
        scaler.load_state_dict(saved)


# --- the run folder ---------------------------------------------------------------------------------------------------


def lock_run_folder(run_folder: Path, may_exist: bool, wait: float = 60, overwrite: bool = False) -> "RunLock | None":
    """All ranks call it: rank 0 makes and locks the folder (keep what is returned as long as the run lasts).

    may_exist: --resume_from or --overwrite was given, so that the folder may hold a run. InputError on all ranks when
    the folder may not be used or cannot be written. The lock (released by the system when the process ends, however it
    ends) keeps two runs out of one folder; a run to be resumed that is just being stopped is waited for.
    """
    lock = None
    with agree_on_errors():
        if world()[0] == 0:
            try:
                check_run_folder(run_folder, may_exist, overwrite)
                run_folder.mkdir(parents=True, exist_ok=True)
                lock = RunLock(run_folder / ".lock", wait if may_exist else 0)
                # Another run may have begun and even ended here since the first look.
                check_run_folder(run_folder, may_exist, overwrite)
            except OSError as error:
                raise InputError(f"{run_folder}: cannot write here ({error.strerror}); choose another folder") from None
    with agree_on_errors():
        if not run_folder.is_dir():
            raise InputError(f"{run_folder}: not seen by rank {world()[0]}; choose a folder that all nodes share")
    return lock


def check_run_folder(run_folder: Path, may_exist: bool, overwrite: bool) -> None:
    """InputError when starting here would write over files that are not this run's to replace."""
    if not run_folder.is_dir():
        return
    names = {*RESULT_FILES, MANIFEST}
    files = [path for path in run_folder.iterdir() if path.name in names or is_checkpoint_name(path.name)]
    folders = [run_folder / name for name in ("logs", "figures", "profile")]
    folders = [path for path in folders if path.exists()]
    _check_kinds([*files, run_folder / ".lock"], folders)

    manifest = read_manifest(run_folder)
    files += [path for path in folders if any(path.iterdir())]
    ours = manifest is not None or _is_args_file(run_folder / "args.yaml")
    checkpoints = [path for path in files if is_checkpoint_name(path.name)]
    if not may_exist and files:
        if ours or checkpoints or any(path.name == "metrics.jsonl" for path in files):
            advice = "go on with --resume_from auto, or --overwrite it, or choose another folder"
            raise InputError(f"{run_folder}: holds a run already; {advice}")
        raise InputError(f"{run_folder}: holds {files[0].name}, which no run wrote; choose another folder")

    # A folder without manifest and args.yaml is a run's only if its checkpoints say so, which --resume_from looks at.
    if files and not ours and (overwrite or not checkpoints):
        reason = f"holds {files[0].name}, but no {MANIFEST} or args.yaml of a run"
        raise InputError(f"{run_folder}: {reason}; choose another folder")
    if manifest is not None or overwrite:
        _check_strangers(checkpoints, manifest)


def _check_kinds(files: list[Path], folders: list[Path]) -> None:
    """InputError for a file that is none, or a folder that is none: opening a pipe would wait for ever."""
    odd = [path for path in files if path.exists() and not path.is_file()]
    odd += [path for path in folders if not path.is_dir()]
    if odd:
        raise InputError(f"{odd[0]}: is not what a run writes under this name; move it away, or choose another folder")


def _check_strangers(checkpoints: list[Path], manifest: Manifest | None) -> None:
    """InputError for a checkpoint of another run.

    A run that is killed between writing a checkpoint and the manifest leaves one that is its own.
    """
    run_ids = {manifest.run_id} if manifest else set()
    known = manifest.files() if manifest else []
    for path in checkpoints:
        if path.name in known:
            continue
        identity = identify(path)
        run_ids.add(identity.run_id)
        if identity.reason or len(run_ids) > 1:
            raise InputError(f"{path}: is not of the run in this folder; move it away, or choose another folder")


def _is_args_file(path: Path) -> bool:
    """Whether this is the args.yaml of a run here, and not another program's of that name."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return all(re.search(rf"^{name}: ", text, re.MULTILINE) for name in ("dist_timeout", "keep_last", "max_bad_steps"))


def begin_run(run_folder: Path, checkpoint: Checkpoint | None) -> tuple[str, int]:
    """Rank 0, once nothing can be wrong: write down which run this folder holds from here on, then make it so.

    checkpoint: the checkpoint to go on from; None for a fresh run, which replaces what was here. Returns (run id, bytes
    of metrics.jsonl that belong to the checkpoint). Whenever it is killed, `--resume_from auto` follows the decision
    that the manifest holds: it is written first and as a whole.
    """
    for path in run_folder.glob(".*.tmp"):
        # This is what a kill left of a file that was being written.
        name = path.name[1:-4]
        if name in (*RESULT_FILES, MANIFEST) or is_checkpoint_name(name):
            path.unlink()
    if checkpoint is None:
        return begin_afresh(run_folder), 0
    if not _is_of_run(checkpoint, run_folder):
        return _begin_from_another_run(run_folder, checkpoint), 0

    # The run goes on where it was, or before.
    manifest = read_manifest(run_folder)
    if manifest is None or not manifest.steps():
        manifest = recover_manifest(run_folder)
    manifest.run_id = manifest.run_id or secrets.token_hex(8)
    manifest.written = list(dict.fromkeys([*manifest.written, *RESULT_FILES]))
    size = _check_log(run_folder, manifest, checkpoint)
    newest = _go_back(run_folder, manifest, checkpoint)
    if not newest.exists():
        # The step's own name was dropped, and best.pt or a copy still has it.
        link(checkpoint.path, newest)
    write_manifest(run_folder, manifest)
    if not file_is(newest, manifest.checkpoints[newest.name]):
        link(checkpoint.path, newest)
    _mend_links(run_folder, manifest)
    return manifest.run_id, size


def _check_log(run_folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> int:
    """How many bytes of metrics.jsonl belong to the checkpoint. Raises InputError when they are not what it knows.

    A copy of a checkpoint may be of a branch that the folder has left, or has not seen. A file that is too short has
    lost lines, which is said.
    """
    size = checkpoint["log"]["bytes"]
    sha256 = checkpoint["log"].get("sha256")
    path = run_folder / "metrics.jsonl"
    data = path.read_bytes() if path.exists() else b""
    lost = len(data) < size
    other = not lost and sha256 and hashlib.sha256(data[:size]).hexdigest() != sha256

    if other and file_sha256(checkpoint.path) in manifest.checkpoints.values():
        reason = f"was changed after {checkpoint.path.name} was written"
        raise InputError(f"{path}: {reason}; move it away and a new one is begun, or choose an empty output folder")
    if other or (lost and checkpoint.path.parent.resolve() != run_folder.resolve()):
        reason = f"is of another branch of the run than {checkpoint.path}"
        raise InputError(f"{path} {reason}; choose an empty output folder")
    if lost:
        reason = f"lacks lines that were logged before {checkpoint.path.name}"
        print(f"warning: {path}: {reason}; the run goes on, its curves are without them", file=sys.stderr, flush=True)
    return size


def begin_afresh(run_folder: Path) -> str:
    """Rank 0: begin a new run where an old one was, and delete the old one's files; returns the new run's id.

    The manifest names all that goes before anything does: finish_deleting completes it after a kill.
    """
    present = [name for name in dict.fromkeys(_files_of_run(run_folder)) if (run_folder / name).is_file()]
    manifest = Manifest(secrets.token_hex(8), written=list(RESULT_FILES), obsolete=present)
    write_manifest(run_folder, manifest)
    finish_deleting(run_folder)
    return manifest.run_id


def finish_deleting(run_folder: Path) -> None:
    """Rank 0: delete what begin_afresh called obsolete."""
    manifest = read_manifest(run_folder)
    if manifest and manifest.obsolete:
        delete_obsolete(run_folder, manifest)
        # Names that the new run uses again must not stay in the list.
        write_manifest(run_folder, manifest)


def _files_of_run(run_folder: Path) -> list[str]:
    """What a run wrote, by its manifest, and by its args.yaml where the manifest is from before it named all."""
    files = (read_manifest(run_folder) or Manifest()).files()
    if _is_args_file(run_folder / "args.yaml"):
        # check_run_folder has seen to it that all checkpoints here are of the one run.
        files += [path.name for path in run_folder.glob("*.pt") if is_checkpoint_name(path.name)]
        files += RESULT_FILES
        files += [f"logs/{path.name}" for path in run_folder.glob("logs/events.out.tfevents.*")]
    return files


def _begin_from_another_run(run_folder: Path, checkpoint: Checkpoint) -> str:
    """The other run's checkpoint becomes the first of a new run, so that `auto` finds it from now on."""
    run_id = secrets.token_hex(8)
    path = run_folder / f"step_{checkpoint['step']:08d}.pt"
    log = dict(checkpoint["log"]) | {"bytes": 0, "sha256": "", "run_id": run_id}
    digest = write_checkpoint(path, checkpoint.plain() | {"run_id": run_id, "log": log})
    write_manifest(run_folder, Manifest(run_id, {path.name: digest}, list(RESULT_FILES)))
    return run_id


def _go_back(run_folder: Path, manifest: Manifest, checkpoint: Checkpoint) -> Path:
    """Make the checkpoint the newest of the manifest; what was saved after it becomes obsolete. Returns its place."""
    name = f"step_{checkpoint['step']:08d}.pt"
    digest = file_sha256(checkpoint.path)
    if manifest.steps()[-1:] != [name] or manifest.checkpoints[name] != digest:
        for other in list(manifest.checkpoints):
            if other == name or _step_of(run_folder / other) > checkpoint["step"]:
                del manifest.checkpoints[other]
                manifest.obsolete.append(other)
        manifest.checkpoints |= {name: digest, "last.pt": digest}
        manifest.obsolete = [other for other in manifest.obsolete if other not in manifest.checkpoints]
    return run_folder / name


def _step_of(path: Path) -> int:
    """The step of a checkpoint; 0 for a file that is not there."""
    return identify(path).step if path.is_file() else 0


def _mend_links(run_folder: Path, manifest: Manifest) -> None:
    """Make last.pt and best.pt names of the files that the manifest means, where a kill left other ones."""
    steps = {manifest.checkpoints[name]: run_folder / name for name in manifest.steps()}
    for name, digest in manifest.checkpoints.items():
        path = run_folder / name
        target = steps.get(digest)
        if target not in (None, path) and not file_is(path, digest) and file_is(target, digest):
            link(target, path)


def cut_metrics(path: Path, size: int) -> None:
    """Rank 0: keep the first `size` bytes of metrics.jsonl, to the end of a line; a new file replaces the old one."""
    if not path.exists():
        return
    data = path.read_bytes()
    kept = data[:size]
    kept = kept[: kept.rfind(b"\n") + 1]
    if kept != data:
        write_atomically(path, lambda file: file.write(kept))


class RunLock:
    """An exclusive lock on a file while this object, at most the process, lives.

    Raises InputError after `wait` seconds.
    """

    def __init__(self, path: Path, wait: float):
        # The file is open for the lifetime of the lock.
        self.file = open(path, "a")  # noqa: SIM115
        deadline = time.monotonic() + wait
        with doing(f"waiting for another run to leave {path.parent}"):
            while not self._try():
                if time.monotonic() >= deadline:
                    advice = "stop it or choose another output folder"
                    raise InputError(f"{path.parent}: another run is writing here; {advice}")
                time.sleep(0.2)

    def _try(self) -> bool:
        """Whether the lock is ours now."""
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(self.file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            # Some network file systems have no locks.
            print(f"warning: {self.file.name}: no locks here ({error.strerror}); keep other runs out", file=sys.stderr)
        return True
