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
    refuse,
    run_main,
    whole,
    with_flags,
)

FORMAT = "survival/3"
# what ridge Cox models choose theirs from, the strongest first
PENALTIES = [10 ** (power / 2) for power in range(7, -2, -1)]
# what a model is made of, and what it sees
MODEL_FLAGS = (
    "image", "resnet", "base_channels", "stem_stride", "norm", "image_size", "hu_window", "spacing", "orientation",
    "clinical_columns", "mask_column", "mask_mode", "mask_margin",
)  # fmt: skip


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    advanced = parser.advanced.add_argument

    add = parser.add_argument_group("data").add_argument
    add("--csv_path", metavar="FILE", default="data/dataset.csv", help="table of cases")
    add("--data_dir", metavar="DIR", help="folder that relative paths start from; default: the table's own")
    add("--time_unit", choices=("days", "months", "years"), default="days", help="unit of the time column")
    for kind in ("path", "time", "event", "id"):
        advanced(f"--{kind}_column", metavar="NAME", help=f"column of the {kind}, where it has no usual name")
    add("--fold_column", default="Fold_1", help="column that says which fold a row belongs to")
    advanced("--train_fold", default="train", help="its value for training rows")
    add("--val_fold", help="its value for validation rows, default val; with --folds: this fold alone")
    add("--folds", type=whole(2), help="make so many folds, events spread evenly, and train them one after another")
    advanced("--repeats", type=whole(1), default=1, help="of all --folds, each with another seed")
    add("--clinical_columns", nargs="+", default=[], metavar="NAME", help="columns to use as inputs besides the image")
    add("--stratum_column", metavar="NAME", help="hospital or scanner, say: C is told within each of its values, too")
    add("--mask_column", metavar="NAME", help="column with the path of a mask on the volume's own grid")
    advanced("--mask_mode", choices=("crop", "channel"), default="crop", help="cut out the box around it, or add it")
    advanced("--mask_margin", type=real(0), default=10.0, help="mm around the box; an empty mask crops nothing")

    add = parser.add_argument_group("volumes").add_argument
    xyz = {"nargs": 3, "metavar": ("X", "Y", "Z")}
    advanced("--image", choices=("volume", "none"), default="volume", help="none: the clinical columns alone")
    add("--image_size", type=whole(8), **xyz, default=[256, 256, 64], help="voxels of the input; lower on OOM")
    add("--hu_window", type=real(-1e5), nargs=2, default=[-1000.0, 1000.0], metavar=("LOW", "HIGH"), help="HU of 0, 1")
    add("--spacing", type=real(0, above=True), **xyz, help="resample to voxels of so many mm first")
    axes = pattern("as-is|(?=.*[RL])(?=.*[AP])(?=.*[SI]).{3}", "as-is, or where X, Y and Z point to, as RAS or LPS")
    advanced("--orientation", type=axes, metavar="CODES", default="RAS", help="of all volumes; as-is: as in each file")
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
    advanced("--cache_rate", type=real(0, 1, above=True), default=0.5, help="share of the training cases in memory")
    advanced(
        "--replace_rate", type=real(0, 1, above=True), default=0.5, help="share of those replaced after each epoch"
    )

    add = parser.add_argument_group("model").add_argument
    resnets = [f"resnet{depth}" for depth in (10, 18, 34, 50, 101, 152)]
    add("--resnet", choices=resnets, default="resnet50", help="MONAI's 3D ResNet; a smaller one on OOM")
    advanced("--base_channels", type=whole(8), default=64, help="of the first stage; 64 as published, 8 for a trial")
    text = "1: as the guide; 2: MedicalNet's, an eighth of the cost"
    advanced("--stem_stride", type=int, choices=(1, 2), default=1, help=text)
    advanced(
        "--norm", choices=("group", "batch"), default="group", help="batch: as published; group: on any number of GPUs"
    )
    add("--init", choices=("random", "pretrained"), default="random", help="pretrained: from --pretrained_path")
    add("--pretrained_path", metavar="FILE", help="model.safetensors of a run here, or MedicalNet's .pth")
    advanced("--freeze_epochs", type=whole(0), default=0, help="first epochs in which only the head learns")

    text = "parts of the training fold on which the image part is weighed by networks that have not seen them; 0: not"
    add("--inner_folds", type=whole(0), default=2, metavar="N", help=text)

    add = parser.add_argument_group("optimizer and schedule").add_argument
    advanced("--weight_decay", type=real(0), default=1e-5, help="weight decay")
    add(
        "--lr_schedule",
        "--scheduler",
        dest="scheduler",
        choices=("cosine", "constant"),
        default="cosine",
        help="after the warm-up",
    )
    advanced("--eta_min", type=real(0), default=1e-7, help="learning rate at the end of the cosine")
    advanced("--warmup_steps", type=whole(0), default=0, help="optimizer steps of linear warm-up")

    add = parser.add_argument_group("evaluation and prediction").add_argument
    years = [1.0, 2.0, 3.0, 4.0, 5.0]
    add("--eval_years", type=real(0, above=True), nargs="+", default=years, metavar="YEAR", help="horizons")
    add("--rival_run", metavar="DIR", help="another run on the same fold: a row of the table, with the paired test")
    add("--predict", metavar="FILE", help="no training: the risk of each row of a table; scored where it has outcomes")

    defaults = {"output_dir": "runs/survival", "num_epochs": 50, "learning_rate": 1e-4, "batch_size": 24}
    add_common_arguments(parser, **defaults, batch_of_all=True, least_epochs=0)
    # the guide's other names and its own meaning
    advanced("--output", dest="output_dir", help="the same as --log_dir")
    advanced("--max_grad_norm", dest="grad_clip", type=real(0), help="the same as --grad_clip")
    for flag in ("--amp", "--pin_memory"):
        advanced(flag, action="store_true", help="accepted; on by itself on a GPU")
    advanced("--backend", choices=("nccl", "gloo"), help="accepted; what fits is chosen by itself")
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
    if args.inner_folds == 1:
        parser.error("--inner_folds: 0, or at least 2")
    if args.image == "none":
        # the Cox model is fitted, and there is nothing else to train
        args.num_epochs, args.auto_batch, args.gpu_shares = 0, False, "equal"
    if args.hu_window[0] >= args.hu_window[1] or args.eta_min > args.learning_rate or args.base_channels % 8:
        parser.error("--hu_window LOW < HIGH, --eta_min at most --lr, and --base_channels a multiple of 8")
    return args


