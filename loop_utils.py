"""What must be the same in every training loop: a batch that fits, the best checkpoint, what is said at the end."""

import gc
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from checkpoint_utils import best_sha256, mark_best
from cli_utils import RunError
from distributed_utils import any_rank, print_main
from hardware_utils import out_of_memory, split_batch


def fit_batch_to_memory(
    try_once: Callable[[int], None], parameters: Iterable[torch.nn.Parameter], batch_size: int, accumulation: int,
    flag: str, advice: str, processes: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """--auto_batch: (batch size per GPU, accumulation), halved and doubled by all ranks together until a step fits.

    try_once(batch_size) makes the forward and backward pass of the largest batch there can be. parameters: those that
    learn; two moments of each are held beside, as the optimizer will. flag: the batch size's name; processes: how many
    it counts together. Raises RunError with the advice when not even one sample fits.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    while True:
        failed, moments = False, []
        try:
            moments += [torch.empty_like(parameter) for parameter in trained for _ in range(2)]
            # in the second pass, the gradients of the first are there already
            for _ in range(2):
                try_once(batch_size)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            failed = True
        for parameter in trained:
            parameter.grad = None
        moments.clear()
        release_memory()
        if not any_rank(failed):
            return batch_size, accumulation
        if batch_size == 1:
            raise RunError(f"out of memory at {flag} {processes}; {advice}")
        batch_size, accumulation = split_batch(batch_size, accumulation)
        smaller = f"{flag} {batch_size * processes} --gradient_accumulation_steps {accumulation}"
        print_main(f"out of memory: going on with {smaller}")


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
