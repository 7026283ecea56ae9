"""What must be the same in every training loop: a batch that fits, the best checkpoint, what is said at the end."""

import gc
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from checkpoint_utils import best_sha256, mark_best, settle_checkpoint
from cli_utils import RunError
from distributed_utils import print_main, reduce_max, world
from hardware_utils import out_of_memory, split_batch

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


class Fitted(NamedTuple):
    """A batch per process and an accumulation that fit, and why they are not those asked for ("" where they are).

    recomputed: recomputation was turned on for it. peak_gib: of the trial step, over all ranks; None on a CPU.
    """

    size: int
    accumulation: int
    reason: str
    recomputed: bool
    peak_gib: float | None


def fits_by_itself(auto_batch: bool | None, device: torch.device) -> bool:
    """Whether the batch is fitted: as --auto_batch says; left out on a GPU, since a CPU's trial takes long."""
    return device.type == "cuda" if auto_batch is None else auto_batch


def auto_batch_advice(auto_batch: bool | None, device: torch.device) -> str:
    """The end of an out-of-memory message: how the batch could have been fitted, empty where it was."""
    if auto_batch is False:
        return ", or leave out --no-auto_batch, which keeps the batch as given"
    return "" if fits_by_itself(auto_batch, device) else ", or --auto_batch, which tries by itself"


def batch_flags(size: int, accumulation: int, flag: str = "--batch_size", processes: int = 1) -> str:
    """How a user asks for a batch; processes: how many of them the flag counts together."""
    return f"{flag} {size * processes} --gradient_accumulation_steps {accumulation}"


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


def try_step(try_once: Callable[[], None], model: nn.Module, copies: float, passes: int = 2) -> Trial:
    """Run try_once with `copies` times the trained parameters' bytes held beside. Leaves no trace but the time it took.

    In the second pass, the gradients of the first are there already. Raises what is not a lack of memory.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = trained[0].device
    count = int(copies * sum(parameter.nbytes for parameter in trained))
    statistics = [buffer.clone() for buffer in model.buffers()]
    error, held = "", []
    release_memory()

    # dropout and noise of the run are those of a run without a trial
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            held.append(torch.empty(count, dtype=torch.uint8, device=device))
            for _ in range(passes):
                try_once()
            if device.type == "cuda":
                # what a kernel ran out of is told when one waits for it
                torch.cuda.synchronize(device)
        except (RuntimeError, MemoryError) as reason:
            if not out_of_memory(reason):
                raise
            error = str(reason).partition("\n")[0] or type(reason).__name__

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
    return Trial(not error and (1 + MARGIN_SHARE) * peak + MARGIN_BYTES <= room, error, peak, room)


def fit_batch_to_memory(
    try_once: Callable[[int], None], model: nn.Module, wanted: tuple[int, int], words: Callable[[int, int], str],
    advice: str, copies: float | None = None, recompute: Callable[[], None] | None = None,
    before: dict | None = None,
) -> Fitted:  # fmt: skip
    """The batch and accumulation that fit into memory, the effective batch as wanted; all ranks decide together.

    The batch is halved and the accumulation doubled until a step fits. Where not even one sample does, `recompute`
    turns on the recomputation of activations, and the batch starts again from the wanted one.

    try_once(size): forward and backward pass of the largest batch there can be, without talking to other ranks.
    wanted: (batch per process, accumulation). words(size, accumulation): how a user asks for them. copies: see
    copies_held; recompute: None where the model cannot, or a flag decided. before: the split_record of the checkpoint
    that a run is resumed from, at which it starts: another split adds up in another order, and has other dropout.
    Raises RunError with the advice.
    """
    size, accumulation = wanted
    copies = copies_held() if copies is None else copies
    recomputed = halved = False
    room = math.inf

    # a resumed run splits its steps as the run was begun, where the same is asked for of as many processes
    if before and before["world_size"] == world()[1] and tuple(before["asked"]) == wanted:
        size, accumulation = before["used"]
        if before["recomputed"] and recompute is not None:
            recompute()
            recomputed = True

    # try, and ask for less until all ranks have room
    while True:
        trial = try_step(partial(try_once, size), model, copies)
        facts = [not trial.fits, bool(trial.error), -(trial.room or math.inf), trial.peak or 0]
        failed, ran_out, room_taken, peak = reduce_max(facts).tolist()
        if not failed:
            break
        room = -room_taken

        # first smaller micro-batches, then recomputation; a step that only lacks its margin is made after all
        if size > 1:
            size, accumulation = split_batch(size, accumulation)
            halved = True
            print_main(f"out of memory: going on with {words(size, accumulation)}")
        elif recompute is not None and not recomputed:
            recompute()
            recomputed = True
            size, accumulation = wanted
            print_main(f"out of memory: going on with {words(size, accumulation)}, activations recomputed")
        elif ran_out:
            reason = trial.error or "on another process"
            raise RunError(f"out of memory at {words(size, accumulation)} ({reason[:120]}); {advice}")
        else:
            left = f"{peak / 2**30:.1f} of {room / 2**30:.1f} GiB"
            print_main(f"warning: a step takes {left}, which leaves little for NCCL and fragmentation; {advice}")
            break

    space = f"{room / 2**30:.1f} GiB" if math.isfinite(room) else "memory"
    reason = ""
    if size < wanted[0]:
        reason = f"fitted: {wanted[0]} did not fit into {space}" if halved else "as the run was begun"
    return Fitted(size, accumulation, reason, recomputed, peak / 2**30 if peak else None)


def split_record(asked: tuple[int, int], used: tuple[int, int], recomputed: bool) -> dict:
    """For a checkpoint: how a process's share of a step is split into micro-batches. Each is (batch, accumulation)."""
    return {"world_size": world()[1], "asked": list(asked), "used": list(used), "recomputed": bool(recomputed)}


