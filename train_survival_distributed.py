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
from functools import partial
from pathlib import Path

from cli_utils import (
    InputError,
    Parser,
    RunError,
    add_common_arguments,
    asked,
    number,
    parse_arguments,
    run_main,
    save_args,
    set_derived,
    take_from_run,
    value_sources,
    whole,
)

FORMAT = "survival/1"
LOSSES = ["loss", "events", "grad_norm", "skipped"]
NETS = ("resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
CHOSEN = "(chosen on this fold)"  # after a checkpoint's name: its score is optimistic
EVAL_BATCH = 4  # cases per forward pass of an evaluation: the same at any world size, so that results are too
# what a checkpoint prescribes to a run that goes on from it or uses it
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
    for kind, names in (("path", "NIFTI Path"), ("time", "time, survival_time"), ("event", "event")):
        add(
            f"--{kind}_column", metavar="NAME", help=f"its name, if not one of: {names} (case, spaces, _ do not matter)"
        )
    add("--id_column", metavar="NAME", help="the patient's column, if not case_num, patient_id, case_id or case")
    add("--fold_column", default="Fold_1", help="column that says which fold a row belongs to")
    add("--train_fold", default="train", help="its value for training rows; rows with other values are left out")
    add("--val_fold", help="its value for validation rows, left out: val; with --folds: which fold, left out: 1")
    add(
        "--folds", type=whole(0), default=0, help="make so many folds by --seed, events spread evenly; 0: --fold_column"
    )
    text = "train and validate on each fold in turn (--folds, or columns Fold_1, Fold_2 ...), and pool the predictions "
    text += "of the last epoch's weights"
    add("--cross_validate", action="store_true", help=text)
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
    add("--lr", type=number(0, above=True), default=1e-4, help="peak learning rate; not scaled with the GPUs")
    add("--optimizer", choices=("adamw", "adam", "sgd"), default="adamw", help="sgd with momentum 0.9")
    add("--weight_decay", type=number(0), default=1e-5, help="weight decay")
    add("--scheduler", choices=("cosine", "constant"), default="cosine", help="learning rate after the warm-up")
    add("--eta_min", type=number(0), default=1e-7, help="learning rate at the end of the cosine")
    add("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up")
    add("--max_grad_norm", type=number(0), help="the same as --grad_clip")
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
    add_common_arguments(parser, {"lr": "learning_rate"})
    workers = next(action for action in parser._actions if action.dest == "num_workers")
    workers.help = "data loading processes PER GPU (with SmartCache: threads); left out: up to 4 by the cores, on CPU 0"
    workers.help += "%(default).0s"  # in place of the common default
    args = parse_arguments(parser, argv)
    args.source = value_sources(parser, args, argv)
    if args.eval_only or args.predict:
        of_the_data = () if args.predict else ("csv_path", "data_dir", "time_unit", "cache_dir")
        take_from_run(parser, args, args.log_dir, of_the_data + COLUMNS)
    if args.max_grad_norm is not None:
        if args.source["grad_clip"] != "default" and args.grad_clip != args.max_grad_norm:
            parser.error("--max_grad_norm and --grad_clip are the same thing; give one")
        args.grad_clip = args.max_grad_norm
    if args.amp and args.mixed_precision == "no":
        parser.error("--amp and --mixed_precision no exclude each other")
    args.amp = False  # said by mixed_precision, also in args.yaml
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
    if (args.init == "pretrained") != (args.pretrained_path is not None):
        parser.error("--init pretrained and --pretrained_path go together")
    if args.folds == 1:
        parser.error("--folds 1: there must be at least 2")
    if args.base_channels % 8:
        parser.error(f"--base_channels {args.base_channels}: must be a multiple of 8")
    if args.hu_window[0] >= args.hu_window[1]:
        parser.error("--hu_window: the first value must be below the second")
    if args.eta_min > args.lr:
        parser.error(f"--eta_min {args.eta_min:g}: must not be above --lr {args.lr:g}")
    pairs = ("L", "R"), ("P", "A"), ("I", "S")
    if args.orientation is not None:
        args.orientation = args.orientation.upper()
        if sorted(next((k for k in range(3) if c in pairs[k]), 3) for c in args.orientation) != [0, 1, 2]:
            parser.error(f"--orientation {args.orientation}: three letters, one each of R/L, A/P and S/I, such as RAS")
    if args.use_smart_cache and args.event_balanced:
        parser.error("--event_balanced draws from the whole fold and --use_smart_cache from a part; leave one out")
    args.eval_years = sorted(set(args.eval_years))
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the heavy imports: --help and a mistyped flag answer at once

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import checkpoint_utils as ckpt
import distributed_utils as du
import fixed_order
import hardware_utils as hw
import survival_data as sd
import survival_metrics as sm
from logging_utils import RunLog, figure_text, print_banner, print_table, save_figure, write_result
from old_loop_utils import (
    auto_batch_advice,
    batch_flags,
    fit_batch_to_memory,
    fits_by_itself,
    forget_other_best,
    keep_best,
    say_if_finished,
    say_saved,
    split_record,
)

# --- model ------------------------------------------------------------------------------------------------------------


class PaddedShortcut(nn.Module):
    """MedicalNet's shortcut of type A: every second voxel, new channels zero. MONAI's own cuts the gradient here."""

    def __init__(self, planes: int, stride: int):
        super().__init__()
        self.planes, self.stride = planes, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[..., :: self.stride, :: self.stride, :: self.stride]
        return nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, self.planes - x.shape[1]))


class RiskNet(nn.Module):
    """MONAI's 3D ResNet and a linear head: (B, 1, X, Y, Z) in 0..1 -> (B, outputs) fp32; one output: the log-hazard."""

    def __init__(self, args: argparse.Namespace, outputs: int, shortcut: str = "B"):
        super().__init__()
        from monai.networks import nets

        self.precision = args.mixed_precision
        self.backbone = getattr(nets, args.resnet)(
            spatial_dims=3, n_input_channels=1, feed_forward=False, bias_downsample=False, shortcut_type=shortcut,
            widen_factor=args.base_channels / 64,
        )  # fmt: skip
        self.backbone.maxpool = fixed_order.MaxPool3d(kernel_size=3, stride=2, padding=1)
        for module in list(self.backbone.modules()):
            for name, child in list(module.named_children()):
                # MONAI's `norm` argument reaches the first layer only
                if args.norm == "group" and isinstance(child, nn.BatchNorm3d):
                    setattr(module, name, hw.GroupNorm(8, child.num_features))
        if shortcut == "A":
            for stage in (self.backbone.layer1, self.backbone.layer2, self.backbone.layer3, self.backbone.layer4):
                if (old := stage[0].downsample) is not None:
                    stage[0].downsample = PaddedShortcut(old.keywords["planes"], old.keywords["stride"])
        width = 8 * args.base_channels * (4 if args.resnet in NETS[3:] else 1)
        self.head = nn.Linear(width, outputs)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        dtype = self.head.weight.dtype  # fp32, whatever autocast does between
        with hw.autocast(images.device, self.precision):
            images = images.to(dtype).contiguous(memory_format=torch.channels_last_3d)
            return self.head(self.backbone(images)).to(dtype)


