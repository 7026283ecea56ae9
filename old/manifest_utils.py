"""What lies in a run folder and whether it is whole: atomic writing, the manifest, the seals of checkpoints.

`manifest.sha256` names the run's checkpoints (`sha256sum -c manifest.sha256` checks them all); its `#` lines, which
sha256sum passes over, name the run, the other files that it wrote, and what is obsolete and may be deleted. Each
checkpoint ends with a seal: a line with its step, its run and the sha256 of its bytes, so that a copy without a
manifest is checked as well.
"""

import hashlib
import os
import re
import shutil
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from old.async_save_utils import WRITER
from old.cli_utils import InputError
from old.distributed_utils import print_main

MANIFEST = "manifest.sha256"
# What a run writes into its folder beside checkpoints, logs and figures.
RESULT_FILES = (
    "args.yaml", "starts.jsonl", "metrics.jsonl", "summary.json", "model.safetensors",
    "eval_test.json", "eval_last.json",
)  # fmt: skip


# --- files that are there as a whole or not at all --------------------------------------------------------------------


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

        # torch.save raises a RuntimeError of its own when the disk had no room for the end of the file.
        cause = error
        while isinstance(cause, RuntimeError):
            cause = cause.__context__
        if isinstance(cause, OSError):
            raise cause from None
        raise
    return file.sha256.hexdigest()


class _HashingFile:
    """A write-only file that keeps the sha256 of what passes through it."""

    def __init__(self, raw):
        self.raw = raw
        self.sha256 = hashlib.sha256()

    def write(self, data) -> int:
        self.sha256.update(data)
        return self.raw.write(data)

    def flush(self) -> None:
        self.raw.flush()


def _sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def prepare_link(source: Path, target: Path) -> Path:
    """A file that os.replace makes `target`, another name of `source`; a copy where there are no links."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)

    # A link to a symbolic link would follow what that points to later.
    source = Path(os.path.realpath(source))
    try:
        os.link(source, temporary)
    except OSError:
        try:
            shutil.copyfile(source, temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return temporary


def link(source: Path, target: Path) -> None:
    """Make `target` another name of `source`, replacing what it was, atomically."""
    os.replace(prepare_link(source, target), target)


# --- the manifest: which run a folder holds, and what belongs to it ---------------------------------------------------


@dataclass
class Manifest:
    """What `manifest.sha256` says of a run folder.

    checkpoints: {file name: sha256} in the order of saving, so that the last `step_` is where the run stands.
    written: other files of the run, relative to the folder. obsolete: files of the run that may be deleted.
    """

    run_id: str = ""
    checkpoints: dict[str, str] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    obsolete: list[str] = field(default_factory=list)

    def steps(self) -> list[str]:
        """Names of the `step_` checkpoints, the newest last."""
        return [name for name in self.checkpoints if name.startswith("step_")]

    def files(self) -> list[str]:
        """Everything that the run wrote."""
        return [*self.checkpoints, *self.written, *self.obsolete]


def read_manifest(run_folder: Path) -> Manifest | None:
    """The manifest of a run folder; None when it is missing, empty, or has a line that no run writes."""
    try:
        lines = (run_folder / MANIFEST).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None

    manifest = Manifest()
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  (.+)", line)
        if match and is_checkpoint_name(match[2]):
            manifest.checkpoints[match[2]] = match[1]
        elif match := re.fullmatch(r"# run ([0-9a-f]*)", line):
            manifest.run_id = match[1]
        elif match := re.fullmatch(r"# (written|obsolete) (.+)", line):
            getattr(manifest, match[1]).append(match[2])
        else:
            return None
    return manifest if lines else None


def write_manifest(run_folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a run folder as a whole."""
    lines = [f"# run {manifest.run_id}"]
    lines += [f"# written {name}" for name in manifest.written]
    lines += [f"# obsolete {name}" for name in manifest.obsolete]
    lines += [f"{digest}  {name}" for name, digest in manifest.checkpoints.items()]
    text = "\n".join(lines) + "\n"
    write_atomically(run_folder / MANIFEST, lambda file: file.write(text.encode()))


def note_written(run_folder: Path, name: str) -> None:
    """Rank 0 of a training run: enter a file that it is about to write, relative to its folder, into the manifest."""
    # A checkpoint that is being written enters itself.
    WRITER.join()
    manifest = read_manifest(run_folder)
    if manifest is not None and name not in manifest.written:
        manifest.written.append(name)
        write_manifest(run_folder, manifest)


def delete_obsolete(run_folder: Path, manifest: Manifest) -> None:
    """Delete the files that the manifest on the disk already calls obsolete."""
    for name in manifest.obsolete:
        path = run_folder / name
        # A manifest that somebody edited must not reach outside the folder.
        if ".." not in Path(name).parts and path.resolve().is_relative_to(run_folder.resolve()):
            path.unlink(missing_ok=True)
    manifest.obsolete = []


# --- the seal: what a checkpoint says of itself -----------------------------------------------------------------------


class Seal(NamedTuple):
    """The line that a checkpoint ends with; `size` is its length in bytes."""

    step: int
    run_id: str
    sha256: str
    size: int


SEAL = re.compile(rb"\n# checkpoint step=(\d+) run=([0-9a-f]*) sha256=([0-9a-f]{64})\n\Z")


