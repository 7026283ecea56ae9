"""What guides 0 and 1 share: questions about images. Light: read before torch is imported."""

from argparse import BooleanOptionalAction

from cli_utils import Parser


def add_question_flags(parser: Parser) -> None:
    """The flags that mean the same in both guides."""
    add = parser.add_argument_group("images and questions").add_argument
    text = "train on images with small random changes that keep answers true (default: %(default)s)"
    add("--augmentation", action=BooleanOptionalAction, default=False, help=text)
