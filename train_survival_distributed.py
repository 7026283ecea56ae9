"""Survival from 3D CT: a NIfTI volume in, one log-hazard of a major adverse cardiac event (MACE) out (guide 2).

    python train_survival_distributed.py --csv_path data/dataset.csv            # every GPU; all else found by itself
    python train_survival_distributed.py --csv_path data/dataset.csv --world_size 1             # one GPU, or CPU
    torchrun --nproc_per_node=4 train_survival_distributed.py --csv_path data/dataset.csv
    ./launch_distributed_training.sh --script train_survival_distributed.py --csv_path data/dataset.csv
    python -m torch.distributed.launch --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> \\
        --master_port=12355 train_survival_distributed.py --csv_path data/dataset.csv   # --node_rank=1 on node 1
    python train_survival_distributed.py --csv_path data/dataset.csv --cross_validate
    python train_survival_distributed.py --predict new.csv --resume_from runs/survival/best.pt

Data: a table (CSV or xlsx) with a path, a time, an event (1) or censoring (0) and a fold for each case, and CT volumes.
"""

import argparse
import contextlib
import csv
import gc
import hashlib
import io
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cli_utils import (
    InputError,
    Parser,
    RunError,
    add_common_arguments,
    number,
    parse_arguments,
    run_main,
    save_args,
    take_from_run,
    value_sources,
    whole,
)

FORMAT = "survival/1"
LOSSES = ["loss", "events", "grad_norm", "skipped"]
# the score that best.pt is chosen by, and what is drawn of each epoch
HEADLINE = {"survival": "c_index", "pretrain": "r2"}
CURVES = {"survival": ("loss", "c_index", "c_index_uno", "auc"), "pretrain": ("loss", "r2")}
NETS = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
# after a checkpoint's name: its score is optimistic
CHOSEN = "(chosen on this fold)"
# cases per forward pass of an evaluation: the same at any world size, so that results are too
EVAL_BATCH = 4
# what a checkpoint prescribes to a run that is resumed from it or uses it
FIXED = ("task", "resnet", "base_channels", "norm", "image_size", "hu_window", "spacing", "orientation")
COLUMNS = ("path_column", "time_column", "event_column", "id_column")
SPLIT = ("fold_column", "train_fold", "val_fold", "folds")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument_group("data").add_argument
    text = "needed, but with --eval_only or --predict of a run: table of cases, CSV (comma, semicolon, tab) or xlsx"
    add("--csv_path", metavar="FILE", help=text)
    add("--data_dir", metavar="DIR", help="folder that the paths are relative to; default: the table's own")
    add("--time_unit", choices=("days", "months", "years"), default="days", help="unit of the time column")

    # the columns of the table
    for kind, names in (("path", "NIFTI Path"), ("time", "time, survival_time"), ("event", "event")):
        add(
            f"--{kind}_column", metavar="NAME", help=f"its name, if not one of: {names} (case, spaces, _ do not matter)"
        )
    add("--id_column", metavar="NAME", help="the patient's column, if not case_num, patient_id, case_id or case")

    # what is trained on, and what is validated on
    add("--fold_column", default="Fold_1", help="column that says which fold a row belongs to")
    add("--train_fold", default="train", help="its value for training rows; rows with other values are left out")
    add("--val_fold", help="its value for validation rows, left out: val; with --folds: which fold, left out: 1")
    add(
        "--folds", type=whole(0), default=0, help="make so many folds by --seed, events spread evenly; 0: --fold_column"
    )
    text = "train and validate on each fold in turn (--folds, or columns Fold_1, Fold_2 ...), and pool the predictions "
    text += "of the last epoch's weights"
    add("--cross_validate", action="store_true", help=text)

    # what becomes of a volume
    text = "voxels of the net's input along the file's X, Y and Z; lower them on OOM"
    add("--image_size", type=whole(8), nargs=3, default=[256, 256, 64], metavar=("X", "Y", "Z"), help=text)
    text = "HU that become 0 and 1; what lies outside is cut off"
    add("--hu_window", type=number(-1e5), nargs=2, default=[-1000.0, 1000.0], metavar=("LOW", "HIGH"), help=text)
    text = "resample to voxels of so many mm first; default: as in the file"
    add("--spacing", type=number(0, above=True), nargs=3, metavar=("X", "Y", "Z"), help=text)
    text = (
        "turn the axes to these directions first, for sets of mixed orientations: RAS, LPS ...; default: as in the file"
    )
    add("--orientation", metavar="CODES", help=text)
    add("--augment", action=argparse.BooleanOptionalAction, default=True, help="random flips and quarter turns")
    add("--skip_data_check", action="store_true", help="do not read every volume once before training")

    add = parser.add_argument_group("cache").add_argument
    text = "volumes at the net's size: persistent keeps them on disk in --cache_dir (2 bytes a voxel: 8 MB each at "
    add("--cache", choices=("persistent", "none"), default="persistent", help=text + "256 x 256 x 64), none reads anew")
    add("--cache_dir", default="runs/cache/survival", help="where; shared by all ranks and runs, may be deleted")
    text = (
        "training cases from a part kept in memory that changes each epoch, each rank its own (MONAI SmartCache); for "
    )
    add("--use_smart_cache", action="store_true", help=text + "sets larger than memory and disk cache")
    text = "share of a rank's cases in memory; lower it when RAM is short"
    add("--cache_rate", type=number(0, 1, above=True), default=0.5, help=text)
    text = "share of the cached cases replaced after each epoch"
    add("--replace_rate", type=number(0, 1, above=True), default=0.5, help=text)
    add("--pin_memory", action="store_true", help="page-locked input buffers; on by itself with a GPU")

    add = parser.add_argument_group("model").add_argument
    text = "survival: log-hazard by Cox; pretrain: the numeric columns of the table by squared error, to start from"
    add(
        "--feature_columns",
        nargs="+",
        metavar="NAME",
        help="columns that --task pretrain learns; left out: all numeric",
    )
    add("--task", choices=("survival", "pretrain"), default="survival", help=text)
    add("--resnet", choices=NETS, default="resnet50", help="MONAI's 3D ResNet; a smaller one on OOM")

    # the size of the model, and where its weights come from
    text = "channels of its first stage; 64 is the published net, 8 or 16 for a trial on a CPU"
    add("--base_channels", type=whole(8), default=64, help=text)
    text = "group: the same answer on any number of GPUs; batch: as published, statistics over the batch of all GPUs"
    add("--norm", choices=("group", "batch"), default="group", help=text)
    add("--init", choices=("random", "pretrained"), default="random", help="pretrained: from --pretrained_path")
    text = "weights to start from: model.safetensors or a checkpoint of a run here, or a MedicalNet .pth; what does not"
    add("--pretrained_path", metavar="FILE", help=text + " fit the head is replaced")
    add("--freeze_epochs", type=whole(0), default=0, help="first epochs in which only the head learns")

    add = parser.add_argument_group("optimisation").add_argument
    text = "cases per step over ALL GPUs together, split evenly: a multiple of their number (left out: the nearest one "
    text += "to 24, which is another batch with 5 GPUs); lower it on OOM"
    add("--batch_size", type=whole(1), default=24, help=text)
    add(
        "--epochs",
        type=whole(1),
        default=50,
        help="passes over the training fold (with SmartCache: over what is cached)",
    )

    # the optimizer and its learning rate
    add("--lr", type=number(0, above=True), default=1e-4, help="peak learning rate; not scaled with the GPUs")
    add("--optimizer", choices=("adamw", "adam", "sgd"), default="adamw", help="sgd with momentum 0.9")
    add("--weight_decay", type=number(0), default=1e-5, help="weight decay")
    add("--scheduler", choices=("cosine", "constant"), default="cosine", help="learning rate after the warm-up")
    add("--eta_min", type=number(0), default=1e-7, help="learning rate at the end of the cosine")
    add("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up")
    add("--max_grad_norm", type=number(0), help="the same as --grad_clip")

    # the Cox loss
    add("--ties", choices=("efron", "breslow"), default="efron", help="how the Cox loss treats equal event times")
    text = "keep the last N log-hazards as additional risk set, for small batches; 0: only the batch"
    add("--cox_memory", type=whole(0), default=0, metavar="N", help=text)
    add("--event_balanced", action="store_true", help="put events into every step, as evenly as can be")

    add = parser.add_argument_group("output and evaluation").add_argument
    add("--log_dir", "--output", default="runs/survival", help="run folder: checkpoints, logs, figures, predictions")
    add(
        "--eval_years", type=number(0, above=True), nargs="+", default=[1.0, 2.0, 3.0, 4.0, 5.0], help="horizons, years"
    )
    text = (
        "score the cases of another table by --resume_from (default best.pt of --log_dir) into predictions_<name>.csv"
    )
    add("--predict", metavar="FILE", help=text)
    add("--amp", action="store_true", help="mixed precision, the same as the default --mixed_precision auto")
    text = "nccl for GPUs, gloo for CPUs; default: what fits"
    add("--backend", choices=("nccl", "gloo"), help=text)

    # in place of the common help and default
    add_common_arguments(parser, {"lr": "learning_rate"})
    workers = next(action for action in parser._actions if action.dest == "num_workers")
    workers.help = "data loading processes PER GPU (with SmartCache: threads); left out: up to 4 by the cores, on CPU 0"
    workers.help += "%(default).0s"

    args = parse_arguments(parser, argv)
    args.source = value_sources(parser, args, argv)
    if args.eval_only or args.predict:
        of_the_data = () if args.predict else ("csv_path", "data_dir", "time_unit", "cache_dir")
        take_from_run(parser, args, args.log_dir, of_the_data + COLUMNS)
    merge_aliases(parser, args)
    check_modes(parser, args)
    check_values(parser, args)
    return args


