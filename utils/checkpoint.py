"""Checkpoints that survive a kill at any moment.

A run folder has files such as `step_00000120.pt`, and `best.pt`, a hard link to one of them, which may have been
deleted since. Each file ends with a seal: a line with the step, the run id and the sha256 hash of all previous bytes. A
checkpoint is valid if the hash matches and the file `run_id` contains the same run id.
"""

import contextlib
import hashlib
import mmap
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from distributed_utils import agree_on_errors, broadcast_object, print_main, world
from utils.cli import InputError, RunError

SEAL = re.compile(rb"\n# checkpoint step=(\d+) run=([0-9a-f]*) sha256=([0-9a-f]{64})\n\Z")
# files of a run besides its checkpoints; --overwrite deletes all of them
RUN_FILES = ("metrics.jsonl", "summary.json", "args.yaml", "model.safetensors", "logs", "figures", "trace.json")


# --- reading and writing a file ---------------------------------------------------------------------------------------


def write_atomically(path: Path, write, also: tuple[Path, ...] = ()) -> None:
    """Call `write(file)` on a temporary file, flush the file to disk, then rename it to `path`.

    also: other paths to hard-link to the file, created before `path`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        for other in also:
            _link(temporary, other)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)


class HashingFile:
    def __init__(self, file):
        self.file = file
        self.sha256 = hashlib.sha256()

    def write(self, data) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


class Seal(NamedTuple):
    """Last line of a checkpoint. damage: why the file is invalid, or ""."""

    step: int
    run_id: str
    damage: str


def read_seal(path: Path) -> Seal:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            match = SEAL.search(data[-256:])
            if match is None:
                return Seal(0, "", "has no seal: cut short, or of another program")
            with memoryview(data) as view:
                sha256 = hashlib.sha256(view[: -len(match[0])]).hexdigest()
    except (OSError, ValueError) as error:
        return Seal(0, "", f"cannot be read ({error})")
    damage = "" if sha256.encode() == match[3] else "its bytes are not those that were written"
    return Seal(int(match[1]), match[2].decode(), damage)


def write_checkpoint(path: Path, contents: dict, run_id: str, also: tuple[Path, ...] = ()) -> None:
    """Write a checkpoint and its seal. contents: only dicts, lists, tensors, numbers and strings."""

    def write(file) -> None:
        hashing = HashingFile(file)
        torch.save(contents, hashing)
        # torch.load ignores bytes after the end of its archive
        seal = f"step={contents['step']} run={run_id} sha256={hashing.sha256.hexdigest()}"
        file.write(f"\n# checkpoint {seal}\n".encode())

    write_atomically(path, write, also)


# --- save -------------------------------------------------------------------------------------------------------------


class HostCopy:
    """Copies the tensors in nested dicts and lists into host buffers that later calls reuse.

    Reallocating the buffers would make a copy several times slower. A copy is valid until the next call.
    """

    def __init__(self):
        self.kept: dict[tuple, torch.Tensor] = {}

    def __call__(self, value):
        copied = self._copy(value, ())
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copied

    def _copy(self, value, place: tuple):
        if isinstance(value, torch.Tensor):
            like, kept = value.detach(), self.kept.get(place)
            if kept is None or (kept.shape, kept.stride(), kept.dtype) != (like.shape, like.stride(), like.dtype):
                kept = torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)
                self.kept[place] = kept
            return kept.copy_(like, non_blocking=True)
        if isinstance(value, dict):
            return {name: self._copy(item, (*place, name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, (*place, number)) for number, item in enumerate(value))
        return value


class CheckpointWriter:
    """Writes checkpoints on rank 0, one at a time, in a background thread."""

    def __init__(self, folder: Path, keep_last: int):
        self.folder = folder
        self.keep_last = keep_last
        self.copy = HostCopy()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def save(self, contents: dict, also: tuple[str, ...] = (), before_write: Callable[[], None] = lambda: None) -> None:
        """All ranks: wait for the previous checkpoint, then start to write a new one in the background."""
        self.wait()
        if world()[0] == 0:
            self.thread = threading.Thread(target=self._write, args=(self.copy(contents), also, before_write))
            self.thread.start()

    def wait(self) -> None:
        """All ranks: wait until the last checkpoint is on disk. Raises RunError on all ranks if writing failed."""
        with agree_on_errors():
            if self.thread:
                self.thread.join()
            self.thread, error, self.error = None, self.error, None
            if error:
                raise RunError(f"{self.folder}: checkpoint not written ({error}); make room, then --resume_from auto")

    def _write(self, contents: dict, also: tuple[str, ...], before_write: Callable[[], None]) -> None:
        try:
            before_write()
            path = self.folder / f"step_{contents['step']:08d}.pt"
            # write best.pt first: if the process is killed in between, the resumed run writes the same best.pt again
            write_checkpoint(path, contents, read_run_id(self.folder), tuple(self.folder / name for name in also))
            for old in sorted(filter(Path.is_file, self.folder.glob("step_*.pt")))[: -self.keep_last]:
                old.unlink()
        except (OSError, RuntimeError) as error:
            self.error = error


def export_weights(state_dict: dict, path: Path) -> None:
    from safetensors.torch import save

    if world()[0] == 0:
        tensors = {name: value.detach().cpu().contiguous() for name, value in state_dict.items()}
        write_atomically(path, lambda file: file.write(save(tensors)))


def frozen_names(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def trained_state(model: torch.nn.Module, frozen: set[str] | None = None) -> dict[str, torch.Tensor]:
    """Return a model's buffers and non-frozen parameters, by their names in the unwrapped model."""
    frozen = frozen_names(model) if frozen is None else frozen
    state = {name: value for name, value in model.state_dict().items() if name not in frozen}
    return {name.removeprefix("module.").replace("_orig_mod.", ""): value for name, value in state.items()}


