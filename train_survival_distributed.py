"""Guide 2, survival from 3D CT: a volume in, the log-hazard of a major adverse cardiac event (MACE) out.

    python train_survival_distributed.py --csv_path data/dataset.csv                     # every GPU, or one CPU process
    torchrun --nproc_per_node=4 train_survival_distributed.py --csv_path data/dataset.csv
    python -m torch.distributed.launch --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr=<node0_ip> \\
        --master_port=12355 train_survival_distributed.py --csv_path data/dataset.csv      # --node_rank=1 on node 1
    python train_survival_distributed.py --csv_path data/dataset.csv --clinical_columns age sex stage
    python train_survival_distributed.py --csv_path data/dataset.csv --folds 5 --repeats 3  # a cross-validation
    python train_survival_distributed.py --csv_path data/dataset.csv --eval_only --val_fold test
    python train_survival_distributed.py --predict other_hospital.csv

Data: a table with a path, a time, an event (1) or censoring (0) and a fold for each case; CT volumes (NIfTI, DICOM).
No data yet? `make demo TASK=survival` makes some up.
"""

import hashlib
import math
from argparse import BooleanOptionalAction, Namespace
from pathlib import Path

from utils.cli import InputError, Parser, RunError, add_common_arguments, number, pattern, refuse, run_main, whole

