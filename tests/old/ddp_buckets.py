"""Rank of a launcher: says whether DDP's gradients are the same before and after its first step, to the bit."""

import gc
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from old.distributed_utils import keep_buckets, print_main, setup_distributed


class Reordered(nn.Module):
    """Three layers, registered in another order than they are used in."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(101, 7)
        self.first = nn.Linear(13, 101)
        self.middle = nn.Linear(101, 101)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def gradients_twice(rank: int, kept: bool) -> list[torch.Tensor]:
    """The gradients of the same batch in DDP's first step and in its second."""
    torch.manual_seed(0)
    model = Reordered()
    wrapped = DDP(model, forward_sync_buffers=False, find_unused_parameters=kept)
    x = torch.randn(5, 13, generator=torch.Generator().manual_seed(rank))

    gradients = []
    for _ in range(2):
        model.zero_grad()
        wrapped(x).square().sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return gradients


def main() -> None:
    with setup_distributed() as ranks:
        kept = keep_buckets() and sys.argv[1] == "kept"
        before, after = gradients_twice(ranks.rank, kept)

        # whatever holds DDP must be gone before the process group is
        gc.collect()
        print_main("same" if torch.equal(before, after) else "different")


if __name__ == "__main__":
    main()