def merge_aliases(parser: Parser, args: argparse.Namespace) -> None:
    """Flags that say the same as a common one; args.yaml holds the common one alone."""
    if args.max_grad_norm is not None:
        if args.source["grad_clip"] != "default" and args.grad_clip != args.max_grad_norm:
            parser.error("--max_grad_norm and --grad_clip are the same thing; give one")
        args.grad_clip = args.max_grad_norm
    if args.amp and args.mixed_precision == "no":
        parser.error("--amp and --mixed_precision no exclude each other")
    args.amp = False


def check_modes(parser: Parser, args: argparse.Namespace) -> None:
    """End with one line where flags ask for two things at once, or for one without what it needs."""
    if args.csv_path is None and not args.predict and not args.rehearse:
        parser.error("--csv_path: name the table of cases")
    if args.overwrite and (args.resume_from or args.eval_only or args.predict):
        parser.error("--overwrite starts afresh and excludes --resume_from, --eval_only and --predict")
    if args.eval_only and args.predict:
        parser.error("--eval_only and --predict exclude each other")

    # a cross-validation is a training of its own kind
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


# before the heavy imports: --help and a mistyped flag answer at once
if __name__ == "__main__":
    ARGS = parse_args()

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import fixed_order_utils
from checkpoint_utils import (
    begin_afresh,
    check_run_folder,
    export_weights,
    finish_deleting,
    load_checkpoint,
    load_trained,
    lock_run_folder,
    prepare_checkpoint,
    trained_state,
)
from distributed_utils import (
    Ranks,
    agree_on_errors,
    broadcast_object,
    create_distributed_dataloader,
    gather_objects,
    launch_workers,
    print_main,
    reduce_max,
    reduce_sum,
    schedule,
    setup_distributed,
    world,
    wrap_in_ddp,
)
from figure_utils import figure_text
from hardware_utils import (
    GroupNorm,
    autocast,
    available_ram_gb,
    choose_precision,
    set_numerics,
    smaller_batch,
    split_batch,
    usable_cores,
)
from logging_utils import RunLog, print_table, save_figure, write_result
from loop_utils import (
    LossScaler,
    Progress,
    Step,
    TrainingRun,
    agree_on_precision,
    clip_and_step,
    end_epoch,
    end_step,
    explain_out_of_memory,
    finish_run,
    keep_best,
    next_epoch,
    optimizer_steps,
    print_start,
    restore_training,
    resume,
    say_if_finished,
    say_where,
    seed_ranks,
    sync_gradients,
)
from manifest_utils import file_sha256, write_atomically
from memory_utils import BatchSize, auto_batch_advice, batch_flags, fit_batch_to_memory, fits_by_itself
from tasks.survival.data import (
    Cohort,
    MultiGPUSurvivalDataset,
    Split,
    augment,
    check_volumes,
    choose_splits,
    read_cohort,
)
from tasks.survival.metrics import (
    breslow_baseline,
    concordance,
    draw_survival,
    draw_volumes,
    easiest_and_hardest,
    kaplan_meier,
    log_cumulative_hazard,
    pairs_in_order,
    score,
    survival_at,
)

# --- model ------------------------------------------------------------------------------------------------------------


class PaddedShortcut(nn.Module):
    """MedicalNet's shortcut of type A: every second voxel, new channels zero. MONAI's own cuts the gradient here."""

    def __init__(self, planes: int, stride: int):
        super().__init__()
        self.planes = planes
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[..., :: self.stride, :: self.stride, :: self.stride]
        return nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, self.planes - x.shape[1]))


class RiskNet(nn.Module):
    """MONAI's 3D ResNet and a linear head: (B, 1, X, Y, Z) in 0..1 -> (B, outputs) fp32; one output: the log-hazard."""

    def __init__(self, args: argparse.Namespace, precision: str, outputs: int, shortcut: str = "B"):
        super().__init__()
        from monai.networks import nets

        self.precision = precision
        resnet = getattr(nets, args.resnet)
        self.backbone = resnet(
            spatial_dims=3,
            n_input_channels=1,
            feed_forward=False,
            bias_downsample=False,
            shortcut_type=shortcut,
            widen_factor=args.base_channels / 64,
        )
        self.backbone.maxpool = fixed_order_utils.MaxPool3d(kernel_size=3, stride=2, padding=1)
        if args.norm == "group":
            self.use_group_norm()
        if shortcut == "A":
            self.use_padded_shortcuts()

        # the head begins near zero, so that all cases begin with about the same risk
        width = 8 * args.base_channels * (4 if args.resnet in NETS[3:] else 1)
        self.head = nn.Linear(width, outputs)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def use_group_norm(self) -> None:
        """Group instead of batch normalization everywhere: MONAI's `norm` argument reaches the first layer only."""
        for module in list(self.backbone.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.BatchNorm3d):
                    setattr(module, name, GroupNorm(8, child.num_features))

    def use_padded_shortcuts(self) -> None:
        """MedicalNet's shortcuts, which have a gradient, in place of MONAI's."""
        backbone = self.backbone
        for stage in (backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4):
            shortcut = stage[0].downsample
            if shortcut is not None:
                stage[0].downsample = PaddedShortcut(shortcut.keywords["planes"], shortcut.keywords["stride"])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # the head's fp32, whatever autocast does between
        dtype = self.head.weight.dtype
        with autocast(images.device, self.precision):
            images = images.to(dtype).contiguous(memory_format=torch.channels_last_3d)
            return self.head(self.backbone(images)).to(dtype)


def build_model(args: argparse.Namespace, precision: str, outputs: int, names, ranks: Ranks) -> RiskNet:
    """The model with the same random weights on every rank.

    names: those of the weights that will be loaded, if any; without a `downsample` among them the shortcuts are
    MedicalNet's type A. Raises InputError for --norm batch on several CPU processes.
    """
    torch.manual_seed(args.seed)
    has_projections = any("downsample" in name for name in names or [])
    shortcut = "A" if names and not has_projections and args.resnet in NETS[:3] else "B"
    model = RiskNet(args, precision, outputs, shortcut)
    if args.norm == "batch" and ranks.world_size > 1:
        if ranks.device.type == "cpu":
            raise InputError("--norm batch: statistics over several processes need GPUs; use --norm group")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(ranks.device, memory_format=torch.channels_last_3d)


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """--pretrained_path: {name as in RiskNet: tensor} of a safetensors file, a checkpoint, or MedicalNet's .pth.

    Raises InputError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if Path(path).is_dir():
        path = str(Path(path) / "model.safetensors")
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; check --pretrained_path")

    try:
        if path.endswith(".safetensors"):
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
            for part in ("model", "state_dict"):
                weights = weights[part] if isinstance(weights.get(part), dict) else weights
    except (OSError, SafetensorError, AttributeError, RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a readable file of weights ({reason}); check --pretrained_path") from None
    except Exception as error:
        # pickle has errors of its own
        raise InputError(f"{path}: not a file of tensors ({type(error).__name__}); check --pretrained_path") from None

    # DDP's prefix goes, and MedicalNet's file is a backbone alone
    named = {}
    for name, value in weights.items():
        if isinstance(value, torch.Tensor):
            name = str(name).removeprefix("module.")
            own = name.startswith(("backbone.", "head."))
            named[name if own else f"backbone.{name}"] = value
    return named


def use_weights(model: RiskNet, weights: dict[str, torch.Tensor], path: str) -> None:
    """Load the backbone, and the head where its shape fits. Raises InputError when a part of the backbone does not."""
    own = model.state_dict()
    head = ["head.weight", "head.bias"]
    if {"backbone.fc.weight", "backbone.fc.bias"} <= weights.keys():
        weights["head.weight"] = weights["backbone.fc.weight"]
        weights["head.bias"] = weights["backbone.fc.bias"]
    head_fits = all(name in weights and weights[name].shape == own[name].shape for name in head)

    # all of the backbone must be there
    wanted = [name for name in own if not name.startswith("head.") and "num_batches" not in name]
    for name in wanted:
        needed = tuple(own[name].shape)
        given = tuple(weights[name].shape) if name in weights else "not there"
        if given != needed:
            reason = f"weights of another net ({name}: {given}, needed {needed})"
            raise InputError(f"{path}: {reason}; check --resnet, --base_channels and --norm")

    used = wanted + head if head_fits else wanted
    model.load_state_dict({name: weights[name] for name in used}, strict=False)
    print_main(f"weights from {path}; the head is {'kept' if head_fits else 'new'}, the optimizer starts anew")


# --- loss -------------------------------------------------------------------------------------------------------------


def cox_loss(
    log_hazard: torch.Tensor,
    time: torch.Tensor,
    event: torch.Tensor,
    ties: str = "efron",
    extra: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Negative Cox partial log-likelihood per event: Efron (1977) or Breslow (1974) for tied event times.

    log_hazard (n,) on any device; time (n,) and event (n,) bool on the CPU, so that nothing waits for the GPU; extra:
    (log_hazard (m,), time (m,)) of cases that count as being at risk only. Half precision is raised to fp32. Without
    an event the result is 0, connected to the input.
    """
    if log_hazard.dtype != torch.float64:
        log_hazard = log_hazard.float()
    device = log_hazard.device
    rows = torch.nonzero(event)[:, 0]
    if not len(rows):
        return (log_hazard * 0).sum()

    # the hazard of all who are at risk at each event
    at_risk = log_hazard
    all_times = time
    if extra is not None:
        at_risk = torch.cat([log_hazard, extra[0].to(log_hazard)])
        all_times = torch.cat([time, extra[1]])
    event_times = time[rows]
    outside = (all_times < event_times[:, None]).to(device, non_blocking=True)
    own = log_hazard[rows.to(device, non_blocking=True)]
    total = at_risk.expand(len(rows), -1).masked_fill(outside, -torch.inf).logsumexp(1)

    # of d tied events the l-th (from 0) sees only 1 - l/d of their hazard
    if ties == "efron":
        tied = event_times == event_times[:, None]
        before = tied.tril(-1).sum(1).double() / tied.sum(1)
        before = before.to(total.dtype).to(device, non_blocking=True)
        untied = (~tied).to(device, non_blocking=True)
        together = own.expand(len(rows), -1).masked_fill(untied, -torch.inf).logsumexp(1)
        total = total + torch.log1p(-before * (together - total).exp())
    return (total - own).sum() / len(rows)


