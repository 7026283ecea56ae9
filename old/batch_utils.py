"""--effective_batch_size: the batch as a property of the run, which keeps it at any number of processes.

Light on purpose (no torch): the command line is checked with it.
"""

import argparse
import math
import sys

from old.cli_utils import InputError

ACCUMULATION = "--gradient_accumulation_steps"


def check_accumulation(parser: argparse.ArgumentParser, args: argparse.Namespace, argv: list[str] | None) -> None:
    """With --effective_batch_size the accumulation follows, so that a flag for it ends the process with one line.

    A config's accumulation gives way to the command line; a config that holds both is refused.
    """
    words = sys.argv[1:] if argv is None else argv
    flags = {word.split("=")[0] for word in words}
    if ACCUMULATION in flags:
        parser.error(f"{ACCUMULATION}: follows from --effective_batch_size; give one of them")
    if args.gradient_accumulation_steps > 1 and "--effective_batch_size" not in flags:
        parser.error(f"{args.config}: holds effective_batch_size, from which the accumulation follows; remove one")
    args.gradient_accumulation_steps = 1


def share_out(total: int, most: int, processes: int) -> tuple[int, int]:
    """(samples of a forward pass, passes) of the process with most of `total` samples, `most` of them at once.

    The passes are as few as can be, and as even.
    """
    share = math.ceil(total / processes)
    passes = math.ceil(share / most)
    return math.ceil(share / passes), passes


def keep_effective_batch(
    values: dict, source: dict[str, str], checkpoint: dict | None, size_flag: str = "batch_size"
) -> None:
    """Let a run that is resumed keep the effective batch that it was begun with.

    values, source: of the flags by name, and where each comes from. Raises InputError for an accumulation beside it.
    """
    split = checkpoint.get("split") if checkpoint else None
    begun = split.get("effective_batch_size") if split else None
    if begun is None:
        return

    # what is different now is refused with the checkpoint's other facts
    if source["gradient_accumulation_steps"] == "command line":
        raise InputError(f"{ACCUMULATION}: follows from the run's --effective_batch_size {begun}; leave it out")
    values["gradient_accumulation_steps"] = 1
    if values["effective_batch_size"] is None:
        values["effective_batch_size"] = begun
    if source[size_flag] == "default":
        values[size_flag] = split["batch_size"]