FORMAT = "survival/2"
# what a model is made of, and what it sees
MODEL_FLAGS = (
    "image", "resnet", "base_channels", "stem_stride", "norm", "image_size", "hu_window", "spacing", "orientation",
    "clinical_columns", "mask_column", "mask_mode", "mask_margin",
)  # fmt: skip


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    rare = parser.rare.add_argument

    add = parser.add_argument_group("data").add_argument
    add("--csv_path", metavar="FILE", default="data/dataset.csv", help="table of cases")
    add("--data_dir", metavar="DIR", help="folder that relative paths start from; default: the table's own")
    add("--time_unit", choices=("days", "months", "years"), default="days", help="unit of the time column")
    for kind in ("path", "time", "event", "id"):
        rare(f"--{kind}_column", metavar="NAME", help=f"column of the {kind}, where it has no usual name")
    add("--fold_column", default="Fold_1", help="column that says which fold a row belongs to")
    rare("--train_fold", default="train", help="its value for training rows")
    add("--val_fold", help="its value for validation rows, default val; with --folds: this fold alone")
    add("--folds", type=whole(2), help="make so many folds, events spread evenly, and train them one after another")
    rare("--repeats", type=whole(1), default=1, help="of all --folds, each with another seed")
    add("--clinical_columns", nargs="+", default=[], metavar="NAME", help="columns to use as inputs besides the image")
    add("--mask_column", metavar="NAME", help="column with the path of a mask on the volume's own grid")
    rare("--mask_mode", choices=("crop", "channel"), default="crop", help="cut out the box around it, or add it")
    rare("--mask_margin", type=number(0), default=10.0, help="mm around the box; an empty mask crops nothing")

    add = parser.add_argument_group("volumes").add_argument
    xyz = {"nargs": 3, "metavar": ("X", "Y", "Z")}
    rare("--image", choices=("volume", "none"), default="volume", help="none: the clinical columns alone")
    add("--image_size", type=whole(8), **xyz, default=[256, 256, 64], help="voxels of the input; lower on OOM")
    add(
        "--hu_window", type=number(-1e5), nargs=2, default=[-1000.0, 1000.0], metavar=("LOW", "HIGH"), help="HU of 0, 1"
    )
    add("--spacing", type=number(0, above=True), **xyz, help="resample to voxels of so many mm first")
    axes = pattern("as-is|(?=.*[RL])(?=.*[AP])(?=.*[SI]).{3}", "as-is, or where X, Y and Z point to, as RAS or LPS")
    rare("--orientation", type=axes, metavar="CODES", default="RAS", help="of all volumes; as-is: as in each file")
    add(
        "--augmentation",
        "--augment",
        dest="augment",
        action=BooleanOptionalAction,
        default=True,
        help="random flips and quarter turns",
    )
    add("--cache_dir", default="runs/cache/survival", help="volumes at the model's size; may be deleted; '': none")
    add("--use_smart_cache", action="store_true", help="an epoch takes a part in memory, which changes after each")
    rare("--cache_rate", type=number(0, 1, above=True), default=0.5, help="share of the training cases in memory")
    rare("--replace_rate", type=number(0, 1, above=True), default=0.5, help="share of those replaced after each epoch")

    add = parser.add_argument_group("model").add_argument
    resnets = [f"resnet{depth}" for depth in (10, 18, 34, 50, 101, 152)]
    add("--resnet", choices=resnets, default="resnet50", help="MONAI's 3D ResNet; a smaller one on OOM")
    rare("--base_channels", type=whole(8), default=64, help="of the first stage; 64 as published, 8 for a trial")
    text = "1: as the guide; 2: MedicalNet's, an eighth of the cost"
    rare("--stem_stride", type=int, choices=(1, 2), default=1, help=text)
    rare(
        "--norm", choices=("group", "batch"), default="group", help="batch: as published; group: on any number of GPUs"
    )
    add("--init", choices=("random", "pretrained"), default="random", help="pretrained: from --pretrained_path")
    add("--pretrained_path", metavar="FILE", help="model.safetensors of a run here, or MedicalNet's .pth")
    rare("--freeze_epochs", type=whole(0), default=0, help="first epochs in which only the head learns")

    add = parser.add_argument_group("optimizer and schedule").add_argument
    rare("--weight_decay", type=number(0), default=1e-5, help="weight decay")
    add(
        "--lr_schedule",
        "--scheduler",
        dest="scheduler",
        choices=("cosine", "constant"),
        default="cosine",
        help="after the warm-up",
    )
    rare("--eta_min", type=number(0), default=1e-7, help="learning rate at the end of the cosine")
    rare("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up")

    add = parser.add_argument_group("evaluation and prediction").add_argument
    years = [1.0, 2.0, 3.0, 4.0, 5.0]
    add("--eval_years", type=number(0, above=True), nargs="+", default=years, metavar="YEAR", help="horizons")
    add("--rival_run", metavar="DIR", help="another run on the same fold: a row of the table, with the paired test")
    add("--predict", metavar="FILE", help="no training: the risk of each row of a table; scored where it has outcomes")

    defaults = {"output_dir": "runs/survival", "num_epochs": 50, "learning_rate": 1e-4, "batch_size": 24}
    add_common_arguments(parser, **defaults, batch_of_all=True)
    # the guide's other names and its own meaning
    rare("--output", dest="output_dir", help="the same as --log_dir")
    rare("--max_grad_norm", dest="grad_clip", type=number(0), help="the same as --grad_clip")
    for flag in ("--amp", "--pin_memory"):
        rare(flag, action="store_true", help="accepted; on by itself on a GPU")
    rare("--backend", choices=("nccl", "gloo"), help="accepted; what fits is chosen by itself")
    args = parser.parse(argv)
    if (args.init == "pretrained") != bool(args.pretrained_path):
        parser.error("--init pretrained and --pretrained_path go together")
    every_fold = args.folds and not args.val_fold
    if every_fold and (args.eval_only or args.resume_from not in (None, "auto")):
        parser.error("--folds: each has checkpoints of its own, which --resume_from auto takes; or name a --val_fold")
    if args.repeats > 1 and not every_fold:
        parser.error("--repeats: of all --folds, without --val_fold")
    if args.image == "none" and (args.use_smart_cache or args.pretrained_path or args.mask_column):
        parser.error("--image none: goes without --use_smart_cache, --pretrained_path and --mask_column")
    if args.image == "none" and not args.clinical_columns and not args.predict:
        parser.error("--image none: needs --clinical_columns")
    if args.hu_window[0] >= args.hu_window[1] or args.eta_min > args.learning_rate or args.base_channels % 8:
        parser.error("--hu_window LOW < HIGH, --eta_min at most --lr, and --base_channels a multiple of 8")
    return args


if __name__ == "__main__":
    # before the heavy imports: --help and a mistyped flag answer at once
    ARGS = parse_args()


