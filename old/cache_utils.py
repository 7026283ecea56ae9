"""Bytes kept on disk under a key, each file with a checksum: what is slow to decode is decoded once.

Ranks and runs may share a folder. A torn or damaged file is as good as none, and so is a full or read-only disk, which
is said once.
"""

import contextlib
import hashlib
import os
import sys
import zlib
from pathlib import Path

from old.distributed_utils import world


def identity(path: str | Path) -> str:
    """A key that changes when the file does: path, size and modification time. Raises OSError."""
    status = os.stat(path)
    return f"{path}|{status.st_size}|{status.st_mtime_ns}"


def checksum(data: bytes | memoryview) -> bytes:
    """The four bytes that a file of the cache ends with."""
    return zlib.crc32(data).to_bytes(4, "little")


class DiskCache:
    """get(key, size) -> bytes or None; put(key, data). Without a folder it keeps nothing."""

    def __init__(self, folder: str | Path | None):
        self.folder = Path(folder) if folder else None
        self.warned = False

    def path(self, key: str) -> Path:
        """Where the bytes of a key lie."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}.bin"

    def get(self, key: str, size: int) -> bytes | None:
        """What was put there, if it is whole and of `size` bytes."""
        if self.folder is None:
            return None
        with contextlib.suppress(OSError):
            data = self.path(key).read_bytes()
            # The view spares a copy.
            if len(data) == size + 4 and checksum(memoryview(data)[:-4]) == data[-4:]:
                return data[:-4]
        return None

    def has(self, key: str, size: int) -> bool:
        """Whether a file of this size is there; get() says whether it is whole."""
        if self.folder is None:
            return False
        with contextlib.suppress(OSError):
            return self.path(key).stat().st_size == size + 4
        return False

    def put(self, key: str, data: bytes) -> None:
        """Keep bytes under a key. Ranks that write the same key write the same bytes."""
        if self.folder is None:
            return
        try:
            self._write(self.path(key), data)
        except OSError as error:
            if not self.warned:
                reason = f"not kept ({error.strerror}); what is not kept is decoded anew each time"
                print(f"warning: {self.folder}: {reason}", file=sys.stderr, flush=True)
            self.warned = True

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file as a whole or not at all. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rank, _ = world()
        temporary = path.with_name(f".{path.name}.{rank}.{os.getpid()}")
        try:
            temporary.write_bytes(data + checksum(data))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
