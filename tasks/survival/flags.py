"""Flags of survival that tell how its table is read, which flags go together, and what a checkpoint prescribes.

Light: read before torch is imported.
"""

from argparse import BooleanOptionalAction, Namespace

from old.cli_utils import InputError, Parser, add_common_arguments, number, whole

# what a checkpoint prescribes to a run that is resumed from it or uses it
INPUT = ("image_size", "hu_window", "spacing", "orientation")
FIXED = ("task", "resnet", "base_channels", "norm", *INPUT)
COLUMNS = ("path_column", "time_column", "event_column", "id_column")
# what --eval_only takes from the run's args.yaml; --predict only the columns
OF_THE_RUN = ("csv_path", "data_dir", "time_unit", "cache_dir", *COLUMNS)
SPLIT = ("fold_column", "train_fold", "val_fold", "folds")


def add_data_arguments(parser: Parser) -> None:
    """The flags of the table of cases and of the volumes: what is read, and what becomes of it."""
    add = parser.add_argument_group("data").add_argument
    add("--csv_path", metavar="FILE", help="table of cases, CSV or xlsx; not needed with --eval_only, --predict")
    add("--data_dir", metavar="DIR", help="folder that the paths are relative to; default: the table's own")
    units = ("days", "months", "years")
    add("--time_unit", choices=units, default="days", help="unit of the time column")

    # its columns
    add("--path_column", metavar="NAME", help="its name, if not NIFTI Path, image_path or path")
    add("--time_column", metavar="NAME", help="its name, if not time or survival_time")
    add("--event_column", metavar="NAME", help="its name, if not event")
    add("--id_column", metavar="NAME", help="the patient's, if not case_num, patient_id, case_id or case")

    # what is trained on, and what is validated on
    add("--fold_column", default="Fold_1", help="column that says which fold a row belongs to")
    add("--train_fold", default="train", help="its value for training rows; other rows are left out")
    add("--val_fold", help="its value for validation rows, default val; with --folds: which fold, default 1")
    text = "make so many folds, events spread evenly; 0: --fold_column"
    add("--folds", type=whole(0), default=0, help=text)
    add("--cross_validate", action="store_true", help="each fold in turn; the predictions are pooled")

    # what becomes of a volume
    xyz = {"nargs": 3, "metavar": ("X", "Y", "Z")}
    size = [256, 256, 64]
    add("--image_size", type=whole(8), **xyz, default=size, help="voxels of the input; lower them on OOM")
    window = {"nargs": 2, "metavar": ("LOW", "HIGH")}
    full = [-1000.0, 1000.0]
    text = "HU that become 0 and 1; the rest is cut off"
    add("--hu_window", type=number(-1e5), **window, default=full, help=text)
    positive = number(0, above=True)
    text = "resample to voxels of so many mm first; default: as in the file"
    add("--spacing", type=positive, **xyz, help=text)
    text = "turn the axes first: RAS, LPS ...; default: as in the file"
    add("--orientation", metavar="CODES", help=text)
    text = "random flips and quarter turns"
    add("--augment", action=BooleanOptionalAction, default=True, help=text)
    add("--skip_data_check", action="store_true", help="do not read every volume once before training")


def add_cache_arguments(parser: Parser) -> None:
    """The flags of what is kept of the volumes, on disk and in memory."""
    add = parser.add_argument_group("cache").add_argument
    places = ("persistent", "none")
    add("--cache", choices=places, default="persistent", help="keep resized volumes on disk, or not")
    text = "where; shared by all ranks and runs, may be deleted"
    add("--cache_dir", default="runs/cache/survival", help=text)
    text = "train from a part in memory that changes each epoch (MONAI)"
    add("--use_smart_cache", action="store_true", help=text)

    # of the smart cache
    rate = number(0, 1, above=True)
    text = "share of a rank's cases in memory; lower it when RAM is short"
    add("--cache_rate", type=rate, default=0.5, help=text)
    text = "share of the cached cases replaced after each epoch"
    add("--replace_rate", type=rate, default=0.5, help=text)
    text = "page-locked input buffers; on by itself with a GPU"
    add("--pin_memory", action="store_true", help=text)


def add_output_arguments(parser: Parser) -> None:
    """The flags of the run folder, of evaluation and of the machine, and those that all scripts have."""
    add = parser.add_argument_group("output and evaluation").add_argument
    text = "run folder: checkpoints, logs, figures, predictions"
    add("--log_dir", "--output", default="runs/survival", help=text)

    # horizons, and what is scored
    years = [1.0, 2.0, 3.0, 4.0, 5.0]
    positive = number(0, above=True)
    add("--eval_years", type=positive, nargs="+", default=years, help="horizons, years")
    add("--predict", metavar="FILE", help="score the cases of this table by --resume_from, default best.pt")
    text = "mixed precision, the same as the default --mixed_precision auto"
    add("--amp", action="store_true", help=text)
    text = "nccl for GPUs, gloo for CPUs; default: what fits"
    add("--backend", choices=("nccl", "gloo"), help=text)

    # in place of the common help and default
    add_common_arguments(parser, {"lr": "learning_rate"})
    actions = {action.dest: action for action in parser._actions}
    workers = actions["num_workers"]
    workers.help = "loading processes PER GPU (SmartCache: threads); default: up to 4, on CPU 0%(default).0s"


