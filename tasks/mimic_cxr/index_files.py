"""The files of an index: Arrow tables mapped into memory, JSON files with a checksum, and work shared by the ranks."""

import contextlib
import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import torch.distributed as dist

from old.checkpoint_utils import file_sha256, write_atomically
from old.cli_utils import InputError, RunError
from old.distributed_utils import agree_on_errors

# More pieces than any work has.
NO_MORE = 1 << 40


def map_table(path: Path) -> pa.RecordBatch:
    """The one record batch of an Arrow file, mapped into memory. Raises InputError."""
    try:
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_file(file).get_batch(0)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: damaged index file ({error}); start again, it will be built again") from None


def write_tables(path: Path, tables: list[pa.Table], schema: pa.Schema) -> str:
    """Write an Arrow file of these tables' record batches; returns its sha256."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for table in tables:
            writer.write_table(table)
    return write_file(path, sink.getvalue())


def write_table(path: Path, table: pa.Table) -> str:
    """Write an Arrow file of one record batch, which may be empty; returns its sha256."""
    batch = pa.RecordBatch.from_pylist([], table.schema)
    if len(table):
        batch = table.combine_chunks().to_batches()[0]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(batch)
    return write_file(path, sink.getvalue())


def write_file(path: Path, content) -> str:
    """Write bytes atomically; returns their sha256. Raises RunError when they cannot be written."""
    try:
        return write_atomically(path, lambda file: file.write(content))
    except OSError as error:
        advice = "free space and start again, the build goes on with what is lacking"
        raise RunError(f"{path}: not written ({error.strerror}); {advice}") from None


def facts_sha256(path: Path, facts: dict) -> str:
    """The checksum of a JSON file of the index; of one that was put in another's place it is another."""
    return hashlib.sha256(f"{path.parent.name}/{path.name} {json.dumps(facts)}".encode()).hexdigest()


def write_facts(path: Path, facts: dict) -> None:
    """Write a JSON file with its own checksum in it."""
    content = facts | {"sha256": facts_sha256(path, facts)}
    write_file(path, json.dumps(content).encode())


def read_facts(path: Path) -> dict | None:
    """What write_facts wrote; None where that is missing, damaged, or has no checksum."""
    try:
        facts = json.loads(path.read_bytes())
        written = facts.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return facts if written == facts_sha256(path, facts) else None


def part_path(folder: Path, part: int, split: str = "") -> Path:
    """The JSON of a part, or the Arrow file of its questions of a split."""
    name = f"part-{part:05d}"
    return folder / (f"{name}-{split}.arrow" if split else f"{name}.json")


def is_intact(path: Path, sha256: str) -> bool:
    """Whether a file can be read and has this checksum."""
    try:
        return file_sha256(path) == sha256
    except OSError:
        return False


def is_finished(folder: Path, part: int) -> bool:
    """Whether the files of a part are there and have their checksums."""
    facts = read_facts(part_path(folder, part))
    return facts is not None and all(is_intact(folder / name, sha256) for name, sha256 in facts["files"].items())


def check_seen(path: Path) -> None:
    """Raises InputError where a file that rank 0 wrote is not to be seen: on another node with a disk of its own."""
    if not path.exists():
        raise InputError(f"{path}: written, but not seen on {platform.node()}; --index_dir must be shared by all nodes")


def not_written(folder: Path, error: OSError) -> InputError:
    """The error of an index folder that cannot be written."""
    return InputError(f"{folder}: cannot write here ({error.strerror}); choose another --index_dir")


# --- work shared by the ranks -----------------------------------------------------------------------------------------


def shared_work(name: str, count: int) -> Iterator[int]:
    """0 .. count - 1, dealt out to the ranks as they come: a slow rank gets less, and none waits long for another."""
    if not dist.is_initialized():
        yield from range(count)
        return
    store = dist.distributed_c10d._get_default_store()
    while (piece := store.add(name, 1) - 1) < count:
        yield piece


@contextlib.contextmanager
def stop_others(name: str) -> Iterator[None]:
    """agree_on_errors around shared_work(name): an error of one rank ends the others' work at their next piece."""
    with agree_on_errors():
        try:
            yield
        except (InputError, RunError):
            if dist.is_initialized():
                dist.distributed_c10d._get_default_store().add(name, NO_MORE)
            raise
