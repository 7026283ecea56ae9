"""Guide 1's command line beside its flags: which exclude each other, where a value is from, and the guide's own keys.

The guide's config, and `python -m old.hardware_utils --json`, have keys that are no flags here. They are arguments
without a help text, which are taken out again before the run. Arguments are parsed before the heavy imports, so there
are none.
"""

import argparse
import json
import os
from pathlib import Path

from old.cli_utils import InputError, Parser, end_with, parse_arguments, read_config
from old.cli_utils import take_from_run, value_sources, whole
from old.question_utils import check_models, check_predict
from old.table_utils import shares_text

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ZERO_FILES = {2: "deepspeed_config.json", 3: "deepspeed_zero3.json"}
# What may stand in the section `training` or `settings`.
TRAINING_KEYS = (
    "batch_size_per_gpu",
    "epochs",
    "learning_rate",
    "weight_decay",
    "warmup_steps",
    "grad_clip",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "prefetch_factor",
    # what hardware_utils prints, too
    "mixed_precision",
    "fp16",
    "dataloader_num_workers",
    "pin_memory",
    "effective_batch_size",
    "engine",
    "zero_stage",
    "offload_optimizer",
)
# {section: {key: argument}}
SECTIONS = {
    "training": {key: key for key in TRAINING_KEYS},
    "settings": {key: key for key in TRAINING_KEYS},
    "deepspeed": {"enabled": "deepspeed_enabled", "stage": "zero_stage"},
}
# in a section it is what came out for so many processes, and no flag
for section in ("training", "settings"):
    SECTIONS[section]["effective_batch_size"] = "derived_batch_size"
# What a run no longer holds once it was translated.
TRANSLATED = (
    "batch_size_per_gpu",
    "fp16",
    "pin_memory",
    "dataloader_num_workers",
    "derived_batch_size",
    "engine",
    "deepspeed_enabled",
    "zero_stage",
)
# What --eval_only takes from the run's args.yaml where no flag says otherwise.
OF_THE_RUN = (
    "mimic_cxr_path",
    "mimic_qa_path",
    "index_dir",
    "image_encoder",
    "text_encoder",
    "quality_grade",
    "view",
    "image_size",
    "fusion_layers",
    "max_question_length",
    "chexpert_uncertain",
    "max_samples",
    "max_missing",
    # which questions are drawn
    "eval_max_samples",
    "seed",
    # of a user's table
    "table",
    "categories",
    "split",
    "split_seed",
)
# What --predict takes of it.
OF_THE_MODEL = (
    "categories",
    "image_encoder",
    "text_encoder",
    "image_size",
    "fusion_layers",
    "max_question_length",
)
# What --debug sets.
DEBUG = {"max_samples": 64, "max_steps": 2, "num_workers": 0, "log_every": 1, "warmup_steps": 0}
# Where a value is from that nothing else may replace.
FLAG_SOURCES = ("command line", "--debug")


def add_engine_flags(parser: Parser) -> None:
    """The flags that say which engine trains, and whether the hardware decides the settings."""
    add = parser.add_argument_group("engine").add_argument
    add("--auto_optimize", action="store_true", default=True, help="batch, workers and checkpointing from the hardware")
    by_hand = "take them from the file and the defaults (--auto_optimize: %(default)s)"
    add("--no_auto_optimize", dest="auto_optimize", action="store_false", help=by_hand)
    add("--use_deepspeed", action="store_true", help="DeepSpeed ZeRO; --auto_optimize's choice for 2 or more processes")
    add("--use_ddp", action="store_true", help="torch DistributedDataParallel")
    add("--deepspeed_config", metavar="FILE", help="DeepSpeed's JSON, used as it is; left out: one of configs/")
    add("--prefetch_factor", type=whole(1), default=2, help="batches each worker prepares; lower it when RAM is short")


def add_table_flags(parser: Parser) -> None:
    """A user's own table instead of both releases, and how it is read."""
    add = parser.add_argument_group("your own table").add_argument
    table = "columns image, question, answer; if wanted patient, split, type, labels; instead of both paths"
    add("--table", metavar="CSV", help=table)
    categories = "classes of the category head; default: CheXpert's names, or the table's own answers"
    add("--categories", nargs="+", metavar="NAME", help=categories)
    shares = "percent of the patients that train, validate and test, where no column says"
    add("--split", type=shares_text, default="70,15,15", metavar="T,V,T", help=shares)
    add("--split_seed", type=int, default=0, help="decides, with the patient's name, the split")


def add_output_flags(parser: Parser) -> None:
    """Where a run writes, and how a trained model is judged."""
    add = parser.add_argument_group("output and evaluation").add_argument
    add("--output_dir", default="runs/mimic_cxr", help="run folder: checkpoints, logs, figures, summary")
    add("--eval_split", choices=("val", "test"), default="test", help="split that --eval_only takes")
    add("--save_predictions", action="store_true", help="write predictions_<split>.parquet beside the metrics")
    heads = ("binary", "category", "region", "severity")
    add("--head", choices=heads, help="what answers --question; left out: as the nearest training question")
    add("--question_type", metavar="NAME", help="what --question is, such as D02_has_finding, in place of --head")
    add("--debug", action="store_true", help="a trial: 64 questions a split, 2 steps, no network, no workers")