# --- what goes together -----------------------------------------------------------------------------------------------


def check_modes(parser: Parser, args: Namespace) -> None:
    """End with one line where flags ask for two things at once, or for one without what it needs."""
    if args.max_grad_norm is not None:
        given = args.source["grad_clip"] != "default"
        if given and args.grad_clip != args.max_grad_norm:
            parser.error("--max_grad_norm and --grad_clip are the same thing; give one")
        args.grad_clip = args.max_grad_norm
    if args.amp and args.mixed_precision == "no":
        parser.error("--amp and --mixed_precision no exclude each other")
    # args.yaml holds --mixed_precision alone
    args.amp = False

    # one mode at a time
    trains = not (args.eval_only or args.predict)
    needs_table = not (args.predict or args.rehearse)
    if needs_table and args.csv_path is None:
        parser.error("--csv_path: name the table of cases")
    if args.overwrite and (args.resume_from or not trains):
        parser.error("--overwrite starts afresh and excludes --resume_from, --eval_only and --predict")
    if args.eval_only and args.predict:
        parser.error("--eval_only and --predict exclude each other")
    if args.cross_validate and (args.task == "pretrain" or not trains):
        parser.error("--cross_validate trains survival models; leave out --eval_only, --predict and --task pretrain")
    resumes_one = args.resume_from not in (None, "auto")
    if args.cross_validate and resumes_one:
        parser.error("--cross_validate has one checkpoint per fold; resume with --resume_from auto")

    # what needs or excludes another flag
    has_weights = args.pretrained_path is not None
    if has_weights != (args.init == "pretrained"):
        parser.error("--init pretrained and --pretrained_path go together")
    if args.use_smart_cache and args.event_balanced:
        parser.error("--event_balanced draws from the whole fold and --use_smart_cache from a part; leave one out")


def check_values(parser: Parser, args: Namespace) -> None:
    """End with one line where a value cannot be; orientation and horizons are brought into their usual form."""
    if args.folds == 1:
        parser.error("--folds 1: there must be at least 2")
    if args.base_channels % 8:
        parser.error(f"--base_channels {args.base_channels}: must be a multiple of 8")
    low, high = args.hu_window
    if low >= high:
        parser.error("--hu_window: the first value must be below the second")
    if args.eta_min > args.lr:
        parser.error(f"--eta_min {args.eta_min:g}: must not be above --lr {args.lr:g}")
    args.eval_years = sorted(set(args.eval_years))

    # one letter of each of the three axes, in any order
    if args.orientation is not None:
        letters = args.orientation.upper()
        args.orientation = letters
        pairs = ("RL", "AP", "SI")
        axes = [pair for pair in pairs if set(pair) & set(letters)]
        if len(letters) != 3 or len(axes) != 3:
            parser.error(f"--orientation {args.orientation}: three letters, one each of R/L, A/P and S/I, such as RAS")


# --- once a checkpoint is there ---------------------------------------------------------------------------------------


def adopt_settings(
    args: Namespace,
    checkpoint: dict,
    path: str,
) -> None:
    """Take model and input settings from a checkpoint. Raises InputError where a flag says otherwise."""
    if args.source["seed"] == "default":
        args.seed = checkpoint["run"]["seed"]
    settings = checkpoint["settings"]
    names = FIXED if args.cross_validate else FIXED + SPLIT
    for name in names:
        now = getattr(args, name)
        value = settings.get(name, now)
        given = args.source[name] != "default"

        # another fold, such as --val_fold test: its cases are compared with those trained on
        may_differ = name in SPLIT and args.eval_only
        if given and may_differ:
            continue
        if given and now != value:
            raise InputError(f"{path}: a run with --{name} {value}, now {now}; leave the flag out")
        setattr(args, name, value)
    if args.predict and args.task != "survival":
        raise InputError(f"{path}: a pre-trained net has no log-hazard; give a checkpoint of --task survival")


def check_settings(args: Namespace) -> None:
    """What does not go together, once a checkpoint has had its say. Raises InputError."""
    if args.cox_memory and args.task == "pretrain":
        raise InputError("--cox_memory: belongs to the Cox loss; leave it out with --task pretrain")
    if args.norm == "batch" and args.gradient_accumulation_steps > 1:
        raise InputError("--norm batch: accumulation would take its statistics from parts of a batch; use --norm group")
    if args.norm == "batch" and args.effective_batch_size:
        raise InputError("--norm batch: --effective_batch_size would change its statistics; use --norm group")
    if args.norm == "batch" and args.auto_batch:
        raise InputError("--norm batch: --auto_batch would change its statistics; use --norm group, or choose a batch")
