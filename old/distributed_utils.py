"""One process or many, the same program: process group, samplers, reductions, stop signal.

Works under python, torchrun, torch.distributed.launch, deepspeed, accelerate launch and srun, on GPUs (NCCL) or CPU
(gloo).
"""

import contextlib
import functools
import gc
import math
import os
import re
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from old.cli_utils import InputError, RunError, environment_number, record_failure
from old.elastic_utils import crash_code, die_with, is_elastic, leave_out
from old.hang_utils import GRACE, Watch, say_last, start_watch, stop_watch
from old.hardware_utils import usable_cores
from old.phase_utils import doing
from old.sampler_utils import EvalBatchSampler, TrainBatchSampler
from old.stack_utils import answer_in_worker
from old.startup_utils import agree_to_start, check_gpus, explain_failure, meet, several_nodes
from old.stop_utils import leave_if_interrupted, only_note_stop_signals

# More processes than any machine has: a larger number is a mistake.
MOST_RANKS = 10**6


@dataclass(frozen=True)
class Ranks:
    """Where this process stands: `rank` of `world_size` processes, `local_rank` on its machine."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    launcher: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_environment() -> tuple[int, int, int, str]:
    """(rank, local_rank, world_size, launcher) from the launcher's variables; (0, 0, 1, "python") without one.

    Raises InputError for a variable that is no such number.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        launcher = "deepspeed or torch.distributed"
        if "TORCHELASTIC_RUN_ID" in env:
            launcher = "accelerate" if any(name.startswith("ACCELERATE_") for name in env) else "torchrun"
        return *_read_ranks("RANK", "LOCAL_RANK", "WORLD_SIZE"), launcher

    # This variable is set by srun alone: `python` inside an sbatch script is one process.
    tasks = environment_number("SLURM_STEP_NUM_TASKS", 1, MOST_RANKS) if "SLURM_STEP_NUM_TASKS" in env else 1
    if tasks > 1:
        # the first of node1,node2 and of node[1-4,7]
        hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "localhost"
        first = hosts.split(",")[0]
        env.setdefault("MASTER_ADDR", re.sub(r"\[(\w+).*", r"\1", hosts if "[" in first else first))
        job = environment_number("SLURM_JOB_ID", 0, 2**32) if "SLURM_JOB_ID" in env else 0
        env.setdefault("MASTER_PORT", str(20000 + job % 20000))
        return *_read_ranks("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"), "srun"
    return 0, 0, 1, "python"


def _read_ranks(rank: str, local_rank: str, world_size: str) -> tuple[int, int, int]:
    """The numbers in these three environment variables; the local rank may be missing."""
    ranks = environment_number(world_size, 1, MOST_RANKS)
    local = environment_number(local_rank, 0, ranks - 1) if local_rank in os.environ else 0
    if ranks > 1 and "MASTER_PORT" in os.environ:
        environment_number("MASTER_PORT", 1, 65535)
    return environment_number(rank, 0, ranks - 1), local, ranks


@contextlib.contextmanager
def setup_distributed(timeout: float = 600) -> Iterator[Ranks]:
    """Join the process group and leave it whatever happens.

    timeout: seconds after which a collective that a dead or stuck rank does not join ends the job. Keep everything that
    holds DDP in a function called inside the `with` block: torch 2.13 aborts about one exit in eight when it is alive
    after the group is gone. Raises InputError when a launcher started more processes on this machine than it has GPUs,
    and for what startup_utils finds wrong with the machines: then no group is made.
    """
    rank, local_rank, world_size, launcher = read_environment()
    ranks = Ranks(rank, local_rank, world_size, _own_device(local_rank, launcher), launcher)
    backend = _backend_for(ranks.device)
    watch = start_watch(rank, world_size, timeout, world_size > 1 and several_nodes(world_size))
    try:
        with doing("waiting for the other processes"):
            store = _join_group(ranks, backend, timeout, watch)
        _start_gpu(ranks, backend, store)
        yield ranks
    except (InputError, RunError, SystemExit) as error:
        # All ranks have agreed to leave in order. Frames of the traceback would keep DDP alive.
        traceback.clear_frames(error.__traceback__)
        raise
    except BaseException as error:
        # A crash of one rank: it goes at once, so that the others see the broken connection instead of waiting.
        if world_size > 1:
            leave_if_interrupted(error)
            watch.end_crashed(error)
        record_failure(repr(error), traceback.format_exc())
        raise
    finally:
        stop_watch(watch)
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
            # gloo's threads need the GIL to free what they hold: at the exit they would abort
            time.sleep(0.1)


