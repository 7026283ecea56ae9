"""little_memory.py N SCRIPT FLAGS...: runs it where convolutions (train.py: embeddings) have memory for N samples.

N+M: from the first trial of a batch on for N samples, and for M once activations are recomputed; only where gradients
are kept. With LITTLE_MEMORY_RANK in the environment, only this rank's memory is little. A real lack of memory is no
test of what comes after: oneDNN, once refused memory, fails or dies for the rest of the process.
"""

import math
import os
import runpy
import sys

import torch
from torch import nn


class Memory:
    """What convolutions have memory for, samples."""

    def __init__(self, words: str):
        before, plus, after = words.partition("+")
        self.of_trials = bool(plus)
        self.before = float(before)
        self.after = float(after or before)
        self.most = math.inf if plus else self.before

        # another rank has as much as it needs
        if os.environ.get("LITTLE_MEMORY_RANK", os.environ.get("RANK")) != os.environ.get("RANK"):
            self.before = math.inf
            self.after = math.inf
            self.most = math.inf

    def take(self, samples: int) -> None:
        """Raise what a lack of memory raises, where there is none for so many samples."""
        if samples > self.most and (torch.is_grad_enabled() or not self.of_trials):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


def watch_trials(memory: Memory) -> None:
    """Memory is little from the first trial on, and less so once the trial turned recomputation on."""
    from old import memory_utils

    def fit(*args, recompute=None, real=memory_utils.fit_batch_to_memory, **options):
        memory.most = memory.before

        def turn_on() -> None:
            memory.most = memory.after
            recompute()

        return real(*args, recompute=recompute and turn_on, **options)

    # also where a module of a task has imported it by name, which the zygote has loaded already
    real = memory_utils.fit_batch_to_memory
    for module in list(sys.modules.values()):
        if getattr(module, "fit_batch_to_memory", None) is real:
            module.fit_batch_to_memory = fit


def main() -> None:
    memory = Memory(sys.argv[1])
    kinds = (nn.Embedding,) if sys.argv[2].endswith("train.py") else (nn.Conv2d, nn.Conv3d)
    for kind in kinds:

        def forward(self, images: torch.Tensor, real=kind.forward) -> torch.Tensor:
            memory.take(len(images))
            return real(self, images)

        kind.forward = forward
    if memory.of_trials:
        watch_trials(memory)
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
