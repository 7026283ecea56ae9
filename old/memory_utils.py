"""A batch that fits into memory: a trial step, a smaller micro-batch where it ran out, and what is said then."""

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from old.batch_utils import share_out
from old.cli_utils import RunError
from old.distributed_utils import print_main, reduce_max, world
from old.hardware_utils import out_of_memory, split_batch
from old.phase_utils import doing

# What a GPU must have beside a trial's peak: the share is for fragmentation, the bytes are for what NCCL, cuDNN and
# cuBLAS allocate past torch's allocator.
MARGIN_SHARE = 0.05
MARGIN_BYTES = 1.5e9


class Trial(NamedTuple):
    """What a trial step came to on this rank.

    peak, room: bytes that torch reserved at most, and that the GPU has for this process; None on a CPU. error: the
    first line of what ran out, empty where nothing did. fits: it ran, and a GPU has room for the margin, too.
    """

    fits: bool
    error: str
    peak: int | None
    room: int | None


class BatchSize(NamedTuple):
    """How one process's share of an optimizer step is split: samples of a micro-batch, and how many micro-batches.

    source: where they come from, for the banner. asked: (size, accumulation) of the flags, where memory has changed
    them. peak_gib: of the trial step, over all ranks; None without one and on a CPU.

    total: --effective_batch_size, of which size and accumulation are those of the process with most; None where they
    and the processes make it. most: samples of a micro-batch as the flag has them.
    """

    size: int
    accumulation: int
    source: str
    asked: tuple[int, int] | None = None
    peak_gib: float | None = None
    total: int | None = None
    most: int | None = None

    def of_effective_batch(self, total: int | None) -> "BatchSize":
        """The batch of --effective_batch_size, `size` being the most for a micro-batch; itself where that is None."""
        if total is None:
            return self
        batch = self._replace(total=total, most=self.size)
        return batch.planned_for(world()[1])

    def planned_for(self, processes: int) -> "BatchSize":
        """As so many processes share it out; itself where the flags are per GPU."""
        if self.total is None:
            return self
        size, accumulation = share_out(self.total, self.most, processes)
        return self._replace(size=size, accumulation=accumulation)

    @property
    def effective_batch_size(self) -> int:
        """Samples of an optimizer step, over all processes."""
        return self.total or self.size * self.accumulation * world()[1]

    @property
    def share(self) -> int:
        """The most samples of an optimizer step that one process has."""
        return math.ceil(self.effective_batch_size / world()[1])

    @property
    def accumulation_flag(self) -> int | None:
        """The accumulation as a user is to ask for it; None where it follows from --effective_batch_size."""
        return self.flag(self.accumulation)

    def flag(self, accumulation: int) -> int | None:
        """As accumulation_flag, for this accumulation."""
        return None if self.total else accumulation

    def smaller(self, size: int, accumulation: int) -> tuple[int, int]:
        """The next smaller micro-batch than `size`, and how many of them."""
        if self.total:
            return share_out(self.total, size // 2, world()[1])
        return split_batch(size, accumulation)

    def describe(self) -> str:
        """How --effective_batch_size is shared out, for the banner."""
        processes = world()[1]
        least = self.total // processes
        share = f"{self.share} each" if least == self.share else f"{least} or {self.share} each"
        passes = f"{self.accumulation} passes of up to {self.size}" if self.accumulation > 1 else "in one pass"
        source = f" ({self.source})" if self.source else ""
        return f"{self.total} (--effective_batch_size) over {processes} processes: {share}, {passes}{source}"

    def record(self) -> dict:
        """For a checkpoint: a resumed run splits its steps in the same way, see fit_batch_to_memory."""
        used = [self.size, self.accumulation]
        asked = list(self.asked) if self.asked else used
        # activations are never computed again; checkpoints say so
        record = {"world_size": world()[1], "asked": asked, "used": used, "recomputed": False}
        if self.total:
            record |= {"effective_batch_size": self.total, "batch_size": self.most}
        return record


def fits_by_itself(auto_batch: bool | None, device: torch.device) -> bool:
    """Whether the batch is fitted: as --auto_batch says; left out on a GPU, since a CPU's trial takes long."""
    return device.type == "cuda" if auto_batch is None else auto_batch


def auto_batch_advice(auto_batch: bool | None, device: torch.device) -> str:
    """The end of an out-of-memory message: how the batch could have been fitted, empty where it was."""
    if auto_batch is False:
        return ", or leave out --no-auto_batch, which keeps the batch as given"
    return "" if fits_by_itself(auto_batch, device) else ", or --auto_batch, which tries by itself"


def batch_flags(size: int, accumulation: int | None, flag: str = "--batch_size") -> str:
    """How a user asks for a batch."""
    if accumulation is None:
        return f"{flag} {size}"
    return f"{flag} {size} --gradient_accumulation_steps {accumulation}"


def copies_held() -> int:
    """Copies of the trained parameters beside them and their gradients: AdamW's two moments, and DDP's buckets."""
    return 2 + (world()[1] > 1)


def gpu_memory(device: torch.device) -> tuple[int, int] | None:
    """(bytes that torch has reserved at most, bytes that this process may have) of a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device)
    limit = total * torch.cuda.get_per_process_memory_fraction(device)
    return torch.cuda.max_memory_reserved(device), int(min(room, limit))


def try_step(try_once: Callable[[], None], model: nn.Module, copies: float) -> Trial:
    """Run try_once with `copies` times the trained parameters' bytes held beside. Leaves no trace but the time it took.

    It runs twice: the second time, the gradients of the first are there already. Raises what is not a lack of memory.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = trained[0].device
    count = int(copies * sum(parameter.nbytes for parameter in trained))
    statistics = [buffer.clone() for buffer in model.buffers()]
    error = ""
    held = []
    release_memory()

    # dropout and noise of the run are those of a run without a trial
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            held.append(torch.empty(count, dtype=torch.uint8, device=device))
            for _ in range(2):
                try_once()
            if device.type == "cuda":
                # what a kernel ran out of is told when one waits for it
                torch.cuda.synchronize(device)
        except (RuntimeError, MemoryError) as reason:
            if not out_of_memory(reason):
                raise
            error = str(reason).partition("\n")[0] or type(reason).__name__

    # gradients and running statistics are those from before
    memory = gpu_memory(device)
    for parameter in trained:
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), statistics, strict=True):
            buffer.copy_(before)
    held.clear()
    release_memory()
    if memory is None:
        return Trial(not error, error, None, None)
    peak, room = memory
    has_margin = (1 + MARGIN_SHARE) * peak + MARGIN_BYTES <= room
    return Trial(has_margin and not error, error, peak, room)


