"""Flags of PRS-Med beside those of its training, and which go together. Light: read before torch is imported."""

import re
from argparse import Namespace
from pathlib import Path

from old.cli_utils import Parser, number, parse_arguments, take_from_run, value_sources, whole
from old.question_utils import check_models, check_predict


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
    text = "share of a CSV's answers that may contradict their mask or each other; 1: all"
    add("--max_contradictions", type=share, default=0.25, help=text)


def add_output_flags(parser: Parser) -> None:
    """Where a run writes, what a trained model is used for, and where its frozen part lies."""
    add = parser.add_argument_group("output and evaluation").add_argument
    add("--checkpoint_dir", default="checkpoints", help="run folder: checkpoints, logs, figures, summary")
    add("--save_full_state", action="store_true", help="save the frozen weights, too (14 GB for a 7B model)")
    add("--eval_split", choices=("train", "val", "test"), default="test", help="split that --eval_only takes")
    add("--shuffle_questions", action="store_true", help="with --eval_only: swap an image's questions; Dice must fall")
    add("--max_new_tokens", type=whole(1), default=64, help="longest generated answer, tokens")
    add("--no_generate", action="store_true", help="evaluate masks and losses alone: no generated answers, much faster")

    add = parser.add_argument_group("memory").add_argument
    text = "training: each process holds its share of the frozen VLM; slower, same results"
    add("--shard_base", action="store_true", help=text)


def read_arguments(parser: Parser, argv: list[str] | None) -> Namespace:
    """The command line and --config, whose values go together; `source` tells where each value is from."""
    args = parse_arguments(parser, argv)
    args.source = value_sources(parser, args, argv)
    check_args(parser, args)
    return args


# What a run is applied with: its models, and to evaluate its data.
MODELS = ("vlm_path", "sam_path")
DATA = ("data_root",)


def check_args(parser: Parser, args: Namespace) -> None:
    """Fill in the paths of the run to apply, and end with one line where flags exclude each other."""
    check_predict(parser, args)
    run_folder = args.checkpoint_dir
    if args.eval_only:
        take_from_run(parser, args, run_folder, DATA + MODELS)
    if args.predict:
        take_from_run(parser, args, run_folder, MODELS)
    check_models(parser, args, MODELS)

    # the data may be gone, and config.json of both models is enough for a rehearsal
    models_known = args.vlm_path and args.sam_path
    needs_no_data = args.predict or (args.rehearse and models_known)
    if args.data_root is None and needs_no_data:
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
    if args.overwrite and (args.resume_from or args.eval_only):
        parser.error("--overwrite starts afresh and excludes --resume_from and --eval_only")
    if args.shuffle_questions and not args.eval_only:
        parser.error("--shuffle_questions tests a trained model and needs --eval_only")
    if args.shard_base:
        check_sharding(parser, args)
    is_folder = Path(args.data_root).is_dir()
    if not is_folder and not args.predict:
        parser.error(f"{args.data_root}: no such folder; check --data_root")


def check_sharding(parser: Parser, args: Namespace) -> None:
    """--shard_base: what does not go with it is an error; the batch is not fitted, which each process does alone."""
    for name in ("auto_batch", "compile", "save_full_state"):
        if getattr(args, name):
            parser.error(f"--{name} does not go with --shard_base; leave one of them out")
    args.auto_batch = False
