"""What the scripts on Accelerate share: the accelerator itself, and who decides the precision."""

import contextlib
import os
from functools import partial

from hardware_utils import check_accelerate
from old import hardware_utils
from old.cli_utils import InputError
from old.distributed_utils import Ranks, keep_buckets, print_main
from old.loop_utils import agree_on_precision


def make_accelerator(precision: str, accumulation: int, ranks: Ranks):
    """Accelerate's view of the processes that are there. Raises InputError for an `accelerate config` of another kind.

    It wraps the model in DDP, sets the precision, and skips the synchronisation while accumulating. The data order, the
    learning rate and the step are ours: its prepared loader pads the last batch, its prepared scheduler steps once per
    process.
    """
    check_accelerate(accumulation)

    # srun sets names of its own, and may show each task one GPU only
    if ranks.world_size > 1:
        on_gpu = ranks.device.type == "cuda"
        os.environ["RANK"] = str(ranks.rank)
        os.environ["LOCAL_RANK"] = str(ranks.device.index if on_gpu else ranks.local_rank)
        os.environ["WORLD_SIZE"] = str(ranks.world_size)
    else:
        # under torchrun with one process, Accelerate would open a process group of its own
        os.environ.pop("LOCAL_RANK", None)

    # the precision is decided by the script, once
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_DYNAMO", "ACCELERATE_MIXED", "ACCELERATE_GRADIENT")):
            del os.environ[name]

    from accelerate import Accelerator, DistributedDataParallelKwargs

    # without cpu=True, several CPU processes would train apart from each other
    buckets = DistributedDataParallelKwargs(find_unused_parameters=keep_buckets())
    accelerator = Accelerator(
        cpu=ranks.device.type == "cpu",
        mixed_precision=precision,
        kwargs_handlers=[buckets],
    )
    assert accelerator.num_processes == ranks.world_size, accelerator.distributed_type
    return accelerator


def agree_on_launched_precision(wanted: str, source: str, ranks: Ranks) -> tuple[str, str]:
    """All ranks: (precision, reason) of --mixed_precision and its source, the same everywhere. Raises InputError."""
    choose = partial(choose_launched_precision, wanted, source, ranks)
    return agree_on_precision(choose)


def choose_launched_precision(wanted: str, source: str, ranks: Ranks) -> tuple[str, str]:
    """(precision, reason) of this rank, of --mixed_precision and its source.

    The command line wins over `accelerate launch --mixed_precision`, that over the config, that over auto. fp16 for a
    machine without a GPU, unless asked for by flag, becomes fp32.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if source != "command line" and launched in ("bf16", "fp16"):
        wanted = launched
        source = "accelerate launch"
    if wanted == "fp16" and ranks.device.type == "cpu" and source != "command line":
        return "no", f"fp32: the fp16 of {source} needs a GPU"
    precision, reason = hardware_utils.choose_precision(wanted, ranks.device)
    return precision, source if reason == "as asked" else reason


def keep_precision(precision: str, reason: str, checkpoint: dict | None, source: str, ranks: Ranks) -> tuple[str, str]:
    """(precision, reason) of a run: that it was begun in, unless another one is asked for.

    checkpoint: of the run to be resumed, if any. source: where --mixed_precision comes from.
    """
    begun_in = checkpoint["settings"]["mixed_precision"] if checkpoint else precision
    if begun_in == precision:
        return precision, reason
    if source == "default" and not reason.endswith("accelerate launch"):
        # unless this device cannot do it
        with contextlib.suppress(InputError):
            precision, _ = hardware_utils.choose_precision(begun_in, ranks.device)
            return precision, "as the run was begun"
    print_main(f"warning: begun in {begun_in}, going on in {precision}: the numbers will not be quite the same")
    return precision, reason
