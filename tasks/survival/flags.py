"""Which flags of survival go together, and what a checkpoint prescribes. Light: read before torch is imported."""

import argparse

from cli_utils import InputError, Parser

# what a checkpoint prescribes to a run that is resumed from it or uses it
FIXED = ("task", "resnet", "base_channels", "norm", "image_size", "hu_window", "spacing", "orientation")
COLUMNS = ("path_column", "time_column", "event_column", "id_column")
SPLIT = ("fold_column", "train_fold", "val_fold", "folds")


def check_modes(parser: Parser, args: argparse.Namespace) -> None:
    """End with one line where flags ask for two things at once, or for one without what it needs."""
    if args.max_grad_norm is not None:
        if args.source["grad_clip"] != "default" and args.grad_clip != args.max_grad_norm:
            parser.error("--max_grad_norm and --grad_clip are the same thing; give one")
        args.grad_clip = args.max_grad_norm
    if args.amp and args.mixed_precision == "no":
        parser.error("--amp and --mixed_precision no exclude each other")
    # args.yaml holds --mixed_precision alone
    args.amp = False

    # one mode at a time
    if args.csv_path is None and not args.predict and not args.rehearse:
        parser.error("--csv_path: name the table of cases")
    if args.overwrite and (args.resume_from or args.eval_only or args.predict):
        parser.error("--overwrite starts afresh and excludes --resume_from, --eval_only and --predict")
    if args.eval_only and args.predict:
        parser.error("--eval_only and --predict exclude each other")
    if args.cross_validate and (args.eval_only or args.predict or args.task == "pretrain"):
        parser.error("--cross_validate trains survival models; leave out --eval_only, --predict and --task pretrain")
    if args.cross_validate and args.resume_from not in (None, "auto"):
        parser.error("--cross_validate has one checkpoint per fold; resume with --resume_from auto")

    # what needs or excludes another flag
    if (args.init == "pretrained") != (args.pretrained_path is not None):
        parser.error("--init pretrained and --pretrained_path go together")
    if args.use_smart_cache and args.event_balanced:
        parser.error("--event_balanced draws from the whole fold and --use_smart_cache from a part; leave one out")


def check_values(parser: Parser, args: argparse.Namespace) -> None:
    """End with one line where a value cannot be; orientation and horizons are brought into their usual form."""
    if args.folds == 1:
        parser.error("--folds 1: there must be at least 2")
    if args.base_channels % 8:
        parser.error(f"--base_channels {args.base_channels}: must be a multiple of 8")
    if args.hu_window[0] >= args.hu_window[1]:
        parser.error("--hu_window: the first value must be below the second")
    if args.eta_min > args.lr:
        parser.error(f"--eta_min {args.eta_min:g}: must not be above --lr {args.lr:g}")
    args.eval_years = sorted(set(args.eval_years))

    # one letter of each of the three axes, in any order
    if args.orientation is not None:
        args.orientation = args.orientation.upper()
        axes = {"R": 0, "L": 0, "A": 1, "P": 1, "S": 2, "I": 2}
        if sorted(axes.get(letter, 3) for letter in args.orientation) != [0, 1, 2]:
            parser.error(f"--orientation {args.orientation}: three letters, one each of R/L, A/P and S/I, such as RAS")


# --- once a checkpoint is there ---------------------------------------------------------------------------------------


def adopt_settings(args: argparse.Namespace, checkpoint: dict, path: str) -> None:
    """Take model and input settings from a checkpoint. Raises InputError where a flag says otherwise."""
    if args.source["seed"] == "default":
        args.seed = checkpoint["run"]["seed"]
    settings = checkpoint["settings"]
    for name in FIXED if args.cross_validate else FIXED + SPLIT:
        now = getattr(args, name)
        value = settings.get(name, now)
        given = args.source[name] != "default"
        # another fold, such as --val_fold test: its cases are compared with those trained on
        if name in SPLIT and args.eval_only and given:
            continue
        if given and now != value:
            raise InputError(f"{path}: a run with --{name} {value}, now {now}; leave the flag out")
        setattr(args, name, value)


def check_settings(args: argparse.Namespace) -> None:
    """What does not go together, once a checkpoint has had its say. Raises InputError."""
    if args.cox_memory and args.task == "pretrain":
        raise InputError("--cox_memory: belongs to the Cox loss; leave it out with --task pretrain")
    if args.norm == "batch" and args.gradient_accumulation_steps > 1:
        raise InputError("--norm batch: accumulation would take its statistics from parts of a batch; use --norm group")
    if args.norm == "batch" and args.auto_batch:
        raise InputError("--norm batch: --auto_batch would change its statistics; use --norm group, or choose a batch")