def _own_device(local_rank: int, launcher: str) -> torch.device:
    """This process's GPU, or the CPU on a machine without one."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return torch.device("cpu")
    # srun may show each task its own GPU only
    return torch.device("cuda", 0 if launcher == "srun" and gpus == 1 else local_rank)


def _backend_for(device: torch.device) -> str:
    """NCCL for GPU tensors with gloo for CPU tensors; gloo alone without GPUs and on Windows, which has no NCCL."""
    both = device.type == "cuda" and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if both else "gloo"


def _join_group(ranks: Ranks, backend: str, timeout: float, watch: Watch) -> dist.Store | None:
    """Make the process group where there is more than one process; returns the store that they met at."""
    if ranks.launcher == "torchrun" and is_elastic():
        # also a rank that is alone for now
        die_with(int(os.environ["ELASTIC_PARENT"]))
    if ranks.world_size == 1:
        for note in check_gpus():
            print(note, flush=True)
        watch.share(secrets.token_hex(4))
        return None
    if ranks.launcher != "srun":
        die_with_parent()

    # all meet at one store first, where what is wrong with one machine is told to all
    limit = timedelta(seconds=timeout)
    store = meet(ranks.rank, ranks.world_size, limit)
    agree_to_start(store, ranks.rank, ranks.world_size, ranks.device, backend)
    if ranks.is_main:
        store.set("watch", secrets.token_hex(4))
    watch.share(store.get("watch").decode())

    # the watch knows more than a collective that gives up, so it comes first
    with explain_failure(store, ranks.rank):
        dist.init_process_group(
            backend,
            store=store,
            timeout=limit + timedelta(seconds=GRACE),
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    return store


def _start_gpu(ranks: Ranks, backend: str, store: dist.Store | None) -> None:
    """All ranks: take this process's GPU, where there is one. Raises InputError for too few of them."""
    gpus = torch.cuda.device_count()
    with agree_on_errors():
        if gpus and ranks.device.index >= gpus:
            number = ranks.local_rank + 1
            raise InputError(f"process {number} of a machine with {gpus} GPUs; start at most one per GPU")
    if not gpus:
        return

    # the others can do without this rank where its GPU does not start
    try:
        with explain_failure(None if is_elastic() else store, ranks.rank):
            torch.cuda.set_device(ranks.device)
            first = torch.ones(1, device=ranks.device)
            torch.cuda.synchronize(ranks.device)
    except (InputError, RuntimeError) as error:
        if is_elastic():
            leave_out(f"rank {ranks.rank}: {error}")
        raise

    # NCCL starts with its first collective: here, where a failure can be explained
    with explain_failure(store, ranks.rank):
        if ranks.world_size > 1 and "nccl" in backend:
            dist.all_reduce(first)
        torch.cuda.synchronize(ranks.device)


def leave_alone(message: str) -> None:
    """End this process with one line: an error that the others cannot be told, as they wait elsewhere."""
    if world()[1] == 1:
        raise RunError(message)
    print(f"error: rank {world()[0]}: {message}", file=sys.stderr, flush=True)
    say_last(message)
    os._exit(crash_code())


def die_with_parent() -> None:
    """Linux: get SIGTERM (save and leave) when the launcher dies, even by kill -9. Elsewhere nothing."""
    die_with(os.getppid())


def launch_workers(world_size: int) -> None:
    """Replace a plain `python script.py --world_size N` by torchrun with N processes of it.

    Returns where that is not needed: for one process, and inside a launcher's worker.
    """
    _, _, processes, _ = read_environment()
    if world_size <= 1 or processes > 1 or "RANK" in os.environ:
        return
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // world_size)))
    launcher = str(Path(__file__).with_name("launch_utils.py"))
    command = [sys.executable, launcher, "torchrun", "--standalone", f"--nproc_per_node={world_size}"]
    os.execv(sys.executable, [*command, *sys.argv])


def world() -> tuple[int, int]:
    """(rank, world_size) of the process group, (0, 1) without one."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def keep_buckets() -> bool:
    """DDP's find_unused_parameters: whether it is to keep the layout of its gradient buckets.

    Otherwise DDP lays them out anew after the first step of each start. The sum of three ranks and more depends on the
    place in a bucket, so a resumed run's first step would differ in the last bits. So it is kept with --deterministic,
    and by three CPU processes and more, which promise the same bits without it.
    """
    on_cpu = not torch.cuda.is_available()
    return torch.are_deterministic_algorithms_enabled() or (on_cpu and world()[1] > 2)


def print_main(*values, **options) -> None:
    """print on rank 0 only, above a progress bar where there is one."""
    if world()[0] == 0:
        tqdm.write(" ".join(map(str, values)), **options)
        sys.stdout.flush()


# --- loading ----------------------------------------------------------------------------------------------------------


def _quiet_worker(_: int) -> None:
    """Let a loading process serve on after Ctrl-C and SIGTERM, which reach the whole group: the trainer decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answer_in_worker()


def choose_workers(num_workers: int, source: str, device: torch.device) -> int:
    """Loading processes as --num_workers says; by default none on a CPU, whose cores the training needs."""
    return 0 if source == "default" and device.type == "cpu" else num_workers