def build_model(args: argparse.Namespace, outputs: int, names, ranks: du.Ranks) -> RiskNet:
    """The net with the same random weights on every rank. names: those of weights that will be loaded, if any; without
    a `downsample` among them the shortcuts are MedicalNet's type A."""
    torch.manual_seed(args.seed)
    plain = names and not any("downsample" in name for name in names) and args.resnet in NETS[:3]
    model = RiskNet(args, outputs, "A" if plain else "B")
    if args.norm == "batch" and ranks.world_size > 1:
        if ranks.device.type == "cpu":
            raise InputError("--norm batch: statistics over several processes need GPUs; use --norm group")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(ranks.device, memory_format=torch.channels_last_3d)


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """--pretrained_path: {name as in RiskNet: tensor} of a safetensors file, a checkpoint, or MedicalNet's .pth."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = str(Path(path) / "model.safetensors") if Path(path).is_dir() else path
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
        text = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise InputError(f"{path}: not a readable file of weights ({text}); check --pretrained_path") from None
    except Exception as error:  # pickle's own errors
        raise InputError(f"{path}: not a file of tensors ({type(error).__name__}); check --pretrained_path") from None
    weights = {str(name).removeprefix("module."): value for name, value in weights.items()}
    weights = {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    return {n if n.startswith(("backbone.", "head.")) else f"backbone.{n}": value for n, value in weights.items()}


def use_weights(model: RiskNet, weights: dict[str, torch.Tensor], path: str) -> None:
    """Load the backbone, and the head where its shape fits. Raises InputError when a part of the backbone does not."""
    own = model.state_dict()
    if {"backbone.fc.weight", "backbone.fc.bias"} <= weights.keys():
        weights |= {f"head.{kind}": weights[f"backbone.fc.{kind}"] for kind in ("weight", "bias")}
    head = all(n in weights and weights[n].shape == own[n].shape for n in ("head.weight", "head.bias"))
    wanted = [name for name in own if not name.startswith("head.") and "num_batches" not in name]
    for name in wanted:
        if name not in weights or weights[name].shape != own[name].shape:
            was = tuple(weights[name].shape) if name in weights else "not there"
            text = f"weights of another net ({name}: {was}, needed {tuple(own[name].shape)})"
            raise InputError(f"{path}: {text}; check --resnet, --base_channels and --norm")
    used = {name: weights[name] for name in (*wanted, *(("head.weight", "head.bias") if head else ()))}
    model.load_state_dict(used, strict=False)
    du.print_main(f"weights from {path}; the head is {'kept' if head else 'new'}, the optimizer starts anew")


# --- loss -------------------------------------------------------------------------------------------------------------


def cox_loss(
    log_hazard: torch.Tensor, time: torch.Tensor, event: torch.Tensor, ties: str = "efron",
    extra: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Negative Cox partial log-likelihood per event: Efron (1977) or Breslow (1974) for tied event times.

    log_hazard (n,) on any device; time (n,) and event (n,) bool on the CPU, so that nothing waits for the GPU; extra:
    (log_hazard (m,), time (m,)) of cases that count as being at risk only. Half precision is raised to fp32. Without
    an event the result is 0, connected to the input.
    """
    log_hazard = log_hazard if log_hazard.dtype == torch.float64 else log_hazard.float()
    rows = torch.nonzero(event)[:, 0]
    if not len(rows):
        return (log_hazard * 0).sum()
    device, when = log_hazard.device, time[rows]
    at_risk, all_times = log_hazard, time
    if extra is not None:
        at_risk, all_times = torch.cat([log_hazard, extra[0].to(log_hazard)]), torch.cat([time, extra[1]])
    outside = (all_times < when[:, None]).to(device, non_blocking=True)
    mine = log_hazard[rows.to(device, non_blocking=True)]
    total = at_risk.expand(len(rows), -1).masked_fill(outside, -torch.inf).logsumexp(1)
    if ties == "efron":
        tied = when == when[:, None]
        # of d tied events the l-th (from 0) sees only 1 - l/d of their hazard
        before = (tied.tril(-1).sum(1).double() / tied.sum(1)).to(total.dtype).to(device, non_blocking=True)
        untied = (~tied).to(device, non_blocking=True)
        together = mine.expand(len(rows), -1).masked_fill(untied, -torch.inf).logsumexp(1)
        total = total + torch.log1p(-before * (together - total).exp())
    return (total - mine).sum() / len(rows)


class Target:
    """What a step's outputs are compared with: the survival times of the cases, or their z-scored features."""

    def __init__(self, cohort: sd.Cohort, train: np.ndarray, args: argparse.Namespace):
        self.args, self.time, self.event = args, torch.from_numpy(cohort.time), torch.from_numpy(cohort.event)
        self.outputs = 1
        if args.task == "pretrain":
            self.names = list(args.feature_columns or cohort.features)
            if unknown := [name for name in self.names if name not in cohort.features]:
                text = f"no column {unknown[0]!r} with numbers (or blanks) alone"
                raise InputError(
                    f"{cohort.source}: {text}; there are {', '.join(cohort.features)}; see --feature_columns"
                )
            values = np.stack([cohort.features[name] for name in self.names] or [np.zeros(len(cohort))], 1)
            spread = [column[np.isfinite(column)] for column in values[train].T]
            keep = [k for k, column in enumerate(spread) if len(column) > 1 and column.std() > 0]
            if not keep:
                text = "no numeric column that varies in the training fold"
                raise InputError(f"{cohort.source}: {text}; --task pretrain needs some")
            self.names, self.outputs = [self.names[k] for k in keep], len(keep)
            self.mean = np.array([spread[k].mean() for k in keep])
            self.std = np.array([spread[k].std() for k in keep])
            self.value = torch.from_numpy((values[:, keep] - self.mean) / self.std).float()

    def loss(self, outputs: torch.Tensor, rows: np.ndarray, extra=None) -> torch.Tensor:
        """Loss of (n, outputs) for these lines of the cohort: Cox, or the mean square over the known features."""
        rows = torch.from_numpy(rows)
        if self.args.task == "survival":
            return cox_loss(outputs[:, 0], self.time[rows], self.event[rows], self.args.ties, extra)
        value = self.value[rows]
        known = value.isfinite()
        share = (known / max(1, int(known.sum()))).to(outputs.device, non_blocking=True)
        return ((outputs - value.nan_to_num(0).to(outputs.device, non_blocking=True)).square() * share).sum()


