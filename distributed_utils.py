"""Distributed training: process group, data loader, reductions, learning rate schedule and stop signals."""

import atexit
import contextlib
import faulthandler
import gc
import ipaddress
import math
import multiprocessing
import operator
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hardware_utils import keep_freed_memory, usable_cores
from utils.cli import InputError, RunError
from utils.sampler import EvalBatchSampler, ImageGroups, TrainBatchSampler

# x + SHIFT - SHIFT rounds a float64 to a multiple of 2**-40; see round_for_exact_sum
SHIFT = 1.5 * 2.0**12

# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Rank, device and launcher of this process.

    store: key-value store that all ranks share; None if there is only one process.
    """

    rank: int
    world_size: int
    device: torch.device
    launcher: str
    store: dist.Store | None
    # time of record_position()'s last write; a list, because the dataclass is frozen
    noted: list[float] = field(default_factory=lambda: [-math.inf], compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait_for_main(self, what: str) -> None:
        """All ranks: block until rank 0 arrives (timeout: one week). what: a key unique to this barrier, the same on
        all ranks.
        """
        if self.store and self.is_main:
            self.store.set(what, "")
        elif self.store:
            # a waiting rank is not stuck, so stop its watchdog
            faulthandler.cancel_dump_traceback_later()
            self.store.wait([what], timedelta(days=7))

    def record_position(self, place: str) -> None:
        """Record this rank's activity in the store, so that other ranks can print it if this rank hangs."""
        # rank 0 serves the store, so limit all ranks together to 4000 writes a second
        now = time.monotonic()
        if self.store and now - self.noted[0] > self.world_size / 4000:
            self.store.set(f"place of {self.rank}", place)
            self.noted[0] = now


def read_environment() -> tuple[int, int, int, str]:
    """Return (rank, local_rank, world_size, launcher), read from the launcher's environment variables.

    Without a launcher, return (0, 0, 1, "python"). Raises InputError if a variable is not a number.
    """
    env = os.environ

    def whole(name: str, default: str = "") -> int:
        text = env.get(name, default)
        if not text.isdecimal():
            raise InputError(f"{name} must be a whole number, not {text!r}; start by a launcher, or unset it")
        return int(text)

    if "RANK" in env and "WORLD_SIZE" in env:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "deepspeed or torch.distributed"
        return whole("RANK"), whole("LOCAL_RANK", "0"), whole("WORLD_SIZE"), launcher

    # srun sets SLURM_STEP_NUM_TASKS, but sbatch does not: `python` in an sbatch script is one process
    tasks = whole("SLURM_STEP_NUM_TASKS", "1")
    if tasks == 1:
        return 0, 0, 1, "python"
    # the master is the first host of a list such as gpu[01-03,07]-ib,login1; concurrent srun calls need different ports
    first = re.match(r"([^][,]|\[[^]]*\])*", env.get("SLURM_STEP_NODELIST", "localhost"))[0]
    env.setdefault("MASTER_ADDR", re.sub(r"\[(\w+)[^]]*\]", r"\1", first))
    job, step = whole("SLURM_JOB_ID", "0"), whole("SLURM_STEP_ID", "0")
    env.setdefault("MASTER_PORT", str(20000 + (job + 1009 * step) % 20000))
    return whole("SLURM_PROCID"), whole("SLURM_LOCALID"), tasks, "srun"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0]).is_loopback
    except OSError:
        return True


def _address_towards(host: str) -> str:
    for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        # connecting a datagram socket sends nothing; it only looks up the route
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    return ""


