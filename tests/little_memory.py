"""little_memory.py N SCRIPT FLAGS...: runs it where convolutions (train.py: embeddings) have memory for N samples.

A real lack of memory is no test of what comes after: oneDNN, once refused memory, fails or dies for the rest of the
process.
"""

import runpy
import sys

import torch
from torch import nn


def main() -> None:
    most = int(sys.argv[1])
    for kind in (nn.Embedding,) if sys.argv[2].endswith("train.py") else (nn.Conv2d, nn.Conv3d):

        def forward(self, images: torch.Tensor, real=kind.forward) -> torch.Tensor:
            if len(images) > most:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
            return real(self, images)

        kind.forward = forward
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