class CoxMemory:
    """--cox_memory: the last N log-hazards (detached) and whose they are; a function of the steps, not of the ranks."""

    def __init__(self, size: int, device: torch.device):
        self.size, self.rows = size, np.zeros(0, np.int64)
        self.values = torch.zeros(0, device=device)

    def others(self, rows: np.ndarray, times: torch.Tensor):
        """(log_hazard, time) of what is kept, without the cases in `rows`; None without any."""
        keep = np.flatnonzero(~np.isin(self.rows, rows))
        if not len(keep):
            return None
        return self.values[self.at(keep)], times[torch.from_numpy(self.rows[keep])]

    def at(self, places: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(places).to(self.values.device, non_blocking=True)

    def add(self, rows: np.ndarray, values: torch.Tensor) -> None:
        values = torch.where(values.isfinite(), values, -torch.inf)  # of a step that was skipped: no part of any sum
        stays = np.flatnonzero(~np.isin(self.rows, rows))
        kept = self.values[self.at(stays)]
        self.rows = np.concatenate([self.rows[stays], rows])[-self.size :]
        self.values = torch.cat([kept, values])[-self.size :]

    def state(self) -> dict:
        return {"rows": self.rows.tolist(), "values": self.values.cpu()}

    def restore(self, state: dict) -> None:
        self.rows, self.values = np.array(state["rows"], np.int64), state["values"].to(self.values.device)


# --- training ---------------------------------------------------------------------------------------------------------


def wrap(model: RiskNet, frozen: bool, ranks: du.Ranks) -> nn.Module:
    """The model for one stretch of epochs: the backbone frozen or not, in DDP where there are several processes."""
    model.backbone.requires_grad_(not frozen)
    if ranks.world_size == 1:
        return model
    ids = [ranks.device] if ranks.device.type == "cuda" else None
    options = {"forward_sync_buffers": False, "find_unused_parameters": du.keep_buckets()}
    return DDP(model, device_ids=ids, gradient_as_bucket_view=True, **options)


def exchange(rows: list[int], low: int, count: int, stop: int, error: str) -> tuple[np.ndarray, int, bool]:
    """What the ranks tell each other before a step: (lines of all its cases, exit code of a signal or 0, whether any
    has an error). One transfer of host memory."""
    facts = torch.zeros(count + 3, dtype=torch.float64)
    facts[low : low + len(rows)] = torch.tensor(rows, dtype=torch.float64)
    facts[count:] = torch.tensor([stop == 143, stop == 130, bool(error)], dtype=torch.float64)
    *rows, stop_143, stop_130, broken = du.reduce_sum(facts).tolist()
    return np.array(rows, np.int64), 143 if stop_143 else 130 if stop_130 else 0, bool(broken)


def train_step(
    net: nn.Module, model: RiskNet, window: list[dict], place: tuple[int, int, int], loss_of, augment, scaler
):
    """Gradients of one optimizer step, the same at any number of ranks and micro-batches; returns (loss, outputs).

    The Cox loss has no parts that add up: each case's risk set is the whole batch. So the outputs of all ranks are put
    together, every rank takes the loss of them all, and sends its own cases' part of the gradient back through its
    net. Micro-batches are first passed forward without memory, then again one by one. place: (first, end) of this
    rank's cases among `count`; an end equal to first: a rank without a share passes one case of no weight.
    """
    low, high, count = place
    world_size = du.world()[1]
    images = [augment(batch) for batch in window]
    passed = []
    for batch in images:
        with contextlib.nullcontext() if len(images) == 1 else torch.no_grad():
            passed.append((net if len(images) == 1 else model)(batch))
    mine = torch.cat([output.detach() for output in passed])
    outputs = mine.new_zeros(count, mine.shape[1])
    outputs[low:high] = mine[: high - low]
    outputs = du.reduce_sum(outputs).requires_grad_()
    loss = loss_of(outputs)
    loss.backward()
    # a non-finite loss must give non-finite gradients, which reach every rank: all skip the step together
    grad = outputs.grad * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
    grad = scaler.scale(grad * world_size)  # DDP takes the mean over ranks, these are parts of a sum
    grad = grad[low:high] if high > low else grad[:1] * 0
    for i, batch in enumerate(images):
        last = i == len(images) - 1
        with contextlib.nullcontext() if last or net is model else net.no_sync():
            output = passed[0] if len(images) == 1 else net(batch)
            output.backward(grad[: len(output)])
        grad = grad[len(output) :]
    return loss.detach(), outputs.detach()


def train_one_epoch(
    net, model, optimizer, scaler, loader, target: Target, memory: CoxMemory, state: dict, ends: tuple[int, int], args,
    ranks: du.Ranks, log: RunLog, stop: du.StopSignal, save,
) -> int:  # fmt: skip
    """Train from state's position to the end of the epoch or run; returns the exit code of a stop signal, else 0.

    state: `step`, `epoch`, `samples` (of all ranks, this epoch), kept up to date. ends: (last step of this run, steps
    of the whole training, which the learning rate follows). Between log lines nothing is read back from the GPU. Raises
    InputError on all ranks for an unreadable volume of any of them.
    """
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # 1 x 1 x 1 kernels have two layouts at once
    model.train()
    if state["epoch"] < args.freeze_epochs:
        model.backbone.eval()
    sampler = loader.batch_sampler
    batches, size, epoch = iter(loader), sampler.batch_size, state["epoch"]

    def augment(batch: dict) -> torch.Tensor:
        images = batch["image"].to(ranks.device, non_blocking=True)
        return sd.augment(images, batch["index"].tolist(), args.seed, epoch) if args.augment else images

    while state["step"] < ends[0] and state["samples"] < sampler.used:
        count, mine = sampler.window(state["samples"])
        window = log.next_batches(batches, max(1, math.ceil(mine / size)))
        rows = [row for batch in window for row in batch["index"].tolist()][:mine]
        error = next((text for batch in window for text in batch["error"] if text), "")
        low = count * ranks.rank // ranks.world_size
        rows, code, broken = exchange(rows, low, count, stop.code, error)
        if broken:
            raise InputError(next(text for text in du.gather_objects(error) if text))
        if code:  # agreed by all ranks, before the window is used
            save()
            return code
        factor = du.schedule(state["step"], ends[1], args.warmup_steps, args.scheduler)
        least = args.eta_min if state["step"] >= args.warmup_steps else 0.0
        rate = least + (args.lr - least) * factor
        for group in optimizer.param_groups:
            group["lr"] = rate
        extra = memory.others(rows, target.time) if args.cox_memory else None
        place = low, low + mine, count
        loss_of = partial(target.loss, rows=rows, extra=extra)
        with log.count_flops(count):
            loss, outputs = train_step(net, model, window, place, loss_of, augment, scaler)
        if args.cox_memory:
            memory.add(rows, outputs[:, 0])
        scaler.unscale_(optimizer)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norm = nn.utils.clip_grad_norm_(trained, args.grad_clip or math.inf)
        scaler.step(optimizer)  # leaves the weights alone when a gradient is not finite, without a GPU sync
        scaler.update(None if args.mixed_precision == "fp16" else 1.0)
        optimizer.zero_grad(set_to_none=True)
        events = float(target.event[torch.from_numpy(rows)].sum()) if args.task == "survival" else 0.0
        values = torch.stack([loss, torch.full_like(loss, events), norm, 1.0 - norm.isfinite().float()])
        log.step(values if ranks.is_main else torch.zeros_like(values), count, rate)  # the same on all ranks: one tells
        state["step"] += 1
        state["samples"] += count
        log.check(state["step"], args.max_bad_steps)
        if state["step"] % args.log_every == 0:
            log.write_interval(state["step"], state["epoch"] + 1)
        if args.save_every and state["step"] % args.save_every == 0:
            save()
    return 0


# --- evaluation -------------------------------------------------------------------------------------------------------


def dataset(cohort: sd.Cohort, rows: np.ndarray, args: argparse.Namespace, train: bool = False):
    """The cases of some lines of the cohort, as the flags say; SmartCache for training only."""
    smart = train and args.use_smart_cache
    return sd.MultiGPUSurvivalDataset(
        cohort, rows=rows, image_size=args.image_size, window=args.hu_window, spacing=args.spacing,
        orientation=args.orientation, use_smart_cache=smart, cache_rate=args.cache_rate, raise_errors=False,
        replace_rate=args.replace_rate, num_workers=args.num_workers, seed=args.seed,
        event_balanced=train and args.event_balanced,
        cache_dir=args.cache_dir if args.cache == "persistent" and not smart else None,
    )  # fmt: skip


@torch.no_grad()
def predict(model: RiskNet, data: sd.MultiGPUSurvivalDataset, workers: int, ranks: du.Ranks) -> np.ndarray:
    """(n, outputs) float64 of every case, in order and the same on all ranks. Raises InputError on all ranks for an
    unreadable volume, RunError when an output is not finite."""
    model.eval()
    loader = du.create_distributed_dataloader(data, EVAL_BATCH, train=False, num_workers=workers)
    outputs, error = torch.zeros(len(data), model.head.out_features, dtype=torch.float64), ""
    for places, batch in zip(loader.batch_sampler, loader, strict=True):
        error = error or next((text for text in batch["error"] if text), "")
        outputs[places] = model(batch["image"].to(ranks.device, non_blocking=True)).double().cpu()
    with du.agree_on_errors():
        if error:
            raise InputError(error)
    outputs = du.reduce_sum(outputs).numpy()
    if not np.isfinite(outputs).all():
        raise RunError(f"{int((~np.isfinite(outputs)).any(1).sum())} predictions are not finite; lower --lr")
    return outputs


def evaluate(model, cohort: sd.Cohort, train: np.ndarray, val: np.ndarray, target: Target, args, ranks, final=False):
    """(metrics, {"val", "train" outputs, "baseline"}) of the validation fold, the same on all ranks.

    final: also the training fold, whose baseline hazard gives survival probabilities, and the bootstrap interval.
    """
    workers = args.num_workers if final or not args.use_smart_cache else 0  # no fork beside SmartCache's thread
    found = {"val": predict(model, dataset(cohort, val, args), workers, ranks)}
    if final and args.task == "survival":
        found["train"] = predict(model, dataset(cohort, train, args), workers, ranks)
    metrics = None
    if ranks.is_main:  # one rank computes and tells: all take the same decisions
        metrics = {"val/loss": float(target.loss(torch.from_numpy(found["val"]), val))}
        if args.task == "pretrain":
            value, error = target.value[val].double().numpy(), found["val"]
            for k, name in enumerate(target.names):
                known = np.isfinite(value[:, k])
                spread = np.square(value[known, k] - value[known, k].mean()).sum() if known.any() else 0.0
                left = np.square(value[known, k] - error[known, k]).sum()
                metrics[f"val/r2/{name}"] = float(1 - left / spread) if spread > 0 else None
            scores = [v for n, v in metrics.items() if n.startswith("val/r2/") and v is not None]
            metrics["val/r2"] = sum(scores) / len(scores) if scores else None
        else:
            survival = None
            if final:
                found["baseline"] = sm.breslow_baseline(found["train"][:, 0], cohort.event[train], cohort.time[train])
                found["baseline"]["until"] = float(cohort.time[train].max())
                survival = partial(sm.survival_at, found["baseline"], found["val"][:, 0])
            outcome = cohort.event[val], cohort.time[val], cohort.event[train], cohort.time[train]
            scores = sm.score(found["val"][:, 0], *outcome, args.eval_years, survival, final)
            metrics |= {f"val/{name}": value for name, value in scores.items()}
            if final and cohort.true_risk is not None and np.isfinite(cohort.true_risk[val]).all():
                metrics["val/c_index_true"] = sm.concordance(cohort.true_risk[val], *outcome[:2])
    metrics, baseline = du.broadcast_object((metrics, found.get("baseline")))
    return metrics, found | {"baseline": baseline}


def print_metrics(title: str, metrics: dict[str, float | None], years: list[float]) -> None:
    """Two tables: the scores of the whole fold, and those of each horizon."""
    shown = {name: "undefined" if value is None else value for name, value in metrics.items()}
    rows = {name.removeprefix("val/"): {"value": value} for name, value in shown.items() if name.count("/") == 1}
    print_table(title, {name: row for name, row in rows.items() if name != "best_step"})
    if "val/c_index" in metrics:
        names = [name for name in ("auc", "brier", "brier_km") if f"val/{name}/{years[0]:g}y" in metrics]
        horizons = {f"{year:g} years": {name: shown[f"val/{name}/{year:g}y"] for name in names} for year in years}
        print_table(f"{title}: horizons", horizons)


def predictions_table(cohort: sd.Cohort, parts: list[tuple], years: list[float]) -> bytes:
    """CSV: case, fold, time and event where known, log_hazard, S(t) at each horizon (blank beyond the follow-up).

    parts: (fold name, lines of the cohort, log_hazard, baseline or None).
    """
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["case", "fold", "time_years", "event", "log_hazard", *(f"S({year:g}y)" for year in years)])
    for fold, rows, log_hazard, baseline in parts:
        chances = sm.survival_at(baseline, log_hazard, years) if baseline else np.zeros((len(rows), len(years)))
        until = baseline["until"] if baseline else -math.inf
        for i, value, chance in zip(rows, log_hazard, chances, strict=True):
            known = [f"{cohort.time[i]:.6f}", int(cohort.event[i])] if len(cohort.time) else ["", ""]
            cells = [f"{p:.6f}" if year <= until else "" for year, p in zip(years, chance, strict=True)]
            table.writerow([cohort.case[i], fold, *known, f"{value:.9g}", *cells])
    return text.getvalue().encode()