import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import distributed_utils as du
from hardware_utils import GroupNorm, autocast, choose_precision, set_numerics
from tasks.survival import report
from tasks.survival.data import (
    Cohort,
    MultiGPUSurvivalDataset,
    Volumes,
    augment,
    choose_fold,
    encode_columns,
    fit_columns,
    read_cohort,
)
from utils import checkpoint
from utils.loop import Run, Step
from utils.volumes import describe

ADVICE = "give a smaller --image_size or --resnet, or --stem_stride 2"

# --- model ------------------------------------------------------------------------------------------------------------


class MaxPool3d(nn.Module):
    """The maximum of 3 voxels at every second place, axis by axis: CUDA's own pooling has no deterministic gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, [1] * 6, value=-torch.inf)
        for axis in (2, 3, 4):
            x = x.unfold(axis, 3, 2).amax(-1)
        return x


class PaddedShortcut(nn.Module):
    """MedicalNet's shortcut of type A: every second voxel, new channels zero. MONAI's own cuts the gradient here."""

    def __init__(self, planes: int, stride: int):
        super().__init__()
        self.planes, self.stride = planes, stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., :: self.stride, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, 0, 0, self.planes - x.shape[1]))


class RiskNet(nn.Module):
    """MONAI's 3D ResNet and a linear head, beside a linear part of the clinical columns: log-hazards (B,), fp32."""

    def __init__(self, args: Namespace, columns: int, precision: str, shortcut: str = "B"):
        super().__init__()
        self.precision, self.columns = precision, columns
        self.shape = 1 + bool(args.mask_column and args.mask_mode == "channel"), *args.image_size
        if args.image == "volume":
            self.backbone = make_backbone(args, self.shape[0], shortcut)
            # near zero, so that all cases begin with about the same risk
            self.head = nn.Linear(self.backbone.in_planes, 1)
            nn.init.normal_(self.head.weight, std=0.01)
            nn.init.zeros_(self.head.bias)
        if columns:
            self.clinical = nn.Linear(columns, 1, bias=False)
            nn.init.zeros_(self.clinical.weight)

    def forward(self, batch: dict) -> Tensor:
        """batch: image (B, C, X, Y, Z) in 0..1 and columns (B, n), each where the model has it."""
        log_hazard = 0
        if hasattr(self, "backbone"):
            images = batch["image"].float()
            with autocast(images.device, self.precision):
                features = self.backbone(images.contiguous(memory_format=torch.channels_last_3d))
            # outside autocast: a log-hazard of 3 has steps of 1/64 in bf16, so that cases tie
            log_hazard = self.head(features.float())[:, 0]
        if hasattr(self, "clinical"):
            log_hazard = log_hazard + self.clinical(batch["columns"])[:, 0]
        return log_hazard


def make_backbone(args: Namespace, channels: int, shortcut: str) -> nn.Module:
    """MONAI's ResNet without a head, with the normalisation and the shortcuts (A or B) that are wanted."""
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
            # MONAI's own argument reaches the first layer only
            if args.norm == "group" and isinstance(child, nn.BatchNorm3d):
                setattr(module, name, GroupNorm(8, child.num_features))
            if shortcut == "A" and name == "downsample":
                setattr(module, name, PaddedShortcut(**child.keywords))
    return backbone


def build_model(
    args: Namespace, precision: str, device: torch.device, columns: int = 0, weights: dict | None = None
) -> RiskNet:
    """The model with the same weights on every rank. weights: of a checkpoint. Raises InputError for others'."""
    torch.manual_seed(args.seed)
    found = weights or read_pretrained(args)
    # MedicalNet's smaller nets have no weights in their shortcuts
    type_a = found and args.resnet in ("resnet10", "resnet18", "resnet34")
    shortcut = "A" if type_a and not any("downsample" in name for name in found) else "B"
    model = RiskNet(args, columns, precision, shortcut)
    if weights:
        checkpoint.load_trained(model, weights)
    elif found:
        own = model.state_dict()
        fits = {name: value for name, value in found.items() if name in own and value.shape == own[name].shape}
        lacking = [name for name in own if name.startswith("backbone.") and name not in fits]
        if lacking:
            reason = f"weights of another net ({lacking[0]} does not fit)"
            raise InputError(f"{args.pretrained_path}: {reason}; check --resnet, --base_channels and --norm")
        model.load_state_dict(fits, strict=False)
        du.print_main(f"weights from {args.pretrained_path}; the head is {'kept' if 'head.weight' in fits else 'new'}")
    if args.norm == "batch" and du.world()[1] > 1 and device.type == "cpu":
        raise InputError("--norm batch: statistics over several processes need GPUs; use --norm group")
    return model.to(device, memory_format=torch.channels_last_3d)


