"""What CompressedAD does, and says, where memory runs out."""

from collections.abc import Callable
from functools import partial

import torch

from hardware_utils import smaller_batch, split_batch
from memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory
from tasks.compressed_ad.model import InContextNet

FLAG = "--train_batch_size"
SMALLER_MODEL = "a smaller --n_transit or --tf_n_embd"


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
    checkpoint: dict | None,
) -> BatchSize:
    """fit_batch_to_memory for segments of this depth. try_batch: forward and backward pass of a batch of them."""

    def try_once(size: int) -> None:
        try_batch(largest_batch(size, depth, model.n_transit))

    return fit_batch_to_memory(
        try_once,
        model,
        wanted,
        words=partial(batch_flags, flag=FLAG),
        advice=f"pass {SMALLER_MODEL}",
        checkpoint=checkpoint,
    )


def flags_of_smaller_batch(size: int, accumulation: int, samples: int) -> str:
    """The flags that split the same effective batch so that so many samples are computed at once."""
    smaller, more = smaller_batch(size, accumulation, samples)
    return batch_flags(smaller, more, flag=FLAG)


def out_of_memory_advice(size: int, accumulation: int, auto_batch: bool | None, device: torch.device) -> str:
    """What was tried, and the flags that take less memory."""
    smaller, more = split_batch(size, accumulation)
    flags = batch_flags(smaller, more, flag=FLAG)
    otherwise = "a smaller --test_batch_size if it was evaluating" + auto_batch_advice(auto_batch, device)
    return f"{FLAG} {size}; try {flags} (the same result), {otherwise}"