def read_arguments(parser: Parser, argv: list[str] | None) -> argparse.Namespace:
    """The command line and --config, with the guide's keys; what cannot be ends the process with one line.

    `source` of what comes back tells where each value is from, which decides whether something else may replace it.
    """
    add_guide_keys(parser)
    args = parse_arguments(parser, argv, SECTIONS)
    args.source = value_sources(parser, args, argv, SECTIONS)
    take_guide_keys(args)
    if args.eval_only:
        take_from_run(parser, args, args.output_dir, OF_THE_RUN)
    if args.predict:
        take_from_run(parser, args, args.output_dir, OF_THE_MODEL)
    check_models(parser, args, ("image_encoder", "text_encoder"))
    check_predict(parser, args)
    check_flags(parser, args)
    if args.debug:
        set_flags(args, DEBUG, "--debug")
        os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    return args


def check_flags(parser: Parser, args: argparse.Namespace) -> None:
    """Flags that exclude each other, and files that must be there."""
    if args.use_deepspeed and args.use_ddp:
        parser.error("--use_deepspeed and --use_ddp exclude each other; give one, or none to let the script choose")
    if args.overwrite and (args.resume_from or args.eval_only):
        parser.error("--overwrite starts afresh and excludes --resume_from and --eval_only")
    if is_given(args, "pretrained_weights") and (args.resume_from or args.eval_only or args.predict):
        parser.error("--pretrained_weights starts a new run and excludes --resume_from, --eval_only and --predict")
    if is_given(args, "deepspeed_config") and args.use_ddp:
        parser.error("--deepspeed_config does not go with --use_ddp; leave one of them out")
    check_table_flags(parser, args)

    # asking, for which the data may be gone
    if args.head and args.question_type:
        parser.error("--head and --question_type exclude each other; give one")
    if (args.head or args.question_type) and not args.predict:
        parser.error("--head and --question_type are about --predict, which is not given")
    needs_no_data = args.rehearse or args.predict or args.table
    for name in ("mimic_cxr_path", "mimic_qa_path") if not needs_no_data else ():
        if not Path(getattr(args, name)).is_dir():
            parser.error(f"{getattr(args, name)}: no such folder; check --{name}")

    # files and folders that are named
    if args.deepspeed_config and not Path(args.deepspeed_config).is_file():
        parser.error(f"{args.deepspeed_config}: no such file; check --deepspeed_config")


def check_table_flags(parser: Parser, args: argparse.Namespace) -> None:
    """A table takes the place of both releases, and its folder is where images lie."""
    for name in ("categories", "split", "split_seed"):
        if is_given(args, name) and not args.table:
            parser.error(f"--{name} is of a table of your own and needs --table")
    if not args.table:
        return
    for name in ("mimic_cxr_path", "mimic_qa_path"):
        if is_given(args, name):
            parser.error(f"--table and --{name} exclude each other; give one")
    if not Path(args.table).is_file():
        parser.error(f"{args.table}: no such file; check --table")
    args.mimic_cxr_path = str(Path(args.table).parent)


def is_given(args: argparse.Namespace, name: str) -> bool:
    """Whether a flag stands on the command line."""
    return args.source[name] == "command line"


def set_flags(args: argparse.Namespace, values: dict, source: str) -> None:
    """Replace flags by {flag: value} from this source, but for those of the command line and of --debug."""
    for name, value in values.items():
        if args.source[name] not in FLAG_SOURCES:
            setattr(args, name, value)
            args.source[name] = source


# --- the guide's keys -------------------------------------------------------------------------------------------------


def add_guide_keys(parser: Parser) -> None:
    """Let a config hold the guide's keys."""

    def add(name: str, **options) -> None:
        parser.add_argument(name, help=argparse.SUPPRESS, **options)

    add("--batch_size_per_gpu", type=whole(1))
    add("--fp16", action=argparse.BooleanOptionalAction)
    add("--pin_memory", action=argparse.BooleanOptionalAction)
    add("--dataloader_num_workers", type=whole(0))
    add("--derived_batch_size", type=whole(1))
    add("--engine", choices=("python", "deepspeed", "torchrun"))
    add("--deepspeed_enabled", action=argparse.BooleanOptionalAction)
    add("--zero_stage", type=int, choices=(0, 2, 3))
    add("--offload_optimizer", action=argparse.BooleanOptionalAction)