def read_pretrained(args: Namespace) -> dict[str, Tensor]:
    """The weights of --pretrained_path by their names in RiskNet, {} without it. Raises InputError."""
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
    """Negative Cox partial log-likelihood per event, of all n cases that are given; ties as Efron (1977) has them.

    As torchsurv's, but without a wait for the GPU, and on logarithms, so that no hazard overflows.
    log_hazard (n,) on any device; time (n,) and event (n,) on the CPU, so that nothing waits for the GPU. Without an
    event the result is 0, connected to the input.
    """
    device = log_hazard.device
    rows = event.nonzero()[:, 0]
    if not len(rows):
        return (log_hazard * 0).sum()
    times = time[rows]
    own = log_hazard[rows.to(device, non_blocking=True)]

    # log of the hazard of all who are at risk at each event
    gone = (time < times[:, None]).to(device, non_blocking=True)
    total = log_hazard.expand(len(rows), -1).masked_fill(gone, -torch.inf).logsumexp(1)

    # of d tied events the l-th (from 0) sees only 1 - l/d of their hazard
    tied = times == times[:, None]
    before = (tied.tril(-1).sum(1).double() / tied.sum(1)).to(total.dtype).to(device, non_blocking=True)
    untied = (~tied).to(device, non_blocking=True)
    together = own.expand(len(rows), -1).masked_fill(untied, -torch.inf).logsumexp(1)
    total = total + torch.log1p(-before * (together - total).exp())
    return (total - own).sum() / len(rows)


