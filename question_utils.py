"""What guides 0 and 1 share: questions about images. Light: read before torch is imported."""

import re
from argparse import ArgumentTypeError, BooleanOptionalAction

from cli_utils import Parser, whole

# How often a run is evaluated: epochs, or optimizer steps.
EVERY = re.compile(r"([1-9]\d{0,8})(steps)?")


def add_question_flags(parser: Parser) -> None:
    """The flags that mean the same in both guides."""
    add = parser.add_argument_group("evaluation").add_argument
    text = "evaluate after so many epochs, such as 2, or optimizer steps, such as 500steps"
    add("--eval_every", type=evaluation_interval, default="1", metavar="N|Nsteps", help=text)
    text = "questions of an evaluation, drawn by --seed from all patients; 0: all"
    add("--eval_max_samples", type=whole(0), default=0, help=text)
    text = "in the last test: scores without the image or the question (default: %(default)s)"
    add("--blind_scores", action=BooleanOptionalAction, default=True, help=text)


def evaluation_interval(text: str) -> str:
    """argparse type: `2` (epochs) or `500steps`."""
    if not EVERY.fullmatch(text):
        raise ArgumentTypeError(f"must be epochs, such as 2, or steps, such as 500steps, not {text!r}")
    return text


def split_interval(text: str) -> tuple[int, int]:
    """(epochs, optimizer steps) between evaluations, one of which is 0."""
    count, steps = EVERY.fullmatch(text).groups()
    return (0, int(count)) if steps else (int(count), 0)
