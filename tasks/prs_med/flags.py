"""Which flags of PRS-Med go together. Light: read before torch is imported."""

from argparse import Namespace
from pathlib import Path

from cli_utils import Parser, parse_arguments, take_from_run, value_sources


def read_arguments(parser: Parser, argv: list[str] | None) -> Namespace:
    """The command line and --config, whose values go together; `source` tells where each value is from."""
    args = parse_arguments(parser, argv)
    args.source = value_sources(parser, args, argv)
    check_args(parser, args)
    return args


def check_args(parser: Parser, args: Namespace) -> None:
    """Fill in the paths of the run to apply, and end with one line where flags exclude each other."""
    if args.eval_only or args.predict:
        take_from_run(parser, args, args.checkpoint_dir, ("data_root", "vlm_path", "sam_path"))
    if args.rehearse and args.data_root is None and args.vlm_path and args.sam_path:
        # config.json of both models is enough
        args.data_root = "."
    if args.data_root is None:
        models = ", or --vlm_path and --sam_path, of which config.json and tokenizer are enough"
        otherwise = models if args.rehearse else ""
        parser.error(f"--data_root: name the folder with the data{otherwise}")

    # one mode at a time
    if bool(args.predict) != bool(args.question):
        parser.error("--predict IMAGE and --question TEXT need each other")
    if args.overwrite and (args.resume_from or args.eval_only or args.predict):
        parser.error("--overwrite starts afresh and excludes --resume_from, --eval_only and --predict")
    if args.shuffle_questions and not args.eval_only:
        parser.error("--shuffle_questions tests a trained model and needs --eval_only")
    if not Path(args.data_root).is_dir():
        parser.error(f"{args.data_root}: no such folder; check --data_root")