# --- load -------------------------------------------------------------------------------------------------------------


def load_checkpoint(resume_from: str | None, folder: Path, format: str) -> dict | None:
    """All ranks: load the checkpoint given by --resume_from into CPU memory.

    Returns None if resume_from is None, or if it is `auto` and the folder has no checkpoint. Raises InputError on all
    ranks if the file is missing, damaged or in another format.
    """
    path = None
    with agree_on_errors():
        if world()[0] == 0 and resume_from is not None:
            path = find_newest(folder) if resume_from == "auto" else find_named(Path(resume_from))
    path = broadcast_object(path)
    if path is None:
        return None

    with agree_on_errors():
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise InputError(f"{path}: not a readable checkpoint ({error}); choose another --resume_from") from None
        if checkpoint["format"] != format:
            what = f"a checkpoint of {checkpoint['format']}; this script's are {format}, with other weights or settings"
            raise InputError(f"{path}: {what}; train anew, or use the version that wrote it")
    print_main(f"loaded {path} (step {checkpoint['step']})")
    return checkpoint | {"path": str(path)}


def find_newest(folder: Path) -> Path | None:
    run_id = read_run_id(folder)
    paths = sorted(folder.glob("step_*.pt"), reverse=True)
    for path in paths:
        seal = read_seal(path)
        if not seal.damage and seal.run_id == run_id:
            return path
        print_main(f"warning: {path}: {seal.damage or 'of another run'}; passed over")
    if paths:
        raise InputError(f"{folder}: no intact checkpoint is left; name another with --resume_from, or --overwrite")
    return None


def find_named(path: Path) -> Path:
    found = find_newest(path) if path.is_dir() else path
    if found is None or not found.is_file():
        raise InputError(f"{path}: no such checkpoint; check --resume_from")
    damage = read_seal(found).damage
    if damage:
        raise InputError(f"{found}: damaged ({damage}); choose another, or --resume_from auto")
    return found


