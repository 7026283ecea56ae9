"""Checks what the ranks tell each other against single-process values; test_distributed.py runs it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch

import distributed_utils as du
from cli_utils import InputError


def fail_on(rank: int) -> None:
    with du.agree_on_errors():
        if du.world()[0] == rank:
            raise InputError("only the last rank knows")


def main() -> None:
    with du.setup_distributed(timeout=60) as ranks:
        rank, size = ranks.rank, ranks.world_size
        assert du.reduce_sum([1.0, rank]).tolist() == [size, sum(range(size))]
        assert du.reduce_max([rank, -rank]).tolist() == [size - 1, 0]
        assert du.any_rank(rank == size - 1)
        assert not du.any_rank(False)
        assert du.gather_objects({"rank": rank}) == [{"rank": r} for r in range(size)]
        assert du.broadcast_object(rank + 7) == 7
        # rows of uneven number, also none: value and gradient of a function of all rows
        for counts in ([3, 1, 2], [0, 4, 1], [2, 2, 2]):
            whole = torch.randn(sum(counts[:size]), 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            first = sum(counts[:rank])
            mine = whole[first : first + counts[rank]].clone().requires_grad_()
            reference = whole.clone().requires_grad_()
            gathered = du.all_gather_with_grad(mine)
            assert torch.equal(gathered, whole)
            (torch.logsumexp(gathered, 0).square().sum() / size).backward()  # each rank a share, as under DDP's mean
            torch.logsumexp(reference, 0).square().sum().backward()
            error = (mine.grad - reference.grad[first : first + counts[rank]]).abs().sum()
            assert error < 1e-12, error
        with pytest.raises(InputError, match="only the last rank knows"):
            fail_on(size - 1)
        du.print_main(f"all well at {size}")


if __name__ == "__main__":
    main()