def standardize_features(cohort: Cohort, train: np.ndarray, chosen: list[str] | None) -> tuple[list[str], torch.Tensor]:
    """--task pretrain: (columns, z-scores (cases, columns)), by mean and spread of the training fold.

    chosen: --feature_columns; None for all numeric columns. One that does not vary is left out. Raises InputError.
    """
    names = list(chosen or cohort.features)
    unknown = [name for name in names if name not in cohort.features]
    if unknown:
        reason = f"no column {unknown[0]!r} with numbers (or blanks) alone"
        there = ", ".join(cohort.features)
        raise InputError(f"{cohort.source}: {reason}; there are {there}; see --feature_columns")

    values = np.stack([cohort.features[name] for name in names] or [np.zeros(len(cohort))], axis=1)
    known = [column[np.isfinite(column)] for column in values[train].T]
    keep = [k for k, column in enumerate(known) if len(column) > 1 and column.std() > 0]
    if not keep:
        reason = "no numeric column that varies in the training fold"
        raise InputError(f"{cohort.source}: {reason}; --task pretrain needs some")

    mean = np.array([known[k].mean() for k in keep])
    spread = np.array([known[k].std() for k in keep])
    scores = torch.from_numpy((values[:, keep] - mean) / spread).float()
    return [names[k] for k in keep], scores


class Target:
    """What a step's outputs are compared with: the survival times of the cases, or their z-scored features.

    outputs: how many the model has. names, value: the features' columns and z-scores, with --task pretrain.
    """

    def __init__(self, cohort: Cohort, train: np.ndarray, args: argparse.Namespace):
        self.task = args.task
        self.ties = args.ties
        self.time = torch.from_numpy(cohort.time)
        self.event = torch.from_numpy(cohort.event)
        self.outputs = 1
        if args.task == "pretrain":
            self.names, self.value = standardize_features(cohort, train, args.feature_columns)
            self.outputs = len(self.names)

    def loss(self, outputs: torch.Tensor, rows: np.ndarray, extra=None) -> torch.Tensor:
        """Loss of (n, outputs) for these rows of the cohort: Cox, or the mean square over the known features."""
        rows = torch.from_numpy(rows)
        if self.task == "survival":
            return cox_loss(outputs[:, 0], self.time[rows], self.event[rows], self.ties, extra)
        value = self.value[rows]
        known = value.isfinite()
        share = (known / max(1, int(known.sum()))).to(outputs.device, non_blocking=True)
        value = value.nan_to_num(0).to(outputs.device, non_blocking=True)
        return ((outputs - value).square() * share).sum()

    def events(self, rows: np.ndarray) -> float:
        """How many of these rows have an event; 0 where that is not the task."""
        return float(self.event[torch.from_numpy(rows)].sum()) if self.task == "survival" else 0.0