def fit_cox(x: np.ndarray, time: np.ndarray, event: np.ndarray, penalty: float = 1.0) -> Tensor:
    """(n, k) numbers -> (k,) coefficients of a Cox model with penalty / 2 * |b|^2 on its log-likelihood, in float64."""
    rows, outcome = torch.from_numpy(x), (torch.from_numpy(time), torch.from_numpy(event))
    beta = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    options = {"max_iter": 500, "tolerance_grad": 1e-10, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS([beta], line_search_fn="strong_wolfe", **options)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cox_loss(rows @ beta, *outcome) + penalty / 2 * beta.square().sum() / event.sum()
        value.backward()
        return value

    optimizer.step(loss)
    return beta.detach()


# --- the step ---------------------------------------------------------------------------------------------------------


def cox_step(run: Run, step: Step, loader: DataLoader, args: Namespace) -> None:
    """Gradients of one optimizer step, the same for any number of ranks and leaves.

    The Cox loss has no parts that add up: each event's risk set is the whole step. So all ranks' log-hazards are put
    together, every rank takes the loss of them all, and each leaf's part of the gradient goes back through the model.
    Where a rank has several leaves, they are passed forward once without memory and then again (Gao et al. 2021).
    """
    data, sampler, position = loader.dataset, loader.batch_sampler, run.position
    rows = data.rows_of(sampler.order(position.samples + np.arange(step.samples)), position.epoch)
    time, event = torch.from_numpy(data.cohort.time[rows]), torch.from_numpy(data.cohort.event[rows])
    # read before they are on the GPU, which would be waited for
    cases = [batch["index"].tolist() for batch in step.batches]
    step.batches = [du.to_device(batch, run.ranks.device) for batch in step.batches]
    for batch, indices in zip(step.batches, cases, strict=True) if args.augment and args.image == "volume" else ():
        batch["image"] = augment(batch["image"], indices, args.seed, position.epoch)

    # a choice that all ranks take alike, as DDP talks in its forward pass
    once = step.samples <= run.leaf * run.ranks.world_size and len(set(run.shares)) == 1
    if once:
        passed = [run.wrapped(step.batches[0])]
    else:
        with torch.no_grad():
            passed = [run.model(batch) for batch in step.batches]
    log_hazard = torch.zeros(step.samples, device=run.ranks.device)
    for leaf, output in zip(step.numbers, passed, strict=False):
        log_hazard[leaf * run.leaf :][: len(output)] = output.detach()
    log_hazard = du.reduce_sum(log_hazard).requires_grad_()
    loss = cox_loss(log_hazard, time, event)
    (gradient,) = torch.autograd.grad(loss, log_hazard)

    events = torch.full_like(loss, float(event.sum()))
    for leaf, batch in zip(step.numbers or [0], step.leaves(), strict=True):
        output = passed[0] if once else run.wrapped(batch)
        through = (output * gradient[leaf * run.leaf :][: len(output)]).sum()
        # the step's own numbers, entered once
        step.backward(loss * (leaf == 0), events * (leaf == 0), through=through)


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict(model: RiskNet, data: MultiGPUSurvivalDataset, run: Run, args: Namespace) -> np.ndarray:
    """(n,) float64 log-hazards of all cases, in order and the same on all ranks. Raises RunError."""
    model.eval()
    loader = du.create_distributed_dataloader(data, run.leaf, train=False, num_workers=args.num_workers)
    rows, outputs = [], []
    for batch in run.batches(loader):
        rows.append(batch["index"])
        outputs.append(model(batch))
    log_hazard = torch.zeros(len(data.cohort), dtype=torch.float64)
    if outputs:
        log_hazard[torch.cat(rows).cpu()] = torch.cat(outputs).double().cpu()
    log_hazard = du.reduce_sum(log_hazard).numpy()[data.rows]
    if not np.isfinite(log_hazard).all():
        raise RunError("predictions are not finite; lower --lr")
    return log_hazard


def evaluate(model: RiskNet, sets: dict, run: Run, args: Namespace) -> tuple[dict[str, float], np.ndarray]:
    """(metrics, log-hazards) of the validation fold as a whole, the same on all ranks."""
    val, train = sets["val"], sets["all"]
    log_hazard = predict(model, val, run, args)
    metrics = {}
    # rank 0 computes and tells the others, so that all take the same decisions
    if run.ranks.is_main:
        outcome = (torch.from_numpy(values[val.rows]) for values in (val.cohort.time, val.cohort.event))
        loss = float(cox_loss(torch.from_numpy(log_hazard), *outcome))
        metrics = {"val/loss": loss} | report.score(log_hazard, val, train, args.eval_years)
    return du.broadcast_object(metrics), log_hazard


def fit_rivals(val: MultiGPUSurvivalDataset, train: MultiGPUSurvivalDataset, image: bool) -> dict[str, tuple]:
    """{name: (log-hazards of val, baseline)} of Cox models that know less than the network."""
    inputs = {"kaplan_meier": [np.zeros((len(data.rows), 1)) for data in (val, train)]}
    if train.columns is not None:
        inputs["clinical"] = [data.columns[data.rows].astype(float) for data in (val, train)]
    if image:
        mean, sd = train.image_numbers.mean(0), train.image_numbers.std(0)
        inputs["image_numbers"] = [(data.image_numbers - mean) / np.where(sd > 0, sd, 1) for data in (val, train)]
    if len(inputs) == 3:
        pairs = zip(inputs["clinical"], inputs["image_numbers"], strict=True)
        inputs["clinical_and_image_numbers"] = [np.hstack(pair) for pair in pairs]
    found = {}
    for name, (x_val, x_train) in inputs.items():
        beta = fit_cox(x_train, *report.outcome(train)).numpy()
        found[name] = x_val @ beta, report.fit_baseline(x_train @ beta, train)
    return found


def finish(
    model: RiskNet, sets: dict, run: Run, args: Namespace, title: str, rivals: dict, step: int
) -> tuple[dict[str, float], np.ndarray]:
    """All ranks, at the end of a run and of --eval_only: table with rivals, predictions, figure; as evaluate().

    step: that the weights are of. The baseline hazard belongs to them, so --eval_only takes the one that is there.
    """
    metrics, log_hazard = evaluate(model, sets, run, args)
    val, train = sets["val"], sets["all"]
    known = predict(model, train, run, args)
    name = "" if run.trains else "eval_"
    with du.agree_on_errors():
        if run.ranks.is_main:
            rivals = rivals | fit_rivals(val, train, args.image == "volume")
            baseline = None if run.trains else report.read_baseline(run.folder, step)
            baseline = baseline or report.fit_baseline(known, train) | {"step": step}
            models = {"network": (log_hazard, baseline)} | rivals
            metrics |= report.print_table(title, models, val, train, args.eval_years)
            tables = [
                report.predictions(data, risk, args.eval_years, baseline).assign(fold=part)
                for part, data, risk in (("val", val, log_hazard), ("train", train, known))
            ]
            try:
                pd.concat(tables).to_csv(run.folder / f"{name}predictions.csv", index=False)
                run.figure(f"{name}val_survival", report.draw(log_hazard, val, args.eval_years, baseline, metrics))
                if run.trains:
                    run.write_summary("baseline", baseline)
            except OSError as error:
                raise RunError(f"{run.folder}: results not written ({error}); make room, then --eval_only") from None
    return du.broadcast_object(metrics), log_hazard


# --- the run ----------------------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """AdamW over all parameters, those that are frozen at first included."""
    return torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True)


