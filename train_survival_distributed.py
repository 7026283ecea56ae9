"""Train a network that predicts the log-hazard of a major adverse cardiac event (MACE) from a 3D CT volume.

    python train_survival_distributed.py --csv_path data/dataset.csv                     # every GPU, or one CPU process
    torchrun --nproc_per_node=4 train_survival_distributed.py --csv_path data/dataset.csv
    python -m torch.distributed.launch --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> \\
        --master_port=12355 train_survival_distributed.py --csv_path data/dataset.csv      # --node_rank=1 on node 1
    python train_survival_distributed.py --csv_path data/dataset.csv --clinical_columns age sex stage
    python train_survival_distributed.py --csv_path data/dataset.csv --folds 5 --repeats 3  # cross-validation
    python train_survival_distributed.py --csv_path data/dataset.csv --eval_only --val_fold test
    python train_survival_distributed.py --predict other_hospital.csv

Data: CT volumes (NIfTI or DICOM) and a table with one row per volume: path, time until the event or censoring, event
(1, or 0 if censored) and fold. Without data, `make demo TASK=survival` generates synthetic CTs and trains on them.
"""

import hashlib
import math
from argparse import BooleanOptionalAction, Namespace
from dataclasses import dataclass
from pathlib import Path

from utils.cli import (
    InputError,
    Parser,
    RunError,
    add_common_arguments,
    launch_workers,
    pattern,
    real,
    run_main,
    whole,
    with_flags,
)

FORMAT = "survival/3"
# ridge penalties to try for Cox models, in decreasing order: each fit starts from the previous coefficients
PENALTIES = [10 ** (power / 2) for power in range(7, -2, -1)]
# flags that define the model and its input; with a checkpoint, their values come from the checkpoint
MODEL_FLAGS = (
    "image", "resnet", "base_channels", "stem_stride", "norm", "image_size", "hu_window", "spacing", "orientation",
    "clinical_columns", "mask_column", "mask_mode", "mask_margin",
)  # fmt: skip


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    advanced = parser.advanced.add_argument

    add = parser.add_argument_group("data").add_argument
    add("--csv_path", metavar="FILE", default="data/dataset.csv", help="table of cases")
    add("--data_dir", metavar="DIR", help="folder that relative paths start from; default: the table's folder")
    add("--time_unit", choices=("days", "months", "years"), default="days", help="unit of the time column")
    for kind in ("path", "time", "event", "id"):
        advanced(f"--{kind}_column", metavar="NAME", help=f"name of the {kind} column if it is not a usual one")
    add("--fold_column", default="Fold_1", help="column with the fold of each row")
    advanced("--train_fold", default="train", help="value of --fold_column for training rows")
    add("--val_fold", help="value of --fold_column for validation rows, default val; with --folds: run only this fold")
    add("--folds", type=whole(2), help="cross-validate over this many folds, with the events spread evenly")
    advanced("--repeats", type=whole(1), default=1, help="repeats of the cross-validation, each with its own seed")
    add("--clinical_columns", nargs="+", default=[], metavar="NAME", help="columns to use as inputs besides the image")
    add("--stratum_column", metavar="NAME", help="hospital or scanner column; C is also reported within its values")
    add("--mask_column", metavar="NAME", help="column with the path of a mask on the volume's voxel grid")
    advanced("--mask_mode", choices=("crop", "channel"), default="crop", help="crop to the mask or add it as a channel")
    advanced("--mask_margin", type=real(0), default=10.0, help="margin of the crop in mm; an empty mask crops nothing")

    add = parser.add_argument_group("volumes").add_argument
    xyz = {"nargs": 3, "metavar": ("X", "Y", "Z")}
    advanced("--image", choices=("volume", "none"), default="volume", help="none: use only the clinical columns")
    add("--image_size", type=whole(8), **xyz, default=[256, 256, 64], help="input size in voxels; lower it on OOM")
    add(
        "--hu_window",
        type=real(-1e5),
        nargs=2,
        default=[-1000.0, 1000.0],
        metavar=("LOW", "HIGH"),
        help="HU values that become 0 and 1",
    )
    add("--spacing", type=real(0, above=True), **xyz, help="voxel size in mm to resample to first")
    axes = pattern("as-is|(?=.*[RL])(?=.*[AP])(?=.*[SI]).{3}", "as-is, or where X, Y and Z point to, as RAS or LPS")
    advanced(
        "--orientation",
        type=axes,
        metavar="CODES",
        default="RAS",
        help="axes to turn all volumes to; as-is: keep the axes of each file",
    )
    add(
        "--augmentation",
        "--augment",
        dest="augment",
        action=BooleanOptionalAction,
        default=True,
        help="random flips and quarter turns",
    )
    add("--cache_dir", default="runs/cache/survival", help="cache of resized volumes; may be deleted; '': no cache")
    add("--use_smart_cache", action="store_true", help="train each epoch on a changing subset held in memory")
    advanced("--cache_rate", type=real(0, 1, above=True), default=0.5, help="share of the training cases in this cache")
    advanced(
        "--replace_rate", type=real(0, 1, above=True), default=0.5, help="share of the cache replaced after each epoch"
    )

    add = parser.add_argument_group("model").add_argument
    resnets = [f"resnet{depth}" for depth in (10, 18, 34, 50, 101, 152)]
    add("--resnet", choices=resnets, default="resnet50", help="MONAI's 3D ResNet; choose a smaller one on OOM")
    advanced(
        "--base_channels", type=whole(8), default=64, help="channels of the first stage; 64 as published, 8 for a trial"
    )
    text = "stride of the first convolution; 1: as in the published guide; 2: as in MedicalNet, an eighth of the cost"
    advanced("--stem_stride", type=int, choices=(1, 2), default=1, help=text)
    advanced(
        "--norm", choices=("group", "batch"), default="group", help="batch: as published; group: for any number of GPUs"
    )
    add("--init", choices=("random", "pretrained"), default="random", help="pretrained: load --pretrained_path")
    add("--pretrained_path", metavar="FILE", help="model.safetensors of another run, or a MedicalNet .pth")
    advanced("--freeze_epochs", type=whole(0), default=0, help="number of first epochs that train only the head")

    text = "inner folds of the training fold, to weight the image term on unseen cases; 0: its weight stays 1"
    add("--inner_folds", type=whole(0), default=2, metavar="N", help=text)

    add = parser.add_argument_group("optimizer and schedule").add_argument
    advanced("--weight_decay", type=real(0), default=1e-5, help="weight decay of AdamW")
    add(
        "--lr_schedule",
        "--scheduler",
        dest="scheduler",
        choices=("cosine", "constant"),
        default="cosine",
        help="learning rate after the warm-up",
    )
    advanced("--eta_min", type=real(0), default=1e-7, help="learning rate at the end of the cosine")
    advanced("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up")

    add = parser.add_argument_group("evaluation and prediction").add_argument
    years = [1.0, 2.0, 3.0, 4.0, 5.0]
    add(
        "--eval_years",
        type=real(0, above=True),
        nargs="+",
        default=years,
        metavar="YEAR",
        help="horizons of AUC, Brier score and S(t)",
    )
    add("--rival_run", metavar="DIR", help="another run on the same fold to add to the table, with a paired test")
    add("--predict", metavar="FILE", help="predict the risk of each row of a table; rows with outcomes are scored")

    defaults = {"output_dir": "runs/survival", "num_epochs": 50, "learning_rate": 1e-4, "batch_size": 24}
    add_common_arguments(parser, **defaults, batch_of_all=True, least_epochs=0)
    # flags from the published training guide (guide 2 in README.md): aliases of other flags, or ignored
    advanced("--output", dest="output_dir", help="the same as --log_dir")
    advanced("--max_grad_norm", dest="grad_clip", type=real(0), help="the same as --grad_clip")
    for flag in ("--amp", "--pin_memory"):
        advanced(flag, action="store_true", help="accepted; always on with a GPU")
    advanced("--backend", choices=("nccl", "gloo"), help="accepted; the backend is chosen automatically")
    args = parser.parse(argv)
    if (args.init == "pretrained") != bool(args.pretrained_path):
        parser.error("--init pretrained and --pretrained_path go together")
    every_fold = args.folds and not args.val_fold
    if every_fold and (args.eval_only or args.resume_from not in (None, "auto")):
        parser.error("--folds: each has checkpoints of its own, which --resume_from auto takes; or name a --val_fold")
    if args.repeats > 1 and not every_fold:
        parser.error("--repeats: needs --folds, without --val_fold")
    if args.inner_folds == 1:
        parser.error("--inner_folds: 0, or at least 2")
    if args.image == "none":
        if args.use_smart_cache or args.pretrained_path or args.mask_column:
            parser.error("--image none: goes without --use_smart_cache, --pretrained_path and --mask_column")
        if not args.clinical_columns and not args.predict:
            parser.error("--image none: needs --clinical_columns")
        args.num_epochs, args.auto_batch, args.gpu_shares = 0, False, "equal"
    if args.hu_window[0] >= args.hu_window[1] or args.eta_min > args.learning_rate or args.base_channels % 8:
        parser.error("--hu_window LOW < HIGH, --eta_min at most --lr, and --base_channels a multiple of 8")
    return args