class CoxMemory:
    """--cox_memory: the last N log-hazards (detached) and whose they are; a function of the steps, not of the ranks."""

    def __init__(self, size: int, device: torch.device):
        self.size = size
        self.rows = np.zeros(0, np.int64)
        self.values = torch.zeros(0, device=device)

    def others(self, rows: np.ndarray, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(log_hazard, time) of what is kept, without the cases in `rows`; None without any."""
        keep = np.flatnonzero(~np.isin(self.rows, rows))
        if not len(keep):
            return None
        return self.at(keep), times[torch.from_numpy(self.rows[keep])]

    def at(self, places: np.ndarray) -> torch.Tensor:
        """The log-hazards at some places of the memory."""
        return self.values[torch.from_numpy(places).to(self.values.device, non_blocking=True)]

    def add(self, rows: np.ndarray, values: torch.Tensor) -> None:
        """Keep a step's log-hazards; what is older than the last N goes."""
        if not self.size:
            return
        # those of a step that was skipped are no part of any sum
        values = torch.where(values.isfinite(), values, -torch.inf)
        stays = np.flatnonzero(~np.isin(self.rows, rows))
        kept = self.at(stays)
        self.rows = np.concatenate([self.rows[stays], rows])[-self.size :]
        self.values = torch.cat([kept, values])[-self.size :]

    def state(self) -> dict:
        return {"rows": self.rows.tolist(), "values": self.values.cpu()}

    def restore(self, state: dict) -> None:
        self.rows = np.array(state["rows"], np.int64)
        self.values = state["values"].to(self.values.device)


# --- training ---------------------------------------------------------------------------------------------------------


class Learner(NamedTuple):
    """What the steps of a training change, and a checkpoint keeps."""

    model: RiskNet
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    memory: CoxMemory


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """The fused form of --optimizer over all parameters, those that are frozen at first included."""
    parameters = list(model.parameters())
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    if args.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    optimizer = torch.optim.SGD(parameters, lr=args.lr, weight_decay=args.weight_decay, momentum=0.9, fused=True)
    # fused SGD fails where some have a momentum and others, unfrozen later, none
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def wrap_model(model: RiskNet, frozen: bool) -> nn.Module:
    """The model for one stretch of epochs: the backbone frozen or not, in DDP where there are several processes."""
    model.backbone.requires_grad_(not frozen)
    if world()[1] == 1:
        return model
    return wrap_in_ddp(model, model.head.weight.device)


def rows_of_step(step: Step) -> list[float]:
    """This rank's part of the list of a step's cases: their rows in the cohort, and zero in the others' places."""
    local = [row for batch in step.batches for row in batch["index"].tolist()][: step.local]
    rows = [0.0] * step.samples
    rows[step.first : step.first + len(local)] = local
    return rows


def lr_of_step(step: int, planned_steps: int, args: argparse.Namespace) -> float:
    """Learning rate of an optimizer step (from 0): warm-up from zero, then from --lr towards --eta_min."""
    factor = schedule(step, planned_steps, args.warmup_steps, args.scheduler)
    lowest = args.eta_min if step >= args.warmup_steps else 0.0
    return lowest + (args.lr - lowest) * factor


def images_of(batch: dict, device: torch.device, epoch: int, args: argparse.Namespace) -> torch.Tensor:
    """A micro-batch's images on the device, augmented as in this epoch."""
    images = batch["image"].to(device, non_blocking=True)
    if not args.augment:
        return images
    return augment(images, batch["index"].tolist(), args.seed, epoch)


def train_step(
    wrapped: nn.Module,
    model: RiskNet,
    step: Step,
    load: Callable[[dict], torch.Tensor],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    scaler: torch.amp.GradScaler,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of one optimizer step, the same at any number of ranks and micro-batches; returns (loss, outputs).

    The Cox loss has no parts that add up: each case's risk set is the whole batch. So the outputs of all ranks are put
    together, every rank takes the loss of them all, and sends its own cases' part of the gradient back through its
    model. Micro-batches are first passed forward without memory, then again one by one. A rank without a share passes
    one case of no weight. load: a micro-batch's images. loss_of: the loss of all cases' outputs.
    """
    images = [load(batch) for batch in step.batches]
    if len(images) == 1:
        passed = [wrapped(images[0])]
    else:
        with torch.no_grad():
            passed = [model(batch) for batch in images]

    # the outputs of all ranks, and the loss of them all
    local = torch.cat([output.detach() for output in passed])
    outputs = local.new_zeros(step.samples, local.shape[1])
    outputs[step.first : step.first + step.local] = local[: step.local]
    outputs = reduce_sum(outputs).requires_grad_()
    loss = loss_of(outputs)
    loss.backward()

    # a non-finite loss must give non-finite gradients, which reach every rank: all skip the step together
    grad = outputs.grad * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
    # DDP averages over the ranks; these are parts of a sum, so undo the division
    grad = scaler.scale(grad * world()[1])
    grad = grad[step.first : step.first + step.local] if step.local else grad[:1] * 0

    # this rank's part of the gradient, back through its model
    for k, batch in enumerate(images, start=1):
        with sync_gradients(wrapped, now=k == len(images)):
            output = passed[0] if len(images) == 1 else wrapped(batch)
            output.backward(grad[: len(output)])
        grad = grad[len(output) :]
    return loss.detach(), outputs.detach()


def train_one_epoch(
    wrapped: nn.Module,
    learner: Learner,
    target: Target,
    loader: DataLoader,
    training: TrainingRun,
    args: argparse.Namespace,
) -> None:
    """Train from the run's position to the end of the epoch, of the run, or to a stop signal.

    wrapped: the model, or DDP around it. Between log lines nothing is read back from the GPU. Raises InputError on all
    ranks for an unreadable volume of any.
    """
    # kernels of 1 x 1 x 1 have two layouts at once
    warnings.filterwarnings("ignore", message="Grad strides do not match")
    model, optimizer, scaler, memory = learner
    progress = training.progress
    model.train()
    if progress.epoch < args.freeze_epochs:
        model.backbone.eval()
    load = partial(images_of, device=model.head.weight.device, epoch=progress.epoch, args=args)

    for step in optimizer_steps(loader, training, count=rows_of_step):
        rows = np.array(step.totals, np.int64)
        lr = lr_of_step(progress.step, training.planned_steps, args)

        # forward and backward: the risk set of each event is the global batch, with what --cox_memory keeps
        loss_of = partial(target.loss, rows=rows, extra=memory.others(rows, target.time))
        with training.log.count_flops(step.samples):
            loss, outputs = train_step(wrapped, model, step, load, loss_of, scaler)
        memory.add(rows, outputs[:, 0])

        # update the weights; a non-finite gradient skips the step on all ranks together
        grad_norm = clip_and_step(optimizer, scaler, args.grad_clip, lr)

        # loss and events are the same on all ranks, so that rank 0 alone enters them into the sum
        losses = torch.stack([loss, torch.full_like(loss, target.events(rows))])
        if world()[0] > 0:
            losses = torch.zeros_like(losses)
        end_step(training, step, losses, grad_norm, lr)


# --- evaluation -------------------------------------------------------------------------------------------------------


class Fold(NamedTuple):
    """A split of the cohort and what is learned on it."""

    cohort: Cohort
    split: Split
    target: Target

    @property
    def train(self) -> np.ndarray:
        """Rows of the cohort that are trained on."""
        return self.split.train

    @property
    def val(self) -> np.ndarray:
        """Rows of the cohort that are validated on."""
        return self.split.val


class Predictions(NamedTuple):
    """What a model predicts for a fold.

    val, train: (cases, outputs) float64; train is None where it was not asked for. baseline: the training fold's
    baseline hazard and `until`, its last time in years; None where no survival probabilities were asked for.
    """

    val: np.ndarray
    train: np.ndarray | None
    baseline: dict | None

    @property
    def log_hazard(self) -> np.ndarray:
        """Of the validation cases."""
        return self.val[:, 0]


def make_dataset(
    cohort: Cohort, rows: np.ndarray, args: argparse.Namespace, train: bool = False
) -> MultiGPUSurvivalDataset:
    """The cases of some rows of the cohort, as the flags say; SmartCache for training only."""
    smart = train and args.use_smart_cache
    keep_on_disk = args.cache == "persistent" and not smart

    # an unreadable volume is told in its batch, so that all ranks end together
    return MultiGPUSurvivalDataset(
        cohort,
        rows=rows,
        image_size=args.image_size,
        window=args.hu_window,
        spacing=args.spacing,
        orientation=args.orientation,
        use_smart_cache=smart,
        cache_rate=args.cache_rate,
        replace_rate=args.replace_rate,
        num_workers=args.num_workers,
        seed=args.seed,
        event_balanced=train and args.event_balanced,
        cache_dir=args.cache_dir if keep_on_disk else None,
        raise_errors=False,
    )


@torch.no_grad()
def compute_outputs(model: RiskNet, data: MultiGPUSurvivalDataset, workers: int) -> np.ndarray:
    """(n, outputs) float64 of every case, in order and the same on all ranks.

    Raises InputError on all ranks for an unreadable volume, RunError when an output is not finite.
    """
    model.eval()
    device = model.head.weight.device
    loader = create_distributed_dataloader(data, EVAL_BATCH, train=False, num_workers=workers)
    outputs = torch.zeros(len(data), model.head.out_features, dtype=torch.float64)
    error = ""
    for places, batch in zip(loader.batch_sampler, loader, strict=True):
        error = error or next((reason for reason in batch["error"] if reason), "")
        images = batch["image"].to(device, non_blocking=True)
        outputs[places] = model(images).double().cpu()

    with agree_on_errors():
        if error:
            raise InputError(error)
    outputs = reduce_sum(outputs).numpy()
    finite = np.isfinite(outputs).all(axis=1)
    if not finite.all():
        raise RunError(f"{int((~finite).sum())} predictions are not finite; lower --lr")
    return outputs


def evaluate(
    model: RiskNet, fold: Fold, args: argparse.Namespace, final: bool = False
) -> tuple[dict[str, float | None], Predictions]:
    """Metrics and predictions of the validation fold, the same on all ranks.

    final: also the training fold, whose baseline hazard gives survival probabilities, and the bootstrap interval.
    """
    # no fork beside SmartCache's thread
    workers = args.num_workers if final or not args.use_smart_cache else 0
    val = compute_outputs(model, make_dataset(fold.cohort, fold.val, args), workers)
    train = None
    if final and args.task == "survival":
        train = compute_outputs(model, make_dataset(fold.cohort, fold.train, args), workers)

    # rank 0 computes and tells the others, so that all take the same decisions
    metrics = None
    baseline = None
    if world()[0] == 0:
        metrics = {"val/loss": float(fold.target.loss(torch.from_numpy(val), fold.val))}
        if train is not None:
            baseline = fit_baseline(fold, train[:, 0])
        if args.task == "survival":
            metrics |= score_survival(fold, val[:, 0], baseline, args.eval_years)
        else:
            metrics |= score_features(fold, val)
    metrics, baseline = broadcast_object((metrics, baseline))
    return metrics, Predictions(val, train, baseline)


def fit_baseline(fold: Fold, log_hazard: np.ndarray) -> dict:
    """The baseline hazard of the training fold, with `until`, its last time in years."""
    event = fold.cohort.event[fold.train]
    time = fold.cohort.time[fold.train]
    return breslow_baseline(log_hazard, event, time) | {"until": float(time.max())}


def score_survival(
    fold: Fold, log_hazard: np.ndarray, baseline: dict | None, years: list[float]
) -> dict[str, float | None]:
    """Metrics of the validation fold's log-hazards; with a baseline also those of probabilities, and the interval."""
    cohort = fold.cohort
    event = cohort.event[fold.val]
    time = cohort.time[fold.val]
    scores = score(
        log_hazard,
        event,
        time,
        cohort.event[fold.train],
        cohort.time[fold.train],
        years,
        survival=partial(survival_at, baseline, log_hazard) if baseline else None,
        final=baseline is not None,
    )

    # of made-up data one knows what can be reached
    metrics = {f"val/{name}": value for name, value in scores.items()}
    if baseline:
        metrics |= score_true_risk(cohort, fold.val)
    return metrics


def score_true_risk(cohort: Cohort, rows: np.ndarray) -> dict[str, float | None]:
    """What the risk that made-up data were drawn with would reach on these rows; empty for other data."""
    if cohort.true_risk is None or not np.isfinite(cohort.true_risk[rows]).all():
        return {}
    return {"val/c_index_true": concordance(cohort.true_risk[rows], cohort.event[rows], cohort.time[rows])}


def score_features(fold: Fold, outputs: np.ndarray) -> dict[str, float | None]:
    """--task pretrain: R2 of each feature over the cases that have it, and their mean; None where undefined."""
    target = fold.target
    values = target.value[fold.val].double().numpy()
    metrics = {}
    for name, value, output in zip(target.names, values.T, outputs.T, strict=True):
        known = np.isfinite(value)
        spread = np.square(value[known] - value[known].mean()).sum() if known.any() else 0.0
        left = np.square(value[known] - output[known]).sum()
        metrics[f"val/r2/{name}"] = float(1 - left / spread) if spread > 0 else None
    scores = [value for value in metrics.values() if value is not None]
    metrics["val/r2"] = sum(scores) / len(scores) if scores else None
    return metrics


# --- what is printed, written and drawn -------------------------------------------------------------------------------


def print_metrics(title: str, metrics: dict[str, float | None], years: list[float]) -> None:
    """Two tables: the scores of the whole fold, and those of each horizon."""
    cells = {name: "undefined" if value is None else value for name, value in metrics.items()}
    whole = {name.removeprefix("val/"): {"value": value} for name, value in cells.items() if name.count("/") == 1}
    whole.pop("best_step", None)
    print_table(title, whole)
    if "val/c_index" not in metrics:
        return
    names = [name for name in ("auc", "brier", "brier_km") if f"val/{name}/{years[0]:g}y" in metrics]
    horizons = {f"{year:g} years": {name: cells[f"val/{name}/{year:g}y"] for name in names} for year in years}
    print_table(f"{title}: horizons", horizons)


def predictions_table(cohort: Cohort, parts: list[tuple], years: list[float]) -> bytes:
    """CSV: case, fold, time and event where known, log_hazard, S(t) at each horizon (blank beyond the follow-up).

    parts: (fold name, rows of the cohort, log_hazard, baseline or None).
    """
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    horizons = [f"S({year:g}y)" for year in years]
    table.writerow(["case", "fold", "time_years", "event", "log_hazard", *horizons])
    for fold, rows, log_hazard, baseline in parts:
        survival = np.zeros((len(rows), len(years)))
        until = -math.inf
        if baseline:
            survival = survival_at(baseline, log_hazard, years)
            until = baseline["until"]

        # new cases have no outcome yet
        for i, value, chances in zip(rows, log_hazard, survival, strict=True):
            outcome = ["", ""]
            if len(cohort.time):
                outcome = [f"{cohort.time[i]:.6f}", int(cohort.event[i])]
            cells = [f"{chance:.6f}" if year <= until else "" for year, chance in zip(years, chances, strict=True)]
            table.writerow([cohort.case[i], fold, *outcome, f"{value:.9g}", *cells])
    return text.getvalue().encode()


def draw_cases(cohort: Cohort, rows: np.ndarray, log_hazard: np.ndarray, args: argparse.Namespace):
    """A matplotlib figure: slices of the cases ordered best and worst among the validation cases."""
    volumes = make_dataset(cohort, rows, args).volumes
    event = cohort.event[rows]
    time = cohort.time[rows]
    best, worst = easiest_and_hardest(log_hazard, event, time)
    share, pairs = pairs_in_order(log_hazard, event, time)

    # one column of slices for each case
    images = []
    titles = []
    for name, places in (("best", best), ("worst", worst)):
        for k in places:
            case = figure_text(cohort.case[rows[k]])
            outcome = f"{'event' if event[k] else 'censored'} at {time[k]:.1f} y"
            right = f"{share[k]:.0%} of {pairs[k]} pairs right"
            titles.append(f"{name}: {case}\n{right}\n{outcome}\nlog-hazard {log_hazard[k]:.2f}")
            images.append(volumes.get(cohort.path[rows[k]])[0].float().numpy())

    heading = "validation cases that are most often (best) and least often (worst) in the right order with others:\n"
    heading += "of two cases, the one whose event is known to come first should have the higher log-hazard"
    return draw_volumes(images, titles, heading)


def draw_inputs(fold: Fold, args: argparse.Namespace):
    """A matplotlib figure: six training cases as the model sees them."""
    rows = fold.train
    places = np.linspace(0, len(rows) - 1, min(6, len(rows))).astype(int)
    chosen = [int(i) for i in rows[places]]
    data = make_dataset(fold.cohort, rows, args)
    images = torch.stack([data.load(i)["image"] for i in chosen])
    heading = "training cases as the net sees them"
    if args.augment:
        images = augment(images, chosen, args.seed, 0)
        heading += ", flipped and turned at random"
    titles = [f"case {figure_text(fold.cohort.case[i])}" for i in chosen]
    return draw_volumes([image[0].float().numpy() for image in images], titles, heading)


def draw_results(fold: Fold, predictions: Predictions, args: argparse.Namespace) -> dict:
    """{name: matplotlib figure} of the validation fold."""
    cohort = fold.cohort
    event = cohort.event[fold.val]
    time = cohort.time[fold.val]
    log_hazard = predictions.log_hazard
    survival = partial(survival_at, predictions.baseline, log_hazard)
    training = (cohort.event[fold.train], cohort.time[fold.train])
    heading = f"validation on {figure_text(fold.split.name)}"
    figure = draw_survival(log_hazard, event, time, args.eval_years, survival, training, heading)
    figures = {"val_survival": figure}

    # no case is right or wrong without a pair to compare
    if concordance(log_hazard, event, time) is not None:
        figures["val_cases"] = draw_cases(cohort, fold.val, log_hazard, args)
    return figures


def digest_cases(cohort: Cohort, rows: np.ndarray) -> str:
    """Names a set of cases with their outcomes, in whatever order."""
    cases = sorted((cohort.case[i], float(cohort.time[i]), bool(cohort.event[i])) for i in rows)
    return hashlib.sha256(repr(cases).encode()).hexdigest()[:12]


def read_baselines(path: Path) -> dict:
    """{sha256 of a checkpoint: its baseline hazard}; empty without a readable file."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        kept = None
    return kept if isinstance(kept, dict) else {}


def add_baseline(path: Path, baseline: dict) -> None:
    """Rank 0: keep a checkpoint's baseline hazard for --predict: baseline.json beside it, under its sha256."""
    file = path.parent / "baseline.json"
    kept = read_baselines(file) | {file_sha256(path): baseline}
    write_result(file, (json.dumps(kept) + "\n").encode())


def write_results(
    fold: Fold, predictions: Predictions, checkpoint: dict, used: Path, run_folder: Path, years: list[float]
) -> None:
    """Rank 0: predictions.csv of both folds, and the baseline hazard of the checkpoint that was used.

    used: the file that the weights are in; checkpoint: one of the same training.
    """
    cohort = fold.cohort
    if checkpoint["run"]["training_data"] == digest_cases(cohort, fold.train):
        add_baseline(used, predictions.baseline)
    else:
        print(f"warning: {used} was trained on other cases than {cohort.source} has; some may be among those evaluated")
    parts = [
        ("val", fold.val, predictions.log_hazard, predictions.baseline),
        ("train", fold.train, predictions.train[:, 0], predictions.baseline),
    ]
    write_result(run_folder / "predictions.csv", predictions_table(cohort, parts, years))


# --- the run ----------------------------------------------------------------------------------------------------------


class Setup(NamedTuple):
    """What follows from the machine and the flags, the same for every fold.

    precision_reason: for the banner. batch: of one process, as the flags ask for it.
    """

    ranks: Ranks
    precision: str
    precision_reason: str
    batch: BatchSize


def cases_per_process(args: argparse.Namespace, world_size: int) -> int:
    """One process's share of --batch_size, to the nearest where no flag gave it."""
    if args.source["batch_size"] == "default":
        return max(1, round(args.batch_size / world_size))
    return args.batch_size // world_size


def wanted_batch(args: argparse.Namespace, world_size: int) -> BatchSize:
    """The batch of the flags. Raises InputError when --batch_size cannot be split evenly."""
    size = cases_per_process(args, world_size)
    source = args.source["batch_size"]
    if source != "default" and args.batch_size % world_size:
        low = size * world_size
        near = f"{low} or {low + world_size}" if low else str(world_size)
        reason = f"the total over {world_size} processes cannot be split evenly"
        raise InputError(f"--batch_size {args.batch_size}: {reason}; take {near}")
    return BatchSize(size, args.gradient_accumulation_steps, source)


def choose_workers(args: argparse.Namespace, ranks: Ranks) -> int:
    """Set --num_workers where no flag did; returns this node's cores per process."""
    node = platform.node()
    processes = gather_objects(node).count(node)
    share = max(1, usable_cores() // processes)
    if args.source["num_workers"] == "default":
        loads_beside = ranks.device.type == "cuda" or args.use_smart_cache
        args.num_workers = min(4, share) if loads_beside else 0
        args.source["num_workers"] = "hardware"
    return share


def largest_batch(batch_size: int, args: argparse.Namespace) -> dict:
    """A made-up batch, on the host, of cases that all have an event, each at a time of its own."""
    cases = torch.arange(batch_size)
    return {
        "image": torch.zeros(batch_size, 1, *args.image_size, dtype=torch.float16),
        "index": cases,
        "error": [""] * batch_size,
        "time": 1.0 + cases,
        "event": torch.ones(batch_size, dtype=torch.bool),
    }


def trial_step(model: RiskNet, batch: dict, args: argparse.Namespace, waiting: int = 0) -> None:
    """Forward and backward pass of one micro-batch, as train_step makes it; the gradients stay in the model.

    waiting: cases of the step's other micro-batches, whose images are on the device meanwhile.
    """
    images = images_of(batch, model.head.weight.device, epoch=0, args=args)

    # with micro-batches, all images are on the device and all outputs are computed before the gradients
    others = images.new_empty(waiting, *images.shape[1:])
    model.train()
    if waiting:
        with torch.no_grad():
            model(images)

    output = model(images)
    values = output.detach().requires_grad_()
    if args.task == "survival":
        loss = cox_loss(values[:, 0], batch["time"], batch["event"], args.ties)
    else:
        loss = values.square().mean()
    loss.backward()
    output.backward(values.grad)
    del others


def choose_batch_size(
    model: RiskNet, checkpoint: dict | None, wanted: BatchSize, args: argparse.Namespace
) -> BatchSize:
    """The batch of the flags, or what a step leaves room for."""
    # the statistics of --norm batch depend on how the batch is split
    if args.norm == "batch" or not fits_by_itself(args.auto_batch, model.head.weight.device):
        return wanted
    cases = wanted.size * wanted.accumulation

    def try_once(size: int) -> None:
        trial_step(model, largest_batch(size, args), args, cases - size)

    words = partial(batch_flags, processes=world()[1])
    advice = "pass a smaller --image_size or --resnet"
    return fit_batch_to_memory(try_once, model, wanted, words, advice, checkpoint=checkpoint)


def out_of_memory_advice(size: int, accumulation: int, args: argparse.Namespace, ranks: Ranks) -> str:
    """The flags that take less memory than this batch of one process."""
    processes = ranks.world_size
    smaller_size, more_steps = split_batch(size, accumulation)
    smaller = batch_flags(smaller_size, more_steps, processes=processes)
    otherwise = "a smaller --image_size or --resnet" + auto_batch_advice(args.auto_batch, ranks.device)
    batch = f"--batch_size {size * processes} over {processes} processes"
    return f"{batch}; try {smaller} (the same result), {otherwise}"


def check_flags(args: argparse.Namespace) -> None:
    """What does not go together, once a checkpoint has had its say. Raises InputError."""
    if args.cox_memory and args.task == "pretrain":
        raise InputError("--cox_memory: belongs to the Cox loss; leave it out with --task pretrain")
    if args.norm == "batch" and args.gradient_accumulation_steps > 1:
        raise InputError("--norm batch: accumulation would take its statistics from parts of a batch; use --norm group")
    if args.norm == "batch" and args.auto_batch:
        raise InputError("--norm batch: --auto_batch would change its statistics; use --norm group, or choose a batch")


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


def begin_fold(
    cohort: Cohort, split: Split, checkpoint: dict | None, setup: Setup, args: argparse.Namespace
) -> tuple[Fold, RiskNet, MultiGPUSurvivalDataset]:
    """All ranks: what is learned on a split, the model to begin or resume with, and the training cases."""
    with agree_on_errors():
        fold = Fold(cohort, split, Target(cohort, split.train, args))
        data = make_dataset(cohort, split.train, args, train=True)
        weights = None
        if checkpoint:
            weights = checkpoint["model"]
        elif args.init == "pretrained":
            weights = read_weights(args.pretrained_path)
        model = build_model(args, setup.precision, fold.target.outputs, weights, setup.ranks)
        if checkpoint:
            load_trained(model, weights)
        elif weights is not None:
            use_weights(model, weights, args.pretrained_path)
    return fold, model, data


def make_loader(data: MultiGPUSurvivalDataset, batch: BatchSize, args: argparse.Namespace) -> DataLoader:
    """The training cases of this rank. Raises InputError for a batch larger than an epoch."""
    loader = create_distributed_dataloader(
        data,
        batch.size,
        seed=args.seed,
        num_workers=0 if args.use_smart_cache else args.num_workers,
        accumulation=batch.accumulation,
        drop_last=args.norm == "batch",
    )
    sampler = loader.batch_sampler
    if not sampler.steps_per_epoch():
        total = batch.size * world()[1]
        raise InputError(f"--batch_size {total}: larger than the {sampler.num_samples} cases of an epoch; lower it")
    return loader


def describe_data(fold: Fold, effective_batch_size: int, args: argparse.Namespace) -> dict:
    """What may not differ between a run and one that is resumed from it."""
    smart_cache = "off"
    if args.use_smart_cache:
        smart_cache = f"rates and processes {[args.cache_rate, args.replace_rate, world()[1]]}"
    return {
        "training_cases": len(fold.train),
        "effective_batch_size": effective_batch_size,
        "seed": args.seed,
        "optimizer": args.optimizer,
        "event_balanced": args.event_balanced,
        "training_data": digest_cases(fold.cohort, fold.train),
        "smart_cache": smart_cache,
    }


def describe_cache(data: MultiGPUSurvivalDataset, cases: int, args: argparse.Namespace) -> str:
    """One line: cached share, memory it will take, epochs until all is seen."""
    one = data.volumes.bytes() / 2**30
    if data.mine is not None:
        part = f"{data.cached} of {len(data.mine)} cases of each rank ({data.cached / len(data.mine):.0%})"
        memory = f"{data.cached * one:.2f} GB of memory a rank"
        epochs = data.epochs_until_all_seen()
        return f"SmartCache: {part}, {memory}, {data.replaced} replaced an epoch, all seen after {epochs} epochs"
    if args.cache == "none":
        return "none: each volume is read anew in each epoch"
    size = f"{cases * one:.2f} GB, no memory"
    return f"100% on disk in {args.cache_dir}, {size}; filled in the first epoch, which sees all"


def describe_run(
    fold: Fold,
    data: MultiGPUSurvivalDataset,
    model: RiskNet,
    batch: BatchSize,
    training: TrainingRun,
    setup: Setup,
    args: argparse.Namespace,
) -> dict[str, str]:
    """The banner's rows of this script."""
    cohort = fold.cohort
    follow_up = cohort.time[fold.train]
    events = int(cohort.event[fold.train].sum())
    left_out = len(cohort) - len(fold.train) - len(fold.val)
    patients = "no column for them (--id_column): each row counts as one"
    if cohort.id_name:
        patients = f"{len(set(cohort.case))} by column {cohort.id_name!r}"
    loss = f"Cox, {args.ties} ties"
    if args.task == "pretrain":
        loss = f"mean square of {fold.target.outputs} features: {', '.join(fold.target.names)}"
    parameters = sum(parameter.numel() for parameter in model.parameters())

    # where a value is not a flag's, the row says where it is from
    origin = args.source
    processes = setup.ranks.world_size
    source = batch.source.replace(" did", " per process did")
    rows = {
        "batch": f"{batch.size * processes} in all ({source}) = {batch.size} per process x {processes}; "
        f"x {batch.accumulation} accumulation = {training.effective_batch_size}",
        "learning rate": f"{args.lr:g} ({origin['lr']}), {args.scheduler}, not scaled",
        "precision": setup.precision_reason,
        "loading": f"{args.num_workers} {'threads' if args.use_smart_cache else 'workers'} per process "
        f"({origin['num_workers']})",
        "cache": describe_cache(data, len(fold.train) + len(fold.val), args),
    }

    # what is learned of whom
    return rows | {
        "cases": f"{len(fold.train)} training ({events} events), {len(fold.val)} validation "
        f"({int(cohort.event[fold.val].sum())} events), {fold.split.name}, {left_out} rows left out",
        "patients": patients,
        "follow-up": f"{follow_up.min():.2f} to {follow_up.max():.2f} years in the training fold",
        "model": f"{args.resnet}, {parameters:,} parameters, {args.norm} norm, input "
        + " x ".join(map(str, args.image_size)),
        "loss": loss,
        "epochs": f"{args.epochs} ({origin['epochs']}) of {training.planned_steps // args.epochs} steps",
    }


def print_warnings(fold: Fold, data: MultiGPUSurvivalDataset, steps: int, args: argparse.Namespace) -> None:
    """Rank 0: what will probably go wrong, or was not meant so. steps: of an epoch."""
    event = fold.cohort.event
    time = fold.cohort.time
    if args.use_smart_cache:
        needed = data.cached * data.volumes.bytes() / 2**30
        there = available_ram_gb()
        if needed > there:
            reason = f"the smart cache takes {needed:.1f} GB for each process, {there:.1f} GB are available"
            print_main(f"warning: {reason}; lower --cache_rate")

    if args.eval_years[0] >= min(time[fold.train].max(), time[fold.val].max()):
        print_main("warning: all --eval_years lie beyond the follow-up; is --time_unit right?")

    events = int(event[fold.train].sum())
    if args.event_balanced and events < steps:
        least = math.ceil(len(fold.train) / events)
        print_main(f"{events} events for {steps} steps: some have none; all have from --batch_size {least} on")


def checkpoint_contents(
    learner: Learner, fold: Fold, batch: BatchSize, this_run: dict, args: argparse.Namespace
) -> dict:
    """What a checkpoint holds beside the position and the log."""
    return {
        "format": FORMAT,
        "model": trained_state(learner.model, everything=True),
        "optimizer": learner.optimizer.state_dict(),
        "scaler": learner.scaler.state_dict(),
        "memory": learner.memory.state(),
        "run": this_run,
        "split": batch.record(),
        "settings": {name: getattr(args, name) for name in FIXED} | fold.split.flags,
        "trained_cases": sorted({fold.cohort.case[i] for i in fold.train}),
    }


class FoldResult(NamedTuple):
    """What a cross-validation needs of a fold: predictions and scores of its last weights, and those of best.pt.

    signal: exit code of a stop signal that came too late for the fold to heed it, else 0.
    """

    split: Split
    steps: int
    signal: int
    last: Predictions
    best: Predictions
    c_index: float | None
    c_index_best: float | None


def fit(
    cohort: Cohort, split: Split, run_folder: Path, checkpoint: dict | None, setup: Setup, args: argparse.Namespace
) -> tuple[int, FoldResult | None]:
    """Train on one split, validate each epoch, keep checkpoints, evaluate the best; returns (exit code, results).

    The results are those that a cross-validation needs; None without one, and after a stop signal.
    """
    begun = time.time()
    ranks = setup.ranks
    fold, model, data = begin_fold(cohort, split, checkpoint, setup, args)
    batch = choose_batch_size(model, checkpoint, setup.batch, args)
    loader = make_loader(data, batch, args)
    effective_batch_size = loader.batch_sampler.effective_batch_size
    planned_steps = args.epochs * loader.batch_sampler.steps_per_epoch()
    last_step = min(args.max_steps or planned_steps, planned_steps)

    # begin, or resume where the checkpoint stands
    memory = CoxMemory(args.cox_memory, ranks.device)
    learner = Learner(model, make_optimizer(model, args), LossScaler(ranks.device, setup.precision), memory)
    progress = Progress()
    this_run = describe_data(fold, effective_batch_size, args)
    seed_ranks(args.seed)
    if checkpoint:
        resume(progress, checkpoint, this_run, run_folder)
        memory.restore(checkpoint["memory"])
        restore_training(checkpoint, learner.optimizer, learner.scaler, args.weight_decay)

    # the scores of every epoch are drawn as curves; those of the end alone would be single points
    log = RunLog(run_folder, ranks, LOSSES, last_step, args.log_every, setup.precision, args.compile)
    log.open(args, checkpoint)
    log.curves = [f"val/{name}" for name in CURVES[args.task]]
    training = TrainingRun(
        run_folder=run_folder,
        progress=progress,
        last_step=last_step,
        planned_steps=planned_steps,
        effective_batch_size=effective_batch_size,
        precision=setup.precision,
        log=log,
        contents=partial(checkpoint_contents, learner, fold, batch, this_run, args),
        save_every=args.save_every,
        keep_last=args.keep_last,
        max_bad_steps=args.max_bad_steps,
    )
    prepare_checkpoint(model)

    title = "SURVIVAL" if args.task == "survival" else "SURVIVAL: PRE-TRAINING"
    print_start(title, ranks, training, describe_run(fold, data, model, batch, training, setup, args))
    print_warnings(fold, data, planned_steps // args.epochs, args)
    if args.compile:
        model.compile()

    # SmartCache's thread ends with the training; the evaluations after it read all cases
    advice = partial(out_of_memory_advice, batch.size, batch.accumulation, args, ranks)
    with training.stop, contextlib.closing(log), explain_out_of_memory(advice):
        with contextlib.closing(data):
            code, value = train(learner, fold, loader, training, args)
        if code:
            return code, None
        return 0, finish_fold(model, fold, training, value, begun, args)


def train(
    learner: Learner, fold: Fold, loader: DataLoader, training: TrainingRun, args: argparse.Namespace
) -> tuple[int, float | None]:
    """All epochs, each with its validation; (exit code of a stop signal or 0, headline score of the last epoch)."""
    progress = training.progress
    model = learner.model
    # the evaluations of a run with SmartCache have no loading processes: read the fold once, in parallel
    if args.use_smart_cache:
        make_dataset(fold.cohort, fold.val, args).read_ahead()
    say_if_finished(training, "--epochs")
    if progress.step == 0:
        training.log.figures(lambda: {"train_inputs": draw_inputs(fold, args)}, 0)

    wrapped = None
    while True:
        # the backbone is trained from --freeze_epochs on: another DDP, one at a time on these parameters
        if wrapped is None or progress.epoch == args.freeze_epochs:
            wrapped = None
            gc.collect()
            wrapped = wrap_model(model, frozen=progress.epoch < args.freeze_epochs)
            training.log.forget_flops()
        train_one_epoch(wrapped, learner, fold.target, loader, training, args)
        if code := end_epoch(training):
            return code, None

        metrics, _ = evaluate(model, fold, args)
        training.log.write(progress.step, progress.epoch + 1, metrics)
        headline = HEADLINE[args.task]
        value = metrics[f"val/{headline}"]
        loss = metrics["val/loss"]
        told = "undefined" if value is None else f"{value:.4f}"
        print_main(f"epoch {progress.epoch + 1}: val {headline} {told}, loss {loss:.4f}")
        epoch_complete = progress.samples >= loader.batch_sampler.used
        keep_best(training, -loss if value is None else value, epoch_complete)
        if not next_epoch(training):
            return 0, value


def finish_fold(
    model: RiskNet, fold: Fold, training: TrainingRun, last_value: float | None, begun: float, args: argparse.Namespace
) -> FoldResult | None:
    """Score and export the weights of best.pt, in a cross-validation those of the last epoch; the end of the log.

    last_value: headline score of the last epoch. begun: time.time() at the start.
    """
    run_folder = training.run_folder
    progress = training.progress
    headline = f"val/{HEADLINE[args.task]}"
    if args.cross_validate:
        metrics, last = evaluate(model, fold, args, final=True)
        export_weights(trained_state(model, everything=True), run_folder / "model.safetensors")

    checkpoint = load_checkpoint(str(run_folder / "best.pt"), run_folder, FORMAT)
    load_trained(model, checkpoint["model"])
    best_metrics, best = evaluate(model, fold, args, final=True)
    # best.pt was chosen on the fold that is scored, so that a cross-validation may not be scored by it
    if args.cross_validate:
        metrics[f"{headline}_best"] = best_metrics[headline]
        scored = last
    else:
        metrics = best_metrics | {f"{headline}_last": last_value}
        scored = best
        export_weights(checkpoint["model"], run_folder / "model.safetensors")

    training.log.write(progress.step, progress.epoch + 1, metrics | {"best_step": checkpoint["step"]})
    finish_run(training, begun, {})
    if world()[0] == 0:
        title = "val, last epoch" if args.cross_validate else f"val, best.pt {CHOSEN}"
        print_metrics(title, metrics, args.eval_years)
        if args.task == "survival":
            if args.cross_validate:
                add_baseline(run_folder / "best.pt", best.baseline)
            used = run_folder / ("last.pt" if args.cross_validate else "best.pt")
            write_results(fold, scored, checkpoint, used, run_folder, args.eval_years)
            training.log.figures(lambda: draw_results(fold, scored, args), progress.step)
    say_where(run_folder)
    if not args.cross_validate:
        return None
    return FoldResult(
        split=fold.split,
        steps=progress.step,
        signal=int(reduce_max([training.stop.code])[0]),
        last=last,
        best=best,
        c_index=metrics["val/c_index"],
        c_index_best=metrics["val/c_index_best"],
    )


# --- cross-validation -------------------------------------------------------------------------------------------------


def cross_validate(
    cohort: Cohort, splits: list[Split], run_folder: Path, setup: Setup, args: argparse.Namespace
) -> int:
    """Each fold in a folder of its own, then the metrics of all predictions together; returns the exit code.

    Predictions, baseline hazards and metrics are of the last epoch's weights: each fold's best.pt was chosen by its
    score on that same fold. What best.pt would have reached stands beside, as `c_index_best`.
    """
    begun = time.time()
    lock = begin_cross_validation(run_folder, args)
    results = []
    for k, split in enumerate(splits, start=1):
        print_main(f"fold {k} of {len(splits)}: {split.name}")
        code, result = fit_fold(cohort, split, run_folder / f"fold_{k}", setup, args)
        if code:
            return code
        if result.signal and k < len(splits):
            return result.signal
        results.append(result)

    if setup.ranks.is_main:
        metrics = score_folds(cohort, results, args.eval_years)
        print_folds(metrics, results, args.eval_years)
        write_folds(cohort, results, run_folder, args.eval_years)
        batch = setup.batch
        facts = {
            "steps": sum(result.steps for result in results),
            "epochs": args.epochs,
            "folds": len(splits),
            "world_size": setup.ranks.world_size,
            "effective_batch_size": batch.size * batch.accumulation * setup.ranks.world_size,
            "precision": setup.precision,
            "seconds": round(time.time() - begun, 1),
        }
        write_result(run_folder / "summary.json", (json.dumps(metrics | facts, indent=2) + "\n").encode())

    print_main(f"pooled: {run_folder}/predictions.csv, {run_folder}/summary.json; each fold: {run_folder}/fold_*")
    del lock
    return 0


def begin_cross_validation(run_folder: Path, args: argparse.Namespace):
    """All ranks: lock the folder of all folds and write args.yaml; with --overwrite it is emptied. Returns the lock."""
    with agree_on_errors():
        if (run_folder / "last.pt").exists():
            raise InputError(f"{run_folder}: holds a single run; choose another --log_dir")
    may_exist = bool(args.resume_from) or args.overwrite
    lock = lock_run_folder(run_folder, may_exist, overwrite=args.overwrite)
    with agree_on_errors():
        try:
            if world()[0] == 0:
                # all folds at once: a killed run must find none of the old one
                if args.overwrite:
                    folds = sorted(run_folder.glob("fold_*"))
                    for folder in [run_folder, *folds]:
                        check_run_folder(folder, True, True)
                    begin_afresh(run_folder, tuple(folds))
                # folds of an old run that a kill left while --overwrite deleted them
                finish_deleting(run_folder)
                save_args(run_folder / "args.yaml", args)
        except OSError as error:
            raise InputError(f"{run_folder}: cannot write here ({error.strerror}); choose another --log_dir") from None
    return lock


def fit_fold(
    cohort: Cohort, split: Split, run_folder: Path, setup: Setup, args: argparse.Namespace
) -> tuple[int, FoldResult | None]:
    """Train or resume one fold in its own folder; see fit."""
    may_exist = bool(args.resume_from) or args.overwrite
    lock = lock_run_folder(run_folder, may_exist, overwrite=args.overwrite)
    checkpoint = load_checkpoint(args.resume_from, run_folder, FORMAT, resume=True)
    if checkpoint:
        adopt_settings(args, checkpoint, str(run_folder))
    code, result = fit(cohort, split, run_folder, checkpoint, setup, args)
    del lock
    return code, result


def common_follow_up(results: list[FoldResult]) -> float:
    """The last time, in years, that the training cases of all folds know."""
    return min(result.last.baseline["until"] for result in results)


def pooled_risk(predictions: list[Predictions], until: float) -> np.ndarray:
    """The risks of all folds' validation cases on one scale.

    The models of different folds have log-hazards with different constants. Each fold's baseline hazard makes them
    comparable: taken is the log of the cumulative hazard at `until`, the last time that all folds know.
    """
    return np.concatenate(
        [log_cumulative_hazard(fold.baseline, fold.log_hazard, [until])[:, 0] for fold in predictions]
    )


def survival_of_folds(results: list[FoldResult], at) -> np.ndarray:
    """(cases, times) probabilities of survival of all folds' validation cases."""
    return np.concatenate([survival_at(result.last.baseline, result.last.log_hazard, at) for result in results])


def reference_of_folds(cohort: Cohort, results: list[FoldResult], at) -> np.ndarray:
    """What survival_of_folds is compared with: for each case the Kaplan-Meier curve of its fold's training cases."""
    curves = []
    for result in results:
        train = result.split.train
        curve = kaplan_meier(cohort.event[train], cohort.time[train], at)
        curves.append(np.tile(curve, (len(result.split.val), 1)))
    return np.concatenate(curves)


def score_folds(cohort: Cohort, results: list[FoldResult], years: list[float]) -> dict[str, float | None]:
    """Metrics of all folds' validation cases together, and the scores of each fold."""
    rows = np.concatenate([result.split.val for result in results])
    until = common_follow_up(results)
    event = cohort.event[rows]
    time = cohort.time[rows]

    # each case is validated once, so that the folds' validation cases are a cohort of their own
    scores = score(
        pooled_risk([result.last for result in results], until),
        event,
        time,
        event,
        time,
        years,
        survival=partial(survival_of_folds, results),
        final=True,
        reference=partial(reference_of_folds, cohort, results),
        until=until,
    )
    metrics = {f"val/{name}": value for name, value in scores.items()}
    metrics |= score_true_risk(cohort, rows)

    # the folds one by one, and what best.pt would have reached
    known = [result.c_index for result in results if result.c_index is not None]
    if known:
        metrics["val/c_index_mean"] = float(np.mean(known))
        metrics["val/c_index_sd"] = float(np.std(known))
    for k, result in enumerate(results, start=1):
        metrics[f"val/c_index/fold_{k}"] = result.c_index
    metrics["val/c_index_best"] = concordance(pooled_risk([result.best for result in results], until), event, time)
    for k, result in enumerate(results, start=1):
        metrics[f"val/c_index_best/fold_{k}"] = result.c_index_best
    return metrics


def print_folds(metrics: dict[str, float | None], results: list[FoldResult], years: list[float]) -> None:
    """Rank 0: the pooled metrics, and the scores of each fold."""
    print_metrics(f"{len(results)} folds pooled, last epoch", metrics, years)
    rows = {}
    for result in results:
        row = {"c_index": result.c_index, "c_index_best": result.c_index_best}
        rows[result.split.name] = {name: "undefined" if value is None else value for name, value in row.items()}
    print_table("fold", rows)
    print("c_index_best: of each fold's best.pt, chosen on the same fold and therefore optimistic", flush=True)


def write_folds(cohort: Cohort, results: list[FoldResult], run_folder: Path, years: list[float]) -> None:
    """Rank 0: the predictions and the figure of all folds' validation cases."""
    parts = [(fold.split.name, fold.split.val, fold.last.log_hazard, fold.last.baseline) for fold in results]
    write_result(run_folder / "predictions.csv", predictions_table(cohort, parts, years))

    until = common_follow_up(results)
    rows = np.concatenate([result.split.val for result in results])
    event = cohort.event[rows]
    time = cohort.time[rows]
    risk = pooled_risk([result.last for result in results], until)
    survival = partial(survival_of_folds, results)
    heading = f"{len(results)} folds pooled, last epoch"
    known = [year for year in years if year < until]
    figure = draw_survival(risk, event, time, known, survival, (event, time), heading)
    save_figure(run_folder / "figures" / "survival.png", figure)


# --- what a trained model is used for ---------------------------------------------------------------------------------


def load_model(checkpoint: dict, precision: str, args: argparse.Namespace, ranks: Ranks) -> RiskNet:
    """All ranks: the model of a checkpoint, for evaluation."""
    weights = checkpoint["model"]
    with agree_on_errors():
        model = build_model(args, precision, len(weights["head.bias"]), weights, ranks)
        load_trained(model, weights)
    return model


def predict_new(cohort: Cohort, checkpoint: dict, used: str, setup: Setup, args: argparse.Namespace) -> None:
    """--predict: log-hazards of new cases; S(t) where the run's baseline hazard belongs to this checkpoint."""
    if args.task != "survival":
        raise InputError(f"{used}: a pre-trained net has no log-hazard; give a checkpoint of --task survival")
    rows = np.arange(len(cohort))
    model = load_model(checkpoint, setup.precision, args, setup.ranks)
    outputs = compute_outputs(model, make_dataset(cohort, rows, args), args.num_workers)

    # rank 0 writes; what goes wrong is told to all
    run_folder = Path(args.log_dir)
    path = run_folder / f"predictions_{Path(args.predict).stem}.csv"
    with agree_on_errors():
        if setup.ranks.is_main:
            baseline = read_baselines(Path(used).parent / "baseline.json").get(file_sha256(Path(used)))
            if baseline is None:
                print(f"no baseline hazard of {used}: S(t) stays blank; --eval_only with this checkpoint writes one")
            table = predictions_table(cohort, [("new", rows, outputs[:, 0], baseline)], args.eval_years)
            try:
                run_folder.mkdir(parents=True, exist_ok=True)
                write_atomically(path, lambda file: file.write(table))
            except OSError as error:
                raise InputError(f"{path}: cannot be written ({error.strerror}); choose another --log_dir") from None
            print(f"{len(cohort)} cases: {path}", flush=True)


def evaluate_only(
    cohort: Cohort, split: Split, checkpoint: dict, used: str, setup: Setup, args: argparse.Namespace
) -> None:
    """--eval_only: the metrics of the validation fold in eval_val.json, with all that a run ends with."""
    run_folder = Path(args.log_dir)
    with agree_on_errors():
        target = Target(cohort, split.train, args)
    fold = Fold(cohort, split, target)
    model = load_model(checkpoint, setup.precision, args, setup.ranks)
    trained = set(checkpoint["trained_cases"])
    seen = [i for i in split.val if cohort.case[i] in trained]
    if seen:
        reason = f"case {cohort.case[seen[0]]} and {len(seen) - 1} more of {split.name} were trained on by {used}"
        advice = "evaluate on the fold it was validated on, or on new cases"
        raise InputError(f"{cohort.where(seen[0])}: {reason}; {advice}")
    if target.outputs != model.head.out_features:
        raise InputError(f"{used}: a net of {model.head.out_features} outputs, the table asks {target.outputs}")

    metrics, predictions = evaluate(model, fold, args, final=True)
    if not setup.ranks.is_main:
        return
    same_fold = split.flags.items() <= checkpoint["settings"].items()
    chosen = f" {CHOSEN}" if same_fold and Path(used).name == "best.pt" else ""
    print_metrics(f"val, {Path(used).name}{chosen}", metrics, args.eval_years)
    facts = {**metrics, "step": checkpoint["step"]}
    write_result(run_folder / "eval_val.json", (json.dumps(facts, indent=2) + "\n").encode())
    if args.task == "survival":
        write_results(fold, predictions, checkpoint, Path(used), run_folder, args.eval_years)
        for name, figure in draw_results(fold, predictions, args).items():
            save_figure(run_folder / "figures" / f"{name}.png", figure)
    print(f"{len(split.val)} cases; written: {run_folder}/eval_val.json, {run_folder}/figures", flush=True)


# --- main -------------------------------------------------------------------------------------------------------------


def checkpoint_to_use(args: argparse.Namespace) -> str:
    """--eval_only and --predict: the file of the checkpoint, best.pt where none or a run folder is named."""
    if args.resume_from in (None, "auto"):
        return str(Path(args.log_dir) / "best.pt")
    if Path(args.resume_from).is_dir():
        return str(Path(args.resume_from) / "best.pt")
    return args.resume_from


def read_cases(args: argparse.Namespace, cores: int) -> tuple[Cohort, list[Split]]:
    """All ranks: the table and its splits, none with --predict; every volume that is needed is checked.

    cores: threads that read. Raises InputError.
    """
    with agree_on_errors():
        cohort = read_cohort(
            args.predict or args.csv_path,
            args.data_dir,
            args.time_unit,
            outcome=not args.predict,
            path_column=args.path_column,
            time_column=args.time_column,
            event_column=args.event_column,
            id_column=args.id_column,
        )
        splits = [] if args.predict else choose_splits(cohort, args)

    # rows of no fold are not looked at
    if not args.skip_data_check:
        needed = np.arange(len(cohort))
        if splits:
            needed = np.unique(np.concatenate([rows for split in splits for rows in (split.train, split.val)]))
        print_main(f"checking {len(needed)} volumes ...")
        geometry = bool(args.spacing or args.orientation)
        check_volumes(cohort, needed, Path(args.cache_dir), geometry, cores)
    return cohort, splits


def run(args: argparse.Namespace, ranks: Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun = time.time()
    run_folder = Path(args.log_dir)
    precision, reason = agree_on_precision(partial(choose_precision, args.mixed_precision, ranks.device))
    with agree_on_errors():
        if args.backend == "nccl" and ranks.device.type == "cpu":
            raise InputError("--backend nccl: needs GPUs; leave it out")
    reason = set_numerics(ranks.device, precision, reason, args.deterministic)
    setup = Setup(ranks, precision, reason, wanted_batch(args, ranks.world_size))
    cores = choose_workers(args, ranks)

    # the run folder is ours from here on, where this is a training; each fold of a cross-validation has its own
    checkpoint = None
    lock = None
    used = args.resume_from
    if args.eval_only or args.predict:
        used = checkpoint_to_use(args)
        checkpoint = load_checkpoint(used, run_folder, FORMAT)
    elif not args.cross_validate:
        with agree_on_errors():
            if (run_folder / "fold_1").is_dir():
                raise InputError(f"{run_folder}: holds a cross-validation; give its flags, or choose another --log_dir")
        lock = lock_run_folder(run_folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
        checkpoint = load_checkpoint(args.resume_from, run_folder, FORMAT, resume=True)
    if checkpoint:
        adopt_settings(args, checkpoint, used)
    check_flags(args)

    cohort, splits = read_cases(args, cores)
    if args.predict:
        predict_new(cohort, checkpoint, used, setup, args)
        return 0
    if args.eval_only:
        evaluate_only(cohort, splits[0], checkpoint, used, setup, args)
        return 0
    if args.cross_validate:
        code = cross_validate(cohort, splits, run_folder, setup, args)
    else:
        code, _ = fit(cohort, splits[0], run_folder, checkpoint, setup, args)
    print_main(f"{time.time() - begun:.0f} seconds in all")
    del lock
    return code


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step."""
    import rehearsal_utils as rehearsal

    # --batch_size counts all processes, which are one for each GPU here unless a launcher started them
    here = None if "RANK" in os.environ else torch.cuda.device_count()
    processes = rehearsal.processes_to_plan_for(args.world_size or here)
    memory = rehearsal.memory_to_plan_for(args.gpu_memory)
    cases = max(1, round(args.batch_size / processes))
    accumulation = args.gradient_accumulation_steps
    trace = rehearsal.Trace()
    with rehearsal.imaginary_gpu(trace) as ranks:
        precision, _ = choose_precision(args.mixed_precision, ranks.device)
        set_numerics(ranks.device, precision, "", args.deterministic)
        with ranks.device:
            model = build_model(args, precision, 1, None, ranks)
        trial = partial(trial_step, model, largest_batch(cases, args), args, cases * (accumulation - 1))
        optimizer = make_optimizer(model, args)
        step = rehearsal.rehearse_step(trace, model, optimizer, trial, accumulation, processes)

    def words(samples: int) -> str:
        size, steps = smaller_batch(cases, accumulation, samples)
        flags = batch_flags(size, steps, processes=processes)
        # the Cox loss wants all outputs before the first gradient
        return flags + ", by a third more arithmetic" * (accumulation == 1)

    title = f"survival, {cases} cases per GPU x {accumulation} accumulation, {precision}"
    otherwise = "a smaller --image_size or --resnet"
    if args.norm == "batch":
        # its statistics depend on how the batch is split
        words = None
        otherwise = f"--norm group, {otherwise}"
    rehearsal.report_rehearsal(title, step, cases, memory, words, otherwise)
    rehearsal.end_rehearsal()


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    launch_workers(args.world_size or torch.cuda.device_count() or 1)
    # NCCL has no host tensors: gloo stays beside it
    backend = "gloo" if args.backend == "gloo" else None
    with setup_distributed(backend, timeout=args.dist_timeout) as ranks:
        size = cases_per_process(args, ranks.world_size)
        advice = partial(out_of_memory_advice, size, args.gradient_accumulation_steps, args, ranks)
        with explain_out_of_memory(advice):
            return run(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
