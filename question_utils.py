"""What guides 0 and 1 share: questions about images. Light: read before torch is imported."""

import math

from cli_utils import Parser, whole


def add_question_flags(parser: Parser) -> None:
    """The flags that mean the same in both guides."""
    add = parser.add_argument_group("questions").add_argument
    text = "up to so many questions of an image in a row, which encode it once"
    add("--questions_per_image", type=whole(1), default=1, help=text)


def distinct(images: list) -> tuple[list[int], list[int]]:
    """(places of the different images of a list, which of these each one is); equal is what is the same object."""
    numbers: dict[int, int] = {}
    places = []
    image_of = []
    for place, image in enumerate(images):
        number = numbers.setdefault(id(image), len(places))
        if number == len(places):
            places.append(place)
        image_of.append(number)
    return places, image_of


def describe_sharing(questions: int, images: int, questions_per_image: int) -> str:
    """The banner's row: how many questions a training image has, and for how many of them it is encoded once."""
    mean = questions / images
    text = f"{images:,} to train on, {mean:.1f} questions each on average"
    if questions_per_image > 1:
        return f"{text}; encoded once for {questions_per_image} questions in a row (--questions_per_image)"
    if questions > images:
        return f"{text}; --questions_per_image {math.ceil(mean)} encodes each once for all of them"
    return text
