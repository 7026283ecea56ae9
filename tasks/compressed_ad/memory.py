"""What CompressedAD does, and says, where memory runs out."""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from old.distributed_utils import Ranks
from old.hardware_utils import smaller_batch, split_batch
from old.memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory, fits_by_itself
from tasks.compressed_ad.model import InContextNet

# what else takes less memory
SMALLER = "a smaller --n_transit or --tf_n_embd"
FLAG = "--train_batch_size"


def asked_batch(args: Namespace) -> BatchSize:
    """The batch of the flags."""
    batch = BatchSize(args.train_batch_size, args.gradient_accumulation_steps, args.source["train_batch_size"])
    return batch.of_effective_batch(args.effective_batch_size)


def largest_batch(batch_size: int, depth: int, n_transit: int) -> dict:
    """A made-up batch, on the host, of segments that all have `depth` blocks to compress and a full context."""
    parts = depth + 1
    return {
        "cells": torch.zeros(batch_size, parts, n_transit, 3, dtype=torch.uint8),
        "rewards": torch.zeros(batch_size, parts, n_transit),
        "depth": torch.full((batch_size,), depth),
        "compressed": [batch_size] * depth,
        "length": torch.full((batch_size,), n_transit),
        "action": torch.zeros(batch_size, n_transit, dtype=torch.long),
        "sample": torch.arange(batch_size),
    }


def fit_segments_to_memory(
    try_batch: Callable[[dict], None],
    model: InContextNet,
    wanted: BatchSize,
    depth: int,
    auto_batch: bool | None,
    checkpoint: dict | None,
) -> BatchSize:
    """The batch that is wanted, or what a step of segments of this depth leaves room for.

    try_batch: forward and backward pass of a batch. auto_batch: the flag.
    """
    if not fits_by_itself(auto_batch, model.positions.device):
        return wanted

    def try_once(size: int) -> None:
        try_batch(largest_batch(size, depth, model.n_transit))

    return fit_batch_to_memory(
        try_once,
        model,
        wanted,
        words=partial(batch_flags, flag=FLAG),
        advice=f"pass {SMALLER}",
        checkpoint=checkpoint,
    )


def flags_of_smaller_batch(size: int, accumulation: int | None, samples: int) -> str:
    """The flags that split the same effective batch so that so many samples are computed at once."""
    smaller, more = smaller_batch(size, accumulation, samples)
    return batch_flags(smaller, more, flag=FLAG)


def out_of_memory_advice(size: int, accumulation: int | None, auto_batch: bool | None, device: torch.device) -> str:
    """What was tried, and the flags that take less memory."""
    smaller, more = split_batch(size, accumulation)
    flags = batch_flags(smaller, more, flag=FLAG)
    otherwise = "a smaller --test_batch_size if it was evaluating" + auto_batch_advice(auto_batch, device)
    return f"{FLAG} {size}; try {flags} (the same result), {otherwise}"


class RehearsedParts(NamedTuple):
    """What a step is rehearsed with. try_batch: forward and backward pass of a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    try_batch: Callable[[dict], None]
    precision: str


def rehearse_segments(
    make: Callable[[Ranks], RehearsedParts],
    depth: int,
    batch: BatchSize,
    world_size: int | None,
    gpu_memory: float | None,
) -> None:
    """What a step of segments of this depth takes on a GPU that is not there; the process ends.

    world_size, gpu_memory: the flags.
    """
    from old import rehearsal_utils as rehearsal

    processes = rehearsal.processes_to_plan_for(world_size)
    memory = rehearsal.memory_to_plan_for(gpu_memory)
    batch = batch.planned_for(processes)
    trace = rehearsal.Trace()
    with rehearsal.imaginary_gpu(trace) as ranks:
        parts = make(ranks)
        trial = partial(parts.try_batch, largest_batch(batch.size, depth, parts.model.n_transit))
        step = rehearsal.rehearse_step(
            trace,
            parts.model,
            parts.optimizer,
            trial,
            batch.accumulation,
            processes,
        )

    name = "compressed_ad" if parts.model.n_latent else "ad"
    title = f"{name}, {batch.size} segments per GPU x {batch.accumulation} accumulation, {parts.precision}"
    words = partial(flags_of_smaller_batch, batch.size, batch.accumulation_flag)
    rehearsal.report_rehearsal(title, step, batch.size, memory, words, SMALLER)
    rehearsal.end_rehearsal()
