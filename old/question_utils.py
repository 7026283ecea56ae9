"""What guides 0 and 1 share: questions about images. Light: read before torch is imported."""

import math
import re
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from pathlib import Path

from old.cli_utils import FROM_RUN, Parser, whole

# How often a run is evaluated: epochs, or optimizer steps.
EVERY = re.compile(r"([1-9]\d{0,8})(steps)?")


def add_question_flags(parser: Parser) -> None:
    """The flags that mean the same in both guides."""
    add = parser.add_argument_group("images and questions").add_argument
    text = "up to so many questions of an image in a row, which encode it once"
    add("--questions_per_image", type=whole(1), default=1, help=text)
    text = "train on images with small random changes that keep answers true (default: %(default)s)"
    add("--augmentation", action=BooleanOptionalAction, default=False, help=text)

    add = parser.add_argument_group("evaluation").add_argument
    text = "evaluate after so many epochs, such as 2, or optimizer steps, such as 500steps"
    add("--eval_every", type=evaluation_interval, default="1", metavar="N|Nsteps", help=text)
    text = "questions of an evaluation, drawn by --seed from all patients; 0: all"
    add("--eval_max_samples", type=whole(0), default=0, help=text)
    text = "in the last test: scores without the image or the question (default: %(default)s)"
    add("--blind_scores", action=BooleanOptionalAction, default=True, help=text)

    add = parser.add_argument_group("asking a trained model").add_argument
    text = "no training: answer about this image, all images of a folder, or a CSV (image,question)"
    add("--predict", metavar="PATH", help=text)
    add("--question", metavar="TEXT", help="the question for --predict; of a CSV's rows, those that have none")


def evaluation_interval(text: str) -> str:
    """argparse type: `2` (epochs) or `500steps`."""
    if not EVERY.fullmatch(text):
        raise ArgumentTypeError(f"must be epochs, such as 2, or steps, such as 500steps, not {text!r}")
    return text


def split_interval(text: str) -> tuple[int, int]:
    """(epochs, optimizer steps) between evaluations, one of which is 0."""
    count, steps = EVERY.fullmatch(text).groups()
    return (0, int(count)) if steps else (int(count), 0)


def check_predict(parser: Parser, args: Namespace) -> None:
    """End with one line where --predict and --question do not go together or with other modes."""
    path = args.predict
    question = args.question
    is_table = bool(path) and path.lower().endswith(".csv")

    # a table has its own questions
    reason = ""
    if question and not path:
        reason = "--predict and --question need each other"
    elif path and not question and not is_table:
        reason = "--predict and --question need each other; a CSV has a column of questions"
    elif question and not question.strip():
        reason = "--question: must not be blank"
    elif path and args.eval_only:
        reason = "--predict and --eval_only exclude each other; give one"
    elif path and args.overwrite:
        reason = "--overwrite starts afresh and excludes --predict"
    if reason:
        parser.error(reason)


def check_models(parser: Parser, args: Namespace, names: tuple[str, ...]) -> None:
    """End with one line where a model's folder is not there any more, as the run to be applied names it."""
    for name in names:
        path = getattr(args, name)
        if path is None or args.source[name] != FROM_RUN or Path(path).exists():
            continue
        # such as microsoft/rad-dino, where there is no folder microsoft
        on_hub = path.count("/") == 1 and path[0] not in "./~" and not Path(path).parent.is_dir()
        if not on_hub:
            parser.error(f"{path}: not there any more, and the run was trained with it; give its folder as --{name}")


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