if __name__ == "__main__":
    # parse flags before the slow imports, so that --help and flag errors appear immediately
    ARGS = parse_args()
    launch_workers(ARGS.world_size)


import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import distributed_utils as du
from hardware_utils import GroupNorm, autocast, set_precision
from tasks.survival import report
from tasks.survival.data import (
    MEASUREMENTS,
    Cohort,
    MultiGPUSurvivalDataset,
    Volumes,
    assign_folds,
    augment,
    choose_fold,
    encode_columns,
    fit_columns,
    read_cohort,
)
from utils import checkpoint
from utils.engine import make_engine
from utils.loop import Plan, Run, Step, Training
from utils.volumes import describe

ADVICE = "give a smaller --image_size or --resnet, or --stem_stride 2"

# --- model ------------------------------------------------------------------------------------------------------------


class MaxPool3d(nn.Module):
    """Max pooling (kernel 3, stride 2, padding 1) with a deterministic gradient, unlike torch's max pooling on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, [1] * 6, value=-torch.inf)
        for axis in (2, 3, 4):
            x = x.unfold(axis, 3, 2).amax(-1)
        return x


class PaddedShortcut(nn.Module):
    """MedicalNet's type A shortcut: subsamples the input and appends channels of zeros.

    MONAI's version detaches the input from the autograd graph, so no gradient flows through it.
    """

    def __init__(self, planes: int, stride: int):
        super().__init__()
        self.planes, self.stride = planes, stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., :: self.stride, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, 0, 0, self.planes - x.shape[1]))


class RiskNet(nn.Module):
    """Predicts a log-hazard as a Cox model of the columns (tabular term) plus a 3D ResNet of the image (image term).

    The Cox coefficients stay fixed during training. The ResNet's linear head is initialized to zero, so the initial
    predictions are those of the Cox model unless pretrained weights of the head are loaded.
    """

    def __init__(self, args: Namespace, columns: int, precision: str, shortcut: str):
        super().__init__()
        self.precision = precision
        self.shape = 1 + bool(args.mask_column and args.mask_mode == "channel"), *args.image_size
        if args.image == "volume":
            self.backbone = make_backbone(args, self.shape[0], shortcut)
            # no bias: adding a constant to all log-hazards does not change the partial likelihood
            self.head = nn.Linear(self.backbone.in_planes, 1, bias=False)
            nn.init.zeros_(self.head.weight)
        self.register_buffer("linear", torch.zeros(columns, dtype=torch.float64))
        self.register_buffer("image_weight", torch.ones((), dtype=torch.float64))

    def linear_part(self, batch: dict) -> Tensor:
        if not len(self.linear):
            return torch.zeros(1, dtype=torch.float64, device=self.linear.device)
        return batch["columns"].double() @ self.linear

    def forward(self, batch: dict) -> Tensor:
        """Return the log-hazards (B,) in float64. batch: {"columns": (B, n), "image": (B, C, X, Y, Z) in [0, 1]}."""
        log_hazard = self.linear_part(batch)
        if hasattr(self, "backbone"):
            images = batch["image"].float()
            with autocast(images.device, self.precision):
                features = self.backbone(images.contiguous(memory_format=torch.channels_last_3d))
            # compute the head outside autocast, because rounding to bf16 could give different cases equal log-hazards
            log_hazard = log_hazard + self.image_weight * self.head(features.float())[:, 0]
        return log_hazard


def make_backbone(args: Namespace, channels: int, shortcut: str) -> nn.Module:
    from monai.networks import nets

    backbone = getattr(nets, args.resnet)(
        spatial_dims=3,
        n_input_channels=channels,
        feed_forward=False,
        bias_downsample=False,
        shortcut_type=shortcut,
        widen_factor=args.base_channels / 64,
        conv1_t_stride=args.stem_stride,
    )
    if args.deterministic:
        backbone.maxpool = MaxPool3d()
    for module in list(backbone.modules()):
        for name, child in module.named_children():
            # the `norm` argument of MONAI's ResNet replaces only the first BatchNorm
            if args.norm == "group" and isinstance(child, nn.BatchNorm3d):
                setattr(module, name, GroupNorm(8, child.num_features))
            if shortcut == "A" and name == "downsample":
                setattr(module, name, PaddedShortcut(**child.keywords))
    return backbone


def build_model(
    args: Namespace, precision: str, device: torch.device, columns: int = 0, saved: dict | None = None
) -> RiskNet:
    """Build the model, with the same initial weights on every rank.

    columns: number of encoded columns. saved: the checkpoint, or None for a new run. Raises InputError if the loaded
    weights do not fit the model.
    """
    torch.manual_seed(args.seed)
    found = saved["model"] if saved else read_pretrained(args)
    # type A shortcuts have no weights, whereas every network of type B has weights named "downsample"
    is_type_a = found and not any("downsample" in name for name in found)
    model = RiskNet(args, columns, precision, shortcut="A" if is_type_a else "B")
    if saved:
        checkpoint.load_trained(model, found)
    elif found:
        own = dict(model.named_parameters())
        fits = {name: value for name, value in found.items() if name in own and value.shape == own[name].shape}
        lacking = [name for name in own if name.startswith("backbone.") and name not in fits]
        if lacking:
            reason = f"weights of another net ({lacking[0]} does not fit)"
            raise InputError(f"{args.pretrained_path}: {reason}; check --resnet, --base_channels and --norm")
        model.load_state_dict(fits, strict=False)
        du.print_main(f"weights from {args.pretrained_path}; the head is {'kept' if 'head.weight' in fits else 'new'}")
    return model.to(device, memory_format=torch.channels_last_3d)


def read_pretrained(args: Namespace) -> dict[str, Tensor]:
    """Return the weights in the --pretrained_path file as {RiskNet parameter name: tensor}, or {} without this flag.

    Raises InputError if the file is unreadable or if MedicalNet's weights do not fit --norm or --stem_stride.
    """
    path = args.pretrained_path
    if not path:
        return {}
    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
            found = found.get("model", found.get("state_dict", found))
    except Exception as error:
        raise InputError(f"{path}: no readable file of weights ({type(error).__name__}); check it") from None
    found = {name.removeprefix("module."): value for name, value in found.items()}
    if not any(name.startswith("backbone.") for name in found):
        if args.norm != "batch" or args.stem_stride != 2:
            raise InputError(f"{path}: MedicalNet's weights belong to --norm batch --stem_stride 2; give both")
        found = {f"backbone.{name}": value for name, value in found.items()}
    return found


# --- loss -------------------------------------------------------------------------------------------------------------


def cox_loss(log_hazard: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Return the negative Cox partial log-likelihood per event, with Efron's method (1977) for ties; 0 if there are no
    events.

    log_hazard: (n,), on any device. time, event: (n,), on the CPU, so that this function never waits for the GPU.
    """
    device = log_hazard.device
    rows = event.nonzero()[:, 0]
    if not len(rows):
        return (log_hazard * 0).sum()
    times = time[rows]
    own = log_hazard[rows.to(device, non_blocking=True)]

    gone = (time < times[:, None]).to(device, non_blocking=True)
    total = log_hazard.expand(len(rows), -1).masked_fill(gone, -torch.inf).logsumexp(1)

    # Efron: for the l-th of d tied events (l = 0 ... d - 1), the hazards of the tied cases have the weight 1 - l / d
    tied = times == times[:, None]
    before = (tied.tril(-1).sum(1).double() / tied.sum(1)).to(total.dtype).to(device, non_blocking=True)
    untied = (~tied).to(device, non_blocking=True)
    together = own.expand(len(rows), -1).masked_fill(untied, -torch.inf).logsumexp(1)
    total = total + torch.log1p(-before * (together - total).exp())
    return (total - own).sum() / len(rows)


