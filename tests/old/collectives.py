"""Checks what the ranks tell each other against single-process values; test_old_distributed.py runs it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch

from old.cli_utils import InputError
from old.distributed_utils import (
    agree_on_errors,
    all_gather_with_grad,
    any_rank,
    broadcast_object,
    gather_objects,
    print_main,
    reduce_max,
    reduce_sum,
    setup_distributed,
    world,
)


def fail_on(rank: int) -> None:
    """Raise an error on one rank."""
    with agree_on_errors():
        if world()[0] == rank:
            raise InputError("only the last rank knows")


def check_gathered_rows(counts: list[int], rank: int, world_size: int) -> None:
    """Compare value and gradient of a function of all ranks' rows, counts[r] of rank r, with one process's."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts[:world_size]), 5, generator=generator, dtype=torch.float64)
    first = sum(counts[:rank])
    end = first + counts[rank]

    # each rank computes a share, as under DDP's mean
    local = rows[first:end].clone().requires_grad_()
    gathered = all_gather_with_grad(local)
    assert torch.equal(gathered, rows)
    loss = torch.logsumexp(gathered, 0).square().sum()
    (loss / world_size).backward()

    # one process with all rows
    reference = rows.clone().requires_grad_()
    torch.logsumexp(reference, 0).square().sum().backward()
    error = (local.grad - reference.grad[first:end]).abs().sum()
    assert error < 1e-12, error


def main() -> None:
    with setup_distributed(timeout=60) as ranks:
        rank = ranks.rank
        size = ranks.world_size
        assert reduce_sum([1.0, rank]).tolist() == [size, sum(range(size))]
        assert reduce_max([rank, -rank]).tolist() == [size - 1, 0]
        assert any_rank(rank == size - 1)
        assert not any_rank(False)
        assert gather_objects({"rank": rank}) == [{"rank": r} for r in range(size)]
        assert broadcast_object(rank + 7) == 7

        # an uneven number of rows, also none
        for counts in ([3, 1, 2], [0, 4, 1], [2, 2, 2]):
            check_gathered_rows(counts, rank, size)

        with pytest.raises(InputError, match="only the last rank knows"):
            fail_on(size - 1)
        print_main(f"all well at {size}")


if __name__ == "__main__":
    main()