def draw_cases(cohort: sd.Cohort, rows: np.ndarray, log_hazard: np.ndarray, args: argparse.Namespace):
    """A matplotlib figure: slices of the cases ordered best and worst among the validation cases."""
    volumes = dataset(cohort, rows, args).volumes
    best, worst = sm.easiest_and_hardest(log_hazard, cohort.event[rows], cohort.time[rows])
    share, pairs = sm.pairs_in_order(log_hazard, cohort.event[rows], cohort.time[rows])
    images, titles = [], []
    for name, places in (("best", best), ("worst", worst)):
        for k in places:
            i = rows[k]
            images.append(volumes.get(cohort.path[i])[0].float().numpy())
            what = f"{'event' if cohort.event[i] else 'censored'} at {cohort.time[i]:.1f} y"
            right = f"{share[k]:.0%} of {pairs[k]} pairs right"
            titles.append(f"{name}: {figure_text(cohort.case[i])}\n{right}\n{what}\nlog-hazard {log_hazard[k]:.2f}")
    heading = "validation cases that are most often (best) and least often (worst) in the right order with others:\n"
    heading += "of two cases, the one whose event is known to come first should have the higher log-hazard"
    return sm.draw_volumes(images, titles, heading)


def draw_inputs(cohort: sd.Cohort, rows: np.ndarray, args: argparse.Namespace):
    """A matplotlib figure: six training cases as the net sees them."""
    chosen = [int(i) for i in rows[np.linspace(0, len(rows) - 1, min(6, len(rows))).astype(int)]]
    items = [dataset(cohort, rows, args).load(i) for i in chosen]
    images = torch.stack([item["image"] for item in items])
    images = sd.augment(images, chosen, args.seed, 0) if args.augment else images
    heading = "training cases as the net sees them" + (", flipped and turned at random" if args.augment else "")
    titles = [f"case {figure_text(cohort.case[i])}" for i in chosen]
    return sm.draw_volumes([image[0].float().numpy() for image in images], titles, heading)


# --- the run ----------------------------------------------------------------------------------------------------------


