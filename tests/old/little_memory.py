"""little_memory.py N SCRIPT FLAGS...: runs it where embeddings have memory for N samples.

N+: from the first trial of a batch on, and only where gradients are kept. With LITTLE_MEMORY_RANK in the environment,
only this rank's memory is little. A real lack of memory is no test of what comes after: oneDNN, once refused memory,
fails or dies for the rest of the process.
"""

import math
import os
import runpy
import sys

import torch
from torch import nn


class Memory:
    """What embeddings have memory for, samples."""

    def __init__(self, words: str):
        self.of_trials = words.endswith("+")
        self.before = float(words.removesuffix("+"))
        self.most = math.inf if self.of_trials else self.before

        # another rank has as much as it needs
        if os.environ.get("LITTLE_MEMORY_RANK", os.environ.get("RANK")) != os.environ.get("RANK"):
            self.before = math.inf
            self.most = math.inf

    def take(self, samples: int) -> None:
        """Raise what a lack of memory raises, where there is none for so many samples."""
        if samples > self.most and (torch.is_grad_enabled() or not self.of_trials):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")


def watch_trials(memory: Memory) -> None:
    """Memory is little from the first trial on."""
    from old import memory_utils

    def fit(*args, real=memory_utils.fit_batch_to_memory, **options):
        memory.most = memory.before
        return real(*args, **options)

    # also where a module of a task has imported it by name, which the zygote has loaded already
    real = memory_utils.fit_batch_to_memory
    for module in list(sys.modules.values()):
        if getattr(module, "fit_batch_to_memory", None) is real:
            module.fit_batch_to_memory = fit


def main() -> None:
    memory = Memory(sys.argv[1])

    def forward(self, indices: torch.Tensor, real=nn.Embedding.forward) -> torch.Tensor:
        memory.take(len(indices))
        return real(self, indices)

    nn.Embedding.forward = forward
    if memory.of_trials:
        watch_trials(memory)
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
