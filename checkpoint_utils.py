"""Checkpoints that survive a kill at any moment: atomic save, checked load, exact resume, retention, export of weights.

A run folder holds `step_00000120.pt` files, hard links `last.pt` and `best.pt` to two of them, and `manifest.sha256`
(`sha256sum -c manifest.sha256` checks them all). A file counts only once it is in the manifest.
"""

import hashlib
import os
import random
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch

from cli_utils import InputError, RunError
from distributed_utils import agree_on_errors, broadcast_object, gather_objects, print_main, world

MANIFEST = "manifest.sha256"


def write_atomically(path: Path, write) -> str:
    """Call `write(file)` on a temporary file, flush it to the disk, then put it in place of `path`; returns its sha256.

    A crash or a full disk (OSError) leaves the old file as it was and no part of the new one.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as raw:
            file = _HashingFile(raw)
            write(file)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        cause = error
        while isinstance(cause, RuntimeError):  # torch.save, when it cannot end a file that the disk had no room for
            cause = cause.__context__
        if isinstance(cause, OSError):
            raise cause from None
        raise
    return file.sha256.hexdigest()


class _HashingFile:
    """A write-only file that keeps the sha256 of what passes through it."""

    def __init__(self, raw):
        self.raw, self.sha256 = raw, hashlib.sha256()

    def write(self, data) -> int:
        self.sha256.update(data)
        return self.raw.write(data)

    def flush(self) -> None:
        self.raw.flush()


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _link(source: Path, target: Path) -> None:
    """Make `target` another name of `source`, replacing what it was, atomically; a copy where there are no links."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)


def read_manifest(folder: Path) -> dict[str, str]:
    """{file name: sha256} in the order of saving; empty without a readable manifest."""
    try:
        lines = (folder / MANIFEST).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {line[66:]: line[:64] for line in lines if len(line) > 66}


def _write_manifest(folder: Path, manifest: dict[str, str]) -> None:
    text = "".join(f"{digest}  {name}\n" for name, digest in manifest.items())
    write_atomically(folder / MANIFEST, lambda file: file.write(text.encode()))


# --- state of the random generators -----------------------------------------------------------------------------------


def get_rng_state() -> dict:
    """State of this process's generators (torch CPU and GPU, NumPy, random) as tensors and numbers."""
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - libraries still draw from it
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


def trained_state(model: torch.nn.Module, everything: bool = False) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model: the trained tensors (and buffers), or all of them.

    Names are those of the plain module, whatever wrapped it (no `module.` of DDP, no `_orig_mod.` of torch.compile).
    """
    frozen = set() if everything else {name for name, p in model.named_parameters() if not p.requires_grad}
    kept = {name: value for name, value in model.state_dict().items() if name not in frozen}
    return {name.removeprefix("module.").replace("_orig_mod.", ""): value for name, value in kept.items()}


def load_trained(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Put the weights of trained_state into an unwrapped model. Raises InputError when a name or a shape does not
    fit."""
    own = model.state_dict()
    lacking = sorted(trained_state(model).keys() - weights.keys())
    unlike = [name for name, value in weights.items() if name not in own or own[name].shape != value.shape]
    if wrong := lacking + unlike:
        raise InputError(
            f"--resume_from: checkpoint of another model ({wrong[0]} does not fit); give the flags it was trained with"
        )
    model.load_state_dict(weights, strict=False)


def save_checkpoint(folder: Path, contents: dict, step: int, keep_last: int) -> Path:
    """All ranks call it; rank 0 writes `step_<step>.pt` with every rank's random state and `last.pt`, drops old ones.

    contents: dicts, lists, tensors, numbers and strings only. Raises RunError on all ranks when rank 0 cannot write.
    """
    path = folder / f"step_{step:08d}.pt"
    rng = gather_objects(get_rng_state())
    with agree_on_errors():
        if world()[0] == 0:
            try:
                _save(folder, path, {**contents, "step": step, "rng": rng}, keep_last)
            except OSError as error:
                raise _not_written(path, error) from None
    return path


def _not_written(path: Path, error: OSError) -> RunError:
    reason = f"not written ({error.strerror or error}), the checkpoint before is intact"
    return RunError(f"{path}: {reason}; make room, then go on with --resume_from auto")


