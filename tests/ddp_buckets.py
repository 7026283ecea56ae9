"""Rank of a launcher: says whether DDP's gradients are the same before and after its first step, to the bit."""

import gc
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import distributed_utils as du


class Reordered(nn.Module):
    """Two layers, registered in another order than they are used in."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(101, 7), nn.Linear(13, 101), nn.Linear(101, 101)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def gradients_twice(rank: int, kept: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Reordered()
    wrapped = DDP(net, forward_sync_buffers=False, find_unused_parameters=kept)
    x = torch.randn(5, 13, generator=torch.Generator().manual_seed(rank))
    found = []
    for _ in range(2):
        net.zero_grad()
        wrapped(x).square().sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    return found


def main() -> None:
    with du.setup_distributed() as ranks:
        before, after = gradients_twice(ranks.rank, du.keep_buckets() and sys.argv[1] == "kept")
        gc.collect()
        du.print_main("same" if torch.equal(before, after) else "different")


if __name__ == "__main__":
    main()