def read_table(path: str, args: Namespace, outcome: bool = True) -> Cohort:
    """read_cohort as the flags want it."""
    if path == "data/dataset.csv" and not Path(path).exists():
        raise InputError(
            f"{path}: no such table; give --csv_path. No data yet? `make demo TASK=survival` makes some up and trains; "
            "`python -m tools.sample_data survival data` only makes them up"
        )
    columns = {f"{kind}_column": getattr(args, f"{kind}_column") for kind in ("path", "time", "event", "id", "mask")}
    with du.agree_on_errors():
        return read_cohort(path, args.data_dir, args.time_unit, outcome, args.image == "volume", **columns)


def make_sets(cohort: Cohort, columns: np.ndarray, rows: dict[str, np.ndarray], args: Namespace) -> dict:
    """A data set of each of these rows, and all volumes read once; of "train" what the smart cache has of "all"."""
    names = ("image_size", "hu_window", "spacing", "mask_margin", "cache_dir")
    mask_mode = args.mask_column and args.mask_mode
    orientation = None if args.orientation == "as-is" else args.orientation
    volumes = Volumes(mask_mode=mask_mode, orientation=orientation, **{name: getattr(args, name) for name in names})
    options = {"columns": columns if columns.shape[1] else None, "volumes": volumes}
    sets = {name: MultiGPUSurvivalDataset(cohort, rows=part, **options) for name, part in rows.items()}
    if args.image == "volume":
        faults = [data.check(args.num_workers) for data in sets.values()]
        refuse(sum(faults, []), "volumes cannot be used")
        summaries = np.concatenate([data.summaries for data in sets.values()])
        du.print_main(f"volumes: {describe(summaries, orientation)}")
        sizes = summaries[:, :3]
        if not args.spacing and (sizes.max(0) > 1.1 * sizes.min(0)).any():
            du.print_main("warning: voxel sizes vary by more than 10 %, which the network does not see; see --spacing")
    if "all" in sets:
        smart = {name: getattr(args, name) for name in ("use_smart_cache", "cache_rate", "replace_rate", "seed")}
        sets["train"] = MultiGPUSurvivalDataset(cohort, rows=rows["all"], **options, **smart)
    return sets


def largest_batch(model: RiskNet, size: int) -> dict:
    """Made-up cases of one leaf."""
    return {"image": torch.zeros(size, *model.shape, dtype=torch.float16), "columns": torch.zeros(size, model.columns)}


def trial_step(model: RiskNet, batch: dict, args: Namespace) -> None:
    """Forward and backward pass of one leaf; the gradients stay in the model."""
    log_hazard = model(du.to_device(batch, next(model.parameters()).device))
    size = len(log_hazard)
    cox_loss(log_hazard, 1.0 + torch.arange(size), torch.ones(size, dtype=torch.bool)).backward()