def load_trained(model: torch.nn.Module, weights: dict[str, torch.Tensor], source: str = "--resume_from") -> None:
    """Load the result of trained_state() into an unwrapped model. Raises InputError if a name or shape differs."""
    state = model.state_dict()
    unlike = [name for name in weights if name not in state or state[name].shape != weights[name].shape]
    wrong = sorted(trained_state(model).keys() - weights.keys()) + unlike
    if wrong:
        raise InputError(f"{source}: checkpoint of another model ({wrong[0]}); give the flags it was trained with")
    model.load_state_dict(weights, strict=False)


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Load an optimizer's state, but keep the current learning rate and weight decay.

    Moments get the strides of their parameters, because fused kernels need the same strides. Raises InputError if the
    state belongs to another optimizer.
    """
    flags = [(group["lr"], group.get("weight_decay", 0)) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
    except (KeyError, ValueError) as error:
        raise InputError(f"--resume_from: the state of another optimizer ({error}); give the run's flags") from None
    for group, (lr, weight_decay) in zip(optimizer.param_groups, flags, strict=True):
        group |= {"lr": lr, "weight_decay": weight_decay}
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if value.shape == parameter.shape and value.dim():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


# --- run folder -------------------------------------------------------------------------------------------------------


def read_run_id(folder: Path) -> str:
    """Return the run id from the file run_id or, if there is none, from the newest intact checkpoint; otherwise ""."""
    with contextlib.suppress(OSError):
        if run_id := (folder / "run_id").read_text().strip():
            return run_id
    seals = map(read_seal, sorted(folder.glob("step_*.pt"), reverse=True))
    return next((seal.run_id for seal in seals if not seal.damage), "")


def make_folder(folder: Path) -> None:
    """All ranks: create the folder on rank 0.

    Raises InputError on all ranks if the folder cannot be created or contains symbolic links.
    """
    with agree_on_errors():
        if world()[0] == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"{folder}: cannot write here ({error.strerror}); choose another folder") from None
            # a symbolic link could redirect writes anywhere; only W&B creates links, in its own folder
            links = [path for path in folder.rglob("*") if path.is_symlink() and folder / "wandb" not in path.parents]
            if links:
                raise InputError(f"{links[0]}: a link in a run folder; remove it or choose another folder")


def lock_run_folder(folder: Path, may_exist: bool, wait: float = 60):
    """All ranks: create and lock the run folder on rank 0. Keep the returned lock file open throughout the run.

    may_exist: whether the folder may contain a run; if that run is still writing, wait up to `wait` seconds for it to
    end. Raises InputError on all ranks if the folder is not writable, is in use, is not visible to a rank, contains a
    run although may_exist is False, or contains a run's files but no run id.
    """
    lock = None
    make_folder(folder)
    with agree_on_errors():
        if world()[0] == 0:
            try:
                lock = open(folder / ".lock", "a")  # noqa: SIM115 - open as long as the lock is held
            except OSError as error:
                raise InputError(f"{folder}: cannot write here ({error.strerror}); choose another folder") from None
            if not _take_lock(lock, folder, wait if may_exist else 0):
                raise InputError(f"{folder}: another run is writing here; stop it or choose another folder")
            held = [name for name in RUN_FILES if (folder / name).exists()]
            held += [path.name for path in folder.glob("*.pt")]
            run_id = read_run_id(folder)
            if held and not (may_exist and run_id):
                advice = "--resume_from auto or --overwrite, or " * bool(run_id) + "choose another folder"
                raise InputError(f"{folder}: holds {held[0]} already; {advice}")
    with agree_on_errors():
        if not folder.is_dir():
            raise InputError(f"{folder}: not seen by rank {world()[0]}; choose a folder that all nodes share")
    return lock


def _take_lock(file, folder: Path, wait: float) -> bool:
    told = False
    deadline = time.monotonic() + wait
    while True:
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                return False
            if not told:
                print_main(f"waiting up to {wait:.0f} s for the run in {folder} to end")
            told = True
            time.sleep(0.2)


def _is_valid(seal: Seal, run_id: str, step: int) -> bool:
    return not seal.damage and seal.run_id == run_id and seal.step <= step


def begin_run(
    folder: Path, checkpoint: dict | None, overwrite: bool = False, best_names: tuple[str, ...] = ("best.pt",)
) -> bool:
    """Rank 0: begin a new run in the folder, or continue the checkpoint's run and delete its later checkpoints.

    A new run deletes the files of the old run, so call this only after all inputs have been checked. Returns True if
    best_names[0] is a valid checkpoint of this run and no later than `checkpoint`. Raises InputError if the checkpoint
    is from another run than the folder's and `overwrite` is False.
    """
    run_id = read_run_id(folder)
    first = folder / f"step_{(checkpoint or {'step': 0})['step']:08d}.pt"
    if checkpoint and run_id and read_seal(Path(checkpoint["path"])).run_id == run_id:
        # the same run, perhaps from an earlier step: delete all later checkpoints
        if not first.exists():
            _link(Path(checkpoint["path"]), first)
        later = [path for path in sorted(folder.glob("step_*.pt")) if path.name > first.name]
        # also delete best checkpoints from later steps or training stages
        later += [p for p in sorted(folder.glob("*best.pt")) if not _is_valid(read_seal(p), run_id, checkpoint["step"])]
        # skip directories named like checkpoints
        later = list(filter(Path.is_file, later))
        for path in later:
            path.unlink()
        write_atomically(folder / "run_id", lambda file: file.write(run_id.encode()))
        if later:
            print(f"back to step {checkpoint['step']}: deleted {', '.join(path.name for path in later)}", flush=True)
        best = folder / best_names[0]
        for path in (folder / name for name in best_names[1:]):
            if best.exists() and not path.exists():
                _link(best, path)
        return best.exists()

    if checkpoint and run_id and not overwrite:
        raise InputError(f"{folder}: holds another run; choose another folder or --overwrite")
    # write the new run id first, to invalidate old checkpoints left behind if the process is killed
    run_id = secrets.token_hex(8)
    write_atomically(folder / "run_id", lambda file: file.write(run_id.encode()))
    for path in [folder / name for name in RUN_FILES] + [*folder.glob("*.pt")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if not checkpoint:
        return False
    # the new run starts with a copy of the other run's checkpoint, but with an empty log
    checkpoint["log"]["bytes"] = 0
    source = Path(checkpoint["path"])
    best, of_run = source.with_name(best_names[0]), read_seal(source).run_id
    counts = _is_valid(read_seal(best), of_run, checkpoint["step"])
    if counts:
        contents = torch.load(best, map_location="cpu", weights_only=True)
        write_checkpoint(folder / best_names[0], contents, run_id, tuple(folder / name for name in best_names[1:]))
    write_checkpoint(first, checkpoint, run_id)
    return counts
