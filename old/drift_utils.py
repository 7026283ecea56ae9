"""Whether all ranks still hold the same weights: a checksum of each tensor, compared between the ranks.

A flipped bit in one GPU's memory, or a kernel that rounds otherwise, lets the ranks train apart from each other, and no
loss tells: each averages its gradients with the others' all the same.
"""

import contextlib
import functools
import socket
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from old.checkpoint_utils import settle_checkpoint
from old.cli_utils import RunError
from old.distributed_utils import broadcast_object, gather_objects, reduce_max, world
from old.manifest_utils import read_manifest

# Bits are viewed as whole numbers of at most 32 bits; larger elements are several numbers.
WORDS = {1: torch.uint8, 2: torch.int16}
# Numbers that are added up at a time, by the kind of device: as many as stay in its cache.
BLOCK = {"cpu": 1 << 16, "cuda": 1 << 21}
# An odd number, whose powers tell blocks apart.
MULTIPLIER = 6364136223846793005
# More ranks than this are not named in one line.
NAMED = 8


# --- the checksum of a tensor -----------------------------------------------------------------------------------------


@functools.cache
def place_weights(size: int, device: torch.device) -> Tensor:
    """(size,) int64: the odd number that each place of a block is multiplied by.

    The low 34 bits are 2 * place + 1. Two of these differ by less than 2^32 and two numbers by at most 2^32, so that
    the differences' product is no multiple of 2^64: two numbers of a block that change places are always found. The
    bits above are random, so that changes of many numbers do not cancel.
    """
    places = torch.arange(size)
    generator = torch.Generator().manual_seed(size)
    high = torch.randint(1 << 29, (size,), generator=generator)
    weights = (high << 34) + 2 * places + 1
    return weights.to(device)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """A scalar int64 on the tensor's device: the sum of its bits times their places' weights, modulo 2^64.

    A flipped bit changes it by a power of two times an odd number, which is never 0. It does not depend on the memory
    format, nor on the order in which a device adds up.
    """
    tensor = tensor.contiguous()
    word = WORDS.get(tensor.element_size(), torch.int32)
    numbers = tensor.view(-1).view(word)
    size = BLOCK.get(tensor.device.type, BLOCK["cpu"])
    weights = place_weights(size, tensor.device)

    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factor = 1
    for block in numbers.split(size):
        products = block * weights[: len(block)]
        total += products.sum() * factor
        # still odd, and within the 64 bits of an int
        factor = factor * MULTIPLIER % 2**63
    return total


# --- which tensors the ranks share ------------------------------------------------------------------------------------


def shared_tensors(model: nn.Module) -> dict[str, Tensor]:
    """{name: tensor} of the weights and buffers that every rank holds as a whole.

    Left out are parts that no other rank has (ZeRO-3, --shard_base), buffers that no checkpoint holds, as modules may
    make them of a batch, and the running statistics of batch normalization: DDP leaves them alone here, so that without
    SyncBatchNorm they follow the rank's own samples.
    """
    compared = set(model.state_dict(keep_vars=True))
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            for name, _ in module.named_buffers(path, recurse=False):
                compared.discard(name)

    tensors = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        if name in compared:
            tensors[name] = buffer
    return {name: tensor for name, tensor in tensors.items() if is_whole(tensor)}


def is_whole(tensor: Tensor) -> bool:
    """Whether this process holds the whole of a tensor, and not its share by FSDP or ZeRO-3."""
    return not hasattr(tensor, "to_local") and not hasattr(tensor, "ds_id")


# --- compared between the ranks ---------------------------------------------------------------------------------------


def check_drift(model: nn.Module, step: int, run_folder: Path) -> None:
    """All ranks: RunError on all together where their weights are not the same to the bit.

    One transfer of 8 bytes a tensor from the device, and one between the ranks' hosts.
    """
    if world()[1] == 1:
        return
    tensors = shared_tensors(model)
    sums = [checksum(tensor) for tensor in tensors.values()]
    if not sums:
        return
    sums = torch.stack(sums).cpu()

    # ~x falls as x rises: the largest ~x belongs to the smallest x
    largest, smallest = reduce_max(torch.stack([sums, ~sums]))
    differ = largest != ~smallest
    if differ.any():
        raise RunError(describe_drift(list(tensors), sums, differ, step, run_folder))


def describe_drift(names: list[str], sums: Tensor, differ: Tensor, step: int, run_folder: Path) -> str:
    """All ranks: what to tell of weights that differ. sums: of this rank. differ: of which tensors they do."""
    places = differ.nonzero().flatten().tolist()
    first = places[0]
    where = names[first]
    if len(places) > 1:
        where += f" and {len(places) - 1} more"

    # the checkpoint before was checked before it was written; whether that worked is another matter
    with contextlib.suppress(RunError):
        settle_checkpoint()
    newest = newest_step(run_folder)
    advice = f"--resume_from auto goes on from step {newest}, where they agreed"
    if newest is None:
        advice = "no checkpoint was written yet, so start again with --overwrite"
    ranks = blame_ranks(gather_objects((int(sums[first]), socket.gethostname())))
    return f"step {step}: the ranks' weights differ in {where}: {ranks}; {advice}"


def blame_ranks(sums: list[tuple[int, str]]) -> str:
    """Which ranks differ from most of the others. sums: the checksum of each rank, and its host."""
    counts = Counter(value for value, _ in sums)
    ranked = counts.most_common(2)
    common, most = ranked[0]
    _, second = ranked[1]

    # two ranks, or two halves
    tie = second == most
    odd = {}
    for rank, (value, host) in enumerate(sums):
        if tie or value != common:
            odd[rank] = host
    named = list_ranks(odd)
    if tie:
        return f"{named} do not agree, and no majority says who is right"
    return f"{named} against the {most} others"


def list_ranks(hosts: dict[int, str]) -> str:
    """`rank 3 (node07), rank 5 (node08)`, at most so many."""
    named = []
    for rank, host in hosts.items():
        named.append(f"rank {rank} ({host})")
    if len(named) > NAMED:
        more = len(named) - NAMED
        named[NAMED:] = [f"{more} more"]
    return ", ".join(named)


def newest_step(run_folder: Path) -> int | None:
    """All ranks: the step of the newest checkpoint on the disk; None without one."""
    step = None
    if world()[0] == 0:
        manifest = read_manifest(run_folder)
        if manifest and manifest.steps():
            name = manifest.steps()[-1]
            step = int(name.removeprefix("step_").removesuffix(".pt"))
    return broadcast_object(step)