def train_fold(args: Namespace, ranks: du.Ranks, precision: str, notes: dict) -> tuple[int, tuple | None]:
    """One fold from start to end; (exit code, (metrics, validation set, its log-hazards), None after a signal)."""
    device = ranks.device
    cross_validates = args.folds and args.val_fold
    # nothing is written before begin(), so that all that can be wrong is said before a run is touched
    run = Run(FORMAT, args, ranks, ADVICE, MODEL_FLAGS)
    cohort = read_table(args.csv_path, args)
    with du.agree_on_errors():
        train, val = choose_fold(cohort, args.fold_column, args.train_fold, args.val_fold, args.folds or 0, args.seed)
        columns = run.checkpoint["columns"] if run.checkpoint else fit_columns(cohort, args.clinical_columns, train)
        encoded = encode_columns(cohort, columns)
    sets = make_sets(cohort, encoded, {"all": train, "val": val}, args)
    with du.agree_on_errors():
        rivals = report.read_rival(args.rival_run, sets["val"])
    with du.agree_on_errors():
        weights = run.checkpoint and run.checkpoint["model"]
        model = build_model(args, precision, device, encoded.shape[1], weights)
    if args.eval_only:
        seen = set(cohort.case[val]) & set(run.checkpoint["trained_cases"])
        if seen:
            raise InputError(f"--val_fold: the model was trained on {min(seen)} and {len(seen) - 1} more of its cases")
        metrics, _ = finish(model, sets, run, args, "val", rivals, run.position.step)
        run.write_summary("eval_val", metrics)
        return 0, None
    if encoded.shape[1] and not run.checkpoint:
        # the columns begin where a Cox model of them alone ends
        beta = fit_cox(encoded[train].astype(float), cohort.time[train], cohort.event[train])
        model.clinical.weight.data.copy_(beta)

    # the guide's batch is that of all GPUs
    if not run.checkpoint and not args.effective_batch_size:
        args.effective_batch_size = args.batch_size * args.gradient_accumulation_steps
        args.batch_size = math.ceil(args.batch_size / ranks.world_size)
    run.choose_batch(model, lambda size: trial_step(model, largest_batch(model, size), args))
    if args.norm == "batch" and (run.effective > run.leaf * ranks.world_size or len(set(run.shares)) > 1):
        raise InputError("--norm batch: a step must be one pass of each GPU; lower --batch_size, or --norm group")
    if args.norm == "batch" and ranks.world_size > 1:
        # not before, as the ranks try batches by themselves
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    options = {"seed": args.seed, "num_workers": args.num_workers}
    loader = du.create_distributed_dataloader(sets["train"], run.leaf, True, run.effective, run.shares, **options)

    optimizer = make_optimizer(model, args)
    steps = args.num_epochs * loader.batch_sampler.steps_per_epoch()
    outcomes = [cohort.case[train].tolist(), cohort.time[train].tolist(), cohort.event[train].tolist()]
    digest = hashlib.sha256(repr(outcomes).encode()).hexdigest()[:8]
    facts = {"training cases": f"{len(train)}, digest {digest}"}
    if args.use_smart_cache:
        facts["smart cache"] = f"{len(sets['train'])} cases, {sets['train'].replaced} replaced after each epoch"
    notes = notes | {
        "events": f"{cohort.event[train].sum()} in training; {cohort.event[val].sum()} of {len(val)} in validation",
        "model": f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters",
    }
    extra = {"columns": columns, "trained_cases": sorted(set(cohort.case[train].tolist()))}
    run.begin(model, optimizer, precision, steps, ["loss", "events"], facts, notes, extra)

    with run:
        while not run.is_over():
            frozen = args.image == "volume" and run.position.epoch < args.freeze_epochs
            if args.freeze_epochs and args.image == "volume":
                model.backbone.requires_grad_(not frozen)
                run.wrap()
            model.train()
            if frozen:
                model.backbone.eval()
            for step in run.steps(loader):
                cox_step(run, step, loader, args)
                factor = du.schedule(run.position.step, steps, args.warmup_steps, args.scheduler)
                lowest = args.eta_min if run.position.step >= args.warmup_steps else 0.0
                step.update(lowest + (args.learning_rate - lowest) * factor)
            if run.stopped:
                return run.save_and_stop(), None
            run.keep(evaluate(model, sets, run, args)[0], headline="val/c_index")

        step = run.position.step if cross_validates else run.load_best(model)
        is_best = not cross_validates and run.position.best is not None
        title = "val, best.pt (chosen on this fold)" if is_best else "val, last step"
        results, log_hazard = finish(model, sets, run, args, title, rivals, step)
        if not cross_validates and "val/c_index" in run.log.last:
            results["val/c_index_last"] = run.log.last["val/c_index"]
        run.finish(results)
        # a signal since the last step: a single run is done, of a cross-validation no further fold begins
        code = int(du.reduce_max([run.stop.code])[0]) if cross_validates else 0
    return code, (results, sets["val"], log_hazard)


