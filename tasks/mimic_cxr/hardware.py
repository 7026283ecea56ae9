"""--auto_optimize: the flags that follow from the weakest machine of a job."""

import platform
from typing import NamedTuple

import torch

from old import deepspeed_utils
from old.distributed_utils import Ranks, gather_objects
from old.hardware_utils import available_ram_gb, core_numbers, is_roomy, settings_for, usable_cores

# Stands for the compute capability of a GPU that is not there: it has bf16.
IMAGINED_COMPUTE = 9.0


class HardwareSettings(NamedTuple):
    """What follows from the hardware; the defaults are those without --auto_optimize.

    flags: {flag: value}. zero_stage: for DeepSpeed, if that trains. smallest_gpu: GiB, None on a CPU.
    """

    flags: dict
    zero_stage: int = 2
    smallest_gpu: float | None = None


def processes_per_node() -> int:
    """All ranks: ranks that share their cores. srun may give each its own, torchrun gives all of a node the same."""
    places = gather_objects((platform.node(), core_numbers()))
    most = 0
    for node, cores in places:
        sharing = [other for other, others_cores in places if other == node and cores & others_cores]
        most = max(most, len(sharing))
    return most


def settings_of_job(ranks: Ranks, processes: int, batch_size: int | None) -> HardwareSettings:
    """All ranks: the settings for the weakest machine. processes: of a node; batch_size: where a flag gives it."""
    memory = None
    compute = None
    if ranks.device.type == "cuda":
        card = torch.cuda.get_device_properties(ranks.device)
        memory = card.total_memory / 2**30
        compute = float(f"{card.major}.{card.minor}")

    # the least of each over all ranks
    weakest = []
    for values in zip(*gather_objects([memory, compute, usable_cores(), available_ram_gb()]), strict=True):
        weakest.append(min((value for value in values if value is not None), default=None))
    smallest_gpu, lowest_compute, fewest_cores, least_ram = weakest
    chosen = settings_for(
        ranks.world_size,
        smallest_gpu,
        lowest_compute,
        fewest_cores,
        least_ram,
        deepspeed_utils.available(),
        batch_size=batch_size,
        processes_per_node=processes,
    )
    return as_flags(chosen, processes, smallest_gpu)


def settings_of_plan(processes: int, gpu_gb: float, batch_size: int | None) -> HardwareSettings:
    """For --rehearse: the settings of a job of DDP on GPUs that need not be there, each of so many GiB."""
    chosen = settings_for(
        processes,
        gpu_gb,
        IMAGINED_COMPUTE,
        usable_cores(),
        available_ram_gb(),
        deepspeed=False,
        batch_size=batch_size,
    )
    return as_flags(chosen, processes, gpu_gb)


def as_flags(chosen: dict, processes: int, smallest_gpu: float | None) -> HardwareSettings:
    """What settings_for says, under our names. processes: of a node, which share its workers."""
    flags = {
        "batch_size": chosen["batch_size_per_gpu"],
        "gradient_accumulation_steps": chosen["gradient_accumulation_steps"],
        "num_workers": chosen["dataloader_num_workers"] // processes,
        "prefetch_factor": chosen["prefetch_factor"],
        "gradient_checkpointing": chosen["gradient_checkpointing"],
        "offload_optimizer": not is_roomy(smallest_gpu),
    }
    return HardwareSettings(flags, chosen["zero_stage"] or 2, smallest_gpu)