def read_seal(path: Path) -> Seal | None:
    """The seal of a checkpoint; None for files written before there were seals, and for files of other programs."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 256))
            match = SEAL.search(file.read())
    except OSError:
        return None
    if match is None:
        return None
    return Seal(int(match[1]), match[2].decode(), match[3].decode(), len(match[0]))


def write_checkpoint(path: Path, contents: dict) -> str:
    """Write and seal a checkpoint; returns the sha256 of the whole file."""

    def write(file: _HashingFile) -> None:
        torch.save(contents, file)
        seal = f"\n# checkpoint step={contents['step']} run={contents['run_id']} sha256={file.sha256.hexdigest()}\n"
        # torch.load passes over what follows the end of its archive.
        file.write(seal.encode())

    return write_atomically(path, write)


def file_sha256(path: Path) -> str:
    """The sha256 of a file, as the manifest has it; "" for a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def find_damage(path: Path) -> str:
    """Why a checkpoint file cannot be trusted, by what it says of itself; "" for a good one.

    A sealed file is compared with its seal, and its name with the step in it. One without a seal is checked by the
    checksums of torch's zip archive.
    """
    seal = read_seal(path)
    if seal is None:
        return _find_damage_in_archive(path)

    # The seal is of all bytes before it.
    sha256 = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            left = os.fstat(file.fileno()).st_size - seal.size
            while left > 0 and (data := file.read(min(left, 1 << 20))):
                sha256.update(data)
                left -= len(data)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if sha256.hexdigest() != seal.sha256:
        return "its bytes do not match the sha256 that it ends with"
    return misnamed(path.name, seal.step)


def _find_damage_in_archive(path: Path) -> str:
    """Why a checkpoint without a seal cannot be trusted; "" for a good one."""
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except Exception as error:
        # Damaged archives raise errors of each of the compression methods.
        return f"not a readable checkpoint ({error})"
    return f"its part {record} does not match its checksum" if record else ""


def misnamed(name: str, step: int) -> str:
    """What is wrong with a checkpoint's name, given the step in it; "" for nothing."""
    match = re.fullmatch(r"step_(\d+)\.pt", name)
    return f"it holds step {step}, another than its name says" if match and int(match[1]) != step else ""


def is_own_checkpoint(path: Path, manifest: Manifest) -> bool:
    """Whether a `step_` file is a good checkpoint of the manifest's run, whatever sha256 the manifest has for it.

    A step may be saved twice, and a kill between file and manifest leaves the second file under the first's line.
    """
    seal = read_seal(path)
    own = seal is not None and manifest.run_id != "" and seal.run_id == manifest.run_id
    return own and path.name.startswith("step_") and not find_damage(path)


def is_checkpoint_name(name: str) -> bool:
    """Whether a run writes checkpoints under such a name."""
    return bool(re.fullmatch(r"step_\d+\.pt|last\.pt|([\w-]+_)?best\.pt", name))


# --- a manifest that was lost -----------------------------------------------------------------------------------------


class Identity(NamedTuple):
    """What a file says of itself; `reason` is why it is not a good checkpoint of this project, or ""."""

    step: int
    run_id: str
    reason: str


def recover_manifest(run_folder: Path) -> Manifest:
    """A manifest from what the checkpoints of a folder say of themselves, for a folder that has lost its own.

    Raises InputError when there are checkpoints and none is intact, or when they are of different runs.
    """
    known = read_manifest(run_folder)
    names = sorted(path.name for path in run_folder.glob("*.pt") if is_checkpoint_name(path.name))
    names = [name for name in names if known is None or name not in known.obsolete]

    # Which of them are good, and of which run.
    intact: list[tuple[int, str]] = []
    run_ids = {known.run_id} if known and known.run_id else set()
    for name in names:
        path = run_folder / name
        identity = identify(path)
        if identity.reason:
            print_main(f"warning: {path}: {identity.reason}; passed over", file=sys.stderr)
            continue
        intact.append((identity.step, name))
        run_ids.add(identity.run_id)

    # They must be of one run, which can go on from a step's own checkpoint.
    if names and not intact:
        reason = f"holds {names[0]}, but no readable {MANIFEST} and no intact checkpoint"
        raise InputError(f"{run_folder}: {reason}; choose another folder")
    if len(run_ids) > 1:
        reason = f"holds checkpoints of {len(run_ids)} runs and no readable {MANIFEST}"
        raise InputError(f"{run_folder}: {reason}; name one with --resume_from, and an empty output folder")
    if intact and not any(name.startswith("step_") for _, name in intact):
        _, name = intact[0]
        raise InputError(f"{run_folder}: holds {name} and no step_*.pt; name it with --resume_from")

    manifest = known or Manifest()
    manifest.run_id = run_ids.pop() if run_ids else ""
    manifest.checkpoints = {name: file_sha256(run_folder / name) for _, name in sorted(intact)}
    if intact and known is None:
        reason = f"no readable {MANIFEST}; the checkpoints were checked by the sums in them"
        print_main(f"warning: {run_folder}: {reason}", file=sys.stderr)
    return manifest


def identify(path: Path) -> Identity:
    """The step, the run, and what is wrong with a file, by what is in it."""
    reason = find_damage(path)
    seal = read_seal(path)
    if seal:
        return Identity(seal.step, seal.run_id, reason)
    if reason:
        return Identity(0, "", reason)

    # Checkpoints of the first versions have no seal.
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        step = checkpoint["step"]
        if not {"rng", "format"} <= checkpoint.keys():
            raise KeyError
    except Exception:
        return Identity(0, "", "not a checkpoint of this project")
    return Identity(step, checkpoint.get("run_id", ""), misnamed(path.name, step))


def file_is(path: Path, digest: str) -> bool:
    """Whether a file is there and has this sha256."""
    return path.is_file() and file_sha256(path) == digest
