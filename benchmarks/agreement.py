"""What the ranks tell each other beside their gradients: its cost at 2 to 64 processes, and for thousands of ranks.

    python benchmarks/agreement.py                      # Linux, 3 minutes on an idle machine
    python benchmarks/agreement.py --processes 2,4,8 --hop_us 50

gloo joins the processes of this machine; it carries everything but the gradients on GPUs. Each operation has two rows:
torch's own collective, as it was, and what is used now. For 512 and 4096 ranks, each with a core of its own, the figure
is the length of the chain of messages that wait for one another, times one message: half of a ping-pong between two
processes here, or --hop_us. On this machine 64 processes share few cores, so what many of them do at once takes turns.
"""

import argparse
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import distributed_utils as du

STEP = 0.1
LARGE = (512, 4096)
WEIGHTS = {f"layer.{number}": torch.ones(64) for number in range(300)}
SUMS = [2**40 + number for number in range(300)]


def ring(ranks: int) -> int:
    return 2 * (ranks - 1)


def tree(ranks: int) -> int:
    return 2 * math.ceil(math.log2(ranks))


def all_gather(value) -> None:
    dist.all_gather_object([None] * dist.get_world_size(), value)


def begin_in_time() -> float:
    """Seconds that a step waits for an agreement which began a step before it."""
    wait = du.begin_sum([0, 0, 0, 12.0])
    time.sleep(STEP)
    begun = time.perf_counter()
    wait()
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Operation:
    """run: on all ranks. messages: in a chain. steps: from one to the next. hidden: run returns what counts."""

    name: str
    run: Callable
    messages: Callable[[int], int]
    steps: int
    hidden: bool = False


OPERATIONS = [
    Operation("agreement, all_reduce", lambda: dist.all_reduce(torch.zeros(4).double()), ring, 1),
    Operation("agreement, as a tree", lambda: du.reduce_sum([0, 0, 0, 12.0]), tree, 1),
    Operation("... begun a step before", begin_in_time, tree, 1, hidden=True),
    Operation(
        "log line, 2 all_reduce", lambda: [dist.all_reduce(torch.zeros(40)) for _ in "ab"], lambda n: 2 * ring(n), 10
    ),
    Operation("log line, as a tree", lambda: du.combine(torch.zeros(40).numpy(), lambda a, b: a + b), tree, 10),
    Operation("errors, all_gather_object", lambda: all_gather(None), ring, 500),
    Operation("errors, as a tree", lambda: du.gather_objects(None), tree, 500),
    Operation("weights, all_gather_object", lambda: all_gather(SUMS), ring, 500),
    Operation("weights, as a tree", lambda: du.check_same_weights(WEIGHTS), tree, 500),
    Operation("gather_to_main", lambda: du.gather_to_main(None), lambda n: n, 500),
]


def work(rank: int, processes: int, port: int, results) -> None:
    """One rank: the time of each operation goes into the queue `results`, from rank 0."""
    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (rank, rank, processes, processes, "127.0.0.1", port)), strict=True))
    begun = time.perf_counter()
    with du.setup_distributed(120) as ranks:
        found = {"start": time.perf_counter() - begun}
        for operation in OPERATIONS:
            seconds = []
            for _ in range(3 + 20):
                dist.barrier()
                begun = time.perf_counter()
                own = operation.run()
                seconds.append(own if operation.hidden else time.perf_counter() - begun)
            # a chain ends where the last rank has the result
            found[operation.name] = statistics.median(du.reduce_max(seconds[3:]))
        there_and_back = []
        for _ in range(200 if processes == 2 else 0):
            begun = time.perf_counter()
            for sender in (0, 1):
                (dist.send if rank == sender else dist.recv)(torch.zeros(8), 1 - rank)
            there_and_back.append(time.perf_counter() - begun)
        if there_and_back:
            found["hop"] = statistics.median(there_and_back) / 2
        begun = time.perf_counter()
        for number in range(2000):
            ranks.store.set(f"{rank} {number % 10}", "step 1234")
            ranks.store.get(f"{rank} {number % 10}")
        found["requests"] = 4000 * processes / max(du.reduce_max([time.perf_counter() - begun]))
        if ranks.is_main:
            results.put(found)


def measure(processes: int) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    started = [fork.Process(target=work, args=(rank, processes, port, results)) for rank in range(processes)]
    for process in started:
        process.start()
    found = results.get(timeout=300)
    for process in started:
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2,4,8,16,32,64", help="numbers of processes, 2 among them")
    parser.add_argument("--hop_us", type=float, help="of a message between two nodes; left out: as measured here")
    options = parser.parse_args()
    found = {count: measure(count) for count in map(int, options.processes.split(","))}
    hop = options.hop_us / 1e6 if options.hop_us else found[2]["hop"]
    print(f"a message takes {1e6 * hop:.0f} us; a step is taken to last {1e3 * STEP:.0f} ms\n")
    print(f"{'ms':<27}" + "".join(f"{count:>8}" for count in found) + "".join(f"{count:>9}" for count in LARGE), end="")
    print("   in each step" + "".join(f"{count:>9}" for count in LARGE))
    for operation in OPERATIONS:
        cells = "".join(f"{1e3 * times[operation.name]:>8.2f}" for times in found.values())
        large = [1e3 * hop * operation.messages(count) for count in LARGE]
        each = [max(0, one - 1e3 * STEP if operation.hidden else one) / operation.steps for one in large]
        cells += "".join(f"{one:>9.2f}" for one in large) + f"   1 of {operation.steps:<3} steps "
        print(f"{operation.name:<27}{cells}" + "".join(f"{one:>8.2f}" for one in each))
    print("\nto join, s                 " + "".join(f"{times['start']:>8.2f}" for times in found.values()))
    rate = max(times["requests"] for times in found.values())
    print(f"rank 0's store answers {rate:,.0f} requests a second. A connection of gloo takes two, so:")
    for count in LARGE:
        peers = {"of each with each": count, "of those that talk": tree(count) // 2}
        seconds = ", ".join(f"{name} {2 * count * of / rate:.1f} s" for name, of in peers.items())
        notes = {"at each step": count / STEP, "now": min(count / STEP, 4000)}
        shares = ", ".join(f"{name} {of / rate:.0%}" for name, of in notes.items())
        print(f"  {count} ranks: connections {seconds}; notes of where they are {shares} of its time")


if __name__ == "__main__":
    main()
