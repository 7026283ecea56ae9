"""Checkpoints are written beside the training: a copy is taken between two steps, and a thread writes the copy.

The thread runs on rank 0 alone, and one write at most is under way. Whoever needs its file, or the manifest, waits for
it first; what it could not write is then told to all ranks together (checkpoint_utils.settle_checkpoint).
"""

import contextlib
import copy
import ctypes
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator

import torch

from old.hardware_utils import available_ram_gb
from old.phase_utils import doing

# Where tensors may begin in the memory of a copy, bytes: a cache line.
ALIGNMENT = 64


class CheckpointWriter:
    """One write at a time, in a thread, and the memory for what it writes.

    The copy takes as much RAM as the checkpoint is large, on rank 0 only, beside what training takes. It is kept from
    save to save, as fresh pages cost as much time as the copy itself. With a GPU it is pinned.
    """

    def __init__(self):
        # The same on all ranks: a save was begun, and they have not yet agreed on how it went.
        self.unsettled = False
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.memory: mmap.mmap | None = None
        # pin_asked: it was to be pinned; pinned: CUDA did so.
        self.pin_asked = False
        self.pinned = False
        self.preparing: threading.Thread | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin `write()` and return; what it raises is raised by wait()."""

        # training goes on meanwhile, so that nothing is said; whoever waits for the write says so
        under_way = contextlib.ExitStack()
        under_way.enter_context(doing("writing the checkpoint", after=math.inf, must_finish=True))

        def run() -> None:
            try:
                with under_way:
                    write()
            except BaseException as error:
                self.error = error

        # It is no daemon, so that the interpreter's exit waits for it.
        self.thread = threading.Thread(target=run, name="checkpoint")
        try:
            self.thread.start()
        except RuntimeError:
            # The system has no thread to give.
            self.thread = None
            run()

    def join(self) -> None:
        """Until the write is over, however it went."""
        if self.thread is not None:
            with doing("waiting for the checkpoint's write"):
                self.thread.join()
            self.thread = None

    def wait(self) -> None:
        """As join; raises what the write raised, once."""
        self.join()
        if self.error is not None:
            error = self.error
            self.error = None
            try:
                raise error
            finally:
                # Else the error's traceback, which knows this frame, would keep all frames of the run alive.
                del error

    def prepare(self, size: int, on_gpu: bool) -> None:
        """Take memory for a copy of about `size` bytes, and have the system find its pages in a thread.

        That takes as long as the copy, and so the first save holds training up no longer than the others.
        """
        self.join()
        if size and self._make_room(size + size // 20, on_gpu):
            # memset lets other threads run.
            thread = threading.Thread(target=ctypes.memset, args=(self._address(), 0, size))

            # Where the system has no thread to give, the first save takes longer.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self.preparing = thread

    def copy(self, contents: dict) -> dict | None:
        """The contents as torch.save would write them now, on the CPU; None where the RAM has no room for a copy.

        Storages are copied whole, once each, so that views and shared tensors come out as they are. The copy before is
        overwritten: its write must be over.
        """
        tensors = list(_find_tensors(contents))
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        on_gpu = any(storage.device.type == "cuda" for storage in storages.values())
        size = sum(_room(storage) for storage in storages.values())
        if not self._make_room(size, on_gpu):
            return None

        # All copies from a GPU are begun, then waited for together.
        copies: dict[int, torch.UntypedStorage] = {}
        place = 0
        for key, storage in storages.items():
            copies[key] = self._copy_storage(storage, place)
            place += _room(storage)
        if on_gpu:
            torch.cuda.current_stream().synchronize()

        # deepcopy takes a tensor's copy where it is told of one.
        known = {}
        for tensor in tensors:
            storage = copies[tensor.untyped_storage()._cdata]
            known[id(tensor)] = _same_view(tensor, storage)
        return copy.deepcopy(contents, known)

    def _copy_storage(self, storage: torch.UntypedStorage, place: int) -> torch.UntypedStorage:
        """Begin a copy of a storage into the memory, `place` bytes behind its start."""
        size = storage.nbytes()
        if size == 0:
            return torch.UntypedStorage(0)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))
        target = torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=place)
        target.copy_(source, non_blocking=True)
        return target.untyped_storage()

    def _make_room(self, size: int, pinned: bool) -> bool:
        """Whether there is memory for `size` bytes, which is taken here if need be."""
        if self.preparing is not None:
            self.preparing.join()
            self.preparing = None
        if self.memory is not None and len(self.memory) >= size and self.pin_asked >= pinned:
            return True

        # Half of the RAM is for decoded data, and for what is validated.
        self.release()
        if size > 0.5 * available_ram_gb() * 2**30:
            return False
        try:
            self.memory = _allocate(max(size, mmap.PAGESIZE))
        except (OSError, MemoryError, OverflowError):
            return False

        self.pin_asked = pinned
        if pinned:
            self._pin()
        return True

    def _pin(self) -> None:
        """Register the memory with CUDA. Where that is refused, copies from the GPU are slower ones."""
        refused = torch.cuda.cudart().cudaHostRegister(self._address(), len(self.memory), 0)
        self.pinned = int(refused) == 0
        if not self.pinned:
            # CUDA would tell the refusal to the next kernel.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
                torch.cuda.synchronize()

    def _address(self) -> int:
        """Where the memory begins."""
        return torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def release(self) -> None:
        """Give the memory back."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address())
        self.memory = None
        self.pinned = False


WRITER = CheckpointWriter()
INHERITED: list[mmap.mmap | None] = []


def _forget_in_child() -> None:
    """A forked process has neither the thread nor the memory; to unmap it there would hit what has taken its place."""
    INHERITED.append(WRITER.memory)
    WRITER.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _allocate(size: int) -> mmap.mmap:
    """Zeroed memory that loading processes do not inherit: writing to it would copy it for them first."""
    kind = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    memory = mmap.mmap(-1, size, **kind)
    # This is a hint, which some systems lack.
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _room(storage: torch.UntypedStorage) -> int:
    """The bytes that a storage takes in a copy, rounded up."""
    return -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT


def _same_view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor's view of its storage, of a copy of the storage."""
    empty = torch.empty(0, dtype=tensor.dtype)
    view = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return view.requires_grad_(tensor.requires_grad)


def _find_tensors(value) -> Iterator[torch.Tensor]:
    """All plain tensors in dicts, lists and tuples."""
    if type(value) is torch.Tensor and value.layout is torch.strided:
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _find_tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _find_tensors(part)