if __name__ == "__main__":
    # before the heavy imports: --help and a mistyped flag answer at once
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
    NUMBERS,
    Cohort,
    MultiGPUSurvivalDataset,
    Volumes,
    augment,
    choose_fold,
    deal,
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
    """A Cox model of columns and image numbers, which is not trained by steps, and what MONAI's 3D ResNet adds to it.

    The head begins at zero: before the first step this is the Cox model. linear (columns,): its coefficients.
    image_weight: what the image part counts, 1 until weigh_image() has seen it on patients it was not trained on.
    """

    def __init__(self, args: Namespace, columns: int, precision: str, shortcut: str = "B"):
        super().__init__()
        self.precision = precision
        self.shape = 1 + bool(args.mask_column and args.mask_mode == "channel"), *args.image_size
        if args.image == "volume":
            self.backbone = make_backbone(args, self.shape[0], shortcut)
            # no bias, which Cox's likelihood does not see
            self.head = nn.Linear(self.backbone.in_planes, 1, bias=False)
            nn.init.zeros_(self.head.weight)
        self.register_buffer("linear", torch.zeros(columns, dtype=torch.float64))
        self.register_buffer("image_weight", torch.ones((), dtype=torch.float64))

    def linear_part(self, batch: dict) -> Tensor:
        """(B,) float64 of columns (B, n); a 0 for all without columns."""
        if not len(self.linear):
            return torch.zeros(1, dtype=torch.float64, device=self.linear.device)
        return batch["columns"].double() @ self.linear

    def forward(self, batch: dict) -> Tensor:
        """Log-hazards (B,), float64. batch: columns (B, n), image (B, C, X, Y, Z) in 0..1, where the model has them."""
        log_hazard = self.linear_part(batch)
        if hasattr(self, "backbone"):
            images = batch["image"].float()
            with autocast(images.device, self.precision):
                features = self.backbone(images.contiguous(memory_format=torch.channels_last_3d))
            # outside autocast: a log-hazard of 3 has steps of 1/64 in bf16, so that cases tie
            log_hazard = log_hazard + self.image_weight * self.head(features.float())[:, 0]
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
        own = dict(model.named_parameters())
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


def log_likelihood(log_hazard: np.ndarray, time: np.ndarray, event: np.ndarray) -> float:
    """Cox's partial log-likelihood."""
    return -float(cox_loss(*map(torch.from_numpy, (log_hazard, time, event)))) * event.sum()


