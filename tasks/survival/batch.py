"""--batch_size of survival counts the cases of all processes: how it is split, and what is said where it cannot be."""

import platform
from argparse import Namespace
from collections.abc import Callable

import torch
from torch import nn

from old.cli_utils import InputError
from old.distributed_utils import gather_objects
from old.hardware_utils import split_batch, usable_cores
from old.loop_utils import Step
from old.memory_utils import BatchSize, batch_flags


def cases_per_process(total: int, processes: int, source: str) -> int:
    """One process's share, to the nearest where no flag gave the total (source "default")."""
    if source == "default":
        return max(1, round(total / processes))
    return total // processes


def wanted_batch(total: int, accumulation: int, processes: int, source: str) -> BatchSize:
    """The batch of the flags. Raises InputError when --batch_size cannot be split evenly."""
    size = cases_per_process(total, processes, source)
    if source != "default" and total % processes:
        low = size * processes
        near = f"{low} or {low + processes}" if low else str(processes)
        reason = f"the total over {processes} processes cannot be split evenly"
        raise InputError(f"--batch_size {total}: {reason}; take {near}")
    return BatchSize(size, accumulation, source)


def asked_batch(args: Namespace, processes: int) -> BatchSize:
    """The batch of the flags, of which --batch_size is that of one process with --effective_batch_size.

    Raises InputError when --batch_size cannot be split evenly.
    """
    source = args.source["batch_size"]
    if args.effective_batch_size:
        batch = BatchSize(args.batch_size, 1, source).of_effective_batch(args.effective_batch_size)
        return batch.planned_for(processes)
    return wanted_batch(args.batch_size, args.gradient_accumulation_steps, processes, source)


def largest_batch(batch_size: int, image_size: list[int]) -> dict:
    """A made-up batch, on the host, of cases that all have an event, each at a time of its own."""
    cases = torch.arange(batch_size)
    return {
        "image": torch.zeros(batch_size, 1, *image_size, dtype=torch.float16),
        "index": cases,
        "error": [""] * batch_size,
        "time": 1.0 + cases,
        "event": torch.ones(batch_size, dtype=torch.bool),
    }


def rows_of_step(step: Step) -> list[float]:
    """This rank's part of the list of a step's cases: their rows in the cohort, and zero in the others' places."""
    local = torch.cat([batch["index"] for batch in step.batches])[: step.local]
    rows = [0.0] * step.samples
    rows[step.first : step.first + step.local] = local.tolist()
    return rows


def describe_batch(batch: BatchSize, processes: int) -> str:
    """A row of the banner."""
    if batch.total:
        return batch.describe()
    source = batch.source.replace(" did", " per process did")
    split = f"{batch.size} per process x {processes}; x {batch.accumulation} accumulation"
    return f"{batch.size * processes} in all ({source}) = {split} = {batch.size * processes * batch.accumulation}"


def out_of_memory_advice(size: int, accumulation: int | None, processes: int, otherwise: str) -> str:
    """The flags that take less memory than this batch of one process. otherwise: how the batch could be fitted."""
    smaller_size, more_steps = split_batch(size, accumulation)
    if accumulation is None:
        smaller = batch_flags(smaller_size, None)
        return f"--batch_size {size}; try {smaller} (the same result), a smaller --image_size or --resnet{otherwise}"
    smaller = batch_flags(smaller_size, more_steps, processes=processes)
    batch = f"--batch_size {size * processes} over {processes} processes"
    return f"{batch}; try {smaller} (the same result), a smaller --image_size or --resnet{otherwise}"


def cores_per_process() -> int:
    """All ranks: this node's usable cores, shared by the processes on it."""
    node = platform.node()
    processes = gather_objects(node).count(node)
    return max(1, usable_cores() // processes)


# --- a trial step -----------------------------------------------------------------------------------------------------


def trial_step(
    model: nn.Module,
    images: torch.Tensor,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    waiting: int = 0,
) -> None:
    """Forward and backward pass of one micro-batch, as the training step makes it; the gradients stay in the model.

    loss_of: the loss of the outputs. waiting: cases of the step's other micro-batches, whose images are on the device
    meanwhile.
    """
    # with micro-batches, all images are on the device and all outputs are computed before the gradients
    others = images.new_empty(waiting, *images.shape[1:])
    model.train()
    if waiting:
        with torch.no_grad():
            model(images)

    output = model(images)
    values = output.detach().requires_grad_()
    loss_of(values).backward()
    output.backward(values.grad)
    del others
