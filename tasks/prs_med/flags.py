"""Flags of PRS-Med beside those of its training, and which go together. Light: read before torch is imported."""

import re
from argparse import Namespace
from pathlib import Path

from cli_utils import Parser, number, parse_arguments, take_from_run, value_sources, whole


def add_data_flags(parser: Parser) -> None:
    """Where the data is, and what is asked of it before training."""
    add = parser.add_argument_group("data").add_argument
    add("--data_root", help="folder with annotations/*.csv; left out with --eval_only, --predict: the run's")
    add("--annotations", nargs="+", metavar="NAME", help="which annotation CSVs, by name; default: all")
    add("--skip_bad_rows", action="store_true", help="drop and count CSV rows with a missing field")
    add("--skip_data_check", action="store_true", help="do not read every image first; copies then go unnoticed")
    text = "GiB of RAM PER PROCESS for decoded images; 0: none are kept"
    add("--cache_gb", type=number(0), default=4.0, help=text)

    # what the check of the data goes by
    text = "CSV column that names the patient; none may be in two splits"
    add("--patient_column", metavar="NAME", help=text)
    text = "instead: what this matches in the image's file name, or its first group"
    add("--patient_pattern", metavar="REGEX", help=text)
    share = number(0, 1)
    text = "share of a CSV's answers that may name another place than the mask; 1: all"
    add("--max_contradictions", type=share, default=0.25, help=text)


def add_output_flags(parser: Parser) -> None:
    """Where a run writes, and what a trained model is used for."""
    add = parser.add_argument_group("output and evaluation").add_argument
    add("--checkpoint_dir", default="checkpoints", help="run folder: checkpoints, logs, figures, summary")
    add("--save_full_state", action="store_true", help="save the frozen weights, too (14 GB for a 7B model)")
    add("--eval_split", choices=("train", "val", "test"), default="test", help="split that --eval_only takes")
    add("--shuffle_questions", action="store_true", help="with --eval_only: swap an image's questions; Dice must fall")
    add("--max_new_tokens", type=whole(1), default=64, help="longest generated answer, tokens")
    add("--no_generate", action="store_true", help="evaluate masks and losses alone: no generated answers, much faster")
    add("--predict", metavar="IMAGE", help="no training: write mask, overlay and answer for this image")
    add("--question", help="the question for --predict")


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

    if args.patient_column and args.patient_pattern:
        parser.error("--patient_column and --patient_pattern exclude each other")
    try:
        pattern = args.patient_pattern or ""
        re.compile(pattern)
    except re.error as error:
        reason = f"not a regular expression ({error})"
        parser.error(f"--patient_pattern: {reason}")

    # one mode at a time
    if bool(args.predict) != bool(args.question):
        parser.error("--predict IMAGE and --question TEXT need each other")
    if args.overwrite and (args.resume_from or args.eval_only or args.predict):
        parser.error("--overwrite starts afresh and excludes --resume_from, --eval_only and --predict")
    if args.shuffle_questions and not args.eval_only:
        parser.error("--shuffle_questions tests a trained model and needs --eval_only")
    if not Path(args.data_root).is_dir():
        parser.error(f"{args.data_root}: no such folder; check --data_root")