class Agreed(NamedTuple):
    """What a trial step came to on all ranks together: room and peak are bytes, inf and 0 on a CPU."""

    fits: bool
    ran_out: bool
    room: float
    peak: float

    @property
    def peak_gib(self) -> float | None:
        """The peak in GiB, None on a CPU."""
        return self.peak / 2**30 if self.peak else None

    @property
    def room_text(self) -> str:
        """The room as a message has it."""
        return f"{self.room / 2**30:.1f} GiB" if math.isfinite(self.room) else "memory"


def agree_on_trial(trial: Trial) -> Agreed:
    """All ranks: the trial of the one with the least room decides for all."""
    room = trial.room or math.inf
    facts = [not trial.fits, bool(trial.error), -room, trial.peak or 0]
    failed, ran_out, room_taken, peak = reduce_max(facts).tolist()
    return Agreed(not failed, bool(ran_out), -room_taken, peak)


def begun_with(checkpoint: dict | None, asked: tuple[int, int]) -> dict | None:
    """The split that a resumed run was begun with, where the same is asked for of as many processes."""
    split = checkpoint.get("split") if checkpoint else None
    if split and split["world_size"] == world()[1] and tuple(split["asked"]) == asked:
        return split
    return None


@doing("finding the batch that fits into the memory")
def fit_batch_to_memory(
    try_once: Callable[[int], None],
    model: nn.Module,
    wanted: BatchSize,
    words: Callable[[int, int | None], str],
    advice: str,
    checkpoint: dict | None = None,
) -> BatchSize:
    """The batch and accumulation that fit into memory, the effective batch as wanted; all ranks decide together.

    The batch is halved and the accumulation doubled until a step fits.

    try_once(size): forward and backward pass of the largest batch, without talking to other ranks. words(size,
    accumulation): how a user asks for them. checkpoint: a resumed run starts at its own split, to add up in the same
    order. Raises RunError with advice.
    """
    asked = (wanted.size, wanted.accumulation)
    size, accumulation = asked
    source = wanted.source
    # a resumed run splits its steps as it was begun
    if before := begun_with(checkpoint, asked):
        size, accumulation = before["used"]
        source = "as the run was begun" if size < wanted.size else wanted.source

    # try smaller micro-batches until all have room; a step that lacks its margin is made after all
    while True:
        trial = try_step(partial(try_once, size), model, copies_held())
        agreed = agree_on_trial(trial)
        if agreed.fits:
            break

        if size > 1:
            size, accumulation = wanted.smaller(size, accumulation)
            source = f"fitted: {wanted.size} did not fit into {agreed.room_text}"
            print_main(f"out of memory: going on with {words(size, wanted.flag(accumulation))}")
        # nothing is left to lower
        elif agreed.ran_out:
            reason = trial.error or "on another process"
            raise RunError(f"out of memory at {words(size, wanted.flag(accumulation))} ({reason[:120]}); {advice}")
        else:
            taken = f"{agreed.peak_gib:.1f} of {agreed.room_text}"
            print_main(f"warning: a step takes {taken}, which leaves little for NCCL and fragmentation; {advice}")
            break

    fitted = wanted._replace(size=size, accumulation=accumulation, source=source, asked=asked)
    return fitted._replace(peak_gib=agreed.peak_gib)


def release_memory() -> None:
    """Give what a trial step held back to the GPU: NCCL, cuDNN and cuBLAS allocate past torch's allocator."""
    # a failed pass leaves cycles that hold its activations
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