def choose_interface(store: dist.Store, rank: int, world_size: int) -> None:
    """All ranks: on several nodes, set GLOO_SOCKET_IFNAME if gloo would choose the loopback interface.

    gloo uses the address that the machine's host name resolves to; on Debian, that is 127.0.1.1.
    """
    if rank == world_size - 1:
        store.set("address of the last node", _address_towards(os.environ["MASTER_ADDR"]))
    if "GLOO_SOCKET_IFNAME" in os.environ or not _is_loopback(socket.gethostname()):
        return
    # on the master node itself, find the route to the last node instead
    other = os.environ["MASTER_ADDR"]
    if _is_loopback(other):
        other = store.get("address of the last node").decode()
    if not _is_loopback(other):
        import psutil

        own = _address_towards(other)
        for name, addresses in psutil.net_if_addrs().items():
            if own in (address.address for address in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name


@contextlib.contextmanager
def setup_distributed(timeout: float = 600) -> Iterator[Ranks]:
    """Context manager that joins the process group and leaves it at the end.

    InputError, RunError and SystemExit must be raised on all ranks; with several ranks, any other exception terminates
    this process immediately. timeout: seconds that a collective waits for other ranks. DDP wrappers must not outlive
    the `with` block: with torch 2.13, the process would abort at exit about one time in eight.
    """
    faulthandler.enable()
    rank, local_rank, world_size, launcher = read_environment()
    device = torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus:
        # srun may show each task only one GPU
        alone = gpus == 1 and launcher == "srun"
        device = torch.device("cuda", 0 if alone else local_rank)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        if here > gpus and not alone:
            raise InputError(f"{here} processes on a machine with {gpus} GPUs; start at most one per GPU")
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()

    store = None
    if world_size > 1:
        # flight recorder: on a timeout, NCCL dumps the last collectives, and `torchfrtrace` can display them
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        backend = "cpu:gloo,cuda:nccl" if gpus and dist.is_nccl_available() else "gloo"
        limit = timedelta(seconds=timeout)
        if world_size > 64:
            # make gloo connect two ranks only when they first communicate: connecting all pairs of 4096 ranks takes
            # minutes
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        try:
            store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=limit))
            here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world_size
            if int(here) < world_size or os.environ.get("SLURM_STEP_NUM_NODES", "1") != "1":
                choose_interface(store, rank, world_size)
            group_store = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=group_store, rank=rank, world_size=world_size, timeout=limit)
        except (RuntimeError, OSError) as error:
            # print this error on every rank, because rank 0 may still be waiting
            who = f"rank {rank} on {socket.gethostname()}"
            place = ":".join(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT")))
            line = f"error: {who} cannot join the others at {place}; see docs/running.md, Networks ({error})"
            print(" ".join(line.split()), file=sys.stderr, flush=True)
            os._exit(1)
    ranks = Ranks(rank, world_size, device, launcher, store)
    try:
        ranks.record_position("the start")
        yield ranks
    except (InputError, RunError, SystemExit) as error:
        # all ranks raise these three errors; clear the traceback's frames, which would keep the DDP wrapper alive
        traceback.clear_frames(error.__traceback__)
        raise
    except BaseException as error:
        # only this rank crashed: exit immediately, so that the other ranks do not wait for it
        if world_size == 1:
            raise
        traceback.print_exception(error)
        name_silent_ranks(ranks, error)
        sys.stderr.flush()
        os._exit(1)
    finally:
        if world_size > 1:
            # wait for a pending begin_sum(): other ranks may need this rank's values
            _BACKGROUND.submit(int).result()
            gc.collect()
        for child in multiprocessing.active_children():
            child.kill()
        if dist.is_initialized():
            dist.destroy_process_group()


def name_silent_ranks(ranks: Ranks, error: BaseException, wait: float = 5) -> None:
    """After a failed collective, print the ranks that hang or were killed."""
    with contextlib.suppress(RuntimeError):
        ranks.store.set(f"rank {ranks.rank} has ended", "")
        # gloo reports "pair closure" if the connection was closed because another message timed out
        if not isinstance(error, dist.DistError) and not re.search("gloo|caused pair closure", str(error)):
            return
        first = ranks.store.add("ranks that gave up", 1) == 1
        time.sleep(wait)
        silent = [rank for rank in range(ranks.world_size) if not ranks.store.check([f"rank {rank} has ended"])]
        if first and silent:
            names = ", ".join(f"rank {rank} ({ranks.store.get(f'place of {rank}').decode()})" for rank in silent)
            reason = f"{names} hangs or was killed, the others waited in vain"
            print(f"error: {reason}; stacks: hang_rank*.txt in the run folder", file=sys.stderr)


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def print_main(*values) -> None:
    if world()[0] == 0:
        print(*values, flush=True)


# --- loading ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Context manager that blocks stop signals while DataLoader workers start."""
    signals = {signal.SIGTERM, signal.SIGINT}
    if os.name == "posix":
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        if os.name == "posix":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _ignore_stop_signals(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@atexit.register
def _kill_workers() -> None:
    """Kill DataLoader workers at exit, because they ignore the SIGTERM that Python sends."""
    # otherwise torch's SIGCHLD handler reports the workers as killed
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def create_distributed_dataloader(
    dataset: Dataset,
    batch_size: int = 8,
    train: bool = True,
    effective_batch_size: int | None = None,
    gpu_shares: list[int] | None = None,
    seed: int = 0,
    num_workers: int = 0,
    groups: ImageGroups | None = None,
    **options,
) -> DataLoader:
    """Create a DataLoader over this rank's samples, in batches of at most `batch_size`.

    With `train`, samples are shuffled, and an optimizer step takes `effective_batch_size` samples over all ranks. A
    loop without Training.steps() must call `loader.batch_sampler.set_position(epoch)` before each epoch. Random
    augmentation must depend only on (seed, index.epoch, index), see utils.sampler.Index. The function's name is from
    the published survival training guide.
    """
    rank, world_size = world()
    if train:
        effective = effective_batch_size or batch_size * world_size
        sampler = TrainBatchSampler(len(dataset), batch_size, effective, rank, world_size, seed, gpu_shares, groups)
    else:
        sampler = EvalBatchSampler(len(dataset), batch_size, rank, world_size)
    num_workers = min(num_workers, usable_cores())
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=_ignore_stop_signals,
        pin_memory=torch.cuda.is_available(),
        # a generator of its own: the loader would advance torch's global one at each epoch, and once more after a
        # resume
        generator=torch.Generator().manual_seed(seed % 2**63),
        **options,
    )


def to_device(batch, device: torch.device):
    if isinstance(batch, dict):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [to_device(value, device) for value in batch]
    return batch.to(device, non_blocking=True) if isinstance(batch, Tensor) else batch


# --- communication ----------------------------------------------------------------------------------------------------


MESSAGE = 1024


def _send(content: bytes, rank: int, tag: int) -> None:
    message = bytearray(MESSAGE)
    head = len(content).to_bytes(8, "little") + content[: MESSAGE - 8]
    message[: len(head)] = head
    dist.send(torch.frombuffer(message, dtype=torch.uint8), rank, tag=tag)
    if len(content) > MESSAGE - 8:
        dist.send(torch.frombuffer(bytearray(content[MESSAGE - 8 :]), dtype=torch.uint8), rank, tag=tag)


def _receive(rank: int, tag: int) -> bytes:
    message = torch.empty(MESSAGE, dtype=torch.uint8)
    dist.recv(message, rank, tag=tag)
    content = message.numpy().tobytes()
    length = int.from_bytes(content[:8], "little")
    if length > MESSAGE - 8:
        rest = torch.empty(length - MESSAGE + 8, dtype=torch.uint8)
        dist.recv(rest, rank, tag=tag)
        content += rest.numpy().tobytes()
    return content[8 : 8 + length]


def combine(value, merge: Callable, tag: int = 0):
    """All ranks: all-reduce picklable values with merge(a, b), where `a` comes from lower ranks than `b`.

    A binomial tree takes 2 log2(ranks) messages in sequence; gloo's ring takes 2 (ranks - 1).
    """
    rank, world_size = world()
    if world_size == 1:
        return value
    bit = 1
    while bit < world_size and not rank & bit:
        if rank + bit < world_size:
            value = merge(value, pickle.loads(_receive(rank + bit, tag)))
        bit *= 2
    content = pickle.dumps(value)
    if rank:
        _send(content, rank - bit, tag)
        content = _receive(rank - bit, tag)
        value = pickle.loads(content)
    while bit > 1:
        bit //= 2
        if rank + bit < world_size:
            _send(content, rank + bit, tag)
    return value


def _add_lists(one: list[float], other: list[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


# one thread runs the sums of begin_sum() in order; its messages have their own tag
_BACKGROUND = ThreadPoolExecutor(1)


def begin_sum(values: list[float]) -> Callable[[], list[float]]:
    """All ranks: start summing `values` elementwise across ranks; return a function that waits for the sums.

    Every rank must start its sums in the same order.
    """
    if not dist.is_initialized():
        return lambda: values
    return _BACKGROUND.submit(combine, values, _add_lists, tag=1).result


def reduce_sum(values: Tensor | list) -> Tensor:
    """All ranks: sum over the ranks. A tensor is summed in place; a list of numbers gives a float64 CPU tensor."""
    if isinstance(values, Tensor):
        if dist.is_initialized():
            dist.all_reduce(values)
        return values
    return torch.tensor(combine(values, _add_lists), dtype=torch.float64)


def reduce_max(values: list[float]) -> list[float]:
    return combine(values, lambda one, other: list(map(max, one, other)))


def gather_objects(value) -> list:
    """All ranks: gather small picklable values; return them in rank order on every rank."""
    return combine([value], operator.add)


def gather_dicts(own: dict) -> dict:
    return dict(sorted(combine(own, operator.or_).items()))


def gather_to_main(value) -> list:
    """All ranks: gather picklable values; return them in rank order on rank 0, and [] on other ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def broadcast_object(value):
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def share_bytes(size: int) -> np.ndarray | None:
    """All ranks: return a zeroed uint8 array (size,) shared by the ranks and DataLoader workers of this machine.

    The array is backed by an unlinked temporary file. Returns None if the disk has no room for it.
    """
    if os.name == "nt":
        return np.zeros(size, np.uint8)
    host, path = socket.gethostname(), ""
    hosts = gather_objects(host)
    first = hosts.index(host) == world()[0]
    if first:
        descriptor, path = tempfile.mkstemp()
        try:
            # allocate the disk space now: writing to the array on a full disk would crash the process
            getattr(os, "posix_fallocate", lambda file, _, size: os.truncate(file, size))(descriptor, 0, size)
        except OSError:
            os.unlink(path)
            path = ""
        os.close(descriptor)
    path = gather_objects(path)[hosts.index(host)]
    try:
        return np.memmap(path, np.uint8, "r+", shape=(size,)) if path else None
    except OSError:
        # the file does not exist here: it is on another machine with the same host name
        return None
    finally:
        gather_objects(None)
        if first and path:
            os.unlink(path)


@contextlib.contextmanager
def agree_on_errors() -> Iterator[None]:
    """All ranks: context manager; if any rank raises InputError or RunError, all ranks raise the first such error."""
    own = None
    try:
        yield
    except (InputError, RunError) as error:
        own = error
    errors = [error for error in gather_objects(own) if error is not None]
    if errors:
        raise errors[0] from None


@torch.no_grad()
def check_same_weights(state: dict[str, Tensor]) -> None:
    """All ranks: compare checksums of the weights across ranks. Raises RunError on all ranks if the weights differ.

    A bit flip in one GPU's memory would otherwise go unnoticed.
    """
    if world()[1] == 1:
        return
    words = {1: torch.uint8, 2: torch.int16}
    bits = [value.contiguous().view(-1).view(words.get(value.element_size(), torch.int32)) for value in state.values()]
    own = tuple(torch.stack([part.sum(dtype=torch.int64) for part in bits]).tolist())
    ranks_of = combine({own: [world()[0]]}, lambda a, b: {sums: a.get(sums, []) + b.get(sums, []) for sums in a | b})
    usual = max(ranks_of, key=lambda sums: (len(ranks_of[sums]), -ranks_of[sums][0]))
    odd = [(ranks[0], sums) for sums, ranks in ranks_of.items() if sums != usual]
    if odd:
        rank, sums = min(odd)
        name = next(name for name, a, b in zip(state, sums, usual, strict=True) if a != b)
        reason = f"rank {rank} holds other weights than rank {ranks_of[usual][0]} ({name})"
        fault = "a GPU or a kernel is at fault, or a layer like BatchNorm that keeps statistics of its own batches"
        raise RunError(f"{reason}: {fault}; resume from the checkpoint before")


# --- exact sums -------------------------------------------------------------------------------------------------------


def round_for_exact_sum(values: Tensor) -> Tensor:
    """Round values to multiples of 2**-40, in float64.

    Sums of rounded values are exact while they stay below 2**13, so they do not depend on the order of the additions.
    """
    return (values.double() + SHIFT) - SHIFT


# --- learning rate and stop signal ------------------------------------------------------------------------------------


def scale_learning_rate(base: float, times: float, rule: str) -> float:
    """Scale a learning rate for a batch size multiplied by `times`.

    The "linear" rule multiplies the rate by `times`, like the published PRS-Med guide's effective_lr = base_lr *
    world_size.
    """
    return base * {"linear": times, "sqrt": math.sqrt(times), "none": 1}[rule]


def schedule(step: int, total_steps: int, warmup_steps: int, kind: str) -> float:
    """Return the learning rate multiplier at `step` (from 0): linear warm-up, then constant or cosine decay to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    cosine_steps = max(1, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / cosine_steps))


class StopSignal:
    """Context manager that handles stop signals: SIGTERM sets `code` to 143, Ctrl-C to 130.

    at_once: if not empty, a message; a signal then prints it and ends the process immediately.
    """

    code = 0
    at_once: bytes | None = None

    def __enter__(self) -> "StopSignal":
        signals = [getattr(signal, name, None) for name in ("SIGTERM", "SIGINT", "SIGBREAK")]
        self.previous = {number: signal.signal(number, self._note) for number in signals if number is not None}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame) -> None:
        self.code = 130 if number == signal.SIGINT else 143
        # DataLoader workers inherit this handler, but must neither print the message nor exit
        if self.at_once is not None and get_worker_info() is None:
            os.write(1, self.at_once)
            os._exit(self.code)