def fit_cox(
    x: np.ndarray, time: np.ndarray, event: np.ndarray, penalty: float | np.ndarray = 1.0, start=None, tolerance=1e-10
) -> np.ndarray:
    """(n, k) numbers -> (k,) coefficients of a Cox model with penalty / 2 * b^2 on its log-likelihood, in float64.

    penalty: one for all coefficients, or one for each. start: where the search begins. tolerance: of the gradient.
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

    # by one thread, as their number may change the last bits
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        optimizer.step(loss)
    finally:
        torch.set_num_threads(threads)
    return beta.detach().numpy()


def fit_ridge(x: np.ndarray, data: MultiGPUSurvivalDataset, seed: int) -> tuple[np.ndarray, float, float]:
    """(coefficients, penalty, log-likelihood by folds) of a Cox model of x (n, k), the numbers of these cases.

    The penalty is that of the best cross-validated partial likelihood (Verweij and van Houwelingen 1993) in 5 folds.
    """
    time, event = report.outcome(data)
    fold = deal(data.cohort.case[data.rows], event, np.ones(len(x), bool), 5, seed)
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


def fit_cox_models(data: MultiGPUSurvivalDataset, clinical: int, seed: int) -> dict[str, dict]:
    """Ridge Cox models of the clinical columns, which come first, of the image numbers, and of both; on all ranks.

    {name: beta (n,), 0 for what the model does not see; penalty; likelihood, see fit_ridge()}
    """
    found = {}
    with du.agree_on_errors():
        if du.world()[0] == 0:
            x = data.columns[data.rows].astype(float)
            parts = {"clinical": slice(clinical), "image_numbers": slice(clinical, None)}
            parts = {name: part for name, part in parts.items() if x[:, part].size}
            if len(parts) == 2:
                parts["clinical_and_image_numbers"] = slice(None)
            for name, part in parts.items():
                beta = np.zeros(x.shape[1])
                beta[part], penalty, likelihood = fit_ridge(x[:, part], data, seed)
                found[name] = {"beta": beta.tolist(), "penalty": penalty, "likelihood": likelihood}
    return du.broadcast_object(found)


def known_cox_models(run: Run, data: MultiGPUSurvivalDataset, clinical: int) -> dict[str, dict]:
    """All ranks: the Cox models of the checkpoint, or of a new run, fitted to the training cases."""
    return run.checkpoint["cox_models"] if run.checkpoint else fit_cox_models(data, clinical, run.args.seed)


def strongest(models: dict[str, dict]) -> tuple[str, np.ndarray, float]:
    """(name, coefficients, penalty) of the Cox model with the best likelihood by folds."""
    name = max(models, key=lambda name: models[name]["likelihood"])
    return name, np.array(models[name]["beta"]), models[name]["penalty"]


def weigh_image(
    x: np.ndarray, image: np.ndarray, data: MultiGPUSurvivalDataset, linear: np.ndarray, penalty: float
) -> tuple[np.ndarray, float, float]:
    """(coefficients of x, weight of the image part, chi2 that it adds to the likelihood).

    x (n, k): columns; linear (k,): their ridge Cox model of this penalty, 0 for what it does not see. image (n,): what
    networks that were not trained on a case say of it beyond the columns. Both go into one Cox model, which is shrunk
    towards that of the columns by 1 - 1 / chi2 (van Houwelingen and le Cessie 1990). Where the image part is not
    significant at 5 % (chi2 of 3.84), or points the wrong way, that of the columns is left.
    """
    seen = linear != 0
    before, scale = np.append(linear[seen], 0.0), image.std() or 1.0
    both, penalties = np.column_stack([x[:, seen], image / scale]), np.append(np.full(seen.sum(), penalty), 0.0)
    beta = fit_cox(both, *report.outcome(data), penalties, before)

    def likelihood(beta: np.ndarray) -> float:
        return log_likelihood(both @ beta, *report.outcome(data)) - float(penalties @ beta**2) / 2

    chi2 = max(0.0, 2 * (likelihood(beta) - likelihood(before)))
    shrunk = before + (1 - 1 / chi2) * (beta - before) if chi2 > 3.84 and beta[-1] > 0 else before
    weighed = np.zeros(len(linear))
    weighed[seen] = shrunk[:-1]
    return weighed, float(shrunk[-1]) / scale, chi2


# --- the step ---------------------------------------------------------------------------------------------------------


def cox_step(training: Training, step: Step, loader: DataLoader, args: Namespace) -> None:
    """Gradients of one optimizer step, the same for any number of ranks and leaves.

    The Cox loss has no parts that add up: each event's risk set is the whole step. So all ranks' log-hazards are put
    together, every rank takes the loss of them all, and each micro-batch's part of the gradient goes back through the
    model.
    Where a rank has several micro-batches, they are passed forward once without memory and then again (Gao et al.
    2021).
    """
    data, sampler, position, engine = loader.dataset, loader.batch_sampler, training.position, training.engine
    sizes, device = training.batch, training.ranks.device
    rows = data.rows_of(sampler.global_batch(position.samples), position.epoch)
    time, event = torch.from_numpy(data.cohort.time[rows]), torch.from_numpy(data.cohort.event[rows])
    # read before they are on the GPU, which would be waited for
    cases = [batch["index"].tolist() for batch in step.batches]
    step.batches = [du.to_device(batch, device) for batch in step.batches]
    if args.augment and args.image == "volume":
        for batch, indices in zip(step.batches, cases, strict=True):
            batch["image"] = augment(batch["image"], indices, args.seed, position.epoch)

    # all ranks must decide alike: DDP communicates in its forward pass
    once = step.samples <= sizes.micro_batch_size * training.ranks.world_size and len(set(sizes.gpu_shares)) == 1
    if once:
        passed = [engine.wrapped(step.batches[0])]
    else:
        with torch.no_grad():
            passed = [engine.model(batch) for batch in step.batches]
    log_hazard = torch.zeros(step.samples, device=device)
    for number, output in zip(step.numbers, passed, strict=False):
        log_hazard[number * sizes.micro_batch_size :][: len(output)] = output.detach()
    log_hazard = du.reduce_sum(log_hazard).requires_grad_()
    loss = cox_loss(log_hazard, time, event)
    (gradient,) = torch.autograd.grad(loss, log_hazard)

    events = torch.full_like(loss, float(event.sum()))
    for number, batch in zip(step.numbers or [0], step.micro_batches(), strict=True):
        output = passed[0] if once else engine.wrapped(batch)
        part = gradient[number * sizes.micro_batch_size :][: len(output)]
        # the step's own numbers, entered once
        step.backward(loss * (number == 0), events * (number == 0), through=(output, part))


# --- evaluation -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def predict_parts(
    model: RiskNet, data: MultiGPUSurvivalDataset, batch_size: int, run: Run, args: Namespace
) -> np.ndarray:
    """(n, 2) float64: what columns and image add to the log-hazards of all cases, in order, the same on all ranks.

    Raises RunError for what is not finite.
    """
    model.eval()
    loader = du.create_distributed_dataloader(data, batch_size, train=False, num_workers=args.num_workers)
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


def score_fold(log_hazard: np.ndarray, sets: dict, args: Namespace) -> dict[str, float]:
    """Metrics of the validation fold as a whole, the same on all ranks."""
    metrics = {}
    # rank 0 computes and tells the others, so that all take the same decisions
    if du.world()[0] == 0:
        loss = -log_likelihood(log_hazard, *report.outcome(sets["val"])) / report.outcome(sets["val"])[1].sum()
        metrics = {"val/loss": loss} | report.score(log_hazard, sets["val"], sets["all"], args.eval_years)
    return du.broadcast_object(metrics)


def evaluate(model: RiskNet, sets: dict, batch_size: int, run: Run, args: Namespace) -> dict[str, float]:
    """All ranks: metrics of the validation fold with the current weights."""
    return score_fold(predict_parts(model, sets["val"], batch_size, run, args).sum(1), sets, args)


def fit_rivals(sets: dict, cox_models: dict[str, dict]) -> dict[str, tuple]:
    """{name: (log-hazards of val, baseline)} of models that see columns alone: those of fit_cox_models() and a forest.

    In place of a random survival forest, which comes under the GPL, it is one on the martingale residuals of a model
    that knows nothing (Therneau, Grambsch and Fleming 1990).
    """
    from sklearn.ensemble import RandomForestRegressor

    val, train = sets["val"], sets["all"]
    time, event = report.outcome(train)
    x_val, x_train = (data.columns[data.rows].astype(float) for data in (val, train))
    baseline = report.fit_baseline(np.zeros(len(time)), train)
    found = {"kaplan_meier": (np.zeros(len(x_val)), baseline)}
    for name, model in cox_models.items():
        beta = np.array(model["beta"])
        found[name] = x_val @ beta, report.fit_baseline(x_train @ beta, train)
    forest = RandomForestRegressor(500, min_samples_leaf=10, max_features="sqrt", random_state=0)
    hazard = -np.log(report.survival(baseline, np.zeros(1), time)[0])
    found["forest"] = forest.fit(x_train, event - hazard).predict(x_val), None
    return found


def test(
    model: RiskNet,
    sets: dict,
    batch_size: int,
    run: Run,
    args: Namespace,
    title: str,
    cox_models: dict[str, dict],
    rivals: dict[str, tuple],
    baseline: dict,
    unseen: np.ndarray | None,
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """All ranks, at the end of a run and of --eval_only: table with rivals, predictions, figure; (metrics, risks).

    rivals: besides those of fit_rivals(). baseline: of these weights. Where it holds their `step` alone, the rest is
    fitted here, to `unseen`: (n, 2) parts of the training cases' log-hazards by networks that were not trained on them,
    or without it to those of this model.
    """
    own, known = (predict_parts(model, sets[name], batch_size, run, args) for name in ("val", "all"))
    metrics, risks = score_fold(own.sum(1), sets, args), {}
    name = "eval_" if args.eval_only else ""
    with du.agree_on_errors():
        if run.ranks.is_main:
            if "time" not in baseline:
                baseline |= report.fit_reference(known if unseen is None else unseen, sets["all"])
                baseline |= {"centres": known.mean(0).tolist()}
                baseline |= {"linear": model.linear.tolist(), "image_weight": float(model.image_weight)}
            tables = {
                part: report.predictions(sets[part], [(parts, baseline)], args.eval_years)
                for part, parts in (("val", own), ("all", known))
            }
            log_hazard = tables["val"]["log_hazard"].to_numpy()
            models = {"network": (log_hazard, baseline)} | rivals
            models |= fit_rivals(sets, cox_models) | report.true_risk(sets["val"])
            metrics |= report.print_table(title, models, sets, args.eval_years, args.stratum_column)
            risks = {model: risk for model, (risk, _) in models.items()}
            tables = [tables["val"].assign(fold="val"), tables["all"].assign(fold="train")]
            with run.writing():
                pd.concat(tables).to_csv(run.folder / f"{name}predictions.csv", index=False)
                figure = report.draw(log_hazard, sets["val"], args.eval_years, baseline, metrics)
                run.figure(f"{name}val_survival", figure)
                if not args.eval_only:
                    run.write_summary("baseline", baseline)
    return du.broadcast_object(metrics), risks


# --- the run ----------------------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """AdamW over all parameters, those that are frozen at first included; of none where there is no image part."""
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(0))]
    return torch.optim.AdamW(parameters, args.learning_rate, weight_decay=args.weight_decay, fused=True)


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


@dataclass
class Inputs:
    """What the model sees of a cohort: its columns (rows, n), of which the first are `clinical` ones, and volumes."""

    cohort: Cohort
    fitted: list[dict]
    columns: np.ndarray
    clinical: int
    volumes: Volumes

    def sets(self, rows: dict[str, np.ndarray], args: Namespace) -> dict[str, MultiGPUSurvivalDataset]:
        """A data set of each of these rows; of "train" what the smart cache has of "all"."""
        options = {"columns": self.columns, "volumes": self.volumes}
        sets = {name: MultiGPUSurvivalDataset(self.cohort, rows=part, **options) for name, part in rows.items()}
        if "all" in sets:
            smart = {name: getattr(args, name) for name in ("use_smart_cache", "cache_rate", "replace_rate", "seed")}
            sets["train"] = MultiGPUSurvivalDataset(self.cohort, rows=rows["all"], **options, **smart)
        return sets


def read_inputs(
    cohort: Cohort, fitted: list[dict], rows: np.ndarray, args: Namespace, train: np.ndarray | None = None
) -> Inputs:
    """All ranks: encode the columns of these rows and read all their volumes once, which also measures them.

    fitted: of fit_columns(). train: rows on which the image numbers are fitted, where `fitted` has none yet.
    """
    names = ("image_size", "hu_window", "spacing", "mask_margin", "cache_dir")
    mask_mode = args.mask_column and args.mask_mode
    orientation = None if args.orientation == "as-is" else args.orientation
    volumes = Volumes(mask_mode=mask_mode, orientation=orientation, **{name: getattr(args, name) for name in names})
    with du.agree_on_errors():
        clinical = encode_columns(cohort, [column for column in fitted if column["name"] not in NUMBERS])
    if args.image == "none":
        return Inputs(cohort, fitted, clinical, clinical.shape[1], volumes)
    data = MultiGPUSurvivalDataset(cohort, rows=rows, volumes=volumes)
    refuse(data.check(args.num_workers), "volumes cannot be used")
    du.print_main(f"volumes: {describe(data.summaries, orientation)}")
    sizes = data.summaries[:, :3]
    if not args.spacing and (sizes.max(0) > 1.1 * sizes.min(0)).any():
        du.print_main("warning: voxel sizes vary by more than 10 %, which the network does not see; see --spacing")
    if train is not None:
        measured = [name for name in NUMBERS if (cohort.table[name].iloc[train] != "nan").any()]
        fitted = fitted + fit_columns(cohort, measured, train)
    measured = encode_columns(cohort, [column for column in fitted if column["name"] in NUMBERS])
    return Inputs(cohort, fitted, np.hstack([clinical, measured]), clinical.shape[1], volumes)


def largest_batch(model: RiskNet, size: int) -> dict:
    """Made-up cases of one micro-batch."""
    return {
        "image": torch.zeros(size, *model.shape, dtype=torch.float16),
        "columns": torch.zeros(size, len(model.linear)),
    }


def trial_step(model: RiskNet, batch: dict, args: Namespace) -> None:
    """Forward and backward pass of one micro-batch; the gradients stay in the model."""
    log_hazard = model(du.to_device(batch, next(model.parameters()).device))
    size = len(log_hazard)
    cox_loss(log_hazard, 1.0 + torch.arange(size), torch.ones(size, dtype=torch.bool)).backward()


def begin_training(
    run: Run, model: RiskNet, inputs: Inputs, sets: dict, precision: str, cox_models: dict[str, dict], described: str
) -> tuple[Training, DataLoader]:
    """All ranks: the linear part becomes the strongest Cox model, and the training begins; with its loader."""
    args, ranks, train = run.args, run.ranks, sets["all"]
    name, beta, penalty = strongest(cox_models)
    if not run.checkpoint:
        model.linear.copy_(torch.from_numpy(beta))
    batch_size, effective = args.batch_size, args.effective_batch_size
    if not run.checkpoint and not effective:
        # the guide's batch is that of all GPUs
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
        # not before, as the ranks try batches by themselves
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    options = {"seed": args.seed, "num_workers": args.num_workers}
    loader = du.create_distributed_dataloader(
        sets["train"], batch.micro_batch_size, True, batch.global_batch_size, batch.gpu_shares, **options
    )

    case = train.cohort.case[train.rows]
    (time, event), (_, val_event) = report.outcome(train), report.outcome(sets["val"])
    digest = hashlib.sha256(repr([case.tolist(), time.tolist(), event.tolist()]).encode()).hexdigest()[:8]
    invariants = {"training cases": f"{len(case)}, digest {digest}"}
    if args.use_smart_cache:
        invariants["smart cache"] = f"{len(sets['train'])} cases, {sets['train'].replaced} replaced after each epoch"
    banner = {
        "precision": described,
        "linear part": f"{name.replace('_', ' ')}, ridge penalty {penalty:.3g}",
        "events": f"{event.sum()} in training; {val_event.sum()} of {len(val_event)} in validation",
        "model": f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters",
    }
    steps = args.num_epochs * loader.batch_sampler.steps_per_epoch()
    plan = Plan(batch, steps, ["loss", "events"], invariants, banner)
    extra = {"columns": inputs.fitted, "trained_cases": sorted(set(case.tolist())), "cox_models": cox_models}
    engine = make_engine(model, make_optimizer(model, args), precision, args, ranks.device, saved=run.checkpoint)
    return Training(run, args, engine, plan, lambda: extra), loader


def train_epochs(training: Training, model: RiskNet, loader: DataLoader, sets: dict | None = None) -> int:
    """All ranks: train to the end of the run, evaluating `sets` after each epoch; exit code after a signal, or 0."""
    run, args = training.run, training.args
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
        metrics = evaluate(model, sets, training.batch.micro_batch_size, run, args) if sets else {}
        training.record(metrics, headline="val/c_index")
    return 0


def weigh_by_folds(
    training: Training, inputs: Inputs, train: MultiGPUSurvivalDataset, precision: str, cox_models: dict[str, dict]
) -> tuple[int, dict, np.ndarray | None]:
    """All ranks: find what the image part is worth on training cases that it was not trained on.

    --inner_folds times a network learns from all training cases but one part, as a run in a folder inner_..., which
    resumes as one. Returns (exit code after a signal, weigh_image()'s results by name, (n, 2) parts of the
    training cases' log-hazards by networks that have not seen them).
    """
    args, ranks, rows, cohort = training.args, training.ranks, train.rows, inputs.cohort
    fold = deal(cohort.case[rows], cohort.event[rows], np.ones(len(rows), bool), args.inner_folds, args.seed)
    image, sizes = np.zeros(len(rows)), training.batch
    own = {"batch_size": sizes.micro_batch_size, "effective_batch_size": sizes.global_batch_size, "auto_batch": False}
    own |= {"gpu_shares": ",".join(map(str, sizes.gpu_shares)), "resume_from": "auto" if args.resume_from else None}
    own |= {"max_steps": 0, "profile": None, "wandb": None}
    for left_out in range(1, args.inner_folds + 1):
        du.print_main(f"\n--- what the image adds: inner fold {left_out} of {args.inner_folds}")
        own["output_dir"] = f"{args.output_dir}/inner_{left_out}_of_{args.inner_folds}"
        run = Run(FORMAT, with_flags(args, **own), ranks, ADVICE, MODEL_FLAGS)
        sets = inputs.sets({"all": rows[fold != left_out], "val": rows[fold == left_out]}, args)
        weights = run.checkpoint and run.checkpoint["model"]
        network = build_model(run.args, precision, ranks.device, inputs.columns.shape[1], weights)
        models = known_cox_models(run, sets["all"], inputs.clinical)
        inner, loader = begin_training(run, network, inputs, sets, precision, models, described=precision)
        with inner:
            code = train_epochs(inner, network, loader)
            if not code:
                held_out = predict_parts(network, sets["val"], inner.batch.micro_batch_size, run, args)[:, 1]
                # dropped: each network's own constant, which carries no information
                image[fold == left_out] = held_out - held_out.mean()
        late = inner.signalled() or training.signalled()
        if late and not code:
            du.print_main("signal: saved after an inner fold; --resume_from auto continues from there")
        code = code or late
        if code:
            return code, {}, None
    x = inputs.columns[rows].astype(float)
    with du.agree_on_errors():
        found = weigh_image(x, image, train, *strongest(cox_models)[1:]) if ranks.is_main else None
    linear, weight, chi2 = du.broadcast_object(found)
    effect = f"counts {weight:.2f}" if weight else "adds nothing, and the network is the Cox model of its columns"
    du.print_main(f"the image, on cases that it was not trained on: chi2 {chi2:.1f}; it {effect}")
    found = {"linear": linear.tolist(), "image_weight": weight, "image_chi2": chi2}
    return 0, found, np.column_stack([x @ linear, weight * image])


def weigh_parts(model: RiskNet, weighed: dict | None) -> None:
    """Weigh the model's parts as weigh_by_folds() found, or as baseline.json says; without either they stay."""
    if weighed:
        model.linear.copy_(torch.tensor(weighed["linear"], dtype=torch.float64))
        model.image_weight.fill_(weighed["image_weight"])


def score_checkpoint(
    model: RiskNet, sets: dict, run: Run, args: Namespace, cox_models: dict[str, dict], rivals: dict[str, tuple]
) -> None:
    """--eval_only. Raises InputError where the validation fold has cases that the model was trained on."""
    seen = set(sets["val"].cohort.case[sets["val"].rows]) & set(run.checkpoint["trained_cases"])
    if seen:
        raise InputError(f"--val_fold: the model was trained on {min(seen)} and {len(seen) - 1} more of its cases")
    baseline = report.read_baseline(run.folder, run.position.step)
    weigh_parts(model, baseline)
    if not baseline:
        du.print_main("warning: not the weights that the run ended with: the image part is not weighed")
    baseline = baseline or {"step": run.position.step}
    metrics, _ = test(model, sets, run.micro_batch_size, run, args, "val", cox_models, rivals, baseline, None)
    run.write_summary("eval_val", metrics)


def train_fold(args: Namespace, ranks: du.Ranks, precision: str, described: str) -> tuple[int, tuple | None]:
    """One fold from start to end; (exit code, (metrics, validation set, risks by model), None after a signal)."""
    cross_validates = args.folds and args.val_fold
    # nothing is written before the Training, so every mistake is reported before a run is touched
    run = Run(FORMAT, args, ranks, ADVICE, MODEL_FLAGS)
    # with the checkpoint's model flags
    args, is_new = run.args, run.checkpoint is None
    cohort = read_table(args.csv_path, args)
    with du.agree_on_errors():
        train, val = choose_fold(cohort, args.fold_column, args.train_fold, args.val_fold, args.folds or 0, args.seed)
        fitted = fit_columns(cohort, args.clinical_columns, train) if is_new else run.checkpoint["columns"]
        report.strata(cohort, args.stratum_column, train)
    inputs = read_inputs(cohort, fitted, np.concatenate([train, val]), args, train if is_new else None)
    sets = inputs.sets({"all": train, "val": val}, args)
    with du.agree_on_errors():
        rivals = report.read_rival(args.rival_run, sets["val"])
    with du.agree_on_errors():
        weights = (run.checkpoint or {}).get("model")
        model = build_model(args, precision, ranks.device, inputs.columns.shape[1], weights)
    # frees the checkpoint's copy
    del weights
    cox_models = known_cox_models(run, sets["all"], inputs.clinical)
    if args.eval_only:
        score_checkpoint(model, sets, run, args, cox_models, rivals)
        return 0, None

    training, loader = begin_training(run, model, inputs, sets, precision, cox_models, described)
    steps, batch_size = training.planned_steps, training.batch.micro_batch_size
    with training:
        if not steps and is_new:
            training.record(evaluate(model, sets, batch_size, run, args), headline="val/c_index")
        code = train_epochs(training, model, loader, sets)
        if code:
            return code, None
        weighed, unseen = {}, None
        events = cohort.event[train].sum()
        if events < 4 * args.inner_folds and steps:
            du.print_main(f"warning: {events} events are too few to weigh the image part; it counts 1")
        # not where --max_steps has cut the training short
        elif args.inner_folds and 0 < run.position.step == steps:
            training.flush()
            code, weighed, unseen = weigh_by_folds(training, inputs, sets["all"], precision, cox_models)
            if code:
                return code, None

        step = run.position.step if cross_validates else training.load_best()
        weigh_parts(model, weighed)
        is_best = not cross_validates and run.position.best is not None
        title = "val, best.pt (chosen on this fold)" if is_best else "val, last step"
        baseline = {"step": step}
        results, risks = test(model, sets, batch_size, run, args, title, cox_models, rivals, baseline, unseen)
        results |= {f"val/{name}": weighed[name] for name in ("image_weight", "image_chi2") if weighed}
        last = training.last_logged("val/c_index")
        if not cross_validates and last is not None:
            results["val/c_index_last"] = last
        training.finish(results)
        # a signal since the last step: a single run is done, of a cross-validation no further fold begins
        code = training.signalled() if cross_validates else 0
    return code, (results, sets["val"], risks)


def cross_validate(args: Namespace, ranks: du.Ranks, precision: str, described: str) -> int:
    """--folds: all of them, --repeats times, each scored at its last epoch; what they give together."""
    # rank 0 looks, as another may see an older state of a shared folder
    if du.broadcast_object(Path(args.output_dir, "run_id").exists()):
        raise InputError(f"{args.output_dir}: holds a single run; choose another folder for --folds")
    results = []
    for repeat in range(args.repeats):
        for fold in range(1, args.folds + 1):
            folder = Path(args.output_dir, f"repeat_{repeat + 1}", f"fold_{fold}")
            rival_run = args.rival_run and str(Path(args.rival_run, *folder.parts[-2:]))
            own = {"output_dir": str(folder), "val_fold": str(fold), "seed": args.seed + repeat, "rival_run": rival_run}
            du.print_main(f"\n--- repeat {repeat + 1} of {args.repeats}, fold {fold} of {args.folds}")
            code, result = train_fold(with_flags(args, **own), ranks, precision, described)
            if code:
                return code
            results.append((repeat + 1, fold, *result))
    if ranks.is_main:
        report.print_cross_validation(Path(args.output_dir), results, args)
    return 0


def predict(args: Namespace, ranks: du.Ranks, precision: str) -> None:
    """--predict: the mean log-hazard of all models in the folder (the folds of a cross-validation), or of one."""
    folders = [] if args.resume_from else du.broadcast_object(report.folds_of(Path(args.output_dir)))
    risks, trained = [], set()
    for folder in folders or [Path(args.output_dir)]:
        own = with_flags(args, output_dir=str(folder), resume_from="auto" if folders else args.resume_from)
        run = Run(FORMAT, own, ranks, ADVICE, MODEL_FLAGS)
        own = run.args
        cohort = read_table(args.predict, own, outcome=False)
        rows = np.arange(len(cohort))
        inputs = read_inputs(cohort, run.checkpoint["columns"], rows, own)
        with du.agree_on_errors():
            model = build_model(own, precision, ranks.device, inputs.columns.shape[1], run.checkpoint["model"])
        baseline = report.read_baseline(folder, run.position.step)
        weigh_parts(model, baseline)
        data = inputs.sets({"new": rows}, own)["new"]
        risks.append((predict_parts(model, data, run.micro_batch_size, run, own), baseline))
        trained |= set(run.checkpoint["trained_cases"])
    if ranks.is_main:
        report.predict(Path(args.output_dir), data, risks, args, trained)


def run_task(args: Namespace, ranks: du.Ranks) -> int:
    """Train one fold or all of them, or --eval_only, or --predict; returns the exit code."""
    precision, described = set_precision(args.mixed_precision, ranks.device, args.deterministic, convolves_3d=True)
    if args.predict:
        predict(args, ranks, precision)
        return 0
    if args.folds and not args.val_fold:
        return cross_validate(args, ranks, precision, described)
    return train_fold(args, ranks, precision, described)[0]


def main(args: Namespace) -> int:
    # without --world_size: one for each GPU, which only torch can count
    launch_workers(args.world_size or torch.cuda.device_count())
    with du.setup_distributed(args.dist_timeout) as ranks:
        return run_task(args, ranks)


if __name__ == "__main__":
    run_main(main, ARGS)