def release_memory() -> None:
    """Give what a trial step held back to the GPU: NCCL, cuDNN and cuBLAS allocate past torch's allocator."""
    # a failed pass leaves cycles that hold its activations
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def say_if_finished(step: int, last_step: int, flags: str) -> None:
    """Rank 0 tells a user who resumes a finished run why nothing is trained, and which flags would change that."""
    if step >= last_step:
        print_main(f"nothing left to train: step {step} of {last_step}; see {flags}, --max_steps")


def say_saved(step: int) -> None:
    """All ranks, after a stop signal: once the checkpoint is on the disk, rank 0 says so."""
    settle_checkpoint()
    print_main(f"signal: saved at step {step}; --resume_from auto goes on from there")


def forget_other_best(run_folder: Path, state: dict, name: str = "best.pt") -> None:
    """All ranks, on resume: the best value so far counts only while the folder holds the checkpoint it belongs to.

    In another folder, or after going back to an older checkpoint, it holds another one or none.
    """
    if best_sha256(run_folder, name) != state["best_sha256"] or not math.isfinite(state["best"] or 0.0):
        state["best"] = None


def keep_best(
    run_folder: Path,
    state: dict,
    value: float,
    planned: bool,
    lower: bool = False,
    names: tuple[str, ...] = ("best.pt",),
) -> bool:
    """All ranks, after an evaluation: best.pt becomes the checkpoint of state["step"] if its value is the best so far.

    planned: False where --max_steps cut an epoch short. Such an evaluation is no part of the uninterrupted run, so it
    leaves no trace in `state`, and gives best.pt its first checkpoint only; nor does one that is not finite, which
    nothing would ever beat. lower: smaller values are better. Returns whether best.pt is now this checkpoint.
    """
    best = state["best"]
    better = best is None or (value <= best if lower else value >= best)
    if planned and better and math.isfinite(value):
        state["best"] = value
        state["best_sha256"] = mark_best(run_folder, state["step"], names)
        return True
    if state["best"] is None:
        mark_best(run_folder, state["step"], names)
        return True
    return False