def take_guide_keys(args: argparse.Namespace) -> None:
    """Set batch and engine from the guide's keys, where no flag of the command line says otherwise."""
    for key, name in (("batch_size_per_gpu", "batch_size"), ("fp16", "mixed_precision")):
        if getattr(args, key) is not None and args.source[key] == args.source[name]:
            end_with(InputError(f"{args.config or 'command line'}: holds both {key} and {name}; remove one"))
    if args.batch_size_per_gpu is not None and args.source["batch_size"] != "command line":
        args.batch_size = args.batch_size_per_gpu
        args.source["batch_size"] = args.source["batch_size_per_gpu"]
    if "command line" not in (args.source["use_deepspeed"], args.source["use_ddp"]):
        args.use_deepspeed = args.use_deepspeed or args.deepspeed_enabled is True or args.engine == "deepspeed"
        args.use_ddp = args.use_ddp or args.deepspeed_enabled is False or args.engine == "torchrun"
    if args.zero_stage and args.deepspeed_config is None:
        args.deepspeed_config = str(CONFIGS / ZERO_FILES[args.zero_stage])


def translate_guide_keys(args: argparse.Namespace, on_gpu: bool, processes_per_node: int) -> list[str]:
    """Set precision and workers from the guide's keys, now that the processes are counted; a flag stands.

    Returns what to print: what became of each key. args.yaml will hold it under our names alone.
    """
    meanings = {
        "batch_size_per_gpu": f"--batch_size {args.batch_size}{note_other_value(args, 'batch_size')}",
        "fp16": translate_fp16(args, on_gpu),
        "dataloader_num_workers": translate_workers(args, processes_per_node),
        "pin_memory": "nothing to set here: done by itself on a GPU",
        "effective_batch_size": "nothing to set here: batch x accumulation x processes",
        "offload_optimizer": "the optimizer on the CPU, where DeepSpeed trains and no file of it is named",
    }
    if args.offload_optimizer is False:
        meanings["offload_optimizer"] = "no optimizer on the CPU, where no DeepSpeed file is named"
    meanings["engine"] = meanings["enabled"] = describe_engine(args)
    meanings["zero_stage"] = meanings["stage"] = describe_stage(args)

    lines = []
    for key, value in guide_keys(args.config):
        meaning = meanings[key.split(".")[-1]]
        lines.append(f"{Path(args.config).name}: {key} {json.dumps(value)} -> {meaning}")
    for name in TRANSLATED:
        setattr(args, name, None)
    return lines


def translate_fp16(args: argparse.Namespace, on_gpu: bool) -> str:
    """What `fp16` becomes: half precision where there is a GPU."""
    note = note_other_value(args, "mixed_precision")
    if args.fp16 is not None and not note:
        args.mixed_precision = "fp16" if args.fp16 and on_gpu else "no"
        note = " (fp16 needs a GPU)" if args.fp16 and not on_gpu else ""
    return f"--mixed_precision {args.mixed_precision}{note}"


def translate_workers(args: argparse.Namespace, processes_per_node: int) -> str:
    """What `dataloader_num_workers` becomes: the guide counts those of a node, and we those of a process."""
    note = note_other_value(args, "num_workers")
    if args.dataloader_num_workers is not None and args.source["num_workers"] not in FLAG_SOURCES:
        args.num_workers = args.dataloader_num_workers // processes_per_node
        args.source["num_workers"] = args.source["dataloader_num_workers"]
        note = f" (each of the node's {processes_per_node} processes){note_other_value(args, 'num_workers')}"
    return f"--num_workers {args.num_workers}{note}"


def describe_engine(args: argparse.Namespace) -> str:
    """What `engine` and `enabled` become."""
    engine = "one process, or as launched"
    if args.use_deepspeed:
        engine = "--use_deepspeed"
    elif args.use_ddp:
        engine = "--use_ddp"
    return engine + (note_other_value(args, "use_deepspeed") or note_other_value(args, "use_ddp"))


def describe_stage(args: argparse.Namespace) -> str:
    """What `stage` and `zero_stage` become."""
    if not args.deepspeed_config:
        return "nothing to set here: no DeepSpeed"
    file = Path(args.deepspeed_config)
    root = CONFIGS.parent
    shown = file.relative_to(root) if file.is_relative_to(root) else file
    return f"--deepspeed_config {shown}{note_other_value(args, 'deepspeed_config')}"


def note_other_value(args: argparse.Namespace, name: str) -> str:
    """A note where another value than the guide's key will be used: the command line's, or the hardware's."""
    source = args.source[name]
    if source in FLAG_SOURCES:
        return f" ({source})"
    if args.auto_optimize and name in ("batch_size", "num_workers"):
        return ", but --auto_optimize finds its own"
    return ""


def guide_keys(config: str | None) -> list[tuple[str, object]]:
    """[(section.key, value)] of a config's keys that translate_guide_keys explains."""
    explained = {*TRANSLATED, "offload_optimizer", "enabled", "stage"}
    content = read_config(config) if config else {}
    if "batch_size_per_gpu" in content or not SECTIONS.keys().isdisjoint(content):
        # otherwise it is a flag
        explained.add("effective_batch_size")

    pairs = []
    for name, value in content.items():
        values = {name: value}
        if name in SECTIONS:
            values = {f"{name}.{key}": item for key, item in value.items()}
        for key, item in values.items():
            if key.split(".")[-1] in explained and item is not None:
                pairs.append((key, item))
    return pairs
