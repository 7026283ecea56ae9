"""Flags of PRS-Med beside those of its training, and which go together. Light: read before torch is imported."""

from argparse import Namespace
from pathlib import Path

from cli_utils import Parser, parse_arguments, take_from_run, value_sources, whole


def add_output_flags(parser: Parser) -> None:
    """Where a run writes, what a trained model is used for, and where its frozen part lies."""
    add = parser.add_argument_group("output and evaluation").add_argument
    add("--checkpoint_dir", default="checkpoints", help="run folder: checkpoints, logs, figures, summary")
    add("--save_full_state", action="store_true", help="save the frozen weights, too (14 GB for a 7B model)")
    add("--eval_split", choices=("train", "val", "test"), default="test", help="split that --eval_only takes")
    add("--shuffle_questions", action="store_true", help="with --eval_only: swap an image's questions; Dice must fall")
    add("--max_new_tokens", type=whole(1), default=64, help="longest generated answer, tokens")
    add("--predict", metavar="IMAGE", help="no training: write mask, overlay and answer for this image")
    add("--question", help="the question for --predict")

    add = parser.add_argument_group("memory").add_argument
    text = "training: each process holds its share of the frozen VLM; slower, same results"
    add("--shard_base", action="store_true", help=text)


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
    if args.shard_base:
        check_sharding(parser, args)
    if not Path(args.data_root).is_dir():
        parser.error(f"{args.data_root}: no such folder; check --data_root")


def check_sharding(parser: Parser, args: Namespace) -> None:
    """--shard_base: what does not go with it is an error; the batch is not fitted, which each process does alone."""
    for name in ("auto_batch", "compile", "save_full_state"):
        if getattr(args, name):
            parser.error(f"--{name} does not go with --shard_base; leave one of them out")
    args.auto_batch = False