def cross_validate(args: Namespace, ranks: du.Ranks, precision: str, notes: dict) -> int:
    """--folds: all of them, --repeats times, each scored at its last epoch; what they give together."""
    # rank 0 looks, as another may see an older state of a shared folder
    if du.broadcast_object(Path(args.output_dir, "run_id").exists()):
        raise InputError(f"{args.output_dir}: holds a single run; choose another folder for --folds")
    results = []
    for repeat in range(args.repeats):
        for fold in range(1, args.folds + 1):
            folder = Path(args.output_dir, f"repeat_{repeat + 1}", f"fold_{fold}")
            own = vars(args) | {"output_dir": str(folder), "val_fold": str(fold), "seed": args.seed + repeat}
            own["rival_run"] = args.rival_run and str(Path(args.rival_run, *folder.parts[-2:]))
            du.print_main(f"\n--- repeat {repeat + 1} of {args.repeats}, fold {fold} of {args.folds}")
            code, result = train_fold(Namespace(**own), ranks, precision, notes)
            if code:
                return code
            results.append((repeat, *result))
    if ranks.is_main:
        report.print_cross_validation(Path(args.output_dir), results, args)
    return 0


def predict_table(args: Namespace, ranks: du.Ranks, precision: str) -> None:
    """--predict: the mean log-hazard of all models in the folder (the folds of a cross-validation), or of one."""
    folders = [] if args.resume_from else du.broadcast_object(report.folds_of(Path(args.output_dir)))
    risks, trained = [], set()
    for folder in folders or [Path(args.output_dir)]:
        own = Namespace(
            **vars(args) | {"output_dir": str(folder), "resume_from": "auto" if folders else args.resume_from}
        )
        run = Run(FORMAT, own, ranks, ADVICE, MODEL_FLAGS)
        cohort = read_table(args.predict, own, outcome=False)
        with du.agree_on_errors():
            encoded = encode_columns(cohort, run.checkpoint["columns"])
            model = build_model(own, precision, ranks.device, encoded.shape[1], run.checkpoint["model"])
        data = make_sets(cohort, encoded, {"new": np.arange(len(cohort))}, own)["new"]
        risks.append((predict(model, data, run, own), report.read_baseline(folder, run.position.step)))
        trained |= set(run.checkpoint["trained_cases"])
    if ranks.is_main:
        report.predict(Path(args.output_dir), data, risks, args, trained)


def run_task(args: Namespace, ranks: du.Ranks) -> int:
    """Train one fold or all of them, or --eval_only, or --predict; returns the exit code."""
    precision, reason = choose_precision(args.mixed_precision, ranks.device)
    if precision == "bf16" and ranks.device.type == "cpu":
        raise InputError("--mixed_precision bf16: torch's 3D convolutions compute wrong gradients on a CPU; use no")
    remark = set_numerics(ranks.device, precision, args.deterministic)
    notes = {"precision": f"{precision} ({reason}) {remark}".strip()}
    if args.predict:
        predict_table(args, ranks, precision)
        return 0
    if args.folds and not args.val_fold:
        return cross_validate(args, ranks, precision, notes)
    return train_fold(args, ranks, precision, notes)[0]


def main(args: Namespace) -> int:
    du.launch_workers(args.world_size or torch.cuda.device_count() or 1)
    with du.setup_distributed(args.dist_timeout) as ranks:
        return run_task(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
