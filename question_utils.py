"""What guides 0 and 1 share: questions about images. Light: read before torch is imported."""

from cli_utils import Parser


def add_question_flags(parser: Parser) -> None:
    """The flags that mean the same in both guides."""