def _save(folder: Path, path: Path, contents: dict, keep_last: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(folder)
    digest = write_atomically(path, lambda file: torch.save(contents, file))
    manifest.pop(path.name, None)
    manifest = {**manifest, path.name: digest}
    _write_manifest(folder, manifest)  # from here on the new file counts
    _link(path, folder / "last.pt")
    steps = [name for name in manifest if name.startswith("step_")]
    for name in steps[:-keep_last]:
        del manifest[name]
    manifest["last.pt"] = digest
    _write_manifest(folder, manifest)
    for old in folder.glob("step_*.pt"):
        if old.name not in manifest:
            old.unlink()


def mark_best(folder: Path, step: int, names: tuple[str, ...] = ("best.pt",)) -> str:
    """All ranks call it: `best.pt` becomes another name (hard link) of the checkpoint of `step`; returns its sha256."""
    path = folder / f"step_{step:08d}.pt"
    with agree_on_errors():
        if world()[0] == 0:
            try:
                for name in names:
                    _link(path, folder / name)
                manifest = read_manifest(folder)
                _write_manifest(folder, manifest | dict.fromkeys(names, manifest[path.name]))
            except OSError as error:
                raise _not_written(folder / names[0], error) from None
    return best_sha256(folder, names[0])


def best_sha256(folder: Path, name: str = "best.pt") -> str | None:
    """The manifest's sha256 of best.pt, on all ranks; None without one."""
    return broadcast_object(read_manifest(folder).get(name) if world()[0] == 0 else None)


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


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_newest(folder: Path) -> Path | None:
    """The newest intact checkpoint of a run folder; those that do not match the manifest are named and passed over."""
    for name, digest in reversed(list(read_manifest(folder).items())):
        path = folder / name
        if name.startswith("step_") and path.exists():
            if file_sha256(path) == digest:
                return path
            print_main(
                f"warning: {path} is damaged (its sha256 is not the manifest's); trying the one before", file=sys.stderr
            )
    return None


def load_checkpoint(resume_from: str | None, folder: Path, format: str) -> dict | None:
    """All ranks: the checkpoint that `--resume_from` means, as a dict on the CPU; None without flag or anything to
    resume.

    Rank 0 decides which file. `format` is what the script wrote as contents["format"]. Raises InputError on all ranks
    for a missing, damaged or foreign file.
    """
    if resume_from is None:
        return None
    choice = None
    with agree_on_errors():
        if world()[0] == 0:
            choice = find_newest(folder) if resume_from == "auto" else _resolve(Path(resume_from))
            if choice is None and resume_from == "auto" and read_manifest(folder):
                raise InputError(f"{folder}: no intact checkpoint is left; start afresh with --overwrite")
    choice = broadcast_object(choice)
    if choice is None:
        return None
    contents = None
    with agree_on_errors():
        try:
            contents = torch.load(choice, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise InputError(f"{choice}: not a readable checkpoint ({reason}); choose another --resume_from") from None
        if not isinstance(contents, dict) or not {"step", "rng", "format"} <= contents.keys():
            raise InputError(f"{choice}: not a checkpoint of this project; choose another --resume_from")
        if contents["format"] != format:
            raise InputError(
                f"{choice}: checkpoint of {contents['format']}, not of {format}; choose another --resume_from"
            )
    print_main(f"loaded {choice} (step {contents['step']})")
    return contents


def check_same_run(contents: dict, now: dict) -> None:
    """InputError when a checkpoint cannot be gone on with exactly; contents["run"] holds what `now` must equal."""
    for name, value in now.items():
        if contents["run"][name] != value:
            hint = "keep the product of batch size, --gradient_accumulation_steps and the number of processes"
            was = f"{name.replace('_', ' ')} {contents['run'][name]}, now {value}"
            raise InputError(f"--resume_from: a run with {was}; {hint if 'batch' in name else 'give the same again'}")


def _resolve(path: Path) -> Path:
    if path.is_dir():
        newest = find_newest(path)
        if newest is None:
            raise InputError(f"{path}: holds no intact checkpoint; check --resume_from")
        return newest
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint; check --resume_from")
    manifest = read_manifest(
        path.parent
    )  # a kill just after linking leaves best.pt under its older line: any line will do
    if path.name in manifest and file_sha256(path) not in manifest.values():
        raise InputError(f"{path}: damaged (its sha256 is not the manifest's); choose another, or --resume_from auto")
    return path


# --- the run folder ---------------------------------------------------------------------------------------------------

RUN_FILES = ("args.yaml", "metrics.jsonl", "summary.json", "model.safetensors", MANIFEST, "last.pt", "best.pt")


def lock_run_folder(folder: Path, may_exist: bool, wait: float = 60) -> "RunLock | None":
    """All ranks call it: rank 0 makes and locks the folder (keep what is returned as long as the run lasts).

    InputError on all ranks when the folder holds a run and may not, or cannot be written. The lock (released by the
    system when the process ends, however it ends) keeps two runs out of one folder; one being stopped is waited for.
    """
    lock = None
    with agree_on_errors():
        if world()[0] == 0:
            if any((folder / name).exists() for name in RUN_FILES) and not may_exist:
                text = "holds a run already; go on with --resume_from auto, or --overwrite it, or choose another folder"
                raise InputError(f"{folder}: {text}")
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = RunLock(folder / ".lock", wait)
            except OSError as error:
                raise InputError(f"{folder}: cannot write here ({error.strerror}); choose another folder") from None
    with agree_on_errors():
        if not folder.is_dir():
            raise InputError(f"{folder}: not seen by rank {world()[0]}; choose a folder that all nodes share")
    return lock


def clear_run_folder(folder: Path, overwrite: bool) -> None:
    """Rank 0, once nothing can be wrong: delete what a killed save left, and with `overwrite` the old run."""
    if world()[0] == 0:
        for pattern in (".*.tmp", *((*RUN_FILES, "step_*.pt", "*_best.pt", "eval_*.json") if overwrite else ())):
            for path in folder.glob(pattern):
                path.unlink()
        for name in ("logs", "figures") if overwrite else ():
            shutil.rmtree(folder / name, ignore_errors=True)


class RunLock:
    """An exclusive lock on a file while this object, at most the process, lives. Raises InputError after `wait`
    seconds."""

    def __init__(self, path: Path, wait: float):
        self.file = open(path, "a")  # noqa: SIM115 - open for the lifetime of the lock
        deadline = time.monotonic() + wait
        while not self._try():
            if time.monotonic() > deadline:
                raise InputError(f"{path.parent}: another run is writing here; stop it or choose another output folder")
            time.sleep(0.2)

    def _try(self) -> bool:
        try:
            if os.name == "nt":
                import msvcrt

                msvcrt.locking(self.file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:  # some network file systems have no locks
            print(f"warning: {self.file.name}: no locks here ({error.strerror}); keep other runs out", file=sys.stderr)
        return True
