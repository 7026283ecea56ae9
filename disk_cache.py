"""Bytes kept on disk under a key, each file with a checksum: what is slow to decode is decoded once.

Ranks and runs may share a folder. A torn or damaged file is as good as none, and a full or
read-only disk, which is said once.
"""

import contextlib
import hashlib
import os
import sys
import zlib
from pathlib import Path

from distributed_utils import world


def identity(path: str | Path) -> str:
    """Path, size and time of change: another value, another file. Raises OSError."""
    facts = os.stat(path)
    return f"{path}|{facts.st_size}|{facts.st_mtime_ns}"


class DiskCache:
    """get(key, size) -> bytes or None; put(key, data). Without a folder it keeps nothing."""

    def __init__(self, folder: str | Path | None, suffix: str):
        self.folder, self.suffix, self.warned = Path(folder) if folder else None, suffix, False

    def path(self, key: str) -> Path:
        return self.folder / (hashlib.sha256(key.encode()).hexdigest() + self.suffix)

    def get(self, key: str, size: int) -> bytes | None:
        """What was put there, if it is whole and of `size` bytes."""
        if self.folder is None:
            return None
        with contextlib.suppress(OSError):
            data = self.path(key).read_bytes()
            if len(data) == size + 4 and zlib.crc32(memoryview(data)[:-4]).to_bytes(4, "little") == data[-4:]:
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
        """Ranks that write the same key write the same bytes."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.path(key)
            temporary = path.with_name(f".{path.name}.{world()[0]}.{os.getpid()}")
            try:
                temporary.write_bytes(data + zlib.crc32(data).to_bytes(4, "little"))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            if not self.warned:
                text = (
                    f"warning: {self.folder}: not kept ({error.strerror}); what is not kept is decoded anew each time"
                )
                print(text, file=sys.stderr, flush=True)
            self.warned = True