def log_likelihood(log_hazard: np.ndarray, time: np.ndarray, event: np.ndarray) -> float:
    return -float(cox_loss(*map(torch.from_numpy, (log_hazard, time, event)))) * event.sum()


def fit_cox(
    x: np.ndarray, time: np.ndarray, event: np.ndarray, penalty: float | np.ndarray, start=None, tolerance=1e-10
) -> np.ndarray:
    """Fit a ridge Cox model to the covariates x (n, k) in float64; return its coefficients b (k,).

    Minimizes the negative partial log-likelihood plus the sum of penalty / 2 * b^2. penalty: a number, or an array
    (k,).
    """
    rows, *outcome, penalty = map(torch.as_tensor, (x, time, event, penalty))
    beta = torch.zeros(x.shape[1], dtype=torch.float64) if start is None else torch.tensor(start)
    options = {"max_iter": 500, "tolerance_grad": tolerance, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS([beta.requires_grad_()], line_search_fn="strong_wolfe", **options)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cox_loss(rows @ beta, *outcome) + (penalty / 2 * beta.square()).sum() / event.sum()
        value.backward()
        return value

    # use one thread, because the number of threads may change the last bits of the coefficients
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        optimizer.step(loss)
    finally:
        torch.set_num_threads(threads)
    return beta.detach().numpy()


def select_ridge(x: np.ndarray, data: MultiGPUSurvivalDataset, seed: int) -> tuple[np.ndarray, float, float]:
    """Fit a ridge Cox model to the covariates x (n, k) of the cases in `data`, with the best penalty in PENALTIES.

    The penalty is selected by 5-fold cross-validated log-likelihood (Verweij and van Houwelingen 1993). Returns
    (coefficients (k,), penalty, cross-validated log-likelihood).
    """
    time, event = report.outcome(data)
    fold = assign_folds(data.cohort.case[data.rows], event, np.ones(len(x), bool), 5, seed)
    likelihood = np.zeros(len(PENALTIES))
    for left_out in range(1, 6):
        used = fold != left_out
        beta = np.zeros(x.shape[1])
        for place, penalty in enumerate(PENALTIES if event[used].any() else ()):
            beta = fit_cox(x[used], time[used], event[used], penalty, beta, 1e-5)
            likelihood[place] += log_likelihood(x @ beta, time, event)
            likelihood[place] -= log_likelihood(x[used] @ beta, time[used], event[used])
    best = int(likelihood.argmax())
    return fit_cox(x, time, event, PENALTIES[best]), PENALTIES[best], float(likelihood[best])


def load_or_fit_cox_models(run: Run, train: MultiGPUSurvivalDataset, clinical: int) -> dict[str, dict]:
    """All ranks: return the Cox models from the checkpoint; in a new run, rank 0 fits them to the training set.

    clinical: number of clinical columns, which precede the image measurements. Returns {model: {"beta": coefficients (0
    for unused columns), "penalty": ridge penalty, "likelihood": cross-validated log-likelihood}}.
    """
    if run.checkpoint:
        return run.checkpoint["cox_models"]
    found = {}
    if run.ranks.is_main:
        x = train.columns[train.rows].astype(float)
        parts = {"clinical": slice(clinical), "image_numbers": slice(clinical, None)}
        parts = {name: part for name, part in parts.items() if x[:, part].size}
        if len(parts) == 2:
            parts["clinical_and_image_numbers"] = slice(None)
        for name, part in parts.items():
            beta = np.zeros(x.shape[1])
            beta[part], penalty, likelihood = select_ridge(x[:, part], train, run.args.seed)
            found[name] = {"beta": beta.tolist(), "penalty": penalty, "likelihood": likelihood}
    return du.broadcast_object(found)


def best_cox_model(models: dict[str, dict]) -> str:
    return max(models, key=lambda name: models[name]["likelihood"])


def estimate_image_weight(x: np.ndarray, image: np.ndarray, train: MultiGPUSurvivalDataset, cox_model: dict) -> dict:
    """Estimate the weight of the image term of the log-hazard by fitting a Cox model to the columns and the image term.

    x: (n, k), encoded columns. image: (n,), image term of each case, predicted by a network not trained on the case.
    cox_model: Cox model of the columns. Returns {"linear": coefficients of the columns, "image_weight": weight,
    "image_chi2": chi2}.

    If the image term is significant (chi2 > 3.84) and its coefficient is positive, the fitted coefficients are shrunk
    towards cox_model by the fraction 1 / chi2 (van Houwelingen and le Cessie 1990). Otherwise the weight is 0, and the
    coefficients are those of cox_model.
    """
    linear = np.array(cox_model["beta"])
    seen = linear != 0
    before, scale = np.append(linear[seen], 0.0), image.std() or 1.0
    both = np.column_stack([x[:, seen], image / scale])
    penalties = np.append(np.full(seen.sum(), cox_model["penalty"]), 0.0)
    beta = fit_cox(both, *report.outcome(train), penalties, before)

    def likelihood(beta: np.ndarray) -> float:
        return log_likelihood(both @ beta, *report.outcome(train)) - float(penalties @ beta**2) / 2

    chi2 = max(0.0, 2 * (likelihood(beta) - likelihood(before)))
    shrunk = before + (1 - 1 / chi2) * (beta - before) if chi2 > 3.84 and beta[-1] > 0 else before
    linear[seen] = shrunk[:-1]
    return {"linear": linear.tolist(), "image_weight": float(shrunk[-1]) / scale, "image_chi2": chi2}


# --- optimizer step ---------------------------------------------------------------------------------------------------


def cox_step(training: Training, step: Step, loader: DataLoader, args: Namespace) -> None:
    """All ranks: compute the gradients for one optimizer step, independently of the number of ranks and micro-batches.

    The risk set of an event spans the global batch, so every rank computes the loss from the log-hazards of all ranks.
    If any rank may have several micro-batches, an extra forward pass without gradients computes the log-hazards (Gao et
    al. 2021).
    """
    data, sampler, position, engine = loader.dataset, loader.batch_sampler, training.position, training.engine
    sizes, device = training.batch, training.ranks.device
    rows = data.rows_of(sampler.global_batch(position.samples), position.epoch)
    time, event = torch.from_numpy(data.cohort.time[rows]), torch.from_numpy(data.cohort.event[rows])
    for place, batch in enumerate(step.batches):
        step.batches[place] = moved = du.to_device(batch, device)
        if args.augment and args.image == "volume":
            # use the CPU copy of the indices: tolist() on a GPU tensor waits for the GPU
            moved["image"] = augment(moved["image"], batch["index"].tolist(), args.seed, position.epoch)

    # all ranks must take the same branch, because DDP communicates during forward passes
    single_pass = step.samples <= sizes.micro_batch_size * training.ranks.world_size and len(set(sizes.gpu_shares)) == 1
    if single_pass:
        outputs = [engine.wrapped(step.batches[0])]
    else:
        with torch.no_grad():
            outputs = [engine.model(batch) for batch in step.batches]
    log_hazard = torch.zeros(step.samples, device=device)
    for number, output in zip(step.numbers, outputs, strict=False):
        log_hazard[number * sizes.micro_batch_size :][: len(output)] = output.detach()
    log_hazard = du.reduce_sum(log_hazard).requires_grad_()
    loss = cox_loss(log_hazard, time, event)
    (gradient,) = torch.autograd.grad(loss, log_hazard)

    events = torch.full_like(loss, float(event.sum()))
    for number, batch in zip(step.numbers or [0], step.micro_batches(), strict=True):
        output = outputs[0] if single_pass else engine.wrapped(batch)
        output_gradient = gradient[number * sizes.micro_batch_size :][: len(output)]
        # the loss and the event count cover the global batch, so log them only with the first micro-batch
        step.backward(loss * (number == 0), events * (number == 0), through=(output, output_gradient))


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict_parts(model: RiskNet, data: MultiGPUSurvivalDataset, batch_size: int, run: Run) -> np.ndarray:
    """All ranks: predict the cases in `data`, splitting them among the ranks; return all predictions on every rank.

    Returns float64 (n, 2), the tabular term and the image term of each log-hazard. Raises RunError if a prediction is
    not finite.
    """
    model.eval()
    loader = du.create_distributed_dataloader(data, batch_size, train=False, num_workers=run.args.num_workers)
    rows, outputs = [], []
    for batch in run.batches(loader):
        rows.append(batch["index"])
        linear = model.linear_part(batch)
        outputs.append(torch.stack([linear, model(batch) - linear], 1))
    parts = torch.zeros(len(data.cohort), 2, dtype=torch.float64)
    if outputs:
        parts[torch.cat(rows).cpu()] = torch.cat(outputs).cpu()
    parts = du.reduce_sum(parts).numpy()[data.rows]
    if not np.isfinite(parts).all():
        raise RunError("predictions are not finite; lower --lr")
    return parts


def validation_loss(parts: np.ndarray, val: MultiGPUSurvivalDataset) -> float:
    time, event = report.outcome(val)
    return -log_likelihood(parts.sum(1), time, event) / event.sum()


def evaluate(model: RiskNet, sets: dict, batch_size: int, run: Run) -> dict[str, float]:
    """All ranks: score the validation set during training, for metrics.jsonl; return {"val/<metric>": value}."""
    parts = predict_parts(model, sets["val"], batch_size, run)
    metrics = {}
    # only rank 0 computes the metrics, so that all ranks base decisions on the same numbers
    if run.ranks.is_main:
        scores = report.score(parts.sum(1), sets["val"], sets["train"], run.args.eval_years)
        metrics = {"val/loss": validation_loss(parts, sets["val"])}
        metrics |= {f"val/{name}": value for name, value in scores.items()}
    return du.broadcast_object(metrics)


def fit_baseline_models(sets: dict, cox_models: dict[str, dict]) -> dict[str, tuple]:
    """Return the baseline models' log-hazards for the validation set: Kaplan-Meier, Cox models and a random forest.

    For synthetic data, the true risk is included. The forest predicts martingale residuals from the columns (Therneau,
    Grambsch and Fleming 1990). scikit-survival's forest is not used because of its GPL license. Returns {model:
    (log-hazards, baseline hazard or None)}.
    """
    from sklearn.ensemble import RandomForestRegressor

    val, train = sets["val"], sets["train"]
    time, event = report.outcome(train)
    x_val, x_train = (data.columns[data.rows].astype(float) for data in (val, train))
    null_hazard = report.fit_baseline_hazard(np.zeros(len(time)), train)
    found = {"kaplan_meier": (np.zeros(len(x_val)), null_hazard)}
    for name, model in cox_models.items():
        beta = np.array(model["beta"])
        found[name] = x_val @ beta, report.fit_baseline_hazard(x_train @ beta, train)
    forest = RandomForestRegressor(500, min_samples_leaf=10, max_features="sqrt", random_state=0)
    hazard = -np.log(report.survival_curves(null_hazard, np.zeros(1), time)[0])
    found["forest"] = forest.fit(x_train, event - hazard).predict(x_val), None
    if "true_log_hazard" in val.cohort.table:
        found["true_risk"] = pd.to_numeric(val.cohort.table["true_log_hazard"]).to_numpy(float)[val.rows], None
    return found


def test(
    run: Run,
    sets: dict,
    parts: dict[str, np.ndarray],
    reference: dict,
    cox_models: dict[str, dict],
    other_run: dict[str, tuple],
    title: str,
) -> tuple[dict[str, float], pd.DataFrame | None]:
    """All ranks: score the validation set after training or with --eval_only; rank 0 prints the scores and writes
    predictions and a figure.

    parts: {"val": ..., "train": ...} from predict_parts(). reference: result of report.fit_reference(). Returns
    ({metric: value}, table). The table is report.cases_of() plus each model's log-hazards on rank 0, and None on other
    ranks.
    """
    args, val, metrics, cases = run.args, sets["val"], {}, None
    prefix = "eval_" if args.eval_only else ""
    with du.agree_on_errors():
        if run.ranks.is_main:
            tables = {
                name: report.predictions(sets[name], [(parts[name], reference)], args.eval_years).assign(fold=name)
                for name in ("val", "train")
            }
            log_hazard = tables["val"]["log_hazard"].to_numpy()
            models = {"network": (log_hazard, reference)} | other_run | fit_baseline_models(sets, cox_models)
            cases = report.cases_of(val, args.stratum_column)
            metrics = {"val/loss": validation_loss(parts["val"], val)}
            metrics |= report.print_table(title, models, cases, sets, args.eval_years)
            cases = cases.assign(**{name: risk for name, (risk, _) in models.items()})
            with run.writing():
                pd.concat(tables.values()).to_csv(run.folder / f"{prefix}predictions.csv", index=False)
                figure = report.draw_figure(log_hazard, val, args.eval_years, reference, metrics)
                run.figure(f"{prefix}val_survival", figure)
                if not args.eval_only:
                    run.write_summary("baseline", reference)
    return du.broadcast_object(metrics), cases


# --- run --------------------------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(0))]
    return torch.optim.AdamW(parameters, args.learning_rate, weight_decay=args.weight_decay, fused=True)


def read_table(path: str, args: Namespace, outcome: bool = True) -> Cohort:
    if path == "data/dataset.csv" and not Path(path).exists():
        raise InputError(
            f"{path}: no such table; give --csv_path. No data yet? `make demo TASK=survival` generates one and trains; "
            "`python -m tools.sample_data survival data` only generates it"
        )
    columns = {f"{kind}_column": getattr(args, f"{kind}_column") for kind in ("path", "time", "event", "id", "mask")}
    with du.agree_on_errors():
        return read_cohort(path, args.data_dir, args.time_unit, outcome, args.image == "volume", **columns)


@dataclass
class Inputs:
    """Input of the model: a table of cases, its encoded columns, and a reader for its CT volumes.

    columns: (rows, n), the encoded clinical columns followed by the image measurements. clinical: number of encoded
    clinical columns. encoding: result of fit_columns().
    """

    cohort: Cohort
    encoding: list[dict]
    columns: np.ndarray
    clinical: int
    volumes: Volumes

    def sets(self, rows: dict[str, np.ndarray], args: Namespace) -> dict[str, MultiGPUSurvivalDataset]:
        options = {"columns": self.columns, "volumes": self.volumes}
        sets = {name: MultiGPUSurvivalDataset(self.cohort, rows=part, **options) for name, part in rows.items()}
        if "train" in sets:
            smart = {name: getattr(args, name) for name in ("use_smart_cache", "cache_rate", "replace_rate", "seed")}
            sets["cached"] = MultiGPUSurvivalDataset(self.cohort, rows=rows["train"], **options, **smart)
        return sets


def read_inputs(
    cohort: Cohort, encoding: list[dict], rows: np.ndarray, args: Namespace, train: np.ndarray | None = None
) -> Inputs:
    """All ranks: encode the cohort's columns; validate the CT volumes of `rows` and compute their image measurements,
    split among the ranks.

    encoding: result of fit_columns(). train: rows for fitting the encodings of the image measurements; None if
    `encoding` already covers the measurements. Raises InputError naming the unusable volumes.
    """
    orientation = None if args.orientation == "as-is" else args.orientation
    mask_mode = args.mask_column and args.mask_mode
    volumes = Volumes(
        args.image_size, args.hu_window, args.spacing, orientation, mask_mode, args.mask_margin, args.cache_dir
    )
    with du.agree_on_errors():
        clinical = encode_columns(cohort, [column for column in encoding if column["name"] not in MEASUREMENTS])
    if args.image == "none":
        return Inputs(cohort, encoding, clinical, clinical.shape[1], volumes)
    summaries = MultiGPUSurvivalDataset(cohort, rows=rows, volumes=volumes).measure_volumes(args.num_workers)
    du.print_main(f"volumes: {describe(summaries, orientation)}")
    sizes = summaries[:, :3]
    if not args.spacing and (sizes.max(0) > 1.1 * sizes.min(0)).any():
        du.print_main("warning: voxel sizes vary by more than 10 %, which the network does not see; see --spacing")
    if train is not None:
        measured = [name for name in MEASUREMENTS if (cohort.table[name].iloc[train] != "nan").any()]
        encoding = encoding + fit_columns(cohort, measured, train)
    measured = encode_columns(cohort, [column for column in encoding if column["name"] in MEASUREMENTS])
    return Inputs(cohort, encoding, np.hstack([clinical, measured]), clinical.shape[1], volumes)


def largest_batch(model: RiskNet, size: int) -> dict:
    return {
        "image": torch.zeros(size, *model.shape, dtype=torch.float16),
        "columns": torch.zeros(size, len(model.linear)),
    }


def trial_step(model: RiskNet, batch: dict, args: Namespace) -> None:
    log_hazard = model(du.to_device(batch, next(model.parameters()).device))
    size = len(log_hazard)
    cox_loss(log_hazard, 1.0 + torch.arange(size), torch.ones(size, dtype=torch.bool)).backward()


def begin_training(
    run: Run, model: RiskNet, inputs: Inputs, sets: dict, cox_models: dict[str, dict], described: str
) -> tuple[Training, DataLoader]:
    """All ranks: prepare `model` for training; return (Training, DataLoader of the training cases).

    Raises InputError if --norm batch is used with several forward passes per step or with several CPU processes.
    """
    args, ranks, train, cached = run.args, run.ranks, sets["train"], sets["cached"]
    name = best_cox_model(cox_models)
    if not run.checkpoint:
        model.linear.copy_(torch.tensor(cox_models[name]["beta"], dtype=torch.float64))
    batch_size, effective = args.batch_size, args.effective_batch_size
    if not run.checkpoint and not effective:
        # as in the published training guide (guide 2 in README.md), --batch_size is the total over all GPUs
        effective = batch_size * args.gradient_accumulation_steps
        batch_size = math.ceil(batch_size / ranks.world_size)
    batch = run.plan_batches(
        model, lambda size: trial_step(model, largest_batch(model, size), args), batch_size, effective
    )
    if args.norm == "batch" and (
        batch.global_batch_size > batch.micro_batch_size * ranks.world_size or len(set(batch.gpu_shares)) > 1
    ):
        raise InputError("--norm batch: a step must be one pass of each GPU; lower --batch_size, or --norm group")
    if args.norm == "batch" and ranks.world_size > 1:
        if ranks.device.type == "cpu":
            raise InputError("--norm batch: statistics over several processes need GPUs; use --norm group")
        # convert to SyncBatchNorm only after plan_batches(): each rank tries batch sizes on its own there, and
        # SyncBatchNorm would wait for the other ranks
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    options = {"seed": args.seed, "num_workers": args.num_workers}
    loader = du.create_distributed_dataloader(
        cached, batch.micro_batch_size, True, batch.global_batch_size, batch.gpu_shares, **options
    )

    case = train.cohort.case[train.rows]
    (time, event), (_, val_event) = report.outcome(train), report.outcome(sets["val"])
    digest = hashlib.sha256(repr([case.tolist(), time.tolist(), event.tolist()]).encode()).hexdigest()[:8]
    invariants = {"training cases": f"{len(case)}, digest {digest}"}
    if args.use_smart_cache:
        invariants["smart cache"] = f"{len(cached)} cases, {cached.replaced_per_epoch} replaced after each epoch"
    banner = {
        "precision": described,
        "linear part": f"{name.replace('_', ' ')}, ridge penalty {cox_models[name]['penalty']:.3g}",
        "events": f"{event.sum()} in training; {val_event.sum()} of {len(val_event)} in validation",
        "model": f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters",
    }
    steps = args.num_epochs * loader.batch_sampler.steps_per_epoch()
    plan = Plan(batch, steps, ["loss", "events"], invariants, banner)
    extra = {"columns": inputs.encoding, "trained_cases": sorted(set(case.tolist())), "cox_models": cox_models}
    engine = make_engine(model, make_optimizer(model, args), model.precision, args, ranks.device, saved=run.checkpoint)
    return Training(run, args, engine, plan, lambda: extra), loader


def train_epochs(training: Training, loader: DataLoader, sets: dict | None = None) -> int:
    """All ranks: train until the last step of the run; validate after each epoch unless `sets` is None.

    With --eval_every_steps, it also validates within epochs. Returns the exit code, which is 0 unless a signal stopped
    training.
    """
    run, args, model = training.run, training.args, training.engine.model
    while not training.is_over():
        frozen = run.position.epoch < args.freeze_epochs
        if args.freeze_epochs:
            model.backbone.requires_grad_(not frozen)
            training.engine.wrap()
        model.train()
        if frozen:
            model.backbone.eval()
        for step in training.steps(loader):
            cox_step(training, step, loader, args)
            factor = du.schedule(run.position.step, training.planned_steps, args.warmup_steps, args.scheduler)
            lowest = args.eta_min if run.position.step >= args.warmup_steps else 0.0
            step.update(lowest + (args.learning_rate - lowest) * factor)
        if training.stopped:
            return training.save_and_stop()
        metrics = evaluate(model, sets, training.batch.micro_batch_size, run) if sets else {}
        training.record(metrics, headline="val/c_index")
    return 0


def cross_fit_image_weight(
    training: Training, inputs: Inputs, train: MultiGPUSurvivalDataset, cox_models: dict[str, dict]
) -> tuple[int, dict, np.ndarray | None]:
    """All ranks: estimate the weight of the image term by cross-validation within the training fold.

    Trains --inner_folds networks. Returns (exit code, result of estimate_image_weight(), parts). parts: (n, 2), the
    tabular term and the image term of each training case's log-hazard, where the image term comes from the network not
    trained on the case. After a stop signal, the exit code is nonzero and parts is None.
    """
    args, ranks, rows, cohort = training.args, training.ranks, train.rows, inputs.cohort
    sizes, precision = training.batch, training.engine.model.precision
    fold = assign_folds(cohort.case[rows], cohort.event[rows], np.ones(len(rows), bool), args.inner_folds, args.seed)
    image = np.zeros(len(rows))
    own = {"batch_size": sizes.micro_batch_size, "effective_batch_size": sizes.global_batch_size, "auto_batch": False}
    own |= {"gpu_shares": ",".join(map(str, sizes.gpu_shares)), "resume_from": "auto" if args.resume_from else None}
    own |= {"max_steps": 0, "profile": None, "wandb": None}
    for left_out in range(1, args.inner_folds + 1):
        du.print_main(f"\n--- weight of the image term: inner fold {left_out} of {args.inner_folds}")
        own["output_dir"] = f"{args.output_dir}/inner_{left_out}_of_{args.inner_folds}"
        run = Run(FORMAT, with_flags(args, **own), ranks, ADVICE, MODEL_FLAGS)
        sets = inputs.sets({"train": rows[fold != left_out], "val": rows[fold == left_out]}, args)
        network = build_model(run.args, precision, ranks.device, inputs.columns.shape[1], run.checkpoint)
        models = load_or_fit_cox_models(run, sets["train"], inputs.clinical)
        inner, loader = begin_training(run, network, inputs, sets, models, described=precision)
        with inner:
            code = train_epochs(inner, loader)
            if not code:
                held_out = predict_parts(network, sets["val"], inner.batch.micro_batch_size, run)[:, 1]
                # subtract the mean, because each network's log-hazards have an arbitrary offset
                image[fold == left_out] = held_out - held_out.mean()
        if not code:
            # a signal may also have arrived while `inner` was being closed
            code = inner.signalled() or training.signalled()
            if code:
                du.print_main("signal: saved after an inner fold; --resume_from auto continues from there")
        if code:
            return code, {}, None
    x = inputs.columns[rows].astype(float)
    cox_model = cox_models[best_cox_model(cox_models)]
    found = du.broadcast_object(estimate_image_weight(x, image, train, cox_model) if ranks.is_main else None)
    weight = found["image_weight"]
    effect = f"its weight is {weight:.2f}" if weight else "it adds nothing, so the Cox model of the columns remains"
    du.print_main(f"image term on cases that its network was not trained on: chi2 {found['image_chi2']:.1f}; {effect}")
    return 0, found, np.column_stack([x @ np.array(found["linear"]), weight * image])


def set_image_weight(model: RiskNet, weighed: dict | None) -> None:
    if weighed:
        model.linear.copy_(torch.tensor(weighed["linear"], dtype=torch.float64))
        model.image_weight.fill_(weighed["image_weight"])


def score_checkpoint(
    model: RiskNet, sets: dict, run: Run, cox_models: dict[str, dict], other_run: dict[str, tuple]
) -> None:
    """All ranks: test the checkpoint's model on the validation fold (--eval_only).

    Raises InputError if the model was trained on cases of the validation fold.
    """
    seen = set(sets["val"].cohort.case[sets["val"].rows]) & set(run.checkpoint["trained_cases"])
    if seen:
        raise InputError(f"--val_fold: the model was trained on {min(seen)} and {len(seen) - 1} more of its cases")
    reference = report.read_reference(run.folder, run.position.step)
    set_image_weight(model, reference)
    parts = {name: predict_parts(model, sets[name], run.micro_batch_size, run) for name in ("val", "train")}
    if not reference:
        du.print_main("warning: these are not the run's final weights, so the image term keeps its weight of 1")
        reference = report.fit_reference(parts["train"], parts["train"], sets["train"])
    metrics, _ = test(run, sets, parts, reference, cox_models, other_run, "val")
    run.write_summary("eval_val", metrics)


def train_fold(args: Namespace, ranks: du.Ranks) -> tuple[int, tuple | None]:
    """All ranks: train on one fold's training set and test on its validation set; with --eval_only, only test.

    Returns (exit code, result of test()); the result is None with --eval_only or if a signal stopped training.
    """
    precision, described = set_precision(args.mixed_precision, ranks.device, args.deterministic, convolves_3d=True)
    run = Run(FORMAT, args, ranks, ADVICE, MODEL_FLAGS)
    args, is_new = run.args, run.checkpoint is None
    cohort = read_table(args.csv_path, args)
    with du.agree_on_errors():
        train, val = choose_fold(cohort, args.fold_column, args.train_fold, args.val_fold, args.folds or 0, args.seed)
        encoding = fit_columns(cohort, args.clinical_columns, train) if is_new else run.checkpoint["columns"]
        if args.stratum_column:
            cohort.column(args.stratum_column)
    inputs = read_inputs(cohort, encoding, np.concatenate([train, val]), args, train if is_new else None)
    sets = inputs.sets({"train": train, "val": val}, args)
    with du.agree_on_errors():
        other_run = report.read_other_run(args.rival_run, sets["val"])
        model = build_model(args, precision, ranks.device, inputs.columns.shape[1], run.checkpoint)
    cox_models = load_or_fit_cox_models(run, sets["train"], inputs.clinical)
    if args.eval_only:
        score_checkpoint(model, sets, run, cox_models, other_run)
        return 0, None

    training, loader = begin_training(run, model, inputs, sets, cox_models, described)
    steps, batch_size = training.planned_steps, training.batch.micro_batch_size
    with training:
        if not steps and is_new:
            training.record(evaluate(model, sets, batch_size, run), headline="val/c_index")
        code = train_epochs(training, loader, sets)
        if code:
            return code, None
        weighed, unseen = {}, None
        events = cohort.event[train].sum()
        if events < 4 * args.inner_folds and steps:
            du.print_main(f"warning: {events} events are too few to weight the image term; its weight stays 1")
        # do not estimate the image weight if --max_steps ended the run early
        elif args.inner_folds and 0 < run.position.step == steps:
            training.flush()
            code, weighed, unseen = cross_fit_image_weight(training, inputs, sets["train"], cox_models)
            if code:
                return code, None

        # in cross-validation, test the last step's weights: selecting a checkpoint on the test fold would bias the
        # result
        is_cross_validated = args.folds and args.val_fold
        step = run.position.step if is_cross_validated else training.load_best()
        is_best = not is_cross_validated and run.position.best is not None
        set_image_weight(model, weighed)
        parts = {name: predict_parts(model, sets[name], batch_size, run) for name in ("val", "train")}
        reference = {"step": step}
        reference |= report.fit_reference(parts["train"], parts["train"] if unseen is None else unseen, sets["train"])
        reference |= {"linear": model.linear.tolist(), "image_weight": float(model.image_weight)}
        title = "val, best.pt (chosen on this fold)" if is_best else "val, last step"
        metrics, cases = test(run, sets, parts, reference, cox_models, other_run, title)
        metrics |= {f"val/{name}": weighed[name] for name in ("image_weight", "image_chi2") if weighed}
        last = training.last_logged("val/c_index")
        if not is_cross_validated and last is not None:
            metrics["val/c_index_last"] = last
        training.finish(metrics)
        # a stop signal after training must keep the cross-validation from starting another fold
        code = training.signalled() if is_cross_validated else 0
    return code, (metrics, cases)


def cross_validate(args: Namespace, ranks: du.Ranks) -> int:
    # only rank 0's answer counts: on a network drive, the other ranks may see outdated contents of the folder
    if du.broadcast_object(Path(args.output_dir, "run_id").exists()):
        raise InputError(f"{args.output_dir}: holds a single run; choose another folder for --folds")
    metrics, cases = [], {}
    for repeat in range(1, args.repeats + 1):
        for fold in range(1, args.folds + 1):
            name = Path(f"repeat_{repeat}", f"fold_{fold}")
            own = {"val_fold": str(fold), "seed": args.seed + repeat - 1}
            own["output_dir"] = str(Path(args.output_dir, name))
            own["rival_run"] = args.rival_run and str(Path(args.rival_run, name))
            du.print_main(f"\n--- repeat {repeat} of {args.repeats}, fold {fold} of {args.folds}")
            code, result = train_fold(with_flags(args, **own), ranks)
            if code:
                return code
            metrics.append(result[0])
            cases[repeat, fold] = result[1]
    if ranks.is_main:
        cases = pd.concat(cases, names=["repeat", "fold"]).reset_index(["repeat", "fold"])
        report.print_cross_validation(Path(args.output_dir), metrics, cases, args)
    return 0


def predict(args: Namespace, ranks: du.Ranks) -> None:
    precision, _ = set_precision(args.mixed_precision, ranks.device, args.deterministic, convolves_3d=True)
    folders = [] if args.resume_from else du.broadcast_object(report.folds_of(Path(args.output_dir)))
    models, trained = [], set()
    for folder in folders or [Path(args.output_dir)]:
        own = with_flags(args, output_dir=str(folder), resume_from="auto" if folders else args.resume_from)
        run = Run(FORMAT, own, ranks, ADVICE, MODEL_FLAGS)
        cohort = read_table(args.predict, run.args, outcome=False)
        rows = np.arange(len(cohort))
        inputs = read_inputs(cohort, run.checkpoint["columns"], rows, run.args)
        with du.agree_on_errors():
            model = build_model(run.args, precision, ranks.device, inputs.columns.shape[1], run.checkpoint)
        reference = report.read_reference(folder, run.position.step)
        set_image_weight(model, reference)
        data = inputs.sets({"new": rows}, run.args)["new"]
        models.append((predict_parts(model, data, run.micro_batch_size, run), reference))
        trained |= set(run.checkpoint["trained_cases"])
    if ranks.is_main:
        report.predict(Path(args.output_dir), data, models, args, trained)


def run_task(args: Namespace, ranks: du.Ranks) -> int:
    if args.predict:
        predict(args, ranks)
        return 0
    if args.folds and not args.val_fold:
        return cross_validate(args, ranks)
    return train_fold(args, ranks)[0]


def main(args: Namespace) -> int:
    # start one process per GPU by default; counting the GPUs requires torch
    launch_workers(args.world_size or torch.cuda.device_count())
    with du.setup_distributed(args.dist_timeout) as ranks:
        return run_task(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