def apply_hardware(args: argparse.Namespace, ranks: du.Ranks) -> int:
    """Set what no flag did: cases per step, loading processes; returns this node's cores per process.

    Raises InputError when --batch_size cannot be split evenly.
    """
    world_size = ranks.world_size
    if args.source["batch_size"] == "default":
        args.batch_size = max(1, round(args.batch_size / world_size)) * world_size
    if args.batch_size % world_size:
        low = args.batch_size // world_size * world_size
        near = f"{low} or {low + world_size}" if low else str(world_size)
        text = f"the total over {world_size} processes cannot be split evenly"
        raise InputError(f"--batch_size {args.batch_size}: {text}; take {near}")
    share = max(1, hw.usable_cores() // du.gather_objects(platform.node()).count(platform.node()))
    if args.source["num_workers"] == "default":
        args.num_workers = max(1, min(4, share)) if ranks.device.type == "cuda" or args.use_smart_cache else 0
        args.source["num_workers"] = "hardware"
    return share


def largest_batch(batch_size: int, args: argparse.Namespace) -> dict:
    """A made-up batch, on the host, of cases that all have an event, each at a time of its own."""
    cases = torch.arange(batch_size)
    image = torch.zeros(batch_size, 1, *args.image_size, dtype=torch.float16)
    batch = {"image": image, "index": cases, "error": [""] * batch_size}
    return batch | {"time": 1.0 + cases, "event": torch.ones(batch_size, dtype=torch.bool)}


def trial_step(model: RiskNet, batch: dict, args: argparse.Namespace, waiting: int = 0) -> None:
    """Forward and backward pass of one micro-batch, as train_step makes it; the gradients stay in the model.

    waiting: cases of the step's other micro-batches, whose images are on the device meanwhile.
    """
    images = batch["image"].to(model.head.weight.device, non_blocking=True)
    if args.augment:
        images = sd.augment(images, batch["index"].tolist(), args.seed, 0)

    # with micro-batches, all images are on the device and all outputs are computed before the gradients
    others = images.new_empty(waiting, *images.shape[1:])
    if waiting:
        with torch.no_grad():
            model.train()(images)

    output = model.train()(images)
    values = output.detach().requires_grad_()
    if args.task == "survival":
        loss = cox_loss(values[:, 0], batch["time"], batch["event"], args.ties)
    else:
        loss = values.square().mean()
    loss.backward()
    output.backward(values.grad)
    del others


def find_batch_size(model: RiskNet, contents: dict | None, args: argparse.Namespace, ranks: du.Ranks) -> None:
    """Fit the number of cases per process to what a step takes."""
    cases = args.batch_size // ranks.world_size * args.gradient_accumulation_steps

    def try_once(size: int) -> None:
        trial_step(model, largest_batch(size, args), args, cases - size)

    fitted = fit_batch_to_memory(
        try_once, model, (args.batch_size // ranks.world_size, args.gradient_accumulation_steps),
        partial(batch_flags, processes=ranks.world_size), "pass a smaller --image_size or --resnet",
        before=contents and contents.get("split"),
    )  # fmt: skip
    if fitted.reason:
        sizes = {"batch_size": fitted.size * ranks.world_size, "gradient_accumulation_steps": fitted.accumulation}
        set_derived(args, fitted.reason.replace(" did", " per process did"), **sizes)


def check_flags(args: argparse.Namespace) -> None:
    """What does not go together, once a checkpoint has had its say. Raises InputError."""
    if args.cox_memory and args.task == "pretrain":
        raise InputError("--cox_memory: belongs to the Cox loss; leave it out with --task pretrain")
    if args.norm == "batch" and args.gradient_accumulation_steps > 1:
        raise InputError("--norm batch: accumulation would take its statistics from parts of a batch; use --norm group")
    if args.norm == "batch" and args.auto_batch:
        raise InputError("--norm batch: --auto_batch would change its statistics; use --norm group, or choose a batch")


def adopt(args: argparse.Namespace, contents: dict, path: str) -> None:
    """Take net and input settings from a checkpoint. Raises InputError where a flag says otherwise."""
    if args.source["seed"] == "default":
        args.seed = contents["run"]["seed"]
    for name in (*FIXED, *(() if args.cross_validate else SPLIT)):
        value = contents["settings"][name] if name in contents["settings"] else getattr(args, name)
        if name in SPLIT and args.eval_only and args.source[name] != "default":
            continue  # another fold, such as --val_fold test: its cases are compared with those trained on
        if args.source[name] != "default" and getattr(args, name) != value:
            raise InputError(f"{path}: a run with --{name} {value}, now {getattr(args, name)}; leave the flag out")
        setattr(args, name, value)


def make_optimizer(model: RiskNet, args: argparse.Namespace) -> torch.optim.Optimizer:
    options = {"lr": args.lr, "weight_decay": args.weight_decay, "fused": True}
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, **options)
        # fused SGD fails where some have a momentum and others, unfrozen later, none
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    return {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[args.optimizer](model.parameters(), **options)


def describe_cache(data: sd.MultiGPUSurvivalDataset, cases: int, args: argparse.Namespace) -> str:
    """One line: cached share, memory it will take, epochs until all is seen."""
    one = data.volumes.bytes() / 2**30
    if data.mine is not None:
        each, all_seen = data.cached * one, data.epochs_until_all_seen()
        part = f"{data.cached} of {len(data.mine)} cases of each rank ({data.cached / len(data.mine):.0%})"
        rest = f"{data.replaced} replaced an epoch, all seen after {all_seen} epochs"
        return f"SmartCache: {part}, {each:.2f} GB of memory a rank, {rest}"
    if args.cache == "none":
        return "none: each volume is read anew in each epoch"
    return (
        f"100% on disk in {args.cache_dir}, {cases * one:.2f} GB, no memory; filled in the first epoch, which sees all"
    )


def run(args: argparse.Namespace, ranks: du.Ranks) -> int:
    """Everything between joining and leaving the process group; returns the exit code."""
    begun, folder = time.time(), Path(args.log_dir)
    with du.agree_on_errors():
        args.mixed_precision, why = hw.choose_precision(args.mixed_precision, ranks.device)
        if args.backend == "nccl" and ranks.device.type == "cpu":
            raise InputError("--backend nccl: needs GPUs; leave it out")
    if len(set(du.gather_objects(args.mixed_precision))) > 1:
        raise InputError("--mixed_precision auto: the GPUs differ; choose fp16 or no")
    why = hw.set_numerics(ranks.device, args.mixed_precision, why, args.deterministic)
    cores = apply_hardware(args, ranks)
    contents, used = None, ""
    if args.eval_only or args.predict:
        used = str(folder / "best.pt") if args.resume_from in (None, "auto") else args.resume_from
        used = str(Path(used) / "best.pt") if Path(used).is_dir() else used
        contents = ckpt.load_checkpoint(used, folder, FORMAT)
    elif not args.cross_validate:
        with du.agree_on_errors():
            if (folder / "fold_1").is_dir():
                raise InputError(f"{folder}: holds a cross-validation; give its flags, or choose another --log_dir")
        lock = ckpt.lock_run_folder(folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
        contents = ckpt.load_checkpoint(args.resume_from, folder, FORMAT, resume=True)
    if contents:
        adopt(args, contents, used or args.resume_from)
    check_flags(args)
    table = args.predict or args.csv_path
    columns = {f"{kind}_column": getattr(args, f"{kind}_column") for kind in ("path", "time", "event", "id")}
    with du.agree_on_errors():
        cohort = sd.read_cohort(table, args.data_dir, args.time_unit, not args.predict, **columns)
        splits = [] if args.predict else sd.choose_splits(cohort, args)
    parts = [part for split in splits for part in (split.train, split.val)] or [np.arange(len(cohort))]
    rows = np.unique(np.concatenate(parts))
    if not args.skip_data_check:
        du.print_main(f"checking {len(rows)} volumes ...")
        sd.check_volumes(cohort, rows, Path(args.cache_dir), bool(args.spacing or args.orientation), cores)
    if args.predict:
        return predict_new(cohort, contents, used, args, ranks)
    if args.eval_only:
        return evaluate_only(cohort, splits[0], contents, used, args, ranks)
    if not args.cross_validate:
        code, _ = fit(cohort, splits[0], folder, contents, why, args, ranks)
        del lock
    else:
        code = cross_validate(cohort, splits, folder, why, args, ranks)
    du.print_main(f"{time.time() - begun:.0f} seconds in all")
    return code


def cross_validate(cohort: sd.Cohort, splits: list, folder: Path, why: str, args, ranks: du.Ranks) -> int:
    """Each fold in a folder of its own, then the metrics of all predictions together; returns the exit code.

    Predictions, baseline hazards and metrics are of the last epoch's weights: each fold's best.pt was chosen by its
    score on that same fold. What best.pt would have reached stands beside, as `c_index_best`.
    """
    begun = time.time()
    with du.agree_on_errors():
        if (folder / "last.pt").exists():
            raise InputError(f"{folder}: holds a single run; choose another --log_dir")
    lock = ckpt.lock_run_folder(folder, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
    if args.overwrite:  # all folds at once: a killed run must find none of the old one
        with du.agree_on_errors():
            places = [folder, *sorted(folder.glob("fold_*"))] if ranks.is_main else []
            for place in places:
                ckpt.check_run_folder(place, True, True)
            try:
                if places:
                    ckpt.begin_afresh(folder, tuple(places[1:]))
            except OSError as error:
                raise InputError(f"{folder}: cannot write here ({error.strerror}); choose another --log_dir") from None
    with du.agree_on_errors():
        try:
            if ranks.is_main:
                # folds of an old run that a kill left while --overwrite deleted them
                ckpt.finish_deleting(folder)
                save_args(folder / "args.yaml", args)
        except OSError as error:
            raise InputError(f"{folder}: cannot write here ({error.strerror}); choose another --log_dir") from None
    parts, best_parts, scores, best_scores, steps = [], [], [], [], 0
    sizes = args.batch_size, args.gradient_accumulation_steps
    for k, split in enumerate(splits, start=1):
        args.batch_size, args.gradient_accumulation_steps = sizes
        du.print_main(f"fold {k} of {len(splits)}: {split.name}")
        fold = folder / f"fold_{k}"
        fold_lock = ckpt.lock_run_folder(fold, bool(args.resume_from) or args.overwrite, overwrite=args.overwrite)
        contents = ckpt.load_checkpoint(args.resume_from, fold, FORMAT, resume=True)
        if contents:
            adopt(args, contents, str(fold))
        code, found = fit(cohort, split, fold, contents, why, args, ranks)
        del fold_lock
        if code or (found["signal"] and k < len(splits)):
            return code or found["signal"]
        parts.append((split, found["val"][:, 0], found["baseline"]))
        best_parts.append((split, found["best"]["val"][:, 0], found["best"]["baseline"]))
        scores.append(found["c_index"])
        best_scores.append(found["c_index_best"])
        steps += found["steps"]
    if ranks.is_main:
        rows, until = np.concatenate([split.val for split, *_ in parts]), min(b["until"] for *_, b in parts)

        def survival(at) -> np.ndarray:
            return np.concatenate([sm.survival_at(baseline, values, at) for _, values, baseline in parts])

        def reference(at) -> np.ndarray:
            curves = [sm.kaplan_meier(cohort.event[train], cohort.time[train], at) for (_, train, *_), *_ in parts]
            return np.concatenate([np.tile(c, (len(v), 1)) for c, (_, v, _) in zip(curves, parts, strict=True)])

        risk, event, when = pooled_risk(parts, until), cohort.event[rows], cohort.time[rows]
        outcome = event, when, event, when
        metrics = sm.score(risk, *outcome, args.eval_years, survival, True, reference, until)
        metrics = {f"val/{name}": value for name, value in metrics.items()}
        if cohort.true_risk is not None and np.isfinite(cohort.true_risk[rows]).all():
            metrics["val/c_index_true"] = sm.concordance(cohort.true_risk[rows], event, when)
        known = [value for value in scores if value is not None]
        metrics |= {"val/c_index_mean": float(np.mean(known)), "val/c_index_sd": float(np.std(known))} if known else {}
        metrics |= {f"val/c_index/fold_{k}": value for k, value in enumerate(scores, start=1)}
        metrics["val/c_index_best"] = sm.concordance(pooled_risk(best_parts, until), event, when)
        metrics |= {f"val/c_index_best/fold_{k}": value for k, value in enumerate(best_scores, start=1)}
        print_metrics(f"{len(splits)} folds pooled, last epoch", metrics, args.eval_years)
        by_fold = {}
        for split, last, best in zip(splits, scores, best_scores, strict=True):
            row = {"c_index": last, "c_index_best": best}
            by_fold[split.name] = {name: "undefined" if value is None else value for name, value in row.items()}
        print_table("fold", by_fold)
        print("c_index_best: of each fold's best.pt, chosen on the same fold and therefore optimistic", flush=True)
        table = [(name, val, values, baseline) for (name, _, val, _), values, baseline in parts]
        write_result(folder / "predictions.csv", predictions_table(cohort, table, args.eval_years))
        facts = {"steps": steps, "epochs": args.epochs, "folds": len(splits), "world_size": ranks.world_size}
        facts |= {"effective_batch_size": math.prod(sizes), "precision": args.mixed_precision}
        facts |= {"seconds": round(time.time() - begun, 1)}
        write_result(folder / "summary.json", (json.dumps(metrics | facts, indent=2) + "\n").encode())
        years = [year for year in args.eval_years if year < until]
        heading = f"{len(splits)} folds pooled, last epoch"
        figure = sm.draw_survival(risk, event, when, years, survival, (event, when), heading)
        save_figure(folder / "figures" / "survival.png", figure)
    du.print_main(f"pooled: {folder}/predictions.csv, {folder}/summary.json; each fold: {folder}/fold_*")
    del lock
    return 0


def pooled_risk(parts: list[tuple], until: float) -> np.ndarray:
    """The risks of all folds' validation cases on one scale. parts: (split, log-hazards, baseline) of each fold.

    The nets of different folds have log-hazards with different constants. Each fold's baseline hazard makes them
    comparable: taken is the log of the cumulative hazard at `until`, the last time that all folds know.
    """
    risks = [sm.log_cumulative_hazard(baseline, values, [until])[:, 0] for _, values, baseline in parts]
    return np.concatenate(risks)


def load_model(contents: dict, args: argparse.Namespace, ranks: du.Ranks) -> RiskNet:
    """The net of a checkpoint, for evaluation."""
    with du.agree_on_errors():
        model = build_model(args, len(contents["model"]["head.bias"]), contents["model"], ranks)
        ckpt.load_trained(model, contents["model"])
    return model


def predict_new(cohort: sd.Cohort, contents: dict, used: str, args: argparse.Namespace, ranks: du.Ranks) -> int:
    """--predict: log-hazards of new cases; S(t) where the run's baseline hazard belongs to this checkpoint."""
    folder = Path(args.log_dir)
    if args.task != "survival":
        raise InputError(f"{used}: a pre-trained net has no log-hazard; give a checkpoint of --task survival")
    model, data = load_model(contents, args, ranks), dataset(cohort, np.arange(len(cohort)), args)
    values = predict(model, data, args.num_workers, ranks)
    with du.agree_on_errors():
        if ranks.is_main:
            baseline = read_baselines(Path(used).parent / "baseline.json").get(ckpt.file_sha256(Path(used)))
            if baseline is None:
                print(f"no baseline hazard of {used}: S(t) stays blank; --eval_only with this checkpoint writes one")
            path = folder / f"predictions_{Path(args.predict).stem}.csv"
            content = predictions_table(
                cohort, [("new", np.arange(len(cohort)), values[:, 0], baseline)], args.eval_years
            )
            try:
                folder.mkdir(parents=True, exist_ok=True)
                ckpt.write_atomically(path, lambda file: file.write(content))
            except OSError as error:
                raise InputError(f"{path}: cannot be written ({error.strerror}); choose another --log_dir") from None
            print(f"{len(cohort)} cases: {path}", flush=True)
    return 0


def evaluate_only(cohort: sd.Cohort, split: tuple, contents: dict, used: str, args, ranks: du.Ranks) -> int:
    """--eval_only: the metrics of the validation fold, printed and written to eval_val.json, with all that a run ends
    with."""
    folder = Path(args.log_dir)
    with du.agree_on_errors():
        target = Target(cohort, split.train, args)
    model = load_model(contents, args, ranks)
    trained = set(contents["trained_cases"])
    if seen := [i for i in split.val if cohort.case[i] in trained]:
        text = f"case {cohort.case[seen[0]]} and {len(seen) - 1} more of {split.name} were trained on by {used}"
        raise InputError(f"{cohort.where(seen[0])}: {text}; evaluate on the fold it was validated on, or on new cases")
    if target.outputs != model.head.out_features:
        raise InputError(f"{used}: a net of {model.head.out_features} outputs, the table asks {target.outputs}")
    metrics, found = evaluate(model, cohort, split.train, split.val, target, args, ranks, final=True)
    if ranks.is_main:
        same_fold = split.flags.items() <= contents["settings"].items()
        chosen = f" {CHOSEN}" if same_fold and Path(used).name == "best.pt" else ""
        print_metrics(f"val, {Path(used).name}{chosen}", metrics, args.eval_years)
        write_result(
            folder / "eval_val.json", (json.dumps({**metrics, "step": contents["step"]}, indent=2) + "\n").encode()
        )
        if args.task == "survival":
            write_results(cohort, split, found, contents, folder, Path(used), args)
            for name, figure in draw_results(cohort, split, found, args).items():
                save_figure(folder / "figures" / f"{name}.png", figure)
        print(f"{len(split.val)} cases; written: {folder}/eval_val.json, {folder}/figures", flush=True)
    return 0


def fingerprint(cohort: sd.Cohort, rows: np.ndarray) -> str:
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


def add_baseline(checkpoint: Path, baseline: dict) -> None:
    """Rank 0: keep a checkpoint's baseline hazard for --predict: baseline.json beside it, under its sha256."""
    path = checkpoint.parent / "baseline.json"
    kept = read_baselines(path) | {ckpt.file_sha256(checkpoint): baseline}
    write_result(path, (json.dumps(kept) + "\n").encode())


def write_results(
    cohort: sd.Cohort, split: tuple, found: dict, contents: dict, folder: Path, used: Path, args: argparse.Namespace
) -> None:
    """Rank 0: predictions.csv of both folds, and the baseline hazard of the checkpoint that was used."""
    train, val, baseline = split.train, split.val, found["baseline"]
    if contents["run"]["training_data"] == fingerprint(cohort, train):
        add_baseline(used, baseline)
    else:
        print(f"warning: {used} was trained on other cases than {cohort.source} has; some may be among those evaluated")
    parts = [(n, r, found[n][:, 0], baseline) for n, r in (("val", val), ("train", train))]
    write_result(folder / "predictions.csv", predictions_table(cohort, parts, args.eval_years))


def draw_results(cohort: sd.Cohort, split: tuple, found: dict, args: argparse.Namespace) -> dict:
    """{name: matplotlib figure} of the validation fold."""
    train, val, values = split.train, split.val, found["val"][:, 0]
    survival, outcome = partial(sm.survival_at, found["baseline"], values), (cohort.event[val], cohort.time[val])
    training = cohort.event[train], cohort.time[train]
    heading = f"validation on {figure_text(split.name)}"
    figures = {"val_survival": sm.draw_survival(values, *outcome, args.eval_years, survival, training, heading)}
    if sm.concordance(values, *outcome) is not None:  # no case is right or wrong without a pair to compare
        figures["val_cases"] = draw_cases(cohort, val, values, args)
    return figures


def fit(cohort: sd.Cohort, split: tuple, folder: Path, contents, why: str, args, ranks: du.Ranks) -> tuple[int, dict]:
    """Train on one split, validate each epoch, keep checkpoints, evaluate the best; returns (exit code, results)."""
    begun, train, val = time.time(), split.train, split.val
    with du.agree_on_errors():
        target = Target(cohort, train, args)
        data = dataset(cohort, train, args, train=True)
        weights = read_weights(args.pretrained_path) if args.init == "pretrained" and not contents else None
        model = build_model(args, target.outputs, contents["model"] if contents else weights, ranks)
        if contents:
            ckpt.load_trained(model, contents["model"])
        elif weights is not None:
            use_weights(model, weights, args.pretrained_path)
    # the statistics of --norm batch depend on how the batch is split
    if args.norm == "group" and fits_by_itself(args.auto_batch, ranks.device):
        find_batch_size(model, contents, args, ranks)
    size, accumulation = args.batch_size // ranks.world_size, args.gradient_accumulation_steps
    loader = du.create_distributed_dataloader(
        data, size, seed=args.seed, num_workers=0 if args.use_smart_cache else args.num_workers,
        drop_last=args.norm == "batch", accumulation=accumulation,
    )  # fmt: skip
    sampler = loader.batch_sampler
    effective, epoch_steps = sampler.effective_batch_size, sampler.steps_per_epoch()
    if not epoch_steps:
        raise InputError(
            f"--batch_size {args.batch_size}: larger than the {sampler.num_samples} cases of an epoch; lower it"
        )
    planned_steps = args.epochs * epoch_steps
    last_step = min(args.max_steps or planned_steps, planned_steps)
    state = {"step": 0, "epoch": 0, "samples": 0, "best": None, "best_sha256": None, "saved": None}
    this_run = {"training_cases": len(train), "effective_batch_size": effective, "seed": args.seed}
    this_run |= {"optimizer": args.optimizer, "event_balanced": args.event_balanced}
    this_run["training_data"] = fingerprint(cohort, train)
    smart = [args.cache_rate, args.replace_rate, ranks.world_size] if args.use_smart_cache else "off"
    this_run["smart_cache"] = f"rates and processes {smart}" if args.use_smart_cache else smart
    torch.manual_seed((args.seed * 1000003 + ranks.rank) % 2**63)
    memory = CoxMemory(args.cox_memory, ranks.device)
    if contents:
        ckpt.check_same_run(contents, this_run)
        state |= contents["state"] | {"saved": None}
        memory.restore(contents["memory"])
        forget_other_best(folder, state)
    if args.compile:
        model.compile()
    optimizer = make_optimizer(model, args)
    fp16 = args.mixed_precision == "fp16"
    scaler = torch.amp.GradScaler(ranks.device.type, init_scale=2.0**14 if fp16 else 1.0)
    if contents:
        ckpt.restore_optimizer(optimizer, contents["optimizer"], args.weight_decay)
        ckpt.restore_scaler(scaler, contents["scaler"], args.mixed_precision)
        ckpt.restore_rng(contents["rng"])

    origin = args.source
    events = int(cohort.event[train].sum())
    facts = {
        "launcher": f"{ranks.launcher}, world size {ranks.world_size}, {ranks.device}",
        "batch": f"{args.batch_size} in all ({origin['batch_size']}) = {size} per process x {ranks.world_size}; x "
        + f"{accumulation} accumulation = {effective}",
        "learning rate": f"{args.lr:g} ({origin['lr']}), {args.scheduler}, not scaled",
        "precision": f"{args.mixed_precision} ({why})",
        "loading": f"{args.num_workers} {'threads' if args.use_smart_cache else 'workers'} per process "
        + f"({origin['num_workers']})",
        "cache": describe_cache(data, len(train) + len(val), args),
        "cases": f"{len(train)} training ({events} events), {len(val)} validation "
        + f"({int(cohort.event[val].sum())} events), {split.name}, {len(cohort) - len(train) - len(val)} rows left out",
        "patients": f"{len(set(cohort.case))} by column {cohort.id_name!r}"
        if cohort.id_name
        else "no column for them (--id_column): each row counts as one",
        "follow-up": f"{cohort.time[train].min():.2f} to {cohort.time[train].max():.2f} years in the training fold",
        "net": f"{args.resnet}, {sum(p.numel() for p in model.parameters()):,} parameters, {args.norm} norm, input "
        + " x ".join(map(str, args.image_size)),
        "loss": f"Cox, {args.ties} ties"
        if args.task == "survival"
        else f"mean square of {target.outputs} features: {', '.join(target.names)}",
        "steps": f"{last_step} of {planned_steps}: {epoch_steps} an epoch, {args.epochs} epochs ({origin['epochs']})",
        "start": f"step {state['step']}, epoch {state['epoch'] + 1}",
        "output": folder,
    }
    log = RunLog(folder, ranks, LOSSES, args, last_step, contents)
    ckpt.prepare_checkpoint(model)
    # the scores of every epoch; those of the end alone would be single points
    curves = ("loss", "c_index", "c_index_uno", "auc") if args.task == "survival" else ("loss", "r2")
    log.curves = [f"val/{name}" for name in curves]
    if args.use_smart_cache and (need := data.cached * data.volumes.bytes() / 2**30) > hw.available_ram_gb():
        have = f"{hw.available_ram_gb():.1f} GB are available"
        du.print_main(f"warning: the smart cache takes {need:.1f} GB for each process, {have}; lower --cache_rate")
    print_banner("SURVIVAL" if args.task == "survival" else "SURVIVAL: PRE-TRAINING", facts | log.speed_facts())
    if args.eval_years[0] >= min(cohort.time[train].max(), cohort.time[val].max()):
        du.print_main("warning: all --eval_years lie beyond the follow-up; is --time_unit right?")
    if args.event_balanced and events < epoch_steps:
        least = math.ceil(len(train) / events)
        du.print_main(f"{events} events for {epoch_steps} steps: some have none; all have from --batch_size {least} on")

    wanted = asked(args, "batch_size") // ranks.world_size, asked(args, "gradient_accumulation_steps")
    cut = split_record(wanted, (size, accumulation), False)

    def save() -> None:
        where = [state["step"], state["epoch"]]
        if state["saved"] == where:
            return
        state["saved"] = where
        parts = {"format": FORMAT, "model": ckpt.trained_state(model, everything=True), "state": dict(state)}
        parts |= {"run": this_run, "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "split": cut}
        parts |= {"settings": {name: getattr(args, name) for name in FIXED} | split.flags, "memory": memory.state()}
        parts |= {"log": log.pending(state["step"]), "trained_cases": sorted({cohort.case[i] for i in train})}
        ckpt.save_checkpoint(folder, parts, state["step"], args.keep_last)

    net = None
    if args.use_smart_cache:  # its evaluations have no loading processes: read the fold once, in parallel
        dataset(cohort, val, args).read_ahead()
    with du.StopSignal() as stop, contextlib.closing(log), contextlib.closing(data):
        say_if_finished(state["step"], last_step, "--epochs")
        if state["step"] == 0:
            log.figures(lambda: {"train_inputs": draw_inputs(cohort, train, args)}, 0)
        while True:
            frozen = state["epoch"] < args.freeze_epochs
            if net is None or state["epoch"] == args.freeze_epochs:
                net = None
                gc.collect()  # one DDP at a time on these parameters
                net = wrap(model, frozen, ranks)
                log.forget_flops()
            sampler.set_position(state["epoch"], state["samples"])
            log.restart_clock()
            options = target, memory, state, (last_step, planned_steps), args, ranks, log, stop, save
            if code := train_one_epoch(net, model, optimizer, scaler, loader, *options):
                say_saved(state["step"])
                return code, {}
            save()
            if state["step"] >= last_step:
                log.write_rest(state["step"], state["epoch"] + 1)
            metrics, _ = evaluate(model, cohort, train, val, target, args, ranks)
            log.write(state["step"], state["epoch"] + 1, metrics)
            headline = "c_index" if args.task == "survival" else "r2"
            value = metrics[f"val/{headline}"]
            shown = "undefined" if value is None else f"{value:.4f}"
            du.print_main(f"epoch {state['epoch'] + 1}: val {headline} {shown}, loss {metrics['val/loss']:.4f}")
            value = -metrics["val/loss"] if value is None else value
            keep_best(folder, state, value, state["samples"] >= sampler.used)
            if state["step"] >= last_step:
                break
            state["epoch"], state["samples"] = state["epoch"] + 1, 0
        net = None
        data.close()
        last_value = metrics[f"val/{headline}"]
        # best.pt was chosen on the fold that is scored: a cross-validation scores the last epoch's weights instead
        if args.cross_validate:
            last_metrics, last_found = evaluate(model, cohort, train, val, target, args, ranks, final=True)
            ckpt.export_weights(ckpt.trained_state(model, everything=True), folder / "model.safetensors")
        best = ckpt.load_checkpoint(str(folder / "best.pt"), folder, FORMAT)
        ckpt.load_trained(model, best["model"])
        best_metrics, best_found = evaluate(model, cohort, train, val, target, args, ranks, final=True)
        if args.cross_validate:
            scored, title = "last.pt", "val, last epoch"
            metrics, found = last_metrics, last_found
            metrics[f"val/{headline}_best"] = best_metrics[f"val/{headline}"]
        else:
            scored, title = "best.pt", f"val, best.pt {CHOSEN}"
            metrics, found = best_metrics, best_found
            metrics[f"val/{headline}_last"] = last_value
            ckpt.export_weights(best["model"], folder / "model.safetensors")
        log.write(state["step"], state["epoch"] + 1, metrics | {"best_step": best["step"]})
        facts = {"steps": state["step"], "epochs": state["epoch"] + 1, "world_size": ranks.world_size}
        facts |= {"effective_batch_size": effective, "precision": args.mixed_precision}
        log.finish(facts | {"seconds": round(time.time() - begun, 1)})
        if ranks.is_main:
            print_metrics(title, metrics, args.eval_years)
            if args.task == "survival":
                if args.cross_validate:
                    add_baseline(folder / "best.pt", best_found["baseline"])
                write_results(cohort, split, found, best, folder, folder / scored, args)
                log.figures(lambda: draw_results(cohort, split, found, args), state["step"])
        signal = int(du.reduce_max([stop.code])[0])  # came too late to save: all is done, but for other folds
        du.print_main(f"weights: {folder}/model.safetensors; figures: {folder}/figures; summary: {folder}/summary.json")
    results = {"steps": state["step"], "signal": signal, "best": best_found}
    return 0, found | results | {name: metrics.get(f"val/{name}") for name in ("c_index", "c_index_best")}


def rehearse(args: argparse.Namespace) -> None:
    """--rehearse: memory and FLOPs of one optimizer step."""
    import rehearsal_utils as rehearsal

    # --batch_size counts all processes, which are one for each GPU here unless a launcher started them
    here = None if "RANK" in os.environ else torch.cuda.device_count()
    processes = rehearsal.processes_to_plan_for(args.world_size or here)
    memory = rehearsal.memory_to_plan_for(args.gpu_memory)
    cases, accumulation = max(1, round(args.batch_size / processes)), args.gradient_accumulation_steps
    trace = rehearsal.Trace()
    with rehearsal.imaginary_gpu(trace) as ranks:
        args.mixed_precision, _ = hw.choose_precision(args.mixed_precision, ranks.device)
        hw.set_numerics(ranks.device, args.mixed_precision, "", args.deterministic)
        with ranks.device:
            model = build_model(args, 1, None, ranks)
        trial = partial(trial_step, model, largest_batch(cases, args), args, cases * (accumulation - 1))
        optimizer = make_optimizer(model, args)
        step = rehearsal.rehearse_step(trace, model, optimizer, trial, accumulation, processes)

    def words(samples: int) -> str:
        flags = batch_flags(*hw.smaller_batch(cases, accumulation, samples), processes=processes)
        # the Cox loss wants all outputs before the first gradient
        return flags + ", by a third more arithmetic" * (accumulation == 1)

    title = f"survival, {cases} cases per GPU x {accumulation} accumulation, {args.mixed_precision}"
    otherwise = "a smaller --image_size or --resnet"
    if args.norm == "batch":
        # its statistics depend on how the batch is split
        words, otherwise = None, f"--norm group, {otherwise}"
    rehearsal.report_rehearsal(title, step, cases, memory, words, otherwise)
    rehearsal.end_rehearsal()


def main(args: argparse.Namespace) -> int:
    if args.rehearse:
        rehearse(args)
    du.launch_workers(args.world_size or torch.cuda.device_count() or 1)
    backend = args.backend if args.backend == "gloo" else None  # NCCL has no host tensors: gloo stays beside it
    with du.setup_distributed(backend, timeout=args.dist_timeout) as ranks:
        try:
            return run(args, ranks)
        except (RuntimeError, MemoryError) as error:
            if not hw.out_of_memory(error):
                raise
            size, accumulation = args.batch_size // ranks.world_size, args.gradient_accumulation_steps
            size, accumulation = hw.split_batch(size, accumulation)
            advice = (
                f"try --batch_size {size * ranks.world_size} --gradient_accumulation_steps {accumulation} (the same "
            )
            advice += "result), a smaller --image_size or --resnet" + auto_batch_advice(args.auto_batch, ranks.device)
            du.leave_alone(
                f"out of memory at --batch_size {args.batch_size} over {ranks.world_size} processes; {advice}"
            )


if __name__ == "__main__":
    run_main(main, ARGS)
