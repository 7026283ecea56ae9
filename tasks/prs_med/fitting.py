"""What a step takes: the batch that fits into memory, the advice where none does, and --rehearse."""

from collections.abc import Callable
from functools import partial

import torch

from old.hardware_utils import smaller_batch, split_batch
from old.memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory, fits_by_itself
from tasks.prs_med.data import PositionData, Row
from tasks.prs_med.memory import recompute_activations
from tasks.prs_med.model import PRSMed
from tasks.prs_med.reader import Longest

SMALLER_IMAGES = "a smaller --image_size"


def choose_batch_size(
    model: PRSMed,
    data: PositionData,
    trial_step: Callable[[PRSMed, dict], None],
    wanted: BatchSize,
    auto_batch: bool | None,
    recompute: bool | None,
    checkpoint: dict | None,
) -> BatchSize:
    """The wanted batch, or what a step of the longest rows has room for.

    recompute: --gradient_checkpointing; where no flag says, activations are recomputed if one image needs it.
    """
    if not fits_by_itself(auto_batch, model.device):
        return wanted
    longest = data.reader.longest_tokens(data.rows)

    def try_once(size: int) -> None:
        trial_step(model, data.reader.largest_batch(size, longest))

    advice = f"pass {SMALLER_IMAGES}"
    turn_on = partial(recompute_activations, model)
    if recompute is not None:
        advice = f"pass --gradient_checkpointing or {SMALLER_IMAGES}"
        turn_on = None
    return fit_batch_to_memory(try_once, model, wanted, batch_flags, advice, recompute=turn_on, checkpoint=checkpoint)


def out_of_memory_advice(size: int, accumulation: int | None, auto_batch: bool | None, device: torch.device) -> str:
    """The flags that take less memory than this batch."""
    smaller = batch_flags(*split_batch(size, accumulation))
    automatic = auto_batch_advice(auto_batch, device)
    otherwise = f"--gradient_checkpointing or {SMALLER_IMAGES}{automatic}"
    return f"--batch_size {size}; try {smaller} (the same result), {otherwise}"


def rehearse_model(
    build_model: Callable[[torch.device], PRSMed],
    make_optimizer: Callable[[PRSMed], torch.optim.Optimizer],
    trial_step: Callable[[PRSMed, dict], None],
    rows: list[Row],
    batch: BatchSize,
    world_size: int | None,
    gpu_memory: float | None,
) -> None:
    """Print memory and FLOPs of one optimizer step, of the longest rows where there are any, and end the process."""
    from old import rehearsal_utils

    processes = rehearsal_utils.processes_to_plan_for(world_size)
    memory = rehearsal_utils.memory_to_plan_for(gpu_memory)
    batch = batch.planned_for(processes)
    trace = rehearsal_utils.Trace()
    with rehearsal_utils.imaginary_gpu(trace) as ranks, rehearsal_utils.random_weights(ranks.device):
        model = build_model(ranks.device)
        reader = model.reader
        longest = reader.longest_tokens(rows) if rows else Longest(reader.image_tokens + 64, 64)
        largest = reader.largest_batch(batch.size, longest)
        trial = partial(trial_step, model, largest)
        optimizer = make_optimizer(model)
        step = rehearsal_utils.rehearse_step(trace, model, optimizer, trial, batch.accumulation, processes)

    def words(samples: int) -> str:
        return batch_flags(*smaller_batch(batch.size, batch.accumulation_flag, samples))

    title = f"PRS-Med, {batch.size} per GPU x {batch.accumulation} accumulation, {sum(longest)} tokens"
    title += f", {model.precision}, activations {'recomputed' if batch.recomputed else 'kept'}"
    otherwise = SMALLER_IMAGES if batch.recomputed else "--gradient_checkpointing"
    rehearsal_utils.report_rehearsal(title, step, batch.size, memory, words, otherwise)
    rehearsal_utils.end_rehearsal()