@functools.cache
def limit_workers(num_workers: int) -> int:
    """At most as many loading processes (or threads) as there are cores to use; rank 0 says once what was lowered."""
    cores = usable_cores()
    if num_workers > cores:
        cpu = "1 CPU core" if cores == 1 else f"{cores} CPU cores"
        print_main(f"--num_workers {num_workers}: this machine has {cpu} to use, so {cores} are started per process")
    return min(num_workers, cores)


def create_distributed_dataloader(
    dataset: Dataset,
    batch_size: int = 8,
    train: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    accumulation: int = 1,
    drop_last: bool = True,
    effective_batch_size: int | None = None,
    **options,
) -> DataLoader:
    """A DataLoader over this rank's share: `batch_size` samples per GPU.

    Shuffled and dealt out when `train` (call `loader.batch_sampler.set_position(epoch)` before each epoch), in order
    and unpadded otherwise. Without drop_last the last step of an epoch is uneven: weight it as TrainBatchSampler.window
    says. num_workers is lowered to the cores there are. effective_batch_size: samples of a step over all ranks, where
    it is not batch_size x accumulation x ranks.
    """
    rank, world_size = world()
    if train:
        sampler = TrainBatchSampler(len(dataset), batch_size, rank, world_size, seed, accumulation, drop_last)
    else:
        sampler = EvalBatchSampler(len(dataset), batch_size, rank, world_size)
    if effective_batch_size is not None:
        sampler.set_effective_batch(effective_batch_size)

    # Its own generator: a DataLoader draws from the global one at each epoch, and a resumed run would draw once more.
    generator = torch.Generator().manual_seed(seed % 2**63)
    options.setdefault("pin_memory", torch.cuda.is_available())
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=limit_workers(num_workers),
        generator=generator,
        worker_init_fn=_quiet_worker,
        **options,
    )


# --- what the ranks tell each other -----------------------------------------------------------------------------------


def reduce_sum(values: torch.Tensor | list) -> torch.Tensor:
    """Sum over ranks, in place for a tensor; a list of numbers becomes a float64 CPU tensor, which no GPU waits for."""
    return _reduce(values, dist.ReduceOp.SUM)


def reduce_max(values: torch.Tensor | list) -> torch.Tensor:
    """Largest over ranks, otherwise as reduce_sum."""
    return _reduce(values, dist.ReduceOp.MAX)


def _reduce(values: torch.Tensor | list, operation) -> torch.Tensor:
    tensor = values
    if not isinstance(values, torch.Tensor):
        tensor = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor, op=operation)
    return tensor


def any_rank(flag: bool) -> bool:
    """True on all ranks when `flag` is true on one: the way to take any decision that changes control flow."""
    return bool(reduce_max([float(flag)])[0])


def gather_objects(value) -> list:
    """[value of rank 0, value of rank 1, ...] on every rank, for small picklable values."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def broadcast_object(value):
    """Rank 0's value on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


@contextlib.contextmanager
def agree_on_errors() -> Iterator[None]:
    """Inside, each rank may meet an InputError or RunError of its own; at the end all raise the first one together."""
    own = None
    try:
        yield
    except (InputError, RunError) as error:
        own = error
    errors = [error for error in gather_objects(own) if error is not None]
    if errors:
        raise errors[0] from None


def scale_learning_rate(base: float, batches: float, rule: str) -> float:
    """linear multiplies the base by `batches`, sqrt by its root, none leaves it.

    batches: how many times a step has the samples that the base is meant for.
    """
    factors = {"linear": batches, "sqrt": math.sqrt(batches), "none": 1}
    return base * factors[rule]


def schedule(step: int, total_steps: int, warmup_steps: int, kind: str) -> float:
    """Factor on the learning rate of optimizer step `step` (from 0): linear warm-up, then constant or cosine to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    cosine_steps = max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / cosine_steps))


def to_device(batch: dict, device: torch.device) -> dict:
    """The batch with its tensors on the device, copied while the host goes on; other values as they are."""
    moved = {}
    for name, value in batch.items():
        moved[name] = value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
    return moved


class StopSignal:
    """SIGTERM and SIGINT to this process set `code` (143 or 130).

    The training loop asks all ranks for it at each step boundary; `agreed` is what they have agreed on, else 0.
    step_due: until when (time.monotonic) the step under way takes no longer than usual. See StopWatch.
    """

    def __init__(self):
        self.code = 0
        self.agreed = 0
        self.step_due = 0.0

    def __enter__(self) -> "StopSignal":
        # SIGBREAK is Windows' Ctrl-Break
        self.previous = {}
        for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
            if hasattr(signal, name):
                number = getattr(signal, name)
                self.previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, error, *_) -> None:
        # the launcher tells all ranks to stop where one ends by an error, and each is to say its own to the end
        if error is not None:
            only_note_stop_signals()
            return
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number, _frame) -> None:
        self.code = 130 if number == signal.SIGINT else 143
