"""What the scripts on Accelerate share: the accelerator itself, and who decides the precision."""

import argparse
import contextlib
import os

import distributed_utils as du
import hardware_utils as hw
from cli_utils import InputError


def make_accelerator(args: argparse.Namespace, ranks: du.Ranks):
    """Accelerate's view of the processes that are there. Raises InputError for an `accelerate config` of another kind.

    It wraps the net in DDP, sets the precision, and skips the synchronisation while accumulating. The data order, the
    learning rate and the step are ours: its prepared loader pads the last batch, its prepared scheduler steps once per
    process.
    """
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise InputError(f"accelerate config: {name} is not supported here; choose multi-GPU, or give --multi_gpu")
    accumulation = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation not in ("1", "auto", str(args.gradient_accumulation_steps)):
        text = f"give --gradient_accumulation_steps {accumulation} to the script, after its name"
        raise InputError(f"accelerate launch --gradient_accumulation_steps {accumulation}: not read; {text}")
    if ranks.world_size > 1:  # srun sets names of its own, and may show each task one GPU only
        local = ranks.device.index if ranks.device.type == "cuda" else ranks.local_rank
        places = {"RANK": ranks.rank, "LOCAL_RANK": local, "WORLD_SIZE": ranks.world_size}
        os.environ |= {name: str(value) for name, value in places.items()}
    else:  # torchrun with one process: Accelerate would open a process group of its own
        os.environ.pop("LOCAL_RANK", None)
    for name in list(os.environ):  # the precision is decided here, once
        if name.startswith(("ACCELERATE_DYNAMO", "ACCELERATE_MIXED", "ACCELERATE_GRADIENT")):
            del os.environ[name]
    from accelerate import Accelerator, DistributedDataParallelKwargs

    cpu = ranks.device.type == "cpu"  # without it, several CPU processes would train apart from each other
    buckets = DistributedDataParallelKwargs(find_unused_parameters=du.keep_buckets())
    accelerator = Accelerator(cpu=cpu, mixed_precision=args.mixed_precision, kwargs_handlers=[buckets])
    assert accelerator.num_processes == ranks.world_size, accelerator.distributed_type
    return accelerator


def choose_precision(args: argparse.Namespace, ranks: du.Ranks) -> str:
    """Set args.mixed_precision; returns why. The command line wins over `accelerate launch --mixed_precision`, that
    over the config, that over auto. fp16 for a machine without a GPU, unless asked for by flag, becomes fp32."""
    wanted, source = args.mixed_precision, args.source["mixed_precision"]
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if source != "command line" and launched in ("bf16", "fp16"):
        wanted, source = launched, "accelerate launch"
    if wanted == "fp16" and ranks.device.type == "cpu" and source != "command line":
        args.mixed_precision = "no"
        return f"fp32: the fp16 of {source} needs a GPU"
    args.mixed_precision, why = hw.choose_precision(wanted, ranks.device)
    return f"{source}" if why == "as asked" else why


def keep_precision(args: argparse.Namespace, contents: dict, why: str, ranks: du.Ranks) -> str:
    """A run goes on in the precision it was begun in, unless another one is asked for; returns why."""
    before = contents["settings"]["mixed_precision"]
    if before == args.mixed_precision:
        return why
    if args.source["mixed_precision"] == "default" and not why.endswith("accelerate launch"):
        with contextlib.suppress(InputError):  # what this device cannot do
            args.mixed_precision, _ = hw.choose_precision(before, ranks.device)
            return "as the run was begun"
    du.print_main(
        f"warning: begun in {before}, going on in {args.mixed_precision}: the numbers will not be quite the same"
    )
    return why
