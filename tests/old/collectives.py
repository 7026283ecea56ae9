"""Checks what the ranks tell each other against single-process values; test_old_distributed.py runs it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest

from old.cli_utils import InputError
from old.distributed_utils import (
    agree_on_errors,
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

        with pytest.raises(InputError, match="only the last rank knows"):
            fail_on(size - 1)
        print_main(f"all well at {size}")


if __name__ == "__main__":
    main()
