"""What guides 0 and 1 share: questions about images. Light: read before torch is imported."""

from argparse import Namespace

from cli_utils import Parser


def add_question_flags(parser: Parser) -> None:
    """The flags that mean the same in both guides."""
    add = parser.add_argument_group("asking a trained model").add_argument
    text = "no training: answer about this image, all images of a folder, or a CSV (image,question)"
    add("--predict", metavar="PATH", help=text)
    add("--question", metavar="TEXT", help="the question for --predict; of a CSV's rows, those that have none")


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
